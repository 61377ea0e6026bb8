"""A server under ten times the load that it can serve: goodput, first tokens of admitted requests, time until a
refusal, and time until it is back to normal.

    python benchmarks/overload.py [--seconds 10] [--step-ms 20] [--target-ms 500]

Server and engine are the real processes. The model sleeps `--step-ms` each step (`free_engine.py`), so the measurement
shows queue and refusals, and one machine can send ten times the load. It is an open loop: requests are sent when they
are due, regardless of the answers to others.
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
class ServerOptions:
    """Options of the server."""

    step_ms: float = 20.0
    target_ms: float = 500.0
    """TTFT target."""

    def command(self) -> list[str]:
        return [
            sys.executable, "-P", str(_SERVER), "--step-ms", str(self.step_ms), "serve", "--log-level", "warning",
            "--no-access-log", "--max-num-seqs", str(NUM_SLOTS), "--ttft-target", f"{self.target_ms:g}ms",
        ]  # fmt: skip


@dataclass(slots=True)
class TimedReply:
    """The answer to one request, in seconds of one clock."""

    due_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0
    status: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Seconds since it was due."""
        return None if self.first_s is None else self.first_s - self.due_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Figures of one load; times in seconds."""

    name: str
    rate: float
    """Requests sent per second."""
    goodput: float
    """Requests per second with their first token within the target."""
    share_served: float
    ttft_p50_s: float
    ttft_p99_s: float
    refusal_p50_s: float
    refusal_p99_s: float
    num_refused: int
    num_failed: int
    """Requests that were neither served nor refused."""


async def ask(client: Client, reply: TimedReply, seed: int) -> TimedReply:
    """Run one request to its end and fill in `reply`."""

    def on_event(payload: bytes, now_s: float) -> None:
        if reply.first_s is None and b'"error"' not in payload:
            reply.first_s = now_s

    body = {
        "prompt": [300 + (seed * 31 + i * 7) % 2000 for i in range(NUM_PROMPT)],
        "max_tokens": NUM_OUTPUT, "ignore_eos": True, "stream": True, "seed": seed,
    }  # fmt: skip
    reply.sent_s = time.perf_counter()
    try:
        answer = await client.post("/v1/completions", orjson.dumps(body), on_event)
        reply.status = answer.status
    except ClientError as error:
        reply.error = str(error)
    reply.ended_s = time.perf_counter()
    return reply


async def closed(client: Client, seconds: float, seed: int) -> float:
    """Requests served per second at saturation: as many callers as slots, each sending one request after another."""
    began_s, served = time.perf_counter(), 0

    async def caller(number: int) -> None:
        nonlocal served
        while time.perf_counter() < began_s + seconds:
            reply = await ask(client, TimedReply(time.perf_counter()), seed + number + NUM_SLOTS * served)
            assert reply.status == 200, f"refused without overload: {reply}"
            served += 1

    # More callers than slots: a slot would be empty while its caller reads an answer and sends the next request.
    await asyncio.gather(*(caller(number) for number in range(NUM_SLOTS + 2)))
    return served / (time.perf_counter() - began_s)


async def opened(client: Client, rate: float, seconds: float, seed: int) -> list[TimedReply]:
    """Poisson arrivals, each sent when it is due."""
    random, due_s, began_s = Random(f"{seed} {rate}"), 0.0, time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[TimedReply]] = []
        while (due_s := due_s + random.expovariate(rate)) < seconds:
            wait_s = began_s + due_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(ask(client, TimedReply(began_s + due_s), seed + len(tasks))))
    return [task.result() for task in tasks]


def summarize(name: str, replies: Sequence[TimedReply], seconds: float, target_s: float) -> Load:
    """The figures of one load."""
    ttfts = sorted(one.ttft_s for one in replies if one.status == 200 and one.ttft_s is not None)
    refusals = sorted(one.ended_s - one.sent_s for one in replies if one.status in REFUSALS)
    return Load(
        name=name,
        rate=len(replies) / seconds,
        goodput=sum(ttft_s <= target_s for ttft_s in ttfts) / seconds,
        share_served=len(ttfts) / max(1, len(replies)),
        ttft_p50_s=_percentile(ttfts, 0.5),
        ttft_p99_s=_percentile(ttfts, 0.99),
        refusal_p50_s=_percentile(refusals, 0.5),
        refusal_p99_s=_percentile(refusals, 0.99),
        num_refused=len(refusals),
        num_failed=len(replies) - len(ttfts) - len(refusals),
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


@dataclass(frozen=True, slots=True)
class Outcome:
    """All loads, and the server's capacity."""

    saturation: float
    """Requests per second."""
    loads: tuple[Load, ...]

    def of(self, name: str) -> Load:
        return next(load for load in self.loads if load.name == name)


BEFORE, OVER, AFTER = "half, before", "ten times", "half, from 1 s after"


async def measure(url: str, options: ServerOptions, seconds: float) -> Outcome:
    """Half the capacity, ten times the capacity, and half again, beginning a second after the last overload request."""
    client, target_s = Client(url, timeout_s=60.0), options.target_ms / 1e3
    await closed(client, 1.0, 10**6)
    saturation = await closed(client, max(3.0, seconds / 2), 0)
    loads: list[Load] = []
    for number, (name, factor) in enumerate(((BEFORE, 0.5), (OVER, 10.0), (AFTER, 0.5))):
        if name == AFTER:
            await asyncio.sleep(1.0)
        replies = await opened(client, factor * saturation, seconds, 10**5 * (number + 1))
        loads.append(summarize(name, replies, seconds, target_s))
    client.close()
    return Outcome(saturation, tuple(loads))


def run(options: ServerOptions, seconds: float) -> Outcome:
    """Start the server, load it, and end it."""
    with tempfile.TemporaryDirectory() as logs, running(options.command(), Path(logs) / "log") as daemon:
        return asyncio.run(measure(daemon.url, options, seconds))


def report(options: ServerOptions, outcome: Outcome) -> str:
    """A Markdown table and its summary."""
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
        "refusal p50 ms",
        "p99",
    ]
    return "\n\n".join(
        (
            f"Steps of {options.step_ms:g} ms, {NUM_SLOTS} slots, prompts of {NUM_PROMPT} and answers of "
            f"{NUM_OUTPUT} tokens, TTFT target {options.target_ms:g} ms. Saturation, closed loop: "
            f"{outcome.saturation:.1f} a second.",
            markdown([*columns, "failed"], rows),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each load")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--target-ms", type=float, default=500.0)
    given = parser.parse_args()
    options = ServerOptions(step_ms=given.step_ms, target_ms=given.target_ms)
    print(report(options, run(options, given.seconds)))


if __name__ == "__main__":
    main()
