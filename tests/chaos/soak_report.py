"""Report of a soak: slopes after the warm-up, a verdict on each, a table and two plots."""

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
MAX_WARM_UP = 10_000
"""Requests after which all KV blocks were touched, caches are full and allocators have found their size. A server with
a free model grew by 109 B a request from 2,000 to 4,000 requests, then by 37 B until 10,000. At 24,000 it grew by 2 B
(2 cores, AMD EPYC, 2026-11-22)."""
WARM_UP_SHARE = 0.5
"""Largest share of all requests that the warm-up takes."""
MIN_MEASURED = 1_200
"""Fewest requests after the warm-up that allow a verdict."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity that must not grow."""

    name: str
    is_memory: bool
    """Whether it is in bytes, with growth per request; otherwise it is a count, with growth per 1,000 requests."""
    most: float | None
    """Allowed growth; None: it is shown without a verdict."""
    of: Callable[[Sample], float]


MOST_BYTES = 64.0
"""Bytes per request. Anything kept of a request takes more: its id alone is a string of 85 bytes."""
MOST_HANDLES = 0.1
"""Growth per 1,000 requests."""
QUANTITIES = (
    Quantity("server RSS", True, MOST_BYTES, lambda sample: sample.server.rss_bytes),
    Quantity("server private", True, MOST_BYTES, lambda sample: sample.server.private_bytes),
    Quantity("server PSS", True, None, lambda sample: sample.server.pss_bytes),
    Quantity("engine RSS", True, MOST_BYTES, lambda sample: sample.engine.rss_bytes),
    Quantity("engine private", True, MOST_BYTES, lambda sample: sample.engine.private_bytes),
    Quantity("engine PSS", True, None, lambda sample: sample.engine.pss_bytes),
    Quantity("server descriptors", False, MOST_HANDLES, lambda sample: sample.server.num_fds),
    Quantity("engine descriptors", False, MOST_HANDLES, lambda sample: sample.engine.num_fds),
    Quantity("server threads", False, MOST_HANDLES, lambda sample: sample.server.num_threads),
    Quantity("engine threads", False, MOST_HANDLES, lambda sample: sample.engine.num_threads),
    Quantity("server sockets", False, MOST_HANDLES, lambda sample: sample.server.num_sockets),
    Quantity("asyncio tasks", False, MOST_HANDLES, lambda sample: sample.num_tasks),
)


class Verdict(Enum):
    """Verdict of a confidence interval."""

    HELD = "held"
    """The whole interval is below the bound."""
    UNDECIDED = "not decided"
    """The bound is in the interval, too little was measured, or the server was still warming up."""
    GROWS = "GROWS"
    """The whole interval is above the bound."""
    SHOWN = "no bound"
    """It also changes for reasons outside of this server."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One quantity at rest, after the warm-up."""

    quantity: Quantity
    first: float
    last: float
    slope: Slope
    """Bytes per request, or count per 1,000 requests."""
    verdict: Verdict


def measured(samples: Sequence[Sample]) -> list[Sample]:
    """The samples at rest, after the warm-up."""
    if not samples:
        return []
    start = min(MAX_WARM_UP, WARM_UP_SHARE * samples[-1].num_asked)
    return [sample for sample in samples if sample.is_rest and sample.num_asked >= start]


def findings(samples: Sequence[Sample]) -> list[Finding]:
    """One trend for each quantity; none if no request ended between two samples at rest."""
    rests = list({rest.num_asked: rest for rest in measured(samples)}.values())
    if len(rests) < 2:
        return []
    is_enough = rests[-1].num_asked - rests[0].num_asked >= MIN_MEASURED
    is_warm = rests[0].num_asked >= MAX_WARM_UP
    judged = []
    for quantity in QUANTITIES:
        values, per = [quantity.of(sample) for sample in rests], 1 if quantity.is_memory else 1_000
        slope = theil_sen([sample.num_asked / per for sample in rests], values)
        verdict = _verdict(slope, quantity.most, is_enough=is_enough, is_warm=is_warm)
        judged.append(Finding(quantity, values[0], values[-1], slope, verdict))
    return judged


def _verdict(slope: Slope, most: float | None, *, is_enough: bool, is_warm: bool) -> Verdict:
    """Growth during the warm-up is no verdict, because it may stop."""
    if most is None:
        return Verdict.SHOWN
    if slope.high < most and is_enough:
        return Verdict.HELD
    return Verdict.GROWS if slope.low >= most and is_enough and is_warm else Verdict.UNDECIDED


def held_blocks(samples: Sequence[Sample]) -> list[Sample]:
    """Samples at rest in which a KV block was still held."""
    return [sample for sample in samples if sample.is_rest and sample.num_blocks_used]


def table(found: Sequence[Finding]) -> str:
    """Markdown table with one row for each quantity."""
    return markdown(["at rest", "first", "last", "growth", "95%", "bound", ""], [_row(one) for one in found])


def _row(one: Finding) -> list[str]:
    is_memory, slope = one.quantity.is_memory, one.slope
    size, digits, unit = (MIB, 0, " B a request") if is_memory else (1, 2, " in 1,000")
    return [
        f"{one.quantity.name}{', MiB' if is_memory else ''}",
        f"{one.first / size:.1f}",
        f"{one.last / size:.1f}",
        f"{slope.value:+.{digits}f}{unit}",
        f"{slope.low:+.{digits}f} to {slope.high:+.{digits}f}",
        "" if one.quantity.most is None else f"{one.quantity.most:g}",
        one.verdict.value,
    ]


def memory_chart(samples: Sequence[Sample]) -> str:
    """Plot of the RSS of both processes under load, above its minimum."""
    lines = {q.name: [q.of(sample) / MIB for sample in samples] for q in QUANTITIES if q.is_memory}
    above = {name: [value - min(values) for value in values] for name, values in lines.items()}
    return _chart(samples, above, "MiB above its least")


def handles_chart(samples: Sequence[Sample]) -> str:
    """Plot of descriptors, threads, sockets and tasks under load."""
    lines = {q.name: [q.of(sample) for sample in samples] for q in QUANTITIES if not q.is_memory}
    return _chart(samples, lines, "number")


def _chart(samples: Sequence[Sample], lines: Mapping[str, Sequence[float]], y_name: str) -> str:
    if not any(any(values) for values in lines.values()):
        lines = {**lines, "": [1.0] * len(samples)}
    return line_chart([sample.at_s / 60 for sample in samples], lines, "minutes", y_name)
