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
MAX_WARM_UP = 10_000
"""Requests after which KV blocks were touched, caches are full and allocators have found their size. A server with a
free model grew by 109 B a request from 2,000 to 4,000, by 37 until 10,000 and by 2 at 24,000 (2 cores, AMD EPYC,
2026-11-22)."""
WARM_UP_SHARE = 0.5
"""Share of all requests that the warm-up takes at most."""
MIN_MEASURED = 1_200
"""Requests behind the warm-up: fewer decide nothing."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Quantity:
    """What is to stay as it is."""

    name: str
    is_memory: bool
    """Whether it is counted in bytes, and its growth by request; else it is a number, and grows by 1,000 requests."""
    most: float | None
    """Growth that is borne; None: it is shown, and decides nothing."""
    of: Callable[[Sample], float]


MOST_BYTES = 64.0
"""A request. Whatever is kept of one takes more: its id alone is a string of 85 bytes."""
MOST_HANDLES = 0.1
"""In 1,000 requests."""
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
    """What the interval says."""

    HELD = "held"
    """All of it is below the bound."""
    UNDECIDED = "not decided"
    """The bound lies within it, or too little was measured, or the server was still warming up."""
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
    """Bytes a request, or number in 1,000 requests."""
    verdict: Verdict


def measured(samples: Sequence[Sample]) -> list[Sample]:
    """Those at rest, after the warm-up."""
    if not samples:
        return []
    start = min(MAX_WARM_UP, WARM_UP_SHARE * samples[-1].num_asked)
    return [sample for sample in samples if sample.is_rest and sample.num_asked >= start]


def findings(samples: Sequence[Sample]) -> list[Finding]:
    """One a quantity; none where requests ended between no two samples at rest."""
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
    """What grows while the server warms up may stop; what does not grow then has held."""
    if most is None:
        return Verdict.SHOWN
    if slope.high < most and is_enough:
        return Verdict.HELD
    return Verdict.GROWS if slope.low >= most and is_enough and is_warm else Verdict.UNDECIDED


def held_blocks(samples: Sequence[Sample]) -> list[Sample]:
    """Those at rest in which somebody still held a KV block."""
    return [sample for sample in samples if sample.is_rest and sample.num_blocks_used]


def table(found: Sequence[Finding]) -> str:
    """Markdown, one row a quantity."""
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
    """RSS of both processes under load, above the least that each had."""
    lines = {q.name: [q.of(sample) / MIB for sample in samples] for q in QUANTITIES if q.is_memory}
    above = {name: [value - min(values) for value in values] for name, values in lines.items()}
    return _chart(samples, above, "MiB above its least")


def handles_chart(samples: Sequence[Sample]) -> str:
    """Descriptors, threads, sockets and tasks under load."""
    lines = {q.name: [q.of(sample) for sample in samples] for q in QUANTITIES if not q.is_memory}
    return _chart(samples, lines, "number")


def _chart(samples: Sequence[Sample], lines: Mapping[str, Sequence[float]], y_name: str) -> str:
    if not any(any(values) for values in lines.values()):
        lines = {**lines, "": [1.0] * len(samples)}
    return line_chart([sample.at_s / 60 for sample in samples], lines, "minutes", y_name)
