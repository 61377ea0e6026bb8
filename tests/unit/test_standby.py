"""The keeper of a standby, with fake processes: which one is promoted or killed, and how soon the next one starts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from inferd.engine.api.errors import EngineDeadError, StartError
from inferd.engine.api.wire.messages import STANDBY, Failed, FromEngine, Phase
from inferd.server.supervision import engine_handle as standby_module
from inferd.server.supervision.engine_handle import EngineHandle, Standby
from tests.unit.scenes import play, settled

READ = Phase("libraries", 1.0, "read")


class FakeHandle:
    """A process, its end of the wire and its pulse."""

    def __init__(self, *says: FromEngine | Exception) -> None:
        """`says`: its messages after the one that its libraries are loaded; by default that it waits to be promoted."""
        self.process = self.client = self
        self._unsaid = [READ, *(says or (Phase(STANDBY, 1.0, ""),))]
        self.processor_time = self
        self.is_running, self.is_stopped = True, lambda: False
        self.is_discarded = False
        self._gone = asyncio.Event()

    @property
    def has_said_all(self) -> bool:
        return not self._unsaid

    async def receive(self) -> FromEngine:
        if not self._unsaid:
            await asyncio.Event().wait()
        said = self._unsaid.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    def die(self) -> None:
        self.is_running = False
        self._gone.set()

    async def ended(self, sooner: asyncio.Task[Any] | None = None, *, may_wait: bool = False) -> str:
        assert may_wait, "a standby waits until it is promoted, which is no hang"
        gone = asyncio.create_task(self._gone.wait())
        await asyncio.wait((gone, sooner) if sooner else (gone,), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        return "" if self.is_running else "died"

    async def end(self) -> None:
        self.die()
        self.is_discarded = True


class Scene:
    """A `Standby` whose processes are fakes."""

    def __init__(self, *lives: Callable[[], FakeHandle]) -> None:
        """`lives`: result of each start; the last one is repeated."""
        self._lives, self.begun, self.told = list(lives), list[FakeHandle](), list[bool]()
        self.generations: list[int] = []
        self.standby = Standby(self._begin, self.told.append)

    def _begin(self, epoch: int) -> EngineHandle:
        self.generations.append(epoch)
        make = self._lives.pop(0) if len(self._lives) > 1 else self._lives[0]
        self.begun.append(make())
        return cast("EngineHandle", self.begun[-1])

    @property
    def is_warm(self) -> bool:
        return bool(self.told) and self.told[-1]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_module, "_FIRST_DELAY_S", 0.0)


def test_a_warm_one_is_promoted_once() -> None:
    async def scene() -> None:
        it = Scene(FakeHandle)
        it.standby.keep(7)
        await settled(lambda: it.is_warm)
        assert cast("FakeHandle", await it.standby.take()) is it.begun[0]
        assert it.generations == [7] and it.begun[0].is_running and not it.begun[0].is_discarded
        assert not it.is_warm and await it.standby.take() is None

    play(scene)


@pytest.mark.parametrize("fault", ["stopped", "dead", "cold"])
def test_one_that_cannot_serve_is_not_promoted_and_nothing_is_left_of_it(fault: str) -> None:
    """A standby that a signal stopped, just died, or is not bound to its server yet."""

    async def scene() -> None:
        it = Scene((lambda: FakeHandle(READ)) if fault == "cold" else FakeHandle)
        it.standby.keep(1)
        await settled(lambda: (it.begun and it.begun[0].has_said_all) if fault == "cold" else it.is_warm)
        assert it.is_warm == (fault != "cold")
        if fault == "stopped":
            it.begun[0].is_stopped = lambda: True
        if fault == "dead":
            it.begun[0].is_running = False
        assert await it.standby.take() is None
        assert it.begun[0].is_discarded

    play(scene)


@pytest.mark.parametrize("says", [Failed("ModelError", "no weights"), EngineDeadError("a frame was cut")])
def test_one_that_says_anything_else_is_replaced(says: FromEngine | Exception) -> None:
    async def scene() -> None:
        it = Scene(lambda: FakeHandle(says), FakeHandle)
        it.standby.keep(3)
        await settled(lambda: it.is_warm)
        assert it.generations == [3, 3], "whoever is promoted is the next engine"
        assert it.begun[0].is_discarded and not it.begun[1].is_discarded

    play(scene)


def test_one_that_dies_is_replaced() -> None:
    async def scene() -> None:
        it = Scene(FakeHandle)
        it.standby.keep(1)
        await settled(lambda: it.is_warm)
        it.begun[0].die()
        await settled(lambda: len(it.begun) == 2 and it.is_warm)
        assert it.begun[0].is_discarded
        assert it.told == [True, False, True]

    play(scene)


@pytest.mark.parametrize("error", [StartError("no memory"), OSError("no files"), RuntimeError("a fault of ours")])
def test_a_system_that_gives_no_process_is_asked_again(error: Exception) -> None:
    async def scene() -> None:
        def refuse() -> FakeHandle:
            raise error

        it = Scene(refuse, FakeHandle)
        it.standby.keep(1)
        await settled(lambda: it.is_warm)

    play(scene)


def test_starts_wait_ever_longer_and_at_once_after_a_quiet_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_module, "_FIRST_DELAY_S", 0.25)
    kept = Standby(lambda _: cast("EngineHandle", None), lambda _: None)
    delays, now = [], 5.0
    for _ in range(10):
        delays.append(kept._next_delay_s(now))
        kept._started_s = now = now + delays[-1]
    assert delays == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert kept._next_delay_s(now + 61.0) == 0.25
    kept._num_soon = 5_000
    assert kept._next_delay_s(kept._started_s) == 30.0
