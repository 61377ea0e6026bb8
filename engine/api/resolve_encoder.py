"""Makes the engine's settings for an encoder, as `resolve` does for models that generate.

An encoder has no KV cache. A step takes whole texts, and its engine counts blocks of tokens that have no memory.
"""

from __future__ import annotations

from typing import Any

from inferd.engine.api.config import AskedConfig, EngineConfig, plan_of, precision_of
from inferd.engine.api.decisions import Decision, Settling
from inferd.engine.api.encoder_model import EncoderFacts
from inferd.engine.api.errors import CapacityError, ConfigError
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.planner import MemoryPlan, format_bytes
from inferd.engine.api.sentence_folder import PLAIN, SentenceFolder
from inferd.engine.api.served import (
    check_quantization,
    check_replica_places,
    quantization_of,
    resolved_dtype,
    served_weights_dtype,
)
from inferd.engine.arch.description import Arch
from inferd.engine.arch.encoder import EncoderArch

ENCODER_STEP_TOKENS = 1024
"""Products of so many rows use a processor fully in every format (MiniLM on 2 cores of an AMD EPYC Zen 4, 2026-12-01).
More would let a short text wait longer behind the step of a bulk of others."""
_MAX_NUM_SEQS = 256
"""Texts of a few tokens that make a full step."""
_BLOCK_SIZE = 128
_ON_CPU = "encoders are computed on the processor"

_UNUSED: dict[str, tuple[str, Any]] = {
    "kv_memory_bytes": ("--kv-memory", 0),
    "block_size": ("--block-size", _BLOCK_SIZE),
    "kv_dir": ("--kv-dir", ""),
    "kv_host_bytes": ("--kv-host", 0),
    "kv_events": ("--kv-events", "none"),
}
"""Settings of a KV cache, which an encoder has none of: their flags, and the values that they get."""


def resolve_encoder(
    asked: AskedConfig, facts: EncoderFacts, machine: Machine
) -> tuple[EngineConfig, MemoryPlan, tuple[Decision, ...]]:
    """Decide what was left to inferd. Raises `ConfigError` or `CapacityError` with what was asked and what would
    work."""
    arch = facts.arch
    _check(asked, arch)
    settings = Settling(asked)
    _settle_formats(settings, facts, machine)
    _settle_limits(settings, facts, machine)
    for field, (flag, value) in _UNUSED.items():
        is_asked = getattr(asked, field) not in (None, value)
        settings.settle(field, value, "an encoder has no KV cache", flag if is_asked else "")
    settings.settle("prefix_caching", value=False, why="an encoder has no KV cache")
    config = settings.config(is_encoder=True)
    plan = plan_of(config, arch)
    available = machine.shared_by(asked.num_replicas).memory_available_bytes
    if plan.total_bytes > available:
        raise CapacityError(
            f"{arch.architecture} needs {format_bytes(plan.total_bytes)}, {format_bytes(plan.weights_bytes)} of them "
            f"for weights in {precision_of(config).weights_name}, but {format_bytes(available)} are available: give "
            "--quantization int8 or int4, a smaller --max-model-len, or fewer --replicas"
        )
    return config, plan, tuple(settings.decisions)


def _check(asked: AskedConfig, arch: EncoderArch | Arch) -> None:
    """Raises `ConfigError` for what an encoder cannot do."""
    if asked.device == "cuda":
        raise ConfigError(f"device cuda was asked for, but {_ON_CPU} alone: give --device cpu, or auto")
    if asked.tensor_parallel_size > 1:
        raise ConfigError(
            f"{asked.tensor_parallel_size} ranks cannot share an encoder: give --tensor-parallel-size 1, and several "
            "--replicas if it should have several engines"
        )
    if asked.speculative not in ("auto", "none"):
        raise ConfigError("an encoder draws no tokens that could be guessed: leave --speculative out")
    if asked.max_loras:
        raise ConfigError("an encoder takes no LoRA adapters: leave --lora and --max-loras out")
    if asked.max_model_len is not None and not 1 <= asked.max_model_len <= arch.max_positions:
        raise ConfigError(
            f"max_model_len must be from 1 to {arch.max_positions}, the positions this model was trained for, but got "
            f"{asked.max_model_len}"
        )
    for field in ("max_num_seqs", "max_num_batched_tokens", "num_threads"):
        value = getattr(asked, field)
        if value is not None and value < 1:
            raise ConfigError(f"{field} must be at least 1, but got {value}")
    if asked.kv_cache_dtype != "auto":
        raise ConfigError(f"kv_cache_dtype {asked.kv_cache_dtype} was asked for, but an encoder has no KV cache")
    if asked.quantization == "fp8":
        raise ConfigError("an encoder's weights cannot be stored in fp8: give --quantization int8 or int4")
    check_quantization(asked.quantization, arch)


def _settle_formats(settings: Settling, facts: EncoderFacts, machine: Machine) -> None:
    asked = settings.asked
    settings.settle("device", "cpu", _ON_CPU)
    check_replica_places(asked.num_replicas, 1, "cpu", machine)
    settings.settle("quantization", quantization_of(asked.quantization, facts.arch), "what was asked for")
    dtype, why, _ = resolved_dtype(asked.dtype, facts, machine)
    settings.settle("dtype", dtype, why)
    settings.settle("weights_dtype", *served_weights_dtype(dtype, facts, machine))
    settings.settle("kv_cache_dtype", dtype, "an encoder has no KV cache")
    settings.settle("activations", "own", "nearer to float32 than what a checkpoint declares")
    settings.settle("deterministic", value=True, why="on a CPU results are always deterministic")
    settings.settle("speculative", "none", "an encoder draws no tokens")


def longest_text(facts: EncoderFacts) -> tuple[int, str]:
    """(tokens of the longest text by default, why so many)."""
    positions, stated = facts.arch.max_positions, (SentenceFolder.read(facts.path) or PLAIN).max_tokens
    if stated is None or stated >= positions:
        return positions, "the model's positions"
    return stated, "the folder's max_seq_length, and --max-model-len may give more"


def _settle_limits(settings: Settling, facts: EncoderFacts, machine: Machine) -> None:
    asked = settings.asked
    num_threads = machine.num_cpus // asked.num_replicas or 1
    settings.unless_asked("num_threads", num_threads, "the cores this process may use")
    settings.unless_asked("max_num_seqs", _MAX_NUM_SEQS, "default of encoders")
    settings.unless_asked("max_num_batched_tokens", ENCODER_STEP_TOKENS, "default of encoders")
    settings.unless_asked("max_model_len", *longest_text(facts))
    length, num_seqs = settings.value("max_model_len"), settings.value("max_num_seqs")
    # More than all slots hold and the scheduler keeps free, so that no text ever waits for blocks.
    num_blocks = (num_seqs + num_seqs // 50 + 2) * -(-length // _BLOCK_SIZE)
    settings.settle("num_blocks", num_blocks, "as many as the texts of a step can fill; they have no memory")
