"""The LoRA adapters that clients may name, and their places in the engine's memory.

An adapter keeps its place until the last request that uses it has ended. Until then no other gets it, whatever becomes
of its name. Knows no engine and no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from inferd.engine.api.adapter import AdapterFiles
from inferd.engine.api.errors import RequestError
from inferd.engine.api.held_files import HeldFiles
from inferd.engine.api.wire.params import Adapter


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """One adapter, from the request to load it until its place is free again."""

    name: str
    path: Path
    adapter: Adapter
    created: int
    """Unix seconds."""
    held: HeldFiles
    """Its files, open as long as it has a place."""
    is_from_start: bool = False
    """Whether the settings name it: a model that cannot load it does not start."""
    num_requests: int = 0
    """Number of sequences that use it and have not ended."""
    is_leaving: bool = False
    """Whether new requests are refused."""
    is_loaded: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is loaded, or cannot be."""
    error: str = ""
    """Why it could not be loaded."""


class AdapterPlaces:
    """The places of all adapters."""

    def __init__(self, num_places: int = 0, read: Callable[[Path], AdapterFiles] | None = None) -> None:
        """`read` checks an adapter's files against the model, and may raise `ModelError`."""
        assert read is not None or not num_places
        self._read = read
        self._places: list[ServedAdapter | None] = [None] * num_places

    def __iter__(self) -> Iterator[ServedAdapter]:
        """Every adapter that has a place, in the order of places."""
        return (served for served in self._places if served is not None)

    @property
    def num_places(self) -> int:
        return len(self._places)

    @property
    def named(self) -> dict[str, ServedAdapter]:
        """The adapters that requests may name, by name."""
        return {served.name: served for served in self if served.is_loaded and not served.is_leaving}

    def find(self, adapter: Adapter) -> ServedAdapter | None:
        """The adapter at that place, if it is the same."""
        served = self._places[adapter.index]
        return served if served is not None and served.adapter == adapter else None

    def read(self, name: str, path: Path) -> AdapterFiles:
        """The adapter's files, if there is a place for it. Raises `RequestError` or `ModelError`."""
        self._check(name)
        assert self._read is not None
        return self._read(path)

    def add(self, name: str, files: AdapterFiles, *, is_from_start: bool = False) -> ServedAdapter:
        """Give an adapter a place. Raises `RequestError` if there is none, or its name is in use."""
        self._check(name)
        index = self._places.index(None)
        adapter, now = Adapter(index, files.digest), int(time.time())
        served = ServedAdapter(name, files.path, adapter, now, files.held, is_from_start)
        self._places[index] = served
        return served

    def _check(self, name: str) -> None:
        if any(served.name == name and not served.is_leaving for served in self):
            raise RequestError(
                "invalid_value", f"The adapter '{name}' is loaded already; unload it first.", "lora_name"
            )
        if None not in self._places:
            raise RequestError("invalid_value", self._full(), "lora_name")

    def settle(self, served: ServedAdapter, error: str) -> None:
        """It is loaded, or has an error and leaves."""
        served.is_loaded, served.error = not error, error
        if error:
            self.leave(served)
        served.settled.set()

    def leave(self, served: ServedAdapter) -> None:
        """Refuse new requests. The place is free when the last running one has ended."""
        served.is_leaving = True
        self._free(served)

    def hold(self, adapter: Adapter, num_requests: int, *, is_admitted: bool) -> None:
        """Count sequences that begin to use an adapter. Raises `RequestError` if it is no longer there, or if it leaves
        and they do not belong to a request that `is_admitted`."""
        served = self.find(adapter)
        if served is None or (served.is_leaving and not is_admitted):
            message = "The adapter that this request names was unloaded."
            raise RequestError("model_not_found", message, "model")
        served.num_requests += num_requests

    def release(self, adapter: Adapter) -> None:
        """A sequence that used it has ended."""
        served = self.find(adapter)
        assert served is not None and served.num_requests > 0, "an adapter lost its place while it was used"
        served.num_requests -= 1
        self._free(served)

    @contextmanager
    def held(self, adapter: Adapter | None) -> Iterator[None]:
        """Keep an adapter in its place while a request sends one piece after another. Raises as `hold`."""
        if adapter is None:
            yield
            return
        self.hold(adapter, 1, is_admitted=False)
        try:
            yield
        finally:
            self.release(adapter)

    def _free(self, served: ServedAdapter) -> None:
        if served.is_leaving and not served.num_requests and self.find(served.adapter) is served:
            self._places[served.adapter.index] = None

    def _full(self) -> str:
        if not self._places:
            return (
                "This server has no memory for adapters. Start it with --max-loras, or with --lora for those that it "
                "should serve from the start."
            )
        leaving = sum(served.is_leaving for served in self)
        waiting = f" {leaving} of them are unloaded when the requests that use them have ended." if leaving else ""
        return (
            f"There is memory for {len(self._places)} adapters, and all of it is used.{waiting} Unload one, or start "
            "the server with a larger --max-loras."
        )
