"""Adapters of the server: an adapter keeps its place as long as a request uses it, and every engine loads it before it
gets a request."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from inferd.engine.api.adapter import AdapterFiles, LowRank
from inferd.engine.api.errors import ModelError, RequestError
from inferd.engine.api.wire.messages import AdapterLoaded, Delta, LoadAdapter, Submit
from inferd.engine.api.wire.params import Adapter, Pooling, SamplingParams
from inferd.server.dispatch.adapter_places import AdapterPlaces
from inferd.server.dispatch.router import Router, RouterOptions
from inferd.server.generate.embed import EmbedRequest, embed
from inferd.server.generate.inputs import MAX_TOKENS_AT_ONCE
from inferd.server.observability.metrics import Metrics
from tests.unit.test_router import READY, FakeClient, collect, step, submit


def files(digest: str) -> AdapterFiles:
    return AdapterFiles(Path("/adapters") / digest, digest, (LowRank("layers.0.mlp.down", 0, 4, 1.0, "a", "b"),))


def with_adapter(name: str, adapter: Adapter) -> Submit:
    plain = submit(name)
    return structs.replace(plain, params=structs.replace(plain.params, adapter=adapter))


class Scene:
    """A router with places for two adapters, and the engine's end of the wire."""

    def __init__(self, *names: str) -> None:
        """`names`: adapters that are served from the start."""
        self.adapters = AdapterPlaces(2, lambda path: files(path.name))
        for name in names:
            self.adapters.add(name, files(name), is_from_start=True)
        self.client = FakeClient()
        self.router = Router(self.client, Metrics("model"), adapters=self.adapters)  # type: ignore[arg-type]
        self.running = asyncio.create_task(self.router.run())

    async def turn(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def restart(self) -> None:
        """Another engine takes the place of the last."""
        self.router.recovery.lose({})
        self.client.sent.clear()
        self.client.inbox.put_nowait(READY)
        await self.turn()

    async def loaded(self, *names: str, error: str = "") -> None:
        for served in tuple(self.adapters):
            if served.name in names:
                self.client.inbox.put_nowait(AdapterLoaded(served.adapter, error))
        await self.turn()

    async def load(self, name: str) -> None:
        """An admin loads an adapter, and the engine does so too."""
        asked = asyncio.create_task(self.router.adapter_loading.load(name, files(name)))
        await self.turn()
        await self.loaded(name)
        await asked

    def adapter(self, name: str) -> Adapter:
        return self.adapters.named[name].adapter

    def sent(self) -> list[str]:
        return [m.path if isinstance(m, LoadAdapter) else m.request_id for m in self.client.sent]  # type: ignore[union-attr]


def run(scenario: object) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))  # type: ignore[operator]


def test_an_engine_loads_adapters_before_it_gets_requests() -> None:
    async def scenario() -> None:
        scene = Scene("first")
        scene.client.inbox.put_nowait(READY)
        await scene.turn()
        assert not scene.router.lifecycle.loaded.is_set(), "an adapter is missing"
        await scene.loaded("first")
        assert scene.router.lifecycle.loaded.is_set()
        await scene.load("second")
        stream = scene.router.submit(with_adapter("x", scene.adapter("second")))
        assert scene.sent() == ["/adapters/first", "/adapters/second", "x"]
        await scene.restart()
        later = scene.router.submit(submit("y"))
        assert scene.sent() == ["/adapters/first", "/adapters/second"]
        await scene.loaded("first")
        assert len(scene.client.sent) == 2
        await scene.loaded("second")
        assert scene.sent()[2:] == ["x", "y"]
        scene.client.inbox.put_nowait(step(*(Delta(request_id=name, finish_reason="stop") for name in "xy")))
        assert [(await collect(one))[-1].finish_reason for one in (stream, later)] == ["stop", "stop"]

    run(scenario)


def test_one_that_is_asked_for_between_engines_is_loaded_by_the_next() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.client.inbox.put_nowait(READY)
        await scene.turn()
        scene.router.recovery.lose({})
        asked = asyncio.create_task(scene.router.adapter_loading.load("late", files("late")))
        await scene.turn()
        assert "late" not in scene.adapters.named
        await scene.restart()
        assert scene.sent() == ["/adapters/late"]
        await scene.loaded("late")
        await asked
        assert "late" in scene.adapters.named

    run(scenario)


def test_an_adapter_is_refused_alone_if_its_model_is_loaded_again_for_it() -> None:
    """Its files are known to be wrong only when an engine reads them."""

    async def scenario() -> None:
        scene = Scene("first")
        scene.client.inbox.put_nowait(READY)
        await scene.turn()
        await scene.loaded("first")
        await scene.router.loading.unload()
        asked = asyncio.create_task(scene.router.adapter_loading.load("bad", files("bad")))
        await scene.turn()
        with pytest.raises(RequestError, match="is being loaded"):
            await scene.router.loading.unload()
        scene.router.attach(scene.client)  # type: ignore[arg-type]
        scene.client.inbox.put_nowait(READY)
        await scene.turn()
        assert scene.router.loading.idle_s == 0.0 and not scene.router.lifecycle.loaded.is_set()
        await scene.loaded("bad", error="layer 1 holds NaN")
        with pytest.raises(RequestError, match="layer 1 holds NaN"):
            await asked
        await scene.loaded("first")
        assert scene.router.lifecycle.loaded.is_set() and list(scene.adapters.named) == ["first"]
        scene.router.loading.fail_model("no memory")
        with pytest.raises(RequestError, match="no memory"):
            await scene.router.adapter_loading.load("late", files("late"))
        assert not scene.running.done()

    run(scenario)


def test_a_model_that_failed_is_loaded_again_with_its_adapters() -> None:
    async def scenario() -> None:
        scene = Scene("first")
        scene.router.loading.fail_model("its weights are NaN")
        loading = asyncio.create_task(scene.router.loading.load())
        await scene.turn()
        scene.router.attach(scene.client)  # type: ignore[arg-type]
        scene.client.inbox.put_nowait(READY)
        await scene.turn()
        await scene.loaded("first")
        await loading
        assert list(scene.adapters.named) == ["first"]

    run(scenario)


def test_a_place_is_free_when_the_last_request_has_ended() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.client.inbox.put_nowait(READY)
        await scene.turn()
        await scene.load("a")
        await scene.load("b")
        old = scene.adapter("a")
        streams = [scene.router.submit(with_adapter(name, old)) for name in ("x", "y")]
        with pytest.raises(RequestError, match="all of it is used"):
            await scene.router.adapter_loading.load("c", files("c"))
        scene.adapters.leave(scene.adapters.named["a"])
        assert "a" not in scene.adapters.named
        with pytest.raises(RequestError, match="was unloaded"):
            scene.router.submit(with_adapter("z", old))
        scene.router.submit(with_adapter("z", old), is_admitted=True).abort()
        with pytest.raises(RequestError, match="1 of them are unloaded when"):
            await scene.router.adapter_loading.load("c", files("c"))
        for name, stream in (("x", streams[0]), ("z", None), ("y", streams[1])):
            scene.client.inbox.put_nowait(step(Delta(request_id=name, finish_reason="stop")))
            if stream is not None:
                await collect(stream)
        await scene.load("c")
        assert scene.adapter("c").index == old.index
        with pytest.raises(RequestError, match="was unloaded"):
            scene.router.submit(with_adapter("w", old), is_admitted=True)

    run(scenario)


def test_a_name_is_loaded_once() -> None:
    async def scenario() -> None:
        scene = Scene("a")
        with pytest.raises(RequestError, match="'a' is loaded already"):
            scene.adapters.add("a", files("other"))
        with pytest.raises(RequestError, match="has no memory for adapters"):
            AdapterPlaces().add("a", files("a"))

    run(scenario)


def test_an_adapter_that_cannot_be_loaded_again_fails_its_requests_alone() -> None:
    async def scenario() -> None:
        scene = Scene("a", "b")
        scene.client.inbox.put_nowait(READY)
        await scene.turn()
        await scene.loaded("a", "b")
        streams = {name: scene.router.submit(with_adapter(name, scene.adapter(name))) for name in ("a", "b")}
        await scene.restart()
        await scene.loaded("a", error="/adapters/a/weights: the file is gone")
        await scene.loaded("b")
        (delta,) = await collect(streams["a"])
        assert delta.failure is not None and delta.failure.message.endswith(": a/weights: the file is gone")
        assert list(scene.adapters.named) == ["b"]
        assert scene.sent()[2:] == ["b"]
        assert scene.router.streams.adapter_requests() == {"b": (0, 1)}

    run(scenario)


@pytest.mark.parametrize("error", ["", "its file is gone"])
def test_one_may_be_unloaded_while_the_next_engine_loads_it(error: str) -> None:
    async def scenario() -> None:
        scene = Scene("a", "b")
        scene.client.inbox.put_nowait(READY)
        await scene.turn()
        await scene.loaded("a", "b")
        place, used = scene.adapter("a"), scene.adapters.named["b"]
        stream = scene.router.submit(with_adapter("x", used.adapter))
        await scene.restart()
        for name in ("a", "b"):
            scene.adapters.leave(scene.adapters.named[name])
        stream.abort()
        assert not list(scene.adapters), "nothing uses them any more"
        for adapter in (place, used.adapter):
            scene.client.inbox.put_nowait(AdapterLoaded(adapter, error))
        later = scene.router.submit(submit("y"))
        await scene.turn()
        assert scene.sent()[2:] == ["y"], "the engine takes requests"
        scene.client.inbox.put_nowait(step(Delta(request_id="y", finish_reason="stop")))
        assert (await collect(later))[-1].finish_reason == "stop"
        await scene.load("c")

    run(scenario)


class TwoReplicas(Scene):
    """A scene in which both replicas have an engine. `client` is that of the first."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.running.cancel()
        self.other = FakeClient()
        options = RouterOptions(num_replicas=2)
        self.router = Router(self.client, Metrics("model"), options, adapters=self.adapters)  # type: ignore[arg-type]
        self.router.attach(self.other, 1)  # type: ignore[arg-type]
        self.tasks = [asyncio.create_task(self.router.run(index)) for index in range(2)]

    async def begin(self) -> None:
        for client in (self.client, self.other):
            client.inbox.put_nowait(READY)
            await self.turn()
            for served in self.adapters:
                client.inbox.put_nowait(AdapterLoaded(served.adapter))
            await self.turn()
        assert self.router.lifecycle.loaded.is_set()


def test_a_replica_that_cannot_load_an_adapter_again_fails_no_request_of_another() -> None:
    async def scenario() -> None:
        scene = TwoReplicas("a")
        await scene.begin()
        adapter = scene.adapter("a")
        stream = scene.router.submit(with_adapter("x", adapter))
        assert scene.sent() == ["/adapters/a", "x"]
        scene.router.recovery.lose({}, index=1)
        scene.other.inbox.put_nowait(READY)
        await scene.turn()
        scene.other.inbox.put_nowait(AdapterLoaded(adapter, "its file is gone"))
        await scene.turn()
        assert "a" not in scene.adapters.named, "no new requests"
        for delta in (Delta(request_id="x", token_ids=(1,)), Delta(request_id="x", finish_reason="stop")):
            scene.client.inbox.put_nowait(step(delta))
        assert (await collect(stream))[-1].finish_reason == "stop"
        assert not list(scene.adapters)
        assert not any(task.done() for task in scene.tasks)

    run(scenario)


def test_a_load_does_not_wait_for_a_replica_that_was_lost() -> None:
    async def scenario() -> None:
        scene = TwoReplicas()
        await scene.begin()
        asked = asyncio.create_task(scene.router.adapter_loading.load("a", files("a")))
        await scene.turn()
        (served,) = scene.adapters
        scene.client.inbox.put_nowait(AdapterLoaded(served.adapter))
        await scene.turn()
        assert not asked.done()
        scene.router.recovery.lose({}, index=1)
        await asked
        assert "a" in scene.adapters.named

    run(scenario)


def test_a_request_for_embeddings_keeps_its_adapter_between_inputs() -> None:
    async def scenario() -> None:
        scene = Scene("a")
        scene.client.inbox.put_nowait(READY)
        await scene.turn()
        await scene.loaded("a")
        params = SamplingParams(max_tokens=0, seed=0, pooling=Pooling(), adapter=scene.adapter("a"))
        inputs = tuple((i,) * MAX_TOKENS_AT_ONCE for i in range(2))
        asked = EmbedRequest(engine_id="e", inputs=inputs, params=params, scheduling=submit("x").scheduling)
        vectors = asyncio.create_task(embed(scene.router, asked))
        await scene.turn()
        scene.adapters.leave(scene.adapters.named["a"])
        for name in ("e-0", "e-1"):
            scene.client.inbox.put_nowait(step(Delta(request_id=name, finish_reason="stop", embedding=b"1234")))
            await scene.turn()
        assert await vectors == (b"1234", b"1234")
        assert not list(scene.adapters)

    run(scenario)


def test_a_start_ends_with_the_adapter_that_cannot_be_loaded() -> None:
    async def scenario() -> None:
        scene = Scene("a")
        scene.client.inbox.put_nowait(READY)
        await scene.turn()
        await scene.loaded("a", error="it holds NaN")
        with pytest.raises(ModelError, match="--lora a: it holds NaN"):
            await scene.running

    run(scenario)


def test_a_refused_load_leaves_its_place_and_its_name() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.client.inbox.put_nowait(READY)
        await scene.turn()
        asked = asyncio.create_task(scene.router.adapter_loading.load("a", files("a")))
        await scene.turn()
        await scene.loaded("a", error="it holds NaN")
        with pytest.raises(RequestError, match="it holds NaN"):
            await asked
        assert not list(scene.adapters)
        await scene.load("a")
        waiting = asyncio.create_task(scene.router.adapter_loading.load("b", files("b")))
        await scene.turn()
        scene.router.loading.stop()
        with pytest.raises(RequestError, match="stopped while it was loaded"):
            await waiting

    run(scenario)
