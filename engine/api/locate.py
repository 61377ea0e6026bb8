"""Finds a model's directory: the embedded model, a local directory, or a model of the hub, which is downloaded.

The engine gets the directory and does not import this module: importing the hub's library takes a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from inferd.engine.api.checkpoint import EMBEDDED_PATH
from inferd.engine.api.errors import ModelError

EMBEDDED_NAME = "tiny"
"""Name of the embedded model on the command line."""

_FILE_SUFFIXES = (".gguf", ".json", ".safetensors")
"""A name with such an ending is a file. No hub id has one."""

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.txt", "*.model")


def locate(model: str, revision: str | None = None, files: Sequence[str] = _HUB_FILES) -> Path:
    """The directory of `model`: the embedded one, a local directory, or a hub id (downloaded, with progress on stderr).

    `files` are patterns of the files to download. With `HF_HUB_OFFLINE=1` only cached files are used. Raises
    `ModelError`.
    """
    if model == EMBEDDED_NAME:
        return EMBEDDED_PATH
    directory = _local_directory(model)
    if directory is not None:
        return directory
    if model.endswith(_FILE_SUFFIXES):
        raise ModelError(f"no file {model}; give a directory, a hub id (organisation/name) or `{EMBEDDED_NAME}`")
    if model.startswith((".", "/", "~")):
        raise ModelError(f"no directory {model}")
    if model.count("/") != 1:
        hint = "" if "/" in model else f"; the embedded model is `{EMBEDDED_NAME}`"
        raise ModelError(f"{model} is neither a directory nor a hub id (organisation/name){hint}")
    return _download(model, revision, files)


def _local_directory(model: str) -> Path | None:
    """The directory named `model`; None if nothing has that name. Raises `ModelError` for a file, and if the path
    cannot be read."""
    path = local_path(model)
    if path is None:
        return None
    if not path.is_dir():
        raise ModelError(f"{model} is a file; give the directory that holds its config.json")
    return path.resolve()


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


def _download(repo_id: str, revision: str | None, files: Sequence[str]) -> Path:
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(files)))
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            why, way_out = "HF_HUB_OFFLINE is set", "unset it to download"
        else:
            why, way_out = "the hub cannot be reached", "download it on a machine with a network"
        raise ModelError(
            f"{repo_id} is not in the local cache and {why}: {way_out}, or give a local directory"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(f"the hub refused {repo_id}: {_first_line(error)}") from error
    except (HFValidationError, ValueError) as error:
        raise ModelError(f"{repo_id} is not a hub id: {_first_line(error)}") from error
    except OSError as error:
        raise ModelError(f"downloading {repo_id} failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
