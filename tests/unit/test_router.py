"""The router: every accepted request ends once, waiting deltas merge without loss, and full queues refuse requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
import tracemalloc
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from inferd.engine.api.cost.roofline import Peaks
from inferd.engine.api.errors import EngineDeadError, ModelError, RequestError
from inferd.engine.api.process.flight_recorder import tag_of
from inferd.engine.api.wire.messages import (
    Abort,
    Delta,
    EngineStats,
    Failed,
    FromEngine,
    Phase,
    Ready,
    ResetPrefixCache,
    StepModel,
    StepOutput,
    Submit,
    SubmitChoices,
    ToEngine,
    WireLogprobs,
)
from inferd.engine.api.wire.params import Pooling, SamplingParams, SchedulingParams
from inferd.server.dispatch import model_lifecycle as lifecycle_module
from inferd.server.dispatch import recovery as recovery_module
from inferd.server.dispatch import router as router_module
from inferd.server.dispatch import token_stream
from inferd.server.dispatch.admission import Backlog, QueueBounds
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.dispatch.router import Router, RouterOptions
from inferd.server.dispatch.token_stream import TokenStream, merge
from inferd.server.observability.metrics import Metrics
from inferd.server.observability.request_record import RequestRecord
from inferd.server.schema import strict_json

READY = Ready(
    num_blocks=8, block_size=16, max_model_len=64, vocab_size=32, weights_bytes=1, kv_bytes=1, planned_weights_bytes=1,
    planned_kv_bytes=1, device="cpu", dtype="float32", peaks=Peaks(1e10, 1e12),
)  # fmt: skip


class FakeClient:
    """Replaces the engine's end of the wire."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.inbox: asyncio.Queue[FromEngine] = asyncio.Queue()
        self.is_dead = False

    def send(self, message: ToEngine) -> None:
        if self.is_dead:
            raise EngineDeadError("nobody is there")
        self.sent.append(message)

    async def receive(self) -> FromEngine:
        return await self.inbox.get()


def submit(name: str) -> Submit:
    return Submit(request_id=name, prompt_ids=(1, 2), params=SamplingParams(max_tokens=4, seed=1))


def step(*deltas: Delta, ended_s: float = 0.0) -> StepOutput:
    return StepOutput(deltas=deltas, stats=EngineStats(num_blocks=8), step_ended_s=ended_s)


Scenario = Callable[[Router, FakeClient], Coroutine[Any, Any, None]]


def play(
    scenario: Scenario, *, is_ready: bool = True, options: RouterOptions | None = None, receives: bool = True
) -> None:
    """`receives`: False runs the router only until it is ready; from then on the scenario runs it."""

    async def main() -> None:
        client = FakeClient()
        router = Router(client, Metrics("model"), options)  # type: ignore[arg-type]
        running = asyncio.create_task(router.run())
        if is_ready:
            client.inbox.put_nowait(READY)
            await router.lifecycle.loaded.wait()
        if not receives:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await scenario(router, client)
        running.cancel()

    asyncio.run(asyncio.wait_for(main(), 20))


async def collect(stream: TokenStream) -> list[Delta]:
    return [delta async for delta in stream]


def test_a_vector_has_a_time_of_prefill() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        asked = Submit(request_id="a", prompt_ids=(1,), params=SamplingParams(max_tokens=0, seed=0, pooling=Pooling()))
        stream = router.submit(asked)
        begun = Delta(request_id="a", scheduled_s=5.0)
        ended = Delta(request_id="a", finish_reason="stop", embedding=b"1234")
        client.inbox.put_nowait(step(begun, ended_s=6.0))
        client.inbox.put_nowait(step(ended, ended_s=7.5))
        assert (await collect(stream))[-1].embedding == b"1234"
        record = stream.record("stop", None)
        assert (record.prefill_s, record.finished_s) == (2.5, 7.5)
        assert record.ttft_s is record.decode_s is None, "it has no token"

    play(scenario)


def test_deltas_reach_the_stream_they_are_for() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        streams = {name: router.submit(submit(name)) for name in ("a", "b")}
        for ids in ((1, 2), (3, 4)):
            client.inbox.put_nowait(
                step(*(Delta(request_id=n, token_ids=(i,)) for n, i in zip("ab", ids, strict=True)))
            )
        client.inbox.put_nowait(step(*(Delta(request_id=n, finish_reason="length") for n in "ab")))
        for name, expected in (("a", (1, 3)), ("b", (2, 4))):
            deltas = await collect(streams[name])
            assert merge(deltas).token_ids == expected
            assert [delta.finish_reason for delta in deltas][-1] == "length"
        assert router.streams.num_active == 0

    play(scenario)


class SeenLatencies(Metrics):
    """The latencies that the router records."""

    def __init__(self) -> None:
        super().__init__("model")
        self.ttfts_s: list[float] = []
        self.gaps_s: list[tuple[int, float]] = []
        self.records: list[RequestRecord] = []

    def first_token(self, ttft_s: float) -> None:
        self.ttfts_s.append(ttft_s)

    def tokens(self, num_tokens: int, gap_s: float) -> None:
        self.gaps_s.append((num_tokens, gap_s))

    def request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)


@pytest.mark.parametrize("dies", [False, True], ids=["one engine", "an engine that dies between"])
def test_latencies_are_between_the_engines_stamps(dies: bool) -> None:
    """The times do not depend on how late the event loop reads: all outputs are here before it reads one."""

    async def run() -> None:
        client, seen = FakeClient(), SeenLatencies()
        router = Router(client, seen)  # type: ignore[arg-type]
        client.inbox.put_nowait(READY)
        running = asyncio.create_task(router.run())
        await router.lifecycle.loaded.wait()
        stream = router.submit(structs.replace(submit("a"), scheduling=SchedulingParams(arrival_s=100.0)))
        client.inbox.put_nowait(step(Delta(request_id="a", token_ids=(1,), scheduled_s=101.0), ended_s=103.0))
        if dies:
            await until(lambda: stream.num_generated == 1)
            router.recovery.lose({})
            client.inbox.put_nowait(READY)
        client.inbox.put_nowait(step(Delta(request_id="a", token_ids=(2, 3, 4)), ended_s=109.0))
        client.inbox.put_nowait(StepOutput(deltas=(), stats=EngineStats()))
        client.inbox.put_nowait(step(Delta(request_id="a", token_ids=(5,), finish_reason="length"), ended_s=110.5))
        assert merge(await collect(stream)).token_ids == (1, 2, 3, 4, 5)
        running.cancel()
        assert (seen.ttfts_s, seen.gaps_s) == ([3.0], [(3, 6.0), (1, 1.5)])
        (record,) = seen.records
        assert (record.ttft_s, record.queue_s, record.prefill_s, record.decode_s) == (3.0, 1.0, 2.0, 7.5)
        assert (record.e2e_s, record.tpot_s) == (10.5, 7.5 / 4)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_tokens_and_ends_are_progress_and_nothing_else_is() -> None:
    """Shows a crash loop whether anything moves between deaths. An end without a token counts, too."""

    async def scenario(router: Router, client: FakeClient) -> None:
        streams = [router.submit(submit(name)) for name in "abc"]
        seen = [router.replicas.num_delivered]
        for output, stream in (
            (StepOutput(deltas=(), stats=EngineStats()), None),
            (step(Delta(request_id="a", prompt_logprobs=(WireLogprobs(2, -1.0, 1, ()),))), streams[0]),
            (step(Delta(request_id="a", token_ids=(1, 2, 3))), streams[0]),
            (step(Delta(request_id="b", finish_reason="abort")), streams[1]),
            (step(Delta(request_id="c", token_ids=(4, 5), finish_reason="length")), streams[2]),
        ):
            client.inbox.put_nowait(output)
            if stream is not None:
                await anext(stream)
            seen.append(router.replicas.num_delivered)
        assert seen == [0, 0, 0, 3, 4, 7]

    play(scenario)


def test_tokens_beside_the_first_one_came_without_a_gap() -> None:
    """Every token but a stream's first has a gap, whatever tokens came together."""

    async def run() -> None:
        client, seen = FakeClient(), SeenLatencies()
        router = Router(client, seen)  # type: ignore[arg-type]
        client.inbox.put_nowait(READY)
        running = asyncio.create_task(router.run())
        await router.lifecycle.loaded.wait()
        stream = router.submit(structs.replace(submit("a"), scheduling=SchedulingParams(arrival_s=1.0)))
        client.inbox.put_nowait(step(Delta(request_id="a", token_ids=(1, 2, 3), finish_reason="stop"), ended_s=2.0))
        await collect(stream)
        running.cancel()
        assert (seen.ttfts_s, seen.gaps_s) == ([1.0], [(2, 0.0)])

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("dies", [False, True], ids=["one engine", "an engine that dies between"])
def test_drafts_of_a_request_are_counted_over_its_engines(dies: bool) -> None:
    """An engine counts from the start of its own request, so the journal adds up what each delta says."""

    async def scenario(router: Router, client: FakeClient) -> None:
        stream = router.submit(submit("a"))
        client.inbox.put_nowait(step(Delta(request_id="a", token_ids=(1,))))
        client.inbox.put_nowait(step(Delta(request_id="a", token_ids=(2, 3, 4), num_drafts=5)))
        await until(lambda: stream.num_generated == 4)
        assert (stream.num_drafts, stream.num_accepted) == (5, 2)
        if dies:
            router.recovery.lose({})
            client.inbox.put_nowait(READY)
        client.inbox.put_nowait(step(Delta(request_id="a", token_ids=(5,), num_drafts=2)))
        client.inbox.put_nowait(step(Delta(request_id="a", finish_reason="length")))
        assert merge(await collect(stream)).token_ids == (1, 2, 3, 4, 5)
        assert (stream.num_drafts, stream.num_accepted) == (7, 2)

    play(scenario)


def test_a_slow_reader_gets_one_merged_delta() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        stream = router.submit(submit("a"))
        for token_id in range(5):
            client.inbox.put_nowait(step(Delta(request_id="a", token_ids=(token_id,))))
        client.inbox.put_nowait(step(Delta(request_id="a", finish_reason="stop", stop_token_id=9)))
        await router.streams.drained()
        (delta,) = await collect(stream)
        assert delta.token_ids == (0, 1, 2, 3, 4)
        assert (delta.finish_reason, delta.stop_token_id) == ("stop", 9)

    play(scenario)


DELTAS = st.builds(
    Delta,
    request_id=st.just("a"),
    token_ids=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    logprobs=st.just(())
    | st.tuples(st.builds(WireLogprobs, st.integers(0, 9), st.just(-1.0), st.just(1), st.just(()))),
    num_cached_tokens=st.integers(0, 3),
    scheduled_s=st.none() | st.just(1.0),
    num_drafts=st.integers(0, 3),
)


@given(st.lists(DELTAS, min_size=1), st.integers(1, 8))
def test_merging_in_any_grouping_is_the_same(deltas: list[Delta], size: int) -> None:
    grouped = [merge(deltas[i : i + size]) for i in range(0, len(deltas), size)]
    assert merge(grouped) == merge(deltas)


def test_a_backlog_is_kept_merged_and_nothing_of_it_is_lost() -> None:
    """A reader that stands still costs memory for tokens, not for deltas."""

    async def run() -> None:
        stream = TokenStream(submit("a"), lambda _: None)
        for token_id in range(1_000):
            stream.push(Delta(request_id="a", token_ids=(token_id,)))
        assert len(stream._pending) < 100
        assert (await anext(stream)).token_ids == tuple(range(1_000))
        for token_id in range(100):
            stream.push(Delta(request_id="a", token_ids=(token_id,)))
        stream.push(Delta(request_id="a", finish_reason="length"))
        last = await anext(stream)
        assert (last.token_ids, last.finish_reason) == (tuple(range(100)), "length")

    asyncio.run(run())


@given(st.lists(DELTAS, max_size=300), st.lists(st.integers(0, 200), max_size=4))
def test_a_backlog_is_read_as_it_came_however_it_was_kept(deltas: list[Delta], pauses: list[int]) -> None:
    """Reads some deltas now and then. Deltas with log probabilities that wait longer are packed."""

    async def run() -> None:
        stream, read = TokenStream(submit("a"), lambda _: None), list[Delta]()
        reads = {sum(pauses[: i + 1]) for i in range(len(pauses))}
        for number, delta in enumerate(deltas):
            stream.push(delta)
            if number in reads:
                read.append(await anext(stream))
        stream.push(Delta(request_id="a", finish_reason="length"))
        read += [delta async for delta in stream]
        assert merge(read) == merge([*deltas, Delta(request_id="a", finish_reason="length")])

    asyncio.run(run())


def test_log_probabilities_that_nobody_reads_are_packed() -> None:
    """A token with two alternatives takes 70 bytes, 73 with the unused capacity of a pack, and 330 as objects."""
    stream = TokenStream(submit("a"), lambda _: None)
    tracemalloc.start()
    try:
        for i in range(1_000):
            scored = WireLogprobs(3, -i / 7, 1, ((3, -i / 7), (4, -i / 3)))
            stream.push(Delta(request_id="a", token_ids=(3,), logprobs=(scored,)))
        # What other threads of the test process took meanwhile does not count.
        own = [tracemalloc.Filter(True, file) for file in (__file__, token_stream.__file__, strict_json.__file__)]
        traces = tracemalloc.take_snapshot().filter_traces(own).traces
        assert sum(trace.size for trace in traces) < 80 * 1_000
    finally:
        tracemalloc.stop()


def test_scores_of_a_prompt_that_wait_are_packed_and_read_one_by_one() -> None:
    """A reader of several prompts may wait for its socket at the first. Scores of 131,000 tokens in one delta
    held the event loop for 0.14 s, and took 91 MB instead of 15 while they waited."""

    async def run() -> None:
        stream = TokenStream(submit("a"), lambda _: None)
        deltas = [
            Delta(request_id="a", prompt_logprobs=tuple(WireLogprobs(i, -1.5, 1, ()) for i in range(start, start + 9)))
            for start in range(0, 45, 9)
        ]
        for delta in deltas:
            stream.push(delta)
        assert [type(waiting) for waiting in stream._pending] == [Delta, *[bytes] * 4]
        stream.push(Delta(request_id="a", finish_reason="length"))
        assert [delta async for delta in stream][:-1] == deltas

    asyncio.run(run())


def test_an_abort_is_sent_once_and_never_after_the_end() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        stream = router.submit(submit("a"))
        stream.abort()
        stream.abort()
        client.inbox.put_nowait(step(Delta(request_id="a", finish_reason="abort")))
        await collect(stream)
        stream.abort()
        assert [message for message in client.sent if isinstance(message, Abort)] == [Abort(("a",))]

    play(scenario)


def test_when_the_engine_dies_every_stream_ends_and_nothing_is_taken() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        streams = [router.submit(submit(str(i))) for i in range(3)]
        router.loading.stop()
        for stream in streams:
            (delta,) = await collect(stream)
            assert delta.finish_reason == "error"
            assert delta.failure is not None and delta.failure.code == "engine_error"
            stream.abort()
        assert not router.lifecycle.is_ready
        with pytest.raises(RequestError, match="not running"):
            router.submit(submit("late"))

    play(scenario)


def test_the_next_engine_is_told_what_every_stream_was_given() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        streams = {name: router.submit(submit(name)) for name in "abc"}
        first = Delta(
            request_id="a", token_ids=(5,), num_cached_tokens=1, prompt_logprobs=(WireLogprobs(2, -1.0, 1, ()),)
        )
        client.inbox.put_nowait(step(first))
        assert (await anext(streams["a"])).token_ids == (5,)
        streams["b"].abort("stop")
        router.recovery.lose({})
        (ended,) = await collect(streams["b"])
        assert ended.finish_reason == "abort", "an abort that the dead engine never answered"
        assert router.lifecycle.state is State.RECOVERING and router.lifecycle.is_ready
        streams["d"] = router.submit(submit("d"))
        streams["c"].abort()
        assert (await collect(streams["c"]))[-1].finish_reason == "abort", "without an engine an abort is at once"
        stats = router.streams.stats
        assert (router.streams.stats.num_waiting, stats.num_blocks) == (2, 0), "the dead engine counts nothing any more"

        client.sent.clear()
        client.inbox.put_nowait(READY)
        await until(lambda: router.lifecycle.state is State.SERVING)
        again = structs.replace(submit("a"), emitted_ids=(5,), num_prompt_logprobs=1)
        assert client.sent == [again, submit("d")]
        assert router.streams.stats.num_waiting == 0, "the next engine counts what it was sent"
        client.inbox.put_nowait(step(Delta(request_id="a", token_ids=(6,), finish_reason="length")))
        (rest,) = await collect(streams["a"])
        assert (rest.token_ids, rest.num_cached_tokens) == ((6,), 1), "usage says what the first engine's cache had"
        streams["d"].abort()
        assert client.sent[-1] == Abort(("d",))

    play(scenario)


def test_a_recovery_is_told_with_all_that_go_on_and_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    for module in (router_module, recovery_module, lifecycle_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def scenario(router: Router, client: FakeClient) -> None:
        told: list[tuple[int, float]] = []
        router.hooks.on_recovered = lambda num_replayed, outage_s: told.append((num_replayed, outage_s))
        for name in "abc":
            router.submit(submit(name))
        router.recovery.lose({})
        now[0] = 107.5
        client.inbox.put_nowait(READY)
        await until(lambda: bool(told))
        assert told == [(3, 7.5)]

    play(scenario)


def test_replays_are_sent_in_slices_in_which_others_get_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two parts of a replay, an aborted request ends unsent, and a new one is sent last."""
    monkeypatch.setattr(recovery_module, "_REPLAYED_AT_ONCE", 4)  # two requests at a time

    async def scenario(router: Router, client: FakeClient) -> None:
        streams = {name: router.submit(submit(name)) for name in "abcdef"}
        router.recovery.lose({})
        client.sent.clear()
        client.inbox.put_nowait(READY)
        await until(lambda: len(client.sent) == 2)
        assert router.lifecycle.state is State.SERVING
        streams["d"].abort()
        assert (await collect(streams["d"]))[-1].finish_reason == "abort", "the engine never hears of it"
        streams["a"].abort()
        assert client.sent[2:] == [Abort(("a",))], "and does of what it was told"
        router.submit(submit("g"))
        assert len(client.sent) == 3, "who comes now comes last"
        await until(lambda: len(client.sent) == 7)
        assert [message.request_id for message in client.sent if isinstance(message, Submit)] == list("abcefg")
        router.submit(submit("h"))
        assert client.sent[-1] == submit("h")

    play(scenario)


def test_a_death_in_the_middle_of_the_replays_begins_them_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_module, "_REPLAYED_AT_ONCE", 1)

    async def scenario(router: Router, client: FakeClient) -> None:
        streams = {name: router.submit(submit(name)) for name in "abcd"}
        router.recovery.lose({})
        client.sent.clear()
        running = asyncio.create_task(router.run())
        client.inbox.put_nowait(READY)
        await until(lambda: len(client.sent) == 2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        streams["b"].abort()  # sent to the engine that dies
        router.recovery.lose({})
        assert (await collect(streams["b"]))[-1].finish_reason == "abort"

        client.sent.clear()
        running = asyncio.create_task(router.run())
        client.inbox.put_nowait(READY)
        await until(lambda: len(client.sent) == 3)
        assert [message.request_id for message in client.sent if isinstance(message, Submit)] == list("acd")
        assert router.streams.num_active == 3
        running.cancel()

    play(scenario, receives=False)


def test_what_comes_before_a_death_is_noticed_waits_for_the_next_engine() -> None:
    """The socket notices first that its other end is gone."""

    async def scenario(router: Router, client: FakeClient) -> None:
        client.is_dead = True
        stream, given_up = router.submit(submit("a")), router.submit(submit("b"))
        given_up.abort()
        assert router.reset_prefix_cache()
        client.is_dead = False
        router.recovery.lose({})
        assert (await collect(given_up))[-1].finish_reason == "abort"
        client.inbox.put_nowait(READY)
        await until(lambda: router.lifecycle.state is State.SERVING)
        assert client.sent == [submit("a")]
        client.inbox.put_nowait(step(Delta(request_id="a", token_ids=(6,), finish_reason="length")))
        assert (await collect(stream))[-1].finish_reason == "length"

    play(scenario)


async def until(fact: Callable[[], bool]) -> None:
    for _ in range(1000):
        if fact():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


def test_a_long_outage_is_not_ready() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        stream = router.submit(submit("a"))
        router.recovery.lose({})
        assert not router.lifecycle.is_ready and router.lifecycle.state is State.RECOVERING
        with pytest.raises(RequestError, match="being restarted"):
            router.submit(submit("b"))
        assert router.streams.num_active == 1, "who was there before stays"
        client.inbox.put_nowait(READY)
        await until(lambda: router.lifecycle.is_ready)
        stream.abort()

    play(scenario, options=RouterOptions(outage_grace_s=0.0))


def test_requests_wait_for_the_next_engine_within_the_bound() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        router.recovery.lose({})
        router.submit(submit("a"))
        with pytest.raises(RequestError, match="1 requests are waiting"):
            router.submit(submit("b"))

    play(scenario, options=RouterOptions(queue=QueueBounds(1)))


@pytest.mark.parametrize(
    ("is_ready", "drain", "words"), [(False, False, "still loading"), (True, True, "shutting down")]
)
def test_closed_times(is_ready: bool, drain: bool, words: str) -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        if drain:
            router.lifecycle.drain()
        assert not router.lifecycle.is_ready
        with pytest.raises(RequestError, match=words) as refusal:
            router.submit(submit("a"))
        assert refusal.value.code == "server_is_overloaded"

    play(scenario, is_ready=is_ready)


def test_the_queue_is_bounded_until_requests_begin() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        first = router.submit(submit("a"))
        router.submit(submit("b"))
        with pytest.raises(RequestError, match="2 requests are waiting"):
            router.submit(submit("c"))
        client.inbox.put_nowait(step(Delta(request_id="a", token_ids=(1,), scheduled_s=1.0)))
        await anext(first)
        router.submit(submit("c"))

    play(scenario, options=RouterOptions(queue=QueueBounds(2)))


def test_sequences_of_each_tenant_run_or_wait() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        for name, tenant in (("a", "acme"), ("b", "acme"), ("c", "bob"), ("d", "")):
            scheduling = SchedulingParams(arrival_s=0.0, tenant=tenant)
            last = router.submit(structs.replace(submit(name), scheduling=scheduling))
        client.inbox.put_nowait(step(*(Delta(request_id=name, token_ids=(1,), scheduled_s=1.0) for name in "acd")))
        await anext(last)
        assert router.streams.num_running_by_tenant() == {"acme": 1, "bob": 1}
        assert router.streams.num_waiting_by_tenant() == {"acme": 1}

    play(scenario)


def choices(name: str, count: int, prompt_ids: tuple[int, ...] = (1, 2)) -> list[Submit]:
    asked = structs.replace(submit(name), prompt_ids=prompt_ids)
    return [
        structs.replace(asked, request_id=f"{name}-{i}", params=structs.replace(asked.params, seed=i))
        for i in range(count)
    ]


def test_the_choices_of_a_prompt_travel_once_and_are_read_one_by_one() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        submits = choices("a", 3)
        streams = router.submit_choices(submits)
        assert client.sent == [SubmitChoices(first=submits[0], others=(("a-1", 1), ("a-2", 2)))]
        assert [stream.submit for stream in streams] == submits
        client.inbox.put_nowait(step(*(Delta(request_id=f"a-{i}", token_ids=(i,)) for i in range(3))))
        await until(lambda: streams[2].num_generated == 1)
        router.recovery.lose({})
        streams[2].abort()
        assert merge(await collect(streams[2])).finish_reason == "abort"
        client.sent.clear()
        client.inbox.put_nowait(READY)
        await until(lambda: len(client.sent) == 2)
        expected = [structs.replace(each, emitted_ids=(i,)) for i, each in enumerate(submits[:2])]
        assert client.sent == expected, "each goes on by itself"

    play(scenario)


def test_room_is_asked_for_all_choices_and_a_shared_prompt_waits_once() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        router.submit_choices(choices("a", 5))
        with pytest.raises(RequestError, match="5 requests"):
            router.submit_choices(choices("b", 4))
        assert len(client.sent) == 1 and router.streams.num_active == 5, "all or none"
        backlog = router.streams.backlog
        assert (backlog.num_requests, backlog.num_tokens) == (5, 2)
        client.inbox.put_nowait(step(Delta(request_id="a-0", scheduled_s=1.0)))
        await until(lambda: backlog.num_requests == 4)
        assert backlog.num_tokens == 0
        router.submit_choices(choices("b", 2), num_choices=4, num_tokens=4)
        with pytest.raises(RequestError, match="6 requests"):
            router.submit_choices(choices("c", 1), num_choices=3)
        router.submit_choices(choices("b2", 2), is_admitted=True)

    play(scenario, options=RouterOptions(QueueBounds(8)))


@pytest.mark.parametrize("closed", ["full", "drained", "paused"])
def test_what_goes_on_of_a_request_is_taken_where_a_new_one_is_not(closed: str) -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        router.submit(submit("a-0"))
        if closed == "drained":
            router.lifecycle.drain()
        if closed == "paused":
            router.recovery.lose({})
        with pytest.raises(RequestError):
            router.submit(submit("b"))
        router.submit(submit("a-1"), is_admitted=True)
        assert router.streams.num_active == 2
        router.loading.stop()
        with pytest.raises(RequestError, match="not running"):
            router.submit(submit("a-2"), is_admitted=True)

    bounds = QueueBounds(1) if closed == "full" else QueueBounds()
    play(scenario, options=RouterOptions(queue=bounds, outage_grace_s=0.0))


def test_a_drain_waits_for_what_goes_on_behind_what_ended() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        async def request() -> None:
            for i in range(3):
                await collect(router.submit(submit(f"a-{i}"), is_admitted=i > 0))

        running = asyncio.create_task(request())
        await until(lambda: router.streams.num_active == 1)
        router.lifecycle.drain()
        drained = asyncio.create_task(router.streams.drained())
        for i in range(3):
            await until(lambda i=i: f"a-{i}" in router.streams.by_id)  # type: ignore[misc]
            assert not drained.done()
            client.inbox.put_nowait(step(Delta(request_id=f"a-{i}", finish_reason="length")))
        await drained
        assert running.done()

    play(scenario)


def test_room_is_asked_for_with_the_callers_own_target() -> None:
    """40 requests began, one each 50 ms, and 19 wait: a first token comes in about a second."""

    async def scenario(router: Router, client: FakeClient) -> None:
        clock = [0.0]
        router.streams.backlog = Backlog(QueueBounds(), lambda: clock[0])
        for _ in range(59):
            router.streams.backlog.add("t", 1)
        for _ in range(40):
            clock[0] += 0.05
            router.streams.backlog.remove("t", 1)
        router.check_queue("t", 1)
        router.check_queue("t", 1, 2.0)
        with pytest.raises(RequestError, match="target leaves"):
            router.check_queue("t", 1, 0.5)
        now_s = time.monotonic()
        for name, arrival_s, target_s, is_taken in (
            ("in time", now_s, 2.0, True), ("too short", now_s, 0.5, False), ("too late", now_s - 60.0, 60.5, False)
        ):  # fmt: skip
            scheduling = SchedulingParams(tenant="t", arrival_s=arrival_s, ttft_target_s=target_s)
            with contextlib.nullcontext() if is_taken else pytest.raises(RequestError, match="target leaves"):
                router.submit(structs.replace(submit(name), scheduling=scheduling))

    play(scenario)


def test_room_is_asked_for_the_prompt_tokens_of_all_pieces() -> None:
    """At 1,000 tokens a second a queue of one second has room for 1,000 prompt tokens."""

    async def scenario(router: Router, client: FakeClient) -> None:
        stats = EngineStats(num_blocks=8, step_model=StepModel(prefill_tokens_per_s=1_000.0))
        client.inbox.put_nowait(structs.replace(step(), stats=stats))
        await until(lambda: router.replicas[0].stats == stats)
        router.submit(structs.replace(submit("first"), prompt_ids=(1,) * 900))
        with pytest.raises(RequestError, match="prompt tokens"):
            router.submit(structs.replace(submit("long"), prompt_ids=(1,) * 200))
        with pytest.raises(RequestError, match="prompt tokens"):
            router.submit_choices((submit("piece"),), num_tokens=200)
        router.submit(structs.replace(submit("short"), prompt_ids=(1,) * 90))

    play(scenario, options=RouterOptions(QueueBounds(seconds=1.0)))


def test_an_id_in_use_is_refused() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        router.submit(submit("a"))
        with pytest.raises(RequestError, match="already in use"):
            router.submit(submit("a"))

    play(scenario)


def test_phases_are_passed_on_and_a_failed_start_is_raised() -> None:
    async def main() -> None:
        client = FakeClient()
        router = Router(client, Metrics("model"))  # type: ignore[arg-type]
        seen: list[Phase] = []
        router.hooks.on_phase = lambda _, phase: seen.append(phase)
        client.inbox.put_nowait(Phase("weights", 1.0, "all"))
        client.inbox.put_nowait(Failed("ModelError", "truncated"))
        with pytest.raises(ModelError, match="truncated"):
            await router.run()
        assert [phase.name for phase in seen] == ["weights"]

    asyncio.run(main())


# -- several replicas --------------------------------------------------------------------------------------------------


def play_two(scenario: Callable[[Router, list[FakeClient]], Coroutine[Any, Any, None]]) -> None:
    """Run a router with two replicas whose engines are ready."""

    async def main() -> None:
        clients = [FakeClient(), FakeClient()]
        metrics = Metrics("model")
        router = Router(clients[0], metrics, RouterOptions(num_replicas=2))  # type: ignore[arg-type]
        assert metrics.replica_up.values == {("0",): 0, ("1",): 0}, "a replica that never comes up has a series"
        router.attach(clients[1], 1)  # type: ignore[arg-type]
        running = [asyncio.create_task(router.run(index)) for index in range(2)]
        clients[1].inbox.put_nowait(READY)
        await asyncio.sleep(0.01)
        assert not router.lifecycle.loaded.is_set() and not router.lifecycle.is_ready, (
            "one replica has had no engine yet"
        )
        clients[0].inbox.put_nowait(READY)
        await router.lifecycle.loaded.wait()
        await scenario(router, clients)
        for task in running:
            task.cancel()

    asyncio.run(asyncio.wait_for(main(), 20))


def sent_to(client: FakeClient) -> list[str]:
    return [message.request_id for message in client.sent if isinstance(message, Submit)]


def test_replicas_share_the_requests_and_each_hears_of_its_own_aborts() -> None:
    async def scenario(router: Router, clients: list[FakeClient]) -> None:
        streams = [router.submit(submit(name)) for name in "abcd"]
        assert sorted(sent_to(clients[0]) + sent_to(clients[1])) == [*"abcd"]
        assert len(sent_to(clients[0])) == 2
        for stream in streams:
            stream.abort()
        for client in clients:
            assert [m.request_ids[0] for m in client.sent if isinstance(m, Abort)] == sent_to(client)
        assert router.reset_prefix_cache()
        assert all(client.sent[-1] == ResetPrefixCache() for client in clients)
        assert router.reset_prefix_cache(with_running=True, with_tiers=True)
        assert all(client.sent[-1] == ResetPrefixCache(with_running=True, with_tiers=True) for client in clients)

    play_two(scenario)


def test_streams_of_a_lost_replica_go_on_in_the_other_at_once() -> None:
    async def scenario(router: Router, clients: list[FakeClient]) -> None:
        streams = {name: router.submit(submit(name)) for name in "abcd"}
        lost, kept = sent_to(clients[0]), sent_to(clients[1])
        clients[0].inbox.put_nowait(step(*(Delta(request_id=name, token_ids=(7,)) for name in lost)))
        await until(lambda: all(streams[name].num_generated == 1 for name in lost))
        told: list[tuple[int, float]] = []
        router.hooks.on_recovered = lambda num_replayed, outage_s: told.append((num_replayed, outage_s))
        router.recovery.lose({}, index=0)
        await router.recovery.send_waiting(0)
        assert (
            sent_to(clients[1]) == kept + lost
            and told[0][0] == 2
            and router.lifecycle.is_ready
            and router.lifecycle.state is State.SERVING
        )
        assert [m.emitted_ids for m in clients[1].sent if isinstance(m, Submit)] == [(), (), (7,), (7,)]
        late = router.submit(submit("e"))
        assert sent_to(clients[1])[-1] == "e"
        clients[1].inbox.put_nowait(
            step(*(Delta(request_id=n, token_ids=(8,), finish_reason="length") for n in (*"abcd", "e")))
        )
        for name, stream in (*streams.items(), ("e", late)):
            assert merge(await collect(stream)).token_ids == ((7, 8) if name in lost else (8,))

    play_two(scenario)


def test_without_any_engine_streams_wait_for_the_first_that_comes() -> None:
    async def scenario(router: Router, clients: list[FakeClient]) -> None:
        streams = [router.submit(submit(name)) for name in "ab"]
        router.recovery.lose({}, index=1)
        await router.recovery.send_waiting(1)
        router.recovery.lose({}, index=0)
        await router.recovery.send_waiting(0)
        assert router.lifecycle.state is State.RECOVERING and router.streams.num_unsent == 2
        streams[0].abort()
        assert (await collect(streams[0]))[-1].finish_reason == "abort"
        clients[1].sent.clear()
        clients[1].inbox.put_nowait(READY)
        await until(lambda: router.replicas.is_up)
        assert sent_to(clients[1]) == [streams[1].request_id]

    play_two(scenario)


def test_an_engine_that_dies_while_it_is_sent_requests_loses_none() -> None:
    """Two replicas die one after the other in the middle of each other's replays."""

    async def scenario(router: Router, clients: list[FakeClient]) -> None:
        names = [f"r{i}" for i in range(6)]
        streams = [router.submit(submit(name)) for name in names]
        router.recovery.lose({}, index=0)
        moving = asyncio.create_task(router.recovery.send_waiting(0))
        router.recovery.lose({}, index=1)
        await moving
        await router.recovery.send_waiting(1)
        for client in clients:
            client.sent.clear()
            client.inbox.put_nowait(READY)
        await until(lambda: router.streams.num_unsent == 0)
        assert sorted(sent_to(clients[0]) + sent_to(clients[1])) == names
        assert all(stream.num_generated == 0 for stream in streams)

    play_two(scenario)


def test_the_requests_that_a_dead_engine_was_computing_are_named() -> None:
    async def scenario(router: Router, client: FakeClient) -> None:
        for name in "abc":
            router.submit(submit(name))
        assert router.recovery.lose({tag_of("b"): 3, tag_of("gone"): 1}) == ["b"]

    play(scenario)


def test_a_replica_that_takes_nothing_does_not_end_the_move_to_it() -> None:
    """It hangs. Its own supervisor will notice, and its streams go on elsewhere then."""

    async def scenario(router: Router, clients: list[FakeClient]) -> None:
        streams = [router.submit(submit(name)) for name in "ab"]

        def refuse(message: object) -> None:
            raise EngineDeadError("it leaves its messages unread")

        clients[1].send = refuse  # type: ignore[method-assign]
        router.recovery.lose({}, index=0)
        await router.recovery.send_waiting(0)
        assert router.streams.num_unsent == 0
        router.recovery.lose({}, index=1)
        assert router.streams.num_unsent == len(streams)

    play_two(scenario)
