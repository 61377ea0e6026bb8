"""R5: an engine that hangs is replaced and its streams go on. One that computes for long is left alone.

The model is free, or the real one with `--long`, because the process hangs whatever it computes.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.e2e.conftest import INFERD, Daemon, free_model
from tests.reliability.asking import Asker
from tests.reliability.conftest import WITHOUT_CACHE, count, faulty, kill_engine, restarts, wait_until
from tests.reliability.workloads import streams

SHORT_HANGS, LONG_HANGS = 1, 50
STEP_MS = 5.0
FOUR_CHOICES = [replace(ask, body={**ask.body, "n": 4}) for ask in streams(1, 300)]


@pytest.mark.timeout(3600)
def test_r5_hung_engines_are_replaced_and_slow_ones_are_not(start: Callable[..., Daemon], is_long: bool) -> None:
    """Two daemons at once, because the test mostly waits."""
    num_hangs = LONG_HANGS if is_long else SHORT_HANGS
    program = (str(INFERD),) if is_long else free_model(STEP_MS)
    faults = faulty("slow@step=330@epoch=0", "hang@step=630@epoch=0", step_ms=None if is_long else STEP_MS)
    slow = start(WITHOUT_CACHE, ready=False, program=faults)
    stopped = start(WITHOUT_CACHE, program=program)
    slow.wait_ready()
    expected = said(slow)
    wrong: list[str] = []

    def slow_steps() -> None:
        if said(slow) != expected or restarts(slow):
            wrong.append(f"a slow step, longer than any silence that is borne: {slow.output}")
        if said(slow) != expected or restarts(slow) != 1 or "has not ended a step" not in slow.output:
            wrong.append(f"a step that never ends, of a process that beats: {slow.output}")

    thread = threading.Thread(target=slow_steps)
    thread.start()
    num_stops = num_hit = 0
    while num_hit < num_hangs and not wrong:
        num_stops += 1
        assert num_stops <= 3 * num_hangs, "hardly an answer was under way when its engine was stopped"
        before = count(stopped, "inferd_requests_replayed_total")
        stopper = threading.Thread(target=stop_soon, args=(stopped, num_stops))
        stopper.start()
        if said(stopped) != expected:
            wrong.append(f"a stopped process, {num_stops}: {stopped.output}")
        stopper.join()
        # On a busy machine the answer may have been complete when it was stopped.
        num_hit += count(stopped, "inferd_requests_replayed_total") > before
    thread.join()
    assert restarts(stopped) == num_stops
    assert not wrong, "\n".join(wrong)
    print(f"R5: {num_stops} stopped engines, {num_hit} of them under an answer, 1 slow step, 1 without end: 0 wrong")


@pytest.mark.sampled(keep=4, among="recoveries")
@pytest.mark.parametrize("what", ["spin", "loop", "lock"])
def test_an_engine_that_hangs_is_replaced_whatever_holds_its_interpreter(
    start: Callable[..., Daemon], what: str
) -> None:
    faults = faulty(f"{what}@step=330@epoch=0", step_ms=STEP_MS)
    daemon = start(WITHOUT_CACHE, ready=False, program=faults)
    daemon.wait_ready()
    expected = said(daemon)
    assert said(daemon) == expected
    assert restarts(daemon) == 1 and "has not ended a step within 10 s" in daemon.output


def said(daemon: Daemon) -> list[tuple[object, ...]]:
    """One request of about 300 steps. Its choices start together, so a step's number says which token it computes."""
    return [answer.said for answer in Asker(daemon.url).ask(FOUR_CHOICES)]


def stop_soon(daemon: Daemon, number: int) -> None:
    """Stop an engine. Returns when another serves in its place. `number`: engines stopped so far, this one included."""
    goal = count(daemon, "inferd_engine_steps_total") + 50
    wait_until(lambda: count(daemon, "inferd_engine_steps_total") >= goal)
    stopped_s = kill_engine(daemon, signal.SIGSTOP)
    wait_until(lambda: sum("was stopped" in line for line in daemon.lines) == number)
    print(f"R5: a stopped engine was given up after {time.monotonic() - stopped_s:.1f} s")
    wait_until(lambda: restarts(daemon) == number)
