"""Reads the header of a GGUF file of the hub, without its weights: a plan needs no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from huggingface_hub import DryRunFileInfo, constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, but imported there only
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)

from inferd.engine.api.errors import ModelError
from inferd.engine.arch.gguf.header import MAX_HEADER_BYTES, GgufError, Header, HeaderCutError, parse_header
from inferd.engine.arch.gguf.metadata import FACTOR_TENSORS

_FIRST_BYTES = 4 * 2**20
"""Bytes that are read at first. If the header is longer, each further read doubles what is there."""
_HTTP_ERROR = cast("type[Exception]", HfHubHTTPError.__base__)
"""The base of all errors of the hub's HTTP client. Which library that is depends on the hub's own version."""


@contextmanager
def without_weights(repo_id: str, files: Sequence[DryRunFileInfo]) -> Iterator[Path]:
    """The first of local copies of `files`, with zeros in place of the weights. They take no space, and are deleted at
    the end. Raises `ModelError`.
    """
    with TemporaryDirectory(prefix="inferd-plan-") as folder:
        copies = [_copy(repo_id, file, Path(folder)) for file in files]
        yield copies[0]


def _copy(repo_id: str, file: DryRunFileInfo, folder: Path) -> Path:
    url = hf_hub_url(repo_id, file.filename, revision=file.commit_hash)
    copy, size = folder / Path(file.filename).name, file.file_size or 0
    try:
        with copy.open("wb") as stream:
            stream.truncate(size)
            data, header = _header(url, size)
            stream.write(data)
            for tensor in header.tensors:
                if tensor.name in FACTOR_TENSORS:
                    stream.seek(tensor.begin)
                    stream.write(_range(url, tensor.begin, tensor.begin + min(tensor.num_bytes, _FIRST_BYTES)))
    except GgufError as error:
        raise ModelError(f"{file.filename} of {repo_id}: {error}") from error
    except (OSError, _HTTP_ERROR) as error:
        raise ModelError(f"cannot read the header of {file.filename} of {repo_id}: {error}") from error
    return copy


def _header(url: str, size: int) -> tuple[bytes, Header]:
    """(the first bytes of a file of `size`, the header in them)."""
    data, most = b"", min(size, MAX_HEADER_BYTES)
    while True:
        data += _range(url, len(data), min(max(_FIRST_BYTES, 2 * len(data)), most))
        try:
            return data, parse_header(data, size)
        except HeaderCutError:
            if len(data) == most:
                raise


def _range(url: str, begin: int, end: int) -> bytes:
    """The bytes from `begin` to `end`. Refuses an answer with the whole file before it is read."""
    headers = build_hf_headers() | {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    with http_stream_backoff("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as answer:
        hf_raise_for_status(answer)
        if (answer.status_code, answer.headers.get("Content-Length")) != (206, str(end - begin)):
            raise ModelError(f"{url} must be sent in parts, but the hub answered {answer.status_code}")
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise ModelError(
                f"{url} must be sent as it is, but the hub sent it as {answer.headers['Content-Encoding']}"
            )
        return answer.read()
