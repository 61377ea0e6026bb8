"""R3, R4 and R17: requests that kill the engine, engines that die with any request, and rows with NaN."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e.conftest import Daemon
from tests.reliability.asking import Ask, Asker
from tests.reliability.conftest import WITHOUT_CACHE, faulty, restarts
from tests.reliability.workloads import streams

ABORT, NAN, MEMORY, KILL = 3071, 3070, 3069, 3068
"""The last tokens of the embedded model's vocabulary, with the fault that each causes."""
_NEVER_DRAWN = {str(token_id): -100 for token_id in (ABORT, NAN, MEMORY, KILL)}


def poison(token_id: int) -> Ask:
    """The fault comes when the prompt is computed."""
    return Ask("/v1/completions", {"prompt": [*range(10, 40), token_id, 50], "max_tokens": 30})


def poison_drawn(token_id: int) -> Ask:
    """The fault comes when a generated token is computed, which is one step after it was sampled."""
    body = {"prompt": [*range(10, 40)], "max_tokens": 30, "ignore_eos": True, "logit_bias": {str(token_id): 100}}
    return Ask("/v1/completions", body)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    faults = f"abort@token={ABORT}", f"nan@token={NAN}", f"memory@token={MEMORY}@epoch=0", f"kill@token={KILL}"
    served = Daemon(WITHOUT_CACHE, "--kv-memory", "16MiB", program=faulty(*faults))
    served.wait_ready()
    yield served
    served.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def good(daemon: Daemon, is_long: bool) -> Callable[..., list[Any]]:
    """Asks for the same good answers each time, beside a bad request. Returns the result of the bad one."""
    num_streams, asker = 63 if is_long else 12, Asker(daemon.url)
    asks = [replace(ask, body={**ask.body, "logit_bias": _NEVER_DRAWN}) for ask in streams(num_streams, 40)]
    expected = [answer.said for answer in asker.ask(asks)]

    def ask(*bad: Ask) -> list[Any]:
        answers = asker.ask([*asks, *bad])
        assert [answer.said for answer in answers[: len(asks)]] == expected
        return answers[len(asks) :]

    return ask


def test_an_allocation_that_fails_is_a_pause(daemon: Daemon, good: Callable[..., list[Any]]) -> None:
    (answer,) = good(poison(MEMORY))
    assert answer.status == 200
    assert restarts(daemon) == 1 and "told to fail" in daemon.output


def test_r17_a_row_of_nan_fails_alone(daemon: Daemon, good: Callable[..., list[Any]]) -> None:
    """Its KV becomes NaN, then its logits. The next owner of its blocks reads none of it."""
    before = restarts(daemon)
    for _ in range(3):
        (answer,) = good(poison(NAN))
        assert (answer.status, answer.error["code"]) == (500, "numerical_error")
    assert restarts(daemon) == before


def test_r3_poisons_fail_alone_and_the_others_finish(daemon: Daemon, good: Callable[..., list[Any]]) -> None:
    before, poisons = restarts(daemon), (poison(ABORT), poison_drawn(ABORT))
    for answer in good(*poisons):
        assert (answer.status, answer.error["code"]) == (500, "engine_error"), answer
    num_restarts = restarts(daemon) - before
    assert num_restarts <= 6, "three for each; fewer where the second was there when the first killed"

    again = Asker(daemon.url).ask([Ask(bad.path, {**bad.body, "seed": 5}) for bad in poisons])
    assert all(answer.status == 500 and "not tried again" in answer.error["message"] for answer in again)  # type: ignore[index]
    assert restarts(daemon) == before + num_restarts, "a poison was tried again"


@pytest.mark.long
def test_r3_what_the_system_kills_each_time_is_failed_after_one_more(
    daemon: Daemon, good: Callable[..., list[Any]]
) -> None:
    """SIGKILL may also come from a person, so it needs more evidence."""
    before = restarts(daemon)
    (answer,) = good(poison(KILL))
    assert (answer.status, answer.error["code"]) == (500, "engine_error"), answer
    assert restarts(daemon) - before <= 4


def test_r4_engines_that_deliver_nothing_end_the_server(start: Callable[..., Daemon]) -> None:
    daemon = start(program=faulty("kill@step=1", step_ms=0))
    answers = Asker(daemon.url).ask(streams(4, 20))
    assert {answer.error["code"] for answer in answers if answer.error} == {"engine_error"}
    with contextlib.suppress(subprocess.TimeoutExpired):
        daemon.process.wait(60)
    assert daemon.process.returncode == 70, daemon.output
    assert "; those before it ended too, and none delivered a token" in daemon.output
