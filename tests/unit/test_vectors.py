"""Vectors of smaller components, compared with numpy by the rules of sentence-transformers, and their forms."""

from __future__ import annotations

import base64
import struct
from typing import Any, get_args

import numpy as np
import orjson
import pytest

from inferd.server.endpoints.vectors import VectorForm
from inferd.server.schema.embeddings import VectorType

KINDS = get_args(VectorType)
RANGES = (-128.5 / 127, 126.5 / 127)
"""Ranges of `quantize_embeddings` by which 127 times a component is rounded."""


def vectors(num_components: int) -> Any:
    drawn = np.random.default_rng(num_components).standard_normal((50, num_components)).astype(np.float32)
    drawn[0, :2] = 0.0, -0.0
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def quantized(unit: Any, kind: VectorType, ranges: tuple[float, float] = RANGES) -> Any:
    """As `quantize_embeddings` of sentence-transformers 6.2 computes it."""
    if kind in ("binary", "ubinary"):
        packed = np.packbits(unit > 0, axis=-1)
        return packed if kind == "ubinary" else (packed - 128).astype(np.int8)
    start, step = ranges[0], (ranges[1] - ranges[0]) / 255
    levels = np.clip(np.floor((unit.astype(np.float64) - start) / step), 0, 255)
    return levels.astype(np.uint8) if kind == "uint8" else (levels - 128).astype(np.int8)


def read(form: VectorForm, vector: Any) -> Any:
    return orjson.loads(form.value(vector.tobytes()))


@pytest.mark.parametrize("num_components", [3, 5, 8, 384])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_smaller_components_are_those_of_sentence_transformers(kind: VectorType, num_components: int) -> None:
    unit = vectors(num_components)
    expected = quantized(unit, kind)
    assert [read(VectorForm(kind), vector) for vector in unit] == expected.tolist()
    assert [read(VectorForm(kind), 3 * vector) for vector in unit] == expected.tolist()
    coded = [base64.b64decode(read(VectorForm(kind, is_base64=True), vector)) for vector in unit]
    assert coded == [vector.tobytes() for vector in expected]
    if num_components == 384:
        assert quantized(unit, kind, (-1, 1)).tolist() != expected.tolist() or "binary" in kind


def test_eight_bits_keep_the_direction_of_a_vector() -> None:
    """Loss of 384 components: ranges from -1 to 1 that are not rounded lose five times as much."""
    unit = vectors(384)
    ours = np.array([read(VectorForm("int8"), vector) for vector in unit], dtype=np.float64)
    others = quantized(unit, "int8", (-1, 1)).astype(np.float64)
    assert cosines(ours, unit).min() > 0.996
    assert cosines(others, unit).max() < 0.99


def cosines(found: Any, unit: Any) -> Any:
    return (found * unit).sum(axis=1) / np.linalg.norm(found, axis=1)


def test_extreme_components_stay_within_eight_bits() -> None:
    for vector, expected in (((1.0, 0.0), [127, 0]), ((0.0, -1.0), [0, -127]), ((0.0, 0.0), [0, 0])):
        given = np.array(vector, dtype=np.float32)
        assert read(VectorForm("int8"), given) == expected
        assert read(VectorForm("int8"), 1e30 * given) == expected
        assert read(VectorForm("uint8"), given) == [value + 128 for value in expected]


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_of_tokens_are_written_one_after_another(kind: VectorType) -> None:
    rows = vectors(16)[:3]
    alone = [read(VectorForm(kind), row) for row in rows]
    assert read(VectorForm(kind, width=16), rows) == alone
    coded = b"".join(base64.b64decode(read(VectorForm(kind, is_base64=True), row)) for row in rows)
    assert base64.b64decode(read(VectorForm(kind, is_base64=True, width=16), rows)) == coded


def test_floats_are_exactly_the_32_bit_ones() -> None:
    (vector,) = vectors(384)[:1]
    assert struct.pack("<384f", *read(VectorForm(), vector)) == vector.tobytes()
