"""Compiles kernels in a separate process, because Triton interprets them in that of the kernels' tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from tests.conftest import CACHE_HOME, ROOT

TIMEOUT_S = 1200


def run(*arguments: str, program: str = "-m inferd.kernels.compile.aot") -> tuple[int, str, str]:
    """(exit code, output, errors). Finally kills the process and its children: an assembler can run for an hour."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(CACHE_HOME / "triton")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-P", *program.split(" ", 1), *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, output, errors
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
