"""How an engine's libraries are read: a standby's without taking processor time from anybody, and leaving no trace."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferd.engine import boot

MODULE = """
import os, threading
from pathlib import Path
def nice():
    group = Path("/proc/self/autogroup")
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    return own, group.exists() and int(group.read_text().split()[-1])
READ = nice()
"""
PROGRAM = """
import json, os
from inferd.engine import boot
boot._ENGINE = "what_is_read"
engine = boot._engine(is_urgent={is_urgent})
print(json.dumps([engine.READ, engine.nice()]))
"""


@pytest.mark.parametrize("is_urgent", [True, False])
def test_a_standby_reads_its_libraries_nicely_and_serves_as_any(is_urgent: bool, tmp_path: Path) -> None:
    """By its thread, and by its session where the kernel knows such groups."""
    (tmp_path / "what_is_read.py").write_text(MODULE)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM.format(is_urgent=is_urgent)],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
    )  # fmt: skip
    read, after = json.loads(done.stdout)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert after[0] == own
    assert not after[1]
    if sys.platform == "linux":
        assert read[0] == (own if is_urgent else max(own, 10))
        assert read[1] in ((0, False) if is_urgent else (10, False))


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel shares processors out by session")
def test_a_session_that_cannot_be_made_urgent_again_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, text: str) -> int:
        raise BlockingIOError

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(boot, "_TRY_S", 0.0)
    monkeypatch.setattr(boot, "_ENGINE", "json")
    with caplog.at_level(logging.WARNING, "inferd"):
        assert boot._engine(is_urgent=False) is json
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["the engine's session keeps nice 10"]
