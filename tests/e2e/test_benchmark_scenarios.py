"""The benchmark scenarios run from the command line, with short loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import SHAPES
from inferd.engine.api.checkpoint import Checkpoint
from tests.e2e.conftest import Daemon, benchmark


@pytest.mark.long
def test_the_scenarios_run_beside_a_peer(daemon: Daemon, shapes: Path, tmp_path: Path) -> None:
    found, text = tmp_path / "found.json", tmp_path / "found.md"
    asked = ["--model", "smoke", "--scenarios", "i,iv", "--quick", "--peer", f"{daemon.url}=peer"]
    printed = benchmark("scenarios.py", "--dir", shapes, *asked, "--json", found, "--markdown", text)
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
