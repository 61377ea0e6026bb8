"""Philox equals its authors' test vectors, the noise its definition, and pruned sampling an unpruned search.

Tests of the noise alone belong to the reference and run once; tests of `sample` run for every implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops.sample import noise_and_bound, sample
from inferd.kernels.ops.sample.philox import NOISE_MAX, gumbel_noise, noise_of_bits, philox4x32

every_implementation = pytest.mark.usefixtures("implementation")

KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""philox4x32-10 in Random123's kat_vectors: (counter, key, output)."""


def words(values: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    output = philox4x32(words(counter), words(key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in output) == expected


def test_noise_is_keyed_by_seed_position_and_token() -> None:
    seed, position, token_id = 2**53 - 1, 2**33 + 5, 151_000
    counter = words((token_id, position & 0xFFFFFFFF, position >> 32, 0))
    word = philox4x32(counter, words((seed & 0xFFFFFFFF, seed >> 32)))[0]  # type: ignore[arg-type]
    expected = -math.log(-math.log(((int(word) >> 8) + 0.5) / 2**24))
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), torch.tensor([token_id]))
    assert noise.tolist() == torch.tensor([expected]).tolist()
    for other in ((seed - 1, position, token_id), (seed, position + 1, token_id), (seed, position, token_id + 1)):
        assert gumbel_noise(*(torch.tensor([value]) for value in other)) != noise


def test_noise_has_the_same_bits_in_every_call_shape() -> None:
    """All 2^24 noises, through the vectorised and the strided logarithm, and shifted within a vector."""
    bits = torch.arange(2**24)
    whole = noise_of_bits(bits)
    assert float(whole.max()) == NOISE_MAX
    assert -2.86 < float(whole.min()) < -2.85
    for shift in (1, 5):
        assert torch.equal(noise_of_bits(bits[shift:]), whole[shift:])
    uniform = torch.empty(2**24, 2, dtype=torch.float64)
    uniform[:, 0] = (bits.double() + 0.5) / 2**24
    inner = torch.empty(2**24, 2, dtype=torch.float64)
    inner[:, 0] = -uniform[:, 0].log()
    assert torch.equal((-inner[:, 0].log()).float(), whole)


def unpruned(scores: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Sampling by definition, over the whole vocabulary."""
    noise = gumbel_noise(seeds[:, None], positions[:, None], torch.arange(scores.shape[1]))
    return (scores + noise).argmax(dim=-1)


@every_implementation
@pytest.mark.sampled(keep=4, of="triton")
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 12.0])
@pytest.mark.parametrize("vocab_size", [1, 17, 2003])
def test_pruning_changes_nothing(implementation: str, spread: float, vocab_size: int) -> None:
    third = 4 if implementation == "triton" else 20
    scores = torch.randn(3 * third, vocab_size) * spread
    scores[third : 2 * third] = scores[third : 2 * third].bfloat16().float()
    scores[2 * third :, 1::3] = float("-inf")
    seeds, positions = torch.randint(0, 2**53, (3 * third,)), torch.randint(0, 2**40, (3 * third,))
    assert torch.equal(sample(scores, seeds, positions), unpruned(scores, seeds, positions))


def peaked(rows: int, vocab_size: int) -> Tensor:
    """Scores like a model's: a few tokens far above the rest."""
    scores = torch.randn(rows, vocab_size) * 2
    return scores.index_add_(1, torch.randint(vocab_size, (20,)), torch.full((rows, 20), 12.0))


def masked(rows: int, vocab_size: int) -> Tensor:
    """Nine tokens in ten at -inf, and one row without an allowed token."""
    scores = torch.randn(rows, vocab_size).masked_fill_(torch.rand(rows, vocab_size) < 0.9, float("-inf"))
    scores[-1] = float("-inf")
    return scores


SCORES: dict[str, Callable[[int, int], Tensor]] = {
    "equal": torch.zeros,
    "flat": torch.randn,
    "wide": lambda rows, vocab_size: torch.randn(rows, vocab_size) * 30,
    "rising": lambda rows, vocab_size: torch.linspace(-20, 20, vocab_size).repeat(rows, 1),
    "tied": lambda rows, vocab_size: (torch.randn(rows, vocab_size) * 3).round() * 2.0**24,
    "peaked": peaked,
    "masked": masked,
}


@every_implementation
@pytest.mark.sampled(keep=6, of="triton")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("rows", "vocab_size"), [(9, 1), (40, 7), (40, 1000), (5, 8193), (1, 32_000), (3, 151_936)])
@pytest.mark.parametrize("kind", SCORES)
def test_equals_the_definition(implementation: str, kind: str, rows: int, vocab_size: int, threads: int) -> None:
    if implementation == "triton":
        if threads > 1 or vocab_size > 10_000:
            pytest.skip("interpreted, it has no threads, and takes 10 ms for 1024 tokens")
        rows = min(rows, 10_000 // vocab_size, 6)
    torch.set_num_threads(threads)
    scores = SCORES[kind](rows, vocab_size)
    seeds, positions = torch.randint(2**32, 2**62, (rows,)), torch.randint(2**32, 2**62, (rows,))
    seeds[::2], positions[::3] = seeds[::2] & 0xFFFFFFFF, positions[::3] & 0xFFFFFFFF
    assert torch.equal(sample(scores, seeds, positions), unpruned(scores, seeds, positions))


@every_implementation
def test_the_bound_holds_for_every_noise(implementation: str) -> None:
    """All 2^24 noises: the C++ noise equals the reference's bit for bit, and its bound is above it and close enough to
    help."""
    if implementation == "reference" or implementation.startswith("triton"):
        pytest.skip("the reference rules tokens out by the largest noise alone; Triton has a test of its own")
    bits = torch.arange(2**24, dtype=torch.int32)
    noise, bound = noise_and_bound(bits)
    assert torch.equal(noise, noise_of_bits(bits))
    assert bool((bound > noise).all())
    assert bool((bound - noise < 0.1)[noise > 3.0].all())


@every_implementation
def test_a_row_is_its_own(implementation: str) -> None:
    rows = 8 if implementation == "triton" else 32
    scores, seeds = torch.randn(rows, 1000), torch.randint(0, 2**53, (rows,))
    positions = torch.randint(0, 5000, (rows,))
    whole = sample(scores, seeds, positions)
    alone = [sample(scores[row][None], seeds[row][None], positions[row][None]) for row in range(rows)]
    assert torch.equal(whole, torch.cat(alone))
    seeds[1:], positions[1:] = 0, 0
    scores[1:] = float("nan")
    assert sample(scores, seeds, positions)[0] == whole[0]


@every_implementation
@pytest.mark.parametrize("vocab_size", [5, 40_003])
def test_ties_go_to_the_lowest_id(vocab_size: int) -> None:
    """fp32 numbers near 2^30 are 64 apart, so adding the noise does not change a score. 40,003 tokens are five
    chunks."""
    scores = torch.full((3, vocab_size), 2.0**30)
    scores[0, 0] = scores[2, :-1] = 0.0
    scores[2, 3] = float("inf")
    assert sample(scores, torch.tensor([1, 2, 3]), torch.tensor([0, 0, 0])).tolist() == [1, 0, 3]


@every_implementation
def test_rows_without_a_choice_give_an_id() -> None:
    scores = torch.tensor([[float("-inf")] * 3, [float("nan"), 0.0, 1.0], [float("-inf"), 0.0, float("-inf")]])
    ids = sample(scores, torch.arange(3), torch.arange(3))
    assert ids[2] == 1
    assert bool(((ids >= 0) & (ids < 3)).all())


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected).square() / expected).sum())


@every_implementation
def test_draws_follow_the_softmax(implementation: str) -> None:
    """Pearson's test over 40,000 draws and 8 tokens: 99.99% of fair samplers stay below 29.9 (7 degrees of freedom)."""
    if implementation == "triton":
        pytest.skip("40,000 draws by the interpreter; that each is the definition's is tested above")
    scores = torch.tensor([1.0, 0.0, -1.0, 0.5, 2.0, -2.0, 0.0, 1.5])
    count = 40_000
    ids = torch.cat(
        [sample(scores.expand(2000, -1), torch.full((2000,), 7), at) for at in torch.split(torch.arange(count), 2000)]
    )
    counts = torch.bincount(ids, minlength=8).double()
    probabilities = scores.double().softmax(-1)
    assert chi_square(counts, probabilities) < 29.9
    assert chi_square(counts, (scores.double() / 1.1).softmax(-1)) > 100
