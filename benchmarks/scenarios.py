"""The four scenarios on random checkpoints of real shapes: one client, few, many, and a shared prefix.

`--model 1layer --scenarios front` answers another question: how fast tokens stream to 256 clients if the model takes no
time.

    python benchmarks/scenarios.py --dir CACHE [--model 1b,0.6b] [--precision bf16,int8,int4] [--repeat 3]

For each model and precision a server is started and timed to READY. `inferd bench serve`'s generator loads it (greedy,
end of sequence ignored, ids below the vocabulary), and its memory is observed. Every repetition and every warm-up has
its own prompts, so only the prefixes that a scenario shares are ever cached. Each figure is shown with the scenario's
floor (`roofline.py`), from rates measured before and after. Peers' figures (`peers.py`) are shown as they were and
scaled to this machine. `--peer` names another running server, which is loaded in turn with ours.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.checkpoints import SHAPES, ensure
from benchmarks.daemon import Daemon, running
from benchmarks.machine import describe, measure_machine
from benchmarks.roofline import Load
from benchmarks.scenario_results import Measurement, Results, Start, as_json, render
from inferd.server.commands.bench.load import LoadRun
from inferd.server.commands.bench.options import Fixed, LoadOptions
from inferd.server.commands.bench.report import BenchReport, failures, summarize, warnings
from inferd.server.commands.bench.session import measure

QUANTIZATION = {"bf16": "none", "int8": "int8", "int4": "int4"}
SCENARIOS = {
    "i": Load(num_clients=1, num_requests=3, input_len=128, output_len=128),
    "ii": Load(num_clients=8, num_requests=16, input_len=256, output_len=64),
    "iii": Load(num_clients=32, num_requests=64, input_len=128, output_len=32),
    "iv": Load(num_clients=4, num_requests=16, input_len=544, output_len=32, shared_prefix=512),
    "front": Load(num_clients=256, num_requests=1024, input_len=32, output_len=64),
}
OURS = "inferd"
_QUICK_OUTPUT_LEN = 4


@dataclass(frozen=True, slots=True)
class Target:
    """A server to load, and the form in which it accepts prompts."""

    name: str
    url: str
    prompts: str = "ids"


def run(asked: argparse.Namespace) -> Results:
    """Measure the machine, every model and precision, and the machine again."""
    scenarios = {name: _quickened(SCENARIOS[name]) if asked.quick else SCENARIOS[name] for name in asked.scenarios}
    before = measure_machine(quick=asked.quick)
    print(describe(before), file=sys.stderr)
    starts: list[Start] = []
    measurements: list[Measurement] = []
    for model in asked.model:
        checkpoint = ensure(asked.dir, model)
        for precision in asked.precision:
            command = _serve_command(checkpoint, precision) + asked.serve_args
            with running(command, asked.dir / f"{model}-{precision}.log") as daemon:
                for measurement in _measure_all(asked, model, precision, daemon, scenarios):
                    measurements.append(measurement)
                    print(_progress(measurement), file=sys.stderr, flush=True)
            starts.append(Start(model, precision, daemon.ready_s, daemon.peak_rss_bytes))
    after = measure_machine(quick=asked.quick)
    return Results((before, after), starts, measurements, shlex.join(sys.argv), scenarios, asked.quick)


def _serve_command(checkpoint: Path, precision: str) -> list[str]:
    command = [str(Path(sys.executable).parent / "inferd"), "serve", str(checkpoint)]
    return command if precision == "bf16" else [*command, "--quantization", QUANTIZATION[precision]]


def _quickened(load: Load) -> Load:
    num_requests = min(load.num_requests, 4)
    return replace(load, num_requests=num_requests, num_clients=min(load.num_clients, 2), output_len=_QUICK_OUTPUT_LEN)


def _measure_all(
    asked: argparse.Namespace, model: str, precision: str, daemon: Daemon, scenarios: dict[str, Load]
) -> Iterator[Measurement]:
    """Every scenario on every target in turn, so that a noisy minute affects all of them."""
    targets = [Target(OURS, daemon.url), *(Target(name, url, asked.peer_prompts) for url, name in asked.peer)]
    vocab_size = SHAPES[model].vocab_size
    for name, load in scenarios.items():
        for target in targets:
            # As many requests at once as in the measurement, so that every shape of step has run; no prompt is
            # repeated.
            warm = replace(load, num_requests=load.num_clients, output_len=min(8, load.output_len))
            _load(target, warm, vocab_size, seed=f"{name}/warm-up")
        for repetition in range(asked.repeat):
            for target in targets:
                finished = _load(target, load, vocab_size, seed=f"{name}/{repetition}")
                report = summarize(finished)
                yield _measurement(model, precision, name, target, repetition, report, failures(finished.outcomes))


def _load(target: Target, load: Load, vocab_size: int, seed: str) -> LoadRun:
    """`seed` identifies the run: all targets get the same prompts, and each run has its own."""
    options = LoadOptions(
        base_url=target.url,
        prompts="words" if target.prompts == "words" else "ids",
        num_requests=load.num_requests,
        concurrency=load.num_clients,
        input_len=Fixed(load.input_len),
        output_len=Fixed(load.output_len),
        shared_prefix=load.shared_prefix,
        seed=zlib.crc32(seed.encode()),
        warmup=0,
        vocab_size=vocab_size,
    )
    return measure(options).run


def _measurement(
    model: str, precision: str, scenario: str, target: Target, repetition: int, report: BenchReport, failed: str
) -> Measurement:
    return Measurement(
        model=model,
        precision=precision,
        scenario=scenario,
        system=target.name,
        repetition=repetition,
        output_tokens_per_s=report.output_tokens_per_s,
        ttft_p50_s=report.ttft_s.p50 if report.ttft_s else None,
        tpot_p50_s=report.tpot_s.p50 if report.tpot_s else None,
        num_cached_tokens=report.num_cached_tokens,
        num_failed=report.num_failed,
        failures=failed,
        warnings=warnings(report),
    )


def _progress(m: Measurement) -> str:
    failed = f", {m.num_failed} FAILED: {m.failures}" if m.num_failed else ""
    return f"{m.model} {m.precision} {m.scenario:3} {m.system}: {m.output_tokens_per_s:.1f} output tokens/s{failed}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exits with the violated rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="folder of the checkpoints; made once")
    parser.add_argument("--model", type=_names(SHAPES), default=["1b"], help=f"comma list of {', '.join(SHAPES)}")
    parser.add_argument(
        "--precision", type=_names(QUANTIZATION), default=["bf16"], help="comma list of bf16, int8, int4"
    )
    parser.add_argument(
        "--scenarios",
        type=_names(SCENARIOS),
        default=["i", "ii", "iii", "iv"],
        help="comma list of i, ii, iii, iv, front",
    )
    parser.add_argument("--repeat", type=int, default=1, help="number of runs, whose medians are reported")
    parser.add_argument("--peer", type=_peer, action="append", default=[], metavar="URL[=NAME]")
    parser.add_argument(
        "--peer-prompts", choices=("ids", "words"), default="ids", help="words if the peer accepts no token ids"
    )
    parser.add_argument(
        "--serve-args", type=shlex.split, default=[], metavar="'ARGS'", help="further arguments of `inferd serve`"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="tiny loads: shows that it runs, measures nothing")
    asked = parser.parse_args(arguments)
    if asked.repeat < 1:
        parser.error(f"--repeat must be at least 1, but got {asked.repeat}")
    if asked.peer and len(asked.model) * len(asked.precision) > 1:
        parser.error("--peer serves one model in one precision: name one of each")
    return asked


def _names(known: Sequence[str] | dict[str, Any]) -> Any:
    """A parser for lists of `known` names, separated by commas."""

    def names(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; there are {', '.join(known)}")
        return text.split(",")

    return names


def _peer(text: str) -> tuple[str, str]:
    """Parse a peer into (url, name)."""
    url, _, name = text.partition("=")
    return url, name or url.partition("://")[2]


def main() -> int:
    asked = parse()
    results = run(asked)
    text = render(results)
    print(text)
    if asked.markdown is not None:
        asked.markdown.write_text(text)
    if asked.json is not None:
        asked.json.write_text(json.dumps(as_json(results), indent=2))
    return 1 if any(m.num_failed for m in results.measurements) else 0


if __name__ == "__main__":
    sys.exit(main())
