"""Linear layers of the two models by number of rows, in every implementation that can run; torch's own is cuBLAS."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, distance, num_copies
from benchmarks.gpu.models import MODELS, Model
from benchmarks.gpu.points import Case, Phase, Trial
from inferd.kernels.ops import linear, linear_int4, linear_int8
from inferd.kernels.ops.linear import tuning
from inferd.kernels.ops.quantized import Matrix
from inferd.kernels.registry import KernelError, Op

TOLERANCE = {"bf16": 4e-3, "fp8": 1e-2, "int8": 4e-3, "int4": 4e-3}
"""Largest error. bf16: one rounding of the result, against fp64. FP8: against the exact sum of the quantized numbers,
whose activations may differ by one quantization step. Integers: against the dequantized weight in fp64."""
_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1 + 2 / 64, "int4": 0.5 + 4 / 32}
"""Bytes of a weight."""
_INTEGERS = {"int8": linear_int8, "int4": linear_int4}
_CALLS = 8
_FEW_ROWS, _MAX_FP8_ROWS = "triton_few_rows", 8

Apply = Callable[[Tensor], Tensor]
Bind = Callable[[Tensor], Apply]


def shapes(model: Model) -> dict[str, tuple[int, int]]:
    """(in, out) of the products of a layer, and of the head."""
    s = model.shape
    heads = s.num_attention_heads * s.head_dim
    return {
        "qkv": (s.hidden_size, heads + 2 * s.num_key_value_heads * s.head_dim),
        "o": (heads, s.hidden_size),
        "gate_up": (s.hidden_size, 2 * s.intermediate_size),
        "down": (s.intermediate_size, s.hidden_size),
        "head": (s.hidden_size, s.vocab_size),
    }


def products(bench: Bench, model: str, precision: str, rows: Sequence[int]) -> None:
    """Every shape, number of rows and implementation. A small weight has copies, so that it is read from memory."""
    bench.require(precision)
    binders = _binders(precision)
    chosen = MODELS[bench.pick(model, "smoke")]
    for (name, (in_size, out_size)), by in itertools.product(shapes(chosen).items(), binders):
        weights: list[Tensor] = []
        for num_rows in bench.pick(rows, rows[:2]):
            if by == _FEW_ROWS and num_rows > (_MAX_FP8_ROWS if precision == "fp8" else max(tuning.BUCKETS)):
                continue
            if by == "reference" and not bench.is_rehearsal:
                continue
            moved = in_size * out_size * _BYTES[precision] + 2.0 * num_rows * (in_size + out_size)
            case = Case(
                table=f"linears, {precision}",
                labels={"shape": f"{model} {name} {in_size}x{out_size}", "rows": str(num_rows), "by": by},
                phases=(Phase(moved, 2.0 * in_size * out_size * num_rows, precision),),
            )
            if not bench.is_listing and not _runs(bench, binders[by]):
                continue
            if not bench.is_listing and not weights:
                weights += cold_weights(bench, in_size, out_size)
            bench.measure(case, partial(_trial, bench, binders[by], weights, num_rows, precision, by))


def _binders(precision: str) -> Mapping[str, Bind]:
    """By implementation: the function that makes a layer of a weight."""
    if precision == "bf16":
        return {
            _FEW_ROWS: few_rows,
            "cuBLAS": _forced(linear.LINEAR, "torch", lambda weight: linear.linear(weight, None)),
            "triton_invariant": _forced(
                linear.LINEAR,
                "triton_invariant",
                lambda weight: linear.linear(weight, None, linear.Choices(is_invariant=True)),
            ),
        }
    if precision in _INTEGERS:
        op = getattr(_INTEGERS[precision], f"LINEAR_{precision.upper()}")
        return {
            name: _forced(op, name, partial(of_integers, precision, is_invariant=name.endswith("invariant")))
            for name in op.implementation_names
            if name.startswith("triton")
        }
    from inferd.kernels.ops import linear_fp8  # noqa: PLC0415

    def bind(weight: Tensor) -> Apply:
        return linear_fp8.linear_fp8(*linear_fp8.quantize_weight(weight), None, torch.bfloat16)

    few, op = linear_fp8.LINEAR_FP8_FEW_ROWS, linear_fp8.LINEAR_FP8
    found = {name: _forced(few, name, bind) for name in few.implementation_names if name == _FEW_ROWS}
    return found | {name: _forced(few, "none", _forced(op, name, bind)) for name in op.implementation_names}


def _quantized(weight: Tensor, precision: str) -> tuple[Tensor, ...]:
    """(q, scales), and minimums for 4 bits."""
    made: tuple[Tensor, ...] = getattr(_INTEGERS[precision], f"quantize_{precision}")(weight)
    return made


def of_integers(precision: str, weight: Tensor, *, is_invariant: bool) -> Apply:
    """The layer of a weight quantized to `precision`."""
    q, scales, *minimums = _quantized(weight, precision)
    bind: Callable[..., Apply] = getattr(_INTEGERS[precision], f"linear_{precision}")
    offsets = {"minimums": minimums[0]} if minimums else {}
    return bind(q, scales, None, weight.dtype, is_invariant=is_invariant, **offsets)


def few_rows(weight: Tensor) -> Apply:
    """The kernel for few rows, at each number of rows that it accepts, regardless of the rule."""
    out_size, in_size = weight.shape
    known = tuning.cases(out_size, in_size, str(weight.dtype))
    table = tuning.Table("all", {case.name: tuning.FEW_ROWS for case in known})
    bind = _forced(linear.LINEAR, "triton_few_rows", lambda w: linear.linear(w, None, linear.Choices(table=table)))
    return bind(weight)


def _forced(op: Op[Any, Any], implementation: str, bind: Bind) -> Bind:
    def bound(weight: Tensor) -> Apply:
        op.force(implementation)
        try:
            return bind(weight)
        finally:
            op.force(None)

    return bound


def _runs(bench: Bench, bind: Bind) -> bool:
    try:
        bind(torch.zeros(128, 128, dtype=torch.bfloat16, device=bench.device))
    except KernelError:
        return False
    return True


def cold_weights(bench: Bench, in_size: int, out_size: int) -> Iterator[Tensor]:
    """Enough copies of a weight to exceed any cache when used in turn."""
    for _ in range(num_copies(in_size * out_size * 2.0, most=16)):
        weight = torch.randn(out_size, in_size, dtype=torch.bfloat16, device=bench.device)
        yield weight.mul_(in_size**-0.5)


def _trial(bench: Bench, bind: Bind, weights: list[Tensor], rows: int, precision: str, by: str) -> Trial:
    x = torch.randn(rows, weights[0].shape[1], dtype=torch.bfloat16, device=bench.device)
    applies = [bind(weight) for weight in weights]
    if precision in _INTEGERS:
        q, scales, *minimums = _quantized(weights[0], precision)
        expected = x.double() @ Matrix(q, scales, None, minimums=minimums[0] if minimums else None).dequantized().T
    elif by == _FEW_ROWS and precision == "fp8":
        expected = x.double() @ _dequantized_fp8(weights[0]).T
    else:
        expected = x.double() @ weights[0].double().T if precision == "bf16" else _plain_fp8(weights[0])(x)
    return checked(bench, [partial(apply, x) for apply in applies], expected, TOLERANCE[precision])


def _plain_fp8(weight: Tensor) -> Apply:
    from inferd.kernels.ops import linear_fp8  # noqa: PLC0415

    q, scales = linear_fp8.quantize_weight(weight)
    bind = _forced(linear_fp8.LINEAR_FP8, "reference", lambda _: linear_fp8.linear_fp8(q, scales, None, torch.bfloat16))
    return bind(weight)


def _dequantized_fp8(weight: Tensor) -> Tensor:
    """The weight in fp64 that the kernel for few rows multiplies by. It does not quantize activations."""
    from inferd.kernels.ops import linear_fp8  # noqa: PLC0415

    q, scales = linear_fp8.quantize_weight(weight)
    return q.double() * scales.double().repeat_interleave(linear_fp8.BLOCK, 1)[:, : q.shape[1]]


def checked(bench: Bench, calls: Sequence[Callable[[], Tensor]], expected: Tensor, tolerance: float) -> Trial:
    """Time the calls if the first is right; there is one for each copy of the weight."""
    error = distance(calls[0](), expected)
    if not error <= tolerance:
        return Trial(error=error, tolerance=tolerance)
    timing = bench.clock(lambda: list(calls) * max(1, _CALLS // len(calls)))
    return Trial(seconds=timing.seconds, error=error, tolerance=tolerance, note=timing.note)
