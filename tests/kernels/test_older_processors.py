"""torch's libraries as on an older processor: limited to its instructions, they run the tests of rows that keep their
bits again in plain PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LIBRARIES = (("SSE4_2", "SSE41"), ("AVX2", "AVX2"), ("AVX512", "AVX512_CORE"))
"""Names of the instruction sets in MKL and in oneDNN. MKL obeys on Intel processors only."""


@pytest.mark.long
@pytest.mark.parametrize(("mkl", "onednn"), LIBRARIES, ids=[mkl for mkl, _ in LIBRARIES])
@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("kernels/test_paged_attention.py", "reference"),
        ("cpu/test_linear.py", "test_a_row_is_its_own"),
    ],
)
def test_rows_keep_their_bits(file: str, chosen: str, mkl: str, onednn: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(TESTS / file), "-k", chosen, "--kernels", "reference"]
    environment = {**os.environ, "MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn}
    run = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:]
    assert "passed" in run.stdout
