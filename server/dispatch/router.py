"""The async request router: admits requests, sends them to the engine, and hands each token to the stream awaiting it.

It knows ids, deltas and finish reasons, not text and not HTTP. Every accepted request gets exactly one terminal delta.
When the engine dies, the router sends all live requests to the next one, each behind the tokens already delivered. A
stream sees a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from msgspec import structs

from inferd.engine.api.adapter import AdapterFiles
from inferd.engine.api.errors import EngineDeadError, ModelError, RequestError, start_error
from inferd.engine.api.wire.client import EngineClient
from inferd.engine.api.wire.messages import (
    Abort,
    AdapterLoaded,
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
    ToEngine,
)
from inferd.server.dispatch.adapters import Adapters, ServedAdapter
from inferd.server.dispatch.admission import Backlog, QueueBounds
from inferd.server.dispatch.quarantine import Quarantine
from inferd.server.dispatch.token_stream import TokenStream
from inferd.server.errors import table as errors
from inferd.server.observability.metrics import Metrics
from inferd.server.observability.request_record import RequestRecord

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
    return LoadAdapter(served.adapter, str(served.path))


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Bounds on what may wait."""

    queue: QueueBounds = field(default_factory=QueueBounds)
    """Bounds on requests that the engine has not begun."""
    outage_grace_s: float = 10.0
    """Seconds without an engine after which new requests are refused; until then they wait for the next one."""
    e2e_target_s: float | None = None
    """Target from arrival to the last token; the metrics count the requests that meet it."""


class Router:
    """Connects the HTTP side to one engine after another. Deltas arrive only while `run` runs."""

    def __init__(
        self,
        client: EngineClient | None,
        metrics: Metrics,
        options: RouterOptions | None = None,
        quarantine: Quarantine | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """`client`: None until `attach` provides one; nothing can be sent before."""
        self.adapters = adapters or Adapters()
        self._starting: Ready | None = None
        """Set while a new engine loads the adapters, before it is sent any request."""
        self._num_awaited = 0
        """Number of adapters that it has not loaded yet."""
        self._client = client
        self._quarantine = quarantine or Quarantine()
        self.is_up = False
        """Whether the engine takes requests."""
        self._lost_s = 0.0
        """When the last engine that took requests was lost."""
        self.num_delivered = 0
        """Tokens and ends delivered to streams so far: shows whether engines make progress."""
        self.on_up: Callable[[], None] | None = None
        """Called each time an engine begins to take requests."""
        self.on_recovered: Callable[[int, float], None] | None = None
        """Called with (requests sent again, seconds without an engine)."""
        self._metrics = metrics
        self._options = options or RouterOptions()
        self._streams: dict[str, TokenStream] = {}
        self._unsent: dict[str, TokenStream] = {}
        """Streams that the engine does not know yet, in order of arrival; a subset of `_streams`."""
        self._backlog = Backlog(self._options.queue)
        self._ready: Ready | None = None
        self._death: str | None = None
        self._is_draining = False
        self.is_leaving = False
        """Whether the server is about to stop: probes learn it, and requests may still be taken."""
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.on_phase: Callable[[Phase], None] | None = None
        self.became_ready = asyncio.Event()
        self.stats = EngineStats()

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken. For a while they are taken without an engine too, and wait for the next one."""
        if self._ready is None or self._death is not None or self._is_draining:
            return False
        return self.is_up or time.monotonic() - self._lost_s < self._options.outage_grace_s

    @property
    def is_recovering(self) -> bool:
        """Whether an engine was lost and the next one does not take requests yet."""
        return self._ready is not None and self._death is None and not self.is_up

    @property
    def ready(self) -> Ready:
        """The engine's measurements at start. Raises `EngineDeadError` before the first engine is ready."""
        if self._ready is None:
            raise EngineDeadError("the engine is not ready yet")
        return self._ready

    @property
    def num_active(self) -> int:
        return len(self._streams)

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
        if not self.is_up or self._unsent:
            self._unsent.update((stream.request_id, stream) for stream in streams)
        elif len(submits) == 1:
            self._try_send(first)
        else:
            others = tuple((submit.request_id, submit.params.seed) for submit in submits[1:])
            self._try_send(SubmitChoices(first=first, others=others))
        return streams

    def reset_prefix_cache(self) -> None:
        if self.is_up:  # a new engine's cache is empty
            self._try_send(ResetPrefixCache())

    async def load_adapter(self, name: str, files: AdapterFiles) -> None:
        """Have the engine load an adapter, also each later engine. Raises `RequestError` if it cannot be loaded."""
        served = self.adapters.add(name, files)
        if self.is_up or self._starting is not None:
            self._num_awaited += 1
            self._try_send(_loading(served))
        await served.settled.wait()
        if served.error:
            raise RequestError("invalid_value", served.error, "lora_path")

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

    def leave(self) -> None:
        """Make probes send requests elsewhere."""
        self.is_leaving = True

    def drain(self) -> None:
        """Refuse new requests from now on; accepted ones continue."""
        self.is_leaving = self._is_draining = True

    async def drained(self) -> None:
        """Return when no stream is left. After the last stream ended, a later piece of its request may have come."""
        await self._is_idle.wait()
        while self._streams:
            await self._is_idle.wait()

    def abort_all(self) -> None:
        for stream in tuple(self._streams.values()):
            stream.abort()

    async def run(self) -> NoReturn:
        """Receive until cancelled. Raises `EngineDeadError` if the engine's messages cannot be trusted, and
        `StartError` if it cannot start.
        """
        assert self._client is not None, "no engine was attached"
        client, num_read = self._client, 0
        while True:
            message = await client.receive()
            match message:
                case StepOutput():
                    self._deliver(message)
                    num_read += _cost_of(message)
                    if num_read >= _READ_AT_ONCE:
                        # Receiving messages that are already there gives other tasks no turn.
                        num_read = 0
                        await asyncio.sleep(0)
                case Phase():
                    self._metrics.phase(message)
                    if self.on_phase is not None:
                        self.on_phase(message)
                case Ready():
                    self._metrics.engine_ready(message)
                    self._load_adapters(message)
                    await self._begin_if_loaded()
                case AdapterLoaded():
                    self._settle(message)
                    await self._begin_if_loaded()
                case Failed():
                    raise start_error(message.kind, message.message)

    def attach(self, client: EngineClient) -> None:
        """Use the `client` of another engine that is being started; call `run` again to receive from it."""
        self._client = client

    def lose(self, in_flight: Mapping[int, int], *, is_external_kill: bool = False) -> None:
        """The engine is gone and another will come. `in_flight`, `is_external_kill`: as in `Quarantine.judge`.

        Streams stay open, except those that were aborted and those that the quarantine fails: they end now.
        """
        if self.is_up:
            self._lost_s = time.monotonic()
        self.is_up, self._starting = False, None
        self.stats = EngineStats()
        self._metrics.engine_down()
        self._backlog.forget_pace()
        journals = [stream.journal for stream in self._streams.values()]
        for culprit in self._quarantine.judge(in_flight, journals, is_external_kill=is_external_kill):
            logger.error("request %s killed engines, also when it ran alone: it is failed", culprit.submit.request_id)
            self._fail(self._streams[culprit.submit.request_id], _ENDED_ENGINES)
        for stream in tuple(self._streams.values()):
            if stream.abort_reason is not None:
                self._push(stream, Delta(request_id=stream.request_id, finish_reason="abort"))
        self._unsent = dict(self._streams)

    def _load_adapters(self, ready: Ready) -> None:
        """An engine can take requests: before those, it gets every adapter that one of them may use."""
        self._starting, loads = ready, [_loading(served) for served in self.adapters]
        self._num_awaited = len(loads)
        for message in loads:
            self._send(message)

    def _settle(self, loaded: AdapterLoaded) -> None:
        """The engine has loaded an adapter, or cannot. Raises `ModelError` if one is missing at the start."""
        served = self.adapters.find(loaded.adapter)
        assert served is not None, "an adapter lost its place while it was loaded"
        self._num_awaited -= 1
        if not loaded.error:
            self.adapters.settle(served, "")
            return
        if not self.became_ready.is_set():
            raise ModelError(f"--lora {served.name}: {loaded.error}")
        logger.error("the adapter %s is no longer served: %s", served.name, loaded.error)
        self.adapters.settle(served, loaded.error)
        for stream in tuple(self._streams.values()):
            if stream.submit.params.adapter == loaded.adapter:
                self._fail(stream, Failure("engine_error", f"The adapter could not be loaded again: {loaded.error}"))

    async def _begin_if_loaded(self) -> None:
        if self._starting is not None and not self._num_awaited:
            ready, self._starting = self._starting, None
            await self._begin(ready)

    async def _begin(self, ready: Ready) -> None:
        """An engine takes requests: send it all live requests, in order of arrival."""
        is_first, self._ready, self.is_up = self._ready is None, ready, True
        if self.on_up is not None:
            self.on_up()
        num_replayed = await self._replay()
        if is_first:
            self.became_ready.set()
            return
        outage_s = time.monotonic() - self._lost_s
        self._metrics.recovered(num_replayed, outage_s)
        if self.on_recovered is not None:
            self.on_recovered(num_replayed, outage_s)

    async def _replay(self) -> int:
        """Send the engine every stream that it does not know, some at a time; returns how many those were.

        Meanwhile new requests wait behind them, and aborted ones end without reaching the engine. If this engine dies
        too, `lose` begins anew.
        """
        num_replayed = num_ids = 0
        while self._unsent:
            journal = self._unsent.pop(next(iter(self._unsent))).journal
            self._send(self._quarantine.replay(journal))
            num_replayed += 1
            num_ids += len(journal.submit.prompt_ids) + len(journal.emitted_ids)
            if num_ids >= _REPLAYED_AT_ONCE:
                num_ids = 0
                await asyncio.sleep(0)
        return num_replayed

    def fail_all(self, reason: str) -> None:
        """The engine is gone and no other will come: end every stream with an error and take no more."""
        self._death = reason
        self.is_up = False
        self.stats = EngineStats()
        self._metrics.engine_down()
        for stream in tuple(self._streams.values()):
            self._fail(stream, _ABORTED)
        for served in tuple(self.adapters):
            if not served.settled.is_set():
                self.adapters.settle(served, "the engine stopped while it was loaded")

    def _fail(self, stream: TokenStream, failure: Failure) -> None:
        self._push(stream, Delta(request_id=stream.request_id, finish_reason="error", failure=failure))

    def _send(self, message: ToEngine) -> None:
        assert self._client is not None, "no engine was attached"
        self._client.send(message)

    def _try_send(self, message: ToEngine) -> None:
        """Send, and ignore an engine that takes nothing: it is dead or hangs, the supervisor replaces it, and streams
        wait for the next one."""
        with contextlib.suppress(EngineDeadError):
            self._send(message)

    def _check_id(self, submit: Submit) -> None:
        if submit.request_id in self._streams:
            raise RequestError("invalid_value", f"request id {submit.request_id!r} is already in use", "request_id")
        if self._death is not None:
            raise RequestError("server_is_overloaded", "The engine is not running; it cannot take requests.")

    def _check_open(self, submit: Submit, num_choices: int, num_tokens: int) -> None:
        if self._is_draining:
            raise errors.leaving()
        if self._ready is None:
            raise RequestError("server_is_overloaded", "The model is still loading; retry in a few seconds.")
        if not self.is_ready:
            raise RequestError("server_is_overloaded", "The engine is being restarted; retry in a few seconds.")
        scheduling, left_s = submit.scheduling, None
        if scheduling.ttft_target_s is not None:
            left_s = scheduling.arrival_s + scheduling.ttft_target_s - time.monotonic()
        self.check_queue(scheduling.tenant, num_tokens, left_s, num_choices)

    def check_queue(self, tenant: str, num_tokens: int, left_s: float | None = None, num_choices: int = 1) -> None:
        """Raises `RequestError` if the queue has no place now for so many choices with at least so many prompt tokens.

        `left_s`: seconds left until the first token is due; None: no target.
        """
        pace = self.stats.step_model.prefill_tokens_per_s
        self._backlog.check(tenant, num_choices, num_tokens, pace, left_s)

    def _abort(self, request_id: str) -> None:
        """Abort in the engine. A stream that no engine knows yet ends here."""
        if request_id in self._unsent:
            self._push(self._streams[request_id], Delta(request_id=request_id, finish_reason="abort"))
        else:
            self._try_send(Abort((request_id,)))

    def _deliver(self, output: StepOutput) -> None:
        self.stats = output.stats
        self._metrics.step(output)
        for delta in output.deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None and self._death is not None:
                continue  # sent before the engine died, read after its streams were ended
            assert stream is not None, f"a delta for {delta.request_id}, which no stream waits for"
            if stream.num_generated and delta.num_cached_tokens != stream.journal.num_cached:
                # Reported with the first token; the next engine has another cache.
                delta = structs.replace(delta, num_cached_tokens=stream.journal.num_cached)
            self.num_delivered += len(delta.token_ids) + (delta.finish_reason is not None)
            self._account(stream, delta, output.step_ended_s)
            self._push(stream, delta)

    def _account(self, stream: TokenStream, delta: Delta, step_ended_s: float | None) -> None:
        """Record the times and tokens of a delta. The times are the engine's: a late event loop reads the outputs of
        several steps in one turn and would see no time between them."""
        if delta.scheduled_s is not None and not stream.has_begun:
            stream.scheduled_s = delta.scheduled_s
            self._backlog.remove(stream.submit.scheduling.tenant, stream.num_waiting_tokens)
        stream.journal.record(delta)
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
        if stream.submit.params.adapter is not None:
            self.adapters.release(stream.submit.params.adapter)
        if not self._streams:
            self._is_idle.set()
        if not stream.has_begun:
            self._backlog.remove(stream.submit.scheduling.tenant, stream.num_waiting_tokens, has_begun=False)
        self._metrics.request_finished(
            RequestRecord(
                scheduling=stream.submit.scheduling,
                scheduled_s=stream.scheduled_s,
                first_token_s=stream.first_token_s,
                finished_s=time.monotonic() if stream.last_token_s is None else stream.last_token_s,
                num_prompt_tokens=len(stream.submit.prompt_ids),
                num_generation_tokens=stream.num_generated,
                num_cached_tokens=stream.journal.num_cached,
                finish_reason=stream.abort_reason or delta.finish_reason,
                e2e_target_s=self._options.e2e_target_s,
            )
        )
