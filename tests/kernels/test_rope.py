"""Rotation against complex multiplication in fp64, the optional norm before it, and the write into a poisoned pool."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from inferd.kernels.rope import rope_and_cache

pytestmark = pytest.mark.usefixtures("implementation")

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative to values of at least 1: one rounding to the dtype."""


def error(result: Tensor, expected: Tensor) -> float:
    return float(((result.double() - expected).abs() / expected.abs().clamp(min=1)).max())


@dataclass
class Case:
    """Random inputs of T tokens, at random positions, into random slots of a pool that is NaN elsewhere."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    dtype: torch.dtype
    has_norm: bool
    num_tokens: int = 11
    num_blocks: int = 5
    block_size: int = 16
    kv_dtype: torch.dtype | None = None
    """The heads' where it is None."""

    def __post_init__(self) -> None:
        self.q = torch.randn(self.num_tokens, self.num_heads, self.head_dim).to(self.dtype)
        self.k, self.v = torch.randn(2, self.num_tokens, self.num_kv_heads, self.head_dim).to(self.dtype)
        self.positions = torch.randint(0, 500, (self.num_tokens,))
        self.slots = torch.randperm(self.num_blocks * self.block_size)[: self.num_tokens]
        self.norms: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.has_norm:
            q_norm, k_norm = torch.rand(2, self.head_dim).to(self.dtype) + 1
            self.norms = (q_norm, k_norm)
        half = self.rotary_dim // 2
        self.angles = torch.arange(500)[:, None].double() * 10000.0 ** -(torch.arange(half) / half).double()
        self.cos_sin = torch.cat([self.angles.cos(), self.angles.sin()], dim=1).float()
        shape = (self.num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim)
        self.kv = torch.full(shape, float("nan"), dtype=self.kv_dtype or self.dtype)

    def run(self) -> Tensor:
        q, k, v = self.q.clone(), self.k.clone(), self.v.clone()
        return rope_and_cache(q, k, v, self.cos_sin, self.positions, self.slots, self.kv, *self.norms, EPS)

    def rotated(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """Pairs (x[i], x[i + r/2]) as complex numbers, turned by position * frequency."""
        wide = x.double()
        if norm is not None:
            wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
        half = self.rotary_dim // 2
        pairs = torch.complex(wide[..., :half], wide[..., half : 2 * half])
        angles = self.angles[self.positions][:, None]
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag, wide[..., 2 * half :]], dim=-1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [(4, 2, 64, 64), (3, 1, 10, 10), (2, 2, 24, 12), (19, 5, 128, 128), (2, 1, 128, 64), (3, 3, 256, 256)],
)
def test_equals_complex_rotation(
    dtype: torch.dtype, has_norm: bool, heads: int, kv_heads: int, head_dim: int, rotary_dim: int
) -> None:
    case = Case(heads, kv_heads, head_dim, rotary_dim, dtype, has_norm)
    q = case.run()
    assert q.dtype == dtype
    assert error(q, case.rotated(case.q, case.norms[0])) < TOLERANCE[dtype]
    blocks, offsets = case.slots // case.block_size, case.slots % case.block_size
    k = case.kv[blocks, 0, :, offsets]
    assert error(k, case.rotated(case.k, case.norms[1])) < TOLERANCE[dtype]
    assert torch.equal(case.kv[blocks, 1, :, offsets], case.v)


def test_no_other_slot_is_written() -> None:
    case = Case(4, 2, 16, 16, torch.float32, has_norm=False)
    case.run()
    by_slot = case.kv.permute(0, 3, 1, 2, 4).reshape(case.num_blocks * case.block_size, -1)
    is_written = ~by_slot.isnan().all(dim=1)
    assert sorted(is_written.nonzero()[:, 0].tolist()) == sorted(case.slots.tolist())


def test_the_tolerance_sees_neighbouring_positions_and_a_missing_norm() -> None:
    case = Case(4, 2, 64, 64, torch.float32, has_norm=True)
    q = case.run()
    assert error(q, case.rotated(case.q, None)) > 10 * TOLERANCE[torch.bfloat16]
    case.positions = case.positions + 1
    assert error(q, case.rotated(case.q, case.norms[0])) > 10 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("has_norm", [False, True])
def test_a_token_is_its_own(has_norm: bool) -> None:
    case = Case(4, 2, 64, 64, torch.bfloat16, has_norm)
    whole, pool = case.run(), case.kv.clone()
    for token in (0, 5, 10):
        one = slice(token, token + 1)
        case.kv.fill_(float("nan"))
        q = rope_and_cache(
            case.q[one], case.k[one], case.v[one], case.cos_sin, case.positions[one], case.slots[one], case.kv,
            *case.norms, EPS,
        )  # fmt: skip
        block, offset = divmod(int(case.slots[token]), case.block_size)
        assert torch.equal(q, whole[one])
        assert torch.equal(case.kv[block, :, :, offset], pool[block, :, :, offset])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [24, 16])
def test_an_8_bit_pool_holds_the_nearest_number_up_to_448(dtype: torch.dtype, rotary_dim: int) -> None:
    """Of every size: e4m3's numbers lie 2^-9 apart near 0 and 32 apart near 448. NaN stays, infinity does not."""
    case = Case(9, 3, 24, rotary_dim, dtype, has_norm=False, kv_dtype=torch.float8_e4m3fn)
    magnitudes = 2.0 ** torch.linspace(-12, 12, case.k.numel()).reshape(case.k.shape)
    case.k, case.v = (case.k * magnitudes).to(dtype), (case.v * magnitudes).to(dtype)
    case.v[0, 0, :5] = torch.tensor([float("inf"), float("-inf"), float("nan"), 448.0, -464.0])
    case.v[1, 0, :4] = torch.tensor([2.0**-10, 3 * 2.0**-10, 1.0625, 1.1875])  # halfway: to the even neighbour
    q = case.run()
    blocks, offsets = case.slots // case.block_size, case.slots % case.block_size
    k, v = case.kv[blocks, 0, :, offsets].float(), case.kv[blocks, 1, :, offsets].float()
    assert v[0, 0, :5].nan_to_num(nan=9.0).tolist() == [448.0, -448.0, 9.0, 448.0, -448.0]
    assert v[1, 0, :4].tolist() == [0.0, 2.0**-8, 1.0, 1.25]
    assert torch.equal(v.nan_to_num(), nearest_8_bits(case.v).nan_to_num())
    expected = case.rotated(case.k, None)
    spacing = 2.0 ** (expected.abs().clamp(2.0**-6, 448.0).log2().floor() - 3)
    assert bool(((k - expected.clamp(-448, 448)).abs() <= spacing * 0.5001).all())
    alike = Case(9, 3, 24, rotary_dim, dtype, has_norm=False)
    alike.q, alike.k, alike.positions = case.q, case.k, case.positions
    assert torch.equal(alike.run(), q)


def nearest_8_bits(x: Tensor) -> Tensor:
    """By search among all that there are; of two as near, the one whose last bit is 0."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    finite = numbers.isfinite() & ~((numbers == 0) & numbers.signbit())
    codes = torch.arange(256)[finite]
    codes = codes[torch.argsort(codes % 2, stable=True)]
    wide = x.double().clamp(-448, 448)
    nearest = (wide[..., None] - numbers[codes]).abs().nan_to_num(nan=0.0).argmin(-1)
    return torch.where(wide.isnan(), wide, numbers[codes][nearest]).float()
