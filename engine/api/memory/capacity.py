"""Finds what fits into memory: the longest context beside the weights, and other settings if a model does not fit.

Pure arithmetic on memory plans. It reads no settings and decides none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from inferd.engine.api.memory.activations import Workload
from inferd.engine.api.memory.planner import (
    MemoryPlan,
    block_bytes,
    blocks_per_seq,
    format_bytes,
    plan_memory,
    pool_for,
    refusal,
)
from inferd.engine.api.memory.precision import KV_FORMATS, SHORT_KV, Precision
from inferd.engine.arch.description import Arch
from inferd.engine.arch.paging import max_tokens

MIN_MODEL_LEN = 2
"""Length of the shortest sequence that can be served: one token of prompt, one of output."""


@dataclass(frozen=True, slots=True)
class Option:
    """A precision that the model can have, and the context that fits with it."""

    precision: Precision
    weights_bytes: int
    max_context: int
    """Most tokens of each sequence, at most the model's positions. Below `MIN_MODEL_LEN` the model does not fit."""


def plan_sequences(arch: Arch, precision: Precision, work: Workload, num_full: int) -> MemoryPlan:
    """The memory plan for `num_full` sequences of `work.max_model_len` tokens."""
    return plan_memory(arch, precision, work, pool_for(arch, work, num_full))


def longest_context(arch: Arch, precision: Precision, work: Workload, num_full: int, available_bytes: int) -> int:
    """Most tokens that each of `num_full` sequences can have; 0 if none fits. Ignores `work.max_model_len`."""

    def fits(num_tokens: int) -> bool:
        sized = replace(work, max_model_len=num_tokens)
        return plan_sequences(arch, precision, sized, num_full).total_bytes <= available_bytes

    return _largest(fits, arch.max_positions)


def longest_in_pool(arch: Arch, work: Workload, num_blocks: int) -> int:
    """Most tokens of one sequence that has the whole KV pool to itself, at most the model's positions."""
    windows = [group.window for group in arch.cache_groups]
    return min(arch.max_positions, max_tokens(windows, num_blocks, work.step_tokens, work.block_size))


def options(
    arch: Arch, precisions: Iterable[Precision], work: Workload, num_full: int, available_bytes: int
) -> tuple[Option, ...]:
    """Those of `precisions` that the model can be stored in, each with the context that fits."""
    found = []
    for precision in precisions:
        if refusal(arch, precision.quantization) is None:
            context = longest_context(arch, precision, work, num_full, available_bytes)
            plan = plan_sequences(arch, precision, work, num_full)
            found.append(Option(precision, plan.weights_bytes, context))
    return tuple(found)


def shortage(plan: MemoryPlan, precision: Precision, what: str, available_bytes: int, work: Workload) -> str:
    """The text that memory is too small: needed and available bytes. `what` names the sequences that should fit."""
    to_each = " to each" if work.num_ranks > 1 else ""
    return (
        f"the model needs {format_bytes(plan.total_bytes)}{of_each_rank(work)} for {what} "
        f"({format_bytes(plan.weights_bytes)} of weights in {precision.weights_name}, "
        f"{format_bytes(plan.kv_bytes)} of KV cache{_in_8_bits(precision)}, "
        f"{format_bytes(plan.working_bytes)} to work in), and {format_bytes(available_bytes)} of memory are "
        f"available{to_each}"
    )


def of_each_rank(work: Workload) -> str:
    """The text that sizes are those of each rank; empty for one rank."""
    return f" on each of {work.num_ranks} ranks" if work.num_ranks > 1 else ""


def _in_8_bits(precision: Precision) -> str:
    return f" in {precision.kv_cache}" if precision.kv_cache in KV_FORMATS else ""


def ways_out(asked: Precision, found: Iterable[Option]) -> str:
    """The text that names what would fit, as flags; if nothing would, it has the size of the weights in each
    precision."""
    found = tuple(found)
    texts = [_way_out(asked, option) for option in found if option.max_context >= MIN_MODEL_LEN]
    if not texts:
        weights = {option.precision.name: option.weights_bytes for option in found}
        sizes = ", ".join(f"{format_bytes(num_bytes)} in {name}" for name, num_bytes in weights.items())
        return f"no precision that can be served here fits (weights: {sizes}); use a smaller model or a larger machine"
    return f"what would fit: {'; '.join(texts)}"


def _way_out(asked: Precision, option: Option) -> str:
    precision, length = option.precision, f"--max-model-len up to {option.max_context}"
    if precision == asked:
        return length
    if precision.kv_cache != asked.kv_cache:
        return f"--kv-cache-dtype {precision.kv_cache} with {length}"
    flags = f"--dtype {precision.dtype}" if precision.quantization == "none" else f"--quantization {precision.name}"
    return f"{flags} ({format_bytes(option.weights_bytes)} of weights) with {length}"


def pool_shortage(arch: Arch, precision: Precision, work: Workload, num_blocks: int, why: str) -> str:
    """The text that one sequence does not fit the requested KV pool."""
    size = block_bytes(arch, precision, work.block_size, work.num_ranks, work.draft)
    needed = blocks_per_seq(arch, work.max_model_len, work) * size
    longest, least = longest_in_pool(arch, work, num_blocks), blocks_per_seq(arch, MIN_MODEL_LEN, work) * size
    return (
        f"one sequence of max_model_len {work.max_model_len} needs {format_bytes(needed)} of KV cache"
        f"{of_each_rank(work)}, but there are "
        f"{format_bytes(num_blocks * size)} ({why}): "
        + (
            f"max_model_len {longest} would fit"
            if longest >= MIN_MODEL_LEN
            else f"at least {format_bytes(least)} are needed"
        )
        + _with_8_bits(arch, precision, work, num_blocks * size, longest)
    )


def _with_8_bits(arch: Arch, precision: Precision, work: Workload, kv_bytes: int, longest: int) -> str:
    """The context that would fit with K and V in 8 bits, as text; empty unless it is longer than `longest`."""
    size = block_bytes(arch, replace(precision, kv_cache=SHORT_KV), work.block_size, work.num_ranks)
    length = longest_in_pool(arch, work, kv_bytes // size)
    return f", and {length} with --kv-cache-dtype {SHORT_KV}" if length >= MIN_MODEL_LEN and length > longest else ""


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number from 0 to `limit` that fits. 0 must fit, and all numbers below one that fits."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
