"""lm-eval: its `local-completions` gets the log likelihoods that transformers computes for the same checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from checks import BASE_URL, KEY, MODEL, check, run

HERE = Path(__file__).resolve().parent
os.chdir(HERE)  # colours.yaml names its data relative to this folder
os.environ["OPENAI_API_KEY"] = KEY

import lm_eval  # noqa: E402  # reads the environment
from lm_eval.tasks import TaskManager  # noqa: E402

TOLERANCE = 1e-3
"""Largest difference of a sum over a few tokens, in nats. Both sides compute in fp32, in different orders."""


def evaluate(**options: object) -> list[dict]:
    model_args = {
        "model": MODEL,
        "base_url": f"{BASE_URL}/completions",
        "max_length": 1024,
        "max_retries": 1,
        "auth_token": KEY,
        **options,
    }
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=model_args,
        tasks=["colours"],
        task_manager=TaskManager(include_path=str(HERE), include_defaults=False),
        bootstrap_iters=0,
    )
    return results["samples"]["colours"]


def compare(samples: list[dict]) -> None:
    pairs = [tuple(arguments) for sample in samples for arguments in sample["arguments"]]
    found = [response for sample in samples for response in sample["filtered_resps"]]
    command = [os.environ["INFERD_PYTHON"], "-P", str(HERE / "expected.py")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    answer = subprocess.run(
        command, input=json.dumps(pairs), capture_output=True, text=True, check=True, env=environment
    )
    expected = json.loads(answer.stdout)
    assert len(found) == len(expected) == 20
    for pair, (total, is_greedy), (expected_total, is_expected_greedy) in zip(pairs, found, expected, strict=True):
        assert abs(total - expected_total) < TOLERANCE, (pair, total, expected_total)
        assert is_greedy == is_expected_greedy, pair
    assert len({round(total) for total, _ in found}) > 5, "all alike: nothing was scored"


@check
def log_likelihoods_are_those_of_transformers() -> None:
    compare(evaluate(tokenizer_backend="remote", num_concurrent=4))


@check
def batches_of_prompts_score_the_same() -> None:
    compare(evaluate(tokenizer_backend="remote", batch_size=4, num_concurrent=1))


run()
