"""Loads adapters while steps run: one thread reads their files, the worker's copies the weights between two steps. The
slots of a step's new requests get their adapters before its layers."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from inferd.engine.api.errors import ChangedError, ModelError, StartError
from inferd.engine.api.pinned_files import adapter_pinned
from inferd.engine.api.wire.messages import AdapterLoaded, LoadAdapter
from inferd.engine.arch.description import Arch
from inferd.engine.lora.adapters import Adapters, read_updates
from inferd.engine.worker.executor import WorkerThread
from inferd.engine.worker.step import Step, StepPart

logger = logging.getLogger(__name__)


class AdaptedSlots(StepPart):
    """Gives each slot its request's adapter."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    def before_layers(self, step: Step) -> None:
        for admission in step.plan.admissions:
            adapter = admission.params.adapter
            self._adapters.assign(admission.slot, None if adapter is None else adapter.index)


class AdapterLoader:
    """Gives adapters of one worker their weights, in the order of the messages."""

    def __init__(self, adapters: Adapters, arch: Arch, thread: WorkerThread) -> None:
        """`thread`: the one on which the worker runs its steps."""
        self._adapters, self._arch, self._thread = adapters, arch, thread
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inferd-adapters")
        self._loading: list[tuple[LoadAdapter, Future[None]]] = []

    @property
    def is_busy(self) -> bool:
        """Whether `ended` will have something."""
        return bool(self._loading)

    def load(self, message: LoadAdapter) -> None:
        """Load an adapter. Steps that were launched before find the weights that its index had."""
        self._loading.append((message, self._reader.submit(self._load, message)))

    def ended(self) -> list[AdapterLoaded]:
        """The adapters that are loaded by now, or cannot be."""
        found = []
        while self._loading and self._loading[0][1].done():
            message, future = self._loading.pop(0)
            error = future.exception()
            if error is not None and not isinstance(error, StartError):
                logger.error("adapter %s cannot be loaded", message.path, exc_info=error)
            found.append(AdapterLoaded(message.adapter, "" if error is None else str(error) or type(error).__name__))
        return found

    def _load(self, message: LoadAdapter) -> None:
        try:
            with adapter_pinned(message.files):
                updates = read_updates(Path(message.path), message.adapter.digest, self._arch, self._adapters.max_rank)
                self._thread.submit(self._adapters.put, message.adapter.index, updates).result()
        except ChangedError as error:
            rule = "has changed since it was loaded: unload it, and load it again"
            raise ModelError(f"the adapter in {message.path} {rule}") from error
