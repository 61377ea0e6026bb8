"""Timeouts, metrics and the reset of the prefix cache, with a real engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from .conftest import Daemon, free_model
from .test_client import LONG, wait_idle


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_past_its_timeout_frees_what_it_held(daemon: Daemon, stream: bool) -> None:
    body = {**LONG, "timeout": 0.8, "stream": stream, "n": 4}
    answer = httpx.post(daemon.url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == (200 if stream else 408)
    assert '"deadline_exceeded"' in answer.text
    assert "[DONE]" not in answer.text
    wait_idle(daemon)


def test_metrics_add_up(daemon: Daemon) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 20, "ignore_eos": True, "include_metrics": True}
    answer = httpx.post(daemon.url + "/v1/completions", json=body, timeout=60)
    metrics = answer.json()["metrics"]
    total_ms = metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]
    assert metrics.pop("not_speculated") == "the server runs without --speculative"
    assert "is computed whole" in metrics.pop("not_cached")
    assert min(metrics.values()) >= 0
    assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 19, rel=0.01)
    assert metrics["tokens_per_second"] == pytest.approx(20 / total_ms * 1e3, rel=0.01)
    assert metrics["queue_time_ms"] + total_ms <= answer.elapsed.total_seconds() * 1e3


def test_a_reset_forgets_cached_prefixes(start: Callable[..., Daemon]) -> None:
    daemon = start("--admin-key", "secret-admin", program=free_model(0))
    admin = {"Authorization": "Bearer secret-admin"}
    body: dict[str, Any] = {"model": "tiny", "prompt": "The quick brown fox jumps. " * 12, "max_tokens": 1}

    def num_cached() -> int:
        answer = httpx.post(daemon.url + "/v1/completions", json=body, timeout=60)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert num_cached() == 0
    assert num_cached() >= 32
    assert httpx.post(daemon.url + "/reset_prefix_cache").status_code == 401
    assert num_cached() >= 32
    assert httpx.post(daemon.url + "/reset_prefix_cache", headers=admin).status_code == 200
    assert num_cached() == 0
    config = httpx.get(daemon.url + "/config", headers=admin)
    assert config.json()["max_model_len"]["became"] == httpx.get(daemon.url + "/state").json()["model"]["max_model_len"]
    assert "secret-admin" not in config.text + daemon.output
