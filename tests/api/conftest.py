"""The HTTP side on a loopback socket, with a router that answers from a script instead of an engine.

A test sets the content of the next choices (`router.will`), talks to the server with a real client, and reads what was
submitted and aborted. The tokenizer is the embedded model's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import httpx
import openai
import pytest
import uvicorn
import uvloop
from pydantic import SecretStr

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.cost.roofline import Peaks
from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.engine.api.wire.messages import Delta, EngineStats, Failure, FinishReason, Ready, Submit, WireLogprobs
from inferd.engine.api.wire.params import Pooling, PoolingKind
from inferd.server.config.settings import Settings
from inferd.server.dispatch.adapter_places import AdapterPlaces
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.dispatch.replica import Replicas
from inferd.server.dispatch.router import Router
from inferd.server.endpoints.app import Backend, create_app
from inferd.server.observability.metrics import Metrics
from inferd.server.text.fill_in import FillIn
from inferd.server.text.model import ServedModel
from inferd.server.tools.detect import Clues, detect
from inferd.server.transport.limits import ConnectionLimits
from inferd.server.transport.loop_probe import LoopProbe
from inferd.server.transport.uvicorn_server import http_config
from tests.conftest import FRESH

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
MAX_MODEL_LEN = 256
VOCAB_SIZE = 3_072
HIDDEN_SIZE = 6
NAME = "tiny"
WAIT_S = 60.0
"""Seconds after which a test fails if an awaited event does not happen."""


@dataclass(frozen=True, slots=True)
class Script:
    """The content of one choice."""

    text: str = "Hello there, this is an answer."
    token_ids: tuple[int, ...] | None = None
    """Token ids in place of `text`."""
    cuts: tuple[int, ...] = (1,)
    """Sizes of the deltas. The last size applies to all further ones."""
    ends: bool = True
    """If false, the stream is silent after the last token until it is aborted."""
    failure: Failure | None = None
    """Failure that comes after the last token."""
    dies: bool = False
    breaks: bool = False
    """Whether the stream raises an unexpected exception."""
    num_cached: int = 0
    drafted: tuple[int, int] = (0, 0)
    """Draft tokens of the choice, and accepted ones."""
    prompt_logprobs: tuple[WireLogprobs, ...] | None = None
    """Log probabilities to send instead of computed ones, which take long to make."""


def vector_of(token_ids: tuple[int, ...], num_components: int) -> bytes:
    """The embedding of an input: numbers that no decimal of 9 digits equals."""
    values = ((token_ids[i % len(token_ids)] + i + 1) / 3 for i in range(num_components))
    return struct.pack(f"<{num_components}f", *values)


def logits_of(token_ids: tuple[int, ...], num_labels: int, num_first: int = 0) -> bytes:
    """The logits of an input: numbers from -2 to 2 that depend on every id, on its place and on its type."""
    total = sum((i + 1) * (token_id + 1) * (1 if i < num_first else 2) for i, token_id in enumerate(token_ids))
    values = (math.sin(total + label) * 2 for label in range(num_labels))
    return struct.pack(f"<{num_labels}f", *values)


def pooled(token_ids: tuple[int, ...], pooling: Pooling) -> bytes:
    """The vector of an input, or those of its tokens."""
    if pooling.gives != "token_embeddings":
        return vector_of(token_ids, pooling.num_components)
    return b"".join(vector_of((token_id,), pooling.num_components) for token_id in token_ids)


class ScriptedStream:
    """One choice's tokens, as the router gives them."""

    def __init__(
        self,
        submit: Submit,
        script: Script,
        token_ids: tuple[int, ...],
        aborted: Callable[..., None],
        num_labels: int = 0,
    ) -> None:
        self.num_labels = num_labels
        self._submit, self._script, self._ids, self._aborted = submit, script, token_ids, aborted
        self._at = self._num_deltas = self.num_restarts = 0
        self._is_done = False
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._abort = asyncio.Event()

    @property
    def num_generated(self) -> int:
        return self._at

    @property
    def num_drafts(self) -> int:
        return self._script.drafted[0]

    @property
    def num_accepted(self) -> int:
        return self._script.drafted[1]

    @property
    def submit(self) -> Submit:
        return self._submit

    @property
    def num_cached(self) -> int:
        return self._script.num_cached

    num_known = num_cached
    num_loaded = 0

    def __aiter__(self) -> Self:
        return self

    def abort(self, reason: FinishReason = "abort") -> None:
        if not self._is_done and not self._abort.is_set():
            self._abort.set()
            self._aborted(self._submit.request_id, reason)

    async def __anext__(self) -> Delta:
        if self._is_done:
            raise StopAsyncIteration
        await asyncio.sleep(0)
        limit = min(len(self._ids), self._submit.params.max_tokens)
        if self._at < limit and not self._abort.is_set():
            return self._tokens(limit)
        if not self._script.ends:
            await self._abort.wait()
        return self._last()

    def _tokens(self, limit: int) -> Delta:
        cuts = self._script.cuts
        size = cuts[min(self._num_deltas, len(cuts) - 1)]
        start, self._at = self._at, min(limit, self._at + size)
        self._num_deltas += 1
        # Times that a test can work out: the first step 1 s after arrival, a token every 10 ms from 0.25 s later on.
        self.scheduled_s = self._submit.scheduling.arrival_s + 1.0
        self.first_token_s = self.scheduled_s + 0.25
        self.last_token_s = self.first_token_s + 0.01 * (self._at - 1)
        ends_here = self._at == limit and self._script.ends and not (self._script.failure or self._script.dies)
        ids = self._ids[start : self._at]
        is_stop = ids[-1] in (*self._submit.params.eos_token_ids, *self._submit.params.stop_token_ids)
        self._is_done = ends_here and not self._script.breaks
        return Delta(
            request_id=self._submit.request_id,
            token_ids=ids,
            logprobs=tuple(map(self._scored, ids)) if self._submit.params.logprobs is not None else (),
            prompt_logprobs=self._prompt_logprobs() if start == 0 else (),
            finish_reason=("stop" if is_stop else "length") if self._is_done else None,
            stop_token_id=ids[-1] if self._is_done and is_stop else None,
            num_cached_tokens=self._script.num_cached,
        )

    def _last(self) -> Delta:
        if self._script.dies:
            raise EngineDeadError("killed by signal 9 at /secret/path")
        if self._script.breaks:
            raise ZeroDivisionError("a bug at /secret/path")
        self._is_done = True
        reason: FinishReason = "abort" if self._abort.is_set() else "error" if self._script.failure else "length"
        pooling = self._submit.params.pooling
        return Delta(
            embedding=self._pooled(pooling) if pooling is not None else b"",
            request_id=self._submit.request_id,
            prompt_logprobs=self._prompt_logprobs() if self._num_deltas == 0 else (),
            finish_reason=reason,
            failure=self._script.failure,
        )

    def _pooled(self, pooling: Pooling) -> bytes:
        ids = self._submit.prompt_ids
        if pooling.gives == "logits":
            return logits_of(ids, self.num_labels, pooling.num_first)
        return pooled(ids, pooling)

    def _prompt_logprobs(self) -> tuple[WireLogprobs, ...]:
        if self._submit.params.prompt_logprobs is None:
            return ()
        if self._script.prompt_logprobs is not None:
            return self._script.prompt_logprobs
        return tuple(map(self._scored, self._submit.prompt_ids[1:]))

    def _scored(self, token_id: int) -> WireLogprobs:
        """Log probabilities that a test can compute. The token itself is always the second most likely."""
        num_top = max(self._submit.params.logprobs or 0, self._submit.params.prompt_logprobs or 0)
        likely = [((token_id + 1) % VOCAB_SIZE, -0.5), (token_id, -1.5)]
        likely += [((token_id + 1 + i) % VOCAB_SIZE, -1.5 - i) for i in range(1, num_top)]
        return WireLogprobs(token_id, -1.5, 2, tuple(likely[:num_top]))


@dataclass
class ScriptedRouter:
    """Submits become scripted streams. Used from the server's thread; tests read what happened."""

    model: ServedModel
    state: State = State.SERVING
    failure: str = ""
    is_leaving: bool = False
    is_outage_long: bool = False
    has_engine: bool = True
    refusal: RequestError | None = None
    scripts: list[Script] = field(default_factory=list)
    submits: list[Submit] = field(default_factory=list)
    aborted: dict[str, str] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    stats: EngineStats = field(default_factory=EngineStats)
    held: EngineStats = field(default_factory=EngineStats)
    num_resets: int = 0
    sleeps: list[tuple[int, str]] = field(default_factory=list)
    hidden_size: int = HIDDEN_SIZE
    num_labels: int = 1
    poolings: tuple[PoolingKind, ...] = ("last", "mean")
    gives_token_embeddings: bool = False
    speculative: str = "none"
    adapters: AdapterPlaces = field(default_factory=AdapterPlaces)
    waiting_by_tenant: dict[str, int] = field(default_factory=dict)
    running_by_tenant: dict[str, int] = field(default_factory=dict)

    @property
    def lifecycle(self) -> ScriptedRouter:
        """It is its own lifecycle, streams and loading: all say what a test has set."""
        return self

    streams = loading = sleeping = lifecycle

    @property
    def is_ready(self) -> bool:
        away = (State.STARTING, State.PAUSED, State.SLEEPING, State.FAILED, State.STOPPED)
        return self.state not in away and not self.is_outage_long

    @property
    def is_asleep(self) -> bool:
        return self.state in (State.PAUSED, State.SLEEPING)

    @property
    def level(self) -> int | None:
        return self.sleeps[-1][0] if self.is_asleep and self.sleeps else None

    @property
    def has_served(self) -> bool:
        return self.has_engine

    def fail(self, failure: str) -> None:
        self.state, self.failure = State.FAILED, failure

    @property
    def replicas(self) -> Replicas:
        replicas = Replicas(1)
        replicas[0].is_up, replicas[0].stats = self.state is State.SERVING, self.stats
        if self.has_engine:
            replicas[0].ready = self.ready
            replicas.keep_ready()
        return replicas

    @property
    def ready(self) -> Ready:
        return Ready(
            num_blocks=64,
            block_size=16,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size,
            num_labels=self.num_labels,
            poolings=self.poolings,
            gives_token_embeddings=self.gives_token_embeddings,
            weights_bytes=1,
            kv_bytes=1,
            planned_weights_bytes=1,
            planned_kv_bytes=1,
            device="cpu",
            dtype="float32",
            peaks=Peaks(1e10, 1e12),
            speculative=self.speculative,
            pid=4321,
        )

    def will(self, *scripts: Script) -> None:
        """Set the scripts of the next choices, in order. The last script applies to all further ones."""
        self.scripts = list(scripts)

    def num_waiting_by_tenant(self) -> dict[str, int]:
        return self.waiting_by_tenant

    def num_running_by_tenant(self) -> dict[str, int]:
        return self.running_by_tenant

    def check_queue(self, tenant: str, num_tokens: int, left_s: float | None = None, num_choices: int = 1) -> None:
        """Accepts every request."""

    def submit_choices(
        self, submits: Sequence[Submit], *, is_admitted: bool = False, **_: int | None
    ) -> list[ScriptedStream]:
        return [self.submit(submit, is_admitted=is_admitted or i > 0) for i, submit in enumerate(submits)]

    def submit(self, submit: Submit, *, is_admitted: bool = False) -> ScriptedStream:
        if self.refusal is not None:
            raise self.refusal
        script = self.scripts[min(len(self.submits), len(self.scripts) - 1)] if self.scripts else Script()
        ids = script.token_ids
        if ids is None:
            ends = self.model.eos_token_ids[:1] if script.ends and script.failure is None else ()
            ids = (*self.model.tokenizer.encode(script.text, False), *ends)
        with self.changed:
            self.submits.append(submit)
            self.changed.notify_all()
        allowed = submit.params.allowed_token_ids
        ids = (allowed[sum(submit.prompt_ids) % len(allowed)],) if allowed and submit.params.logprobs else ids
        return ScriptedStream(submit, script, ids, self._on_abort, self.num_labels)

    async def load(self) -> None:
        self.state, self.failure = State.SERVING, ""

    async def unload(self) -> None:
        self.state = State.UNLOADED

    async def sleep(self, level: int, mode: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.state = State.SLEEPING if level else State.PAUSED
        self.sleeps.append((level, mode))

    async def wake(self) -> None:
        self.state = State.SERVING

    def reset_prefix_cache(self, *, with_running: bool, with_tiers: bool) -> bool:
        self.num_resets += 1
        self.last_reset = with_running, with_tiers
        return self.state is State.SERVING

    def _on_abort(self, request_id: str, reason: str) -> None:
        with self.changed:
            self.aborted[request_id] = reason
            self.changed.notify_all()

    def wait_for(self, fact: Callable[[], bool]) -> None:
        """Wait until a submit or an abort makes the condition true."""
        with self.changed:
            assert self.changed.wait_for(fact, WAIT_S), "it never came true"

    def reset(self) -> None:
        self.state, self.failure, self.is_leaving, self.is_outage_long = State.SERVING, "", False, False
        self.has_engine, self.refusal = True, None
        self.stats, self.num_resets, self.hidden_size, self.speculative = EngineStats(), 0, HIDDEN_SIZE, "none"
        self.num_labels = 1
        self.poolings, self.gives_token_embeddings = ("last", "mean"), False
        self.held = EngineStats()
        self.scripts, self.submits, self.aborted, self.sleeps = [], [], {}, []
        self.waiting_by_tenant, self.running_by_tenant = {}, {}


LOOP_BOUND_S = 0.05
"""Maximum time that a callback may block the event loop (R13), if a processor adds 1.2 million integers in 8 ms."""


def slowness() -> float:
    """How often a processor's time is that of the processor for which the bound is stated, at this moment. It grows if
    other programs share the core's caches and units."""
    times = []
    for _ in range(3):
        started_s = time.thread_time()
        sum(range(1_200_000))
        times.append((time.thread_time() - started_s) / 0.008)
    return max(1.0, sorted(times)[1])


class Beats:
    """The longest block of a server's loop since `reset`, on the clock that advanced least, and its cause."""

    def __init__(self, *clocks: Callable[[], float]) -> None:
        self.worst_s = 0.0
        self.worst_stack = ""
        """The stack of the loop's thread during its longest block."""
        self.loop: asyncio.AbstractEventLoop
        self.probe = LoopProbe(self._seen, 0.005, clocks)
        self._thread_id: int | None = None
        self._beat_s = 0.0
        self._stack = ""
        threading.Thread(target=self._watch, name="who-holds-the-loop", daemon=True).start()

    def _seen(self, lag_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self._thread_id, self._beat_s = threading.get_ident(), time.monotonic()
        if lag_s > self.worst_s:
            self.worst_s, self.worst_stack = lag_s, self._stack
        self._stack = ""

    def _watch(self) -> None:
        while True:
            time.sleep(0.01)
            late_s = time.monotonic() - self._beat_s
            frame = sys._current_frames().get(self._thread_id or 0)
            if frame is not None and late_s > _HELD_S and not self._stack:
                self._stack = "".join(traceback.format_stack(frame)[-_NUM_FRAMES:])

    def reset(self) -> None:
        gc.freeze()  # as the daemon does: a collection of all that the tests have imported takes 0.1 s
        self.worst_s, self.worst_stack = 0.0, ""

    @property
    def is_within_bound(self) -> bool:
        return self.worst_s < LOOP_BOUND_S or self.worst_s < LOOP_BOUND_S * slowness()

    def check(self) -> None:
        """Raises `AssertionError` with the function that blocked the loop, if it was sampled."""
        assert self.is_within_bound, (
            f"a callback held up the event loop for {self.worst_s * 1e3:.0f} ms, in:\n{self.worst_stack or 'not seen'}"
        )


_HELD_S = 0.02
"""Time after the last tick from which on the stack of the loop's thread is sampled."""
_NUM_FRAMES = 8


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, probe: LoopProbe | None, on_startup: Callable[[], None]) -> None:
        super().__init__(config)
        self._probe, self._on_startup = probe, on_startup
        self.is_up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_startup()
        if self._probe is not None:
            self._probe.start()
        self.is_up.set()


def app_settings(**given: Any) -> Settings:
    """The default settings, but for some that are given, and any `Host` is allowed. Not checked, so that a test can
    have small bounds."""
    keys = {name: tuple(map(SecretStr, given[name])) for name in ("api_key", "admin_key") if name in given}
    return Settings().model_copy(update={"host": "0.0.0.0"} | given | keys)


@contextlib.contextmanager
def serving(
    model: ServedModel,
    router: ScriptedRouter | Router,
    settings: Settings,
    root_path: str = "",
    metrics: Metrics | None = None,
    limits: ConnectionLimits | None = None,
    probe: LoopProbe | None = None,
    on_startup: Callable[[], None] = lambda: None,
    others: Sequence[Backend] = (),
    config: EngineConfig | None = None,
    **waits: float,
) -> Iterator[str]:
    """Runs a server on a free port of the loopback and yields its URL. `on_startup` is called on its event loop.
    `others`: further models. `waits`: those of `create_app`."""
    metrics = metrics or Metrics("tiny")
    app = create_app(Backend(model, router, metrics, settings, config), *others, **waits)  # type: ignore[arg-type]
    server = _Server(http_config(app, metrics, limits, root_path), probe, on_startup)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=uvloop.run, args=(server.serve([listener]),))
        thread.start()
        try:
            assert server.is_up.wait(WAIT_S)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive(), "the server did not end"


@pytest.fixture(scope="session")
def model() -> ServedModel:
    loaded = ServedModel.load(MODEL_PATH, (NAME, "alias"), max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)
    return replace(loaded, created=int(time.time()))


def coder(model: ServedModel) -> ServedModel:
    """The model, as if rare tokens of its vocabulary were those for filling in the middle."""
    stated = {part: VOCAB_SIZE - 1 - i for i, part in enumerate(("prefix", "suffix", "middle", "pad", "repo", "file"))}
    return replace(model, fill_in=FillIn.of(model.tokenizer, VOCAB_SIZE, stated))


@pytest.fixture(scope="session")
def shared_router(model: ServedModel) -> ScriptedRouter:
    return ScriptedRouter(model)


@pytest.fixture(scope="session")
def shared_beats() -> Beats:
    """Measures the processor time of the loop's thread, because the tests' threads are in the same process."""
    return Beats(time.monotonic, time.thread_time)


@pytest.fixture(scope="session")
def shared_url(model: ServedModel, shared_router: ScriptedRouter, shared_beats: Beats) -> Iterator[str]:
    with serving(model, shared_router, app_settings(access_log=False), probe=shared_beats.probe) as url:
        yield url


@pytest.fixture(autouse=True)
def calm_loop(shared_beats: Beats) -> Iterator[None]:
    """Checks after each test that no callback blocked the loop of the shared server."""
    shared_beats.reset()
    yield
    shared_beats.check()


@pytest.fixture
def router(shared_router: ScriptedRouter) -> ScriptedRouter:
    """The router of `url`, reset."""
    shared_router.reset()
    return shared_router


@pytest.fixture
def url(shared_url: str, router: ScriptedRouter) -> str:
    """A server with default options, its router reset."""
    del router
    return shared_url


@pytest.fixture
def serve(model: ServedModel, router: ScriptedRouter) -> Iterator[Callable[..., str]]:
    """Starts a server with options of the test's own."""
    with contextlib.ExitStack() as stack:
        yield lambda settings, *options, **others: stack.enter_context(
            serving(model, router, settings, *options, **others)
        )


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=WAIT_S) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=WAIT_S, headers=FRESH) as client:
        yield client


@pytest.fixture(scope="module")
def wide(model: ServedModel) -> Iterator[tuple[ScriptedRouter, str]]:
    """(router, URL) of the embedded model, as if its context held more than a few tools."""
    served = replace(model, max_model_len=8_192)
    router = ScriptedRouter(served)
    with serving(served, router, app_settings(access_log=False)) as url:
        yield router, url


@pytest.fixture
def wide_router(wide: tuple[ScriptedRouter, str]) -> ScriptedRouter:
    wide[0].reset()
    return wide[0]


@pytest.fixture
def wide_http(wide: tuple[ScriptedRouter, str], wide_router: ScriptedRouter) -> Iterator[httpx.Client]:
    del wide_router
    with httpx.Client(base_url=wide[1], timeout=WAIT_S) as client:
        yield client


@pytest.fixture
def script() -> type[Script]:
    """Makes the content of a choice: `router.will(script(text="..."))`."""
    return Script


Serve = Callable[[str, str], tuple[openai.OpenAI, ScriptedRouter]]
"""(format of calls, format of reasoning) -> a client and the router of its server."""


@pytest.fixture
def serving_format(model: ServedModel) -> Iterator[Serve]:
    """Serves the embedded tokenizer as if its model wrote another format."""
    with contextlib.ExitStack() as stack:

        def serve(tools: str, reasoning: str) -> tuple[openai.OpenAI, ScriptedRouter]:
            served = replace(model, format=detect(Clues(), tools, reasoning))
            router = ScriptedRouter(served)
            url = stack.enter_context(serving(served, router, app_settings(access_log=False)))
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=20)
            return stack.enter_context(client), router

        yield serve


ServeAs = Callable[..., tuple[httpx.Client, ScriptedRouter]]


@pytest.fixture
def serve_as(model: ServedModel) -> Iterator[ServeAs]:
    """Serves the embedded tokenizer, as if the folder of its model said other things."""
    with contextlib.ExitStack() as stack:

        def serve(num_labels: int = 0, **fields: Any) -> tuple[httpx.Client, ScriptedRouter]:
            served = replace(model, **fields)
            router = ScriptedRouter(served, num_labels=num_labels)
            url = stack.enter_context(serving(served, router, app_settings(access_log=False)))
            return stack.enter_context(httpx.Client(base_url=url, timeout=60)), router

        yield serve
