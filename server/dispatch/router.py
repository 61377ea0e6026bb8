"""The async request router: admits requests, sends them to the engine, and hands each token to the stream awaiting it.

It knows ids, deltas and finish reasons, not text and not HTTP. There are one or more replicas, each with an engine, and
the load balancer chooses one for each request. Beside it, `model_lifecycle` says whether requests are taken, `loading`
starts and stops the engines, and `sleeping` puts the model to sleep. `recovery` carries streams over an engine's end,
and `live_streams` holds those that have not ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from msgspec import structs

from inferd.engine.api.errors import RequestError, start_error
from inferd.engine.api.wire.client import EngineClient
from inferd.engine.api.wire.messages import (
    Abort,
    AdapterLoaded,
    CacheEvents,
    Failed,
    Phase,
    Ready,
    ResetPrefixCache,
    StepOutput,
    Submit,
    SubmitChoices,
)
from inferd.server.dispatch.adapter_loading import AdapterLoading
from inferd.server.dispatch.adapter_places import AdapterPlaces
from inferd.server.dispatch.admission import Backlog, QueueBounds
from inferd.server.dispatch.live_streams import LiveStreams
from inferd.server.dispatch.loading import Loading
from inferd.server.dispatch.model_lifecycle import Hooks, ModelLifecycle, State
from inferd.server.dispatch.recovery import Quarantine, Recovery
from inferd.server.dispatch.replica import LoadBalancer, Replica, Replicas
from inferd.server.dispatch.sleeping import Sleeping
from inferd.server.dispatch.token_stream import TokenStream
from inferd.server.errors import messages as errors
from inferd.server.observability.metrics import Metrics

_READ_AT_ONCE = 256
"""Deltas read before other tasks of the event loop run (some 3 ms)."""


def _cost_of(output: StepOutput) -> int:
    """Cost of reading a message, in deltas of one token; a part of a long prompt's log probabilities costs a full
    turn."""
    is_scored = bool(output.deltas) and bool(output.deltas[0].prompt_logprobs)
    return _READ_AT_ONCE if is_scored else len(output.deltas)


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Bounds on what may wait."""

    queue: QueueBounds = field(default_factory=QueueBounds)
    """Bounds on requests that the engine has not begun."""
    outage_grace_s: float = 10.0
    """Seconds without an engine after which new requests are refused; until then they wait for the next one."""
    e2e_target_s: float | None = None
    """Target from arrival to the last token; the metrics count the requests that meet it."""
    num_replicas: int = 1


class Router:
    """Connects the HTTP side to one or more replicas. Deltas of a replica arrive only while `run` runs for it."""

    def __init__(
        self,
        client: EngineClient | None,
        metrics: Metrics,
        options: RouterOptions | None = None,
        quarantine: Quarantine | None = None,
        adapters: AdapterPlaces | None = None,
    ) -> None:
        """`client`: that of the first replica's engine; None until `attach` provides one."""
        options, adapters = options or RouterOptions(), adapters or AdapterPlaces()
        self.adapters, self._metrics, self._quarantine = adapters, metrics, quarantine or Quarantine()
        self.hooks = hooks = Hooks()
        self.lifecycle = lifecycle = ModelLifecycle(metrics.model_name, options.outage_grace_s)
        self.replicas = replicas = Replicas(options.num_replicas)
        replicas[0].client = client
        self._balancer = balancer = LoadBalancer(replicas)
        self.streams = streams = LiveStreams(replicas, adapters, metrics, Backlog(options.queue), options.e2e_target_s)
        self.loading = Loading(lifecycle, replicas, streams, balancer, adapters, metrics, hooks)
        self.sleeping = Sleeping(lifecycle, streams, self.loading, hooks)
        self.adapter_loading = AdapterLoading(adapters, lifecycle, replicas, streams, self.loading)
        self.recovery = Recovery(
            lifecycle, replicas, streams, balancer, self._quarantine, self.adapter_loading, metrics, hooks
        )
        for replica in replicas:
            metrics.engine_down(replica.index)  # a series from the start, also of a replica that never comes up

    def submit(self, submit: Submit, *, is_admitted: bool = False) -> TokenStream:
        """Send one choice to the engine. Raises `RequestError` if it cannot be taken now.

        `is_admitted`: it is a later piece of a request that was admitted: a drain, an outage or a full queue does not
        refuse it.
        """
        return self.submit_choices((submit,), is_admitted=is_admitted)[0]

    def submit_choices(
        self,
        submits: Sequence[Submit],
        *,
        is_admitted: bool = False,
        num_choices: int | None = None,
        num_tokens: int | None = None,
    ) -> list[TokenStream]:
        """Send the choices of one prompt, which differ in id and seed alone. If one cannot be taken now, raises
        `RequestError` and takes none.

        `is_admitted`: as in `submit`. `num_choices`, `num_tokens`: choices and prompt tokens of the whole request,
        which is admitted with its first piece; by default this piece is all of it.
        """
        first = submits[0]
        for submit in submits:
            self._check_id(submit)
        if not is_admitted:
            self._check_open(first, num_choices or len(submits), num_tokens or len(first.prompt_ids))
        self._quarantine.check(first)
        if first.params.adapter is not None:
            self.adapters.hold(first.params.adapter, len(submits), is_admitted=is_admitted)
        # The queue counts the prompt once, with its first choice: the others find it computed.
        streams = [
            TokenStream(submit, self._abort, num_waiting_tokens=0 if i else len(submit.prompt_ids))
            for i, submit in enumerate(submits)
        ]
        self.streams.add(streams)
        replica = None if self.streams.unsent else self._balancer.place(first)
        if replica is None:
            self.streams.unsent.update((stream.request_id, stream) for stream in streams)
            self.loading.want()
            return streams
        replica.streams.update((stream.request_id, stream) for stream in streams)
        if len(submits) == 1:
            replica.try_send(first)
        else:
            others = tuple((submit.request_id, submit.params.seed) for submit in submits[1:])
            replica.try_send(SubmitChoices(first=first, others=others))
        return streams

    def reset_prefix_cache(self, *, with_running: bool = False, with_tiers: bool = False) -> bool:
        """Clear the cache of each engine, and what `ResetPrefixCache` names. False for an unloaded model, which has
        neither a cache nor an engine."""
        if self.lifecycle.state is State.UNLOADED:
            return False
        message = ResetPrefixCache(with_running, with_tiers)
        for replica in self.replicas:
            if replica.is_up:
                replica.try_send(message)
                self._balancer.forget(replica)
            else:
                replica.reset = message  # the next engine may find what this one left
        return True

    async def run(self, index: int = 0) -> NoReturn:
        """Receive from a replica's engine until cancelled. The replica's `Supervisor` runs it beside each engine, and
        cancels it at the engine's end. Raises `EngineDeadError` if the engine's messages cannot be trusted, and
        `StartError` if it cannot start.
        """
        replica = self.replicas[index]
        assert replica.client is not None, "no engine was attached"
        client, num_read = replica.client, 0
        while True:
            message = await client.receive()
            if replica.client is not client:
                continue  # the model was unloaded, and its engines are being stopped
            match message:
                case StepOutput():
                    self._deliver(replica, message)
                    num_read += _cost_of(message)
                    if num_read >= _READ_AT_ONCE:
                        # Receiving messages that are already there gives other tasks no turn.
                        num_read = 0
                        await asyncio.sleep(0)
                case CacheEvents():
                    self.hooks.report_cache(index, message.events)
                    num_read += 1
                case Phase():
                    self._metrics.phase(message)
                    if self.hooks.on_phase is not None:
                        self.hooks.on_phase(index, message)
                case Ready():
                    self.replicas.take_numerics(message)
                    self._metrics.engine_ready(message, index)
                    if replica.reset is not None:
                        replica.try_send(replica.reset)
                        replica.reset = None
                    self.adapter_loading.load_all(replica, message)
                    await self.recovery.begin_if_loaded(replica)
                case AdapterLoaded():
                    self.adapter_loading.settle(replica, message)
                    await self.recovery.begin_if_loaded(replica)
                case Failed():
                    raise start_error(message.kind, message.message)

    def attach(self, client: EngineClient, index: int = 0) -> None:
        """A replica is to use the `client` of another engine that is being started; call `run` again to receive from
        it."""
        self.replicas[index].client = client

    def _check_id(self, submit: Submit) -> None:
        if submit.request_id in self.streams.by_id:
            raise RequestError("invalid_value", f"request id {submit.request_id!r} is already in use", "request_id")
        self.lifecycle.check_alive()

    def _check_open(self, submit: Submit, num_choices: int, num_tokens: int) -> None:
        if self.lifecycle.is_draining:
            raise errors.leaving()
        if self.lifecycle.is_asleep:
            raise errors.model_is_asleep(self._metrics.model_name)
        if self.lifecycle.state is State.STARTING:
            raise RequestError("server_is_overloaded", "The model is still loading; retry in a few seconds.")
        if not self.lifecycle.is_ready:
            raise RequestError("server_is_overloaded", "The engine is being restarted; retry in a few seconds.")
        scheduling, left_s = submit.scheduling, None
        if scheduling.ttft_target_s is not None:
            left_s = scheduling.arrival_s + scheduling.ttft_target_s - time.monotonic()
        self.check_queue(scheduling.tenant, num_tokens, left_s, num_choices)

    def check_queue(self, tenant: str, num_tokens: int, left_s: float | None = None, num_choices: int = 1) -> None:
        """Raises `RequestError` if the queue has no place now for so many choices with at least so many prompt tokens.

        `left_s`: seconds left until the first token is due; None: no target.
        """
        pace = sum(replica.stats.step_model.prefill_tokens_per_s for replica in self.replicas)
        self.streams.backlog.check(tenant, num_choices, num_tokens, pace, left_s)

    def _abort(self, request_id: str) -> None:
        """Abort in the engine. A stream that no engine knows yet ends here."""
        if request_id in self.streams.unsent:
            self.streams.end_aborted(self.streams.unsent[request_id])
            return
        for replica in self.replicas:
            if request_id in replica.streams:
                replica.try_send(Abort((request_id,)))

    def _deliver(self, replica: Replica, output: StepOutput) -> None:
        replica.stats = output.stats
        self._metrics.step(output, replica.index)
        for delta in output.deltas:
            stream = replica.streams.get(delta.request_id)
            if stream is None and self.lifecycle.has_ended:
                continue  # sent before the engine died, read after its streams were ended
            assert stream is not None, f"a delta for {delta.request_id}, which no stream waits for"
            if stream.num_generated and delta.num_cached_tokens != stream.num_cached:
                # Reported with the first token; the next engine has another cache.
                delta = structs.replace(delta, num_cached_tokens=stream.num_cached)
            replica.num_delivered += len(delta.token_ids) + (delta.finish_reason is not None)
            self.streams.account(stream, delta, output.step_ended_s)
            if delta.token_ids:
                replica.waiting.pop(stream.request_id, None)
            if delta.finish_reason is not None:
                self._balancer.ended(replica, stream)
            self.streams.push(stream, delta)
