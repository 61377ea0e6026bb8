"""Tokens a second over HTTP with and without speculation, with the real model smollm2 or another.

    python -P benchmarks/speculation.py [--model smollm2] [--guesses suffix] [--temperature 0] [--dtype bfloat16]
        [--quantization none] [--clients 1,8,32]
        [--prompts 20] [--tokens 200] [--rounds 2] [--plot FILE.svg]

Two servers run at the same time, one with `--speculative none`, and get each load by turns. The loads are chats whose
answers repeat their prompt, plain chats, and JSON under a schema (`speculation_prompts`). The embedded model, `tiny`,
gets tasks and questions of its own. The program fails if an answer differs between the servers.

Each load has a cache salt of its own in each round. So guesses repeat the request, and answers of the same round to
other prompts, but never an earlier answer to the same prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import tables
from benchmarks.daemon import running
from benchmarks.machine import place
from benchmarks.speculation_prompts import NUM_EACH, requests
from benchmarks.svg import line_chart
from inferd.server.commands.bench.report import Drafts

MODEL = "smollm2"
WARM_UP: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
COLUMNS = ("load", "clients", "tokens/s off", "tokens/s on", "ratio", "steps saved", "acceptance")
_STEPS = re.compile(r"^inferd_engine_steps_total\S* (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one server."""

    answers: tuple[str, ...]
    num_tokens: int
    seconds: float
    num_steps: int
    drafts: Drafts

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Pair:
    """The same load on both servers, once each round."""

    load: str
    num_clients: int
    off: tuple[Run, ...]
    on: tuple[Run, ...]

    @property
    def tokens_per_s(self) -> tuple[float, float]:
        """Medians without and with speculation."""
        off, on = (statistics.median(run.tokens_per_s for run in runs) for runs in (self.off, self.on))
        return off, on

    def cells(self) -> list[tables.Cell]:
        """The row of the table."""
        off, on = self.tokens_per_s
        steps_off, steps_on = (sum(run.num_steps for run in runs) for runs in (self.off, self.on))
        num_drafts, num_accepted = (
            sum(run.drafts.num_drafts for run in self.on),
            sum(run.drafts.num_accepted for run in self.on),
        )
        acceptance = f"{num_accepted / num_drafts:.0%}" if num_drafts else "no drafts"
        return [self.load, str(self.num_clients), off, on, on / off, f"{1 - steps_on / steps_off:.0%}", acceptance]


async def measure(url: str, bodies: Sequence[dict[str, Any]], num_clients: int) -> Run:
    """Send all bodies, `num_clients` of them at a time."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        answers: dict[int, tuple[str, int]] = {}
        left = iter(enumerate(bodies))

        async def one_client() -> None:
            for index, body in left:
                answer = await client.post("/v1/chat/completions", json=body)
                answer.raise_for_status()
                said = answer.json()
                answers[index] = said["choices"][0]["message"]["content"], said["usage"]["completion_tokens"]

        steps, drafts = await _counters(client)
        started_s = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(num_clients)))
        seconds = time.perf_counter() - started_s
        steps_after, drafts_after = await _counters(client)
    told = [answers[index] for index in range(len(bodies))]
    return Run(
        tuple(text for text, _ in told),
        sum(count for _, count in told),
        seconds,
        steps_after - steps,
        drafts_after.since(drafts),
    )


async def _counters(client: httpx.AsyncClient) -> tuple[int, Drafts]:
    """(steps, draft tokens) since the server's start."""
    page = (await client.get("/metrics", headers={"Cache-Control": "no-cache"})).text
    steps, drafts = _STEPS.search(page), Drafts.read(page)
    assert steps is not None and drafts is not None, "the server does not count steps or drafts"
    return int(float(steps[1])), drafts


def bodies_of(load: Sequence[dict[str, Any]], asked: argparse.Namespace, num_clients: int, salt: str) -> list[Any]:
    """The requests of one run. With many clients each prompt comes several times, with another salt each time."""
    num_copies = -(-2 * num_clients // len(load))
    return [
        {
            **body,
            "max_tokens": asked.tokens,
            "temperature": asked.temperature,
            "seed": copy,
            "cache_salt": f"{salt} {copy}",
        }
        for copy in range(num_copies)
        for body in load
    ]


def compare(name: str, load: Sequence[dict[str, Any]], num_clients: int, urls: tuple[str, str], asked: Any) -> Pair:
    """Measure one load on both servers by turns. Exits if an answer differs."""
    found: tuple[list[Run], list[Run]] = [], []
    for round_ in range(asked.rounds):
        bodies = bodies_of(load, asked, num_clients, f"{name} {num_clients} {round_}")
        order = (0, 1) if round_ % 2 == 0 else (1, 0)
        for side in order:
            found[side].append(asyncio.run(measure(urls[side], bodies, num_clients)))
        off, on = found[0][-1], found[1][-1]
        for body, plain, guessed in zip(bodies, off.answers, on.answers, strict=True):
            if plain != guessed:
                sys.exit(f"speculation changed an answer to {body}:\n{plain!r}\nwithout, and with:\n{guessed!r}")
    return Pair(name, num_clients, tuple(found[0]), tuple(found[1]))


def plot(pairs: Sequence[Pair], clients: Sequence[int]) -> str:
    """Tokens a second over clients, with a line for each load with and without speculation."""
    lines: dict[str, list[float]] = {}
    for pair in pairs:
        off, on = pair.tokens_per_s
        lines.setdefault(f"{pair.load}, on", []).append(on)
        lines.setdefault(f"{pair.load}, off", []).append(off)
    return line_chart(clients, lines, "clients", "output tokens a second")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--guesses", default="suffix", help="value of --speculative of the second server")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--clients", default="1,8,32", help="numbers of clients")
    parser.add_argument("--loads", default="", help="names of loads; all by default")
    parser.add_argument("--prompts", type=int, default=NUM_EACH, help="prompts of each load")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--plot", type=Path, help="draw tokens a second over clients into this file")
    return parser.parse_args()


def main() -> None:
    asked = parsed()
    clients = [int(number) for number in asked.clients.split(",")]
    loads = requests(asked.model)
    wanted = asked.loads.split(",") if asked.loads else list(loads)
    command = [sys.executable, "-P", "-m", "inferd", "serve", asked.model, "--dtype", asked.dtype, "--no-access-log"]
    command += ["--quantization", asked.quantization, "--speculative"]
    what = f"{asked.model} in {asked.dtype}, quantization {asked.quantization}, temperature {asked.temperature:g}"
    print(f"{place()}, {what}, --speculative {asked.guesses}\n")
    with (
        tempfile.TemporaryDirectory() as logs,
        running([*command, "none"], Path(logs) / "off") as off,
        running([*command, asked.guesses], Path(logs) / "on") as on,
    ):
        urls = off.url, on.url
        pairs = []
        for url in urls:
            asyncio.run(measure(url, [{**WARM_UP, "max_tokens": 40}] * 4, 4))
        for name in wanted:
            load = loads[name][: asked.prompts]
            for num_clients in clients:
                pairs.append(compare(name, load, num_clients, urls, asked))
                print(tables.markdown(COLUMNS, [pairs[-1].cells()]).splitlines()[-1], file=sys.stderr, flush=True)
    print(tables.markdown(COLUMNS, [pair.cells() for pair in pairs]))
    print(f"\nAll {sum(len(run.answers) for pair in pairs for run in pair.on)} answers are equal.")
    if asked.plot is not None:
        asked.plot.write_text(plot(pairs, clients), encoding="utf-8")


if __name__ == "__main__":
    main()
