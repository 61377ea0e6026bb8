"""Floors of a whole model on a GPU, and the goals for its figures. Pure arithmetic, like `roofline.py`.

Kernels run one after another, so a step's floor is the sum of two floors. Linears read the weights once and do 2
operations for each weight and row. Attention reads the KV of all rows once and does 4 operations for each element of a
head, query head, query and key. A CPU's floors leave attention's operations out; here they are 38% of a prompt of 32k
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.checkpoints import Shape
from benchmarks.gpu.points import Phase, Rates

BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a number, without scales."""
_SCALE_BYTES = 2.0 / 32
"""Bytes of scales for each number of KV in 8 bits."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal for one H200, set beforehand from arithmetic and peers' published rates, not measured."""

    least: float
    best: float | None = None

    def __str__(self) -> str:
        more = "" if self.best is None else f", then {self.best:,.0f}"
        return f"{self.least:,.0f}{more} (goal, H200)"


GOALS: Mapping[tuple[str, str, str], Goal] = {
    ("8b", "bf16", "decode 1 x 1024"): Goal(240, 255),
    ("8b", "bf16", "decode 32 x 1024"): Goal(6_000),
    ("8b", "bf16", "decode 256 x 1024"): Goal(17_000),
    ("8b", "bf16", "prefill 2048"): Goal(46_000),
    ("8b", "bf16", "offline"): Goal(9_700),
    ("8b", "fp8", "offline"): Goal(19_000),
    ("0.6b", "bf16", "decode 1 x 1024"): Goal(1_500),
    ("8b", "bf16", "start"): Goal(8),
}
"""By (model, precision, point): tokens a second, or seconds for a start. The FP8 goal assumes KV in 8 bits."""


def goal(model: str, precision: str, point: str) -> str:
    """The goal as a table shows it; empty if none was set."""
    found = GOALS.get((model, precision, point))
    return "" if found is None else str(found)


def _pair_flops(shape: Shape) -> float:
    """Operations for each query token and key that it sees, over all layers."""
    return 4.0 * shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers


def _kv_bytes(shape: Shape, kv: str = "bf16") -> float:
    """KV bytes of one token, in all layers."""
    scales = 0.0 if kv == "bf16" else _SCALE_BYTES
    return shape.kv_elements * (BYTES[kv] + scales)


def decode_phases(shape: Shape, precision: str, num_rows: int, context: float, kv: str = "bf16") -> tuple[Phase, Phase]:
    """One token for each of `num_rows`, each with `context` tokens of KV in `kv`."""
    params = shape.num_body_params + shape.num_head_params
    return (
        Phase(params * BYTES[precision], 2.0 * params * num_rows, precision),
        Phase(num_rows * context * _kv_bytes(shape, kv), num_rows * context * _pair_flops(shape)),
    )


def prefill_phases(shape: Shape, precision: str, num_prompts: int, length: int) -> tuple[Phase, Phase]:
    """`num_prompts` prompts of `length`, with a token sampled behind each. The weights are read once, because the floor
    does not know the number of steps."""
    params = shape.num_body_params + shape.num_head_params
    flops = 2.0 * num_prompts * (shape.num_body_params * length + shape.num_head_params)
    pairs = num_prompts * length * (length + 1) / 2
    return (
        Phase(params * BYTES[precision], flops, precision),
        Phase(num_prompts * length * _kv_bytes(shape), pairs * _pair_flops(shape)),
    )


def load_phases(
    shape: Shape, precision: str, num_rows: int, num_requests: int, input_len: int, output_len: int
) -> tuple[Phase, ...]:
    """`num_requests` of one length, `num_rows` at a time. Each wave is prefilled, and then decoded together."""
    phases: list[Phase] = []
    left = num_requests
    while left > 0:
        wave = min(left, num_rows)
        phases += prefill_phases(shape, precision, wave, input_len)
        # Prefill gives the first token. Every term is linear in the context, so the mean context represents all steps.
        for phase in decode_phases(shape, precision, wave, input_len + output_len / 2):
            steps = output_len - 1
            phases.append(Phase(phase.num_bytes * steps, phase.num_flops * steps, phase.precision))
        left -= wave
    return tuple(phases)


def floor_s(phases: tuple[Phase, ...], rates: Rates) -> float:
    return sum(phase.floor_s(rates) for phase in phases)
