"""Report of a chaos run, as Markdown and two plots: counts, times of recovery, violations."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.machine import place
from benchmarks.svg import line_chart
from benchmarks.tables import Cell, markdown
from tests.chaos.checker import Violation
from tests.chaos.faults import Kind
from tests.chaos.history import End, History

_BUCKET_S = 5.0
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that happened."""

    kind: Kind
    at_s: float
    """Seconds since the faults began."""
    recovered_s: float | None
    """Seconds until the next engine served; None: it cost no engine, or that engine was counted for another fault."""


@dataclass(slots=True)
class Outcome:
    """Counts and times of one run."""

    seed: int
    minutes: float
    num_due: int
    """Number of answers of the undisturbed server."""
    num_busy: int = 0
    """Number of processes that computed for ever beside the server."""
    vocabulary: str = ""
    """Name of the real tokenizer of a random model; empty: the embedded model."""
    lasted_s: float = 0.0
    struck: list[Struck] = field(default_factory=list)
    ends: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """(kind, manner, end) -> number of requests."""
    ended_s: list[float] = field(default_factory=list)
    """When each request ended, in seconds since the faults began."""
    num_retries: int = 0
    longest_silence_s: float = 0.0
    """Longest pause between two events of a stream that its client did not ask for, in seconds."""
    num_restarts: int = 0
    num_replayed: int = 0
    exit_code: int | None = None
    violations: list[Violation] = field(default_factory=list)

    def settle(self, history: History, violations: Sequence[Violation], now_s: float) -> None:
        """Count a request that has ended."""
        last = history.last
        self.ends[history.asked.kind, history.manner, last.end.value] += 1
        self.ended_s.append(now_s)
        self.num_retries += len(history.attempts) - 1
        self.violations += violations
        gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(last.events)]
        self.longest_silence_s = max([self.longest_silence_s, *gaps])

    @property
    def num_asked(self) -> int:
        return sum(self.ends.values())

    def num_with(self, end: End) -> int:
        return sum(count for (_, _, found), count in self.ends.items() if found == end.value)

    @property
    def replay(self) -> str:
        """The command line that runs the same faults again."""
        busy = f"--busy {self.num_busy}" if self.num_busy else ""
        more = " ".join(filter(None, (busy, f"--vocabulary {self.vocabulary}" if self.vocabulary else "")))
        return f"make chaos SEED={self.seed} MINUTES={self.minutes:g}" + (f" ARGS='{more}'" if more else "")

    @property
    def name(self) -> str:
        """Name of the report's files."""
        return "chaos_busy" if self.num_busy else "chaos"


def conclude(outcome: Outcome, out: Path) -> int:
    """Write the report and print the result; returns the exit code."""
    text = report(outcome, place())
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{outcome.name}.md").write_text(text + "\n")
    (out / f"{outcome.name}.svg").write_text(load_chart(outcome))
    (out / f"{outcome.name}_recovery.svg").write_text(recovery_chart(outcome))
    print("\n" + text)
    if outcome.violations:
        print(f"\n{len(outcome.violations)} violations. The same faults again: {outcome.replay}")
    return int(bool(outcome.violations))


def report(outcome: Outcome, where: str) -> str:
    """The report as Markdown. `where`: the machine and the day."""
    verdict = f"{len(outcome.violations)} wrong" if outcome.violations else "0 wrong"
    whole, left = outcome.num_with(End.WHOLE), outcome.num_with(End.LEFT)
    parts = [
        f"`{outcome.replay}`: {where}; {_model(outcome)} in fp32, server, engine and clients on the same cores; "
        f"{outcome.lasted_s:.0f} s of faults.",
        f"**{outcome.num_asked:,} requests, {verdict}.** {whole:,} answers were compared whole with those of the "
        f"undisturbed server to {outcome.num_due} requests, and {left:,} that their clients left, as far as they had "
        f"come. {outcome.num_restarts} engines were replaced, {outcome.num_replayed:,} choices sent again to the next "
        f"one; {outcome.num_retries} times a request was refused, and sent again after its Retry-After. "
        "The longest silence "
        f"of a stream was {outcome.longest_silence_s:.1f} s. SIGTERM under load: exit code {outcome.exit_code}.",
        "Seconds from a fault until the next engine served:",
        _faults(outcome),
        "Requests by kind, and how they ended:",
        _kinds(outcome),
    ]
    parts += [f"- {violation}" for violation in outcome.violations[:_SHOWN]]
    return "\n\n".join(parts)


def _model(outcome: Outcome) -> str:
    model = f"a random model with the tokenizer of {outcome.vocabulary}" if outcome.vocabulary else "the embedded model"
    return f"{outcome.num_busy} processes that compute for ever; {model}" if outcome.num_busy else model


def _faults(outcome: Outcome) -> str:
    rows: list[list[Cell]] = []
    for kind in Kind:
        times = [one.recovered_s for one in outcome.struck if one.kind is kind and one.recovered_s is not None]
        count = sum(one.kind is kind for one in outcome.struck)
        known: list[Cell] = [statistics.median(times), max(times)] if times else [None, None]
        rows.append([kind.value, str(count), str(len(times)), *known])
    return markdown(["fault", "times", "recovered", "median", "most"], rows)


def _kinds(outcome: Outcome) -> str:
    ends = sorted({end for _, _, end in outcome.ends})
    rows: list[list[Cell]] = []
    for kind in dict.fromkeys(kind for kind, _, _ in outcome.ends):
        counts = [sum(n for (k, _, e), n in outcome.ends.items() if (k, e) == (kind, end)) for end in ends]
        rows.append([kind, *map(str, counts)])
    rows.sort(key=lambda row: str(row[0]))
    return markdown(["request", *ends], rows)


def load_chart(outcome: Outcome) -> str:
    """Plot of ended requests and faults over time."""
    num_buckets = int(outcome.lasted_s // _BUCKET_S) + 1
    xs = [i * _BUCKET_S for i in range(num_buckets + 1)]
    ended = [0.0] * len(xs)
    for at_s in outcome.ended_s:
        ended[min(int(at_s // _BUCKET_S), num_buckets)] += 1
    lines = {"requests ended": ended}
    for name, kinds in {"kills": (Kind.KILL,), "stops": (Kind.STOP, Kind.PAUSE), "bursts": (Kind.BURST,)}.items():
        lines[name] = [float(sum(one.kind in kinds and one.at_s <= x for one in outcome.struck)) for x in xs]
    lines["requests ended"][-1] += 0 if any(map(any, lines.values())) else 1
    return line_chart(xs, lines, "seconds", f"requests in {_BUCKET_S:g} s; faults so far")


def recovery_chart(outcome: Outcome) -> str:
    """Plot of recovery times in ascending order."""
    kills, stops = (
        sorted(one.recovered_s for one in outcome.struck if one.kind is kind and one.recovered_s is not None)
        for kind in (Kind.KILL, Kind.STOP)
    )
    xs = [100.0 * i / 20 for i in range(21)]
    lines = {
        name: [_quantile(times, x) for x in xs] for name, times in (("killed", kills), ("stopped", stops)) if times
    }
    return line_chart(xs, lines or {"none": [1.0] * len(xs)}, "percent of the faults", "seconds until the next engine")


def _quantile(times: Sequence[float], percent: float) -> float:
    return times[min(int(len(times) * percent / 100), len(times) - 1)]
