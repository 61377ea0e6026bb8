"""The overhead benchmarks of server and grammars run, with short loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import benchmark


def test_the_overhead_is_measured_on_a_free_model(tmp_path: Path) -> None:
    # Long enough for the server to use several ticks of processor time, which count in 10 ms.
    asked = ["--clients", "4", "--step-ms", "1", "--output-len", "400", "--rounds", "1", "--profile"]
    benchmark("overhead.py", *asked, "--json", tmp_path / "found.json")
    (case,) = json.loads((tmp_path / "found.json").read_text())
    assert (case["num_failed"], case["num_clients"]) == (0, 4)
    assert case["server_us"] > 0 and case["output_tokens_per_s"] >= case["events_per_s"] > 0


@pytest.mark.long
def test_grammars_are_measured_beside_free_text(shapes: Path) -> None:
    asked = ["--shape", "smoke", "--streams", "4", "--tokens", "12", "--rounds", "1"]
    printed = benchmark("structured.py", "--dir", shapes, *asked)
    assert [line.split("|")[1].strip() for line in printed.splitlines()[2:]] == [
        "smoke, free",
        "smoke, drawn alike",
        "smoke, schema",
    ]
