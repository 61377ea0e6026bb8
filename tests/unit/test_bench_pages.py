"""The pages of load tests: what their plots show, and that they load nothing from elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import orjson
import pytest
from typer.testing import CliRunner

from inferd.engine.api.errors import ConfigError
from inferd.server.commands.bench.answer import Outcome
from inferd.server.commands.bench.command import bench_app
from inferd.server.commands.bench.compare import compare
from inferd.server.commands.bench.load import LoadRun
from inferd.server.commands.bench.options import LoadOptions
from inferd.server.commands.bench.page import histogram, line_chart, run_page
from inferd.server.commands.bench.report import as_json, summarize
from inferd.server.commands.bench.slo import parse_objective


def outcome(start_s: float, ttft_s: float = 0.1, num_tokens: int = 4, error: str | None = None) -> Outcome:
    first_s, gaps_s = start_s + ttft_s, (0.02,) * (num_tokens - 1)
    return Outcome(
        start_s=start_s, first_token_s=first_s, last_token_s=first_s + sum(gaps_s), gaps_s=gaps_s, num_input=9,
        num_output=num_tokens, num_streamed=num_tokens, error=error,
    )  # fmt: skip


def written(tmp_path: Path, name: str, ttft_s: float = 0.1, num_cached: int = 0, **changes: object) -> Path:
    """A report as `--json` writes it."""
    options = LoadOptions(**{"base_url": "http://host", "goodput": parse_objective("ttft:150ms"), **changes})  # type: ignore[arg-type]
    outcomes = [replace(outcome(0.1 * i, ttft_s), num_cached=num_cached) for i in range(20)]
    run = LoadRun(tuple(outcomes), 4.0, (), 0.1)
    file = tmp_path / f"{name}.json"
    file.write_bytes(orjson.dumps(as_json(summarize(run, options.goodput), options, "m", "7")))
    return file


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def titles(page: str) -> list[str]:
    return [drawing.attrib["aria-label"] for drawing in drawings(page)]


def test_marks_stand_where_their_values_are() -> None:
    """Both ends of a line from (0, 0) to (8, 4) are at corners, because the ticks end there."""
    drawing = ElementTree.fromstring(line_chart({"a": [(0.0, 0.0), (8.0, 4.0), (9.0, float("nan"))]}, "x", "y"))
    places = [(circle.attrib["cx"], circle.attrib["cy"]) for circle in drawing.iter("circle")]
    assert places == [("62.0", "216.0"), ("546.0", "26.0")]
    assert [text.text for text in drawing.iter("text")][2::2] == ["0", "2", "4", "6", "8", "a"]
    bars = list(ElementTree.fromstring(histogram([1.0] * 30 + [9.5] * 10, "ms")).iter("rect"))
    heights = [float(bar.attrib["height"]) for bar in bars]
    assert len(bars) == 2 and heights[0] == pytest.approx(3 * heights[1], rel=0.01)


def test_without_values_there_is_an_empty_frame() -> None:
    for drawing in (line_chart({}, "x", "y"), histogram([], "ms"), line_chart({"a": [(0.0, 0.0)]}, "x", "y")):
        assert not list(ElementTree.fromstring(drawing).iter("rect"))


def test_the_page_of_a_run_shows_it_and_loads_nothing() -> None:
    options = LoadOptions(base_url="http://host", goodput=parse_objective("ttft:150ms"))
    failed = outcome(2.0, error="HTTP 429 <slow>")
    run = LoadRun((*(outcome(0.05 * i, 0.1 + 0.01 * i) for i in range(40)), failed), 4.0, (), 0.1)
    report = summarize(run, options.goodput)
    page = run_page(run, report, options, as_json(report, options, "a model", "7"))
    assert "Load test of a model" in page and "1 x HTTP 429 &lt;slow&gt;" in page and "goodput at ttft:150ms" in page
    assert titles(page)[:4] == [
        "TTFT, ms over arrival, s", "TPOT, ms over arrival, s", "output tokens/s over s", "requests in flight over s",
    ]  # fmt: skip
    assert len(drawings(page)) == 8
    assert not re.search(r"(src|href)=|url\(|@import|<script", page)
    HTMLParser().feed(page)


def test_runs_stand_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [written(tmp_path, "before"), written(tmp_path, "after", ttft_s=0.2)]
    result = CliRunner().invoke(bench_app, ["compare", *map(str, files), "--report", str(tmp_path / "both.html")])
    assert result.exit_code == 0, result.output
    assert re.search(r"TTFT p50, ms\s+│ 100 +│ 200 \(2.00x\)", result.output)
    assert re.search(r"goodput, requests/s\s+│ 5 +│ 0 \(0.00x\)", result.output)
    assert "warning" not in result.output and not drawings((tmp_path / "both.html").read_text())


def test_a_run_with_cached_prompts_is_told_from_one_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [written(tmp_path, "first"), written(tmp_path, "again", num_cached=8), written(tmp_path, "other")]
    compare(files, None)
    told = capsys.readouterr()
    assert re.search(r"cached input tokens\s+│ 0 +│ 160 +│ 0 ", told.out)
    assert " ".join(told.err.split()) == (
        "warning: the prefix cache had 89% of the input tokens of again, and 0% of first: "
        "give each run another --seed, or start the server again"
    )


def test_runs_at_several_rates_are_drawn_over_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [written(tmp_path, f"r{rate}", rate=float(rate), num_requests=rate) for rate in (8, 2, 4)]
    assert compare(files, tmp_path / "all.html") == 0
    page = (tmp_path / "all.html").read_text()
    assert titles(page) == [f"{what} over requests/s sent" for what in ("goodput, requests/s", "TTFT, ms", "TPOT, ms")]
    assert "warning:" not in page + capsys.readouterr().err
    other = written(tmp_path, "other", rate=2.0, output_len=LoadOptions(base_url="http://x").input_len)
    compare([*files, other], None)
    assert "other is another load than r8: output_len is 128 instead of 64" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"tool": "another", "results": {}, "settings": {}}'])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"x.json is no report of `inferd bench serve`; give files that --json wrote"):
        compare([file], None)
    with pytest.raises(ConfigError, match=r"absent.json cannot be read: No such file"):
        compare([tmp_path / "absent.json"], None)
