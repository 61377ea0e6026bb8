"""Puts a model to sleep: what becomes of its requests, and how much is given up.

A model that is asleep refuses requests until somebody wakes it. `Loading` stops its engines and starts them again.
Knows no socket and no HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Literal

from inferd.server.dispatch.live_streams import LiveStreams
from inferd.server.dispatch.loading import Loading
from inferd.server.dispatch.model_lifecycle import Hooks, ModelLifecycle, State
from inferd.server.errors import messages as errors

Level = Literal[0, 1, 2]
"""At 0 the engines stay. At 1 they end, and the server keeps the memory of their KV pools if it holds it. At 2 it gives
that up too."""
Mode = Literal["abort", "wait", "keep"]
"""Whether unfinished answers are aborted, are finished first, or go on when the model wakes."""


class Sleeping:
    """The sleep of one model."""

    def __init__(self, lifecycle: ModelLifecycle, streams: LiveStreams, loading: Loading, hooks: Hooks) -> None:
        self._lifecycle, self._streams, self._loading, self._hooks = lifecycle, streams, loading, hooks
        self._level: Level = 0

    @property
    def level(self) -> Level | None:
        """How deep the model sleeps; None if it is awake."""
        return self._level if self._lifecycle.is_asleep else None

    async def sleep(self, level: Level, mode: Mode) -> None:
        """Refuse requests from now on. Returns when what the level gives up is free. One that sleeps already may sleep
        deeper. Raises `RequestError` if the model is being loaded, or is woken or ended first."""
        lifecycle = self._lifecycle
        self._check_stays()
        if level == 0 and mode == "keep":
            rule = "Level 0 stops no engine, and an engine finishes what it has. Use level 1, or another mode."
            raise errors.unsupported_value("mode", mode, rule)
        self._loading.check_loaded()
        if not lifecycle.is_asleep:
            lifecycle.change(State.SLEEPING if lifecycle.state is State.UNLOADED else State.PAUSED)
            self._level = 0
        if mode == "abort":
            self._streams.abort_all()
        while mode != "keep" and lifecycle.state is State.PAUSED and self._streams.num_active:
            await self._streams_ended()
        if level and lifecycle.state is State.PAUSED:
            self._loading.leave_engines(State.SLEEPING)
        self._level = max(self._level, level)
        if level and self._hooks.on_unload is not None:
            await self._hooks.on_unload(level == 1)

    async def wake(self) -> None:
        """Returns when requests are taken. A model that is awake stays as it is. Raises `RequestError` if it cannot be
        loaded."""
        if self._lifecycle.is_asleep:
            await self._loading.load()

    def end(self) -> None:
        """The server takes no more requests: abort answers that wait for the model to wake."""
        if self._lifecycle.state is State.SLEEPING:
            self._streams.abort_all()

    def _check_stays(self) -> None:
        """Raises `RequestError` if the server or the model ends."""
        if self._lifecycle.is_draining:
            raise errors.leaving()
        self._lifecycle.check_alive()

    async def _streams_ended(self) -> None:
        """Wait until no stream is left. Raises `RequestError` if the model does not stay paused so long."""
        events = self._streams.drained(), self._lifecycle.draining.wait(), self._lifecycle.awake.wait()
        waits = [asyncio.ensure_future(event) for event in events]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        self._check_stays()
        if waits[2] in done or not self._lifecycle.is_asleep:
            raise errors.woken()
