"""The files of a checkpoint that a server holds open: which they are, and a digest of the texts among them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from inferd.engine.api.checkpoint import CONFIG_FILES, INDEX_FILE, Checkpoint, weight_files
from inferd.engine.api.errors import ModelError
from inferd.engine.api.gguf import is_gguf
from inferd.engine.api.held_files import HeldFiles
from inferd.engine.api.pinned_files import PinnedFile, digest_of_all, documents_among

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
        weights: list[Path] = []
        with contextlib.suppress(ModelError, OSError):
            weights = weight_files(path)
        is_folder = not is_gguf(path)
        self._engine = HeldFiles([*(path / name for name in ENGINE_FILES if is_folder), *weights])
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
