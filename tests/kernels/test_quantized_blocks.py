"""Matrices in the layouts of GGUF's blocks: scales of bytes with a factor for 256 inputs, and numbers of 2, 3, 5 and
6 bits.

Only their storage differs from that of scales in fp32 and numbers in bytes, so all bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from inferd.kernels.ops import quantized
from inferd.kernels.ops.linear_int4 import linear_int4
from inferd.kernels.ops.linear_int8 import linear_int8
from inferd.kernels.ops.quantized import Apply, HasRows, Matrix, rows_of
from tests.kernels.test_quantized import rounded, same_bits

pytestmark = pytest.mark.usefixtures("implementation")
HAS_TRITON = False
"""Triton takes scales in fp32 and numbers in bytes: see `test_on_a_gpu_blocks_are_bytes`."""

IN_SIZE, OUT_SIZE = 512, 77


@dataclass(frozen=True)
class Form:
    bits: int
    group_size: int
    has_minimums: bool = False
    has_factors: bool = True
    table: str = "centred"


FORMS = {
    "Q4_K": Form(4, 32, has_minimums=True),
    "IQ4_XS": Form(4, 32, table="iq4nl"),
    "Q2_K": Form(2, 16, has_minimums=True),
    "Q3_K": Form(3, 16),
    "Q5_0": Form(5, 32, has_factors=False),
    "Q5_1": Form(5, 32, has_minimums=True, has_factors=False),
    "Q5_K": Form(5, 32, has_minimums=True),
    "Q6_K": Form(6, 16),
}


def matrix_of(form: Form, in_size: int = IN_SIZE) -> Matrix:
    """A random matrix, whose numbers and scales use all of their bits."""
    is_short = form.bits <= 4
    low = 0 if form.has_minimums else (8 if is_short else 0) - (1 << (form.bits - 1))
    q = torch.randint(low, low + (1 << form.bits), (OUT_SIZE, in_size))
    groups = OUT_SIZE, in_size // form.group_size
    found: dict[str, Tensor] = {}
    for name in ("scales", "minimums") if form.has_minimums else ("scales",):
        if form.has_factors:
            found[name] = torch.randint(*((0, 16) if form.bits == 2 else (-128, 128)), groups).to(torch.int8)
            found[f"block_{name}"] = (torch.randn(OUT_SIZE, in_size // 256) / 1000).half()
        else:
            found[name] = (torch.randn(groups) / 10).half()
    return Matrix(
        q.to(torch.uint8 if is_short else torch.int8),
        bias=torch.randn(OUT_SIZE),
        table=form.table,  # type: ignore[arg-type]
        narrowed_to=None if form.bits == 4 else form.bits,
        **found,
    )


def in_floats(of: Matrix) -> Matrix:
    """The same matrix with scales in fp32, and numbers in bytes."""

    def times(values: Tensor | None, factors: Tensor | None) -> Tensor | None:
        if values is None or factors is None:
            return values
        return values.float() * factors.float().repeat_interleave(256 // of.group_size, 1)

    scales = times(of.scales, of.block_scales)
    assert scales is not None
    minimums = times(of.minimums, of.block_minimums)
    return Matrix(of.q, scales, of.bias, minimums=minimums, table=of.table)


def bound(of: Matrix, dtype: torch.dtype = torch.float32) -> Apply:
    if of.q.dtype == torch.uint8:
        return linear_int4(
            of.q, of.scales, of.bias, dtype, minimums=of.minimums, table=of.table, block_scales=of.block_scales,
            block_minimums=of.block_minimums, narrowed_to=of.narrowed_to,
        )  # fmt: skip
    return linear_int8(
        of.q, of.scales, of.bias, dtype, minimums=of.minimums, block_scales=of.block_scales,
        block_minimums=of.block_minimums, narrowed_to=of.narrowed_to,
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_the_bits_are_those_of_scales_in_fp32_and_numbers_in_bytes(name: str) -> None:
    of = matrix_of(FORMS[name])
    for dtype, counts in ((torch.float32, (0, 1, 3, 4, 5, 13, 27)), (torch.bfloat16, (1, 27))):
        layer, floats, exact = bound(of, dtype), bound(in_floats(of), dtype), quantized.bind(in_floats(of))
        x = torch.randn(27, IN_SIZE).to(dtype)
        x[1, 40], x[3, -1] = torch.nan, torch.inf
        expected = exact(x)
        for num_rows in counts:
            torch.set_num_threads(1 + num_rows % 3)
            given = layer(x[:num_rows])
            assert same_bits(given, expected[:num_rows]) and same_bits(given, floats(x[:num_rows])), num_rows
            assert same_bits(layer(x[num_rows:]), expected[num_rows:]), "a row's bits depend on the others"


@pytest.mark.parametrize("name", FORMS)
def test_a_layer_is_the_product_of_its_dequantized_matrix(name: str) -> None:
    """A wrong nibble, high bit, scale, minimum or factor gives another product."""
    of = matrix_of(FORMS[name])
    x = torch.randn(5, IN_SIZE)
    near = rounded(x, of.group_size)
    wide = in_floats(of).dequantized()
    assert torch.equal(wide, of.dequantized()) and of.bias is not None
    largest = near.abs() @ wide.abs().T + of.bias.double().abs()
    found = bound(of)(x).double()
    error = (found - (near @ wide.T + of.bias.double())).abs()
    assert (error <= 2e-6 * largest).all()
    for wrong in wrong_versions(of):
        other = near @ in_floats(wrong).dequantized().T + of.bias.double()
        assert ((other - found).abs() > 100 * error).any()


def wrong_versions(of: Matrix) -> list[Matrix]:
    """Two numbers that share a byte are exchanged, or the highest bit of one is changed. In others the scales, minimums
    or factors of two neighbours are exchanged."""
    swapped, flipped = of.q.clone(), of.q.clone()
    swapped[:, [0, of.group_size // 2]] = of.q[:, [of.group_size // 2, 0]]
    flipped[:, 3] ^= 1 << (of.bits - 1)
    found = [replace(of, q=swapped), replace(of, q=flipped)]
    for name in ("scales", "minimums", "block_scales", "block_minimums"):
        values = getattr(of, name)
        if values is not None:
            found.append(replace(of, **{name: values[:, [1, 0, *range(2, values.shape[1])]]}))
    return found


@pytest.mark.parametrize("name", FORMS)
def test_the_largest_sums_are_exact(name: str) -> None:
    """No intermediate number may saturate or overflow."""
    of = matrix_of(FORMS[name])
    x = torch.full((9, IN_SIZE), 127.0)
    x[1], x[2, ::2], x[3, ::4], x[4, 32:] = -127.0, -127.0, -127.0, -127.0
    low, high = int(of.q.min()), int(of.q.max())
    ones = {
        name: torch.ones_like(values)
        for name in ("scales", "minimums", "block_scales", "block_minimums")
        if (values := getattr(of, name)) is not None
    }
    for value, other in ((low, high), (high, low), (high, high)):
        q = torch.full_like(of.q, value)
        q[:, ::2] = other
        extreme = replace(of, q=q, bias=None, **ones)
        for num_rows in (1, 4, 9):
            expected = x[:num_rows].double() @ extreme.dequantized().T
            assert torch.equal(bound(extreme)(x[:num_rows]).double(), expected)


@pytest.mark.parametrize("name", [*FORMS, "Q8_0", "Q4_0", "MXFP4"])
def test_rows_are_those_of_the_dequantized_matrix(name: str) -> None:
    if name in FORMS:
        of = matrix_of(FORMS[name])
    else:
        q = torch.randint(0, 16, (OUT_SIZE, IN_SIZE), dtype=torch.uint8)
        q = torch.randint(-128, 128, q.shape, dtype=torch.int8) if name == "Q8_0" else q
        scales = torch.randn(OUT_SIZE, IN_SIZE // 32).to(torch.bfloat16 if name == "MXFP4" else torch.float16)
        of = Matrix(q, scales, None, table="e2m1" if name == "MXFP4" else "centred")
    layer = bound(of)
    assert isinstance(layer, HasRows)
    ids = torch.tensor([5, 76, 5, 0, 31, 77, -1])
    wide = in_floats(of)
    expected = wide.dequantized()[ids[:5]]
    for row_dtype, dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32),
                             (torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):  # fmt: skip
        found = layer.rows(ids, dtype, row_dtype)
        assert found.dtype == dtype and found[5:].isnan().all()
        assert same_bits(found, rows_of(of, ids).to(row_dtype).to(dtype))
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}[row_dtype]
        assert torch.allclose(found[:5].double(), expected, rtol=tolerance, atol=tolerance)
        assert not torch.allclose(found[:5].double(), expected.roll(1, 1), rtol=tolerance, atol=tolerance)
    assert layer.rows(ids[:0], torch.float32, torch.float32).shape == (0, IN_SIZE)


def test_on_a_gpu_blocks_are_bytes() -> None:
    """The same matrix as other kernels take it."""
    of = matrix_of(FORMS["Q5_K"]).in_bytes()
    assert of.block_scales is None and of.block_minimums is None and of.bits == 8
    assert of.scales.dtype == torch.float32 and of.minimums is not None and of.minimums.dtype == torch.float32


def test_what_a_matrix_refuses() -> None:
    of = matrix_of(FORMS["Q6_K"])
    for changes, words in (
        ({"narrowed_to": 5}, "narrowed_to"),
        ({"block_scales": None}, "scales"),
        ({"block_scales": torch.ones(OUT_SIZE, 1, dtype=torch.float16)}, "block_scales"),
        ({"block_minimums": torch.ones(OUT_SIZE, 2, dtype=torch.float16)}, "block_minimums"),
        ({"x_group_size": 32}, "narrowed_to"),
    ):
        with pytest.raises(AssertionError, match=words):
            replace(of, **changes)  # type: ignore[arg-type]
    of = matrix_of(FORMS["Q2_K"])
    for changes in ({"minimums": None, "block_minimums": None}, {"q": of.q.to(torch.int8)}, {"narrowed_to": 5}):
        with pytest.raises(AssertionError, match="narrowed_to"):
            replace(of, **changes)  # type: ignore[arg-type]


def test_scales_that_share_a_byte_have_4_bits(implementation: str) -> None:
    of = matrix_of(FORMS["Q2_K"])
    of.scales[3, 1] = 16
    if implementation == "reference":
        bound(of)
    else:
        with pytest.raises(AssertionError, match=r"0\.\.15"):
            bound(of)
