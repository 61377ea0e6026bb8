"""Servers of embeddings beside each other: texts a second, time until ready, and memory.

    python benchmarks/embeddings.py --model FOLDER --files FILES [--precision fp32] [--server inferd] \\
        --python sentence-transformers=PYTHON --python onnxruntime=PYTHON --python openvino=PYTHON \\
        --python infinity=PYTHON --python vllm=PYTHON --program llama.cpp=llama-server \\
        [--seconds 3] [--rounds 3] [--out benchmarks/results/embeddings.md]

All servers of a precision run at once and are loaded in turn, cell by cell, so they see the same machine. Each text is
a request. `encoders/export.py` makes FILES; llama.cpp reads FILES/model-f32.gguf and FILES/model-q8_0.gguf. FOLDER must
allow 512 tokens: some servers cut texts at the max_seq_length of its sentence_bert_config.json. A server without a
--python or --program is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tokenizers import Tokenizer

from benchmarks.daemon import Daemon, DaemonError, running
from benchmarks.encoders.in_process import lowest_cosine
from benchmarks.machine import place
from benchmarks.tables import Cell, markdown

ROOT = Path(__file__).resolve().parents[1]
NUM_THREADS = str(len(os.sched_getaffinity(0)))
LENGTHS, CLIENTS, NUM_TEXTS = (16, 128, 512), (1, 32), 64
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "float32"}


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    command: Sequence[str]
    """Without a host and port."""
    ready_path: str = "/ready"


def servers(precision: str, model: Path, files: Path, programs: Mapping[str, str]) -> list[Server]:
    """Those whose program is known and that have this precision. inferd is the first."""
    int8, dtype = precision == "int8", _DTYPES[precision]
    known = [
        Server("inferd", [
            programs["inferd"], "-m", "inferd", "serve", str(model), "--dtype", dtype, "--quantization",
            "int8" if int8 else "none", "--log-level", "warning", "--no-access-log", "--served-model-name", "m",
        ])
    ]  # fmt: skip
    for library in ("sentence-transformers", "onnxruntime", "openvino"):
        for own in [precision, *(["static"] if int8 and library == "openvino" else [])]:
            if library in programs and not (library == "onnxruntime" and own == "bf16"):
                front = [programs[library], "-m", "benchmarks.encoders.front", library, str(model), str(files), own]
                known.append(Server(f"{library} {own}" if own == "static" else library, front))
    if "infinity" in programs and not int8:
        options = ["--engine", "torch", "--device", "cpu", "--dtype", dtype, "--no-bettertransformer"]
        program = str(Path(programs["infinity"]).with_name("infinity_emb"))
        command = [program, "v2", "--model-id", str(model), "--served-model-name", "m", "--url-prefix", "/v1", *options]
        known.append(Server("infinity", command, "/health"))
    if "vllm" in programs and not int8:
        options = [
            "--runner",
            "pooling",
            "--dtype",
            dtype,
            "--served-model-name",
            "m",
            "--max-num-seqs",
            "32",
            "--gpu-memory-utilization",
            "0.1",
        ]
        program = str(Path(programs["vllm"]).with_name("vllm"))
        known.append(Server("vllm", [program, "serve", str(model), *options], "/health"))
    if "llama.cpp" in programs and precision != "bf16":
        weights = files / ("model-q8_0.gguf" if int8 else "model-f32.gguf")
        options = [
            "-t",
            NUM_THREADS,
            "-tb",
            NUM_THREADS,
            "--parallel",
            "32",
            "-c",
            "16384",
            "-b",
            "4096",
            "-ub",
            "4096",
        ]
        command = [programs["llama.cpp"], "-m", str(weights), "--embedding", "--pooling", "mean", *options, "--offline"]
        known.append(Server("llama.cpp", command, "/health"))
    return known


def texts_of(model: Path, length: int, seed: int) -> list[str]:
    """Texts of exactly `length` tokens, of random words that are one token each."""
    tokenizer, draw = Tokenizer.from_file(str(model / "tokenizer.json")), Random(seed)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    words = [word for word in sorted(tokenizer.get_vocab()) if word.isascii() and word.isalpha() and len(word) > 2]
    words = [word for word in draw.sample(words, 4000) if len(tokenizer.encode(word).ids) == 3]
    texts = [" ".join(draw.choice(words) for _ in range(length - 2)) for _ in range(NUM_TEXTS)]
    assert all(len(tokenizer.encode(text).ids) == length for text in texts)
    return texts


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert b" 200 " in head.split(b"\r\n")[0], head.decode() + (await reader.read(500)).decode()
    if b"transfer-encoding: chunked" not in head:
        return await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return body


def _request(text: str) -> bytes:
    body = json.dumps({"model": "m", "input": text}).encode()
    head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"POST /v1/embeddings HTTP/1.1\r\n{head}\r\n\r\n".encode() + body


async def texts_a_second(url: str, texts: Sequence[str], clients: int, seconds: float) -> float:
    """A closed loop of clients, each with a connection of its own and one text a request."""
    requests, where = [_request(text) for text in texts], urlsplit(url)
    number, end_s, done = 0, time.perf_counter() + seconds, 0

    async def client() -> None:
        nonlocal number, done
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        while time.perf_counter() < end_s:
            number += 1
            writer.write(requests[number % len(requests)])
            await _answer(reader)
            done += 1
        writer.close()

    start_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return done / (time.perf_counter() - start_s)


def vectors(url: str, texts: Sequence[str]) -> list[list[float]]:
    found = []
    for text in texts:
        body = json.dumps({"model": "m", "input": text}).encode()
        asked = urllib.request.Request(f"{url}/v1/embeddings", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            found.append(json.load(answer)["data"][0]["embedding"])
    return found


def start(
    chosen: Sequence[Server], texts: Sequence[str], logs: Path, stack: ExitStack
) -> tuple[dict[str, Daemon], dict[str, list[list[float]]]]:
    """The servers that start and answer, and their vectors of the texts."""
    started, found = {}, {}
    for server in chosen:
        log = logs / f"{server.name.replace(' ', '-')}.log"
        try:
            daemon = stack.enter_context(running(server.command, log, 300.0, server.ready_path))
            found[server.name] = vectors(daemon.url, texts)
            started[server.name] = daemon
        except (DaemonError, OSError) as error:
            said = log.read_text(errors="replace").strip().splitlines()[-1:]
            print(f"{server.name} is left out: {type(error).__name__} {said}; see {log}", file=sys.stderr)
    return started, found


def measure(daemons: Mapping[str, Daemon], model: Path, rounds: int, seconds: float) -> list[list[Cell]]:
    """A row for each cell: texts a second by server (medians), and the ratio of the first to the best other."""
    rows: list[list[Cell]] = []
    for length in LENGTHS:
        texts = texts_of(model, length, length)
        for clients in CLIENTS:
            rates: dict[str, list[float]] = {name: [] for name in daemons}
            for turn in range(rounds):
                names = list(daemons)[turn % len(daemons) :] + list(daemons)[: turn % len(daemons)]
                for name in names:
                    try:
                        rates[name].append(asyncio.run(texts_a_second(daemons[name].url, texts, clients, seconds)))
                    except (OSError, EOFError, AssertionError) as error:
                        print(f"{name} failed with {length} tokens, {clients} clients: {error!r}", file=sys.stderr)
                        rates[name].append(math.nan)
            middle = {name: statistics.median(own) for name, own in rates.items()}
            first, *others = middle
            best = max(others, key=lambda name: middle[name] if middle[name] > 0 else 0.0, default=first)
            ratios = [ours / theirs for ours, theirs in zip(rates[first], rates[best], strict=True)]
            rows.append([f"{length} tokens, {clients} clients", *middle.values(), statistics.median(ratios), best])
            print(*rows[-1], file=sys.stderr, flush=True)
    return rows


def run(precision: str, asked: argparse.Namespace, programs: Mapping[str, str]) -> str:
    chosen = [own for own in servers(precision, asked.model, asked.files, programs) if own.name not in asked.without]
    with ExitStack() as stack:
        daemons, found = start(chosen, texts_of(asked.model, 64, 1)[:3], asked.logs, stack)
        rows = measure(daemons, asked.model, asked.rounds, asked.seconds)
        first = next(iter(found.values()))
        rows += [
            ["ready after s", *(daemon.ready_s for daemon in daemons.values()), None, None],
            ["PSS MiB", *(daemon.pss_bytes() / 2**20 for daemon in daemons.values()), None, None],
            ["lowest cosine to the first", *(f"{lowest_cosine(own, first):.5f}" for own in found.values()), None, None],
        ]
        return f"{asked.model.name}, {precision}\n\n{markdown(['', *daemons, 'ratio', 'to'], rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--files", type=Path, required=True)
    parser.add_argument("--python", action="append", default=[], metavar="SERVER=PYTHON")
    parser.add_argument("--program", action="append", default=[], metavar="SERVER=PROGRAM")
    parser.add_argument("--without", action="append", default=[], metavar="SERVER")
    parser.add_argument("--precision", action="append", choices=_DTYPES)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each server, cell and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="folder of the servers' output")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    programs = {"inferd": sys.executable, **dict(own.split("=", 1) for own in [*asked.python, *asked.program])}
    settings = {"OMP_NUM_THREADS": NUM_THREADS, "OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.update(settings | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT)})
    tables = [run(precision, asked, programs) for precision in asked.precision or ("fp32", "int8")]
    text = f"Texts a second ({place()}), one text a request.\n\n" + "\n".join(tables)
    print(text)
    if asked.out:
        asked.out.write_text(text)


if __name__ == "__main__":
    main()
