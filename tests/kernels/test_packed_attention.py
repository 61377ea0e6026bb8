"""Attention within packed sequences agrees with dense attention in fp64. A sequence has the same bits alone, among
others, and on more threads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops.packed_attention import VECTOR, packed_attention

HAS_TRITON = False

pytestmark = pytest.mark.usefixtures("implementation")

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.5 * 2**-7}
"""Absolute, for values below four: one rounding of the result to the dtype, and the effect of rounded weights."""
DTYPES = tuple(TOLERANCE)
LENGTHS = (5, 0, 1, 300, 16, 257, 31, 64, 0)
"""Lengths of sequences that end before, at and behind borders of vectors, of panels and of tiles."""


def starts_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def random_qkv(num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> Sequence[Tensor]:
    """q, k and v side by side, as a fused projection gives them. NaN lies before the first token and behind the
    last."""
    padded = torch.full((num_tokens + 2, 3, heads, head_dim), float("nan")).to(dtype)
    padded[1:-1] = torch.randn(num_tokens, 3, heads, head_dim)
    return padded[1:-1].unbind(1)


def dense(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, window: int | None, bias: Tensor | None
) -> Tensor:
    """[T, H, D] fp64."""
    k, v = (torch.stack([one[:, head * k.shape[1] // q.shape[1]] for head in range(q.shape[1])], 1) for one in (k, v))
    parts = []
    for own in zip(*(torch.split(one.double(), list(lengths)) for one in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", own[0], own[1]) * scale
        positions = torch.arange(len(own[0]))
        distances = positions[None, :] - positions[:, None]
        if bias is not None:
            reach = bias.shape[1] // 2
            scores = scores + bias.double()[:, (distances + reach).clamp(0, 2 * reach)]
        if window is not None:
            scores = scores.masked_fill((distances > window) | (distances < -window), float("-inf"))
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), own[2]))
    return torch.cat(parts)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 32), (2, 64), (1, 24), (2, 80), (1, 128), (1, 10)])
@pytest.mark.parametrize("window", [None, 1, 20, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_agrees_with_dense_attention(
    dtype: torch.dtype, heads: int, head_dim: int, window: int | None, has_bias: bool
) -> None:
    qkv = random_qkv(sum(LENGTHS), heads, head_dim, dtype)
    bias = torch.randn(heads, 2 * 40 + 1) if has_bias else None
    scale = head_dim**-0.5
    found = packed_attention(*qkv, starts_of(LENGTHS), scale, window, bias)
    assert found.dtype == dtype and found.is_contiguous()
    assert error(found, dense(*qkv, LENGTHS, scale, window, bias)) < TOLERANCE[dtype]


def grouped_qkv(num_tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Sequence[Tensor]:
    """q by itself, and k and v side by side, as a pool of blocks of one token has them."""
    _, k, v = random_qkv(num_tokens, kv_heads, head_dim, dtype)
    return random_qkv(num_tokens, heads, head_dim, dtype)[0], k, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (6, 2), (6, 3)])
@pytest.mark.parametrize("window", [None, 20])
def test_heads_of_q_share_those_of_k_and_v(dtype: torch.dtype, heads: int, kv_heads: int, window: int | None) -> None:
    """Lengths of one tile, whose keys the heads of an item share, and of several."""
    lengths = (5, 300, 256, 31, 600)
    q, k, v = grouped_qkv(sum(lengths), heads, kv_heads, 32, dtype)
    found = packed_attention(q, k, v, starts_of(lengths), 0.2, window)
    assert error(found, dense(q, k, v, lengths, 0.2, window, None)) < TOLERANCE[dtype]
    wrong = dense(q, k.flip(1) if kv_heads > 1 else k.flip(0), v, lengths, 0.2, window, None)
    assert error(found, wrong) > 4 * TOLERANCE[dtype]
    wide = [one.repeat_interleave(heads // kv_heads, dim=1) for one in (k, v)]
    assert torch.equal(packed_attention(q, *wide, starts_of(lengths), 0.2, window), found)
    start, end = 5, 305
    alone = packed_attention(*(one[start:end] for one in (q, k, v)), starts_of([300]), 0.2, window)
    assert torch.equal(alone, found[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_at_every_length(dtype: torch.dtype) -> None:
    lengths = range(1, 601)
    qkv = random_qkv(sum(lengths), 1, 8, dtype)
    found = packed_attention(*qkv, starts_of(lengths), 0.3)
    assert error(found, dense(*qkv, lengths, 0.3, None, None)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tolerance_tells_wrong_versions_apart(dtype: torch.dtype) -> None:
    lengths = (40, 300)
    q, k, v = random_qkv(340, 2, 32, dtype)
    bias = torch.randn(2, 2 * 30 + 1)
    found = packed_attention(q, k, v, starts_of(lengths), 0.2, 50, bias)
    wrong = {
        "a window of one more": dense(q, k, v, lengths, 0.2, 51, bias),
        "a window of one less": dense(q, k, v, lengths, 0.2, 49, bias),
        "no window": dense(q, k, v, lengths, 0.2, None, bias),
        "another scale": dense(q, k, v, lengths, 0.21, 50, bias),
        "no bias": dense(q, k, v, lengths, 0.2, 50, None),
        "distances from key to query": dense(q, k, v, lengths, 0.2, 50, bias.flip(1)),
        "a border one token off": dense(q, k, v, (41, 299), 0.2, 50, bias),
        "one sequence": dense(q, k, v, (340,), 0.2, 50, bias),
        "keys as values": dense(q, v, k, lengths, 0.2, 50, bias),
    }
    for name, expected in wrong.items():
        assert error(found, expected) > 4 * TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "has_bias"), [(None, False), (70, True)])
def test_a_sequence_has_the_same_bits_alone_and_among_others(
    dtype: torch.dtype, window: int | None, has_bias: bool
) -> None:
    heads = 3
    qkv = random_qkv(sum(LENGTHS), heads, 32, dtype)
    bias = torch.randn(heads, 2 * 40 + 1) if has_bias else None
    starts = starts_of(LENGTHS)
    whole = packed_attention(*qkv, starts, 0.2, window, bias)
    torch.set_num_threads(3)
    assert torch.equal(packed_attention(*qkv, starts, 0.2, window, bias), whole)
    torch.set_num_threads(1)
    for start, length in zip(starts.tolist(), LENGTHS, strict=False):
        own = [one[start : start + length] for one in qkv]
        apart = [own[0], own[1], own[2].contiguous()]
        for given in (own, apart, [one.contiguous() for one in own]):
            alone = packed_attention(*given, starts_of([length]), 0.2, window, bias)
            assert torch.equal(alone, whole[start : start + length])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_with_nan_leaves_others_alone(dtype: torch.dtype) -> None:
    lengths = (20, 33, 300)
    qkv = random_qkv(sum(lengths), 2, 32, dtype)
    before = packed_attention(*qkv, starts_of(lengths), 0.2)
    for one in qkv:
        one[20:53] = float("nan")
    after = packed_attention(*qkv, starts_of(lengths), 0.2)
    assert after[20:53].isnan().all()
    assert torch.equal(after[:20], before[:20]) and torch.equal(after[53:], before[53:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_choose_one_key(dtype: torch.dtype) -> None:
    q, k, v = random_qkv(300, 1, 32, dtype)
    q.fill_(100.0)
    k.fill_(-100.0)
    k[277] = 100.0
    found = packed_attention(q, k, v, starts_of([300]), 1.0)
    assert torch.equal(found, v[277].expand_as(found))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_nothing_gives_nothing(dtype: torch.dtype, lengths: Sequence[int]) -> None:
    qkv = random_qkv(0, 2, 32, dtype)
    assert packed_attention(*qkv, starts_of(lengths), 0.2).shape == (0, 2, 32)


# -- a bias for each pair of a query and a key ---------------------------------------------------------------------


def random_pairs(heads: int, num_tokens: int) -> Tensor:
    """NaN lies behind the keys of each query."""
    pairs = torch.full((heads, num_tokens, -(-num_tokens // VECTOR) * VECTOR), float("nan"))
    pairs[:, :, :num_tokens] = torch.randn(heads, num_tokens, num_tokens)
    return pairs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 31, 64, 257, 300, 520])
@pytest.mark.parametrize("window", [None, 20])
def test_a_bias_of_pairs_agrees_with_dense_attention(dtype: torch.dtype, num_tokens: int, window: int | None) -> None:
    q, k, v = random_qkv(num_tokens, 3, 32, dtype)
    pairs, starts = random_pairs(3, num_tokens), starts_of([num_tokens])
    found = packed_attention(q, k, v, starts, 0.2, window, pairs=pairs)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * 0.2 + pairs[:, :, :num_tokens].double()
    distances = torch.arange(num_tokens) - torch.arange(num_tokens)[:, None]
    if window is not None:
        scores = scores.masked_fill(distances.abs() > window, float("-inf"))
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double())
    assert error(found, expected) < TOLERANCE[dtype]
    if num_tokens > 1:
        turned = pairs.clone()
        turned[:, :, :num_tokens] = pairs[:, :, :num_tokens].mT
        assert error(packed_attention(q, k, v, starts, 0.2, window, pairs=turned), expected) > 4 * TOLERANCE[dtype]
    torch.set_num_threads(3)
    assert torch.equal(packed_attention(q, k, v, starts, 0.2, window, pairs=pairs), found)
    torch.set_num_threads(1)
