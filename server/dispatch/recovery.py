"""Carries streams over the end of an engine: to the other replicas, or else to the next engine.

Each is sent again behind the tokens that it was given, so its reader sees a pause. The quarantine decides which request
ended the engine, and is failed. Knows no processes and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from inferd.engine.api.wire.kv_events import CLEARED
from inferd.engine.api.wire.messages import EngineStats, Failure, Ready
from inferd.server.dispatch.adapter_loading import AdapterLoading
from inferd.server.dispatch.hooks import Hooks
from inferd.server.dispatch.live_streams import LiveStreams
from inferd.server.dispatch.load_balancer import LoadBalancer
from inferd.server.dispatch.model_lifecycle import ModelLifecycle, State
from inferd.server.dispatch.quarantine import Quarantine
from inferd.server.dispatch.replica import Replica, Replicas
from inferd.server.observability.metrics import Metrics

logger = logging.getLogger("inferd.server.dispatch.router")
"""The router's logger, whose name is in the log lines of operators."""

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
        waiting = lost.keys() | self._streams.unsent.keys()
        self._streams.unsent = {name: stream for name, stream in self._streams.by_id.items() if name in waiting}
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
