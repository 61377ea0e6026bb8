"""The benchmark of goodput by targets runs, with short loads."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.checkpoints import SHAPES
from tests.e2e.conftest import benchmark


def test_goodput_by_targets_beside_fixed_settings(tmp_path: Path) -> None:
    """Two loads of a few seconds. At the lower one every request meets its targets with any setting."""
    printed = benchmark("slo.py", "--quick", "--out", tmp_path)
    assert (tmp_path / "slo_h200.md").read_text() == printed
    assert "computed from floors" in printed and "not measured" in printed
    header, _, low, high = [line for line in printed.splitlines() if line.startswith("|")][:4]
    assert [cell.strip() for cell in header.split("|")[2:4]] == ["targets", "TTFT alone"]
    goodput = [[float(cell) for cell in line.split("|")[1:-1]] for line in (low, high)]
    assert all(share > 0.5 for rate, *found, _ in goodput for share in [found[0] / rate])
    assert all(ratio >= 0.98 for *_, ratio in goodput), "targets are never behind a fixed setting"
    chart = ElementTree.fromstring((tmp_path / "slo_h200.svg").read_text())
    texts = {element.text for element in chart.iter("{http://www.w3.org/2000/svg}text")}
    assert {"targets", "chunks of 8,192", "prefill first"} <= texts


@pytest.mark.long
def test_goodput_by_targets_of_the_real_worker(shapes: Path, tmp_path: Path) -> None:
    """One load of a second. It checks little, because the test's machine may be busy."""
    printed = benchmark("slo.py", "--setting", "cpu", "--quick", "--rates", "5", "--dir", shapes, "--out", tmp_path)
    assert (tmp_path / "slo_cpu.md").read_text() == printed
    assert ": measured" in printed and "not measured" not in printed
    assert "of 12 million parameters" in printed and 11.5e6 < SHAPES["12m"].num_body_params < 12.5e6
    row = [line for line in printed.splitlines() if line.startswith("|")][2]
    rate, *goodput, _ = [float(cell) for cell in row.split("|")[1:-1]]
    assert all(0.0 <= served < 3 * rate for served in goodput)
    assert any(goodput), "nothing was served in time"
    assert (tmp_path / "slo_cpu.svg").exists()
