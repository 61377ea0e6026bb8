"""The Triton kernel is exact because of three properties: its random bits, its fp32 noise within a margin, its fp64
noise."""

from __future__ import annotations

import pytest
import torch

from inferd.kernels.ops.sample import philox
from tests.kernels import interpreter

triton = pytest.importorskip("triton")
tl = triton.language

from inferd.kernels.ops.sample import triton as kernels  # noqa: E402

_BLOCK, _NUM_BLOCKS = 1024, 1024
_PART = _BLOCK * _NUM_BLOCKS


@triton.jit
def _noises(near, exact, first, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(near + place, kernels.near_noise(first + place))
    tl.store(exact + place, kernels.exact_noise(first + place))


@triton.jit
def _bits(seed, position, token_ids, out, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    tl.store(out + column, kernels.random_bits(tl.load(seed), tl.load(position), tl.load(token_ids + column)))


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("first", range(0, 2**24, _PART))
def test_every_noise_is_within_the_margin_and_exact_where_it_has_to_be(first: int) -> None:
    """All 2^24 noises. The margin is 4 times the error found here, because GPUs have other logarithms."""
    interpreter.repair()
    near, exact = torch.full((2, _PART), float("nan")).unbind()
    _noises[(_NUM_BLOCKS,)](near, exact, first, BLOCK=_BLOCK)
    expected = philox.noise_of_bits(torch.arange(first, first + _PART))
    assert torch.equal(exact, expected)
    error = float((near.double() - expected).abs().max())
    assert 1e-8 < error < kernels.MARGIN.value / 4


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**53 - 1, 7), (5, 2**33 + 5), (2**62 + 3, 2**62)])
def test_bits_are_philoxs(seed: int, position: int) -> None:
    token_ids = torch.randint(0, 2**31 - 1, (64,), dtype=torch.int32)
    out = torch.empty(64, dtype=torch.int32)
    _bits[(1,)](torch.tensor([seed]), torch.tensor([position]), token_ids, out, BLOCK=64)
    noise = philox.gumbel_noise(torch.tensor(seed), torch.tensor(position), token_ids.long())
    assert torch.equal(philox.noise_of_bits(out), noise)
