"""Every op on the shapes of the benchmarks' models: its call, the bytes that it must read or write, and the operations
that it must do. Each case owns fresh random inputs, and weights larger than any cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from inferd.kernels.ops import (
    experts,
    gated_delta,
    gated_mul,
    head_gate,
    linear,
    linear_int4,
    linear_int8,
    mamba2,
    paged_attention,
    rms_norm,
    rope,
    sample,
    short_conv,
    top_k_top_p,
)
from inferd.kernels.ops.paged_attention import AttentionBatch
from inferd.kernels.ops.states import StateRows
from inferd.kernels.registry import Op

ROWS = (1, 2, 8, 32, 256)
LINEARS = {
    "1b qkv": (2048, 3072),
    "1b o": (2048, 2048),
    "1b gate_up": (2048, 16_384),
    "1b down": (8192, 2048),
    "1b head": (2048, 32_000),
    "0.6b qkv": (1024, 4096),
    "0.6b o": (2048, 1024),
    "0.6b gate_up": (1024, 6144),
    "0.6b down": (3072, 1024),
    "0.6b head": (1024, 151_936),
}
"""(in, out) of the products of the 1B and the 0.6B shape."""
CONTEXTS = (256, 1024, 4096)
BATCHES = (1, 8, 32)
CHUNKS = (64, 256)
HEADS = {"1b": (32, 8, 64), "0.6b": (16, 8, 128)}
"""Query heads, KV heads, head size."""
_BLOCK_SIZE = 16
_COLD_BYTES = 256 << 20
"""Total size of a weight's copies that are used in turn, so that each use reads memory."""
_MAX_COPIES = 32
_DTYPE = torch.bfloat16

DELTA = (16, 32, 128, 128)
"""Key heads, value heads and their sizes in Qwen3-Next and Qwen3.5-4B."""
EXPERTS, CHOSEN, EXPERTS_SIZE = 128, 8, 2048
"""Experts of a layer, those of a token, and the size of their results in Qwen3-30B-A3B."""
MAMBA = (1, 48, 128, 64)
"""Groups, heads and the sizes of a state in Granite 4 Tiny."""
PROMPT = 256
"""Tokens of a prompt of recurrent layers."""

Apply = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One op on one shape. `make` prepares the op's chosen implementation once and returns the call."""

    op: Op[Any, Any]
    shape: str
    precision: str
    num_bytes: float
    num_flops: float
    make: Callable[[], Callable[[], object]]


def all_cases(*, quick: bool) -> Iterator[Case]:
    """Every case; with `quick` one or two small ones of each op."""
    yield from linear_cases(ROWS[:2] if quick else ROWS, {"small": (256, 256)} if quick else LINEARS)
    yield from attention_cases(BATCHES[:1] if quick else BATCHES, CONTEXTS[:1] if quick else CONTEXTS)
    yield from small_cases(ROWS[:1] if quick else (1, 32, 256))
    yield from recurrent_cases(ROWS[:1] if quick else (1, 8, 32), is_quick=quick)


# -- linears -----------------------------------------------------------------------------------------------------------


def linear_cases(rows: Sequence[int], shapes: dict[str, tuple[int, int]]) -> Iterator[Case]:
    """Linears. A product's bytes are its weight's; its operations are 2 for each weight and row."""
    kinds: tuple[tuple[str, Op[Any, Any], float, Callable[[Tensor], Apply]], ...] = (
        ("bf16", linear.LINEAR, 2.0, _bind_dense),
        ("int8", linear_int8.LINEAR_INT8, 1 + 2 / 64, _bind_int8),
        ("int4", linear_int4.LINEAR_INT4, 0.5 + 4 / linear_int4.GROUP_SIZE, _bind_int4),
    )
    for (name, (in_size, out_size)), (precision, op, weight_bytes, bind) in itertools.product(shapes.items(), kinds):
        num_bytes = in_size * out_size * weight_bytes
        for num_rows in rows:
            make = partial(_make_linear, bind, in_size, out_size, num_rows, num_bytes)
            num_flops = 2.0 * in_size * out_size * num_rows
            yield Case(op, f"{name} {in_size}x{out_size}, {num_rows} rows", precision, num_bytes, num_flops, make)


def _bind_dense(weight: Tensor) -> Apply:
    return linear.linear(weight, None)


def _bind_int8(weight: Tensor) -> Apply:
    q = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
    scales = torch.full((weight.shape[0], weight.shape[1] // 64), 0.01, dtype=torch.bfloat16)
    return linear_int8.linear_int8(q, scales, None, _DTYPE)


def _bind_int4(weight: Tensor) -> Apply:
    q = torch.randint(0, 16, weight.shape, dtype=torch.uint8)
    scales = torch.full((weight.shape[0], weight.shape[1] // linear_int4.GROUP_SIZE), 0.01, dtype=torch.float16)
    return linear_int4.linear_int4(q, scales, None, _DTYPE, minimums=-8 * scales)


def _make_linear(
    bind: Callable[[Tensor], Apply], in_size: int, out_size: int, num_rows: int, num_bytes: float
) -> Callable[[], object]:
    weight = torch.randn(out_size, in_size, dtype=_DTYPE)
    copies = min(_MAX_COPIES, max(1, round(_COLD_BYTES / num_bytes)))
    applies = itertools.cycle([bind(weight.clone()) for _ in range(copies)])
    x = torch.randn(num_rows, in_size, dtype=_DTYPE)
    return lambda: next(applies)(x)


# -- attention ---------------------------------------------------------------------------------------------------------


def attention_cases(batches: Sequence[int], contexts: Sequence[int]) -> Iterator[Case]:
    """Decodes, whose bytes are the KV of all rows, and chunks of one prompt behind `context` tokens."""
    for (name, heads), context in itertools.product(HEADS.items(), contexts):
        for num_rows in batches:
            rows = [(context - 1, 1)] * num_rows
            yield _attention_case(f"{name} decode, {num_rows} x {context}", heads, rows)
        for chunk in CHUNKS if len(batches) > 1 else CHUNKS[:1]:
            yield _attention_case(f"{name} chunk of {chunk} behind {context}", heads, [(context, chunk)])


def _attention_case(shape: str, heads: tuple[int, int, int], rows: list[tuple[int, int]]) -> Case:
    num_heads, num_kv_heads, head_dim = heads
    kv_lens = [start + count for start, count in rows]
    # A query sees all positions up to its own. Each pair is 2 * head_dim operations for the score and as many for V.
    num_pairs = sum(count * start + count * (count + 1) // 2 for start, count in rows)
    num_bytes = 2.0 * sum(kv_lens) * num_kv_heads * head_dim * _DTYPE.itemsize
    make = partial(_make_attention, heads, rows)
    return Case(paged_attention.PAGED_ATTENTION, shape, "bf16", num_bytes, 4.0 * num_pairs * num_heads * head_dim, make)


def _make_attention(heads: tuple[int, int, int], rows: list[tuple[int, int]]) -> Callable[[], object]:
    num_heads, num_kv_heads, head_dim = heads
    width = max(-(-(start + count) // _BLOCK_SIZE) for start, count in rows)
    layer_bytes = len(rows) * width * _BLOCK_SIZE * 2 * num_kv_heads * head_dim * _DTYPE.itemsize
    num_layers = min(_MAX_COPIES, max(1, round(_COLD_BYTES / layer_bytes)))
    pool = (len(rows) * width, 2, num_kv_heads, _BLOCK_SIZE, head_dim)
    layers = itertools.cycle([torch.randn(pool).to(_DTYPE) for _ in range(num_layers)])
    tables = torch.randperm(len(rows) * width).reshape(len(rows), width).to(torch.int32)
    batch = AttentionBatch.build(rows, tables, _BLOCK_SIZE, "cpu")
    q = torch.randn(batch.num_tokens, num_heads, head_dim).to(_DTYPE)
    return lambda: paged_attention.paged_attention(q, next(layers), batch, head_dim**-0.5)


# -- the rest ----------------------------------------------------------------------------------------------------------


def small_cases(rows: Sequence[int]) -> Iterator[Case]:
    """The small operations between the products, by bytes read and written; operations are not counted."""
    for num_rows in rows:
        for size in (2048, 1024):
            make = partial(_make_norm, num_rows, size)
            yield Case(rms_norm.RMS_NORM, f"{num_rows} x {size}", "bf16", 4.0 * num_rows * size, 0.0, make)
        for name, heads in HEADS.items():
            num_heads, num_kv_heads, head_dim = heads
            num_bytes = 4.0 * num_rows * (num_heads + 2 * num_kv_heads) * head_dim
            make = partial(_make_rope, heads, num_rows, name == "0.6b")
            yield Case(rope.ROPE_AND_CACHE, f"{name}, {num_rows} tokens", "bf16", num_bytes, 0.0, make)
        make = partial(_make_gate, num_rows)
        yield Case(gated_mul.SILU_MUL, f"{num_rows} x 2*8192", "bf16", 6.0 * num_rows * 8192, 0.0, make)
        shape, num_bytes = f"{num_rows} x {CHOSEN} of {EXPERTS}", 4.0 * num_rows * (EXPERTS + 3 * CHOSEN)
        yield Case(experts.ROUTE, shape, "fp32", num_bytes, 0.0, partial(_make_route, num_rows))
        shape, num_bytes = f"{num_rows} x {CHOSEN} x {EXPERTS_SIZE}", 2.0 * num_rows * (CHOSEN + 1) * EXPERTS_SIZE
        yield Case(experts.ADD, shape, "bf16", num_bytes, 0.0, partial(_make_add, num_rows))
    for num_rows in [count for count in rows if count <= 32]:
        for vocab_size in (32_000, 151_936):
            make = partial(_make_sample, num_rows, vocab_size)
            yield Case(sample.SAMPLE, f"{num_rows} x {vocab_size}", "fp32", 4.0 * num_rows * vocab_size, 0.0, make)
        for top_k, top_p in ((50, 1.0), (0, 0.9), (50, 0.9)):
            shape = f"{num_rows} x 151936, top-k {top_k}, top-p {top_p}"
            make = partial(_make_cut, num_rows, top_k, top_p)
            yield Case(top_k_top_p.TOP_K_TOP_P, shape, "fp32", 16.0 * num_rows * 151_936, 0.0, make)


def _make_norm(num_rows: int, size: int) -> Callable[[], object]:
    x, weight = torch.randn(num_rows, size).to(_DTYPE), torch.ones(size, dtype=_DTYPE)
    return lambda: rms_norm.rms_norm(x, weight, 1e-5)


def _make_rope(heads: tuple[int, int, int], num_tokens: int, has_norm: bool) -> Callable[[], object]:
    num_heads, num_kv_heads, head_dim = heads
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(_DTYPE)
    q, k, v = torch.tensor_split(qkv, (num_heads, num_heads + num_kv_heads), dim=1)
    slots = torch.arange(num_tokens)
    kv = torch.zeros(-(-num_tokens // _BLOCK_SIZE), 2, num_kv_heads, _BLOCK_SIZE, head_dim, dtype=_DTYPE)
    norm = torch.ones(head_dim, dtype=_DTYPE) if has_norm else None
    cos_sin = torch.rand(num_tokens, head_dim)
    return lambda: rope.rope_and_cache(q, k, v, cos_sin, slots, slots, kv, norm, norm, 1e-6)


def _make_gate(num_rows: int) -> Callable[[], object]:
    gate_up = torch.randn(num_rows, 2 * 8192).to(_DTYPE)
    return lambda: gated_mul.silu_mul(gate_up)


def _make_route(num_rows: int) -> Callable[[], object]:
    logits, loads, router = torch.randn(num_rows, EXPERTS), torch.zeros(EXPERTS).long(), experts.Router(CHOSEN, True)
    return lambda: experts.route(logits, router, loads=loads).weights


def _make_add(num_rows: int) -> Callable[[], object]:
    routing = experts.route(torch.randn(num_rows, EXPERTS), experts.Router(CHOSEN, True))
    parts = torch.randn(num_rows * CHOSEN, EXPERTS_SIZE, dtype=_DTYPE)
    return lambda: experts.add_up(parts, routing)


def _make_sample(num_rows: int, vocab_size: int) -> Callable[[], object]:
    scores, seeds = torch.randn(num_rows, vocab_size), torch.arange(num_rows)
    return lambda: sample.sample(scores, seeds, seeds + 100)


def _make_cut(num_rows: int, top_k: int, top_p: float) -> Callable[[], object]:
    """A cut of a copy, because it works in place. The copy takes two of the four passes over memory."""
    scores = torch.randn(num_rows, 151_936) * 3
    scores -= scores.amax(dim=-1, keepdim=True)
    work = scores.clone()
    cuts = top_k_top_p.Cuts(
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), top_p, dtype=torch.float64),
        torch.full((num_rows,), -torch.inf, dtype=torch.float64),
    )
    return lambda: top_k_top_p.top_k_top_p(work.copy_(scores), cuts)


# -- recurrent layers --------------------------------------------------------------------------------------------------


def recurrent_cases(rows: Sequence[int], *, is_quick: bool = False) -> Iterator[Case]:
    """The operations of recurrent layers: decodes and one prompt. Bytes are those of tokens, and of states both ways. A
    prompt takes longer, because a state waits for the one before it."""
    for name, lens in (*((f"{count} rows", [1] * count) for count in rows), (f"prompt of {PROMPT}", [PROMPT])):
        if is_quick and len(lens) < max(lens):
            continue
        for op, call, widths, state_bytes in (
            (gated_delta.GATED_DELTA, _make_delta, (4 * 2048, 4096, 2 * 32), 8.0 * 32 * 128 * 128),
            (mamba2.MAMBA2, _make_mamba, (48 * 64 + 2 * 128, 2 * 48 * 64, 48), 8.0 * 48 * 128 * 64),
            (short_conv.SHORT_CONV, _make_conv, (8192, 8192), 4.0 * 3 * 8192),
            (head_gate.NORM_SILU_GATE, _make_head_gate, (4096, 4096, 4096), 0.0),
        ):
            num_bytes = 2.0 * sum(lens) * sum(widths) + len(lens) * state_bytes
            yield Case(op, name, "bf16", num_bytes, 0.0, partial(call, lens))


def _state_rows(lens: Sequence[int]) -> StateRows:
    ends = list(itertools.accumulate(lens, initial=0))
    positions = torch.cat([torch.arange(1, 1 + count) for count in lens])
    return StateRows(torch.tensor(ends, dtype=torch.int32), positions, torch.arange(len(lens)))


def _make_delta(lens: Sequence[int]) -> Callable[[], object]:
    key_heads, heads, key_dim, value_dim = DELTA
    rows, num_tokens = _state_rows(lens), sum(lens)
    qkv = torch.randn(num_tokens, 2 * key_heads * key_dim + heads * value_dim).to(_DTYPE)
    gates = gated_delta.Gates(*torch.randn(2, num_tokens, heads).to(_DTYPE), *torch.randn(2, heads))
    state = torch.randn(len(lens), heads, key_dim, value_dim)
    return lambda: gated_delta.gated_delta(qkv, gates, state, rows)


def _make_mamba(lens: Sequence[int]) -> Callable[[], object]:
    groups, heads, state_size, head_dim = MAMBA
    rows, num_tokens = _state_rows(lens), sum(lens)
    xbc = torch.randn(num_tokens, heads * head_dim + 2 * groups * state_size).to(_DTYPE)
    dt, weights = torch.randn(num_tokens, heads).to(_DTYPE), mamba2.Weights(*torch.randn(3, heads))
    state = torch.randn(len(lens), heads, state_size, head_dim)
    return lambda: mamba2.mamba2(xbc, dt, weights, state, rows)


def _make_conv(lens: Sequence[int]) -> Callable[[], object]:
    rows, x, weight = _state_rows(lens), torch.randn(sum(lens), 8192).to(_DTYPE), torch.randn(4, 8192)
    state = torch.randn(len(lens), 3, 8192).to(_DTYPE)
    return lambda: short_conv.short_conv(x, weight, state, rows, has_silu=True)


def _make_head_gate(lens: Sequence[int]) -> Callable[[], object]:
    x, gate = torch.randn(2, sum(lens), 32, 128).to(_DTYPE)
    return lambda: head_gate.norm_silu_gate(x, gate, torch.ones(128), 1e-6)
