"""Floors of a whole model on a GPU, and the goals that its figures stand beside. Pure arithmetic, beside `roofline.py`.

Kernels follow one another, so a step's floor is the sum of two: its linears (weights read once, 2 operations a weight
and row) and its attention (the KV of all rows read once, 4 operations a head size, query head, query and key). A CPU's
floors leave attention's operations out; here they are 38% of a prompt of 32k tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.checkpoints import Shape
from benchmarks.gpu.points import Phase, Rates

BYTES = {"bf16": 2.0, "fp8": 1.0}
"""Of a number, without scales."""
_SCALE_BYTES = 4.0
"""Of KV in 8 bits, for each token and head."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure is to reach on one H200: set beforehand by arithmetic and peers' published rates, not measured."""

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
"""By (model, precision, point): tokens a second, and seconds for a start. The one for FP8 counts with KV in 8 bits."""


def goal(model: str, precision: str, point: str) -> str:
    """As a table shows it; empty where none was set."""
    found = GOALS.get((model, precision, point))
    return "" if found is None else str(found)


def _pair_flops(shape: Shape) -> float:
    """Operations for each query token and key it sees, over all layers."""
    return 4.0 * shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers


def _kv_bytes(shape: Shape, kv: str = "bf16") -> float:
    """Of one token, in all layers."""
    scales = 0.0 if kv == "bf16" else _SCALE_BYTES / shape.head_dim
    return shape.kv_elements * (BYTES[kv] + scales)


def decode_phases(shape: Shape, precision: str, num_rows: int, context: float, kv: str = "bf16") -> tuple[Phase, Phase]:
    """One token for each of `num_rows`, each with `context` tokens to see, whose KV is in `kv`."""
    params = shape.num_body_params + shape.num_head_params
    return (
        Phase(params * BYTES[precision], 2.0 * params * num_rows, precision),
        Phase(num_rows * context * _kv_bytes(shape, kv), num_rows * context * _pair_flops(shape)),
    )


def prefill_phases(shape: Shape, precision: str, num_prompts: int, length: int) -> tuple[Phase, Phase]:
    """`num_prompts` prompts of `length`, of which only the last token is sampled from. Weights are read once: of how
    many steps it is, the floor does not know."""
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
    """`num_requests` of one length, `num_rows` at a time: each wave is prefilled and then decoded in step."""
    phases: list[Phase] = []
    left = num_requests
    while left > 0:
        wave = min(left, num_rows)
        phases += prefill_phases(shape, precision, wave, input_len)
        # The first token comes with the prefill; a mean context stands for all steps, in which every term is linear.
        for phase in decode_phases(shape, precision, wave, input_len + output_len / 2):
            steps = output_len - 1
            phases.append(Phase(phase.num_bytes * steps, phase.num_flops * steps, phase.precision))
        left -= wave
    return tuple(phases)


def floor_s(phases: tuple[Phase, ...], rates: Rates) -> float:
    return sum(phase.floor_s(rates) for phase in phases)
