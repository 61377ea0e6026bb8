"""The places for engines: the engine that serves in each now, its streams, and what it last said of itself.

Engines come and go, and the replicas stay. Knows no queue and no HTTP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from inferd.engine.api.errors import EngineDeadError
from inferd.engine.api.numerics import Numerics, check_numerics
from inferd.engine.api.wire.client import EngineClient
from inferd.engine.api.wire.messages import EngineStats, Ready, ToEngine
from inferd.engine.api.wire.params import Adapter
from inferd.server.dispatch.token_stream import TokenStream


@dataclass(slots=True, eq=False)
class Replica:
    """One replica. The router alone changes it."""

    index: int
    client: EngineClient | None = None
    """None until an engine is attached; nothing can be sent before."""
    is_up: bool = False
    """Whether its engine takes requests."""
    streams: dict[str, TokenStream] = field(default_factory=dict)
    """The streams that its engine knows."""
    waiting: dict[str, int] = field(default_factory=dict)
    """Number of tokens that those of them without a first token have to compute, as the load balancer expects it. Empty
    with only one replica."""
    lends_cores: bool = False
    """Whether other replicas compute on its cores, because it has no engine."""
    ready: Ready | None = None
    """Measurements of its engine at the start; None before the first was ready."""
    starting: Ready | None = None
    """Set while a new engine loads the adapters, before it is sent any request."""
    awaited: list[Adapter] = field(default_factory=list)
    """Adapters that it told its engine to load, and that are not loaded yet."""
    stats: EngineStats = field(default_factory=EngineStats)
    lost_s: float = 0.0
    """When the last engine that took requests was lost (monotonic)."""
    num_delivered: int = 0
    """Tokens and ends that its engines delivered so far: shows whether they make progress."""
    failure: str = ""
    """Why its engines keep dying, if they do so without delivering a token."""
    on_up: Callable[[], None] | None = None
    """Called each time an engine begins to take requests."""

    def send(self, message: ToEngine) -> None:
        """Raises `EngineDeadError` if the engine takes nothing."""
        assert self.client is not None, "no engine was attached"
        self.client.send(message)

    def try_send(self, message: ToEngine) -> None:
        """Send, and ignore an engine that takes nothing: it is dead or hangs, the supervisor replaces it, and streams
        wait for the next one."""
        with contextlib.suppress(EngineDeadError):
            self.send(message)

    def lose(self, now: float) -> dict[str, TokenStream]:
        """The engine is gone. Returns the streams that it knew."""
        if self.is_up:
            self.lost_s = now
        self.is_up, self.starting, self.stats = False, None, EngineStats()
        self.awaited.clear()
        self.waiting.clear()
        streams, self.streams = self.streams, {}
        return streams


class Replicas:
    """All replicas of one model, and what their engines share."""

    def __init__(self, num_replicas: int) -> None:
        self._all = tuple(Replica(index) for index in range(num_replicas))
        self._ready: Ready | None = None
        self.numerics: Numerics | None = None
        """Facts of the first engine that was ready. All later ones share them."""

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> Replica:
        return self._all[index]

    @property
    def is_up(self) -> bool:
        """Whether some engine takes requests."""
        return any(replica.is_up for replica in self._all)

    @property
    def have_begun(self) -> bool:
        """Whether each has had an engine that took requests since the model was last unloaded."""
        return all(replica.ready is not None for replica in self._all)

    @property
    def ready(self) -> Ready:
        """The first replica's measurements at its last start. Raises `EngineDeadError` before every replica was
        ready."""
        if self._ready is None:
            raise EngineDeadError("the engine is not ready yet")
        return self._ready

    @property
    def num_delivered(self) -> int:
        """Tokens and ends delivered to streams so far."""
        return sum(replica.num_delivered for replica in self._all)

    def keep_ready(self) -> None:
        """Keep the first replica's measurements, also for the time when the model is unloaded."""
        self._ready = self._all[0].ready

    def take_numerics(self, ready: Ready) -> None:
        """The first engine decides. Raises `ChangedError` if another does not compute the same."""
        if self.numerics is None:
            self.numerics = ready.numerics
        else:
            check_numerics(self.numerics, ready.numerics)
