"""The engine's settings: what was asked, and what it came to on this machine, with each decision and its reason.

`resolve` is the only place where an "auto" becomes a number. It reads the checkpoint's headers and the machine's
memory, never a device, and it is torch-free: a model that cannot fit is refused before an engine exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from inferd.engine.api.errors import CapacityError, ConfigError
from inferd.engine.api.machine import Machine
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.planner import DTYPE_BYTES, MemoryPlan, ModelShape, format_bytes

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DeviceKind = Literal["auto", "cpu"]

BLOCK_SIZES = (16, 32, 64, 128)
_AUTO_BLOCK_SIZE = 32
_AUTO_MAX_NUM_SEQS = 128
_AUTO_MAX_NUM_BATCHED_TOKENS = 256
"""Matrix products of 256 rows are large enough for a CPU; a longer chunk would only hold up decodes longer."""
_AUTO_KV_BYTES = 4 * 2**30
"""Most that "auto" takes for the cache on a CPU, unless one sequence of full length needs more."""
_AUTO_MEMORY_SHARE = 0.6
"""Share of the memory that is left beside the weights that "auto" may take for the cache."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is asked to be. `resolve` settles None and "auto"; the engine process gets a settled one."""

    model_path: str
    dtype: Dtype = "auto"
    device: DeviceKind = "auto"
    max_model_len: int | None = None
    """Most tokens of one sequence, prompt and output together."""
    block_size: int | None = None
    """Token slots of a KV block."""
    kv_memory_bytes: int | None = None
    num_blocks: int | None = None
    """Decided from `kv_memory_bytes`."""
    max_num_seqs: int | None = None
    """Most sequences in one step."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one step, prefill and decode together."""
    prefix_caching: bool = True
    num_threads: int | None = None
    """Threads of a CPU engine."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One setting that `resolve` chose or changed."""

    field: str
    asked: object
    became: object
    why: str


def resolve(
    config: EngineConfig, facts: ModelFacts, machine: Machine
) -> tuple[EngineConfig, MemoryPlan, tuple[Decision, ...]]:
    """Settle every "auto". Raises `ConfigError` or `CapacityError` with what was asked and what would work."""
    shape = facts.shape
    _check_bounds(config, shape)
    chosen: dict[str, tuple[object, str]] = {}
    if config.device == "auto":
        chosen["device"] = ("cpu", "the device this version serves on")
    dtype = _dtype(config.dtype, facts, machine)
    if dtype[0] != config.dtype:
        chosen["dtype"] = dtype
    if config.num_threads is None:
        chosen["num_threads"] = (machine.num_cpus, "the cores this process may use")
    if config.max_num_seqs is None:
        chosen["max_num_seqs"] = (_AUTO_MAX_NUM_SEQS, "default")
    if config.max_num_batched_tokens is None:
        chosen["max_num_batched_tokens"] = (_AUTO_MAX_NUM_BATCHED_TOKENS, "default on a CPU")
    if config.block_size is None:
        chosen["block_size"] = (_AUTO_BLOCK_SIZE, "default on a CPU")
    settled = msgspec.structs.replace(config, **{field: value for field, (value, _) in chosen.items()})
    memory = _fit(settled, shape, machine)
    chosen |= memory
    settled = msgspec.structs.replace(settled, **{field: value for field, (value, _) in memory.items()})
    decisions = tuple(Decision(field, getattr(config, field), value, why) for field, (value, why) in chosen.items())
    assert settled.block_size is not None and settled.num_blocks is not None
    return settled, shape.plan(settled.dtype, settled.block_size, settled.num_blocks), decisions


def _dtype(asked: str, facts: ModelFacts, machine: Machine) -> tuple[str, str]:
    """(dtype of weights and activations, why). float32 holds every float16 and bfloat16 exactly."""
    dtype = _auto_dtype(facts) if asked == "auto" else (asked, "as asked")
    if dtype[0] == "float16":
        return "float32", "there is no float16 matrix product on a CPU"
    if dtype[0] == "bfloat16" and not machine.has_bf16_matmul:
        return "float32", "this processor has no bfloat16 matrix product"
    return dtype


def _auto_dtype(facts: ModelFacts) -> tuple[str, str]:
    if facts.is_embedded:
        return "float32", "the embedded model answers the same on every machine in float32"
    if facts.dtype not in DTYPE_BYTES:
        raise ConfigError(f"the checkpoint's dtype is {facts.dtype!r}; give --dtype as one of {', '.join(DTYPE_BYTES)}")
    return facts.dtype, "the checkpoint's"


def _check_bounds(config: EngineConfig, shape: ModelShape) -> None:
    if config.block_size is not None and config.block_size not in BLOCK_SIZES:
        raise ConfigError(f"block_size must be one of {BLOCK_SIZES}, but got {config.block_size}")
    for field in ("max_model_len", "kv_memory_bytes", "max_num_seqs", "max_num_batched_tokens", "num_threads"):
        value = getattr(config, field)
        if value is not None and value < 1:
            raise ConfigError(f"{field} must be at least 1, but got {value}")
    if config.max_model_len is not None and config.max_model_len > shape.max_positions:
        raise ConfigError(
            f"max_model_len must be at most {shape.max_positions}, the positions this model was made for, "
            f"but got {config.max_model_len}"
        )


def _fit(config: EngineConfig, shape: ModelShape, machine: Machine) -> dict[str, tuple[object, str]]:
    """Size the KV pool. An explicit setting is honoured or refused; only an "auto" gives way."""
    assert config.block_size is not None and config.max_num_seqs is not None
    block_bytes = shape.kv_bytes_per_token(config.dtype) * config.block_size
    weights_bytes = shape.weights_bytes(config.dtype)
    available = machine.memory_available_bytes
    left = available - weights_bytes
    if left < block_bytes:
        raise CapacityError(
            f"the weights need {format_bytes(weights_bytes)} in {config.dtype} and {format_bytes(available)} "
            f"of memory are available: {_what_fits(shape, machine)}"
        )
    length = config.max_model_len or shape.max_positions
    blocks_per_seq = math.ceil(length / config.block_size)
    if config.kv_memory_bytes is not None:
        if config.kv_memory_bytes > left:
            raise CapacityError(
                f"kv_memory of {format_bytes(config.kv_memory_bytes)} was asked for, and {format_bytes(left)} are left "
                f"beside the weights ({format_bytes(weights_bytes)}): ask for less, or leave it to be decided"
            )
        num_blocks, why = config.kv_memory_bytes // block_bytes, f"kv_memory of {format_bytes(config.kv_memory_bytes)}"
    else:
        share = int(left * _AUTO_MEMORY_SHARE)
        wanted = max(min(_AUTO_KV_BYTES // block_bytes, config.max_num_seqs * blocks_per_seq), blocks_per_seq)
        num_blocks, why = min(share // block_bytes, wanted), f"within {format_bytes(share)}, 60% of the memory left"
    return _settle_length(config, shape, num_blocks, block_bytes, length, why)


def _settle_length(
    config: EngineConfig, shape: ModelShape, num_blocks: int, block_bytes: int, length: int, why: str
) -> dict[str, tuple[object, str]]:
    assert config.block_size is not None
    pool_tokens = num_blocks * config.block_size
    if pool_tokens < 1 or (config.max_model_len is not None and pool_tokens < length):
        needed = math.ceil(length / config.block_size) * block_bytes
        raise CapacityError(
            f"one sequence of max_model_len {length} needs {format_bytes(needed)} of KV cache, and there are "
            f"{format_bytes(num_blocks * block_bytes)} ({why}): max_model_len {pool_tokens} would fit"
        )
    chosen: dict[str, tuple[object, str]] = {
        "num_blocks": (num_blocks, why),
        "kv_memory_bytes": (num_blocks * block_bytes, why),
    }
    if config.max_model_len is None:
        reason = "the model's positions" if pool_tokens >= length else "one sequence must fit the KV cache"
        chosen["max_model_len"] = (min(length, pool_tokens), reason)
    return chosen


def _what_fits(shape: ModelShape, machine: Machine) -> str:
    fitting = [name for name in DTYPE_BYTES if shape.weights_bytes(name) < machine.memory_available_bytes * 0.9]
    if fitting:
        return f"--dtype {fitting[-1]} would fit ({format_bytes(shape.weights_bytes(fitting[-1]))})"
    return "no precision served here fits; choose a smaller model or a larger machine"
