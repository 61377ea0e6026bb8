"""What a soak's samples come to: slopes after the warm-up, a verdict on each, a table and two plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from benchmarks.svg import line_chart
from benchmarks.tables import markdown
from tests.chaos.samples import Sample
from tests.chaos.slopes import Slope, theil_sen

MIB = 1 << 20
MAX_WARM_UP_S = 1800.0
WARM_UP_SHARE = 0.5
"""Of the whole, at most: KV blocks are touched for the first time, caches fill, allocators find their size. That takes
some 1,300 requests (2 cores, Zen 4, 2026-11-21): half an hour at the rate that is asked by default.
"""
MIN_MEASURED_S = 1200.0
"""Less than this behind the warm-up decides nothing about an hour."""
_HOUR_S = 3600.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Quantity:
    """What is to stay as it is."""

    name: str
    unit: str
    most_per_hour: float | None
    """Growth that is borne; None: it is shown, and decides nothing."""
    of: Callable[[Sample], float]


QUANTITIES = (
    Quantity("server RSS", "MiB", 1.0, lambda sample: sample.server.rss_bytes / MIB),
    Quantity("server private", "MiB", 1.0, lambda sample: sample.server.private_bytes / MIB),
    Quantity("server PSS", "MiB", None, lambda sample: sample.server.pss_bytes / MIB),
    Quantity("engine RSS", "MiB", 1.0, lambda sample: sample.engine.rss_bytes / MIB),
    Quantity("engine private", "MiB", 1.0, lambda sample: sample.engine.private_bytes / MIB),
    Quantity("engine PSS", "MiB", None, lambda sample: sample.engine.pss_bytes / MIB),
    Quantity("server descriptors", "", 1.0, lambda sample: sample.server.num_fds),
    Quantity("engine descriptors", "", 1.0, lambda sample: sample.engine.num_fds),
    Quantity("server threads", "", 1.0, lambda sample: sample.server.num_threads),
    Quantity("engine threads", "", 1.0, lambda sample: sample.engine.num_threads),
    Quantity("server sockets", "", 1.0, lambda sample: sample.server.num_sockets),
    Quantity("asyncio tasks", "", 1.0, lambda sample: sample.num_tasks),
)


class Verdict(Enum):
    """What the interval says."""

    HELD = "held"
    """All of it is below the bound."""
    UNDECIDED = "not decided"
    """The bound lies within it, or too little was measured."""
    GROWS = "GROWS"
    """All of it is above the bound."""
    SHOWN = "no bound"
    """It changes for reasons that are not this server's."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One quantity at rest, after the warm-up."""

    quantity: Quantity
    first: float
    last: float
    slope: Slope
    """Per hour."""
    verdict: Verdict


def measured(samples: Sequence[Sample]) -> list[Sample]:
    """Those at rest, after the warm-up."""
    if not samples:
        return []
    start_s = min(MAX_WARM_UP_S, WARM_UP_SHARE * samples[-1].at_s)
    return [sample for sample in samples if sample.is_rest and sample.at_s >= start_s]


def findings(samples: Sequence[Sample]) -> list[Finding]:
    """One a quantity; none where fewer than two samples were taken at rest."""
    rests = measured(samples)
    if len(rests) < 2:
        return []
    is_enough = rests[-1].at_s - rests[0].at_s >= MIN_MEASURED_S
    hours = [sample.at_s / _HOUR_S for sample in rests]
    found = []
    for quantity in QUANTITIES:
        values = [quantity.of(sample) for sample in rests]
        slope = theil_sen(hours, values)
        verdict = _verdict(slope, quantity.most_per_hour, is_enough=is_enough)
        found.append(Finding(quantity, values[0], values[-1], slope, verdict))
    return found


def _verdict(slope: Slope, most: float | None, *, is_enough: bool) -> Verdict:
    if most is None:
        return Verdict.SHOWN
    if slope.high < most and is_enough:
        return Verdict.HELD
    return Verdict.GROWS if slope.low >= most and is_enough else Verdict.UNDECIDED


def held_blocks(samples: Sequence[Sample]) -> list[Sample]:
    """Those at rest in which somebody still held a KV block."""
    return [sample for sample in samples if sample.is_rest and sample.num_blocks_used]


def table(found: Sequence[Finding]) -> str:
    """Markdown, one row a quantity."""
    rows = [
        [
            f"{one.quantity.name}{', ' + one.quantity.unit if one.quantity.unit else ''}",
            f"{one.first:.1f}", f"{one.last:.1f}",
            f"{one.slope.value:+.2f}", f"{one.slope.low:+.2f} to {one.slope.high:+.2f}", one.verdict.value,
        ]
        for one in found
    ]  # fmt: skip
    return markdown(["at rest", "first", "last", "an hour", "95%", "under 1 an hour"], rows)


def memory_chart(samples: Sequence[Sample]) -> str:
    """RSS of both processes under load, above the least that each had."""
    lines = {quantity.name: [quantity.of(sample) for sample in samples] for quantity in QUANTITIES if quantity.unit}
    above = {name: [value - min(values) for value in values] for name, values in lines.items()}
    return _chart(samples, above, "MiB above its least")


def handles_chart(samples: Sequence[Sample]) -> str:
    """Descriptors, threads, sockets and tasks under load."""
    lines = {q.name: [q.of(sample) for sample in samples] for q in QUANTITIES if not q.unit}
    return _chart(samples, lines, "number")


def _chart(samples: Sequence[Sample], lines: Mapping[str, Sequence[float]], y_name: str) -> str:
    if not any(any(values) for values in lines.values()):
        lines = {**lines, "": [1.0] * len(samples)}
    return line_chart([sample.at_s / 60 for sample in samples], lines, "minutes", y_name)
