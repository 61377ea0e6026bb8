"""Whether a row's bits depend on the rows beside it, for every linear shape and for a whole decoder's logits.

In deterministic mode they must not, and a difference fails the row. In the default mode differences are only reported.
The cost of determinism is timed in `linears` and `engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.linears import of_integers, shapes
from benchmarks.gpu.models import MODELS, random_decoder
from benchmarks.gpu.pages import Pages
from benchmarks.gpu.points import Case, Trial
from inferd.kernels.ops.linear import Choices, linear
from inferd.kernels.ops.linear_fp8 import linear_fp8, quantize_weight

ROWS = (1, 2, 3, 8, 17, 64, 256, 512)
"""Numbers of rows at which a row's bits are compared."""
_MODES = {False: "as it comes", True: "deterministic"}

Apply = Callable[[Tensor], Tensor]


def linears(bench: Bench, precision: str) -> None:
    """A row's bits in every linear shape, at each number of rows, among random neighbours."""
    bench.require(precision)
    for model in ("8b", "0.6b"):
        for name, (in_size, out_size) in shapes(MODELS[bench.pick(model, "smoke")]).items():
            for is_asked, mode in _MODES.items():
                labels = {"what": f"{model} {name} {in_size}x{out_size}", "precision": precision, "mode": mode}
                case = Case(table="batch invariance", labels=labels)
                bench.measure(case, partial(_linear, bench, in_size, out_size, precision, is_asked=is_asked))


def _linear(bench: Bench, in_size: int, out_size: int, precision: str, *, is_asked: bool) -> Trial:
    weight = torch.randn(out_size, in_size, dtype=torch.bfloat16, device=bench.device).mul_(in_size**-0.5)
    apply = _bound(weight, precision, is_asked=is_asked)
    target = torch.randn(1, in_size, dtype=torch.bfloat16, device=bench.device)
    alone, differing = apply(target)[0], []
    for rows in bench.pick(ROWS, ROWS[:5]):
        for _ in range(2):
            place = int(torch.randint(0, rows, ()))
            x = torch.randn(rows, in_size, device=bench.device).to(target.dtype)
            x[place] = target[0]
            if not torch.equal(apply(x)[place], alone):
                differing.append(rows)
                break
    return _judged(differing, is_asked=is_asked)


def _bound(weight: Tensor, precision: str, *, is_asked: bool) -> Apply:
    if precision == "bf16":
        return linear(weight, None, Choices(is_invariant=is_asked))
    if precision != "fp8":
        return of_integers(precision, weight, is_invariant=is_asked)
    q, scales = quantize_weight(weight)
    return linear_fp8(q, scales, None, torch.bfloat16, is_invariant=is_asked)


def decoder(bench: Bench, precision: str) -> None:
    """The logits of one decode of the whole model, among other requests' decodes."""
    bench.require(precision)
    model = bench.pick("0.6b", "smoke")
    for is_asked, mode in _MODES.items():
        labels = {"what": f"decoder {model}", "precision": precision, "mode": mode}
        case = Case(table="batch invariance", labels=labels)
        bench.measure(case, partial(_decoder, bench, model, precision, is_asked=is_asked))


def _decoder(bench: Bench, model: str, precision: str, *, is_asked: bool) -> Trial:
    rows, context = bench.pick(ROWS, ROWS[:5]), bench.pick(300, 40)
    made = random_decoder(MODELS[model], bench.device, precision, 1024, Choices(is_invariant=is_asked))
    pages = Pages.make(made, max(rows), context)
    target_id, span = 17, (context - 1, 1)

    def logits(order: Sequence[int], ids: Tensor) -> Tensor:
        batches = pages.batches([span] * len(order), order, is_deterministic=is_asked)
        return made.logits(made.forward(ids, batches, pages.kv))

    alone, differing = logits([0], torch.tensor([target_id], device=bench.device))[0], []
    for count in rows:
        place = int(torch.randint(0, count, ()))
        order = [*range(1, place + 1), 0, *range(place + 1, count)]
        ids = torch.randint(0, made.arch.vocab_size, (count,), device=bench.device)
        ids[place] = target_id
        if not torch.equal(logits(order, ids)[place], alone):
            differing.append(count)
    return _judged(differing, is_asked=is_asked)


def _judged(differing: Sequence[int], *, is_asked: bool) -> Trial:
    """Judge by the numbers of rows at which the bits differed."""
    note = f"other bits at {', '.join(map(str, differing))} rows" if differing else "the same bits at every number"
    if is_asked:
        return Trial(error=float(len(differing)), tolerance=0.0, note=note)
    return Trial(note=f"{note}; not promised")
