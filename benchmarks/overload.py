"""What a server does when ten times as much is asked as it can give: goodput, the first token of who is let in, how
soon who is not is told, and how soon all is as before.

    python benchmarks/overload.py [--seconds 10] [--step-ms 20] [--target-ms 500]

Server and engine are the real ones, each a process; the model sleeps `--step-ms` a step (`free_engine.py`), so that
what is measured is queue and refusals, and one machine can ask for ten times of it. Open loop: requests are sent when
they are due, whatever became of those before.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import orjson

from benchmarks.daemon import running
from benchmarks.tables import Cell, markdown
from inferd.server.commands.bench.client import Client, ClientError

_SERVER = Path(__file__).resolve().with_name("free_server.py")
NUM_PROMPT, NUM_OUTPUT, NUM_SLOTS = 64, 10, 8
REFUSALS = (429, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How the server is started."""

    step_ms: float = 20.0
    target_ms: float = 500.0
    """TTFT."""

    def command(self) -> list[str]:
        return [
            sys.executable, "-P", str(_SERVER), "--step-ms", str(self.step_ms), "serve", "--log-level", "warning",
            "--no-access-log", "--max-num-seqs", str(NUM_SLOTS), "--ttft-target", f"{self.target_ms:g}ms",
        ]  # fmt: skip


@dataclass(slots=True)
class Told:
    """What one request was told, in seconds of one clock."""

    due_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0
    status: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From when it was due."""
        return None if self.first_s is None else self.first_s - self.due_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load, in figures; times in seconds."""

    name: str
    rate: float
    """Requests a second that were sent."""
    goodput: float
    """Requests a second that were served with their first token within the target."""
    share_served: float
    ttft_p50_s: float
    ttft_p99_s: float
    refusal_p50_s: float
    refusal_p99_s: float
    num_refused: int
    num_failed: int
    """Neither served nor refused."""


async def ask(client: Client, told: Told, seed: int) -> Told:
    """One request, to its end; `told` is filled in."""

    def on_event(payload: bytes, now_s: float) -> None:
        if told.first_s is None and b'"error"' not in payload:
            told.first_s = now_s

    body = {
        "prompt": [300 + (seed * 31 + i * 7) % 2000 for i in range(NUM_PROMPT)],
        "max_tokens": NUM_OUTPUT, "ignore_eos": True, "stream": True, "seed": seed,
    }  # fmt: skip
    told.sent_s = time.perf_counter()
    try:
        reply = await client.post("/v1/completions", orjson.dumps(body), on_event)
        told.status = reply.status
    except ClientError as error:
        told.error = str(error)
    told.ended_s = time.perf_counter()
    return told


async def closed(client: Client, seconds: float, seed: int) -> float:
    """Requests a second that as many callers as there are slots get served, one after another: saturation."""
    began_s, served = time.perf_counter(), 0

    async def caller(number: int) -> None:
        nonlocal served
        while time.perf_counter() < began_s + seconds:
            told = await ask(client, Told(time.perf_counter()), seed + number + NUM_SLOTS * served)
            assert told.status == 200, f"refused without a load: {told}"
            served += 1

    # One more than slots: while an answer is read and the next request sent its slot would be empty.
    await asyncio.gather(*(caller(number) for number in range(NUM_SLOTS + 2)))
    return served / (time.perf_counter() - began_s)


async def opened(client: Client, rate: float, seconds: float, seed: int) -> list[Told]:
    """Poisson arrivals, each sent when it is due."""
    random, due_s, began_s = Random(f"{seed} {rate}"), 0.0, time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[Told]] = []
        while (due_s := due_s + random.expovariate(rate)) < seconds:
            wait_s = began_s + due_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(ask(client, Told(began_s + due_s), seed + len(tasks))))
    return [task.result() for task in tasks]


def summarize(name: str, told: Sequence[Told], seconds: float, target_s: float) -> Load:
    """The figures of one load."""
    ttfts = sorted(one.ttft_s for one in told if one.status == 200 and one.ttft_s is not None)
    refusals = sorted(one.ended_s - one.sent_s for one in told if one.status in REFUSALS)
    return Load(
        name=name,
        rate=len(told) / seconds,
        goodput=sum(ttft_s <= target_s for ttft_s in ttfts) / seconds,
        share_served=len(ttfts) / max(1, len(told)),
        ttft_p50_s=_percentile(ttfts, 0.5),
        ttft_p99_s=_percentile(ttfts, 0.99),
        refusal_p50_s=_percentile(refusals, 0.5),
        refusal_p99_s=_percentile(refusals, 0.99),
        num_refused=len(refusals),
        num_failed=len(told) - len(ttfts) - len(refusals),
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


@dataclass(frozen=True, slots=True)
class Outcome:
    """All loads, and what the server can give."""

    saturation: float
    """Requests a second."""
    loads: tuple[Load, ...]

    def of(self, name: str) -> Load:
        return next(load for load in self.loads if load.name == name)


BEFORE, OVER, AFTER = "half, before", "ten times", "half, from 1 s after"


async def measure(url: str, asked: Asked, seconds: float) -> Outcome:
    """Half of what it can give, ten times of it, and half again: from a second after the last of them came."""
    client, target_s = Client(url, timeout_s=60.0), asked.target_ms / 1e3
    await closed(client, 1.0, 10**6)
    saturation = await closed(client, max(3.0, seconds / 2), 0)
    loads: list[Load] = []
    for number, (name, factor) in enumerate(((BEFORE, 0.5), (OVER, 10.0), (AFTER, 0.5))):
        if name == AFTER:
            await asyncio.sleep(1.0)
        told = await opened(client, factor * saturation, seconds, 10**5 * (number + 1))
        loads.append(summarize(name, told, seconds, target_s))
    client.close()
    return Outcome(saturation, tuple(loads))


def run(asked: Asked, seconds: float) -> Outcome:
    """Start the server, load it, and end it."""
    with tempfile.TemporaryDirectory() as logs, running(asked.command(), Path(logs) / "log") as daemon:
        return asyncio.run(measure(daemon.url, asked, seconds))


def report(asked: Asked, outcome: Outcome) -> str:
    """A table and what it comes to, as Markdown."""
    rows: list[list[Cell]] = [
        [
            load.name,
            f"{load.rate:.0f}",
            f"{load.goodput:.1f}",
            f"{100 * load.goodput / outcome.saturation:.0f}%",
            *(f"{1e3 * seconds:.0f}" for seconds in (load.ttft_p50_s, load.ttft_p99_s)),
            str(load.num_refused),
            *(f"{1e3 * seconds:.1f}" for seconds in (load.refusal_p50_s, load.refusal_p99_s)),
            str(load.num_failed),
        ]
        for load in outcome.loads
    ]
    columns = [
        "load",
        "requests/s",
        "goodput",
        "of saturation",
        "TTFT p50 ms",
        "p99",
        "refused",
        "told in ms p50",
        "p99",
    ]
    return "\n\n".join(
        (
            f"Steps of {asked.step_ms:g} ms, {NUM_SLOTS} slots, prompts of {NUM_PROMPT} and answers of {NUM_OUTPUT} "
            f"tokens, TTFT target {asked.target_ms:g} ms. Saturation, closed loop: {outcome.saturation:.1f} a second.",
            markdown([*columns, "failed"], rows),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--target-ms", type=float, default=500.0)
    given = parser.parse_args()
    asked = Asked(step_ms=given.step_ms, target_ms=given.target_ms)
    print(report(asked, run(asked, given.seconds)))


if __name__ == "__main__":
    main()
