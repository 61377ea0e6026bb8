"""The benchmark programs run as a person runs them, on loads that take a moment: they cannot rot unseen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.checkpoints import SHAPES
from inferd.engine.api.checkpoint import Checkpoint
from tests.e2e.conftest import BENCHMARKS, Daemon


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints are kept: to make one takes as long as most of what is run on it."""
    return tmp_path_factory.mktemp("shapes")


def run(program: str, *arguments: str | Path) -> str:
    """Run a benchmark from its own path, away from the checkout; returns what it printed."""
    command = [sys.executable, BENCHMARKS / program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_scenarios_run_beside_a_peer(daemon: Daemon, shapes: Path, tmp_path: Path) -> None:
    found, text = tmp_path / "found.json", tmp_path / "found.md"
    asked = ["--model", "smoke", "--scenarios", "i,iv", "--quick", "--peer", f"{daemon.url}=peer"]
    printed = run("scenarios.py", "--dir", shapes, *asked, "--json", found, "--markdown", text)
    results: dict[str, Any] = json.loads(found.read_text())
    runs = [(m["scenario"], m["system"], m["num_failed"]) for m in results["measurements"]]
    assert runs == [("i", "inferd", 0), ("i", "peer", 0), ("iv", "inferd", 0), ("iv", "peer", 0)]
    # Two at a time: the second two find the prefix of 512 whole. In scenario i, nothing was seen before.
    cached = {(m["scenario"], m["system"]): m["num_cached_tokens"] for m in results["measurements"]}
    assert cached["i", "inferd"] == cached["i", "peer"] == 0
    assert min(cached["iv", "inferd"], cached["iv", "peer"]) >= 2 * 512
    assert results["starts"][0]["ready_s"] > 0 and results["starts"][0]["peak_rss_bytes"] > 100 << 20
    assert set(results["floors"]) == {"smoke bf16 i", "smoke bf16 iv"}
    assert text.read_text() == printed.removesuffix("\n") and "| floor" in printed
    shape, tensors = SHAPES["smoke"], Checkpoint.read(shapes / "smoke").tensors.values()
    sizes = [tensor.shape[0] * tensor.shape[1] for tensor in tensors if len(tensor.shape) == 2]
    assert sum(sizes) == shape.num_body_params + shape.num_head_params


def test_the_overhead_is_measured_on_a_free_model(tmp_path: Path) -> None:
    # Long enough for the server to use several ticks of processor time, which count in 10 ms.
    asked = ["--clients", "4", "--step-ms", "1", "--output-len", "400", "--rounds", "1", "--profile"]
    run("overhead.py", *asked, "--json", tmp_path / "found.json")
    (case,) = json.loads((tmp_path / "found.json").read_text())
    assert (case["num_failed"], case["num_clients"]) == (0, 4)
    assert case["server_us"] > 0 and case["output_tokens_per_s"] >= case["events_per_s"] > 0


def test_grammars_are_measured_beside_free_text(shapes: Path) -> None:
    asked = ["--shape", "smoke", "--streams", "4", "--tokens", "12", "--rounds", "1"]
    printed = run("structured.py", "--dir", shapes, *asked)
    assert [line.split("|")[1].strip() for line in printed.splitlines()[2:]] == [
        "smoke, free",
        "smoke, drawn alike",
        "smoke, schema",
    ]


def test_goodput_by_targets_beside_fixed_settings(tmp_path: Path) -> None:
    """Two loads of a few seconds: at the lower one everybody is served in time, whatever the setting."""
    printed = run("slo.py", "--quick", "--out", tmp_path)
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


def test_goodput_by_targets_of_the_real_worker(shapes: Path, tmp_path: Path) -> None:
    """A second of one load, in which little can be promised of the machine that a test runs on."""
    printed = run("slo.py", "--setting", "cpu", "--quick", "--rates", "5", "--dir", shapes, "--out", tmp_path)
    assert (tmp_path / "slo_cpu.md").read_text() == printed
    assert ": measured" in printed and "not measured" not in printed
    assert "of 12 million parameters" in printed and 11.5e6 < SHAPES["12m"].num_body_params < 12.5e6
    row = [line for line in printed.splitlines() if line.startswith("|")][2]
    rate, *goodput, _ = [float(cell) for cell in row.split("|")[1:-1]]
    assert all(0.0 <= served < 3 * rate for served in goodput)
    assert any(goodput), "nothing was served in time"
    assert (tmp_path / "slo_cpu.svg").exists()
