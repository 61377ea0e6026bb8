"""The async request router: admits requests, sends them to the engine, and hands each token to the stream awaiting it.

It knows ids, deltas and finish reasons, not text and not HTTP. Every accepted request gets exactly one terminal delta.
There are one or more replicas, each with an engine, and the placement chooses one for each request. When an engine
dies, the router sends its live requests to the other replicas, or else to its next engine, each behind the tokens
already delivered. A stream sees a pause. Engines may be stopped while no request needs them: the next one has them
started, and waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from msgspec import Raw, structs

from inferd.engine.api.adapter import AdapterFiles
from inferd.engine.api.errors import EngineDeadError, ModelError, RequestError, start_error
from inferd.engine.api.numerics import Numerics, check_numerics
from inferd.engine.api.process.logs import counted
from inferd.engine.api.wire.client import EngineClient
from inferd.engine.api.wire.kv_events import CLEARED
from inferd.engine.api.wire.messages import (
    Abort,
    AdapterLoaded,
    CacheEvents,
    Delta,
    EngineStats,
    Failed,
    Failure,
    LoadAdapter,
    Phase,
    Ready,
    ResetPrefixCache,
    StepOutput,
    Submit,
    SubmitChoices,
)
from inferd.engine.api.wire.params import Adapter
from inferd.server.dispatch.adapters import Adapters, ServedAdapter
from inferd.server.dispatch.admission import Backlog, QueueBounds
from inferd.server.dispatch.lifecycle import Lifecycle, State
from inferd.server.dispatch.placement import Placement
from inferd.server.dispatch.quarantine import Quarantine
from inferd.server.dispatch.replica import Replica
from inferd.server.dispatch.token_stream import TokenStream
from inferd.server.errors import table as errors
from inferd.server.observability.metrics import Metrics

logger = logging.getLogger(__name__)

_REPLAYED_AT_ONCE = 2**17
"""Ids of requests sent again before other tasks of the event loop run (some milliseconds)."""

_READ_AT_ONCE = 256
"""Deltas read before other tasks of the event loop run (some 3 ms)."""

_ABORTED = Failure("engine_error", "The engine stopped while it was generating this answer. Please retry the request.")
_ENDED_ENGINES = Failure("engine_error", "This request ended the engine each time it was tried, and was given up.")


def _cost_of(output: StepOutput) -> int:
    """Cost of reading a message, in deltas of one token; a part of a long prompt's log probabilities costs a full
    turn."""
    is_scored = bool(output.deltas) and bool(output.deltas[0].prompt_logprobs)
    return _READ_AT_ONCE if is_scored else len(output.deltas)


def _loading(served: ServedAdapter) -> LoadAdapter:
    return LoadAdapter(served.adapter, str(served.path), served.name, served.held.pinned)


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
        adapters: Adapters | None = None,
    ) -> None:
        """`client`: that of the first replica's engine; None until `attach` provides one."""
        self.adapters = adapters or Adapters()
        self._options = options or RouterOptions()
        self.lifecycle = Lifecycle(self._options.outage_grace_s)
        self.replicas = tuple(Replica(index) for index in range(self._options.num_replicas))
        self.replicas[0].client = client
        self._placement = Placement(self.replicas) if len(self.replicas) > 1 else None
        self._quarantine = quarantine or Quarantine()
        self.on_recovered: Callable[[int, float], None] | None = None
        """Called with (requests sent again, seconds for which no engine computed them)."""
        self._metrics = metrics
        for replica in self.replicas:
            metrics.engine_down(replica.index)  # a series from the start, also of a replica that never comes up
        self._streams: dict[str, TokenStream] = {}
        self._unsent: dict[str, TokenStream] = {}
        """Streams that no engine knows, in order of arrival; a subset of `_streams`."""
        self._backlog = Backlog(self._options.queue)
        self.on_wanted: Callable[[], None] | None = None
        """Called once when unloaded engines are to start."""
        self.on_unload: Callable[[], Awaitable[None]] | None = None
        """Stops the engines."""
        self._ready: Ready | None = None
        self.numerics: Numerics | None = None
        """Facts of the first engine that was ready. All later ones share them."""
        self._idle_since_s = time.monotonic()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.on_phase: Callable[[int, Phase], None] | None = None
        """Called with a replica and a phase of its start that has ended."""
        self.on_kv_events: Callable[[int, Raw], None] | None = None
        """Called with a replica and KV events of its cache."""

    @property
    def is_up(self) -> bool:
        """Whether some engine takes requests."""
        return any(replica.is_up for replica in self.replicas)

    @property
    def ready(self) -> Ready:
        """The first replica's measurements at its last start. Raises `EngineDeadError` before every replica was
        ready."""
        if self._ready is None:
            raise EngineDeadError("the engine is not ready yet")
        return self._ready

    @property
    def stats(self) -> EngineStats:
        """The sums over all replicas. Streams that wait for an engine are waiting too."""
        return EngineStats.total([*(replica.stats for replica in self.replicas), self.held])

    @property
    def held(self) -> EngineStats:
        """The streams that no engine knows, as an engine would count them in its queue."""
        num_tokens = sum(stream.num_waiting_tokens for stream in self._unsent.values())
        return EngineStats(num_waiting=len(self._unsent), num_tokens_waiting=num_tokens)

    @property
    def num_active(self) -> int:
        return len(self._streams)

    @property
    def idle_s(self) -> float:
        """Seconds since the last stream ended, or since the engines took requests; 0 if `unload` would refuse, or if
        there are no engines."""
        is_idle = self.is_up and not self._streams and not self._is_loading
        return time.monotonic() - self._idle_since_s if is_idle else 0.0

    @property
    def _is_loading(self) -> bool:
        """Whether a replica or an adapter is not loaded yet."""
        return not self.lifecycle.loaded.is_set() or not all(served.settled.is_set() for served in self.adapters)

    @property
    def num_unsent(self) -> int:
        """Number of streams that wait for an engine."""
        return len(self._unsent)

    @property
    def num_delivered(self) -> int:
        """Tokens and ends delivered to streams so far."""
        return sum(replica.num_delivered for replica in self.replicas)

    @property
    def _has_ended(self) -> bool:
        """Whether no engine is to run, and every stream was ended."""
        return self.lifecycle.state in (State.FAILED, State.STOPPED)

    @property
    def _has_begun(self) -> bool:
        return all(replica.ready is not None for replica in self.replicas)

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
        for stream in streams:
            self._streams[stream.request_id] = stream
            self._backlog.add(first.scheduling.tenant, stream.num_waiting_tokens)
        self._is_idle.clear()
        replica = None if self._unsent else self._place(first)
        if replica is None:
            self._unsent.update((stream.request_id, stream) for stream in streams)
            self._want()
            return streams
        replica.streams.update((stream.request_id, stream) for stream in streams)
        if len(submits) == 1:
            replica.try_send(first)
        else:
            others = tuple((submit.request_id, submit.params.seed) for submit in submits[1:])
            replica.try_send(SubmitChoices(first=first, others=others))
        return streams

    def reset_prefix_cache(self) -> None:
        for replica in self.replicas:
            if replica.is_up:  # a new engine's cache is empty
                replica.try_send(ResetPrefixCache())
                self._forget_prefixes(replica)

    def _place(self, submit: Submit, emitted_ids: Sequence[int] = ()) -> Replica | None:
        """The replica for a request; None if no engine takes requests."""
        if self._placement is not None:
            return self._placement.place(submit, emitted_ids)
        return self.replicas[0] if self.is_up else None

    def _forget_prefixes(self, replica: Replica) -> None:
        """A replica's prefix cache is empty."""
        if self._placement is not None:
            self._placement.forget(replica)

    def _report_cache(self, index: int, events: Raw) -> None:
        if self.on_kv_events is not None:
            self.on_kv_events(index, events)

    async def load_adapter(self, name: str, files: AdapterFiles) -> None:
        """Have the engine load an adapter, also each later engine. Raises `RequestError` if it cannot be loaded."""
        self._check_alive()
        served = self.adapters.add(name, files)
        for replica in self.replicas:
            if replica.is_up or replica.starting is not None:
                replica.awaited.append(served.adapter)
                replica.try_send(_loading(served))
        self._want()
        await self._unless_draining(served.settled)
        self._idle_since_s = time.monotonic()
        if served.error:
            raise RequestError("invalid_value", served.error, "lora_path")

    def num_waiting_by_tenant(self) -> dict[str, int]:
        """Tenant -> its sequences that no step has begun. Without keys there are no tenants."""
        return self._backlog.num_requests_by_tenant()

    def num_running_by_tenant(self) -> dict[str, int]:
        """Tenant -> its sequences that a step has begun."""
        begun = (stream.submit.scheduling.tenant for stream in self._streams.values() if stream.has_begun)
        return Counter(tenant for tenant in begun if tenant)

    def adapter_requests(self) -> dict[str, tuple[int, int]]:
        """Name of each adapter that has a place -> its sequences that (run, wait)."""
        found = {served.name: (0, 0) for served in self.adapters}
        for stream in self._streams.values():
            adapter = stream.submit.params.adapter
            served = None if adapter is None else self.adapters.find(adapter)
            if served is not None:
                running, waiting = found[served.name]
                found[served.name] = running + stream.has_begun, waiting + (not stream.has_begun)
        return found

    async def load(self) -> None:
        """Have engines started if none run. Returns when they take requests. Raises `RequestError` if they cannot."""
        if self.lifecycle.is_draining:
            raise errors.leaving()
        if self.lifecycle.state is State.FAILED:
            self._begin_anew()
        self._want()
        await self._unless_draining(self.lifecycle.settled)
        self._check_alive()

    async def _unless_draining(self, settled: asyncio.Event) -> None:
        """Wait until something is loaded. Raises `RequestError` if the server stops first, because it waits for
        answers."""
        waits = [asyncio.create_task(event.wait()) for event in (settled, self.lifecycle.draining)]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if waits[0] not in done:
            raise errors.leaving()

    async def unload(self) -> None:
        """Have the engines stopped. Returns when their memory is free. Raises `RequestError` if there are requests, or
        engines that start."""
        if self._streams:
            raise errors.model_is_busy(f"This model has {counted(len(self._streams), 'unfinished answer')}")
        if self._has_ended:
            return
        if self.lifecycle.state is not State.UNLOADED:
            if self._is_loading:
                raise errors.model_is_busy("This model or an adapter of it is being loaded")
            self._begin_anew()
        if self.on_unload is not None:
            await self.on_unload()

    def _begin_anew(self) -> None:
        """No engine runs, as before the first."""
        self.lifecycle.change(State.UNLOADED)
        for replica in self.replicas:
            replica.lose(time.monotonic())
            replica.client, replica.ready, replica.failure = None, None, ""
            self._forget_prefixes(replica)
            self._report_cache(replica.index, CLEARED)
            self._metrics.engine_unloaded(replica.index)
        self._backlog.forget_pace()

    def _want(self) -> None:
        """Have unloaded engines started, once."""
        if self.lifecycle.state is State.UNLOADED:
            self.lifecycle.change(State.LOADING)
            for replica in self.replicas:
                self._metrics.engine_down(replica.index)  # an alert sees a load that never ends
            if self.on_wanted is not None:
                self.on_wanted()

    async def drained(self) -> None:
        """Return when no stream is left. After the last stream ended, a later piece of its request may have come."""
        await self._is_idle.wait()
        while self._streams:
            await self._is_idle.wait()

    def abort_all(self) -> None:
        for stream in tuple(self._streams.values()):
            stream.abort()

    async def run(self, index: int = 0) -> NoReturn:
        """Receive from a replica's engine until cancelled. Raises `EngineDeadError` if the engine's messages cannot be
        trusted, and `StartError` if it cannot start.
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
                    self._report_cache(index, message.events)
                    num_read += 1
                case Phase():
                    self._metrics.phase(message)
                    if self.on_phase is not None:
                        self.on_phase(index, message)
                case Ready():
                    self._take_numerics(message)
                    self._metrics.engine_ready(message, index)
                    self._load_adapters(replica, message)
                    await self._begin_if_loaded(replica)
                case AdapterLoaded():
                    self._settle(replica, message)
                    await self._begin_if_loaded(replica)
                case Failed():
                    raise start_error(message.kind, message.message)

    def _take_numerics(self, ready: Ready) -> None:
        """The first engine decides. Raises `ChangedError` if another does not compute the same."""
        if self.numerics is None:
            self.numerics = ready.numerics
        else:
            check_numerics(self.numerics, ready.numerics)

    def attach(self, client: EngineClient, index: int = 0) -> None:
        """A replica is to use the `client` of another engine that is being started; call `run` again to receive from
        it."""
        self.replicas[index].client = client

    def lose(self, in_flight: Mapping[int, int], *, is_external_kill: bool = False, index: int = 0) -> list[str]:
        """A replica's engine is gone and another will come. `in_flight`, `is_external_kill`: as in `Quarantine.judge`.
        Returns the ids of the requests that it was computing.

        Its streams stay open, except those that were aborted and those that the quarantine fails: they end now.
        `send_waiting` sends the others to other replicas.
        """
        replica = self.replicas[index]
        awaited = tuple(replica.awaited)
        lost = replica.lose(time.monotonic())
        self._forget_prefixes(replica)
        self._report_cache(index, CLEARED)
        if not self.is_up and self.lifecycle.state is State.SERVING:
            self.lifecycle.change(State.RECOVERING)
        if self.is_up:
            for adapter in awaited:
                self._settle_if_loaded(adapter)
        self._metrics.engine_down(index)
        self._backlog.forget_pace()
        for stream in lost.values():
            stream.num_restarts += 1
        computed = [stream.request_id for stream in lost.values() if stream.tag in in_flight]
        for culprit in self._quarantine.judge(in_flight, lost.values(), is_external_kill=is_external_kill):
            logger.error("request %s killed engines, also when it ran alone: it is failed", culprit.request_id)
            self._fail(culprit, _ENDED_ENGINES)
        for stream in lost.values():
            if stream.abort_reason is not None and stream.request_id in self._streams:
                self._push(stream, Delta(request_id=stream.request_id, finish_reason="abort"))
        waiting = lost.keys() | self._unsent.keys()
        self._unsent = {name: stream for name, stream in self._streams.items() if name in waiting}
        return computed

    async def send_waiting(self, index: int) -> None:
        """Send the streams of a replica whose engine is gone to the others, if one takes requests."""
        if self._unsent and self.is_up:
            self._recovered(await self._replay(), self.replicas[index].lost_s)

    def _load_adapters(self, replica: Replica, ready: Ready) -> None:
        """An engine can take requests: before those, it gets every adapter that one of them may use."""
        replica.starting, replica.awaited = ready, [served.adapter for served in self.adapters]
        for served in self.adapters:
            replica.send(_loading(served))

    def _settle(self, replica: Replica, loaded: AdapterLoaded) -> None:
        """An engine has loaded an adapter, or cannot. Raises `ModelError` if one is missing at the start."""
        replica.awaited.remove(loaded.adapter)
        served = self.adapters.find(loaded.adapter)
        if served is None:
            return  # it was unloaded meanwhile
        if not loaded.error:
            self._settle_if_loaded(loaded.adapter)
            return
        if served.is_from_start and not self.lifecycle.has_served:
            raise ModelError(f"--lora {served.name}: {loaded.error}")
        logger.error("the adapter %s is no longer served: %s", served.name, loaded.error)
        self.adapters.settle(served, loaded.error)
        told = loaded.error.replace(str(served.path), served.name)  # clients learn no path of this machine
        # Those that another replica computes go on.
        for stream in tuple(self._unsent.values()):
            if stream.submit.params.adapter == loaded.adapter:
                self._fail(stream, Failure("engine_error", f"The adapter could not be loaded again: {told}"))

    def _settle_if_loaded(self, adapter: Adapter) -> None:
        """Let requests name an adapter, if every engine that takes requests has loaded it."""
        served = self.adapters.find(adapter)
        if served is not None and not any(adapter in replica.awaited for replica in self.replicas):
            self.adapters.settle(served, "")

    async def _begin_if_loaded(self, replica: Replica) -> None:
        if replica.starting is not None and not replica.awaited:
            ready, replica.starting = replica.starting, None
            await self._begin(replica, ready)

    async def _begin(self, replica: Replica, ready: Ready) -> None:
        """An engine takes requests: send it the live requests that no other has, in order of arrival."""
        is_first, was_up = replica.ready is None, self.is_up
        replica.ready, replica.is_up, replica.failure = ready, True, ""
        replica.stats = EngineStats(num_blocks=ready.num_blocks)
        if self.lifecycle.state is State.RECOVERING:
            self.lifecycle.change(State.SERVING)
        if replica.on_up is not None:
            replica.on_up()
        num_replayed = await self._replay()
        if not is_first and not was_up:
            self._recovered(num_replayed, replica.lost_s)
        if self._has_begun:
            self._ready, self._idle_since_s = self.replicas[0].ready, time.monotonic()
            if self.lifecycle.state in (State.STARTING, State.LOADING):
                self.lifecycle.change(State.SERVING)

    def _recovered(self, num_replayed: int, lost_s: float) -> None:
        outage_s = time.monotonic() - lost_s
        self._metrics.recovered(num_replayed, outage_s)
        if self.on_recovered is not None:
            self.on_recovered(num_replayed, outage_s)

    async def _replay(self) -> int:
        """Send the engines every stream that none knows, some at a time; returns how many those were.

        Meanwhile new requests wait behind them, and aborted ones end without reaching an engine. If an engine dies
        too, `lose` begins anew.
        """
        num_replayed = num_ids = 0
        while self._unsent:
            stream = self._unsent[next(iter(self._unsent))]
            replica = self._place(stream.submit, stream.emitted_ids)
            if replica is None:
                break
            del self._unsent[stream.request_id]
            replica.streams[stream.request_id] = stream
            replica.try_send(self._quarantine.replay(stream))
            num_replayed += 1
            num_ids += len(stream.submit.prompt_ids) + stream.num_generated
            if num_ids >= _REPLAYED_AT_ONCE:
                num_ids = 0
                await asyncio.sleep(0)
        return num_replayed

    def fail_model(self, reason: str) -> None:
        """No engine can run, but the server goes on with other models: end every stream with the reason, and refuse
        others with it, until `load`."""
        self.lifecycle.change(State.FAILED, reason)
        self._end_all(Failure("model_not_loaded", errors.model_not_loaded(self._metrics.model_name, reason).message))

    def fail_all(self) -> None:
        """No engine will run any more, because the server ends: end every stream and take no more."""
        if not self._has_ended:
            self.lifecycle.change(State.STOPPED)
        self._end_all(_ABORTED)

    def _end_all(self, failure: Failure) -> None:
        """The engines are gone: end every stream with `failure`."""
        for replica in self.replicas:
            replica.lose(time.monotonic())
            self._metrics.engine_down(replica.index)
            self._report_cache(replica.index, CLEARED)
        for stream in tuple(self._streams.values()):
            self._fail(stream, failure)
        for served in tuple(self.adapters):
            if not served.settled.is_set() and not served.is_from_start:
                self.adapters.settle(served, "the engine stopped while it was loaded")

    def _fail(self, stream: TokenStream, failure: Failure) -> None:
        self._push(stream, Delta(request_id=stream.request_id, finish_reason="error", failure=failure))

    def _check_id(self, submit: Submit) -> None:
        if submit.request_id in self._streams:
            raise RequestError("invalid_value", f"request id {submit.request_id!r} is already in use", "request_id")
        self._check_alive()

    def _check_alive(self) -> None:
        if self.lifecycle.state is State.FAILED:
            raise errors.model_not_loaded(self._metrics.model_name, self.lifecycle.failure)
        if self.lifecycle.state is State.STOPPED:
            raise RequestError("server_is_overloaded", "The engine is not running; it cannot take requests.")

    def _check_open(self, submit: Submit, num_choices: int, num_tokens: int) -> None:
        if self.lifecycle.is_draining:
            raise errors.leaving()
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
        self._backlog.check(tenant, num_choices, num_tokens, pace, left_s)

    def _abort(self, request_id: str) -> None:
        """Abort in the engine. A stream that no engine knows yet ends here."""
        if request_id in self._unsent:
            self._push(self._streams[request_id], Delta(request_id=request_id, finish_reason="abort"))
            return
        for replica in self.replicas:
            if request_id in replica.streams:
                replica.try_send(Abort((request_id,)))

    def _deliver(self, replica: Replica, output: StepOutput) -> None:
        replica.stats = output.stats
        self._metrics.step(output, replica.index)
        for delta in output.deltas:
            stream = replica.streams.get(delta.request_id)
            if stream is None and self._has_ended:
                continue  # sent before the engine died, read after its streams were ended
            assert stream is not None, f"a delta for {delta.request_id}, which no stream waits for"
            if stream.num_generated and delta.num_cached_tokens != stream.num_cached:
                # Reported with the first token; the next engine has another cache.
                delta = structs.replace(delta, num_cached_tokens=stream.num_cached)
            replica.num_delivered += len(delta.token_ids) + (delta.finish_reason is not None)
            self._account(stream, delta, output.step_ended_s)
            if delta.token_ids:
                replica.waiting.pop(stream.request_id, None)
            if delta.finish_reason is not None and self._placement is not None:
                self._placement.ended(replica, stream)
            self._push(stream, delta)

    def _account(self, stream: TokenStream, delta: Delta, step_ended_s: float | None) -> None:
        """Record the times and tokens of a delta. The times are the engine's: a late event loop reads the outputs of
        several steps in one turn and would see no time between them."""
        if delta.scheduled_s is not None and not stream.has_begun:
            stream.scheduled_s = delta.scheduled_s
            self._backlog.remove(stream.submit.scheduling.tenant, stream.num_waiting_tokens)
        stream.journal(delta)
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

    def _push(self, stream: TokenStream, delta: Delta) -> None:
        stream.push(delta)
        if delta.finish_reason is None:
            return
        del self._streams[stream.request_id]
        self._unsent.pop(stream.request_id, None)
        for replica in self.replicas:
            replica.streams.pop(stream.request_id, None)
            replica.waiting.pop(stream.request_id, None)
        if stream.submit.params.adapter is not None:
            self.adapters.release(stream.submit.params.adapter)
        if not self._streams:
            self._is_idle.set()
            self._idle_since_s = time.monotonic()
        if not stream.has_begun:
            self._backlog.remove(stream.submit.scheduling.tenant, stream.num_waiting_tokens, has_begun=False)
        record = stream.record(delta.finish_reason, self._options.e2e_target_s)
        self._metrics.request_finished(record)
        if stream.trace is not None:
            stream.trace.ended(record, stream.num_restarts, self._metrics.model_name)
