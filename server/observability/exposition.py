"""Writes instruments in Prometheus' two text formats, family by family.

The library's encoder makes, sorts and escapes the labels of each sample at each scrape, which takes 5 us a line. Here
the part of a line before its value is written once a series, and kept: 0.9 us a line (Zen 4, 2026-11-28). A test
compares both byte by byte. The lines of samples are the same in both formats. This file knows no metric of this server.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from prometheus_client.utils import floatToGoString

from inferd.server.observability.instruments import Counter, Gauge, Histogram, HistogramCell, Labels

Kind = Literal["counter", "gauge", "histogram"]

_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
}


@dataclass(frozen=True, slots=True)
class Family:
    """One name with its help text and the series that it shows, of one model or of several."""

    name: str
    about: str
    series: list[Series]

    @property
    def text_head(self) -> str:
        name, about = self.name + ("_total" if self._kind == "counter" else ""), _escaped(self.about, '"')
        return f"# HELP {name} {about}\n# TYPE {name} {self._kind}\n"

    @property
    def openmetrics_head(self) -> str:
        return f"# HELP {self.name} {_escaped(self.about)}\n# TYPE {self.name} {self._kind}\n"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its samples, such as `x_bucket`, `x_count` and `x_sum` of a histogram."""
        return tuple(self.name + suffix for suffix in _SUFFIXES[self._kind])

    @property
    def _kind(self) -> Kind:
        return self.series[0].kind


class Series:
    """The lines of one instrument, with the parts that do not change."""

    def __init__(
        self, name: str, constant: Mapping[str, str], labels: Labels, instrument: Counter | Gauge | Histogram
    ) -> None:
        """`constant`: labels that all lines have. `labels`: names of the instrument's own."""
        self._name, self._constant, self._labels, self._instrument = name, dict(constant), labels, instrument
        self._starts: dict[Labels, list[str]] = {}
        """Label values -> the part before the value, of each line. Series that are no more have none."""

    @property
    def kind(self) -> Kind:
        match self._instrument:
            case Histogram():
                return "histogram"
            case Counter():
                return "counter"
            case Gauge():
                return "gauge"

    def text(self) -> str:
        """All lines, with the values of this moment."""
        starts: dict[Labels, list[str]] = {}
        lines: list[str] = []
        for values, numbers in self._numbers():
            found = self._starts.get(values)
            starts[values] = found = self._starts_of(values) if found is None else found
            lines += [f"{start}{_written(number)}\n" for start, number in zip(found, numbers, strict=True)]
        self._starts = starts
        return "".join(lines)

    def _numbers(self) -> Iterator[tuple[Labels, Iterable[float]]]:
        """Label values -> the numbers of their lines, in order."""
        if isinstance(self._instrument, Histogram):
            for values, cell in self._instrument.cells.items():
                yield values, _numbers_of(cell)
        else:
            for values, number in self._instrument.values.items():
                yield values, (number,)

    def _starts_of(self, values: Labels) -> list[str]:
        labels = self._constant | dict(zip(self._labels, values, strict=True))
        if not isinstance(self._instrument, Histogram):
            return [_start(self._name + _SUFFIXES[self.kind][0], labels)]
        buckets = [
            _start(f"{self._name}_bucket", {**labels, "le": bound})
            for bound in (*map(repr, self._instrument.bounds), "+Inf")
        ]
        return [*buckets, _start(f"{self._name}_count", labels), _start(f"{self._name}_sum", labels)]


class Export:
    """Gives instruments names and help texts, with constant labels in front. One instrument may have several names."""

    def __init__(self, constant: Mapping[str, str]) -> None:
        self._constant = dict(constant)
        self.families: list[Family] = []

    def join(self, other: Export) -> None:
        """Show the series of `other` too, which has the same names and other constant labels."""
        for own, its in zip(self.families, other.families, strict=True):
            assert own.name == its.name, f"{own.name} and {its.name} are no one family"
            own.series.extend(its.series)

    def counter(self, name: str, about: str, counter: Counter, *labels: str) -> None:
        """Show a counter. The page adds `_total` to the name."""
        self._show(name, about, labels, counter)

    def gauge(self, name: str, about: str, gauge: Gauge, *labels: str) -> None:
        self._show(name, about, labels, gauge)

    def histogram(self, name: str, about: str, histogram: Histogram, *labels: str) -> None:
        self._show(name, about, labels, histogram)

    def _show(self, name: str, about: str, labels: Labels, instrument: Counter | Gauge | Histogram) -> None:
        self.families.append(Family(name, about, [Series(name, self._constant, labels, instrument)]))


_written = lru_cache(maxsize=1024)(floatToGoString)
"""Most buckets of a histogram have the number of the bucket before."""


def _numbers_of(cell: HistogramCell) -> list[float]:
    """Its cumulative counts, the number of its values, and their sum."""
    counts = cell.cumulative()
    return [*counts, counts[-1], cell.sum]


def _start(name: str, labels: Mapping[str, str]) -> str:
    """A sample's line up to its value. Labels are in order of their names, as the library writes them."""
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{pairs}}} " if pairs else f"{name} "


def _escaped(text: str, kept: str = "") -> str:
    """`kept`: a character that this place of a format does not escape."""
    for character, written in (("\\", r"\\"), ("\n", r"\n"), ('"', r"\"")):
        text = text if character == kept else text.replace(character, written)
    return text
