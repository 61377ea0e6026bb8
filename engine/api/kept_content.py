"""Content that takes long to make, kept in the user's cache for the next start: tokenizers and their tables.

An entry is named by a digest of all that its content is made from. It begins with a digest of its name and its content,
so that a damaged entry is found and made anew. Several servers may share the folder: entries appear whole, and two
entries of one name are equal.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from inferd.engine.api.files import cache_folder, open_regular, refuse_others

logger = logging.getLogger("inferd.server")

FOLDER = "tokenizers"
_DIGEST_BYTES = hashlib.sha256().digest_size
_MIN_BYTES = 2**20
"""Shorter content is made about as fast as it is read."""
_MAX_BYTES = 2**28
"""Most bytes of all entries. A vocabulary of 262,144 tokens has 12 MB of tokenizer.json, and 16 MB of tables."""


def kept_content(made_from: tuple[bytes, ...], made_by: tuple[str, ...], make: Callable[[], bytes]) -> bytes:
    """The result of `make`, from this call or an earlier start. If the folder cannot be used, the log says so once.

    `made_from`: all that the content depends on, beside the version of the `tokenizers` library. `made_by`: names of
    the modules that make it.
    """
    entry = cache_folder(FOLDER) / _name_of((*made_from, *map(_source_of, made_by)))
    try:
        refuse_others(entry.parent)
        found = _read(entry)
    except OSError as error:
        _tell_once(entry.parent, error.strerror or str(error))
        return make()
    if found is not None:
        return found
    content = make()
    if _MIN_BYTES <= len(content) <= _MAX_BYTES // 2:
        try:
            _keep(entry, content)
        except OSError as error:
            _tell_once(entry.parent, error.strerror or str(error))
    return content


def _name_of(parts: tuple[bytes, ...]) -> str:
    made = hashlib.sha256(f"{version('tokenizers')} {sys.byteorder}".encode())
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.hexdigest()


@cache
def _source_of(module: str) -> bytes:
    file = sys.modules[module].__file__
    assert file is not None
    return Path(file).read_bytes()


def _read(entry: Path) -> bytes | None:
    """The content; None if there is none, or if it is damaged. Raises `OSError`."""
    try:
        with open_regular(entry) as file:
            digest, content = file.read(_DIGEST_BYTES), file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    if _digest(entry, content) != digest:
        logger.warning("%s is damaged, so its content is made anew", entry)
        return None
    with suppress(OSError):
        os.utime(entry)  # entries that nobody reads go first
    return content


def _keep(entry: Path, content: bytes) -> None:
    """Raises `OSError`."""
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_others(entry.parent)
    descriptor, name = tempfile.mkstemp(dir=entry.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_digest(entry, content))
            file.write(content)
        os.replace(name, entry)
    except BaseException:
        os.unlink(name)
        raise
    _remove_oldest(entry.parent)


def _digest(entry: Path, content: bytes) -> bytes:
    made = hashlib.sha256(entry.name.encode())
    made.update(content)
    return made.digest()


def _remove_oldest(folder: Path) -> None:
    """Remove what was not used for longest, until the folder is within its bound. Files of writers that were killed are
    among it."""
    found = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another server has removed it
            about = path.stat()
            found.append((about.st_mtime_ns, about.st_size, path))
    num_bytes = 0
    for _, size, path in sorted(found, reverse=True):
        num_bytes += size
        if num_bytes > _MAX_BYTES:
            path.unlink(missing_ok=True)


@cache
def _tell_once(folder: Path, reason: str) -> None:
    logger.warning("nothing is kept in %s, so that each start makes the tokenizer anew: %s", folder, reason)
