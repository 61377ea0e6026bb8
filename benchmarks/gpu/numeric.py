"""One small numeric check of each op that has a Triton kernel, against its plain implementation on the same numbers in
float32. Whole numbers are compared exactly.

On a GPU the kernel itself runs; without one, Triton's interpreter with TRITON_INTERPRET=1:

    TRITON_INTERPRET=1 python -m benchmarks.gpu.numeric

A function here makes each op's call and arguments; shapes are odd, so that masks matter. It sums up in one number for a
table what `tests/kernels` proves at length.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, CannotRunError
from benchmarks.gpu.points import Case, Trial
from inferd.kernels import gpu, registry
from inferd.kernels.ops.logit_rules import ENDS, MAX_PREFIX, MAX_WORDS, RuleState
from inferd.kernels.ops.paged_attention import LIBRARIES
from inferd.kernels.ops.top_k_top_p import Cuts

TRITON = "triton"
ROUNDED = 2.0**-8
"""Largest error by norm: results rounded to bf16, at most 2^-9 each, and one more such rounding before."""
EXACT = 0.0
WEIGHTS = 5e-6
"""Largest error by norm of experts' weights, which are fp32. It is less than the share of one whole number that
differs."""
ROUNDED_TWICE = 2 * ROUNDED
"""Largest error by norm if only one side rounds after a norm."""
ONE_STEP = 0.04
"""Largest error by norm for e4m3, whose steps are an eighth: that of an eighth of all numbers quantized to their
neighbour."""


class NotOfferedError(Exception):
    """Why an op cannot be checked: it does not exist, or has no Triton kernel that can run."""


@dataclass(frozen=True, slots=True)
class Numeric:
    """A call, its arguments (in bf16 if they have the model's dtype), and its largest allowed error."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    tolerance: float = ROUNDED
    widens: bool = True
    """Whether the reference gets the arguments in float32."""
    op: str = ""
    """Name of the op; empty: the name of the check."""
    implementation: str = TRITON


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check, or the reason why it did not run."""

    max_err: float | None
    tol: float | None
    reason: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.max_err is not None and (self.tol is None or not self.max_err <= self.tol)


Make = Callable[["Inputs"], Numeric]


class Inputs:
    """Random tensors on a device; the same in every run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(0)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype).to(self.device)

    def randint(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator).to(self.device)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator).to(self.device)


def _op(folder: str, name: str) -> Callable[..., Any]:
    """A function of an op's package, which may be missing."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(f"inferd.kernels.ops.{folder}"), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise NotOfferedError(f"inferd.kernels.ops.{folder} has no {name}") from error
    return found


def _of_rows(folder: str, name: str, *, residual: bool = False, weights: int = 0, half: bool = False) -> Make:
    """An op on rows: x [, residual] [, weight [, bias]] [, eps]."""

    def make(inputs: Inputs) -> Numeric:
        size = 200
        rows = [inputs.randn(5, 2 * size if half else size) for _ in range(1 + residual)]
        vectors = [inputs.randn(size) for _ in range(weights)]
        tolerance = ONE_STEP if name.endswith("fp8") else ROUNDED
        return Numeric(_op(folder, name), (*rows, *vectors, *([1e-5] if weights else [])), tolerance)

    return make


def _limited_mul(inputs: Inputs) -> Numeric:
    return Numeric(functools.partial(_op("gated_mul", "limited_mul"), limit=0.8, alpha=1.7), (inputs.randn(5, 400),))


def _scaled_add(inputs: Inputs) -> Numeric:
    return Numeric(_op("scaled_add", "added"), (inputs.randn(5, 200), inputs.randn(5, 200)))


def _rope(inputs: Inputs) -> Numeric:
    tokens, heads, kv_heads, size = 7, 6, 2, 48
    angles = inputs.randn(50, size // 2, dtype=torch.float32)
    rope = _op("rope", "rope_and_cache")

    def call(q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor) -> tuple[Tensor, Tensor]:
        pool = torch.zeros(3, 2, kv_heads, 16, size, dtype=q.dtype, device=q.device)
        cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        return rope(q, k, v, cos_sin, positions, slots, pool, q_norm, k_norm, 1e-6), pool

    positions, slots = inputs.randint(0, 50, tokens), inputs.permutation(48)[:tokens]
    rows = (inputs.randn(tokens, heads, size), *(inputs.randn(tokens, kv_heads, size) for _ in range(2)))
    return Numeric(call, (*rows, inputs.randn(size), inputs.randn(size)))


def _paged_attention(*, is_deterministic: bool) -> Make:
    """Decodes and a chunk over two tiles, one of them barely begun."""

    def make(inputs: Inputs) -> Numeric:
        paged = importlib.import_module("inferd.kernels.ops.paged_attention")
        rows, block, width, kv_heads, size = ((0, 1), (256, 1), (300, 1), (250, 20)), 16, 20, 2, 32
        tables = inputs.permutation(len(rows) * width).reshape(len(rows), width).to(torch.int32)

        def call(q: Tensor, kv: Tensor) -> Any:
            batch = paged.AttentionBatch.build(rows, tables, block, q.device, is_deterministic=is_deterministic)
            sinks = torch.linspace(-2.0, 2.0, q.shape[1], device=q.device)
            return tuple(paged.paged_attention(q, kv, batch, size**-0.5, sinks=own) for own in (None, sinks))

        tokens = sum(count for _, count in rows)
        kv = inputs.randn(len(rows) * width, 2, kv_heads, block, size)
        return Numeric(call, (inputs.randn(tokens, 6, size), kv), op="paged_attention")

    return make


def _attention_library(name: str) -> Make:
    """Decodes and chunks, with a head and a window that every library takes. The reference, which gets float32, needs
    lengths on the host. Steps are recorded, but FlashInfer takes chunks only otherwise, and on few GPUs."""

    def make(inputs: Inputs) -> Numeric:
        paged = importlib.import_module("inferd.kernels.ops.paged_attention")
        rows, block, width, kv_heads, size = ((0, 1), (256, 1), (700, 1), (250, 200), (0, 90)), 32, 25, 2, 128
        tables = inputs.permutation(len(rows) * width).reshape(len(rows), width).to(torch.int32)
        is_limited = name == "flashinfer"

        def call(q: Tensor, kv: Tensor) -> tuple[Tensor, ...]:
            def attend(window: int | None, chosen: slice) -> Tensor:
                batch = paged.AttentionBatch.build(
                    rows[chosen], tables[chosen], block, q.device, is_deterministic=False
                )
                if q.dtype != torch.float32 and (batch.is_decode or not is_limited):
                    batch = dataclasses.replace(batch, host_seq_lens=None)
                result: Tensor = paged.paged_attention(q[: batch.num_tokens], kv, batch, size**-0.5, window)
                return result

            steps = [slice(0, 3)]
            if not is_limited or gpu.properties_of(q.device).has_tensor_memory:
                steps.append(slice(None))
            return tuple(attend(window, chosen) for window in (None, 100) for chosen in steps)

        tokens = sum(count for _, count in rows)
        kv = inputs.randn(len(rows) * width, 2, kv_heads, block, size)
        return Numeric(call, (inputs.randn(tokens, 8, size), kv), op="paged_attention", implementation=name)

    return make


def _attention_fp8(inputs: Inputs) -> Numeric:
    """Decodes and a draft over K and V in e4m3, which are the same for the reference."""
    paged = importlib.import_module("inferd.kernels.ops.paged_attention")
    quantize_heads = importlib.import_module("inferd.kernels.ops.kv_format").quantize_heads
    rows, block, width, kv_heads, size = ((0, 1), (256, 1), (300, 1), (250, 4)), 16, 20, 2, 64
    tables = inputs.permutation(len(rows) * width).reshape(len(rows), width).to(torch.int32)

    def call(q: Tensor, kv: Tensor, scales: Tensor) -> Any:
        batch = paged.AttentionBatch.build(rows, tables, block, q.device, is_deterministic=False)
        sinks = torch.linspace(-2.0, 2.0, q.shape[1], device=q.device)
        attend = functools.partial(paged.paged_attention, q, kv, batch, size**-0.5, kv_scales=scales)
        return tuple(attend(sinks=own) for own in (None, sinks))

    pool = inputs.randn(len(rows) * width, 2, kv_heads, block, size)
    q = inputs.randn(sum(count for _, count in rows), 6, size)
    return Numeric(call, (q, *quantize_heads(pool, torch.float8_e4m3fn)), widens=False, op="paged_attention")


def _linear(*, is_invariant: bool) -> Make:
    """Few rows, and with results in fp32 also more than the kernel for few rows takes."""

    def make(inputs: Inputs) -> Numeric:
        linear = _op("linear", "linear")
        choices = _op("linear", "Choices")(is_invariant=is_invariant)
        implementation = "triton_invariant" if is_invariant else "triton_few_rows"

        def call(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
            wide = linear(weight, bias, choices, torch.float32)
            return linear(weight, bias, choices)(x[:3]), wide(x[:3]), wide(x)

        arguments = (inputs.randn(20, 260), inputs.randn(112, 260), inputs.randn(112))
        return Numeric(call, arguments, op="linear", implementation=implementation)

    return make


class _Dense:
    """A layer that keeps its weight as it is."""

    bias: Tensor | None = None
    scales: Tensor | None = None

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


def _experts_route(inputs: Inputs) -> Numeric:
    """Softmax, and biased sigmoids of groups. Places, rows, offsets and loads must be equal."""
    route, router = _op("experts", "route"), _op("experts", "Router")
    logits = inputs.randn(70, 60, dtype=torch.float32)
    logits[3, 20] = logits[3, 10] = 9.0
    bias, scales = (inputs.randn(60, dtype=torch.float32) for _ in range(2))

    def call(rows: Tensor) -> tuple[Any, ...]:
        loads = torch.zeros(60, dtype=torch.int64, device=rows.device)
        groups = router(6, True, has_sigmoid=True, num_groups=5, num_chosen_groups=2, factor=2.5, added=1e-20)
        return route(rows, router(10, False), None, loads, scales), route(rows, groups, bias, loads), loads

    return Numeric(call, (logits,), WEIGHTS)


def _experts_add(inputs: Inputs) -> Numeric:
    route, router, add_up = (_op("experts", name) for name in ("route", "Router", "add_up"))
    routing = route(inputs.randn(7, 20, dtype=torch.float32), router(6, True))
    return Numeric(lambda parts: add_up(parts, routing), (inputs.randn(42, 1100),))


def _experts(inputs: Inputs) -> Numeric:
    bind, route, router = (_op("experts", name) for name in ("bind_experts", "route", "Router"))
    routing = route(inputs.randn(90, 5, dtype=torch.float32), router(2, True))

    def call(x: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = bind([_Dense(weight) for weight in weights], x.device, x.dtype)(x, routing, True)
        return out

    return Numeric(call, (inputs.randn(90, 200), inputs.randn(5, 72, 200)))


def _experts_integers(inputs: Inputs) -> Numeric:
    """The reference quantizes activations, and integers up to 127 exactly."""
    bind, route, router = (_op("experts", name) for name in ("bind_experts", "route", "Router"))
    linear, quantize = _op("linear_int4", "linear_int4"), _op("linear_int4", "quantize_int4")
    routing = route(inputs.randn(90, 5, dtype=torch.float32), router(2, True))
    quantized = [quantize(inputs.randn(72, 320)) for _ in range(5)]
    x = inputs.randint(-127, 128, 90, 320)
    x[:, ::32] = 127

    def call(rows: Tensor) -> Tensor:
        layers = [linear(q, scales, None, rows.dtype, minimums=minimums) for q, scales, minimums in quantized]
        out: Tensor = bind(layers, rows.device, rows.dtype)(rows, routing, True)
        return out

    return Numeric(call, (x.to(torch.bfloat16),), op="experts_product", implementation="triton_integers")


def _fused(name: str, *, norm: bool = False, residual: bool = False, gate: bool = False) -> Make:
    """A linear with its neighbouring operations."""

    def make(inputs: Inputs) -> Numeric:
        call = _op("linear.fused", name)
        x, weight, vector = inputs.randn(3, 260), inputs.randn(112, 260) / 16, inputs.randn(260)
        if residual:
            return Numeric(lambda x, w, r: call(x, w, None, r), (x, weight, inputs.randn(3, 112)), op=name)
        if not gate:
            return Numeric(lambda x, n, w: call(x, n, 1e-5, w), (x, vector, weight), ROUNDED_TWICE, op=name)
        if norm:
            return Numeric(lambda x, w, n: call(x, w, "silu", n, 1e-5), (x, weight, vector), ROUNDED_TWICE, op=name)
        return Numeric(lambda x, w: call(x, w, "gelu"), (x, weight), op=name)

    return make


def _linear_fp8(num_rows: int, implementation: str = TRITON) -> Make:
    """e4m3 holds the activations exactly: the kernel for few rows does not quantize them."""

    def make(inputs: Inputs) -> Numeric:
        linear, quantize = _op("linear_fp8", "linear_fp8"), _op("linear_fp8", "quantize_weight")
        q, scales = quantize(inputs.randn(112, 256))
        x = (inputs.randn(num_rows, 256) * 50).to(torch.float8_e4m3fn).to(torch.bfloat16)
        x[:, ::128] = 448.0

        def call(rows: Tensor) -> Tensor:
            result: Tensor = linear(q, scales, None, rows.dtype)(rows)
            return result

        return Numeric(call, (x,), widens=False, implementation=implementation)

    return make


def _linear_int(name: str, num_rows: int) -> Make:
    """The reference quantizes activations, and integers up to 127 exactly."""

    def make(inputs: Inputs) -> Numeric:
        linear, quantize = _op(name, name), _op(name, name.replace("linear", "quantize"))
        q, scales, *minimums = quantize(inputs.randn(112, 320))
        x = inputs.randint(-127, 128, num_rows, 320)
        x[:, ::32] = 127

        def call(rows: Tensor) -> tuple[Tensor, ...]:
            offsets = {"minimums": minimums[0]} if minimums else {}
            wide = linear(q, scales, None, rows.dtype, **offsets, out_dtype=torch.float32)
            return linear(q, scales, None, rows.dtype, **offsets)(rows), wide(rows)

        return Numeric(call, (x.to(torch.bfloat16),), op=name)

    return make


def _lora(inputs: Inputs) -> Numeric:
    """Rows of three adapters, of none and of padding, for a matrix of two parts of which one adapter leaves one."""
    weights_type: Any = _op("lora", "LoraWeights")
    add_lora = _op("lora", "add_lora")
    made = {}
    for dtype in (torch.bfloat16, torch.float32):
        made[dtype] = weights_type.empty(3, 20, 200, (96, 70), dtype, inputs.device)
    for adapter, part, rank in ((0, 0, 20), (0, 1, 3), (1, 1, 16), (2, 0, 7), (2, 1, 20)):
        a, b = inputs.randn(rank, 200).cpu(), inputs.randn((96, 70)[part], rank).cpu()
        for weights in made.values():
            weights.put(adapter, part, a, b, 0.1)
    slots = torch.tensor([0, 1, 2, 3, -1, 2, *[0] * 20]).to(inputs.device)
    adapters = torch.tensor([1, -1, 0, 2]).to(inputs.device)

    def call(y: Tensor, x: Tensor) -> Tensor:
        y = y.clone()
        add_lora(y, x, made[y.dtype], slots, adapters)
        return y

    return Numeric(call, (inputs.randn(26, 166), inputs.randn(26, 200)))


def _sample(inputs: Inputs) -> Numeric:
    """Ids must be equal."""
    scores = inputs.randn(6, 1003, dtype=torch.float32) * 3
    seeds, positions = inputs.randint(0, 2**53, 6), inputs.randint(0, 2**40, 6)
    return Numeric(_op("sample", "sample"), (scores, seeds, positions), EXACT)


def _top_k_top_p(inputs: Inputs) -> Numeric:
    """Every cut alone and all together, on rows of two chunks. The tokens that stay must be equal."""
    top_k_top_p, cuts_type = _op("top_k_top_p", "top_k_top_p"), _op("top_k_top_p", "Cuts")
    scores = inputs.randn(5, 1500, dtype=torch.float32) * 3
    scores -= scores.amax(dim=-1, keepdim=True)
    never = -math.inf
    asked = ([40, 0, 0, 0, 300], [1.0, 0.9, 1.0, 1.0, 0.99], [never, never, -4.0, never, -6.0])
    dtypes = (torch.int64, torch.float64, torch.float64)
    cuts = cuts_type(*(torch.tensor(row, dtype=d).to(inputs.device) for row, d in zip(asked, dtypes, strict=True)))

    def call(rows: Tensor) -> Tensor:
        kept = rows.clone()
        top_k_top_p(kept, cuts)
        return kept > never

    return Numeric(call, (scores,), EXACT)


def _mask_tokens(inputs: Inputs) -> Numeric:
    """Masks in another order than their rows, one without a row, and a vocabulary that ends within a word."""
    mask_tokens = _op("mask_tokens", "mask_tokens")
    masks = inputs.randint(-(2**31), 2**31, 4, 32).to(torch.int32)
    row_of = torch.tensor([3, -1, 0, 4]).to(inputs.device)

    def call(rows: Tensor) -> Tensor:
        kept = rows.clone()
        mask_tokens(kept, masks, row_of)
        return kept > -math.inf

    return Numeric(call, (inputs.randn(5, 1003, dtype=torch.float32),), EXACT)


def _argmax(inputs: Inputs) -> Numeric:
    """Rows with a tie, which the lowest id wins, and a row without an allowed token."""
    logits = inputs.randn(6, 1003)
    logits[1, 700] = logits[1, 40] = 9.0
    logits[2, 5] = float("nan")
    argmax = _op("argmax", "argmax")

    def call(rows: Tensor) -> tuple[Tensor, Tensor]:
        ids, is_none = argmax(rows)
        return ids.masked_fill(is_none, 0), is_none

    return Numeric(call, (logits,), EXACT)


def _draw(inputs: Inputs) -> Numeric:
    """Greedy rows and others, with and without cuts, a padding row, and a row without an allowed token."""
    logits, temperatures = inputs.randn(5, 3003, dtype=torch.float32), torch.tensor([0.0, 0.8, 1.3]).to(inputs.device)
    logits[3, 9] = float("nan")
    slots, positions = torch.tensor([2, 0, -1, 1, 1]).to(inputs.device), inputs.randint(0, 1000, 5)
    seeds = inputs.randint(0, 1000, 3)
    fractions = torch.tensor([[1.0, 0.9, 1.0], [-torch.inf, -torch.inf, -4.0]], dtype=torch.float64)
    top_p, log_min_p = fractions.to(inputs.device).unbind()
    cuts = Cuts(torch.tensor([0, 50, 7]).to(inputs.device), top_p.clone(), log_min_p.clone())
    draw = _op("decode_draw", "draw")

    def call(rows: Tensor) -> tuple[Tensor, Tensor]:
        ids, is_none = draw(rows, slots, temperatures, seeds, positions, cuts)
        return ids.masked_fill(is_none, 0), is_none

    return Numeric(call, (logits,), EXACT)


def _rules(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, RuleState]:
    """(slots of 5 rows, positions, kinds, state) of slots with no rule, some, and all. One row is padding."""
    device, size = inputs.device, 3003
    state = RuleState(
        penalties=torch.tensor([[1.3, 0.5, 0.2]] * 4).to(device),
        first_free=torch.tensor([900] * 4).to(device),
        bias=inputs.randn(4, size, dtype=torch.float32),
        marks=inputs.randint(0, 3, 4, size).to(torch.int32),
        prefixes=inputs.randint(0, 2, 4, MAX_WORDS, MAX_PREFIX).to(torch.int32) - 1,
        last_ids=inputs.randint(0, size, 4, MAX_WORDS).to(torch.int32),
        tails=torch.zeros(4, MAX_PREFIX, dtype=torch.int32).to(device),
    )
    state.marks[:, ::7] += ENDS
    slots, kinds = torch.tensor([3, 0, -1, 2, 1]).to(device), torch.tensor([0, 1, 2, 7], dtype=torch.int32).to(device)
    return slots, inputs.randint(0, 1000, 5), kinds, state


def _logit_rules(inputs: Inputs) -> Numeric:
    logits, given = inputs.randn(5, 3003, dtype=torch.float32), _rules(inputs)
    logits[3, 9] = float("nan")
    run = _op("logit_rules", "apply_rules")

    def call(rows: Tensor) -> tuple[Tensor, Tensor]:
        changed = rows.clone()
        status = run(changed, *given)
        return changed.nan_to_num(7.0), status

    return Numeric(call, (logits,), EXACT)


def _record_drawn(inputs: Inputs) -> Numeric:
    drawn, (slots, positions, kinds, state) = inputs.randint(0, 3003, 5), _rules(inputs)
    is_none = torch.tensor([False, True, True, False, False]).to(inputs.device)
    status = torch.tensor([1, 0, 1, 2, 1], dtype=torch.int32).to(inputs.device)
    run = _op("logit_rules", "record_drawn")

    def call() -> tuple[Tensor, Tensor, Tensor]:
        after = RuleState(*(tensor.clone() for tensor in state))
        return run(drawn, is_none, status, slots, positions, kinds, after), after.marks, after.tails

    return Numeric(call, (), EXACT)


def _step_inputs(inputs: Inputs) -> Numeric:
    """Three of five slots and a padding row, with blocks of two groups."""
    ids, tables = inputs.randint(0, 1000, 5, 64), inputs.permutation(2 * 5 * 4).reshape(2, 5, 4).to(torch.int32)
    slots, positions = torch.tensor([3, 0, -1, 4]).to(inputs.device), torch.tensor([17, 0, 0, 63]).to(inputs.device)
    run = _op("step_inputs", "step_inputs")

    def call() -> list[Tensor]:
        made = run(slots, positions, ids, tables, 16, 99)
        entries = torch.arange(made.block_tables.shape[2], device=inputs.device)
        is_used = entries[None] * 16 < made.seq_lens[:, None]
        return [made.token_ids, made.write_slots, made.seq_lens, made.block_tables.masked_fill(~is_used[None], 0)]

    return Numeric(call, (), EXACT)


def _write_drawn(inputs: Inputs) -> Numeric:
    drawn, ids = inputs.randint(0, 1000, 4), inputs.randint(0, 1000, 5, 64)
    slots, positions = torch.tensor([3, 0, -1, 4]).to(inputs.device), torch.tensor([17, 0, 0, 50]).to(inputs.device)
    run = _op("step_inputs", "write_drawn")

    def call() -> Tensor:
        written = ids.clone()
        run(drawn, slots, positions, written)
        return written

    return Numeric(call, (), EXACT)


def _rows_of_states(inputs: Inputs) -> Any:
    """A row that begins, one that continues, padding, and a row without tokens: 9 tokens in all, and 4 states."""
    ends, positions = torch.tensor([0, 4, 8, 9, 9], dtype=torch.int32), torch.tensor([0, 1, 2, 3, 6, 7, 8, 9, 0])
    slots = torch.tensor([2, 0, -1, 1])
    return _op("states", "StateRows")(*(one.to(inputs.device) for one in (ends, positions, slots)))


def _advanced(call: Callable[..., Tensor], state: Tensor, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """(results of the tokens that are not padding, states behind them)."""
    kept = state.clone()
    result = call(*given, state=kept, **options)
    return result[:8], kept


def _short_conv(inputs: Inputs) -> Numeric:
    run, rows = _op("short_conv", "short_conv"), _rows_of_states(inputs)
    weight, bias = inputs.randn(4, 200, dtype=torch.float32), inputs.randn(200, dtype=torch.float32)

    def call(x: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        plain = _advanced(run, state, x[:, :200], weight, rows=rows, has_silu=True, bias=bias)
        gates = x[:, 200:400], x[:, 400:]
        return *plain, *_advanced(run, state, x[:, :200], weight, rows=rows, has_silu=False, gates=gates)

    return Numeric(call, (inputs.randn(9, 600), inputs.randn(4, 3, 200)))


def _gated_delta(inputs: Inputs) -> Numeric:
    """Two value heads for each key head."""
    run, gates_type, rows = _op("gated_delta", "gated_delta"), _op("gated_delta", "Gates"), _rows_of_states(inputs)
    weights = [inputs.randn(4, dtype=torch.float32) for _ in range(2)]

    def call(qkv: Tensor, b: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return _advanced(run, state, qkv, gates_type(b, a, *weights), rows=rows)

    state = inputs.randn(4, 4, 24, 20, dtype=torch.float32)
    return Numeric(call, (inputs.randn(9, 4 * 24 + 4 * 20), inputs.randn(9, 4), inputs.randn(9, 4), state))


def _mamba2(inputs: Inputs) -> Numeric:
    """Two heads for each group."""
    run, weights_type, rows = _op("mamba2", "mamba2"), _op("mamba2", "Weights"), _rows_of_states(inputs)
    weights = weights_type(*(inputs.randn(4, dtype=torch.float32) for _ in range(3)))

    def call(xbc: Tensor, dt: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return _advanced(run, state, xbc, dt, weights, rows=rows)

    state = inputs.randn(4, 4, 24, 20, dtype=torch.float32)
    return Numeric(call, (inputs.randn(9, 4 * 20 + 4 * 24), inputs.randn(9, 4), state))


def _head_gate(name: str, *, weight: tuple[int, ...] = (), is_wide: bool = False) -> Make:
    """Gates that lie between other numbers."""

    def make(inputs: Inputs) -> Numeric:
        call = _op("head_gate", name)
        weights = (inputs.randn(*weight, dtype=torch.float32), 1e-5) if weight else ()

        def gated(x: Tensor, pairs: Tensor) -> Tensor:
            result: Tensor = call(x.float() if is_wide else x, pairs[:, :, 1], *weights)
            return result

        return Numeric(gated, (inputs.randn(5, 3, 200), inputs.randn(5, 3, 2, 200)))

    return make


CHECKS: dict[str, Make] = {
    "rms_norm": _of_rows("rms_norm", "rms_norm", weights=1),
    "add_rms_norm": _of_rows("rms_norm", "add_rms_norm", residual=True, weights=1),
    "layer_norm": _of_rows("layer_norm", "layer_norm", weights=2),
    "add_layer_norm": _of_rows("layer_norm", "add_layer_norm", residual=True, weights=2),
    "experts_route": _experts_route,
    "experts_product": _experts,
    "experts_integers": _experts_integers,
    "experts_add": _experts_add,
    "silu_mul": _of_rows("gated_mul", "silu_mul", half=True),
    "limited_mul": _limited_mul,
    "gelu_mul": _of_rows("gated_mul", "gelu_mul", half=True),
    "gelu": _of_rows("gelu", "gelu"),
    "scaled_add": _scaled_add,
    "short_conv": _short_conv,
    "gated_delta": _gated_delta,
    "mamba2": _mamba2,
    "sigmoid_gate": _head_gate("sigmoid_gate"),
    "norm_silu_gate": _head_gate("norm_silu_gate", weight=(200,)),
    "silu_gate_norm": _head_gate("silu_gate_norm", weight=(3, 200), is_wide=True),
    "quantize_fp8": _of_rows("quantize_fp8", "quantize_fp8"),
    "rms_norm_fp8": _of_rows("quantize_fp8", "rms_norm_fp8", weights=1),
    "add_rms_norm_fp8": _of_rows("quantize_fp8", "add_rms_norm_fp8", residual=True, weights=1),
    "silu_mul_fp8": _of_rows("quantize_fp8", "silu_mul_fp8", half=True),
    "gelu_mul_fp8": _of_rows("quantize_fp8", "gelu_mul_fp8", half=True),
    "rope_and_cache": _rope,
    "paged_attention": _paged_attention(is_deterministic=True),
    "attention_parts": _paged_attention(is_deterministic=False),
    "attention_parts_fp8": _attention_fp8,
    **{f"attention by {name}": _attention_library(name) for name in LIBRARIES},
    "linear_few_rows": _linear(is_invariant=False),
    "linear_invariant": _linear(is_invariant=True),
    "norm_linear": _fused("norm_linear", norm=True),
    "linear_residual": _fused("linear_residual", residual=True),
    "gate_up": _fused("gate_up_act", gate=True),
    "norm_gate_up": _fused("gate_up_act", norm=True, gate=True),
    "linear_fp8": _linear_fp8(20),
    "linear_fp8_few_rows": _linear_fp8(3, "triton_few_rows"),
    "linear_int8": _linear_int("linear_int8", 20),
    "linear_int4": _linear_int("linear_int4", 3),
    "linear_int8_copy": _linear_int("linear_int8", 131),
    "linear_int4_copy": _linear_int("linear_int4", 131),
    "lora": _lora,
    "sample": _sample,
    "top_k_top_p": _top_k_top_p,
    "mask_tokens": _mask_tokens,
    "argmax": _argmax,
    "decode_draw": _draw,
    "logit_rules": _logit_rules,
    "record_drawn": _record_drawn,
    "step_inputs": _step_inputs,
    "write_drawn": _write_drawn,
}
"""Checks by op. A kernel that is a part of an op and has no check of its own is covered by the checks of its package.
"""


def check_of(op: str, package: str) -> tuple[str, ...]:
    """The checks that run the kernel `op` of the package `inferd.kernels.ops.<package>`; may be empty."""
    if op in CHECKS:
        return (op,)
    names = (name for name in CHECKS if _package(name) == package)
    return tuple(names)


def _package(op: str) -> str:
    found = registry.ops().get(op)
    if found is None:
        return op
    run = found._implementations[-1].run
    module = run.module if isinstance(run, registry.Deferred) else run.__module__
    return _package_of(str(module))


def _package_of(module: str) -> str:
    return module.removeprefix("inferd.kernels.").removeprefix("ops.").split(".")[0]


def check(name: str, device: torch.device) -> CheckResult:
    """Run the check of one op with its Triton kernels and without."""
    try:
        numeric = CHECKS[name](Inputs(device))
        ours = _flat(_in_triton(name, numeric))
    except (NotOfferedError, registry.KernelError) as error:
        return CheckResult(None, None, str(error))
    arguments = tuple(map(_wide, numeric.arguments)) if numeric.widens else numeric.arguments
    with _forced(None):
        expected = _flat(numeric.call(*arguments))
    errors = [_error(out, exact) for out, exact in zip(ours, expected, strict=True)]
    return CheckResult(max(errors), numeric.tolerance)


def _in_triton(name: str, numeric: Numeric) -> Any:
    """The result of the op's Triton kernel. Raises `NotOfferedError` if it has none or another implementation ran."""
    op, implementation = registry.ops()[numeric.op or name], numeric.implementation
    if implementation not in op.implementation_names:
        raise NotOfferedError(f"{op.name} has no implementation called {implementation}")
    with _forced(TRITON):
        op.force(implementation)
        result = numeric.call(*numeric.arguments)
        if not any(choice.chosen == implementation for choice in op.choices()):
            raise NotOfferedError(f"{implementation} is used for other shapes")
    return result


@contextmanager
def _forced(name: str | None) -> Iterator[None]:
    """Force implementation `name` in every op that has it; None: each op's last, the plain one."""
    ops = list(registry.ops().values())
    for op in ops:
        chosen = name or op.implementation_names[-1]
        op.force(chosen if chosen in op.implementation_names else None)
    try:
        yield
    finally:
        for op in ops:
            op.force(None)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _flat(value: Any) -> list[Tensor]:
    """Results as a list; a quantized pair becomes the number that it represents."""
    if isinstance(value, Tensor):
        return [value]
    if len(value) == 2 and all(isinstance(part, Tensor) for part in value) and value[0].dtype == torch.float8_e4m3fn:
        return [value[0].float() * value[1][..., None]]
    return [tensor for part in value for tensor in _flat(part)]


def _error(out: Tensor, exact: Tensor) -> float:
    """Error by norm; for whole numbers the share that differs."""
    if not exact.dtype.is_floating_point:
        return float((out != exact).double().mean())
    wide = exact.double()
    value = float((out.double() - wide).norm() / wide.norm())
    return value if math.isfinite(value) else math.inf


def shipped_ops() -> Iterator[tuple[str, str]]:
    """(op, package) of every shipped kernel, each once."""
    from inferd.kernels.compile import aot  # noqa: PLC0415

    seen: dict[tuple[str, str], None] = {}
    for form in aot.all_shipped():
        seen[form.op, _package_of(str(form.kernel.fn.__module__))] = None
    yield from seen


def _worst(found: Sequence[CheckResult]) -> CheckResult:
    """Among the checks that ran, the one with the largest error relative to its limit."""
    ran = [one for one in found if one.max_err is not None]
    if not ran:
        return CheckResult(None, None, "; ".join(one.reason for one in found) or "no numeric check")
    return max(ran, key=lambda one: (one.is_wrong, (one.max_err or 0.0) / (one.tol or 1.0)))


def numerics(bench: Bench, part: int = 0, num_parts: int = 1) -> None:
    """A point for each op on a GPU, or for one of several parts of them. A check that did not run is wrong. The
    interpreter would need a process that set it before importing Triton."""
    if bench.device.type != "cuda" and not bench.is_listing:
        raise CannotRunError("without a GPU it is `TRITON_INTERPRET=1 python -m benchmarks.gpu.numeric`")
    for name in list(CHECKS)[part::num_parts]:

        def trial(name: str = name) -> Trial:
            if "fp8" in name and not bench.has_fp8:
                return Trial(note="the device has no 8-bit floats")
            found = check(name, bench.device)
            if found.max_err is None:
                return Trial.missing(found.reason)
            return Trial(error=found.max_err, tolerance=found.tol, note=found.reason)

        bench.measure(Case(table="numeric checks", labels={"op": name}), trial)


def main(arguments: Sequence[str]) -> int:
    """Run all checks in the interpreter."""
    from tests.kernels import interpreter  # noqa: PLC0415

    parser = argparse.ArgumentParser(description="Check each op's Triton kernel in Triton's interpreter.")
    told = "write the worst check of each op and shipped kernel: {name: {max_err, tol, reason}}"
    parser.add_argument("--out", type=Path, metavar="FILE", help=told)
    out: Path | None = parser.parse_args(arguments).out
    gpu.interpret(True)
    interpreter.repair()
    with torch.inference_mode():
        found = {name: check(name, torch.device("cpu")) for name in CHECKS}
    for name, result in found.items():
        outcome = result.reason or f"{result.max_err:.2e} of {result.tol:.2e}{' WRONG' * result.is_wrong}"
        print(f"{name:18} {outcome}", flush=True)
    if out is not None:
        kernels = {op: _worst([found[name] for name in check_of(op, package)]) for op, package in shipped_ops()}
        out.write_text(json.dumps({op: dataclasses.asdict(r) for op, r in {**found, **kernels}.items()}))
    return int(any(result.is_wrong for result in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
