"""The life of one model's engines, as requests see it: one state, and the changes that are allowed.

`ModelLifecycle.change` alone changes the state. Beside it, a shutdown has a course of its own: engines die and recover
until the last accepted request has ended. Knows no engine, no stream and no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from msgspec import Raw

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import Phase
from inferd.server.errors import messages as errors


class State(Enum):
    """Each state says whether an engine takes requests, and what becomes of a request that comes then."""

    STARTING = "starting"
    """The server starts its first engines. Requests are refused."""
    SERVING = "serving"
    """An engine takes requests."""
    RECOVERING = "recovering"
    """All engines were lost, and others come. For a while requests wait for those."""
    UNLOADED = "unloaded"
    """The engines were stopped. The next request has others started, and waits for them."""
    LOADING = "loading"
    """Engines start after an unload or a sleep. Requests wait for them."""
    PAUSED = "paused"
    """The engines run, and finish what was accepted. New requests are refused until somebody wakes the model."""
    SLEEPING = "sleeping"
    """The engines were stopped. Requests are refused until somebody wakes the model. Accepted ones wait for that."""
    FAILED = "failed"
    """No engine can run, and the server goes on with other models. Requests are refused until somebody loads it."""
    STOPPED = "stopped"
    """No engine will run any more, because the server ends. Requests are refused."""


CHANGES: Mapping[State, frozenset[State]] = {
    State.STARTING: frozenset({State.SERVING, State.FAILED, State.STOPPED}),
    State.SERVING: frozenset({State.RECOVERING, State.UNLOADED, State.PAUSED, State.FAILED, State.STOPPED}),
    State.RECOVERING: frozenset({State.SERVING, State.UNLOADED, State.PAUSED, State.FAILED, State.STOPPED}),
    State.UNLOADED: frozenset({State.LOADING, State.SLEEPING, State.FAILED, State.STOPPED}),
    # An unload waits for no load: it is refused.
    State.LOADING: frozenset({State.SERVING, State.FAILED, State.STOPPED}),
    # Its engines may have died meanwhile.
    State.PAUSED: frozenset(
        {State.SERVING, State.RECOVERING, State.SLEEPING, State.UNLOADED, State.FAILED, State.STOPPED}
    ),
    State.SLEEPING: frozenset({State.LOADING, State.UNLOADED, State.FAILED, State.STOPPED}),
    State.FAILED: frozenset({State.UNLOADED}),
    # Another model's end has ended the server, and then this model's engines fail too.
    State.STOPPED: frozenset({State.FAILED}),
}
"""State -> those that may follow it."""


class Shutdown(Enum):
    """The course of the server's end, for one model. It only goes forward."""

    NOT_BEGUN = 0
    LEAVING = 1
    """Probes learn that the server is about to stop. Requests are still taken."""
    DRAINING = 2
    """New requests are refused, and accepted ones continue."""


class ModelLifecycle:
    """The state of one model's engines, and of the server's shutdown."""

    def __init__(self, model_name: str, outage_grace_s: float) -> None:
        """`outage_grace_s`: seconds in RECOVERING after which new requests are refused."""
        self._model_name = model_name
        self._state, self._failure, self._since_s = State.STARTING, "", time.monotonic()
        self._outage_grace_s = outage_grace_s
        self._shutdown = Shutdown.NOT_BEGUN
        self.has_served = False
        """Whether every replica has had an engine that took requests."""
        self.loaded = asyncio.Event()
        """Set while every replica has had an engine that took requests since the engines were last stopped."""
        self.settled = asyncio.Event()
        """Set except in STARTING and LOADING: it is known whether engines run."""
        self.awake = asyncio.Event()
        """Set except in PAUSED and SLEEPING."""
        self.awake.set()
        self.draining = asyncio.Event()
        """Set once new requests are refused."""

    @property
    def state(self) -> State:
        return self._state

    @property
    def failure(self) -> str:
        """Why the model is in FAILED; empty in all other states."""
        return self._failure

    @property
    def has_ended(self) -> bool:
        """Whether no engine is to run, and every stream was ended."""
        return self._state in (State.FAILED, State.STOPPED)

    @property
    def is_first_start(self) -> bool:
        """Whether the model has never served, and nobody stopped its engines: a death of one ends the server."""
        stopped = (State.UNLOADED, State.LOADING, State.SLEEPING)
        return not self.loaded.is_set() and self._state not in stopped

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken. For a while they are taken without an engine too, and wait for the next one."""
        if self.is_draining:
            return False
        if self._state is State.RECOVERING:
            return time.monotonic() - self._since_s < self._outage_grace_s
        return self._state in (State.SERVING, State.UNLOADED, State.LOADING)

    @property
    def is_asleep(self) -> bool:
        """Whether requests are refused until somebody wakes the model. Its engines may still run."""
        return self._state in (State.PAUSED, State.SLEEPING)

    @property
    def is_leaving(self) -> bool:
        """Whether the server is about to stop: probes learn it, and requests may still be taken."""
        return self._shutdown is not Shutdown.NOT_BEGUN

    @property
    def is_draining(self) -> bool:
        return self._shutdown is Shutdown.DRAINING

    def check_alive(self) -> None:
        """Raises `RequestError` if no engine is to run."""
        if self._state is State.FAILED:
            raise errors.model_not_loaded(self._model_name, self._failure)
        if self._state is State.STOPPED:
            raise RequestError("server_is_overloaded", "The engine is not running; it cannot take requests.")

    def change(self, to: State, failure: str = "") -> None:
        """The one place that changes the state. `failure`: why, for FAILED alone. `CHANGES` must have the change."""
        assert to in CHANGES[self._state], f"{self._state.value} cannot become {to.value}"
        assert bool(failure) == (to is State.FAILED), f"{to.value} with the reason {failure!r}"
        self._state, self._failure, self._since_s = to, failure, time.monotonic()
        if to is State.SERVING:
            self.has_served = True
            self.loaded.set()
        if to in (State.UNLOADED, State.SLEEPING):
            self.loaded.clear()
        if self.is_asleep:
            self.awake.clear()
        else:
            self.awake.set()
        if to is State.LOADING:
            self.settled.clear()
        else:
            self.settled.set()

    def leave(self) -> None:
        """Make probes send requests elsewhere."""
        if self._shutdown is Shutdown.NOT_BEGUN:
            self._shutdown = Shutdown.LEAVING

    def drain(self) -> None:
        """Refuse new requests from now on; accepted ones continue."""
        self._shutdown = Shutdown.DRAINING
        self.draining.set()


@dataclass(slots=True)
class Hooks:
    """The router's calls to the owner of a model's engines. Each is None until the owner sets it."""

    on_wanted: Callable[[], None] | None = None
    """Called once when stopped engines are to start."""
    on_unload: Callable[[bool], Awaitable[None]] | None = None
    """Stops the engines, and gives the memory of their KV pools up, unless it is called with True. Returns when what
    is given up is free."""
    on_recovered: Callable[[int, float], None] | None = None
    """Called with (requests sent again, seconds for which no engine computed them)."""
    on_phase: Callable[[int, Phase], None] | None = None
    """Called with a replica and a phase of its start that has ended."""
    on_kv_events: Callable[[int, Raw], None] | None = None
    """Called with a replica and KV events of its cache."""

    def report_cache(self, index: int, events: Raw) -> None:
        """Publish KV events of a replica's cache, if somebody subscribes."""
        if self.on_kv_events is not None:
            self.on_kv_events(index, events)
