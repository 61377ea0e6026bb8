"""Cuts equal those of a search in Python over exact weights, weights agree with e^x, and a row's bits depend on it
alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops.top_k_top_p import Cuts, cpu, top_k_top_p
from inferd.kernels.ops.top_k_top_p.weights import FRACTION_BITS, weights

NEVER = float("-inf")
ASKED = [
    {}, {"k": 1}, {"k": 7}, {"k": 100}, {"p": 0.0}, {"p": 0.3}, {"p": 0.9}, {"p": 0.99999}, {"m": 0.05}, {"m": 1.0},
    {"k": 40, "p": 0.7}, {"k": 3, "p": 0.999, "m": 0.5}, {"k": 2000, "p": 0.95}, {"k": 10**6}, {"p": 1 - 2**-53},
]  # fmt: skip


@pytest.fixture(autouse=True)
def few_to_sort(monkeypatch: pytest.MonkeyPatch, implementation: str) -> None:
    """In the interpreter chunks have 64 tokens: four in a row of 200."""
    if implementation == "triton":
        from inferd.kernels.ops.top_k_top_p import triton  # noqa: PLC0415

        monkeypatch.setattr(triton, "SORT_BLOCK", 8)
        monkeypatch.setattr(triton, "_CHUNK", 64)


def cuts(*asked: dict[str, float]) -> Cuts:
    top_k = torch.tensor([int(row.get("k", 0)) for row in asked])
    top_p = torch.tensor([row.get("p", 1.0) for row in asked], dtype=torch.float64)
    floors = [math.log(row["m"]) if "m" in row else NEVER for row in asked]
    return Cuts(top_k, top_p, torch.tensor(floors, dtype=torch.float64))


def expected(scores: Tensor, asked: dict[str, float]) -> list[float]:
    """The cut scores of one row, by sorting all of it and adding up fractions."""
    kept = scores.tolist()
    weight = dict(zip(kept, weights(scores).tolist(), strict=True))
    if 0 < asked.get("k", 0) < len(kept):
        floor = sorted(kept, reverse=True)[int(asked["k"]) - 1]
        kept = [score if score >= floor else NEVER for score in kept]
    if asked.get("p", 1.0) < 1.0:
        stays = [score for score in kept if score > NEVER]
        goal = max(1, Fraction(asked["p"]) * sum(weight[score] for score in stays))
        mass = 0
        for floor in sorted(stays, reverse=True):
            mass += weight[floor]
            if mass >= goal:
                break
        kept = [score if score >= floor else NEVER for score in kept]
    if "m" in asked:
        lowest = float(torch.tensor(math.log(asked["m"])))
        kept = [score if score >= lowest else NEVER for score in kept]
    return kept


def tempered(scores: Tensor) -> Tensor:
    return scores - scores.amax(dim=-1, keepdim=True)


SCORES: dict[str, Callable[[int, int], Tensor]] = {
    "equal": torch.zeros,
    "flat": lambda rows, size: torch.randn(rows, size) / 10,
    "model": lambda rows, size: torch.randn(rows, size) * 3,
    "wide": lambda rows, size: torch.randn(rows, size) * 40,
    "tied": lambda rows, size: (torch.randn(rows, size) * 2).round(),
    "masked": lambda rows, size: torch.randn(rows, size).masked_fill_(torch.rand(rows, size) < 0.9, NEVER),
}
INTERPRETED = {("equal", 1), ("tied", 9), ("model", 200), ("tied", 200), ("masked", 200)}


@pytest.mark.sampled(keep=3, of="triton")
@pytest.mark.parametrize("size", [1, 9, 200, 4099])
@pytest.mark.parametrize("kind", SCORES)
def test_what_stays_is_what_a_search_finds(implementation: str, kind: str, size: int) -> None:
    asked = ASKED
    if implementation == "triton":
        if (kind, size) not in INTERPRETED:
            pytest.skip("interpreted, a row takes half a second")
        asked = [ASKED[6], ASKED[10]] if size == 200 else [ASKED[11]]
    scores = SCORES[kind](len(asked), size)
    scores[:, [0, -1]] = 0.5
    scores = tempered(scores)
    found = scores.clone()
    top_k_top_p(found, cuts(*asked))
    for row, options in enumerate(asked):
        assert found[row].tolist() == expected(scores[row], options), options


def test_the_search_is_told_from_one_token_more() -> None:
    scores = tempered(torch.randn(1, 200))
    found = scores.clone()
    top_k_top_p(found, cuts({"p": 0.5}))
    kept = int((found > NEVER).sum())
    assert found.tolist() == [expected(scores[0], {"p": 0.5})]
    assert found.tolist() != [expected(scores[0], {"k": kept + 1})]
    assert found.tolist() == [expected(scores[0], {"k": kept})]


def test_rows_take_the_cuts_of_their_slots(implementation: str) -> None:
    """A row is unchanged, bit for bit with NaN and zeros of both signs, if its slot is negative or asks for no cut."""
    asked = [{"k": 5}, {}, {"p": 0.4}, {"m": 0.3}]
    scores = tempered(torch.randn(6, 150))
    scores[1, 3:6] = torch.tensor([-0.0, float("nan"), NEVER])
    found, slots = scores.clone(), torch.tensor([2, -1, 0, 3, 1, -1])
    top_k_top_p(found, cuts(*asked), slots)
    for row, slot in enumerate(slots.tolist()):
        if slot in (-1, 1):
            assert torch.equal(found[row].view(torch.int32), scores[row].view(torch.int32))
        else:
            assert found[row].tolist() == expected(scores[row], asked[slot])


def test_a_row_is_its_own(implementation: str) -> None:
    """A row has the same bits as alone beside rows of NaN, of -inf, or that break every rule."""
    asked = [{"k": 9, "p": 0.8}] if implementation == "triton" else [{"k": 9, "p": 0.8}, {"p": 0.6}] * 20
    scores = tempered(torch.randn(len(asked), 100) * 2)
    alone = [scores[row : row + 1].clone() for row in range(len(asked))]
    for row, options in enumerate(asked):
        top_k_top_p(alone[row], cuts(options))
    values = (float("nan"),) if implementation == "triton" else (float("nan"), NEVER, float("inf"), 3.0)
    beside = torch.stack([torch.full((100,), value) for value in values])
    together = torch.cat([beside, scores])
    top_k_top_p(together, cuts(*[{"k": 4, "p": 0.5, "m": 0.1}] * len(values), *asked))
    assert torch.equal(together[len(values) :], torch.cat(alone))


def test_zeros_of_both_signs_tie() -> None:
    """If one of them stays, so does the other, and both have weight."""
    scores = torch.tensor([[-0.0, -1.0, 0.0, -3.0]]).repeat(3, 1)
    top_k_top_p(scores, cuts({"k": 1}, {"p": 0.4}, {"k": 1, "p": 0.999}))
    assert scores.tolist() == [[0.0, NEVER, 0.0, NEVER]] * 3


def test_many_rows(implementation: str) -> None:
    count = 5 if implementation == "triton" else 130
    scores = tempered(torch.randn(count, 60))
    asked: list[dict[str, float]] = [{"k": 1 + row % 50} for row in range(count)]
    found = scores.clone()
    top_k_top_p(found, cuts(*asked))
    assert found.tolist() == [expected(scores[row], options) for row, options in enumerate(asked)]


def test_weights_are_the_exponentials(implementation: str) -> None:
    """Each weight is right to 3e-7 of itself and one unit, in the range and beyond it; C++ weights equal the
    reference's."""
    scores = torch.cat(
        [-torch.rand(60_000) * 33, torch.linspace(-0.01, 0, 3990), -(2.0 ** -torch.arange(0, 150, 15.0))]
    )
    scores = torch.cat([scores, torch.tensor([-0.0, 0.0, NEVER, -1e30, -40.0, -32.0])])
    scores = scores[: len(scores) // 16 * 16].contiguous()
    found = weights(scores)
    exact = scores.double().exp() * 2.0**FRACTION_BITS
    off = (found - exact).abs()
    assert bool((off <= exact * 3e-7 + 1).all())
    assert not bool((off <= exact * 3e-8 + 1).all())
    assert int(weights(torch.zeros(1))) == 2**FRACTION_BITS and int(weights(torch.tensor([NEVER]))) == 0
    if implementation not in ("reference", "triton", "triton compiled"):
        assert torch.equal(cpu.weights(scores), found)
