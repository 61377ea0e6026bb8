"""Holds files open for the life of a server, those of a checkpoint too, and says what identifies their content.

Only the server imports this. It opens the files before it reads them, and looks afterwards whether their names still
lead to them. So everything that it read, and every engine reads, is of the same files.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from inferd.engine.api.checkpoint import CONFIG_FILES, INDEX_FILE, Checkpoint, weight_files
from inferd.engine.api.errors import ModelError
from inferd.engine.api.gguf import is_gguf
from inferd.engine.api.pinned_files import OPEN_FLAGS, PinnedFile, digest_of, digest_of_all, documents_among
from inferd.engine.api.sentence_folder import sentence_files

_MAX_COVERED_BYTES = 16 * 2**20
"""A file of up to so many bytes is covered completely, which takes 10 ms (AMD EPYC, Zen 4, 2026-11-28)."""
_MAX_FIRST_BYTES = 64 * 2**20
_MAX_PAGES = 1024
"""Most pages of all weight files together: one in each tensor, or of so many tensors."""


class HeldFiles:
    """Some files that this process holds open, until nothing refers to this object."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """A file that cannot be opened is left out, and its reader says why."""
        self._descriptors: dict[Path, int] = {}
        self.pinned: tuple[PinnedFile, ...] = ()
        """The files, once `pin` was called."""
        for path in paths:
            with contextlib.suppress(OSError):
                descriptor = os.open(path, OPEN_FLAGS)
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    self._descriptors[path] = descriptor
                else:
                    os.close(descriptor)

    def __del__(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __contains__(self, path: object) -> bool:
        return path in self._descriptors

    def __len__(self) -> int:
        return len(self._descriptors)

    def pin(self, begins: Mapping[Path, Iterable[tuple[int, int]]] | None = None) -> None:
        """Say what identifies each file. Raises `ModelError` if a name leads to another file by now, or the file was
        written to meanwhile.

        `begins`: (first byte, number of bytes) of each tensor of the large files.
        """
        begins = begins or {}
        share = _MAX_PAGES // max(len(begins), 1)
        pinned = []
        for path, descriptor in self._descriptors.items():
            try:
                about, named = os.fstat(descriptor), os.stat(path)
                num_bytes, (num_first, pages) = about.st_size, _covered(about.st_size, begins.get(path, ()), share)
                found = digest_of(descriptor, num_bytes, num_first, pages)
            except OSError as error:
                raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
            if _identity(about) != _identity(named):
                raise ModelError(f"{path} was replaced or written to while the server read it: start the server again")
            opened = f"/proc/{os.getpid()}/fd/{descriptor}"
            pinned.append(
                PinnedFile(
                    path=str(path),
                    opened=opened,
                    num_bytes=num_bytes,
                    mtime_ns=about.st_mtime_ns,
                    inode=about.st_ino,
                    ctime_ns=about.st_ctime_ns,
                    num_first_bytes=num_first,
                    pages=pages,
                    digest=found,
                )
            )
        self.pinned = tuple(pinned)


def _identity(about: os.stat_result) -> tuple[int, ...]:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _covered(num_bytes: int, tensors: Iterable[tuple[int, int]], most: int) -> tuple[int, tuple[int, ...]]:
    """(number of bytes at the beginning, pages behind them) that the digest of a file covers: its header, and the
    middle of each tensor, or of `most` tensors."""
    if num_bytes <= _MAX_COVERED_BYTES:
        return num_bytes, ()
    places = sorted(tensors)
    first = min([begin for begin, _ in places] or [num_bytes])
    step = -(-len(places) // max(most, 1))
    return min(first, _MAX_FIRST_BYTES), tuple(begin + size // 2 for begin, size in places[:: max(step, 1)])


ENGINE_FILES = (*CONFIG_FILES, INDEX_FILE, "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""Files beside the weights that engines read."""
_SERVER_FILES = (
    "chat_template.jinja", "chat_template.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "tiktoken.model", "tekken.json",
)  # fmt: skip
"""Files that only the server reads, once. They belong to what the fingerprint covers."""
_TEMPLATES = "additional_chat_templates"


class HeldCheckpoint:
    """The files of one checkpoint."""

    def __init__(self, path: Path) -> None:
        """A checkpoint that cannot be read has none, and its reader says why."""
        weights, sentences = list[Path](), list[Path]()
        with contextlib.suppress(ModelError, OSError):
            weights = weight_files(path)
        with contextlib.suppress(ModelError, OSError):
            sentences = sentence_files(path)
        is_folder = not is_gguf(path)
        own = [*(path / name for name in ENGINE_FILES if is_folder), *weights, *sentences]
        self._engine = HeldFiles(dict.fromkeys(own))
        texts = [*(path / name for name in _SERVER_FILES), *sorted((path / _TEMPLATES).glob("*.jinja"))]
        self._server = HeldFiles(texts if is_folder else ())
        self.texts_digest = ""
        """Digest of `documents` and of what only the server reads, once `pin` was called."""

    def __len__(self) -> int:
        return len(self._engine)

    @property
    def pinned(self) -> tuple[PinnedFile, ...]:
        """The files that engines read, once `pin` was called."""
        return self._engine.pinned

    @property
    def documents(self) -> tuple[PinnedFile, ...]:
        """Those of them that are no safetensors: what a tokenizer is made from, and all of a GGUF file."""
        return documents_among(self.pinned)

    def pin(self, checkpoint: Checkpoint) -> None:
        """Call this when all was read. Raises `ModelError` if a file changed since it was opened."""
        begins: dict[Path, list[tuple[int, int]]] = {}
        for info in (*checkpoint.tensors.values(), *checkpoint.left_out.values()):
            begins.setdefault(info.file, []).append((info.begin, info.num_bytes))
        for file in begins:
            if file not in self._engine:
                raise ModelError(f"{file} cannot be held open: raise the limit on open files (ulimit -n)")
        self._engine.pin(begins)
        self._server.pin()
        self.texts_digest = digest_of_all((*self.documents, *self._server.pinned))
        self._server = HeldFiles(())
