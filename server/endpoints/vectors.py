"""Vectors as answers write them: as numbers or base64, of 32 bits, of 8 bits or of one bit a component.

The rules of smaller components are those of `quantize_embeddings` in sentence-transformers. Its ranges of 8 bits are
found in a caller's other vectors. Here they are the same for every vector, so that a vector depends on its text alone.
Knows no route.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from inferd.server.schema.embeddings import VectorType
from inferd.server.schema.strict_json import exact

assert sys.byteorder == "little", "vectors come and go as little-endian numbers"


@dataclass(frozen=True, slots=True)
class VectorForm:
    """How the vectors of an answer are written."""

    kind: VectorType = "float"
    is_base64: bool = False
    """Whether a vector is the base64 of its bytes, little-endian, and no list of numbers."""
    width: int = 0
    """Number of components of each vector, if an input has one for each token; 0: an input has one vector."""

    def value(self, vector: bytes) -> bytes:
        """JSON of an input's vector, or of its vectors. With base64 these are one string, one after another."""
        size = 4 * self.width or len(vector)
        rows = [self.components(vector[start : start + size]) for start in range(0, len(vector), size)]
        if self.is_base64:
            return exact(orjson.dumps(base64.b64encode(b"".join(row.tobytes() for row in rows)).decode()))
        # Rows become Python's numbers one after another, because those take eight times the bytes.
        written = [orjson.Fragment(exact(orjson.dumps(row.tolist()))) for row in rows]
        return exact(orjson.dumps(written if self.width else written[0]))

    def components(self, vector: bytes) -> array[Any]:
        """The components of one vector, given as fp32."""
        values: array[Any] = array("f", vector)
        match self.kind:
            case "float":
                return values
            case "uint8":
                return array("B", _levels(values))
            case "int8":
                return array("b", _levels(values).translate(_LESS_128))
            case "ubinary":
                return array("B", _bits(values))
            case "binary":
                return array("b", _bits(values).translate(_LESS_128))


def _levels(values: Sequence[float]) -> bytes:
    """Whole numbers from 1 to 255."""
    scale = 127.0 / (math.hypot(*values) or 1.0)
    return bytes([int(value * scale + 128.5) for value in values])


_LESS_128 = bytes((byte - 128) % 256 for byte in range(256))


def _bits(values: Sequence[float]) -> bytes:
    num_bytes = -(-len(values) // 8)
    digits = "".join(["1" if value > 0 else "0" for value in values])
    return int(digits.ljust(8 * num_bytes, "0"), 2).to_bytes(num_bytes, "big")
