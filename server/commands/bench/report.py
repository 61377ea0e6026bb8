"""The report of a load run: a table for people, JSON for programs, and warnings about the figures."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from rich.table import Table

from inferd.server.commands.bench.answer import Outcome
from inferd.server.commands.bench.load import LoadRun
from inferd.server.commands.bench.options import LoadOptions
from inferd.server.commands.bench.slo import Goodput, Objective, goodput
from inferd.server.errors.messages import clip

MAX_LAG_P99_S = 0.005
MAX_LAG_SHARE = 0.2
"""Share of the median ITL by which the generator may be late. Less than this looks like the server's own jitter."""
MAX_MESSAGE_CHARS = 300
MAX_CPU_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a time, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens that a server has verified so far."""

    num_drafts: int
    num_accepted: int

    @classmethod
    def read(cls, page: str) -> Drafts | None:
        """The counters of inferd or vLLM on a page of metrics; None if it has none."""
        for drafts, accepted in _DRAFT_METRICS:
            sums = [sum(map(float, _samples(name).findall(page))) for name in (drafts, accepted)]
            if _samples(drafts).search(page):
                return cls(int(sums[0]), int(sums[1]))
        return None

    def since(self, before: Drafts) -> Drafts:
        return Drafts(self.num_drafts - before.num_drafts, self.num_accepted - before.num_accepted)


_DRAFT_METRICS = (
    ("inferd_draft_tokens_total", "inferd_accepted_draft_tokens_total"),
    ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
)
"""Names of the counters of draft tokens, and of those that were accepted."""


def _samples(name: str) -> re.Pattern[str]:
    """Finds the values of a metric on a page, one for each set of labels."""
    return re.compile(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """The figures of one run. Rates count successful requests over the whole duration; None if there were none."""

    num_ok: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_chunks: int
    """Number of events that carried output tokens. An event may carry several."""
    counts_checked: bool
    """Whether the stream carried token ids, so that they could be compared with the usage."""
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    e2e_s: Spread | None
    goodput: Goodput | None
    """None if no targets were given."""
    num_drafts: int | None
    num_accepted: int | None
    """Draft tokens that the server verified during the run, other clients' included, and those that it accepted. None
    if its metrics do not say."""
    loop_lag_p99_s: float
    generator_cpu_share: float

    @property
    def num_failed(self) -> int:
        return sum(self.errors.values())


def quantile(ordered: Sequence[float], q: float) -> float:
    """The quantile `q` of ascending values, by linear interpolation between the two nearest."""
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Iterable[float | None]) -> Spread | None:
    seen = sorted(value for value in values if value is not None)
    if not seen:
        return None
    return Spread(sum(seen) / len(seen), quantile(seen, 0.5), quantile(seen, 0.9), quantile(seen, 0.99))


def summarize(run: LoadRun, objective: Objective | None = None, drafts: Drafts | None = None) -> BenchReport:
    """`drafts`: draft tokens of the server during the run."""
    ok = [outcome for outcome in run.outcomes if outcome.error is None]
    num_input, num_output = sum(outcome.num_input for outcome in ok), sum(outcome.num_output for outcome in ok)
    return BenchReport(
        num_ok=len(ok),
        errors=dict(Counter(outcome.error for outcome in run.outcomes if outcome.error is not None)),
        duration_s=run.duration_s,
        requests_per_s=len(ok) / run.duration_s,
        output_tokens_per_s=num_output / run.duration_s,
        input_tokens_per_s=num_input / run.duration_s,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        num_cached_tokens=sum(outcome.num_cached for outcome in ok),
        num_chunks=sum(outcome.num_chunks for outcome in ok),
        counts_checked=bool(ok) and all(outcome.num_streamed is not None for outcome in ok),
        ttft_s=spread(outcome.ttft_s for outcome in ok),
        tpot_s=spread(outcome.tpot_s for outcome in ok),
        itl_s=spread(gap_s for outcome in ok for gap_s in outcome.gaps_s),
        e2e_s=spread(outcome.e2e_s for outcome in ok),
        goodput=goodput(objective, run.outcomes, run.duration_s) if objective is not None else None,
        num_drafts=None if drafts is None else drafts.num_drafts,
        num_accepted=None if drafts is None else drafts.num_accepted,
        loop_lag_p99_s=quantile(sorted(run.loop_lags_s), 0.99) if run.loop_lags_s else 0.0,
        generator_cpu_share=run.cpu_share,
    )


def warnings(report: BenchReport) -> list[str]:
    """Reasons to distrust the figures."""
    found = []
    if report.num_ok and (_is_late(report) or report.generator_cpu_share > MAX_CPU_SHARE):
        found.append(
            f"the generator itself was slow (event loop late by {report.loop_lag_p99_s * 1e3:.1f} ms at p99, "
            f"{report.generator_cpu_share:.0%} of a core): latencies include its delays; give it a core of its own, "
            "or less load"
        )
    if report.num_ok and not report.counts_checked:
        found.append(
            "the server sends no token ids in the stream: ITL is measured between chunks, and token counts are the "
            "server's own"
        )
    return found


def _is_late(report: BenchReport) -> bool:
    """Whether the event loop lags much, both in absolute terms and compared with the measured gaps."""
    median_s = report.itl_s.p50 if report.itl_s else 0.0
    return report.loop_lag_p99_s > max(MAX_LAG_P99_S, MAX_LAG_SHARE * median_s)


def table(report: BenchReport) -> Table:
    """A table of latencies in milliseconds."""
    shown = Table()
    shown.add_column("ms", style="bold")
    for column in ("mean", "p50", "p90", "p99"):
        shown.add_column(column, justify="right")
    rows = (("TTFT", report.ttft_s), ("TPOT", report.tpot_s), ("ITL", report.itl_s), ("end to end", report.e2e_s))
    for name, values in rows:
        cells = (values.mean, values.p50, values.p90, values.p99) if values else ()
        shown.add_row(name, *(f"{value * 1e3:,.2f}" for value in cells))
    return shown


def headline(report: BenchReport) -> str:
    """Throughput, in one line."""
    cached = f" ({report.num_cached_tokens:,} cached)" if report.num_cached_tokens else ""
    return (
        f"{report.num_ok} requests in {report.duration_s:.2f} s: {report.requests_per_s:.2f} requests/s, "
        f"{report.output_tokens_per_s:,.1f} output tokens/s, {report.input_tokens_per_s:,.1f} input tokens/s{cached}"
    )


def drafts_line(report: BenchReport) -> str | None:
    """How many draft tokens were accepted, in one line; None if the server verified none."""
    if not report.num_drafts or report.num_accepted is None:
        return None
    return (
        f"speculation: {report.num_accepted:,} of {report.num_drafts:,} draft tokens accepted "
        f"({report.num_accepted / report.num_drafts:.1%})"
    )


def goodput_line(report: BenchReport, objective: Objective) -> str:
    """How many requests met the targets, in one line."""
    assert report.goodput is not None
    met, num_sent = report.goodput, report.num_ok + report.num_failed
    return (
        f"goodput at {objective}: {met.num_met} of {num_sent} requests ({met.share_met:.1%}), "
        f"{met.requests_per_s:.2f} requests/s, {met.output_tokens_per_s:,.1f} output tokens/s"
    )


def as_json(report: BenchReport, options: LoadOptions, model: str, server_version: str | None) -> dict[str, Any]:
    """Everything that is needed to repeat the run and to compare it."""
    return {
        "tool": "inferd bench serve",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"inferd": version("inferd"), "python": platform.python_version(), "server": server_version},
        "generator": {"platform": platform.platform(), "num_cpus": os.cpu_count()},
        "settings": {**options.as_json(), "model": model},
        "results": {**asdict(report), "num_failed": report.num_failed},
        "warnings": warnings(report),
    }


def failures(outcomes: Sequence[Outcome]) -> str:
    """One line with each error, its count, and the server's first message about it."""
    counts = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    said: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.error is not None and outcome.message:
            said.setdefault(outcome.error, f" ({clip(' '.join(outcome.message.split()), MAX_MESSAGE_CHARS)})")
    return ", ".join(f"{count} x {error}{said.get(error, '')}" for error, count in counts.most_common())
