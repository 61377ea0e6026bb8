"""`make soak HOURS=n`: puts a mixed load with aborts on a real server, and finds out whether anything grows.

    python -m tests.chaos.soak --hours 1 [--rate 1] [--seed 1] [--out benchmarks/results]

Requests of every kind come at random, each with a new prompt. Some clients leave, some read slowly, and some answers
are requested twice and compared. Once a minute the load pauses until nothing runs; the verdict uses the counts taken
then. The report is written again each time, so that an interrupted soak has one. The exit code is 1 if something grows,
a block is held, or an answer is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from string import ascii_lowercase

import psutil

from benchmarks.daemon import running
from benchmarks.machine import place
from tests.chaos.answer_fields import AnswerFields, read_answer
from tests.chaos.asks import Marked, round_of
from tests.chaos.checker import Checker, Violation
from tests.chaos.client import TO_THE_END, Client, Manner
from tests.chaos.history import End, History
from tests.chaos.samples import Sample, take
from tests.chaos.server_log import log_of
from tests.chaos.soak_report import MIB, Verdict, findings, handles_chart, held_blocks, measured, memory_chart, table

SERVER = (str(Path(sys.executable).parent / "inferd"), "serve", "--log-level", "warning")
BOUNDED = ("--kv-memory", "64MiB", "--stored-responses", "256KiB")
"""So small that what the server keeps on purpose (KV blocks, stored responses) is full early in the warm-up."""
_WORDS_KEPT = 10_000
"""Number of words that the tokenizer caches, at some 400 bytes each. Every request brings a new word, so the cache
would grow for hours if it were not filled first."""
_WORDS_AT_ONCE = 500
_MAX_OPEN = 24
_REMEMBERED = 64
"""Number of answers that may be requested again."""
_AGAIN = 0.25
_SETTLE_S = 1.0
"""Seconds within which the server closes connections that the client closed."""
_IDLE_WITHIN_S = 60.0
_LEAST_RESTS = 8
"""Half of all requests belong to the warm-up, and a slope needs two rests after it."""


@dataclass(slots=True)
class Ledger:
    """Counts of the load's requests."""

    num_asked: int = 0
    num_compared: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a soak."""

    hours: float
    rate: float
    """Requests per second."""
    seed: int
    rest_every_s: float
    sample_every_s: float
    out: Path


class Load:
    """Sends requests at random times, in random manners, until it is paused."""

    def __init__(self, url: str, options: Options, ledger: Ledger) -> None:
        self._url, self._rate, self._ledger = url, options.rate, ledger
        self._random = Random(options.seed)
        self._fresh: deque[Marked] = deque()
        self._round = options.seed * 1_000_000
        self._remembered: deque[tuple[Marked, AnswerFields]] = deque(maxlen=_REMEMBERED)
        self._open: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def run_for(self, seconds: float, stop: asyncio.Event) -> None:
        """Send requests for so long, then wait for every answer and close the connections."""
        client, until_s = Client(self._url), time.monotonic() + seconds
        while time.monotonic() < until_s and not stop.is_set():
            if len(self._open) < _MAX_OPEN:
                task = asyncio.create_task(self._one(client))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), self._random.expovariate(self._rate))
        await asyncio.gather(*self._open)
        await client.close()

    async def _one(self, client: Client) -> None:
        due: dict[str, AnswerFields] = {}
        if self._remembered and self._random.random() < _AGAIN:
            asked, answer = self._random.choice(self._remembered)
            due[asked.mark], manner = answer, TO_THE_END
        else:
            asked, manner = self._next(), self._manner()
        history = await client.ask(asked, manner)
        self._settle(history, due)

    def _settle(self, history: History, due: dict[str, AnswerFields]) -> None:
        self._ledger.num_asked += 1
        self._ledger.num_compared += bool(due)
        self._ledger.ends[f"{history.manner}: {history.last.end.value}"] += 1
        self._ledger.violations += Checker(due).check(history)
        if history.last.end is End.WHOLE and not due:
            self._remembered.append((history.asked, read_answer(history.last, history.asked.ask.path)))

    def _next(self) -> Marked:
        if not self._fresh:
            asks = round_of(self._round)
            self._random.shuffle(asks)
            self._fresh.extend(asks)
            self._round += 1
        return self._fresh.popleft()

    def _manner(self) -> Manner:
        drawn = self._random.random()
        if drawn < 0.15:
            return Manner("left after a time", leave_after_s=self._random.uniform(0.005, 1.5))
        if drawn < 0.3:
            return Manner("left while it streamed", leave_after_events=self._random.randrange(1, 100))
        return Manner("read slowly", pause_s=0.02) if drawn < 0.35 else TO_THE_END


class Soak:
    """One soak of one server."""

    def __init__(self, url: str, pid: int, options: Options) -> None:
        self._options, self._ledger = options, Ledger()
        self._server, self._url = psutil.Process(pid), url
        self._load = Load(url, options, self._ledger)
        self._stop = asyncio.Event()
        self._client = Client(url)
        self._started_s = time.monotonic()

    async def run(self) -> int:
        """Returns the exit code. Ends early, with a report, on SIGINT and SIGTERM."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        await self._fill()
        sampler = asyncio.create_task(self._keep_sampling())
        until_s = self._started_s + self._options.hours * 3600
        num_rests = 0
        while not self._stop.is_set() and (time.monotonic() < until_s or num_rests < _LEAST_RESTS):
            await self._load.run_for(self._options.rest_every_s, self._stop)
            await self._rest()
            self._write()
            num_rests += 1
        sampler.cancel()
        await asyncio.gather(sampler, return_exceptions=True)
        await self._client.close()
        return self._conclude()

    async def _fill(self) -> None:
        """Fill what the server keeps on purpose and the load would fill too slowly."""
        random = Random(self._options.seed)
        for _ in range(0, 2 * _WORDS_KEPT, _WORDS_AT_ONCE):
            words = ("".join(random.choices(ascii_lowercase, k=9)) for _ in range(_WORDS_AT_ONCE))
            await self._client.tokenize(" ".join(words))

    async def _keep_sampling(self) -> None:
        while True:
            await self._sample(is_rest=False)
            await asyncio.sleep(self._options.sample_every_s)

    async def _rest(self) -> None:
        """Wait until the server says that nothing runs, then take a sample."""
        until_s = time.monotonic() + _IDLE_WITHIN_S
        while time.monotonic() < until_s:
            if await self._is_idle():
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(min(_SETTLE_S, self._options.rest_every_s / 4))
        await self._sample(is_rest=True)

    async def _is_idle(self) -> bool:
        state = await self._client.state()
        return not any(state["requests"].values()) and not state["kv_cache"]["used"]

    async def _sample(self, *, is_rest: bool) -> None:
        at_s = time.monotonic() - self._started_s
        num_open, num_asked = self._load.num_open, self._ledger.num_asked
        sample = await take(self._server, self._client, at_s, num_open, num_asked, is_rest=is_rest)
        self._ledger.samples.append(sample)

    def _write(self) -> None:
        samples, out = sorted(self._ledger.samples, key=lambda sample: sample.at_s), self._options.out
        out.mkdir(parents=True, exist_ok=True)
        (out / "soak.svg").write_text(memory_chart(samples))
        (out / "soak_handles.svg").write_text(handles_chart(samples))
        (out / "soak.md").write_text(report(self._options, self._ledger) + "\n")
        last = samples[-1]
        server, engine = last.server.rss_bytes / MIB, last.engine.rss_bytes / MIB
        print(
            f"{last.at_s / 60:7.1f} min  {self._ledger.num_asked} asked, {len(self._ledger.violations)} wrong; "
            f"at rest: server {server:.1f} MiB, engine {engine:.1f} MiB, {last.server.num_fds} descriptors, "
            f"{last.num_tasks} tasks, {last.num_blocks_used} blocks",
            flush=True,
        )

    def _conclude(self) -> int:
        print("\n" + report(self._options, self._ledger))
        has_grown = any(one.verdict is Verdict.GROWS for one in findings(self._ledger.samples))
        return int(has_grown or bool(self._ledger.violations) or bool(held_blocks(self._ledger.samples)))


def report(options: Options, ledger: Ledger) -> str:
    """The measurements so far, as Markdown."""
    samples = sorted(ledger.samples, key=lambda sample: sample.at_s)
    rests, found = measured(samples), findings(samples)
    lasted_min = samples[-1].at_s / 60 if samples else 0.0
    ends = "; ".join(f"{name} {count}" for name, count in sorted(ledger.ends.items()))
    held = held_blocks(samples)
    parts = [
        f"`make soak HOURS={options.hours:g}`: {lasted_min:.1f} of {options.hours * 60:g} minutes measured, seed "
        f"{options.seed}, {options.rate:g} requests a second at random; {place()}; the embedded model, "
        f"`{' '.join(BOUNDED)}`.",
        f"{ledger.num_asked:,} requests of {len(round_of(0))} kinds ({ends}). "
        f"{ledger.num_compared:,} answers were compared with a second one; {len(ledger.violations)} violations.",
        f"{len(rests)} times at rest after the warm-up, when nothing was asked and all that was asked had ended; KV "
        f"blocks held then: {f'YES, in {len(held)} of them' if held else 'none'}. Slopes by Theil-Sen with Sen's "
        f"interval. At this rate 1 B a request is {options.rate * 3600 / 1024:.1f} KiB an hour.",
        table(found) if found else "Nothing was measured at rest after the warm-up yet.",
        *(f"- {violation}" for violation in ledger.violations[:20]),
    ]
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=8.0, help="how long; may be a fraction (default: 8)")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second (default: 1)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rest-every-s", type=float, default=60.0, help="seconds between two rests (default: 60)")
    parser.add_argument("--sample-every-s", type=float, default=10.0, help="seconds between samples (default: 10)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the report")
    asked = parser.parse_args()
    options = Options(asked.hours, asked.rate, asked.seed, asked.rest_every_s, asked.sample_every_s, asked.out)
    with log_of("soak") as log, running([*SERVER, *BOUNDED], log) as daemon:
        if asyncio.run(_soak(daemon.url, daemon.pid, options)):
            sys.exit(1)
    return 0


async def _soak(url: str, pid: int, options: Options) -> int:
    return await Soak(url, pid, options).run()


if __name__ == "__main__":
    sys.exit(main())
