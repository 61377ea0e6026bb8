"""SHA-256 of a model's weight files. The server makes it while it serves the model, a little at a time.

It stands beside the fingerprint, which must not wait for it, and never changes that. The server keeps a result by the
file's inode, size and time of change, so that the next server knows it at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from inferd.engine.api.files import cache_folder
from inferd.engine.api.pinned_files import PinnedFile

logger = logging.getLogger("inferd.server")

_SUFFIXES = (".safetensors", ".gguf")
_PIECE_BYTES = 16 * 2**20
_REST = 9.0
"""Time between two pieces, as a multiple of the time that one takes: hashing takes a tenth of a core at most."""
_MAX_KEPT = 4096
_CACHE = "weights.json"


class WeightsDigest:
    """The hashes of one model's weight files."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: place of the results; by default in the user's cache."""
        self._cache = (folder or cache_folder("digests")) / _CACHE
        self.known: dict[str, str] = {}
        """Name of a file -> SHA-256 of its content, as far as they were made."""

    async def run(self, files: Sequence[PinnedFile]) -> None:
        """Hash those of the files that hold weights. One that was written to is left out."""
        kept = await asyncio.to_thread(self._read_kept)
        for file in [each for each in files if each.path.endswith(_SUFFIXES)]:
            key = _key_of(file)
            found = None if key is None else kept.get(key) or await self._hash(file)
            if key is None or found is None or _key_of(file) != key:
                logger.warning("%s was written to, so its weights are not hashed", file.path)
                continue
            self.known[Path(file.path).name] = found
            if key not in kept:
                kept[key] = found
                await asyncio.to_thread(self._keep, kept)
                logger.info("%s has SHA-256 %s", Path(file.path).name, found)

    async def _hash(self, file: PinnedFile) -> str | None:
        made = hashlib.sha256()
        for begin in range(0, file.num_bytes, _PIECE_BYTES):
            started_s = time.monotonic()
            piece = await asyncio.to_thread(_read, file.opened, begin)
            if piece is None:
                return None
            await asyncio.to_thread(made.update, piece)
            await asyncio.sleep(_REST * (time.monotonic() - started_s))
        return made.hexdigest()

    def _read_kept(self) -> dict[str, str]:
        try:
            kept = json.loads(self._cache.read_bytes())
        except (OSError, ValueError):
            return {}
        return {str(key): str(value) for key, value in kept.items()} if isinstance(kept, dict) else {}

    def _keep(self, kept: dict[str, str]) -> None:
        newest = dict(list(kept.items())[-_MAX_KEPT:])
        try:
            self._cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._cache.parent, delete=False) as file:
                json.dump(newest, file)
            Path(file.name).replace(self._cache)
        except OSError as error:
            logger.debug("the hashes of weights cannot be kept in %s: %s", self._cache, error)


def _key_of(file: PinnedFile) -> str | None:
    """Identity of an open file whose content is as it was pinned; None if it was written to."""
    try:
        about = os.stat(file.opened)
    except OSError:
        return None
    is_same = (about.st_size, about.st_mtime_ns) == (file.num_bytes, file.mtime_ns)
    return f"{about.st_dev}:{about.st_ino}:{about.st_size}:{about.st_mtime_ns}" if is_same else None


def _read(path: str, begin: int) -> bytes | None:
    try:
        with open(path, "rb", buffering=0) as source:
            return os.pread(source.fileno(), _PIECE_BYTES, begin)
    except OSError:
        return None
