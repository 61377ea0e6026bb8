"""The KV blocks of an engine outlive it: the next one goes on from them, and drops damaged ones."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from inferd.engine.api.process.memory_file import POOL_MEMORY
from tests.e2e.conftest import Daemon
from tests.reliability.asking import Answer, Ask, Asker, asked_under
from tests.reliability.conftest import HTTP, count, kill_engine, restarts, wait_until
from tests.reliability.workloads import streams

NUM_STREAMS, NUM_TOKENS, RECORDS_BYTES = 16, 200, 2**21


def test_r1_the_next_engine_computes_no_prompt_again(start: Callable[..., Daemon]) -> None:
    daemon = start()
    asks, asker = long_streams(), Asker(daemon.url)
    expected = texts(asker.ask(asks))
    for number in range(3):
        before = count(daemon, "inferd_prompt_tokens_computed_total")
        moved = count(daemon, "inferd_requests_replayed_total")
        assert texts(asked_under(lambda: killed(daemon, kill_engine), asker, asks)) == expected
        wait_until(lambda number=number: restarts(daemon) == number + 1)  # type: ignore[misc]
        if count(daemon, "inferd_requests_replayed_total") > moved:
            # Each stream computes at most the block that was not full, and what its prompt had behind whole blocks.
            computed = count(daemon, "inferd_prompt_tokens_computed_total") - before
            assert computed <= 4 * 32 * NUM_STREAMS, f"{computed:.0f} tokens were computed again"
    assert num_left(daemon, "taken") > 0
    assert num_left(daemon, "damaged") == 0


def test_r1_damaged_blocks_are_computed_again(start: Callable[..., Daemon]) -> None:
    daemon = start()
    asks, asker = long_streams(), Asker(daemon.url)
    expected = texts(asker.ask(asks))
    assert texts(asked_under(lambda: killed(daemon, damage_and_kill), asker, asks)) == expected
    wait_until(lambda: restarts(daemon) == 1)
    assert texts(asker.ask(asks)) == expected
    assert num_left(daemon, "damaged") > 0 == num_left(daemon, "taken")


def long_streams() -> list[Ask]:
    """Streams whose prompts fill blocks: a later request finds these also if a kill came after the answers."""
    begin = "A cache keeps what was computed. " * 20
    return [
        Ask(ask.path, {**ask.body, "prompt": begin + ask.body["prompt"]}) for ask in streams(NUM_STREAMS, NUM_TOKENS)
    ]


def killed(daemon: Daemon, kill: Callable[[Daemon], object]) -> None:
    """Kill the engine in the middle of the answers."""
    goal = count(daemon, "inferd_generation_tokens_total") + NUM_STREAMS * NUM_TOKENS / 3
    wait_until(lambda: count(daemon, "inferd_generation_tokens_total") >= goal)
    kill(daemon)


def damage_and_kill(daemon: Daemon) -> None:
    """Write over every block that the engine has, as a fault of its own might, and kill it."""
    engine = daemon.engine_pid
    os.kill(engine, signal.SIGSTOP)
    with open(pool_of(daemon), "r+b") as memory:
        end = os.fstat(memory.fileno()).st_size
        at = RECORDS_BYTES
        while at < end:
            try:
                at = os.lseek(memory.fileno(), at, os.SEEK_DATA)
            except OSError:
                break  # nothing but holes behind it
            os.pwrite(memory.fileno(), os.urandom(4096), at)
            at += 4096
    os.kill(engine, signal.SIGKILL)


def pool_of(daemon: Daemon) -> str:
    """The server's memory of the KV pool."""
    folder = f"/proc/{daemon.process.pid}/fd"
    for name in os.listdir(folder):
        if os.readlink(f"{folder}/{name}").startswith(f"/memfd:{POOL_MEMORY}"):
            return f"{folder}/{name}"
    raise AssertionError("the server keeps no pool")


def num_left(daemon: Daemon, result: str) -> float:
    """Blocks that engines found of the ones before, with this result."""
    page = HTTP.get(daemon.url + "/metrics").text
    (line,) = (line for line in page.splitlines() if line.startswith("inferd_kv_left_blocks_total{") and result in line)
    return float(line.rpartition(" ")[2])


def texts(answers: list[Answer]) -> list[object]:
    """The answers without their usage, which says what was cached."""
    assert all(answer.status == 200 and not answer.error for answer in answers)
    return [answer.choices for answer in answers]
