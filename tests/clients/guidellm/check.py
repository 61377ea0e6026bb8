"""guidellm: a short load of synthetic prompts ends without an error, and its token counts equal the requested ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import guidellm  # noqa: F401  # fails here if it is not installed
from checks import KEY, MODEL, URL, check, run

NUM_REQUESTS, NUM_TOKENS = 12, 24


def load(kind: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        tokenizer = os.environ["INFERD_TINY"]
        arguments = [
            *("--backend", f"kind=openai_http,target={URL},model={MODEL},api_key={KEY},request_format={kind}"),
            *("--profile", "kind=concurrent,streams=[4]"),
            *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
            *("--output", f"kind=json,path={report}"),
            "--disable-console",
        ]
        command = [Path(sys.executable).parent / "guidellm", "run", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return json.loads(report.read_text())


def totals(report: dict) -> None:
    [benchmark] = report["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"]["successful"] == NUM_REQUESTS
    assert metrics["request_totals"]["errored"] == 0
    assert metrics["output_token_count"]["successful"]["mean"] == NUM_TOKENS
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0


@check
def chat_completions_under_load() -> None:
    totals(load("/v1/chat/completions"))


@check
def completions_under_load() -> None:
    totals(load("/v1/completions"))


run()
