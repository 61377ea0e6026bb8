"""Floors: the least time that a load can take on a machine of known bandwidth and matrix rate (the roofline model,
Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785).

    one decode step of B rows   max((weights + KV of B rows) / bandwidth, 2 * parameters * B / rate)
    a prefill of T tokens       max(2 * parameters * T / rate, weights / bandwidth)

A load's floor is the sum over a schedule that keeps all clients in step: each wave of requests is prefilled and then
decoded together. It leaves out attention's arithmetic, norms, sampling, and everything outside of the model. It counts
no overlap of prefill with decode: a step that hides one behind the other could be faster. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """A machine's peak: bytes read per second, and operations per second in the precision of the products."""

    read_bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Cost:
    """A model's cost for each token, in one precision."""

    body_params: int
    """Parameters that multiply every token."""
    head_params: int
    """Parameters that multiply every token with a sampled successor."""
    weight_bytes: float
    """Bytes of a stored parameter, scales included."""
    kv_bytes: float
    """Bytes that a decode reads for each token of its context."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one length, of which `num_clients` run at a time."""

    num_clients: int
    num_requests: int
    input_len: int
    output_len: int
    shared_prefix: int = 0
    """Input tokens that only the first request computes."""


WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a parameter without scales: any scheme of that precision must read them."""


def decode_step_s(rates: Rates, cost: Cost, num_rows: int, context: float) -> float:
    """One token for each of `num_rows`, each with `context` tokens before it."""
    params = cost.body_params + cost.head_params
    read_bytes = params * cost.weight_bytes + num_rows * context * cost.kv_bytes
    return max(read_bytes / rates.read_bytes, 2 * params * num_rows / rates.flops)


def prefill_s(rates: Rates, cost: Cost, num_tokens: int, num_sampled: int) -> float:
    """`num_tokens` of prompts in steps of any size, and `num_sampled` first tokens."""
    operations = 2 * (cost.body_params * num_tokens + cost.head_params * num_sampled)
    return max(operations / rates.flops, (cost.body_params + cost.head_params) * cost.weight_bytes / rates.read_bytes)


def load_s(rates: Rates, cost: Cost, load: Load) -> float:
    """The whole load: wave by wave, prefill and then decode."""
    total_s = 0.0
    for wave, num_rows in enumerate(_waves(load)):
        num_cached = load.shared_prefix * (num_rows - (wave == 0))
        total_s += prefill_s(rates, cost, num_rows * load.input_len - num_cached, num_rows)
        # Prefill gives the first token. Output token n is drawn with input_len + n - 1 tokens before it.
        mean_context = load.input_len + load.output_len / 2
        total_s += (load.output_len - 1) * decode_step_s(rates, cost, num_rows, mean_context)
    return total_s


def tokens_per_s(rates: Rates, cost: Cost, load: Load) -> float:
    """Output tokens a second at the floor, which no server can exceed."""
    return load.num_requests * load.output_len / load_s(rates, cost, load)


def _waves(load: Load) -> Iterator[int]:
    left = load.num_requests
    while left > 0:
        yield min(left, load.num_clients)
        left -= load.num_clients
