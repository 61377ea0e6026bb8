"""The unit of systemd agrees with the server. systemd's own tools judge it if they are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from inferd.engine.api.errors import ConfigError
from inferd.server.config.settings import SETTINGS, Settings

SYSTEMD = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
MOST_EXPOSURE = "15"
"""Tenths of systemd's exposure level, which is 9.6 for a service without any restriction and 1.2 for this one."""


def unit() -> dict[str, list[str]]:
    lines = re.findall(r"^(\w+)=(.*)$", (SYSTEMD / "inferd.service").read_text(), flags=re.MULTILINE)
    return {name: [value for other, value in lines if other == name] for name, _ in lines}


def analyze(tmp_path: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze on the unit `text`, whose program exists."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze: apt-get install systemd")
    path = tmp_path / "inferd.service"
    path.write_text(text.replace("/opt/inferd/bin/inferd", shutil.which("true") or ""))
    return subprocess.run([program, *arguments, str(path)], capture_output=True, text=True, timeout=60)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (SYSTEMD / "inferd.service").read_text()
    done = analyze(tmp_path, text, "verify", "--man=no")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    wrong = analyze(tmp_path, text.replace("KillMode=mixed", "KillMode=gentle"), "verify", "--man=no")
    assert "gentle" in wrong.stderr


def test_the_service_has_few_rights(tmp_path: Path) -> None:
    arguments = ("security", "--offline=yes", "--no-pager", f"--threshold={MOST_EXPOSURE}")
    text = (SYSTEMD / "inferd.service").read_text()
    assert analyze(tmp_path, text, *arguments).returncode == 0
    assert analyze(tmp_path, text.replace("CapabilityBoundingSet=", ""), *arguments).returncode != 0


def test_the_unit_gives_a_drain_time_and_knows_the_exit_codes() -> None:
    found = unit()
    assert found["Type"] == ["notify"]
    assert float(found["TimeoutStopSec"][0]) > Settings().shutdown_timeout_s + 5
    assert found["RestartPreventExitStatus"] == [str(ConfigError.exit_code)]
    assert found["KillMode"] == ["mixed"]  # The engine must not get the signal.


def test_the_unit_writes_only_to_its_cache() -> None:
    found = unit()
    (cache,) = found["CacheDirectory"]
    places = dict(pair.split("=", 1) for pair in found["Environment"][0].split())
    assert {"HOME", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR"} <= places.keys()
    assert all(f"{place}/".startswith(f"%C/{cache}/") for place in (*places.values(), *found["WorkingDirectory"]))


def test_every_variable_is_a_setting() -> None:
    texts = [path.read_text() for path in SYSTEMD.iterdir()]
    named = {name for text in texts for name in re.findall(r"\b(INFERD_\w+)=", text)}
    assert "INFERD_API_KEY" in named and named <= {about.env for about in SETTINGS.values()}
