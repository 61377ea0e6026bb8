"""Streams of a chat model while another model of the same server embeds many texts: times of their tokens.

    python benchmarks/beside_embeddings.py --embedder FOLDER [--chat smollm2] [--texts 10000] [--clients 8]
        [--tpot-target 30ms] [--out benchmarks/results/beside_embeddings.md]

Clients stream one answer after another. First they are alone, then the texts are embedded beside them, 64 a request and
four requests at a time, as programs that fill an index do. The time for each further token of an answer is compared
with the target.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.daemon import running
from benchmarks.machine import place
from benchmarks.tables import Cell, markdown

ROOT = Path(__file__).resolve().parents[1]
ANSWER_TOKENS, BATCH, REQUESTS_AT_ONCE, ALONE_S = 64, 64, 4, 20.0
_WORDS = Path(__file__).read_text().split()


@dataclass(frozen=True, slots=True)
class Answer:
    ended_s: float
    tpot_s: float
    """Mean time of each token after the first."""


async def stream(client: httpx.AsyncClient, url: str, prompt: str) -> Answer:
    asked = {
        "model": "chat",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": ANSWER_TOKENS,
        "min_tokens": ANSWER_TOKENS,
        "stream": True,
    }
    times = []
    async with client.stream("POST", f"{url}/v1/chat/completions", json=asked) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                times.append(time.perf_counter())
    return Answer(times[-1], (times[-1] - times[0]) / (ANSWER_TOKENS - 1))


async def streams(url: str, clients: int, until: asyncio.Event) -> list[Answer]:
    """Answers of a closed loop of clients."""
    answers: list[Answer] = []

    async def loop(client: httpx.AsyncClient, seed: int) -> None:
        draw = Random(seed)
        while not until.is_set():
            answers.append(await stream(client, url, f"Say more about {' '.join(draw.sample(_WORDS, 12))}."))

    async with httpx.AsyncClient(timeout=120) as client:
        await asyncio.gather(*(loop(client, seed) for seed in range(clients)))
    return answers


async def embed(url: str, texts: Sequence[str]) -> float:
    """Seconds until all texts are embedded."""
    batches = iter([texts[first : first + BATCH] for first in range(0, len(texts), BATCH)])
    start_s = time.perf_counter()

    async def loop(client: httpx.AsyncClient) -> None:
        for batch in batches:
            asked = {"model": "embedder", "input": list(batch), "truncate_prompt_tokens": -1}
            answer = await client.post(f"{url}/v1/embeddings", json=asked)
            answer.raise_for_status()
            assert len(answer.json()["data"]) == len(batch)

    async with httpx.AsyncClient(timeout=600) as client:
        await asyncio.gather(*(loop(client) for _ in range(REQUESTS_AT_ONCE)))
    return time.perf_counter() - start_s


async def measure(url: str, clients: int, texts: Sequence[str]) -> tuple[list[Answer], list[Answer], float]:
    """Answers of streams alone and beside the texts, and the seconds of the texts."""
    over = asyncio.Event()
    alone = asyncio.create_task(streams(url, clients, over))
    await asyncio.sleep(ALONE_S)
    over.set()
    first, over = await alone, asyncio.Event()
    beside = asyncio.create_task(streams(url, clients, over))
    await asyncio.sleep(2.0)
    seconds = await embed(url, texts)
    over.set()
    return first, await beside, seconds


def texts_of(count: int) -> list[str]:
    """Texts of 10 to 120 words."""
    draw = Random(1)
    return [" ".join(draw.choices(_WORDS, k=draw.randint(10, 120))) for _ in range(count)]


def row(name: str, answers: Sequence[Answer], target_s: float) -> list[Cell]:
    tpots = sorted(answer.tpot_s * 1e3 for answer in answers)
    met = sum(tpot <= target_s * 1e3 for tpot in tpots) / len(tpots)
    return [name, len(tpots), statistics.median(tpots), tpots[int(0.99 * (len(tpots) - 1))], f"{met:.1%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embedder", type=Path, required=True)
    parser.add_argument("--chat", default="smollm2")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tpot-target", default=30.0, type=lambda text: float(text.removesuffix("ms")), metavar="MS")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "beside_embeddings.log")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    models = [f"chat={asked.chat}", f"embedder={asked.embedder}"]
    options = ["--tpot-target", f"{asked.tpot_target:g}ms", "--kv-memory", "512MiB", "--log-level", "warning"]
    command = [sys.executable, "-m", "inferd", "serve", *models, *options]
    with running(command, asked.log, 300.0) as daemon:
        alone, beside, seconds = asyncio.run(measure(daemon.url, asked.clients, texts_of(asked.texts)))
    target_s = asked.tpot_target / 1e3
    rows = [row("alone", alone, target_s), row(f"beside {asked.texts:,} texts", beside, target_s)]
    table = markdown(["streams", "answers", "ms a token, median", "ms a token, p99", "target met"], rows)
    title = f"{asked.clients} streams of {asked.chat} and a target of {asked.tpot_target:g} ms a token ({place()})"
    text = f"{title}. {asked.texts / seconds:.1f} texts a second of {asked.embedder.name}.\n\n{table}\n"
    print(text)
    if asked.out:
        asked.out.write_text(text)


if __name__ == "__main__":
    main()
