"""The cost of the whole daemon for each token, without the model: `inferd serve` with a model that computes nothing.

    python benchmarks/overhead.py [--clients 128] [--step-ms 0,4,8] [--profile]

Client, server and engine are the real processes, all on this machine's cores. The model sleeps `--step-ms` each step.
Then every token of each stream is an event of its own, as with a real model of that speed. At 0 the engine runs ahead
of the server, which merges waiting tokens: more tokens a second, fewer events. `--profile` repeats the last case
with sampled stacks in every process, and reports which functions take the time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import tables
from benchmarks.daemon import running
from benchmarks.stacks import read_stacks, sample_into, shares
from inferd.server.commands.bench.options import Fixed, LoadOptions
from inferd.server.commands.bench.report import summarize
from inferd.server.commands.bench.session import measure

_SERVER = Path(__file__).resolve().with_name("free_server.py")
_VOCAB_SIZE = 300
_NUM_FRAMES = 22
_LOOPS = {"server": "startup:serve", "engine": "process:serve", "client": "session:measure"}
"""The frame that contains the measured work of a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """The result of one load. Processor times are microseconds for each output token, by process, intake of prompts
    included."""

    num_clients: int
    step_ms: float
    output_tokens_per_s: float
    events_per_s: float
    ttft_p50_s: float
    itl_p50_s: float | None
    itl_p99_s: float | None
    server_us: float
    engine_us: float
    client_us: float
    num_failed: int


def run_case(asked: argparse.Namespace, num_clients: int, step_ms: float, stacks: Path | None = None) -> Overhead:
    """Start the daemon, load it, and end it."""
    own = ["--step-ms", str(step_ms), *(["--stacks", str(stacks)] if stacks else [])]
    command = [sys.executable, "-P", str(_SERVER), *own, "serve", "--log-level", "warning"]
    command += ["--max-num-seqs", str(max(256, num_clients))]
    with tempfile.TemporaryDirectory() as logs, running(command, Path(logs) / "log") as daemon:
        measure(_options(asked, daemon.url, num_clients, num_requests=num_clients, seed=10**6))
        before = daemon.cpu_s()
        if stacks is not None:
            sample_into(stacks / "client.stacks")
        finished = measure(
            _options(asked, daemon.url, num_clients, num_requests=asked.rounds * num_clients, seed=0)
        ).run
        used = {name: seconds - before[name] for name, seconds in daemon.cpu_s().items()}
    report = summarize(finished)
    assert report.ttft_s is not None, f"nothing succeeded: {report.errors}"
    us = 1e6 / report.num_output_tokens
    return Overhead(
        num_clients=num_clients,
        step_ms=step_ms,
        output_tokens_per_s=report.output_tokens_per_s,
        events_per_s=report.num_chunks / report.duration_s,
        ttft_p50_s=report.ttft_s.p50,
        itl_p50_s=report.itl_s.p50 if report.itl_s else None,
        itl_p99_s=report.itl_s.p99 if report.itl_s else None,
        server_us=used["server"] * us,
        engine_us=used["engine"] * us,
        client_us=finished.cpu_share * finished.duration_s * us,
        num_failed=report.num_failed,
    )


def _options(asked: argparse.Namespace, url: str, num_clients: int, num_requests: int, seed: int) -> LoadOptions:
    return LoadOptions(
        base_url=url,
        num_requests=num_requests,
        concurrency=num_clients,
        input_len=Fixed(asked.input_len),
        output_len=Fixed(asked.output_len),
        seed=seed,
        warmup=0,
        vocab_size=_VOCAB_SIZE,
    )


def table(cases: Sequence[Overhead]) -> str:
    """Latencies in milliseconds, processor time in microseconds for each token."""
    columns = ["clients", "ms a step", "output tok/s", "events/s", "TTFT p50", "ITL p50", "ITL p99"]
    rows: list[list[tables.Cell]] = [
        [
            str(case.num_clients),
            f"{case.step_ms:g}",
            case.output_tokens_per_s,
            case.events_per_s,
            case.ttft_p50_s * 1e3,
            case.itl_p50_s and case.itl_p50_s * 1e3,
            case.itl_p99_s and case.itl_p99_s * 1e3,
            case.server_us,
            case.engine_us,
            case.client_us,
        ]
        for case in cases
    ]
    return tables.markdown([*columns, "server us", "engine us", "client us"], rows)


def profile(directory: Path) -> str:
    """The functions in which each process spends its time."""
    parts = []
    for process, loop in _LOOPS.items():
        found = shares(read_stacks(directory / f"{process}.stacks"), within=loop)[:_NUM_FRAMES]
        rows: list[list[tables.Cell]] = [[frame, f"{own:.1%}", f"{whole:.1%}"] for frame, own, whole in found]
        parts.append(tables.markdown([process, "own", "with callees"], rows))
    return "\n\n".join(parts)


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=_numbers, default=[128.0], help="comma list of numbers of clients")
    parser.add_argument(
        "--step-ms", type=_numbers, default=[8.0, 4.0, 0.0], help="comma list of the model's step times"
    )
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2, help="requests of each client")
    parser.add_argument("--profile", action="store_true", help="report which functions take the time of the last case")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    loads = [(int(clients), step_ms) for clients in asked.clients for step_ms in asked.step_ms]
    cases = [run_case(asked, *load) for load in loads]
    print(table(cases))
    if asked.profile:
        with tempfile.TemporaryDirectory() as scratch:
            run_case(asked, *loads[-1], stacks=Path(scratch))
            print(f"\n{profile(Path(scratch))}")
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(case) for case in cases], indent=2))
    return 1 if any(case.num_failed for case in cases) else 0


if __name__ == "__main__":
    sys.exit(main())
