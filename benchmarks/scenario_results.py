"""Results of the scenarios as JSON, and as tables with floors and peers. Measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from benchmarks import peers, tables
from benchmarks.checkpoints import SHAPES, Shape
from benchmarks.machine import Machine, best_of, describe
from benchmarks.roofline import WEIGHT_BYTES, Cost, Load, load_s, tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of one scenario on one server."""

    model: str
    precision: str
    scenario: str
    system: str
    repetition: int
    output_tokens_per_s: float
    ttft_p50_s: float | None
    tpot_p50_s: float | None
    num_cached_tokens: int
    num_failed: int
    failures: str
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class Start:
    """Start time and memory of our server, for one model and precision."""

    model: str
    precision: str
    ready_s: float
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class Results:
    """All measurements."""

    machines: tuple[Machine, Machine]
    """The machine before and after the scenarios."""
    starts: list[Start]
    measurements: list[Measurement]
    command: str
    scenarios: dict[str, Load]
    is_quick: bool = False
    """Whether the loads were cut down. Peers' figures belong to other loads and are then not shown."""

    @property
    def machine(self) -> Machine:
        return best_of(self.machines)


def cost_of(shape: Shape, precision: str) -> Cost:
    """Cost of a model; its KV is bfloat16 in every precision."""
    return Cost(shape.num_body_params, shape.num_head_params, WEIGHT_BYTES[precision], 2.0 * shape.kv_elements)


def render(results: Results) -> str:
    """All tables as Markdown."""
    parts = [
        f"{datetime.now(UTC):%Y-%m-%d}; {describe(results.machine)}; measured before and after.",
        f"    {results.command}",
    ]
    for start in results.starts:
        parts += [
            f"### {start.model} {start.precision}",
            f"READY in {start.ready_s:.1f} s, peak RSS {start.peak_rss_bytes / 2**30:.2f} GiB.",
            _measured_table(results, start),
            _systems_table(results, start),
        ]
    if any(_peers(results, start) for start in results.starts):
        parts.append(_ABOUT_PEERS)
    return "\n\n".join(parts) + "\n"


_ABOUT_PEERS = (
    f"Peers: {peers.MEASURED}. Scaled to this machine: scenario i by the read bandwidths, ii to iv by the scenario's "
    "floors on the two machines; as measured in brackets."
)


def _measured_table(results: Results, start: Start) -> str:
    """This run's measurements and their share of the floor."""
    systems = list(dict.fromkeys(m.system for m in _of(results, start)))
    rows: list[list[tables.Cell]] = []
    for name, load in results.scenarios.items():
        floor = _floor(results, start, load)
        for system in systems:
            runs = [m for m in _of(results, start) if (m.scenario, m.system) == (name, system)]
            if not runs:
                continue
            rates = [m.output_tokens_per_s for m in runs]
            rate = statistics.median(rates)
            ttft_s, tpot_s = _median([m.ttft_p50_s for m in runs]), _median([m.tpot_p50_s for m in runs])
            spread = f"{min(rates):.1f}-{max(rates):.1f}" if len(rates) > 1 else ""
            rows.append([
                f"{name}: {load.num_clients} x {load.input_len}+{load.output_len}",
                system,
                rate,
                spread,
                ttft_s and ttft_s * 1e3,
                tpot_s and tpot_s * 1e3,
                floor,
                f"{rate / floor:.0%}",
                sum(m.num_failed for m in runs) or "",
            ])  # fmt: skip
    columns = ["scenario", "system", "output tok/s", "range", "TTFT p50 ms", "TPOT p50 ms", "floor tok/s", "of floor"]
    return tables.markdown([*columns, "failed"], rows)


def _systems_table(results: Results, start: Start) -> str:
    """Output tokens a second of every server, by scenario."""
    names = list(results.scenarios)
    rows: list[list[tables.Cell]] = []
    for system in dict.fromkeys(m.system for m in _of(results, start)):
        rows.append([system, *(_rate(results, start, name, system) for name in names)])
    cost = cost_of(SHAPES[start.model], start.precision)
    for peer in _peers(results, start):
        cells: list[tables.Cell] = []
        for name in names:
            span = peer.spans[peers.SCENARIO_NAMES.index(name)]
            factor = peers.scale(results.machine, start.precision, name, cost, results.scenarios[name])
            cells.append(f"{peers.format_span(span, factor)} ({peers.format_span(span)})")
        rows.append([f"{peer.name}, scaled", *cells])
    rows.append(["floor", *(_floor(results, start, results.scenarios[name]) for name in names)])
    return tables.markdown(["output tok/s", *names], rows)


def _peers(results: Results, start: Start) -> tuple[peers.Peer, ...]:
    return () if results.is_quick else peers.PEERS.get((start.model, start.precision), ())


def _of(results: Results, start: Start) -> list[Measurement]:
    return [m for m in results.measurements if (m.model, m.precision) == (start.model, start.precision)]


def _rate(results: Results, start: Start, scenario: str, system: str) -> float | None:
    runs = [m for m in _of(results, start) if (m.scenario, m.system) == (scenario, system)]
    return _median([m.output_tokens_per_s for m in runs])


def _floor(results: Results, start: Start, load: Load) -> float:
    rates = peers.rates_of(results.machine, start.precision)
    return tokens_per_s(rates, cost_of(SHAPES[start.model], start.precision), load)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def as_json(results: Results) -> dict[str, Any]:
    """All measurements and floors."""
    floors = {
        f"{start.model} {start.precision} {name}": {
            "output_tokens_per_s": _floor(results, start, load),
            "duration_s": load_s(
                peers.rates_of(results.machine, start.precision),
                cost_of(SHAPES[start.model], start.precision),
                load,
            ),
        }
        for start in results.starts
        for name, load in results.scenarios.items()
    }
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), **asdict(results), "floors": floors}
