"""The text of instruments, against the Prometheus library's own encoders as the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from inferd.server.observability.exposition import Export
from inferd.server.observability.instruments import Counter, Gauge, Histogram

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
NUMBERS = st.one_of(st.integers(0, 10**9), st.floats(min_value=0, width=32))
VALUES = st.dictionaries(st.tuples(TEXTS, TEXTS), NUMBERS, max_size=3)
BOUNDS = (0.5, 1.0, 2_500_000.0)
OPENMETRICS = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8"
HELP = 'A "help" text with \\ and\na second line.'


class Oracle(Collector):
    """The library's families with the same numbers."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def pages(export: Export) -> tuple[str, str]:
    text, openmetrics = "", ""
    for family in export.families:
        lines = "".join(series.text() for series in family.series)
        text, openmetrics = text + family.text_head + lines, openmetrics + family.openmetrics_head + lines
    return text, f"{openmetrics}# EOF\n"


def the_librarys(*families: Metric) -> tuple[str, str]:
    text, openmetrics = (choose_encoder(accept)[0](Oracle(families)).decode() for accept in ("", OPENMETRICS))
    return text, openmetrics


@given(VALUES, VALUES, st.dictionaries(st.tuples(TEXTS), st.lists(NUMBERS, max_size=5), max_size=3), TEXTS)
def test_the_text_is_the_librarys(counts: Any, levels: Any, seen: Any, model: str) -> None:
    """Also with quotes, backslashes and line ends in labels and help texts. Read twice, and once after series went."""
    counter, gauge, histogram = Counter(), Gauge(), Histogram(BOUNDS)
    export = Export({"model_name": model})
    export.counter("x:count", HELP, counter, "b", "a")
    export.gauge("level", HELP, gauge, "z", "a")
    export.histogram("times", HELP, histogram, "kind")
    for kept in (3, 3, 1):
        counter.values = dict(list(counts.items())[:kept])
        gauge.values = dict(list(levels.items())[:kept])
        histogram.cells.clear()
        expected = (
            CounterMetricFamily("x:count", HELP, labels=("model_name", "b", "a")),
            GaugeMetricFamily("level", HELP, labels=("model_name", "z", "a")),
            HistogramMetricFamily("times", HELP, labels=("model_name", "kind")),
        )
        for labels, number in counter.values.items():
            expected[0].add_metric((model, *labels), number)
        for labels, number in gauge.values.items():
            expected[1].add_metric((model, *labels), number)
        for labels, numbers in list(seen.items())[:kept]:
            for number in numbers:
                histogram.cell(*labels).observe(number)
            cell = histogram.cell(*labels)
            buckets = list(zip((*map(repr, BOUNDS), "+Inf"), accumulate(cell.counts), strict=True))
            expected[2].add_metric((model, *labels), buckets, cell.sum)
        assert pages(export) == the_librarys(*expected)


def test_joined_models_are_one_family() -> None:
    exports = []
    for model in ("m", "n"):
        gauge = Gauge.zero()
        exports.append(Export({"model_name": model}))
        exports[-1].gauge("level", "How high it is.", gauge)
    exports[0].join(exports[1])
    family = GaugeMetricFamily("level", "How high it is.", labels=("model_name",))
    for model in ("m", "n"):
        family.add_metric((model,), 0.0)
    assert pages(exports[0]) == the_librarys(family)


def test_series_that_are_no_more_are_not_kept() -> None:
    """A label that always changes, such as the adapters that run, would otherwise fill the memory."""
    gauge, export = Gauge(), Export({})
    export.gauge("level", "How high it is.", gauge, "name")
    (series,) = export.families[0].series
    for number in range(9):
        gauge.values = {(f"n{number}",): 1.0}
        assert series.text() == f'level{{name="n{number}"}} 1.0\n'
    assert len(series._starts) == 1
