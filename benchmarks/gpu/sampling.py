"""Top-k and top-p over a published vocabulary: inferd's thresholds, compared with the usual sort."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.points import Case, Phase, Trial
from inferd.kernels.ops.top_k_top_p import TOP_K_TOP_P, Cuts, top_k_top_p

VOCAB = 151_936
ROWS = (1, 8, 32, 256)
CUTS = ((50, 1.0), (0, 0.9), (50, 0.9))
"""(top-k, top-p); 0 and 1 mean no such cut."""
_OURS, _SORT = "inferd", "torch.sort"
_MAX_SORT_ERROR = 1e-4
"""Share of the tokens that may be kept or cut differently because of the order of a sum."""
_CALLS = 4


def cuts(bench: Bench) -> None:
    """Each call cuts a fresh copy of the scores. Its bytes include the copy: scores are read and written twice."""
    vocab = bench.pick(VOCAB, 1000)
    for rows, (top_k, top_p), by in itertools.product(bench.pick(ROWS, ROWS[:2]), CUTS, (_OURS, _SORT)):
        labels = {"rows": str(rows), "top-k": str(top_k or ""), "top-p": str(top_p if top_p < 1 else ""), "by": by}
        case = Case(table="top-k and top-p", labels=labels, phases=(Phase(16.0 * rows * vocab),))
        bench.measure(case, partial(_trial, bench, rows, vocab, top_k, top_p, by))


def _trial(bench: Bench, rows: int, vocab: int, top_k: int, top_p: float, by: str) -> Trial:
    scores = torch.randn(rows, vocab, device=bench.device) * 3
    scores -= scores.amax(dim=-1, keepdim=True)
    work = scores.clone()
    asked = Cuts(
        torch.full((rows,), top_k, device=bench.device),
        torch.full((rows,), top_p, dtype=torch.float64, device=bench.device),
        torch.full((rows,), -torch.inf, dtype=torch.float64, device=bench.device),
    )

    def call() -> None:
        work.copy_(scores)
        if by == _SORT:
            _cut_sorted(work, top_k, top_p)
        else:
            top_k_top_p(work, asked)

    expected = scores.clone()
    TOP_K_TOP_P.force("reference")
    top_k_top_p(expected, asked)
    TOP_K_TOP_P.force(None)
    call()
    error = float((work.isneginf() != expected.isneginf()).double().mean())
    tolerance = _MAX_SORT_ERROR if by == _SORT else 0.0
    if not error <= tolerance:
        return Trial(error=error, tolerance=tolerance)
    timing = bench.clock(lambda: [call] * _CALLS)
    return Trial(seconds=timing.seconds, error=error, tolerance=tolerance, note=timing.note)


def _cut_sorted(scores: Tensor, top_k: int, top_p: float) -> None:
    """Cut in place, by one sort of every row."""
    ordered, ids = scores.sort(dim=-1, descending=True)
    if top_k:
        ordered[:, top_k:] = -torch.inf
    if top_p < 1.0:
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        ordered.masked_fill_(before >= top_p, -torch.inf)
    scores.scatter_(1, ids, ordered)
