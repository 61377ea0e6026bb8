"""/state: the overview for operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from inferd.engine.api.wire.messages import EngineStats, StepOutput
from inferd.server.auth.keys_file import append_entry, digest_of, entry_of
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.endpoints.app import Backend
from inferd.server.observability.metrics import Metrics
from inferd.server.text.model import ServedModel
from tests.api.conftest import app_settings

from .conftest import ScriptedRouter, serving


def test_a_server_that_has_done_nothing(http: httpx.Client) -> None:
    state = http.get("/state").json()
    assert state.pop("version")
    assert state == {
        "status": "ready",
        "model": {
            "id": "tiny", "max_model_len": 256, "tool_format": "own", "reasoning_format": "none", "weights_sha256": {},
        },
        "engine": {
            "device": "cpu",
            "dtype": "float32",
            "quantization": "none",
            "kv_cache_dtype": "auto",
            "deterministic": True,
            "model_impl": "native",
            "speculative": "none",
            "peaks": {"read_bytes_per_s": 10**10, "flops_per_s": 10**12},
        },
        "replicas": [
            {
                "status": "up", "reason": None, "pid": 4321, "requests": {"running": 0, "waiting": 0},
                "kv_cache_usage": 0.0,
            }
        ],
        "restarts": 0,
        "requests": {"running": 0, "waiting": 0},
        "kv_cache": {"blocks": 0, "used": 0, "shared": 0, "cached": 0, "usage": 0.0},
        "prefix_cache": {
            "query_tokens": 0, "hit_tokens": 0, "stateless_tokens": 0, "states": 0, "cached_states": 0,
            "state_interval": 0,
        },
        "last_minute": {"prefill": None, "decode": None, "mixed": None},
        "newest_steps": [],
        "latencies": {"ttft": None, "tpot": None},
        "speculation": {
            "rows": 0, "draft_tokens": 0, "accepted_draft_tokens": 0, "acceptance": None, "accepted_per_position": [],
        },
        "targets": {"ttft_ms": None, "tpot_ms": None, "e2e_ms": None},
        "step_model": {
            "steps_without_chunks": "not known",
            "steps_with_chunks": "not known",
            "error_p50": 0.0,
            "error_p95": 0.0,
            "prefill_tokens_per_s": 0,
            "waiting_prompt_tokens": 0,
            "refused_for_their_target": 0,
            "last_minute": {"prefill": None, "decode": None, "mixed": None},
        },
        "error": None,
    }  # fmt: skip


def test_what_the_engine_guessed(http: httpx.Client, router: Any) -> None:
    router.speculative = "suffix"
    router.stats = EngineStats(num_draft_rows=3, num_drafts=9, accepted_drafts=(2, 1, 1, 0))
    state = http.get("/state").json()
    assert state["engine"]["speculative"] == "suffix"
    assert state["speculation"] == {
        "rows": 3,
        "draft_tokens": 9,
        "accepted_draft_tokens": 4,
        "acceptance": 0.4444,
        "accepted_per_position": [2, 1, 1, 0],
    }


def test_load_and_the_last_minute(serve: Callable[..., str], router: Any) -> None:
    """Peaks of 1e10 B/s and 1e12 FLOP/s, and three steps of 10, 20 and 60 ms with 1 GFLOP and 90 MB each."""
    metrics = Metrics("tiny")
    metrics.engine_ready(router.ready)
    router.stats = EngineStats(
        num_running=3, num_waiting=2, num_blocks=64, num_blocks_used=16, num_blocks_cached=8, num_blocks_shared=4
    )
    for own_s in (0.01, 0.02, 0.06):
        metrics.step(
            StepOutput(
                deltas=(), stats=router.stats, step_phase="decode", step_own_s=own_s, step_flops=10**9,
                step_bytes=9 * 10**7, step_num_rows=3, step_num_tokens=5,
            )
        )  # fmt: skip
        metrics.first_token(10 * own_s)
    state = httpx.get(serve(app_settings(), metrics=metrics) + "/state").json()
    assert state["requests"] == {"running": 3, "waiting": 2}
    assert state["kv_cache"] == {"blocks": 64, "used": 16, "shared": 4, "cached": 8, "usage": 0.25}
    requests = {"running": 3, "waiting": 2}
    replica = {"status": "up", "reason": None, "pid": 4321, "requests": requests, "kv_cache_usage": 0.25}
    assert state["replicas"] == [replica]
    assert state["last_minute"] == {
        "prefill": None,
        "decode": {
            "steps": 3,
            "seconds": 0.09,
            "median_step_ms": 20.0,
            "mfu": 0.0333,
            "mbu": 0.3,
            "floor_ratio": 0.3,
            "bound_by": "host",
        },
        "mixed": None,
    }
    assert state["newest_steps"] == [
        {"phase": "decode", "rows": 3, "tokens": 5, "ms": step_ms, "bound_by": bound_by}
        for step_ms, bound_by in ((10.0, "memory"), (20.0, "host"), (60.0, "host"))
    ]
    assert state["latencies"] == {"ttft": {"answers": 3, "p50_ms": 200.0, "p95_ms": 600.0}, "tpot": None}


def test_tenants_of_the_keys_file_in_all_models(tmp_path: Path, model: ServedModel, router: ScriptedRouter) -> None:
    """They are named as in /metrics. A key of the settings is one of the others."""
    path = tmp_path / "keys"
    entries = [entry_of(sha256=digest_of(name).hex(), name=name) for name in ("alice", "bob")]
    for entry in entries:
        append_entry(path, entry)
    alice, bob = (entry.tenant_id for entry in entries)
    beside, metrics, its = ScriptedRouter(replace(model, names=("b",))), Metrics("tiny"), Metrics("b")
    router.running_by_tenant, router.waiting_by_tenant = {alice: 3}, {alice: 2, bob: 1, "a fixed key": 4}
    beside.running_by_tenant = {alice: 10}
    settings = app_settings(keys_file=path, access_log=False)
    with serving(
        model, router, settings, metrics=metrics, others=[Backend(beside.model, beside, its, settings)]
    ) as url:  # type: ignore[arg-type]
        for each in (metrics, its):
            each.recent_tenant_tokens["bob"].add(5)
        metrics.tenant_refused_with(alice, "slow_down")
        tenants = httpx.get(f"{url}/state").json()["tenants"]
    assert [tuple(tenant.values()) for tenant in tenants] == [
        ("alice", 13, 2, 0, 1), ("bob", 0, 1, 10, 0), ("other", 0, 4, 0, 0)
    ]  # fmt: skip


def test_a_replica_is_what_its_model_is(http: httpx.Client, router: ScriptedRouter) -> None:
    for router.state, status in (
        (State.UNLOADED, "unloaded"), (State.LOADING, "starting"), (State.FAILED, "failed"), (State.SERVING, "up"),
        (State.SLEEPING, "unloaded"),
    ):  # fmt: skip
        assert http.get("/state").json()["replicas"][0]["status"] == status


def test_it_answers_whatever_the_engine_does(http: httpx.Client, router: Any) -> None:
    router.state = State.STOPPED
    response = http.get("/state")
    assert (response.status_code, response.json()["status"]) == (200, "unavailable")
    router.has_engine = False
    response = http.get("/state")
    assert (response.status_code, response.json()["status"], response.json()["engine"]) == (200, "starting", None)


def test_an_unloaded_model_takes_requests_and_says_so(http: httpx.Client, router: Any) -> None:
    """A probe must not end a server whose model `--idle-unload` stopped."""
    for router.state, status in ((State.UNLOADED, "unloaded"), (State.LOADING, "loading")):
        for path in ("/health", "/ready"):
            response = http.get(path)
            assert (response.status_code, response.json()) == (200, {"status": "ready", "models": {"tiny": status}})
        assert http.get("/state").json()["status"] == status


def test_between_two_engines(http: httpx.Client, router: Any) -> None:
    """Requests are accepted and wait for the next engine. After a while they are refused."""
    router.state = State.RECOVERING
    router.held = EngineStats(num_waiting=3, num_tokens_waiting=70)
    for path in ("/health", "/ready"):
        response = http.get(path)
        body = {"status": "recovering", "models": {"tiny": "recovering"}}
        assert (response.status_code, response.json()) == (200, body)
    assert http.get("/state").json()["status"] == "recovering"
    lines = http.get("/metrics").text.splitlines()
    for name in (
        'inferd_requests_waiting{model_name="tiny"} 3.0',
        'inferd_waiting_prompt_tokens{model_name="tiny"} 70.0',
    ):
        assert name in lines, "those that wait for the next engine"
    router.is_outage_long = True
    assert http.get("/ready").status_code == 503
    assert http.get("/state").json()["status"] == "recovering"
