"""The decisions of recovery: which requests are suspects, when to give up, and when an engine hangs."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NoReturn

import pytest
from msgspec import structs

from inferd.engine.api.config import EngineConfig, lendable_threads
from inferd.engine.api.cost.roofline import Peaks
from inferd.engine.api.cost.step_cost import StepWork
from inferd.engine.api.errors import ChangedError, EngineDeadError, LaunchError, RequestError, StartError
from inferd.engine.api.numerics import Numerics
from inferd.engine.api.process.flight_recorder import FlightReader, FlightRecord, flight_bytes, tag_of
from inferd.engine.api.process.heartbeat import HEARTBEAT_BYTES, EnginePhase, Heartbeat, Pulse
from inferd.engine.api.process.logs import LogStyle
from inferd.engine.api.process.memory_file import POOL_MEMORY
from inferd.engine.api.process.processor_time import ProcessorUse
from inferd.engine.api.process.shared_memory import allocate
from inferd.engine.api.wire.client import FrameCounts
from inferd.engine.api.wire.messages import Delta, Failed, Submit, UseThreads
from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.process.step_watch import StepWatch
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.dispatch.recovery import REFUSED_S, Quarantine
from inferd.server.dispatch.router import Router, RouterOptions
from inferd.server.dispatch.token_stream import TokenStream
from inferd.server.observability.metrics import Metrics
from inferd.server.supervision import supervisor as supervisor_module
from inferd.server.supervision.engine_handle import EngineHandle
from inferd.server.supervision.supervisor import MAX_DEATHS, RETRY_S, WINDOW_S, EngineSupervisor, RestartPolicy
from inferd.server.supervision.watchdog import MAX_LATE_S, MAX_STOPPED_S, TICK_S, Watchdog
from tests.configs import engine_config
from tests.unit.test_router import READY, FakeClient, play_two, step, submit, until


def stream(name: str, num_prompt: int = 4) -> TokenStream:
    submit = Submit(request_id=name, prompt_ids=(1,) * num_prompt, params=SamplingParams(max_tokens=9, seed=1))
    return TokenStream(submit, lambda request_id: None)


def dead(*streams: TokenStream, reached: int) -> dict[int, int]:
    return {each.tag: reached for each in streams}


def give(each: TokenStream, *token_ids: int) -> None:
    each.journal(Delta(request_id=each.submit.request_id, token_ids=token_ids))


def suspected(quarantine: Quarantine, streams: list[TokenStream]) -> list[int]:
    return [quarantine.replay(each).scheduling.alone_until for each in streams]


# -- quarantine --------------------------------------------------------------------------------------------------------


def test_the_third_death_fails_who_was_alone_and_refuses_the_like() -> None:
    now = [0.0]
    quarantine = Quarantine(lambda: now[0])
    poison, good, waiting = stream("poison", 5), stream("good"), stream("waiting")
    live = [poison, good, waiting]
    assert quarantine.judge(dead(poison, good, reached=5), live) == []
    assert suspected(quarantine, live) == [0, 0, 0], "a first death is mostly by chance"
    assert quarantine.judge(dead(poison, good, reached=5), live) == []
    assert suspected(quarantine, live) == [5, 5, 0]
    give(good, 7, 8)
    assert quarantine.judge(dead(poison, reached=5), live) == [poison]
    assert good.num_deaths == good.reached == 0, "it got past there"

    like = structs.replace(poison.submit, request_id="again", params=structs.replace(poison.submit.params, seed=99))
    with pytest.raises(RequestError, match="not tried again for 600 s") as refusal:
        quarantine.check(like)
    assert refusal.value.code == "engine_error"
    quarantine.check(good.submit)
    now[0] = REFUSED_S
    quarantine.check(like)


def test_a_kill_from_outside_takes_two_that_hit_the_same_alone() -> None:
    quarantine, unlucky, other = Quarantine(), stream("unlucky"), stream("other")
    for _ in range(2):
        quarantine.judge(dead(unlucky, other, reached=4), [unlucky, other], is_external_kill=True)
    assert quarantine.judge(dead(unlucky, reached=4), [unlucky, other], is_external_kill=True) == []
    assert quarantine.judge(dead(other, reached=4), [unlucky, other], is_external_kill=True) == [], "another's"
    assert quarantine.replay(unlucky).scheduling.alone_until == 4, "it is tried once more"
    assert quarantine.judge(dead(unlucky, reached=4), [unlucky, other], is_external_kill=True) == [unlucky]


def test_who_ran_alone_before_is_judged_anew_once_it_got_on() -> None:
    quarantine, each = Quarantine(), stream("each")
    for number in range(20):
        assert quarantine.judge(dead(each, reached=4 + 3 * number), [each], is_external_kill=True) == []
        quarantine.replay(each)
        give(each, 1, 2, 3, 4)


def test_chance_kills_nobody_who_gets_on_between() -> None:
    quarantine, alone = Quarantine(), stream("alone")
    for number in range(20):
        assert quarantine.judge(dead(alone, reached=4 + 2 * number), [alone]) == []
        quarantine.replay(alone)
        give(alone, 1, 2, 3)


def test_who_was_not_alone_is_never_failed() -> None:
    quarantine, pair = Quarantine(), [stream("a"), stream("b")]
    for _ in range(9):
        assert quarantine.judge(dead(*pair, reached=4), pair) == []


def test_a_token_says_that_all_before_it_is_computed_and_not_itself() -> None:
    """Overlap: the engine died in the step that computed a token which it had not sent yet."""
    each, quarantine = stream("a", num_prompt=4), Quarantine()
    give(each, 1)
    quarantine.judge(dead(each, reached=6), [each])
    quarantine.replay(each)
    assert each.is_suspect, "nothing of the next engine yet"
    give(each, 2)
    assert each.is_suspect, "six tokens exist, and the last of them is still to be computed"
    give(each, 3)
    assert not each.is_suspect


def test_a_chunk_of_a_prompt_is_cleared_by_the_first_token() -> None:
    each, quarantine = stream("a", num_prompt=100), Quarantine()
    quarantine.judge(dead(each, reached=32), [each])
    quarantine.replay(each)
    assert each.is_suspect, "no token yet: it may not have come so far"
    give(each, 1)
    assert not each.is_suspect


# -- crash loop --------------------------------------------------------------------------------------------------------


def test_deaths_without_progress_end_it_and_wait_ever_longer() -> None:
    policy = RestartPolicy()
    delays = [policy.died(float(i), num_delivered=0) for i in range(MAX_DEATHS)]
    assert delays[0] == 0.0
    assert None not in delays and delays == sorted(delays, key=lambda delay: delay or 0.0)
    assert policy.died(float(MAX_DEATHS), num_delivered=0) is None


def test_deaths_with_progress_never_end_it() -> None:
    policy = RestartPolicy()
    delays = [policy.died(0.1 * i, num_delivered=i + 1) for i in range(1000)]
    assert None not in delays
    assert delays[0] == 0.0 and (delays[-1] or 0.0) >= 1.0, "and back off"


def test_deaths_long_ago_do_not_count() -> None:
    policy = RestartPolicy()
    assert all(policy.died(i * WINDOW_S / 4, num_delivered=0) is not None for i in range(100))


@pytest.mark.parametrize(("serves_s", "num_deaths"), [(1.0, MAX_DEATHS + 1), (WINDOW_S / 4, 20)])
def test_the_time_of_starts_does_not_count(monkeypatch: pytest.MonkeyPatch, serves_s: float, num_deaths: int) -> None:
    """Engines that take minutes to load and die at once are a loop. Those that serve for a while in between are not."""
    clock_s, deaths = 0.0, 0
    router = Router(None, Metrics("tiny"))
    supervisor = EngineSupervisor(router, engine_config(), LogStyle(), lambda _: None)

    class Stopped(Exception):
        pass

    async def live() -> str:
        nonlocal clock_s, deaths
        if deaths == 20:
            raise Stopped
        clock_s += 3 * WINDOW_S
        supervisor._began_to_serve()
        router.lifecycle.loaded.set()
        clock_s, deaths = clock_s + serves_s, deaths + 1
        return "it died"

    async def wait(delay_s: float) -> None:
        del delay_s

    monkeypatch.setattr(supervisor, "_run_one", live)
    monkeypatch.setattr(supervisor, "_wait_before_start", wait)
    monkeypatch.setattr(supervisor_module.time, "monotonic", lambda: clock_s)
    with pytest.raises((EngineDeadError, Stopped)):
        asyncio.run(supervisor.run())
    assert deaths == num_deaths


def test_a_replica_that_was_given_up_has_all_tries_again() -> None:
    router = Router(None, Metrics("tiny"), RouterOptions(num_replicas=2))
    router.lifecycle.loaded.set()
    router.replicas[1].is_up = True
    supervisor = EngineSupervisor(router, engine_config(), LogStyle(), lambda _: None)
    delays = []
    for _ in range(2 * MAX_DEATHS + 2):
        router.replicas[0].failure = ""
        delays.append(supervisor._delay_s("it died"))
    assert [delay for delay in delays if delay == RETRY_S] == [delays[MAX_DEATHS], delays[-1]]


def test_a_system_that_gives_no_process_is_asked_again_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may be full or memory short for a moment. This does not end a server that has served."""
    monkeypatch.setattr(supervisor_module, "_FIRST_DELAY_S", 0.0)
    asked: list[int] = []

    def refuse(config: EngineConfig, epoch: int, log_style: LogStyle, *, is_standby: bool, early: None) -> EngineHandle:
        asked.append(epoch)
        raise StartError("no room")

    async def run(*, has_served: bool) -> None:
        router = Router(None, Metrics("tiny"))
        if has_served:
            router.lifecycle.loaded.set()
        await EngineSupervisor(router, engine_config(), LogStyle(), lambda _: None).run()

    monkeypatch.setattr(EngineHandle, "begin", refuse)
    with pytest.raises(StartError, match="no room"):
        asyncio.run(run(has_served=False))
    assert asked == [0]
    asked.clear()
    with pytest.raises(EngineDeadError, match="could not start: no room"):
        asyncio.run(run(has_served=True))
    assert asked == list(range(MAX_DEATHS + 1))


def test_an_engine_that_dies_while_it_loads_is_replaced_if_requests_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an unloaded model do. While a server starts it takes none, and its exit tells of the death."""
    monkeypatch.setattr(supervisor_module, "_FIRST_DELAY_S", 0.0)

    async def run(*, is_reloading: bool, num_replicas: int = 1) -> int:
        router = Router(None, Metrics("tiny"), RouterOptions(num_replicas=num_replicas))
        if is_reloading:
            for state in (State.SERVING, State.UNLOADED, State.LOADING):
                router.lifecycle.change(state)
        router.replicas[-1].is_up = num_replicas > 1
        supervisor = EngineSupervisor(router, engine_config(), LogStyle(), lambda _: None)
        deaths: list[int] = []

        async def die() -> str:
            deaths.append(1)
            return "the engine process was killed by SIGKILL"

        monkeypatch.setattr(supervisor, "_run_one", die)
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            await asyncio.wait_for(supervisor.run(), 10)
        return len(deaths)

    assert asyncio.run(run(is_reloading=False)) == 1
    assert asyncio.run(run(is_reloading=True)) == MAX_DEATHS + 1
    monkeypatch.setattr(supervisor_module, "_BESIDE_OTHERS_S", 0.0)
    assert asyncio.run(run(is_reloading=True, num_replicas=2)) == MAX_DEATHS + 1, "a part of the replicas is no model"


def test_a_replica_that_cannot_start_is_tried_again_beside_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router knows why. Once the other one fails too, the server ends."""
    for name in ("_FIRST_DELAY_S", "_BESIDE_OTHERS_S", "RETRY_S"):
        monkeypatch.setattr(supervisor_module, name, 0.0)
    asked, is_enough = [], asyncio.Event()

    def refuse(config: EngineConfig, epoch: int, log_style: LogStyle, *, is_standby: bool, early: None) -> EngineHandle:
        asked.append(is_standby)
        if len(asked) == MAX_DEATHS + 4:
            is_enough.set()
        raise StartError("no room")

    async def run() -> None:
        router = Router(None, Metrics("tiny"), RouterOptions(num_replicas=2))
        router.lifecycle.loaded.set()
        router.replicas[1].is_up = True
        trying = asyncio.create_task(
            EngineSupervisor(
                router, engine_config(), LogStyle(), lambda _: None, for_clients=lambda reason: f"told: {reason}"
            ).run()
        )
        await asyncio.wait_for(is_enough.wait(), 10)
        assert re.search("^told: .*no room", router.replicas[0].failure)
        router.replicas[1].is_up, router.replicas[1].failure = False, "the same"
        with pytest.raises(EngineDeadError, match="could not start: no room"):
            await asyncio.wait_for(trying, 10)

    monkeypatch.setattr(EngineHandle, "begin", refuse)
    asyncio.run(run())
    assert all(asked[: MAX_DEATHS + 4]), "beside one that serves it imports at low priority"


class MortalEngine:
    """An engine's handle in place of `EngineHandle`: the process dies, and then is gone, when the test says so."""

    client = None
    is_external_kill, lacked_memory = True, False

    def __init__(self) -> None:
        self.dies, self.leaves = asyncio.Event(), asyncio.Event()
        self.process = SimpleNamespace(in_flight=dict, has_exited=False, promote=lambda: None, stop=self.stop)

    async def ended(self, sooner: asyncio.Task[str]) -> str:
        await self.dies.wait()
        return "the engine process was killed by SIGKILL"

    async def kill(self) -> None:
        """It is dead already."""

    async def stop(self) -> None:
        self.leaves.set()

    async def end(self) -> None:
        await self.leaves.wait()


class RefusableEngine(MortalEngine):
    """An engine's handle whose process lives until the server wants it no more."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.config, self.client = config, FakeClient()  # type: ignore[assignment]
        self.leaves.set()

    async def ended(self, sooner: asyncio.Task[str]) -> str:
        await asyncio.wait((sooner,))
        return ""

    def is_ready_with(self, library: str) -> None:
        numerics = Numerics(library=library, deterministic=True)
        self.client.inbox.put_nowait(structs.replace(READY, numerics=numerics))  # type: ignore[attr-defined]


def begun(monkeypatch: pytest.MonkeyPatch) -> list[RefusableEngine]:
    """The engines that supervisors start from now on."""
    engines: list[RefusableEngine] = []

    def begin(config: EngineConfig, *_: object, is_standby: bool, early: None) -> RefusableEngine:
        engines.append(RefusableEngine(config))
        return engines[-1]

    monkeypatch.setattr(EngineHandle, "begin", begin)
    return engines


def test_replicas_that_start_together_compute_what_the_first_ready_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk was full for one, and not for the other. The other starts again, without C++ kernels."""
    engines = begun(monkeypatch)

    async def run() -> None:
        router = Router(None, Metrics("m"), RouterOptions(num_replicas=2))
        config = engine_config(num_replicas=2)
        both = [EngineSupervisor(router, config, LogStyle(), lambda _: None, index=index) for index in range(2)]
        running = [asyncio.create_task(each.run()) for each in both]
        await until(lambda: len(engines) == 2)
        assert [engine.config.numerics for engine in engines] == [None, None]
        engines[0].is_ready_with("")
        await until(lambda: router.replicas.numerics is not None)
        engines[1].is_ready_with("kernels-avx2-1")
        await until(lambda: len(engines) == 3)
        assert engines[2].config.numerics == router.replicas.numerics == Numerics(library="", deterministic=True)
        assert not router.lifecycle.loaded.is_set()
        engines[2].is_ready_with("")
        await asyncio.wait_for(router.lifecycle.loaded.wait(), 10)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 20))


async def served_once(engines: list[RefusableEngine]) -> tuple[Router, asyncio.Task[NoReturn]]:
    """(router, supervisor) once the first of `engines` has begun to serve."""
    router = Router(None, Metrics("m"))
    running = asyncio.create_task(EngineSupervisor(router, engine_config(), LogStyle(), lambda _: None).run())
    await until(lambda: len(engines) == 1)
    engines[0].is_ready_with("kernels-avx2-1")
    await asyncio.wait_for(router.lifecycle.loaded.wait(), 10)
    return router, running


@pytest.mark.parametrize(
    ("kind", "text"),
    [("ChangedError", "/m/model.safetensors was written to"), ("LaunchError", "this GPU cannot run the model")],
)
def test_an_engine_that_would_end_alike_is_not_tried_again(
    kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another try would find the same files, kernels and settings."""
    engines = begun(monkeypatch)
    monkeypatch.setattr(supervisor_module, "_FIRST_DELAY_S", 0.0)

    async def run() -> None:
        router, running = await served_once(engines)
        engines[0].client.inbox.put_nowait(Failed("StartError", "it died"))  # type: ignore[attr-defined]
        await until(lambda: len(engines) == 2)
        engines[1].client.inbox.put_nowait(Failed(kind, text))  # type: ignore[attr-defined]
        with pytest.raises((ChangedError, LaunchError), match=text) as refused:
            await asyncio.wait_for(running, 10)
        assert type(refused.value).__name__ == kind
        assert len(engines) == 2 and router.lifecycle.has_served

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_later_engine_that_refuses_a_setting_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal may pass: the ranks before may not have freed their memory yet."""
    engines = begun(monkeypatch)
    monkeypatch.setattr(supervisor_module, "_FIRST_DELAY_S", 0.0)

    async def run() -> None:
        router, running = await served_once(engines)
        for count, failed in enumerate((Failed("StartError", "it died"), Failed("ConfigError", "the 2 ranks cannot"))):
            engines[count].client.inbox.put_nowait(failed)  # type: ignore[attr-defined]
            await until(lambda count=count: len(engines) == count + 2)
        engines[2].is_ready_with("kernels-avx2-1")
        await until(lambda: router.replicas[0].is_up)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_the_memory_of_the_kv_pool_goes_when_no_engine_is_to_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is unloaded gives it back, though the router still refers to the supervisor."""
    engines = begun(monkeypatch)

    def num_pools() -> int:
        folder = "/proc/self/fd"
        links = [f"{folder}/{name}" for name in os.listdir(folder)]
        return sum(POOL_MEMORY in os.readlink(link) for link in links if os.path.lexists(link))

    async def run() -> None:
        before = num_pools()
        router, running = await served_once(engines)
        assert num_pools() == before + 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert router.replicas[0].on_up is not None
        assert num_pools() == before

    asyncio.run(asyncio.wait_for(run(), 20))


def test_the_memory_of_the_kv_pool_is_given_up_only_after_deaths_in_a_row() -> None:
    """It may be what ends the engines. But an engine that delivered tokens leaves a pool that is worth keeping."""
    router = Router(None, Metrics("m"))
    supervisor = EngineSupervisor(router, engine_config(), LogStyle(), lambda _: None)
    router.lifecycle.loaded.set()

    def memory_after(num_delivered: int) -> str:
        router.replicas[0].num_delivered = num_delivered
        supervisor._delay_s("the engine died")
        return supervisor._pools[0].path

    first = memory_after(0)
    assert [memory_after(number) for number in (1, 2, 3)] == [first] * 3
    assert memory_after(3) != first


def test_a_first_engine_whose_kernels_cannot_be_launched_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = begun(monkeypatch)

    async def run() -> None:
        router = Router(None, Metrics("m"))
        running = asyncio.create_task(EngineSupervisor(router, engine_config(), LogStyle(), lambda _: None).run())
        await until(lambda: len(engines) == 1)
        engines[0].client.inbox.put_nowait(Failed("LaunchError", "this GPU cannot"))  # type: ignore[attr-defined]
        with pytest.raises(LaunchError, match="this GPU cannot"):
            await asyncio.wait_for(running, 10)
        assert len(engines) == 1 and not router.lifecycle.has_served

    asyncio.run(asyncio.wait_for(run(), 20))


def test_an_engine_that_does_not_say_what_its_answers_depend_on_is_refused() -> None:
    """If the first one did not say so either, nothing is known to differ."""

    async def ends(*numerics: Numerics | None) -> list[str]:
        router, reasons = Router(None, Metrics("m"), RouterOptions(num_replicas=len(numerics))), []
        for index, each in enumerate(numerics):
            client = FakeClient()
            client.inbox.put_nowait(structs.replace(READY, numerics=each))
            client.inbox.put_nowait(Failed("StartError", "the end"))
            router.attach(client, index)  # type: ignore[arg-type]
            with pytest.raises(StartError) as end:
                await asyncio.wait_for(router.run(index), 10)
            reasons.append(f"{type(end.value).__name__}: {end.value}")
        return reasons

    assert asyncio.run(ends(None, None)) == ["StartError: the end"] * 2
    assert asyncio.run(ends(Numerics(), Numerics())) == ["StartError: the end"] * 2
    first, second = asyncio.run(ends(Numerics(), None))
    assert first == "StartError: the end"
    assert second.startswith("ChangedError: an engine does not say what its answers depend on")


@pytest.mark.parametrize(("num_cores", "num_lent"), [(8, 6), (4, 4), (2, 3)], ids=["", "few-cores", "too-few-cores"])
def test_the_others_have_a_dead_replicas_cores_until_its_streams_go_on(
    num_cores: int, num_lent: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They get the cores before the streams, and the next engine starts when each stream has had a token. The log says
    what happened in that order."""
    monkeypatch.setattr(supervisor_module, "num_cpus", lambda: num_cores)
    monkeypatch.setattr(supervisor_module, "_BESIDE_OTHERS_S", 1e-9)
    monkeypatch.setattr(supervisor_module, "_LOOK_S", 0.0)
    config = engine_config(device="cpu", num_replicas=2, num_threads=3)

    async def scenario(router: Router, clients: list[FakeClient]) -> None:
        engines: list[MortalEngine] = []

        def begin(*_: object, is_standby: bool, early: None) -> MortalEngine:
            engines.append(MortalEngine())
            return engines[-1]

        monkeypatch.setattr(EngineHandle, "begin", begin)
        running = asyncio.create_task(EngineSupervisor(router, config, LogStyle(), lambda _: None).run())
        await until(lambda: len(engines) == 1)
        router.attach(clients[0])  # type: ignore[arg-type]
        streams = [router.submit(submit(name)) for name in "abc"]
        moved = list(router.replicas[0].streams)
        clients[1].sent.clear()
        engines[0].dies.set()
        await until(lambda: len(clients[1].sent) == 1 + len(moved))
        assert clients[1].sent[0] == UseThreads(num_lent)
        engines[0].leaves.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(engines) == 1, "a stream has had no token in its new place"
        clients[1].inbox.put_nowait(step(*(Delta(request_id=name, token_ids=(7,)) for name in moved)))
        await until(lambda: len(engines) == 2)
        assert clients[1].sent[-1] == UseThreads(3), "before the next engine needs them"
        assert router.streams.num_active == len(streams)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with caplog.at_level("WARNING", "inferd"):
        play_two(scenario)
    said = [re.sub(r"\d\.\d+ s", "0 s", record.getMessage()) for record in caplog.records]
    assert said == [
        "replica 0: the engine process was killed by SIGKILL; moving 2 requests to another replica",
        "RECOVERED in 0 s: resumed 2 requests",
        "replica 0: starting another engine in at least 1e-09 s",
    ]


def test_only_cores_that_all_replicas_share_are_lent() -> None:
    config = engine_config(device="cpu", num_replicas=2, num_threads=3)
    assert lendable_threads(config) == 3
    changes = ({"cpus": (0, 1)}, {"tensor_parallel_size": 3}, {"device": "cuda"})
    for each in (*changes, {"modelled": object()}):
        assert lendable_threads(structs.replace(config, **each)) == 0, each


# -- hangs -------------------------------------------------------------------------------------------------------------


class Kernel:
    """A process as the kernel would see it."""

    def __init__(self, *, share: float = 1.0, stopped: bool = False, asleep: bool = False) -> None:
        """`share`: the part of its time that the process could use."""
        self.share, self.stopped, self.asleep = share, stopped, asleep
        self.num_looks = 0

    def is_stopped(self) -> bool:
        return self.stopped

    def use(self) -> ProcessorUse:
        self.num_looks += 1
        return ProcessorUse(self.share, self.asleep)

    def forget(self) -> None:
        """Each look stands for itself."""


def pulse(
    num_beats: int = 1,
    *,
    started_s: float = 0.0,
    limit_s: float = 10.0,
    num_steps: int = 0,
    phase: EnginePhase = EnginePhase.SERVING,
) -> Pulse:
    return Pulse(num_beats, started_s, limit_s, num_steps, phase, True)


QUIET = FrameCounts()
"""Nothing was sent either way."""


def given_up(
    engine: Kernel, state: Pulse | None, seconds: float, *, own: Kernel | None = None, may_wait: bool = False
) -> tuple[float, str] | None:
    """(seconds until the watchdog gives up, why) if the engine stays in one state for so long."""
    watchdog = Watchdog(0.0, engine, own or Kernel(), may_wait=may_wait)
    for tick in range(1, int(seconds / TICK_S)):
        reason = watchdog.look(state, tick * TICK_S, QUIET)
        if reason:
            return tick * TICK_S, reason
    return None


IN_A_STEP = pulse(started_s=1.0, limit_s=10.0)


def test_an_engine_that_is_stopped_is_given_up_whatever_it_did() -> None:
    waits, loads = pulse(phase=EnginePhase.STANDBY), pulse(phase=EnginePhase.LOADING)
    for state in (None, pulse(), IN_A_STEP, waits, loads):
        end = given_up(Kernel(stopped=True), state, 10.0, may_wait=True)
        assert end == (MAX_STOPPED_S + TICK_S, "was stopped for 5 s")


def test_two_short_stops_are_not_one_long_one() -> None:
    """Between them the engine went on, though no look saw it run."""
    engine = Kernel(stopped=True)
    watchdog = Watchdog(0.0, engine, Kernel())
    for tick in range(int(8.0 / TICK_S)):
        is_second = tick * TICK_S >= 4.0
        assert watchdog.look(pulse(num_beats=8 if is_second else 7), tick * TICK_S, QUIET) is None


def test_a_step_that_began_between_two_stops_has_all_its_time() -> None:
    """9.75 s of step 7, a stop in which no look sees that step 8 began, and 9.75 s of step 8."""
    engine = Kernel()
    watchdog = Watchdog(0.0, engine, Kernel())
    for tick in range(int(21.5 / TICK_S)):
        at_s = tick * TICK_S
        engine.stopped = 9.75 <= at_s < 11.75
        step = pulse(2 if at_s >= 10.75 else 1, started_s=1.0, num_steps=8 if at_s >= 10.75 else 7)
        assert watchdog.look(step, at_s, QUIET) is None, at_s


def test_a_legal_long_step_never_trips_it() -> None:
    assert given_up(Kernel(), pulse(started_s=1.0, limit_s=61.0), 60.0) is None


def test_a_step_beyond_its_limit_is_a_hang() -> None:
    """Whether it runs for ever or waits for a lock, and whatever holds the interpreter: nobody but the loop beats."""
    for engine in (Kernel(), Kernel(asleep=True)):
        end = given_up(engine, IN_A_STEP, 15.0)
        assert end is not None and end[0] < 11.0 and end[1] == "has not ended a step within 10 s"


def test_a_loop_that_does_not_turn_is_a_hang() -> None:
    for engine in (Kernel(), Kernel(asleep=True)):
        end = given_up(engine, pulse(), 15.0)
        assert end is not None and end[0] < 11.0 and end[1] == "has not gone on for 10 s between two steps"
    watchdog = Watchdog(0.0, Kernel(), Kernel())
    turns = [watchdog.look(pulse(tick // 4), tick * TICK_S, QUIET) for tick in range(400)]
    assert turns == [None] * 400, "an idle loop turns once a second"


@pytest.mark.parametrize("state", [None, pulse(), IN_A_STEP], ids=["starts", "between two steps", "in a step"])
def test_an_engine_that_waits_for_a_processor_is_none(state: Pulse | None) -> None:
    """It could use some seconds of an hour. If it gets more and does not go on, it is given up all the same."""
    assert given_up(Kernel(share=0.002), state, 3600.0) is None
    limit_s = 10.0 if state else 120.0
    end = given_up(Kernel(share=0.1), state, 3600.0)
    assert end is not None and 8 * limit_s < end[0] < 11 * limit_s


def test_a_standby_waits_until_it_is_promoted() -> None:
    waits = pulse(phase=EnginePhase.STANDBY)
    assert given_up(Kernel(asleep=True), waits, 3600.0, may_wait=True) is None
    assert given_up(Kernel(asleep=True), waits, 3600.0) is not None, "it was promoted and goes on waiting"


def test_an_engine_loads_for_as_long_as_it_does_anything() -> None:
    loads = pulse(phase=EnginePhase.LOADING)
    assert given_up(Kernel(), loads, 3600.0) is None
    assert given_up(Kernel(share=0.01), loads, 3600.0) is None
    end = given_up(Kernel(asleep=True), loads, 3600.0)
    assert end is not None and "has slept for 600 s while it loaded" in end[1]


def test_the_kernel_is_asked_in_doubt_alone() -> None:
    engine = Kernel()
    watchdog = Watchdog(0.0, engine, Kernel())
    for tick in range(400):
        assert watchdog.look(pulse(tick // 4, started_s=1.0, num_steps=tick // 4), tick * TICK_S, QUIET) is None
    assert engine.num_looks == 0
    assert given_up(engine, IN_A_STEP, 4.0) is None and engine.num_looks


def test_many_short_steps_are_none() -> None:
    watchdog = Watchdog(0.0, Kernel(), Kernel())
    for tick in range(400):
        assert watchdog.look(pulse(1, started_s=1.0, num_steps=tick // 2), tick * TICK_S, QUIET) is None


def test_time_in_which_this_process_stood_still_does_not_count() -> None:
    watchdog = Watchdog(0.0, Kernel(), Kernel())
    assert watchdog.look(pulse(3, started_s=1.0), TICK_S, QUIET) is None
    assert watchdog.look(pulse(3, started_s=1.0), 3600.0, QUIET) is None


def test_time_in_which_the_engine_was_stopped_is_no_step_time() -> None:
    """6 s of a step, 4 s in which it is stopped, 3 s of the same step: less than 10 s of work."""
    engine = Kernel()
    watchdog = Watchdog(0.0, engine, Kernel())
    for tick in range(int(13.0 / TICK_S)):
        engine.stopped = 6.0 <= tick * TICK_S < 10.0
        assert watchdog.look(IN_A_STEP, tick * TICK_S, QUIET) is None


def test_before_the_first_beat_libraries_are_read() -> None:
    end = given_up(Kernel(), None, 200.0)
    assert end is not None and 119.0 < end[0] < 122.0 and end[1] == "gave no sign of life for 120 s"


# -- lost frames -------------------------------------------------------------------------------------------------------


@dataclass
class Wire:
    """The frame counts of both ends of a wire at each look, and when the watchdog gives up."""

    sent: int = 5
    """Frames sent by the engine, as its beat says; it has received all that the server sent."""
    arrived: int = 4
    is_awaited: bool = True
    told: int = 3
    """Frames sent to the engine."""
    taken: int = 3
    phase: EnginePhase = EnginePhase.SERVING
    in_a_step: bool = False
    share: float = 1.0
    """The part of its time that the engine could use."""

    def given_up(self, num_looks: int = 40, *, beats: int = 1, look_s: float = TICK_S) -> tuple[float, str] | None:
        """(seconds until the watchdog gives up, reason) if each look finds so many more beats."""
        watchdog = Watchdog(0.0, Kernel(share=self.share), Kernel())
        for tick in range(1, num_looks + 1):
            pulse = Pulse(tick * beats + 1, float(self.in_a_step), 99.0, 0, self.phase, True, self.sent, self.taken)
            reason = watchdog.look(pulse, tick * look_s, FrameCounts(self.told, self.arrived, self.is_awaited))
            if reason:
                return tick * look_s, reason
        return None


def test_a_frame_that_was_sent_and_does_not_come_is_lost_also_where_none_follows() -> None:
    assert Wire().given_up() == (MAX_LATE_S + 2 * TICK_S, "has sent frame 4, which never came")
    assert Wire(arrived=5, taken=2).given_up() == (
        MAX_LATE_S + 2 * TICK_S, "was sent frame 2, which it has never seen"
    )  # fmt: skip
    assert Wire(arrived=5).given_up() is None
    assert Wire(arrived=6, taken=4).given_up() is None, "a beat is a quarter of a second old"


@pytest.mark.parametrize(
    "wire",
    [
        Wire(is_awaited=False),
        Wire(arrived=5, taken=2, in_a_step=True),
        Wire(arrived=5, taken=2, phase=EnginePhase.LOADING),
        Wire(share=0.02),
    ],
    ids=["the server is busy with the last one", "a long step", "the engine loads", "it waits for a processor"],
)
def test_nobody_misses_a_frame_while_it_could_not_be_seen(wire: Wire) -> None:
    assert wire.given_up() is None


def test_time_in_which_a_side_stood_still_does_not_make_a_frame_late() -> None:
    """The engine or the server was stopped with a frame on its way: a look counts a quarter second at most."""
    engine = Kernel(stopped=True)
    watchdog = Watchdog(0.0, engine, Kernel())
    stopped = [watchdog.look(pulse_with(1, sent=5), tick * TICK_S, FrameCounts(0, 4, True)) for tick in range(1, 12)]
    assert stopped == [None] * 11
    engine.stopped = False
    assert watchdog.look(pulse_with(2, sent=5), 3600.0, FrameCounts(0, 4, True)) is None
    num_looks = MAX_LATE_S / TICK_S + 2
    assert Wire().given_up(look_s=60.0) == (num_looks * 60.0, "has sent frame 4, which never came")


def test_frames_that_go_on_coming_are_none_of_them_late() -> None:
    """A server that is behind reads on: the sequence number would show a gap."""
    watchdog = Watchdog(0.0, Kernel(), Kernel())
    for tick in range(1, 400):
        behind = FrameCounts(3 * tick, tick, True)
        assert watchdog.look(pulse_with(tick, sent=2 * tick, taken=2 * tick), tick * TICK_S, behind) is None


def pulse_with(num_beats: int, *, sent: int, taken: int = 0) -> Pulse:
    return Pulse(num_beats, 0.0, 0.0, 0, EnginePhase.SERVING, True, sent, taken)


# -- the flight record -------------------------------------------------------------------------------------------------


def test_what_is_in_flight_is_what_was_launched_and_has_not_ended() -> None:
    shared = allocate(flight_bytes(3))
    reader, record = FlightReader(shared), FlightRecord(shared)
    os.close(shared)
    a, b, c = map(tag_of, "abc")
    assert reader.in_flight() == {}
    record.launched(6, [(a, 10), (b, 20), (c, 2**40)])
    record.launched(7, [(a, 11)])
    assert reader.in_flight() == {a: 11, b: 20, c: 2**40}
    record.ended(6)
    assert reader.in_flight() == {a: 11}
    record.ended(7)
    assert reader.in_flight() == {}
    reader.close()


def test_a_step_may_take_ten_predictions_and_its_first_time_more() -> None:
    heartbeat = Heartbeat.of(allocate(HEARTBEAT_BYTES))
    watch = StepWatch(FlightRecord(allocate(flight_bytes(1))), heartbeat, Peaks(read_bytes_per_s=1e9, flops_per_s=1e9))
    limits = []
    for step_id, flops in enumerate((10**6, 10**6, 6 * 10**9)):
        watch.launched(step_id, [(1, 1)], StepWork("decode", flops, 0))
        limits.append(heartbeat.step_limit_s)
        watch.ended(step_id)
    assert limits == [120.0, 10.0, 600.0]
