"""The router while its engines are unloaded: requests have them started once, and wait, or learn why none came."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from inferd.engine.api.adapter import AdapterFiles
from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.engine.api.wire.kv_events import CLEARED
from inferd.engine.api.wire.messages import Delta, ResetPrefixCache, Submit
from inferd.server.dispatch.adapter_places import AdapterPlaces
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.dispatch.router import Router, RouterOptions
from inferd.server.dispatch.token_stream import TokenStream
from inferd.server.lifecycle.engines import Engines
from inferd.server.observability.metrics import Metrics

from .test_router import READY, FakeClient, collect, step, submit

SQL = AdapterFiles(Path("/sql"), "digest", ())


class Loaded:
    """A router whose engine was ready, and what it asked of the owner of its engines."""

    def __init__(self) -> None:
        self.metrics, self.client = Metrics("model"), FakeClient()
        self.router = Router(self.client, self.metrics, adapters=AdapterPlaces(1, lambda _: SQL))  # type: ignore[arg-type]
        self.router.hooks.on_wanted, self.router.hooks.on_unload = self._wanted, self._unload
        self.num_wanted = self.num_begun = 0
        self.kept: list[bool] = []
        """Whether the pools were to be kept, for each time that engines were to be stopped."""
        self.is_free = asyncio.Event()
        self.is_free.set()

    def _wanted(self) -> None:
        self.num_wanted += 1

    async def _unload(self, keeps_pools: bool) -> None:
        """A second call waits for the engines that the first one ends."""
        self.kept.append(keeps_pools)
        if not self.running.cancelling():
            self.num_begun += 1
            self.running.cancel()
        await self.is_free.wait()

    async def start(self) -> None:
        self.client = FakeClient()
        self.router.attach(self.client)  # type: ignore[arg-type]
        self.running = asyncio.create_task(self.router.run())
        self.client.inbox.put_nowait(READY)
        await self.router.lifecycle.loaded.wait()

    async def end(self, *streams: TokenStream) -> None:
        deltas = [Delta(request_id=each.request_id, token_ids=(1,), finish_reason="stop") for each in streams]
        self.client.inbox.put_nowait(step(*deltas))
        assert [(await collect(stream))[-1].finish_reason for stream in streams] == ["stop"] * len(streams)


def play(scenario: Callable[[Loaded], Awaitable[None]]) -> None:
    async def main() -> None:
        loaded = Loaded()
        await loaded.start()
        await scenario(loaded)
        loaded.running.cancel()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_several_requests_have_an_unloaded_model_loaded_once_and_wait() -> None:
    async def scenario(model: Loaded) -> None:
        router, events = model.router, []
        router.hooks.on_kv_events = lambda *event: events.append(event)
        await router.loading.unload()
        await router.loading.unload()
        assert model.num_begun == 1 and not model.num_wanted and router.lifecycle.settled.is_set()
        assert events == [(0, CLEARED)], "subscribers learn that the cache is gone"
        assert b"\ninferd_engine_up{" not in model.metrics.render()[0], "an alert would call somebody"
        assert router.lifecycle.is_ready and router.lifecycle.state is State.UNLOADED
        assert not router.lifecycle.loaded.is_set()
        assert router.replicas.ready is READY, "answers still need its measurements"
        streams = [router.submit(submit(name)) for name in "abc"]
        assert model.num_wanted == 1 and router.streams.num_unsent == 3 and not router.lifecycle.settled.is_set()
        assert (router.streams.stats.num_waiting, router.streams.stats.num_tokens_waiting) == (3, 6), (
            "no engine counts them"
        )
        assert b'\ninferd_engine_up{model_name="model"} 0.0' in model.metrics.render()[0], "the load may never end"
        await model.start()
        assert b'\ninferd_engine_up{model_name="model"} 1.0' in model.metrics.render()[0]
        assert router.lifecycle.state is State.SERVING
        assert [message.request_id for message in model.client.sent] == [
            "a",
            "b",
            "c",
        ]  # type: ignore[union-attr]
        assert router.streams.stats.num_blocks == READY.num_blocks, "also before its first step"
        assert router.streams.stats.num_waiting == 0, "from now on the engine counts them"
        await model.end(*streams)
        assert model.metrics.num_restarts == 0 and model.metrics.recovery.cell().sum == 0.0, "no engine died"
        await router.loading.unload()
        router.submit(submit("d"))
        assert (model.num_begun, model.num_wanted) == (2, 2)

    play(scenario)


def test_a_model_with_requests_is_not_unloaded() -> None:
    async def scenario(model: Loaded) -> None:
        stream = model.router.submit(submit("a"))
        with pytest.raises(RequestError, match=r"This model has 1 unfinished answer\b") as refused:
            await model.router.loading.unload()
        assert refused.value.code == "model_is_busy"
        assert model.router.replicas.is_up and not model.num_begun
        await model.end(stream)
        adapter = model.router.adapters.add("sql", SQL)
        with pytest.raises(RequestError, match="an adapter of it is being loaded"):
            await model.router.loading.unload()
        assert model.router.loading.idle_s == 0.0, "an idle model is unloaded without a look at refusals"
        adapter.settled.set()
        await model.router.loading.unload()
        assert not model.router.replicas.is_up

    play(scenario)


def test_each_unload_ends_when_the_memory_is_free() -> None:
    async def scenario(model: Loaded) -> None:
        model.is_free.clear()
        asked = [asyncio.create_task(model.router.loading.unload()) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert model.num_begun == 1 and not any(task.done() for task in asked)
        model.is_free.set()
        await asyncio.gather(*asked)

    play(scenario)


def test_an_engine_that_becomes_ready_during_an_unload_takes_no_request() -> None:
    """The unload stops it, some turns of the event loop later."""

    async def scenario(model: Loaded) -> None:
        router = model.router

        async def later(keeps_pools: bool) -> None:
            del keeps_pools
            for _ in range(5):
                await asyncio.sleep(0)
            model.running.cancel()

        router.hooks.on_unload = later
        model.running.cancel()
        router.recovery.lose({})
        model.client = FakeClient()
        router.attach(model.client)  # type: ignore[arg-type]
        model.running = asyncio.create_task(router.run())
        await asyncio.sleep(0)
        model.client.inbox.put_nowait(READY)
        await router.loading.unload()
        router.submit(submit("a"))
        assert (router.replicas.is_up, model.num_wanted, model.client.sent) == (False, 1, [])

    play(scenario)


def test_a_server_that_stops_while_a_model_is_unloaded_waits_for_its_engines() -> None:
    async def main() -> None:
        router, ended, may_end = Router(None, Metrics("model")), [], asyncio.Event()
        report = SimpleNamespace(settings=SimpleNamespace(served_names=("model",)))
        engines = Engines(report, router, Metrics("model"), lambda *_: None)  # type: ignore[arg-type]

        async def serve() -> NoReturn:
            try:
                await asyncio.Event().wait()
            finally:
                await may_end.wait()
                ended.append("engine")
            raise AssertionError

        engines._serve = serve  # type: ignore[method-assign, assignment]
        running = asyncio.create_task(engines.run())
        await asyncio.sleep(0.001)
        assert router.hooks.on_unload is not None
        unloading = asyncio.ensure_future(router.hooks.on_unload(False))
        await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.sleep(0.001)
        assert not ended and not unloading.done() and not running.done()
        may_end.set()
        await asyncio.wait((running, unloading))
        assert ended == ["engine"]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_requests_of_a_model_that_cannot_be_loaded_end_with_the_reason() -> None:
    async def scenario(model: Loaded) -> None:
        router = model.router
        await router.loading.unload()
        loading = asyncio.create_task(router.loading.load())
        stream = router.submit(submit("a"))
        await asyncio.sleep(0)
        assert model.num_wanted == 1, "the request and the load together"
        router.loading.fail_model("the weights are gone")
        (delta,) = await collect(stream)
        assert delta.failure is not None and delta.failure.code == "model_not_loaded"
        assert delta.failure.message == (
            "This model is not served: the weights are gone. "
            "POST /v1/models/model/load, with an admin key, tries it again."
        )
        for refusing in (loading, asyncio.create_task(_submitting(router))):
            with pytest.raises(RequestError, match="the weights are gone") as refused:
                await refusing
            assert refused.value.code == "model_not_loaded"
        assert not router.lifecycle.is_ready and router.lifecycle.failure == "the weights are gone"
        again = asyncio.create_task(router.loading.load())
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="This model or an adapter of it is being loaded") as busy:
            await router.loading.unload()
        assert busy.value.code == "model_is_busy", "whoever waits for the load would wait for ever"
        assert model.num_wanted == 2 and not router.lifecycle.failure and router.lifecycle.is_ready
        waiting = router.submit(submit("b"))
        await model.start()
        await again
        await model.end(waiting)

    play(scenario)


def test_a_load_is_given_up_when_the_server_stops() -> None:
    """The server waits for every answer, so a load that takes long would hold its end up."""

    async def scenario(model: Loaded) -> None:
        router = model.router
        await router.loading.unload()
        waiting = (
            asyncio.create_task(router.adapter_loading.load("sql", SQL)),
            asyncio.create_task(router.loading.load()),
        )
        stream = router.submit(submit("a"))
        await asyncio.sleep(0.001)
        router.lifecycle.leave()
        await asyncio.sleep(0.001)
        assert not any(task.done() for task in waiting), "requests are still taken"
        router.lifecycle.drain()
        for task in (*waiting, asyncio.create_task(router.loading.load())):
            with pytest.raises(RequestError, match="The server is shutting down") as refused:
                await task
            assert refused.value.code == "server_is_overloaded"
        assert router.streams.num_unsent == 1, "a request that was accepted goes on"
        stream.abort()

    play(scenario)


async def _submitting(router: Router) -> None:
    router.submit(submit("c"))


def test_a_model_is_idle_from_its_last_answer_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(model: Loaded) -> None:
        router, now = model.router, [0.0]
        monkeypatch.setattr("inferd.server.dispatch.router.time.monotonic", lambda: now[0])
        stream = router.submit(submit("a"))
        now[0] += 50
        assert router.loading.idle_s == 0.0
        await model.end(stream)
        now[0] += 7
        assert router.loading.idle_s == 7.0
        await router.loading.unload()
        now[0] += 7
        assert router.loading.idle_s == 0.0
        router.submit(submit("b"))
        with pytest.raises(RequestError):
            await router.loading.unload()

    play(scenario)


def test_a_first_start_is_no_load_that_requests_wait_for() -> None:
    async def main() -> None:
        router = Router(None, Metrics("model"), RouterOptions(num_replicas=2))
        router.replicas[0].is_up = True
        await asyncio.sleep(0.001)
        assert router.loading.idle_s == 0.0, "the other replica still starts, so it cannot be unloaded"
        with pytest.raises(RequestError, match="still loading"):
            router.submit(submit("a"))
        with pytest.raises(EngineDeadError):
            _ = router.replicas.ready

    asyncio.run(main())


def test_the_next_engine_is_told_first_that_the_cache_was_to_be_cleared() -> None:
    """The pool may outlive its engine."""

    async def scenario(model: Loaded) -> None:
        router = model.router
        await router.loading.unload()
        assert not router.reset_prefix_cache(with_tiers=True), "nobody clears the directory"
        stream = router.submit(submit("a"))
        assert router.reset_prefix_cache()
        await model.start()
        first, second = model.client.sent[:2]
        assert first == ResetPrefixCache() and isinstance(second, Submit)
        await model.end(stream)
        await router.loading.unload()
        stream = router.submit(submit("b"))
        await model.start()
        assert ResetPrefixCache() not in model.client.sent, "once"
        await model.end(stream)

    play(scenario)
