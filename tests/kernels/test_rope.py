"""Rotation agrees with complex multiplication in fp64, with the optional norm before it and the write into a poisoned
pool."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops.kv_format import KV_FORMATS, KV_GROUP, KV_SCALE_DTYPE
from inferd.kernels.ops.rope import rope_and_cache
from tests.kernels.conftest import TRITON
from tests.kernels.pools import nan_scales

pytestmark = pytest.mark.usefixtures("implementation")

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative to values of at least 1: one rounding to the dtype."""


def error(result: Tensor, expected: Tensor) -> float:
    return float(((result.double() - expected).abs() / expected.abs().clamp(min=1)).max())


@dataclass
class Case:
    """Random inputs of T tokens, at random positions, for random slots of a pool that is NaN elsewhere."""

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
    """Dtype of the pool; None: that of the heads."""
    norms_v: bool = False
    smoothing: Tensor | None = None

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
        self.kv = torch.full(shape, float("nan")).to(self.kv_dtype or self.dtype)
        self.kv_scales = nan_scales(self.kv)

    def run(self) -> Tensor:
        q, k, v = self.q.clone(), self.k.clone(), self.v.clone()
        return rope_and_cache(
            q, k, v, self.cos_sin, self.positions, self.slots, self.kv, *self.norms, EPS, self.kv_scales,
            norms_v=self.norms_v, smoothing=self.smoothing,
        )  # fmt: skip

    def stored(self, plane: int) -> tuple[Tensor, Tensor]:
        """K (0) or V (1) of each token as an 8-bit pool holds them, and the scale of each: [T, G, D]."""
        assert self.kv_scales is not None
        blocks, offsets = self.slots // self.block_size, self.slots % self.block_size
        scales = self.kv_scales[blocks, plane, :, offsets].double().repeat_interleave(KV_GROUP, -1)
        return self.kv[blocks, plane, :, offsets].double(), scales[..., : self.head_dim]

    def rotated(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """Pairs (x[i], x[i + r/2]) as complex numbers, rotated by position * frequency."""
        wide = x.double()
        if norm is not None:
            wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
        half = self.rotary_dim // 2
        pairs = torch.complex(wide[..., :half], wide[..., half : 2 * half])
        angles = self.angles[self.positions][:, None]
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag, wide[..., 2 * half :]], dim=-1)


@pytest.mark.sampled(keep=5, of="triton")
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


@pytest.mark.sampled(keep=2, of="triton")
@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(24, 24), (40, 16), (96, 96), (64, 64)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_an_8_bit_pool_holds_the_nearest_numbers_times_scales(
    kv_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, rotary_dim: int, has_norm: bool
) -> None:
    """Elements of every magnitude, up to the largest that a scale holds. Each group has its own scale, so nothing
    overflows. In heads of 96 and 40 a group lies in several parts of the rotation."""
    case = Case(9, 3, head_dim, rotary_dim, dtype, has_norm, kv_dtype=kv_dtype)
    most = KV_FORMATS[kv_dtype].most
    sizes = 2.0 ** torch.linspace(-60, 60, case.v[:, :, 0].numel()).reshape(case.v.shape[:2])[..., None]
    sizes = sizes * 2.0 ** -(torch.arange(head_dim) // KV_GROUP)
    case.k, case.v = (case.k * sizes).to(dtype), (case.v * sizes).to(dtype)
    case.v[0, 0] = 2.0**100 * most
    case.v[0, 1] = 0.0
    case.v[0, 2] = torch.tensor([most, 2.5, 2.0**-9, 3 * 2.0**-10])[torch.arange(head_dim) % 4].to(dtype)
    q = case.run()
    (k, k_scales), (v, v_scales) = case.stored(0), case.stored(1)
    wide = case.v.float()
    assert torch.equal(v_scales, expected_scales(wide, most).double())
    assert torch.equal(v, nearest_numbers(wide * (1.0 / v_scales.float()), kv_dtype))
    expected = case.rotated(case.k, case.norms[1])
    assert bool((k_scales / expected_scales(expected, most).double() - 1).abs().max() <= 2**-7)
    step = torch.full_like(expected, 0.5)
    if kv_dtype == torch.float8_e4m3fn:
        step = 2.0 ** ((expected / k_scales).abs().clamp(min=2.0**-6).log2().floor() - 4)
    assert bool(((k * k_scales - expected).abs() <= step * k_scales * 1.02).all())
    alike = Case(9, 3, head_dim, rotary_dim, dtype, has_norm)
    alike.q, alike.k, alike.positions, alike.norms = case.q, case.k, case.positions, case.norms
    assert torch.equal(alike.run(), q)


def random_powers(num_kv_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """[G, D] powers of two; channels that rotate against each other have the same."""
    powers, half = 2.0 ** torch.randint(-10, 1, (num_kv_heads, head_dim)), rotary_dim // 2
    powers[:, half:rotary_dim] = powers[:, :half]
    return powers


@pytest.mark.sampled(keep=4, of="triton")
@pytest.mark.parametrize("kv_dtype", [None, *KV_FORMATS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"), [(6, 3, 64, 64), (9, 9, 24, 24), (10, 1, 40, 16), (2, 1, 256, 256)]
)
def test_smoothing_has_the_bits_of_smoothed_inputs(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    plain = Case(heads, kv_heads, head_dim, rotary_dim, dtype, has_norm=False, kv_dtype=kv_dtype)
    powers = random_powers(kv_heads, head_dim, rotary_dim)
    smoothed = replace(plain, smoothing=torch.stack([powers, 1 / powers]))
    smoothed.q, smoothed.k, smoothed.v = plain.q.clone(), plain.k.clone(), plain.v
    smoothed.positions, smoothed.slots = plain.positions, plain.slots
    plain.q *= powers.repeat_interleave(heads // kv_heads, 0).to(dtype)
    plain.k /= powers.to(dtype)
    assert torch.equal(smoothed.run(), plain.run())
    assert same_bits(smoothed.kv, plain.kv)
    if kv_dtype is not None:
        assert smoothed.kv_scales is not None and plain.kv_scales is not None
        assert same_bits(smoothed.kv_scales, plain.kv_scales)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether both hold the same bytes, NaN included."""
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.sampled(keep=2, of="triton")
@pytest.mark.parametrize("rotary_dim", [64, 16])
def test_smoothing_comes_after_the_norm(rotary_dim: int) -> None:
    plain = Case(4, 1, 64, rotary_dim, torch.float32, has_norm=True, kv_dtype=torch.int8)
    powers = random_powers(1, 64, rotary_dim)
    smoothed = replace(plain, smoothing=torch.stack([powers, 1 / powers]))
    smoothed.q, smoothed.k, smoothed.v = plain.q, plain.k, plain.v
    smoothed.positions, smoothed.slots, smoothed.norms = plain.positions, plain.slots, plain.norms
    q_norm, k_norm = plain.norms
    assert q_norm is not None and k_norm is not None
    plain.norms = q_norm * powers[0], k_norm / powers[0]
    assert torch.equal(smoothed.run(), plain.run())
    assert same_bits(smoothed.kv, plain.kv)


def test_q_alone_is_smoothed_for_the_keys_of_another_layer() -> None:
    case = Case(6, 2, 64, 64, torch.bfloat16, has_norm=True)
    powers = random_powers(2, 64, 64)
    case.smoothing = torch.stack([powers, 1 / powers])
    expected = case.run()
    case.k = case.v = case.k[:, :0]
    assert torch.equal(case.run(), expected)
    case.smoothing = None
    assert not torch.equal(case.run(), expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_what_is_no_number_stays_none_in_its_group_of_an_8_bit_pool(kv_dtype: torch.dtype) -> None:
    case = Case(4, 4, 40, 40, torch.float32, has_norm=False, kv_dtype=kv_dtype)
    case.v[2, 1, 5], case.v[3, 2, 0], case.v[5, 0, 39] = float("nan"), float("inf"), 2.0**110
    case.k[4, 0, 12] = float("nan")
    case.run()
    (k, k_scales), (v, v_scales) = case.stored(0), case.stored(1)
    for numbers, scales, places in (
        (k, k_scales, [(4, 0, 0), (4, 0, 32)]),
        (v, v_scales, [(2, 1, 0), (3, 2, 0), (5, 0, 32)]),
    ):
        is_failed = (numbers * scales).isnan()
        expected = torch.zeros_like(is_failed)
        for token, head, first in places:
            expected[token, head, first : first + KV_GROUP] = True
        assert torch.equal(is_failed, expected)
        assert bool((numbers * scales)[~is_failed].isfinite().all())


@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_no_other_scale_is_written(kv_dtype: torch.dtype) -> None:
    case = Case(4, 2, 40, 40, torch.bfloat16, has_norm=False, kv_dtype=kv_dtype)
    case.run()
    assert case.kv_scales is not None
    is_written = ~case.kv_scales.isnan().permute(0, 3, 1, 2, 4).reshape(case.num_blocks * case.block_size, -1)
    assert sorted(is_written.all(1).nonzero()[:, 0].tolist()) == sorted(case.slots.tolist())
    assert torch.equal(is_written.any(1), is_written.all(1))


def expected_scales(heads: Tensor, most: float) -> Tensor:
    """[..., D]: each element's scale, group by group."""
    scales = torch.empty_like(heads, dtype=KV_SCALE_DTYPE)
    for first in range(0, heads.shape[-1], KV_GROUP):
        largest = heads[..., first : first + KV_GROUP].abs().amax(-1, keepdim=True)
        scales[..., first : first + KV_GROUP] = (largest.float() * (1.0 / most)).clamp(min=2.0**-100).to(KV_SCALE_DTYPE)
    return scales


def nearest_numbers(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest of all 8-bit numbers, by search; of two as near, the one whose last bit is 0."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(dtype).double()
    keeps = numbers.isfinite() & (numbers.abs() <= KV_FORMATS[dtype].most) & ~((numbers == 0) & numbers.signbit())
    order = torch.argsort(codes[keeps] % 2, stable=True)
    candidates = numbers[keeps][order]
    return candidates[(x.double()[..., None] - candidates).abs().argmin(-1)]


@pytest.mark.parametrize("kv_dtype", [None, *KV_FORMATS])
@pytest.mark.parametrize("head_dim", [24, 64, 512])
def test_v_is_divided_by_its_rms_if_the_model_norms_it(
    implementation: str, head_dim: int, kv_dtype: torch.dtype | None
) -> None:
    if implementation == TRITON:
        pytest.skip("the Triton kernel does not norm v")
    case = Case(4, 2, head_dim, head_dim, torch.bfloat16, has_norm=True, kv_dtype=kv_dtype)
    case.v *= 3
    expected = case.v.double() / (case.v.double().square().mean(-1, keepdim=True) + EPS).sqrt()
    plain = case.run()
    case.norms_v = True
    assert torch.equal(case.run(), plain)
    if kv_dtype is None:
        found = case.kv[case.slots // case.block_size, 1, :, case.slots % case.block_size].double()
        assert error(found, expected) < TOLERANCE[torch.bfloat16] < error(case.v.double(), expected)
    else:
        numbers, scales = case.stored(1)
        assert float((numbers * scales - expected).abs().max() / expected.abs().max()) < 2**-4


def test_q_alone_is_rotated_if_there_are_no_heads_of_k() -> None:
    case = Case(4, 2, 64, 64, torch.float32, has_norm=True)
    expected = case.run()
    case.kv.fill_(float("nan"))
    case.k = case.v = case.k[:, :0]
    assert torch.equal(case.run(), expected)
    assert bool(case.kv.isnan().all())


@pytest.mark.sampled(keep=2, of="triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 16), (24, 8)])
def test_heads_of_q_may_have_gates_between_them(head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    case = Case(18, 2, head_dim, rotary_dim, dtype, has_norm=True)
    expected = case.run()
    case.q = torch.stack([case.q, torch.full_like(case.q, float("nan"))], dim=2)[:, :, 0]
    q, k, v = case.q, case.k, case.v
    assert not q.is_contiguous()
    again = rope_and_cache(q, k, v, case.cos_sin, case.positions, case.slots, case.kv, *case.norms, EPS)
    assert torch.equal(again, expected)
