"""Chaos and soak runs without a server: faults by a seed, slopes of known lines, verdicts, reports, exit codes."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest

from tests.chaos.asks import round_of
from tests.chaos.chaos_report import Outcome, Struck, conclude, report
from tests.chaos.checker import Violation
from tests.chaos.faults import Kind, faults
from tests.chaos.history import Attempt, End, Event, History
from tests.chaos.samples import Sample, Usage, metric
from tests.chaos.slopes import theil_sen
from tests.chaos.soak_report import MIB, Verdict, findings, handles_chart, held_blocks, memory_chart, table

MINUTE_S = 60.0


def test_the_faults_are_the_seeds() -> None:
    first, again, other = (list(islice(faults(seed), 90)) for seed in (1, 1, 2))
    assert first == again != other
    assert {fault.kind for fault in first[:9]} == set(Kind), "each kind comes in the first deck"
    assert all(fault.waits for fault in first if fault.kind is Kind.STOP)
    assert not all(fault.waits for fault in first)
    assert all(earlier.waits or later.waits for earlier, later in pairwise(first))


def test_a_line_has_its_own_slope_whatever_a_quarter_of_it_is() -> None:
    random = Random(1)
    xs = [i / 10 for i in range(60)]
    exact = theil_sen(xs, [3.0 + 2.0 * x for x in xs])
    assert (exact.value, exact.low, exact.high) == pytest.approx((2.0, 2.0, 2.0))
    spoiled = [3.0 + 2.0 * x + (50.0 if i % 4 == 1 else random.gauss(0, 0.1)) for i, x in enumerate(xs)]
    found = theil_sen(xs, spoiled)
    assert found.low < 2.0 < found.high and found.value == pytest.approx(2.0, abs=0.3)


def test_the_interval_holds_the_slope_as_often_as_it_says() -> None:
    """The interval should hold the slope for 95% of 300 lines with noise: 90% to 99% are allowed, 3.5 standard
    deviations."""
    random, xs = Random(2), [float(i) for i in range(20)]
    intervals = [theil_sen(xs, [0.5 * x + random.gauss(0, 2) for x in xs]) for _ in range(300)]
    held = sum(one.low <= 0.5 <= one.high for one in intervals)
    assert 0.90 * 300 < held < 0.99 * 300


REQUESTS = 360
"""Seconds between two rests."""


def soaked(rests: int, server_bytes: float = 0.0, tasks: float = 0.0, blocks: int = 0) -> list[Sample]:
    """A sample each minute, with 16 KiB of noise, after a warm-up in which everything grows fast. `server_bytes` grow
    with each request, `tasks` with 1,000 requests."""
    random, made = Random(3), []
    for i in range(rests):
        asked = REQUESTS * i
        rss = int(100 * MIB + min(i, 29) * 5.0 * MIB + server_bytes * asked + random.gauss(0, 16 * 1024))
        server, engine = Usage(rss, rss, rss, 30, 6, 9), Usage(300 * MIB, 250 * MIB, 200 * MIB, 14, 10, 3)
        held = blocks if i == rests - 1 else 0
        made.append(Sample(i * MINUTE_S, True, server, engine, 8 + round(tasks * asked / 1_000), held, 0, asked))
    return made


def verdicts(samples: list[Sample]) -> dict[str, Verdict]:
    return {one.quantity.name: one.verdict for one in findings(samples)}


@pytest.mark.parametrize(
    ("samples", "name", "verdict"),
    [
        (soaked(90), "server RSS", Verdict.HELD),
        (soaked(90, server_bytes=50), "server RSS", Verdict.HELD),
        (soaked(90, server_bytes=64), "server RSS", Verdict.UNDECIDED),
        (soaked(90, server_bytes=85), "server RSS", Verdict.GROWS),
        (soaked(90, server_bytes=85), "engine RSS", Verdict.HELD),
        (soaked(90, tasks=1.0), "asyncio tasks", Verdict.GROWS),
        (soaked(90), "asyncio tasks", Verdict.HELD),
        (soaked(4, server_bytes=9000), "server RSS", Verdict.UNDECIDED),  # too few requests for a verdict
        (soaked(45, server_bytes=900), "server RSS", Verdict.UNDECIDED),  # it was still warming up
    ],
)
def test_what_grows_is_told_from_what_does_not(samples: list[Sample], name: str, verdict: Verdict) -> None:
    assert verdicts(samples)[name] is verdict


def test_samples_under_load_decide_nothing() -> None:
    busy = [replace(sample, is_rest=False) for sample in soaked(90, server_bytes=900)]
    assert findings(busy) == []
    mixed = sorted([*soaked(90), *busy], key=lambda sample: sample.at_s)
    assert set(verdicts(mixed).values()) == {Verdict.HELD, Verdict.SHOWN}


def test_a_block_that_is_held_at_rest_is_seen() -> None:
    assert held_blocks(soaked(10)) == []
    assert [sample.num_blocks_used for sample in held_blocks(soaked(10, blocks=2))] == [2]


def test_the_soaks_table_and_plots() -> None:
    samples = soaked(90, server_bytes=300)
    row = next(line for line in table(findings(samples)).splitlines() if "server RSS" in line)
    assert "GROWS" in row and re.search(r"\+(29\d|30\d) B a request", row) and "| 64 |" in " ".join(row.split())
    for chart in (memory_chart(samples), handles_chart(samples)):
        texts = {one.text for one in ElementTree.fromstring(chart).iter("{http://www.w3.org/2000/svg}text")}
        assert texts & {"server RSS", "asyncio tasks"}


def test_a_metric_is_read_off_its_page() -> None:
    page = 'inferd_x_total{model_name="tiny"} 3.0\ninferd_x_total_created 5.0\ninferd_y 2\n'
    assert (metric(page, "inferd_x_total"), metric(page, "inferd_y")) == (3.0, 2.0)
    with pytest.raises(AssertionError, match="inferd_z"):
        metric(page, "inferd_z")


def outcome() -> Outcome:
    made = Outcome(seed=7, minutes=0.5, num_due=17, lasted_s=30.0, num_restarts=2, num_replayed=9, exit_code=0)
    made.struck = [Struck(Kind.KILL, 2.0, 1.5), Struck(Kind.KILL, 9.0, 2.5), Struck(Kind.BURST, 12.0, None)]
    for i, asked in enumerate(round_of(1)):
        stream = [Event(1.0, "", "a"), Event(1.0 + i, "", "b")]
        attempt = Attempt(0.0, End.LEFT if i % 4 == 3 else End.WHOLE, 1.0, 200, events=stream)
        made.settle(History(asked, "to the end", [attempt]), [], 2.0 * i)
    return made


def test_the_report_of_chaos_counts() -> None:
    text = report(outcome(), "2 cores")
    assert "**17 requests, 0 wrong.** 13 answers" in text and "and 4 that their clients left" in text
    assert "silence of a stream was 16.0 s" in text
    row = next(line for line in text.splitlines() if Kind.KILL.value in line)
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["2", "2", "2.00", "2.50"]


def test_a_violation_is_exit_code_1_and_a_line_that_replays_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conclude(outcome(), tmp_path) == 0
    assert "violations" not in capsys.readouterr().out
    wrong = outcome()
    wrong.violations.append(Violation("wrong", "m1x1z", "0.text differs"))
    assert conclude(wrong, tmp_path) == 1
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("make chaos SEED=7 MINUTES=0.5")
    assert "wrong: m1x1z: 0.text differs" in (tmp_path / "chaos.md").read_text()
    for name in ("chaos.svg", "chaos_recovery.svg"):
        assert ElementTree.fromstring((tmp_path / name).read_text()).tag.endswith("svg")
