"""Loads weights from the checkpoint, or from what an earlier start packed; and keeps what this start packs.

Only models of our own on processors keep weights: their C++ kernels pack every matrix, which takes most of a start.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import torch

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.errors import StartError
from inferd.engine.api.memory.planner import format_bytes
from inferd.engine.api.pinned_files import PinnedFile, check_pinned
from inferd.engine.api.weight_cache import Entry, Mapped, name_of
from inferd.engine.arch.sharding import Rank
from inferd.engine.models.kept import Kept, NotKeptError, PackedWatch
from inferd.engine.models.loader import AnyModel
from inferd.kernels.cpu import native

logger = logging.getLogger("inferd.engine")

AnyDecoder = TypeVar("AnyDecoder", bound=AnyModel)

_WITHOUT = "each start packs them anew, and --no-weight-cache keeps none"
_WRITER_NICENESS = 10


class KeptWeights:
    """The packed weights of one model, in the user's cache."""

    @classmethod
    def of(cls, config: EngineConfig, files: Sequence[PinnedFile], rank: Rank, role: str) -> KeptWeights | None:
        """As `__init__`; None if such weights are not kept."""
        is_packed = config.device == "cpu" and bool(native.library_name()) and config.modelled is None
        return cls(config, files, rank, role) if config.weight_cache and is_packed else None

    def __init__(self, config: EngineConfig, files: Sequence[PinnedFile], rank: Rank, role: str) -> None:
        """`files`: those that the weights follow from. `role`: what the model is here, as "served" or "draft"."""
        # The digest of a large file covers some pages of it alone. Another file may have the same time of writing.
        contents = sorted((Path(f.path).name, f.digest, f.mtime_ns, f.inode, f.ctime_ns) for f in files)
        settings = (
            config.quantization, config.activations, config.keeps_blocks, config.dtype, config.weights_dtype,
            config.deterministic,
        )  # fmt: skip
        facts = (contents, settings, (rank.index, rank.count, rank.splits_inputs), role)
        self._name = name_of((*map(repr, facts), native.library_name(), str(torch.__version__)))
        self._files = tuple(files)
        # All that the name follows from but files and code, whose older entries go when a new one is written.
        parts = [
            role,  # an MTP layer lies in the served model's own files
            "blocks" if config.keeps_blocks else config.quantization,
            config.dtype if config.weights_dtype == config.dtype else f"{config.dtype} from {config.weights_dtype}",
            native.level(),
            *([f"activations as {config.activations}"] if config.activations != "own" else []),
            *(["deterministic"] if config.deterministic else []),
            *([f"rank {rank.index} of {rank.count}"] if rank.count > 1 else []),
            *(["inputs split"] if rank.splits_inputs else []),
        ]
        self._label = f"{config.model_path}, {', '.join(parts)} (inferd {version('inferd')})"
        self._may_wait = config.numerics is None
        """A later engine of a server packs the weights itself: streams wait for it."""
        self._entry: Entry | None = None
        self._num_threads = config.num_threads
        self._watch: PackedWatch | None = None
        self.is_mapped = False
        """Whether the weights are those that an earlier start packed."""

    def load(
        self, build: Callable[[], AnyDecoder], load: Callable[[AnyDecoder], None], planned_bytes: int
    ) -> tuple[AnyDecoder, int]:
        """A decoder that `build` made, with its weights: those that were kept, or as `load` reads them. Returns the
        bytes that are mapped too. `planned_bytes`: those of the weights."""
        mapped = self._open(planned_bytes)
        if mapped is not None:
            decoder = build()
            try:
                Kept(mapped).fill(decoder.parameters)
                self.is_mapped = True
                return decoder, mapped.num_bytes
            except NotKeptError as error:
                logger.error("the kept weights are not used, please report it: %s", error)
                assert self._entry is not None
                self._entry.remove()
        decoder = build()
        if self._entry is None or not self._entry.may_write:
            load(decoder)
            return decoder, 0
        self._watch = PackedWatch()
        with self._watch.watching(decoder.parameters):
            load(decoder)
        return decoder, 0

    def _open(self, planned_bytes: int) -> Mapped | None:
        try:
            self._entry = Entry(self._name, self._num_threads)
            return self._entry.open(planned_bytes, may_wait=self._may_wait)
        except OSError as error:
            self._entry = None
            logger.warning("packed weights cannot be kept: %s; %s", error, _WITHOUT)
            return None

    def write(self) -> None:
        """Write what this start has packed, on a thread of its own, so that later starts map it."""
        if self._watch is not None:
            threading.Thread(target=self._write, name="weight-cache", daemon=True).start()

    def _write(self) -> None:
        entry, watch, self._watch = self._entry, self._watch, None
        assert entry is not None and watch is not None
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)
        started_s = time.monotonic()
        try:
            if watch.failure:
                logger.error("the packed weights cannot be kept, please report it: %s", watch.failure)
                return
            check_pinned(self._files)  # one may have been written to while it was read
            num_bytes = entry.write(*watch.contents(self._label))
            text = "packed weights are kept for later starts: %s, written in %.1f s"
            logger.info(text, format_bytes(num_bytes), time.monotonic() - started_s)
        except (OSError, StartError) as error:
            logger.warning("packed weights cannot be kept: %s; %s", error, _WITHOUT)
        finally:
            entry.release()
