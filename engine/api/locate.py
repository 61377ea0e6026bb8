"""Finds a model: the embedded one, smollm2, a local directory or GGUF file, or a model of the hub, which is downloaded.

The engine gets the path and does not import this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inferd.engine.api import smollm2
from inferd.engine.api.checkpoint import EMBEDDED_NAME, EMBEDDED_PATH
from inferd.engine.api.errors import ModelError
from inferd.engine.api.gguf import is_gguf

_FILE_SUFFIXES = (".gguf", ".json", ".safetensors")
"""A name with such an ending is a file. No hub id has one."""

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.txt", "*.model")


def locate(model: str, revision: str | None = None, files: Sequence[str] = _HUB_FILES) -> Path:
    """The path of `model`: the embedded one, smollm2, a local directory or GGUF file, or a model of the hub: its id, or
    `id:quant` for the one GGUF file that has `quant` in its name. Downloads show their progress on stderr.

    `files` are patterns of the files to download. With `HF_HUB_OFFLINE=1` only cached files are used. Raises
    `ModelError`.
    """
    if model == EMBEDDED_NAME:
        return EMBEDDED_PATH
    found = smollm2.find() if model == smollm2.NAME else _local(model)
    if found is not None:
        return found
    if model.endswith(_FILE_SUFFIXES):
        raise ModelError(f"no file {model}; give a directory, a hub id (organisation/name) or `{EMBEDDED_NAME}`")
    if model.startswith((".", "/", "~")):
        raise ModelError(f"no directory {model}; give another, a hub id (organisation/name) or `{EMBEDDED_NAME}`")
    if model.count("/") != 1 and model != smollm2.NAME:
        hint = "" if "/" in model else f"; models with a name of their own are `{EMBEDDED_NAME}` and `{smollm2.NAME}`"
        raise ModelError(f"{model} is neither a directory nor a hub id (organisation/name){hint}")
    # The hub's library takes 0.2 s of processor time to import, and most starts download nothing.
    from inferd.engine.api.hub import download  # noqa: PLC0415

    return download(model, revision, files)


def _local(model: str) -> Path | None:
    """The directory or GGUF file named `model`; None if nothing has that name. Raises `ModelError` for another file,
    and if the path cannot be read."""
    path = local_path(model)
    if path is None:
        return None
    if not path.is_dir() and not is_gguf(path):
        raise ModelError(f"{model} is a file; give a GGUF file, or the directory that holds its config.json")
    # The hub's cache links names of files to hashes, which have no ending and no other parts beside them.
    return path.resolve() if path.is_dir() else path.absolute()


def local_path(model: str) -> Path | None:
    """The file or directory named `model`; None if nothing has that name. Raises `ModelError` if the path cannot be
    read."""
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except RuntimeError as error:
        raise ModelError(f"{model} begins with the home of a user who has no home; give the whole path") from error
    except OSError as error:
        raise ModelError(f"cannot look at {model}: {error.strerror}") from error
