"""R14: the load is ten times as high as the server can serve. `benchmarks/overload.py` measures it. These tests check
what holds on a shared machine too: every request is answered, admitted ones in time, and all is as before soon after.
R15: one tenant fills the queue, and another does not wait behind it. `benchmarks/fairness.py` measures the effect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.daemon import Daemon, running
from benchmarks.overload import AFTER, BEFORE, OVER, ServerOptions, TimedReply, ask, measure
from inferd.server.auth.keys_file import append_entry, digest_of, entry_of
from inferd.server.commands.bench.client import Client

ASKED = ServerOptions(step_ms=40.0, target_ms=1000.0)
"""Duration of a step. Slow steps make a tenfold load a few requests per second."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(ASKED.command(), tmp_path_factory.mktemp("overload") / "log") as daemon:
        yield daemon


@pytest.mark.long
def test_r14_ten_times_the_load(served: Daemon) -> None:
    """A test with bounds in time, which nobody can promise on a shared machine."""
    outcome = asyncio.run(measure(served.url, ASKED, 20.0))
    over = outcome.of(OVER)
    print(
        f"R14: saturation {outcome.saturation:.1f}/s; at {over.rate:.0f}/s: goodput {over.goodput:.1f}/s, TTFT p99 "
        f"{over.ttft_p99_s:.2f} s for a target of {ASKED.target_ms / 1e3:g} s, {over.num_refused} refused within "
        f"{over.refusal_p50_s * 1e3:.1f} ms (p50), {over.refusal_p99_s * 1e3:.1f} ms (p99)"
    )
    assert [load.num_failed for load in outcome.loads] == [0, 0, 0], "somebody was neither served nor refused"
    assert over.share_served < 0.5, "nine of ten are to be refused, but for those that an empty queue takes at first"
    # The benchmark asks for more: 95% of saturation, 1.2 times the target, 20 ms.
    assert over.goodput > 0.5 * outcome.saturation
    assert over.ttft_p99_s < 2 * ASKED.target_ms / 1e3
    assert over.refusal_p50_s < 0.5
    for name in (BEFORE, AFTER):
        assert outcome.of(name).num_refused == 0, f"{name}: nobody is refused at half of what it can give"


def test_r14_a_refusal_says_when_to_come_back(served: Daemon) -> None:
    """The queue's bound refuses at once, before anything is tokenized or computed."""

    async def flood() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        body = {"prompt": [300] * 64, "max_tokens": 10, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=served.url, timeout=60, limits=limits) as client:
            return list(await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(150))))

    answers = asyncio.run(flood())
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    for answer in refused:
        assert answer.status_code == 429, answer.text
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(answer.headers["retry-after"]) >= 1
        assert int(answer.headers["retry-after-ms"]) >= 1


def test_r15_a_tenant_does_not_stand_behind_anothers_queue(tmp_path: Path) -> None:
    """100 requests of one tenant wait for 8 slots. By order of arrival, the other tenant's would be the last."""
    for key in ("flood", "few"):
        append_entry(tmp_path / "keys.yaml", entry_of(sha256=digest_of(key).hex(), name=key))

    async def both(url: str) -> int:
        flood, few, num_over, has_begun = Client(url, "flood"), Client(url, "few"), 0, asyncio.Event()

        async def one(number: int) -> None:
            nonlocal num_over
            assert (await ask(flood, TimedReply(time.perf_counter()), number)).status == 200
            num_over += 1
            has_begun.set()

        async with asyncio.TaskGroup() as group:
            for number in range(100):
                group.create_task(one(number))
            await has_begun.wait()
            for number in range(3):
                assert (await ask(few, TimedReply(time.perf_counter()), 1000 + number)).status == 200
            num_before = num_over
        flood.close()
        few.close()
        return num_before

    command = [*ServerOptions(step_ms=20.0).command()[:-2], "--keys-file", str(tmp_path / "keys.yaml")]
    with running(command, tmp_path / "log") as daemon:
        num_before = asyncio.run(both(daemon.url))
    print(f"R15: {num_before} of 100 of the flood ended before three of the other tenant, one after another")
    assert num_before < 70
