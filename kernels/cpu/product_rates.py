"""Measures what this processor's products give if every operand is in a register: no kernel can exceed these rates."""

from __future__ import annotations

import ctypes
import time

from inferd.kernels.cpu import native

KINDS = ("float32", "bfloat16", "8 bits", "4 bits", "bfloat16 in tiles", "8 bits in tiles")
"""In the order of their numbers in product_rates.cpp."""
_ROUND_S = 0.004
"""About the time of one run. In a longer one other programs run more often."""
_RUNS = 8


def measure(num_threads: int) -> dict[str, float]:
    """Operations a second of each kind that this processor has, of `num_threads` threads together. A product and its
    sum are two. Takes 0.2 s. `native.prepare` must have loaded the kernels."""
    rates = {kind: _rate(number, num_threads) for number, kind in enumerate(KINDS)}
    return {kind: rate for kind, rate in rates.items() if rate}


def _rate(number: int, num_threads: int) -> float:
    run, operations = native.function("inferd_product_rates"), ctypes.c_double()
    place = ctypes.addressof(operations)
    run(place, number, 1, num_threads)
    if not operations.value:
        return 0.0
    rounds, best = 1_000, 0.0
    for _ in range(_RUNS):
        started_s = time.perf_counter()
        run(place, number, rounds, num_threads)
        duration_s = time.perf_counter() - started_s
        best = max(best, operations.value / duration_s)
        rounds = max(1, int(rounds * min(_ROUND_S / duration_s, 100.0)))
    return best
