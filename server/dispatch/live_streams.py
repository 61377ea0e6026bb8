"""The streams that have not ended: which wait for an engine, what each was given, and the accounts of its end.

Every stream gets exactly one terminal delta, and leaves the queue, its replica and its adapter then. Knows no socket
and no lifecycle.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable

from inferd.engine.api.wire.messages import Delta, EngineStats, Failure
from inferd.server.dispatch.adapter_places import AdapterPlaces
from inferd.server.dispatch.admission import Backlog
from inferd.server.dispatch.replica import Replicas
from inferd.server.dispatch.token_stream import TokenStream
from inferd.server.observability.metrics import Metrics

ROUTER_LOG = "inferd.server.dispatch.router"
"""Name of the logger of the router and its parts, as it is in the log lines of operators."""


class LiveStreams:
    """The open streams of one model."""

    def __init__(
        self,
        replicas: Replicas,
        adapters: AdapterPlaces,
        metrics: Metrics,
        backlog: Backlog,
        e2e_target_s: float | None,
    ) -> None:
        self._replicas, self._adapters, self._metrics = replicas, adapters, metrics
        self._e2e_target_s = e2e_target_s
        self.backlog = backlog
        self.by_id: dict[str, TokenStream] = {}
        self.unsent: dict[str, TokenStream] = {}
        """Streams that no engine knows, in order of arrival; a subset of `by_id`."""
        self.idle_since_s = time.monotonic()
        """When the last stream ended, or the engines or an adapter were loaded."""
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_active(self) -> int:
        return len(self.by_id)

    @property
    def num_unsent(self) -> int:
        """Number of streams that wait for an engine."""
        return len(self.unsent)

    @property
    def held(self) -> EngineStats:
        """The streams that no engine knows, as an engine would count them in its queue."""
        num_tokens = sum(stream.num_waiting_tokens for stream in self.unsent.values())
        return EngineStats(num_waiting=len(self.unsent), num_tokens_waiting=num_tokens)

    @property
    def stats(self) -> EngineStats:
        """The sums over all replicas. Streams that wait for an engine are waiting too."""
        return EngineStats.total([*(replica.stats for replica in self._replicas), self.held])

    def num_waiting_by_tenant(self) -> dict[str, int]:
        """Tenant -> its sequences that no step has begun. Without keys there are no tenants."""
        return self.backlog.num_requests_by_tenant()

    def num_running_by_tenant(self) -> dict[str, int]:
        """Tenant -> its sequences that a step has begun."""
        begun = (stream.submit.scheduling.tenant for stream in self.by_id.values() if stream.has_begun)
        return Counter(tenant for tenant in begun if tenant)

    def adapter_requests(self) -> dict[str, tuple[int, int]]:
        """Name of each adapter that has a place -> its sequences that (run, wait)."""
        found = {served.name: (0, 0) for served in self._adapters}
        for stream in self.by_id.values():
            adapter = stream.submit.params.adapter
            served = None if adapter is None else self._adapters.find(adapter)
            if served is not None:
                running, waiting = found[served.name]
                found[served.name] = running + stream.has_begun, waiting + (not stream.has_begun)
        return found

    def add(self, streams: Iterable[TokenStream]) -> None:
        for stream in streams:
            self.by_id[stream.request_id] = stream
            self.backlog.add(stream.submit.scheduling.tenant, stream.num_waiting_tokens)
        self._is_idle.clear()

    def hold(self, lost: Iterable[str]) -> None:
        """Have the streams with these ids wait for an engine, because theirs is gone. Others that wait stay in the
        order of arrival."""
        waiting = self.unsent.keys() | lost
        self.unsent = {name: stream for name, stream in self.by_id.items() if name in waiting}

    def account(self, stream: TokenStream, delta: Delta, step_ended_s: float | None) -> None:
        """Record the times and tokens of a delta. The times are the engine's: a late event loop reads the outputs of
        several steps in one turn and would see no time between them."""
        if delta.scheduled_s is not None and not stream.has_begun:
            stream.scheduled_s = delta.scheduled_s
            self.backlog.remove(stream.submit.scheduling.tenant, stream.num_waiting_tokens)
        stream.journal(delta)
        if delta.embedding:
            stream.pooled_s = step_ended_s
        if not delta.token_ids:
            return
        assert step_ended_s is not None, f"{stream.request_id}: tokens of no step"
        num_gaps, since_s = len(delta.token_ids), stream.last_token_s
        if since_s is None:
            stream.first_token_s = since_s = step_ended_s
            self._metrics.first_token(step_ended_s - stream.submit.scheduling.arrival_s)
            num_gaps -= 1
        if num_gaps:
            self._metrics.tokens(num_gaps, step_ended_s - since_s)
        stream.last_token_s = step_ended_s

    def push(self, stream: TokenStream, delta: Delta) -> None:
        """Give a stream its next delta. The terminal one takes it out of everything."""
        stream.push(delta)
        if delta.finish_reason is None:
            return
        del self.by_id[stream.request_id]
        self.unsent.pop(stream.request_id, None)
        for replica in self._replicas:
            replica.streams.pop(stream.request_id, None)
            replica.waiting.pop(stream.request_id, None)
        if stream.submit.params.adapter is not None:
            self._adapters.release(stream.submit.params.adapter)
        if not self.by_id:
            self._is_idle.set()
            self.idle_since_s = time.monotonic()
        if not stream.has_begun:
            self.backlog.remove(stream.submit.scheduling.tenant, stream.num_waiting_tokens, has_begun=False)
        record = stream.record(delta.finish_reason, self._e2e_target_s)
        self._metrics.request_finished(record)
        if stream.trace is not None:
            stream.trace.ended(record, stream.num_restarts, self._metrics.model_name)

    def end_aborted(self, stream: TokenStream) -> None:
        """End a stream that no engine knows."""
        self.push(stream, Delta(request_id=stream.request_id, finish_reason="abort"))

    def fail(self, stream: TokenStream, failure: Failure) -> None:
        self.push(stream, Delta(request_id=stream.request_id, finish_reason="error", failure=failure))

    def fail_all(self, failure: Failure) -> None:
        for stream in tuple(self.by_id.values()):
            self.fail(stream, failure)

    def abort_all(self) -> None:
        for stream in tuple(self.by_id.values()):
            stream.abort()

    async def drained(self) -> None:
        """Return when no stream is left. After the last stream ended, a later piece of its request may have come."""
        await self._is_idle.wait()
        while self.by_id:
            await self._is_idle.wait()
