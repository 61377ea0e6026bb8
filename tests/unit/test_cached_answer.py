"""An answer for all callers: how often it is made, who shares it, and that the event loop goes on meanwhile. The clock
is the test's."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Generator

import pytest

from inferd.server.endpoints.cached_answer import MAX_AGE_S, CachedAnswer


class Made:
    """Makes the numbers 1, 2, 3 and so on, in pieces that take the clock's time."""

    def __init__(self, num_pieces: int = 4, piece_s: float = 0.001) -> None:
        self.num_pieces, self.piece_s = num_pieces, piece_s
        self.now_s, self.begun_s, self.num_begun, self.num_made = 100.0, 0.0, 0, 0
        self.fails = False
        self._has_begun = [asyncio.Event() for _ in range(9)]
        self.cached = CachedAnswer(self._pieces, lambda: self.now_s)

    def _pieces(self) -> Generator[None, None, int]:
        self.begun_s = self.now_s
        self._has_begun[self.num_begun].set()
        self.num_begun += 1
        number = self.num_begun
        for _ in range(self.num_pieces):
            self.now_s += self.piece_s
            yield
        if self.fails:
            raise ZeroDivisionError
        self.num_made += 1
        return number

    async def until_begun(self, number: int) -> None:
        await self._has_begun[number - 1].wait()


def test_callers_at_the_same_time_share_one_making() -> None:
    async def run() -> None:
        made = Made(num_pieces=100)
        assert await asyncio.gather(*(made.cached.get() for _ in range(16))) == [1] * 16
        assert made.num_made == 1

    asyncio.run(run())


def test_an_answer_is_kept_for_a_second() -> None:
    async def run() -> None:
        made = Made(piece_s=0.0)
        for at_s, expected in ((100.0, 1), (100.0 + 0.99 * MAX_AGE_S, 1), (100.0 + MAX_AGE_S, 2), (101.5, 2)):
            made.now_s = at_s
            assert await made.cached.get() == expected
        made.now_s = 1_000.0
        assert await made.cached.get() == 3

    asyncio.run(run())


@pytest.mark.parametrize(("held_s", "kept_s"), [(0.04, 1.0), (0.05, 1.0), (0.1, 2.0), (1.0, 20.0)])
def test_what_takes_long_to_make_is_kept_for_longer(held_s: float, kept_s: float) -> None:
    """It takes at most a twentieth of the time, from one beginning to the next."""

    async def run() -> None:
        made = Made(num_pieces=10, piece_s=held_s / 10)
        assert await made.cached.get() == 1
        made.now_s = 100.0 + kept_s - 0.01
        assert await made.cached.get() == 1
        made.now_s = 100.0 + kept_s + 0.001
        assert await made.cached.get() == 2

    asyncio.run(run())


def test_the_event_loop_goes_on_after_two_pieces_of_a_millisecond() -> None:
    async def run() -> None:
        made, pieces = Made(num_pieces=100), []

        async def others() -> None:
            while made.num_made == 0:
                pieces.append(round((made.now_s - 100.0) * 1e3))
                await asyncio.sleep(0)

        await asyncio.gather(made.cached.get(), others())
        turns = sorted(set(pieces))
        assert turns[0] == 0 and turns[-1] >= 98
        assert max(after - before for before, after in itertools.pairwise(turns)) <= 3

    asyncio.run(run())


def test_time_of_others_between_the_slices_is_not_that_of_the_answer() -> None:
    """A busy loop makes no answer older."""

    async def run() -> None:
        made = Made(num_pieces=10)

        async def others() -> None:
            while made.num_made == 0:
                made.now_s += 0.05
                await asyncio.sleep(0)

        await asyncio.gather(made.cached.get(), others())
        made.now_s = made.begun_s + MAX_AGE_S
        assert await made.cached.get() == 2

    asyncio.run(run())


def test_a_caller_that_goes_stops_nothing_for_the_others() -> None:
    async def run() -> None:
        made = Made(num_pieces=100)
        gone, stays = (asyncio.create_task(made.cached.get()) for _ in range(2))
        await made.until_begun(1)
        gone.cancel()
        assert await stays == 1
        assert gone.cancelled() and await made.cached.get() == 1

    asyncio.run(run())


@pytest.mark.parametrize(("held_s", "kept_s"), [(0.04, 1.0), (1.0, 20.0)])
def test_a_mistake_is_told_to_all_until_the_next_making_is_due(held_s: float, kept_s: float) -> None:
    """It takes no more of the loop's time than an answer. The mistake does not grow with the number of callers."""

    async def run() -> None:
        made = Made(num_pieces=10, piece_s=held_s / 10)
        made.fails = True
        told = await asyncio.gather(*(made.cached.get() for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in told] == [ZeroDivisionError] * 3 and made.num_begun == 1
        made.fails = False
        made.now_s = 100.0 + kept_s - 0.01
        lengths = []
        for _ in range(3):
            with pytest.raises(ZeroDivisionError) as mistake:
                await made.cached.get()
            lengths.append(len(mistake.traceback))
        assert made.num_begun == 1 and len(set(lengths)) == 1
        made.now_s = 100.0 + kept_s + 0.001
        assert await made.cached.get() == 2

    asyncio.run(run())


def test_a_fresh_answer_is_begun_after_the_call() -> None:
    """Callers that wait for the same making share the next one. Afterwards it is the cached one."""

    async def run() -> None:
        made = Made(num_pieces=100)
        assert await made.cached.get() == 1
        assert await made.cached.get(is_fresh=True) == 2
        made.now_s += 60
        running = asyncio.create_task(made.cached.get())
        await made.until_begun(3)
        assert await asyncio.gather(*(made.cached.get(is_fresh=True) for _ in range(3))) == [4] * 3
        assert await running == 3
        assert await made.cached.get() == 4

    asyncio.run(run())
