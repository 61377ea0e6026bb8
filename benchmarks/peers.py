"""Peers' figures for the four scenarios, and their scaling to another machine.

Measured 2026-11-21 on 2 cores of a Zen 4 machine at about 34 GB/s, same weights, same client. They were not measured
together with ours, so each is shown as it was and scaled:

* scenario i, which reads the weights once for each token, by the ratio of the read bandwidths; * ii to iv by the ratio
of the scenario's floors on the two machines, which weighs bandwidth and matrix rate as that scenario does.

A scaled figure is an estimate. It assumes that a peer's distance from the floor stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.machine import Machine, Rate
from benchmarks.roofline import Cost, Load, Rates, tokens_per_s

MEASURED = (
    "measured 2026-11-21 on 2 cores of a Zen 4 machine at about 34 GB/s (410 GFLOP/s bf16, 850 GOP/s int8), same "
    "weights, same client"
)
REFERENCE = Machine(2, "Zen 4", "", Rate(34e9, 34e9), Rate(410e9, 410e9), Rate(850e9, 850e9))
SCENARIO_NAMES = ("i", "ii", "iii", "iv")

Span = tuple[float, float]
"""Lowest and highest output tokens a second of the runs."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One server's figures for one model in one precision."""

    name: str
    spans: tuple[Span, Span, Span, Span]
    """Spans of scenarios i, ii, iii and iv."""


def _peer(name: str, *figures: float | Span) -> Peer:
    first, second, third, fourth = (f if isinstance(f, tuple) else (f, f) for f in figures)
    return Peer(name, (first, second, third, fourth))


PEERS: dict[tuple[str, str], tuple[Peer, ...]] = {
    ("1b", "bf16"): (
        _peer("llama.cpp", 14.7, 25.3, 27.9, 17.2),
        _peer("vLLM", (10.2, 11.1), 30.6, (37.9, 40.1), 31.6),
        _peer("OpenVINO", 9.9, 28.1, 36.6, 19.4),
        _peer("transformers serve", 6.0, 17.9, 18.8, 16.1),
    ),
    ("1b", "int8"): (
        _peer("vLLM W8A8", 16.2, 50.6, 67.2, 48.7),
        _peer("OpenVINO int8", 18.0, 38.9, 46.8, 26.3),
        _peer("llama.cpp q8_0", 19.2, 18.4, 19.5, 14.0),
    ),
    ("1b", "int4"): (
        _peer("llama.cpp q4_0", 33.5, 22.7, 24.6, 16.1),
        _peer("OpenVINO int4", 29.9, 39.6, 47.5, 31.6),
        _peer("vLLM W4A16", 7.0, 15.5, 17.6, 18.4),
    ),
    ("0.6b", "bf16"): (
        _peer("vLLM", 18.8, 53.5, 71.8, 49.9),
        _peer("OpenVINO", (19.0, 25.0), (50.0, 52.0), (71.0, 75.0), (33.0, 46.0)),
        _peer("llama.cpp", 24.1, 36.1, 35.7, 18.5),
        _peer("transformers serve", 10.3, 19.6, 19.4, 14.8),
    ),
    ("0.6b", "int8"): (_peer("vLLM 8 bit", 28.1, 77.7, 112.0, 61.3),),
    ("0.6b", "int4"): (
        _peer("llama.cpp q4_0", 50.7, 32.2, 35.0, 21.9),
        _peer("OpenVINO int4", 47.9, 71.2, 88.6, 69.0),
    ),
}
"""By (model, precision)."""


def rates_of(machine: Machine, precision: str) -> Rates:
    """Peak rates for a precision; quantized weights may be multiplied in int8 if that is faster."""
    flops = machine.bf16_flops.best
    if precision != "bf16" and machine.int8_ops is not None:
        flops = max(flops, machine.int8_ops.best)
    # The memory of a shared machine reads 31 GB/s in one minute and 55 in another (2 cores, Zen 4, 2026-11-21), so the
    # best rate bounds no other minute. Matrix rates hardly change, so for them the best is the bound.
    return Rates(machine.read_bytes.median, flops)


def scale(machine: Machine, precision: str, scenario: str, cost: Cost, load: Load) -> float:
    """The factor that scales a figure of the reference machine to `machine`."""
    here, there = rates_of(machine, precision), rates_of(REFERENCE, precision)
    if scenario == "i":
        return here.read_bytes / there.read_bytes
    return tokens_per_s(here, cost, load) / tokens_per_s(there, cost, load)


def format_span(span: Span, factor: float = 1.0) -> str:
    """Text such as "14.7", or "10.2-11.1" if runs differed."""
    low, high = (f"{value * factor:.1f}" for value in span)
    return low if low == high else f"{low}-{high}"
