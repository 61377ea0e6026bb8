"""The virtual loop: time jumps, the order of tasks is drawn, and a deadlock is an error."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.sim.cells import SimulationError
from tests.sim.loop import VirtualLoop


def make_loop(seed: int = 0, limit_s: float = 1e6) -> VirtualLoop:
    return VirtualLoop(Random(seed), limit_s)


def test_time_is_what_timers_say() -> None:
    loop = make_loop()

    async def main() -> float:
        start_s = loop.time()
        await asyncio.gather(asyncio.sleep(86_400), asyncio.sleep(3600))
        return loop.time() - start_s

    assert loop.run_until_complete(main()) == pytest.approx(86_400)
    loop.close()


def test_the_order_is_that_of_the_seed() -> None:
    def order(seed: int) -> list[int]:
        loop, seen = make_loop(seed), []

        async def main() -> None:
            await asyncio.gather(*(note(i) for i in range(6)))

        async def note(number: int) -> None:
            seen.append(number)

        loop.run_until_complete(main())
        loop.close()
        return seen

    orders = [order(seed) for seed in range(20)]
    assert orders == [order(seed) for seed in range(20)], "a seed means one order"
    assert len(set(map(tuple, orders))) > 10, "and seeds mean several"


def test_where_everyone_waits_it_ends() -> None:
    loop = make_loop()
    with pytest.raises(SimulationError, match="everyone waits"):
        loop.run_until_complete(asyncio.Event().wait())


def test_what_goes_round_in_circles_ends() -> None:
    loop = make_loop(limit_s=10.0)

    async def circle() -> None:
        for _ in range(100):
            await asyncio.sleep(0.25)

    with pytest.raises(SimulationError, match="still goes on after 10 s"):
        loop.run_until_complete(circle())
