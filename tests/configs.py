"""Resolved settings of an engine, for tests that give only those that matter to them."""

from __future__ import annotations

from typing import Any

from inferd.engine.api.config import EngineConfig


def engine_config(**given: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model_path": "/nowhere",
            "dtype": "float32",
            "weights_dtype": "float32",
            "kv_cache_dtype": "float32",
            "device": "cpu",
            "deterministic": True,
            "max_model_len": 700,
            "block_size": 16,
            "kv_memory_bytes": 2**20,
            "num_blocks": 99,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "num_threads": 1,
        }
        | given
    )
