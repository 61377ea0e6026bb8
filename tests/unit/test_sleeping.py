"""A model that is put to sleep: what becomes of its requests and of its KV pools, and how it is woken."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from inferd.engine.api.errors import RequestError
from inferd.engine.api.process.memory_file import POOL_MEMORY, MemoryFile
from inferd.engine.api.wire.kv_events import CLEARED
from inferd.engine.api.wire.messages import Abort, Delta, Submit
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.dispatch.router import Router
from inferd.server.dispatch.sleeping import Level, Mode
from inferd.server.lifecycle.engines import Engines
from inferd.server.observability.metrics import Metrics

from .test_router import READY, FakeClient, collect, step, submit, until
from .test_unloading import SQL, Loaded, play


async def refused(model: Loaded, level: Level = 1, mode: Mode = "abort") -> str:
    """The code with which a sleep is refused."""
    with pytest.raises(RequestError) as refusal:
        await model.router.sleeping.sleep(level, mode)
    return refusal.value.code


def asleep(model: Loaded, name: str = "new") -> bool:
    """Whether a request is refused because the model is asleep."""
    try:
        model.router.submit(submit(name)).abort()
    except RequestError as refusal:
        return refusal.code == "model_is_asleep"
    return False


def begin(model: Loaded, mode: Mode, level: Level = 1) -> asyncio.Task[None]:
    return asyncio.create_task(model.router.sleeping.sleep(level, mode))


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("level", "keeps"), [(1, True), (2, False)])
def test_the_engines_stop_and_only_waking_starts_others(level: Level, keeps: bool) -> None:
    async def scenario(model: Loaded) -> None:
        router, events = model.router, []
        router.hooks.on_kv_events = lambda *event: events.append(event)
        await router.sleeping.sleep(level, "abort")
        assert model.kept == [keeps] and model.num_begun == 1
        assert router.lifecycle.state is State.SLEEPING and router.sleeping.level == level
        assert events == [(0, CLEARED)]
        assert b"\ninferd_engine_up{" not in model.metrics.render()[0], "an alert would call somebody"
        assert not router.lifecycle.is_ready and not router.lifecycle.is_first_start
        assert asleep(model) and not model.num_wanted, "a request does not wake it"
        assert router.loading.idle_s == 0.0
        waking = [asyncio.create_task(router.sleeping.wake()) for _ in range(2)]
        await turns()
        assert model.num_wanted == 1 and router.lifecycle.state is State.LOADING
        stream = router.submit(submit("a"))
        await model.start()
        await asyncio.gather(*waking)
        assert router.lifecycle.state is State.SERVING and router.sleeping.level is None
        await model.end(stream)
        assert model.metrics.num_restarts == 0
        await router.sleeping.wake()
        assert model.num_wanted == 1, "it is awake"

    play(scenario)


def test_level_0_stops_no_engine() -> None:
    async def scenario(model: Loaded) -> None:
        router = model.router
        await router.sleeping.sleep(0, "abort")
        assert router.lifecycle.state is State.PAUSED and router.sleeping.level == 0
        assert asleep(model) and router.replicas.is_up and not model.kept and not model.num_begun
        assert router.loading.idle_s == 0.0, "an idle model would be unloaded, and the next request would load it"
        await router.sleeping.wake()
        assert router.lifecycle.state is State.SERVING and not model.num_wanted
        await model.end(router.submit(submit("a")))

    play(scenario)


def test_idle_time_counts_from_the_wake_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(model: Loaded) -> None:
        now = [0.0]
        monkeypatch.setattr("inferd.server.dispatch.router.time.monotonic", lambda: now[0])
        await model.router.sleeping.sleep(0, "abort")
        now[0] += 7
        await model.router.sleeping.wake()
        now[0] += 3
        assert model.router.loading.idle_s == 3.0

    play(scenario)


def test_unfinished_answers_are_aborted_before_the_engines_stop() -> None:
    async def scenario(model: Loaded) -> None:
        router = model.router
        streams = [router.submit(submit(name)) for name in "ab"]
        sleeping = begin(model, "abort")
        await turns()
        aborts = [message for message in model.client.sent if isinstance(message, Abort)]
        assert aborts == [Abort(("a",)), Abort(("b",))] and not model.num_begun and asleep(model)
        model.client.inbox.put_nowait(step(*(Delta(request_id=name, finish_reason="abort") for name in "ab")))
        await sleeping
        assert [(await collect(stream))[-1].finish_reason for stream in streams] == ["abort"] * 2
        assert model.kept == [True]

    play(scenario)


def test_unfinished_answers_are_finished_first_if_they_are_waited_for() -> None:
    async def scenario(model: Loaded) -> None:
        router = model.router
        stream = router.submit(submit("a"))
        sleeping = begin(model, "wait")
        await turns()
        assert asleep(model) and not model.num_begun and router.lifecycle.state is State.PAUSED
        later = router.submit(submit("piece"), is_admitted=True)
        model.client.inbox.put_nowait(step(Delta(request_id="a", token_ids=(1,), finish_reason="stop")))
        assert (await collect(stream))[-1].finish_reason == "stop"
        await turns()
        assert not sleeping.done(), "a later piece of an accepted request"
        await model.end(later)
        await sleeping
        assert model.num_begun == 1 and router.lifecycle.state is State.SLEEPING

    play(scenario)


def test_kept_answers_go_on_behind_their_tokens_when_the_model_wakes() -> None:
    async def scenario(model: Loaded) -> None:
        router = model.router
        streams = [router.submit(submit(name)) for name in "abc"]
        model.client.inbox.put_nowait(step(Delta(request_id="b", token_ids=(7, 8))))
        await until(lambda: streams[1].num_generated == 2)
        await router.sleeping.sleep(2, "keep")
        assert router.lifecycle.state is State.SLEEPING and router.streams.num_unsent == 3
        late = model.client
        late.inbox.put_nowait(step(Delta(request_id="a", token_ids=(1,))))
        await turns()
        streams[2].abort()
        assert (await collect(streams[2]))[-1].finish_reason == "abort", "its caller has gone"
        waking = asyncio.create_task(router.sleeping.wake())
        await turns()
        await model.start()
        await waking
        sent = [message for message in model.client.sent if isinstance(message, Submit)]
        assert [(each.request_id, each.emitted_ids) for each in sent] == [("a", ()), ("b", (7, 8))]
        await model.end(*streams[:2])
        assert b"inferd_requests_replayed_total{" in model.metrics.render()[0]
        assert model.metrics.recovery.cell().sum == 0.0, "no engine died"

    play(scenario)


def test_an_answer_whose_abort_is_on_its_way_is_not_kept() -> None:
    """Its engine would have ended it, and no other knows it."""

    async def scenario(model: Loaded) -> None:
        router = model.router
        stream = router.submit(submit("a"))
        stream.abort()
        await router.sleeping.sleep(1, "keep")
        assert (await collect(stream))[-1].finish_reason == "abort"
        assert router.streams.num_active == router.streams.num_unsent == 0

    play(scenario)


def test_level_0_cannot_keep_answers_and_says_so() -> None:
    async def scenario(model: Loaded) -> None:
        assert await refused(model, 0, "keep") == "unsupported_value"
        assert model.router.lifecycle.state is State.SERVING

    play(scenario)


def test_it_does_not_sleep_while_it_or_an_adapter_is_loaded() -> None:
    async def scenario(model: Loaded) -> None:
        router = model.router
        await router.loading.unload()
        router.loading.want()
        for mode in ("abort", "wait", "keep"):
            assert await refused(model, 1, mode) == "model_is_busy"
        assert router.lifecycle.state is State.LOADING
        await model.start()
        adapter = router.adapters.add("sql", SQL)
        assert await refused(model) == "model_is_busy"
        adapter.settled.set()
        await router.sleeping.sleep(1, "abort")

    play(scenario)


def test_a_model_that_starts_does_not_sleep() -> None:
    async def main() -> None:
        router = Router(None, Metrics("model"))
        with pytest.raises(RequestError) as refusal:
            await router.sleeping.sleep(1, "abort")
        assert refusal.value.code == "model_is_busy"

    asyncio.run(main())


def test_an_unloaded_model_sleeps_until_it_is_woken() -> None:
    async def scenario(model: Loaded) -> None:
        router = model.router
        await router.loading.unload()
        await router.sleeping.sleep(1, "abort")
        assert router.lifecycle.state is State.SLEEPING and asleep(model) and not model.num_wanted
        loading = asyncio.create_task(router.loading.load())
        await turns()
        assert model.num_wanted == 1, "load wakes too"
        await model.start()
        await loading

    play(scenario)


def test_an_unload_ends_the_sleep_and_gives_the_pools_up() -> None:
    async def scenario(model: Loaded) -> None:
        router = model.router
        await router.sleeping.sleep(1, "abort")
        await router.loading.unload()
        assert model.kept == [True, False] and router.lifecycle.state is State.UNLOADED
        router.submit(submit("a"))
        assert model.num_wanted == 1

    play(scenario)


def test_a_sleep_may_become_deeper_and_never_lighter() -> None:
    async def scenario(model: Loaded) -> None:
        router, levels = model.router, []
        for level in (0, 1, 2, 1, 0):
            await router.sleeping.sleep(level, "abort")
            levels.append(router.sleeping.level)
        assert levels == [0, 1, 2, 2, 2]
        assert model.kept == [True, False, True], "no engine has begun since, so nothing was kept for the last"

    play(scenario)


def test_two_sleeps_at_once_end_when_the_memory_is_free() -> None:
    async def scenario(model: Loaded) -> None:
        stream = model.router.submit(submit("a"))
        model.is_free.clear()
        asked = [begin(model, "wait"), begin(model, "wait", 2), begin(model, "wait", 0)]
        await turns()
        await model.end(stream)
        await turns()
        assert [task.done() for task in asked] == [False, False, True] and model.num_begun == 1
        model.is_free.set()
        await asyncio.gather(*asked)
        assert sorted(model.kept) == [False, True] and model.router.sleeping.level == 2

    play(scenario)


@pytest.mark.parametrize("sleeps_again", [False, True])
def test_a_wake_ends_a_sleep_that_waits(sleeps_again: bool) -> None:
    async def scenario(model: Loaded) -> None:
        router = model.router
        stream = router.submit(submit("a"))
        sleeping = begin(model, "wait")
        await turns()
        waking = asyncio.create_task(router.sleeping.wake())
        again = begin(model, "wait", 0) if sleeps_again else None  # before the first one has run again
        with pytest.raises(RequestError, match="woken before it slept") as refusal:
            await sleeping
        assert refusal.value.code == "model_is_busy" and not model.num_begun
        await waking
        await model.end(stream)
        if again is not None:
            await again
            assert router.lifecycle.state is State.PAUSED
        else:
            await model.end(router.submit(submit("b")))

    play(scenario)


def test_a_wake_while_the_engines_stop_has_others_started() -> None:
    async def scenario(model: Loaded) -> None:
        model.is_free.clear()
        sleeping = begin(model, "abort")
        await turns()
        waking = asyncio.create_task(model.router.sleeping.wake())
        await turns()
        assert model.num_wanted == 1 and not sleeping.done()
        model.is_free.set()
        await sleeping
        await model.start()
        await waking
        assert model.router.lifecycle.state is State.SERVING

    play(scenario)


def test_an_engine_that_dies_while_answers_are_finished_is_replaced() -> None:
    async def scenario(model: Loaded) -> None:
        router = model.router
        stream = router.submit(submit("a"))
        sleeping = begin(model, "wait")
        await turns()
        model.running.cancel()
        router.recovery.lose({})
        assert router.lifecycle.state is State.PAUSED and asleep(model)
        model.client = FakeClient()
        router.attach(model.client)  # type: ignore[arg-type]
        model.running = asyncio.create_task(router.run())
        model.client.inbox.put_nowait(READY)
        await until(lambda: model.client.sent != [])
        assert not sleeping.done() and router.lifecycle.state is State.PAUSED
        await model.end(stream)
        await sleeping
        assert router.lifecycle.state is State.SLEEPING

    play(scenario)


def test_a_pause_that_lost_its_engine_wakes_as_after_a_death() -> None:
    async def scenario(model: Loaded) -> None:
        router = model.router
        await router.sleeping.sleep(0, "abort")
        router.recovery.lose({})
        await router.sleeping.wake()
        assert router.lifecycle.state is State.RECOVERING and not model.num_wanted
        assert router.submit(submit("a")) is not None, "it waits for the next engine"

    play(scenario)


def test_engines_that_cannot_run_end_a_sleep() -> None:
    async def scenario(model: Loaded) -> None:
        router = model.router
        stream = router.submit(submit("a"))
        sleeping = begin(model, "wait")
        await turns()
        router.loading.fail_model("they die")
        with pytest.raises(RequestError, match="they die"):
            await sleeping
        assert (await collect(stream))[-1].finish_reason == "error"
        assert await refused(model) == "model_not_loaded"

    play(scenario)


def test_a_server_that_stops_gives_up_what_waits_for_the_wake() -> None:
    async def scenario(model: Loaded) -> None:
        router = model.router
        stream = router.submit(submit("a"))
        await router.sleeping.sleep(1, "keep")
        router.lifecycle.leave()
        router.lifecycle.drain()
        router.sleeping.end()
        await asyncio.wait_for(router.streams.drained(), 5)
        assert (await collect(stream))[-1].finish_reason == "abort"
        for refusing in (router.sleeping.wake(), router.sleeping.sleep(2, "abort")):
            with pytest.raises(RequestError, match="shutting down"):
                await refusing

    play(scenario)


def test_a_server_that_stops_finishes_answers_of_a_paused_model() -> None:
    async def scenario(model: Loaded) -> None:
        router = model.router
        stream = router.submit(submit("a"))
        sleeping = begin(model, "wait")
        await turns()
        router.lifecycle.drain()
        router.sleeping.end()
        with pytest.raises(RequestError, match="shutting down"):
            await sleeping
        await model.end(stream)
        assert not model.num_begun

    play(scenario)


def test_the_owner_keeps_the_pools_for_the_next_engines_or_gives_them_up() -> None:
    """A later engine is given the same memory after a sleep, and another after an unload or a failure."""

    async def main() -> None:
        router = Router(None, Metrics("model"))
        report = SimpleNamespace(settings=SimpleNamespace(served_names=("model",)))
        engines = Engines(report, router, Metrics("model"), lambda *_: None)  # type: ignore[arg-type]
        seen: list[str] = []
        fails = asyncio.Event()

        async def serve() -> str:
            pools = engines._pools
            try:
                seen.append(pools.setdefault(0, MemoryFile(POOL_MEMORY)).path)
                await fails.wait()
                fails.clear()
                return "it failed"
            finally:
                del pools

        engines._serve = serve  # type: ignore[method-assign, assignment]
        running = asyncio.create_task(engines.run())
        stop, start = router.hooks.on_unload, router.hooks.on_wanted
        assert stop is not None and start is not None

        async def starts(number: int) -> None:
            start()
            await until(lambda: len(seen) == number)

        await until(lambda: len(seen) == 1)
        held = engines._pools[0]
        await stop(True)
        await starts(2)
        assert engines._pools[0] is held and seen[1] == seen[0]
        await stop(False)
        await starts(3)
        assert engines._pools[0] is not held, "an unload, or a sleep of level 2"
        held = engines._pools[0]
        await stop(True)
        await stop(False)
        await starts(4)
        assert engines._pools[0] is not held, "the sleep became deeper"
        held = engines._pools[0]
        fails.set()
        await until(lambda: not engines._pools)
        await starts(5)
        assert engines._pools[0] is not held, "it may be why they failed"
        running.cancel()
        await asyncio.wait((running,))

    asyncio.run(asyncio.wait_for(main(), 20))
