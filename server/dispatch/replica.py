"""The places for engines: the engine that serves in each now, its streams, what it last said of itself, and which
of them gets a request.

Engines come and go, and the replicas stay. The load balancer chooses the replica that would have to compute least
before the request's first token. With one replica there is no choice, and nothing is remembered.

That is the part of the prompt that the replica's prefix cache should not hold, behind the prompts that wait there
already. Each stream there counts as some tokens more, because it takes part in every step. What a cache should hold is
known from the requests that were sent there: the chain of hashes of their blocks, as the engine's own index has it, for
as many blocks as the cache has. A wrong guess costs time and never a token. Knows no queue and no HTTP.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from inferd.engine.api.errors import EngineDeadError
from inferd.engine.api.numerics import Numerics, check_numerics
from inferd.engine.api.wire.client import EngineClient
from inferd.engine.api.wire.messages import EngineStats, Ready, ResetPrefixCache, Submit, ToEngine
from inferd.engine.api.wire.params import Adapter
from inferd.server.dispatch.token_stream import TokenStream


@dataclass(slots=True, eq=False)
class Replica:
    """One replica. The router and its parts (`Loading`, `AdapterLoading`, `Recovery`, `LiveStreams`) change it. Its
    supervisor sets `lends_cores`, `failure` and `on_up`."""

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
    reset: ResetPrefixCache | None = None
    """Sent to the next engine first: the cache was to be cleared while there was none."""
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


STREAM_TOKENS = 64
"""Prompt tokens that a stream counts for. A decode and a token of a prompt each take a row of a step. So this is about
how much of the stream's answer a new request would share the engine with."""
_MAX_BLOCKS = 2**17
"""Most blocks of one replica that are remembered: some 20 MB."""
_KEY_BYTES = 16


class LoadBalancer:
    """The choice among replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._only = replicas[0] if len(replicas) == 1 else None
        self._seen: tuple[OrderedDict[bytes, None], ...] = tuple(OrderedDict() for _ in replicas)
        """Keys of the blocks that each replica should hold, the longest unused first."""
        self._num_placed = 0
        self._last_placed = [0] * len(replicas)

    def place(self, submit: Submit, emitted_ids: Sequence[int] = ()) -> Replica | None:
        """The replica for a request behind the tokens already delivered; None if no engine takes requests.

        The request counts as waiting there until `began` or `ended`.
        """
        if self._only is not None:
            return self._only if self._only.is_up else None
        up = [replica for replica in self._replicas if replica.is_up]
        if not up:
            return None
        keys = self._keys(submit, emitted_ids)
        num_tokens = len(submit.prompt_ids) + len(emitted_ids)
        uncached = {replica.index: self._uncached(replica, keys, num_tokens) for replica in up}
        best = min(up, key=lambda replica: self._cost(replica, uncached[replica.index]))
        best.waiting[submit.request_id] = uncached[best.index]
        self._num_placed += 1
        self._last_placed[best.index] = self._num_placed
        self._remember(best, keys)
        return best

    def ended(self, replica: Replica, stream: TokenStream) -> None:
        """A request has ended there: the next turn of its conversation finds its answer too."""
        if stream.emitted_ids and self._only is None:
            self._remember(replica, self._keys(stream.submit, stream.emitted_ids))

    def forget(self, replica: Replica) -> None:
        """Its prefix cache is empty."""
        self._seen[replica.index].clear()

    def _cost(self, replica: Replica, num_tokens: int) -> tuple[int, int, int]:
        """Number of tokens that the request would wait for there. Among equals, fewer streams win, and then the replica
        that was chosen longest ago."""
        num_streams = len(replica.streams)
        waiting = sum(replica.waiting.values())
        return num_tokens + waiting + STREAM_TOKENS * num_streams, num_streams, self._last_placed[replica.index]

    def _uncached(self, replica: Replica, keys: Sequence[bytes], num_tokens: int) -> int:
        """Number of the request's tokens that the replica's cache should not hold."""
        seen = self._seen[replica.index]
        num_blocks = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
        return num_tokens - num_blocks * self._block_size

    def _remember(self, replica: Replica, keys: Sequence[bytes]) -> None:
        """As the engine evicts them, a block is older than those before it in its chain."""
        seen = self._seen[replica.index]
        for key in reversed(keys):
            seen[key] = None
            seen.move_to_end(key)
        assert replica.ready is not None
        while len(seen) > min(replica.ready.num_blocks, _MAX_BLOCKS):
            seen.popitem(last=False)

    def _keys(self, submit: Submit, emitted_ids: Sequence[int]) -> list[bytes]:
        """The key of each full block of a request."""
        params, scheduling = submit.params, submit.scheduling
        root = f"{scheduling.cache_salt}\0{params.adapter.digest if params.adapter is not None else ''}"
        ids, size = array("i", submit.prompt_ids), self._block_size
        ids.extend(emitted_ids)
        content, width = ids.tobytes(), size * ids.itemsize
        key, keys = root.encode(), []
        for start in range(0, len(content) - width + 1, width):
            key = hashlib.blake2b(key + content[start : start + width], digest_size=_KEY_BYTES).digest()
            keys.append(key)
        return keys

    @property
    def _block_size(self) -> int:
        return next(replica.ready.block_size for replica in self._replicas if replica.ready is not None)
