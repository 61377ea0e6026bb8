"""Carries streams over the end of an engine: to the other replicas, or else to the next engine.

Each is sent again behind the tokens that it was given, so its reader sees a pause. The quarantine decides which request
ended the engine, fails it, and refuses it for a while.

Suspects are the requests in the steps that ran when the engine died; its flight recorder names them. Most deaths have
another cause, so all suspects continue together at first. If a second engine dies before a suspect is past that
position, the suspect runs alone there. If a third engine dies with it alone, it is failed, and equal requests are
refused. A death with another likely cause is weaker evidence: the engine was killed from outside (as the kernel does
when memory runs out), fell silent, or lost a frame. Then two engines must die with the request alone.

Knows no processes and no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec import structs

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.kv_events import CLEARED
from inferd.engine.api.wire.messages import EngineStats, Failure, Ready, Submit
from inferd.server.dispatch.adapter_loading import AdapterLoading
from inferd.server.dispatch.live_streams import ROUTER_LOG, LiveStreams
from inferd.server.dispatch.model_lifecycle import Hooks, ModelLifecycle, State
from inferd.server.dispatch.replica import LoadBalancer, Replica, Replicas
from inferd.server.dispatch.token_stream import TokenStream
from inferd.server.observability.metrics import Metrics

logger = logging.getLogger(ROUTER_LOG)

ALONE_AFTER = 2
"""Deaths in a row after which a suspect runs alone. After one death already, 64 short answers resumed seconds later."""
FAILED_AFTER = 3
"""Deaths in a row, the last with the request alone, after which it is failed. A request that makes the engine end
itself costs at most so many restarts."""
FAILED_AFTER_ALONE = 2
"""Deaths with the request alone, if the last may be chance. At 1, three of 68 kills at random steps under a hundred
answers failed an innocent request."""
REFUSED_S = 600.0
_MAX_REFUSED = 1024
"""Digests kept; the oldest goes first."""


class Quarantine:
    """The quarantine of one server, over all its engines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[bytes, float] = {}
        """Digest -> time until which it is refused."""

    def check(self, submit: Submit) -> None:
        """Raises `RequestError` for a request that recently killed engines."""
        if not self._refused:
            return
        until_s = self._refused.get(_digest(submit), 0.0)
        left_s = until_s - self._clock()
        if left_s > 0:
            message = f"This request has repeatedly ended the engine and is not tried again for {left_s:.0f} s."
            raise RequestError("engine_error", message)

    def judge(
        self, in_flight: Mapping[int, int], streams: Iterable[TokenStream], *, is_external_kill: bool = False
    ) -> list[TokenStream]:
        """After a death: marks the suspects, and returns the requests to fail.

        `in_flight`: the dead engine's flight record, tag -> position that its step reaches. `is_external_kill`: the
        death need not have to do with any request.
        """
        culprits: list[TokenStream] = []
        for stream in streams:
            if not stream.is_suspect:
                stream.num_deaths = stream.num_deaths_alone = stream.reached = 0
            end = in_flight.get(stream.tag)
            if end is None:
                continue
            stream.num_deaths += 1
            stream.num_deaths_alone += len(in_flight) == 1
            least_alone = FAILED_AFTER_ALONE if is_external_kill else 1
            if stream.num_deaths >= FAILED_AFTER and len(in_flight) == 1 and stream.num_deaths_alone >= least_alone:
                culprits.append(stream)
                self._refuse(stream.submit)
            else:
                stream.reached = max(end, stream.reached)
        return culprits

    @staticmethod
    def replay(stream: TokenStream) -> Submit:
        """The submit of a request for the next engine."""
        return stream.replay(alone=stream.num_deaths >= ALONE_AFTER)

    def _refuse(self, submit: Submit) -> None:
        now = self._clock()
        self._refused = {digest: until_s for digest, until_s in self._refused.items() if until_s > now}
        if len(self._refused) >= _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._refused[_digest(submit)] = now + REFUSED_S


def _digest(submit: Submit) -> bytes:
    """The same for equal prompts and parameters of any caller; without the seed, which is drawn for each request."""
    repeated = submit.prompt_ids, structs.replace(submit.params, seed=0)
    return hashlib.blake2b(msgspec.msgpack.encode(repeated), digest_size=16).digest()


_REPLAYED_AT_ONCE = 2**17
"""Ids of requests sent again before other tasks of the event loop run (some milliseconds)."""

_ENDED_ENGINES = Failure("engine_error", "This request ended the engine each time it was tried, and was given up.")


class Recovery:
    """The recovery of one model's streams."""

    def __init__(
        self,
        lifecycle: ModelLifecycle,
        replicas: Replicas,
        streams: LiveStreams,
        balancer: LoadBalancer,
        quarantine: Quarantine,
        adapter_loading: AdapterLoading,
        metrics: Metrics,
        hooks: Hooks,
    ) -> None:
        self._lifecycle, self._replicas, self._streams = lifecycle, replicas, streams
        self._balancer, self._quarantine, self._adapter_loading = balancer, quarantine, adapter_loading
        self._metrics, self._hooks = metrics, hooks

    def lose(self, in_flight: Mapping[int, int], *, is_external_kill: bool = False, index: int = 0) -> list[str]:
        """A replica's engine is gone and another will come. `in_flight`, `is_external_kill`: as in `Quarantine.judge`.
        Returns the ids of the requests that it was computing.

        Its streams stay open, except those that were aborted and those that the quarantine fails: they end now.
        `send_waiting` sends the others to other replicas.
        """
        replica = self._replicas[index]
        awaited = tuple(replica.awaited)
        lost = replica.lose(time.monotonic())
        self._balancer.forget(replica)
        self._hooks.report_cache(index, CLEARED)
        if not self._replicas.is_up and self._lifecycle.state is State.SERVING:
            self._lifecycle.change(State.RECOVERING)
        if self._replicas.is_up:
            for adapter in awaited:
                self._adapter_loading.settle_if_loaded(adapter)
        self._metrics.engine_down(index)
        self._streams.backlog.forget_pace()
        for stream in lost.values():
            stream.num_restarts += 1
        computed = [stream.request_id for stream in lost.values() if stream.tag in in_flight]
        for culprit in self._quarantine.judge(in_flight, lost.values(), is_external_kill=is_external_kill):
            logger.error("request %s killed engines, also when it ran alone: it is failed", culprit.request_id)
            self._streams.fail(culprit, _ENDED_ENGINES)
        for stream in lost.values():
            if stream.abort_reason is not None and stream.request_id in self._streams.by_id:
                self._streams.end_aborted(stream)
        self._streams.hold(lost.keys())
        return computed

    async def send_waiting(self, index: int) -> None:
        """Send the streams of a replica whose engine is gone to the others, if one takes requests."""
        if self._streams.unsent and self._replicas.is_up:
            self._recovered(await self.replay(), self._replicas[index].lost_s)

    async def begin_if_loaded(self, replica: Replica) -> None:
        """Let an engine take requests, once it has loaded every adapter."""
        if replica.starting is not None and not replica.awaited:
            ready, replica.starting = replica.starting, None
            await self.begin(replica, ready)

    async def begin(self, replica: Replica, ready: Ready) -> None:
        """An engine takes requests: send it the live requests that no other has, in order of arrival."""
        is_first, was_up = replica.ready is None, self._replicas.is_up
        replica.ready, replica.is_up, replica.failure = ready, True, ""
        replica.stats = EngineStats(num_blocks=ready.num_blocks)
        if self._lifecycle.state is State.RECOVERING:
            self._lifecycle.change(State.SERVING)
        if replica.on_up is not None:
            replica.on_up()
        num_replayed = await self.replay()
        if not is_first and not was_up:
            self._recovered(num_replayed, replica.lost_s)
        if self._replicas.have_begun:
            self._replicas.keep_ready()
            self._streams.idle_since_s = time.monotonic()
            if self._lifecycle.state in (State.STARTING, State.LOADING):
                self._lifecycle.change(State.SERVING)

    def _recovered(self, num_replayed: int, lost_s: float) -> None:
        outage_s = time.monotonic() - lost_s
        self._metrics.recovered(num_replayed, outage_s)
        if self._hooks.on_recovered is not None:
            self._hooks.on_recovered(num_replayed, outage_s)

    async def replay(self) -> int:
        """Send the engines every stream that none knows, some at a time; returns how many those were.

        Meanwhile new requests wait behind them, and aborted ones end without reaching an engine. If an engine dies
        too, `lose` begins anew.
        """
        num_replayed = num_ids = 0
        while self._streams.unsent:
            stream = self._streams.unsent[next(iter(self._streams.unsent))]
            replica = self._balancer.place(stream.submit, stream.emitted_ids)
            if replica is None:
                break
            del self._streams.unsent[stream.request_id]
            replica.streams[stream.request_id] = stream
            replica.try_send(self._quarantine.replay(stream))
            num_replayed += 1
            num_ids += len(stream.submit.prompt_ids) + stream.num_generated
            if num_ids >= _REPLAYED_AT_ONCE:
                num_ids = 0
                await asyncio.sleep(0)
        return num_replayed
