"""The loop probe measures how long the event loop was held up, by the clock that advanced least."""

from __future__ import annotations

import asyncio
import itertools
import time

from inferd.server.transport.loop_probe import LoopProbe


def test_a_beat_is_late_by_what_held_the_loop() -> None:
    """On clocks of the test's own: each reading of the first is 30 ms later, of the second 20 ms."""
    fast, slow = itertools.count(0.0, 0.03), itertools.count(0.0, 0.02)
    seen: list[float] = []

    async def run() -> None:
        is_seen = asyncio.Event()

        def observe(lag_s: float) -> None:
            seen.append(lag_s)
            is_seen.set()

        probe = LoopProbe(observe, 0.001, (lambda: next(fast), lambda: next(slow)))
        probe.start()
        await is_seen.wait()
        probe.stop()
        num_seen = len(seen)
        await asyncio.sleep(0.01)
        assert len(seen) == num_seen, "nothing is seen once it was stopped"

    asyncio.run(run())
    assert all(abs(lag_s - 0.019) < 1e-9 for lag_s in seen)


def test_a_callback_that_holds_the_loop_is_seen() -> None:
    seen: list[float] = []

    async def run() -> None:
        probe = LoopProbe(seen.append, 0.005)
        probe.start()
        time.sleep(0.08)  # noqa: ASYNC251
        await asyncio.sleep(0.02)
        probe.stop()

    asyncio.run(run())
    assert max(seen) > 0.05
