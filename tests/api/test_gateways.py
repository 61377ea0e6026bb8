"""Gateways read the load of each replica, and what is served."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import httpx
import msgspec
import pytest

from inferd.engine.api.wire.messages import EngineStats
from inferd.server.dispatch.replica import Replicas
from tests.api.conftest import ScriptedRouter


@pytest.fixture
def two_replicas(router: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas with 64 blocks of 16 tokens in two groups and 8 slots each, of which the second has no engine."""
    ready = msgspec.structs.replace(router.ready, num_groups=2, max_num_seqs=8)
    stats = EngineStats(
        num_running=2, num_waiting=3, num_blocks=64, num_blocks_used=16, num_tokens_waiting=90, prefix_query_tokens=200,
        prefix_hit_tokens=50,
    )  # fmt: skip
    replicas = Replicas(2)
    replicas[0].is_up, replicas[0].stats = True, stats
    for replica in replicas:
        replica.ready = ready
    replicas.keep_ready()
    monkeypatch.setattr(ScriptedRouter, "replicas", replicas)


@pytest.mark.usefixtures("two_replicas")
def test_the_load_of_each_replica_that_takes_requests(http: httpx.Client) -> None:
    said = http.get("/v1/loads?include=core,memory").json()
    assert (said["dp_rank_count"], len(said["loads"])) == (2, 1)
    assert datetime.fromisoformat(said["timestamp"]).utcoffset() == timedelta(0)
    assert said["loads"][0] == {
        "dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 3, "num_waiting_uncached_tokens": 90,
        "num_total_reqs": 5, "num_used_tokens": 128, "max_total_num_tokens": 512, "token_usage": 0.25,
        "max_running_requests": 8, "utilization": 0.25, "cache_hit_rate": 0.25,
    }  # fmt: skip


def test_what_is_not_known_is_left_out(http: httpx.Client) -> None:
    (load,) = http.get("/v1/loads").json()["loads"]
    assert "cache_hit_rate" not in load


def test_what_is_served(http: httpx.Client) -> None:
    info = http.get("/server_info").json()
    assert (info["served_model_name"], info["tp_size"], info["dp_size"]) == ("tiny", 1, 1)
    info = http.get("/model_info").json()
    assert (info["model_type"], info["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert "/" not in info["model_path"]
