"""Reads config.json field by field: a value is either valid or refused by name, with the rule and what was found.

Knows the fields that many families share (rope, dtype, head counts), no family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from inferd.engine.arch.description import Activation, ArchError, LinearScaling, Llama3Scaling, Rope

Value = TypeVar("Value")

_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}
_ROPE_TYPES = ("default", "linear", "llama3")


class Fields:
    """The fields of one JSON object. A field that is absent or null takes the default; without one it is refused."""

    def __init__(self, values: Mapping[str, Any], owner: str) -> None:
        self._values, self._owner = values, owner

    def refuse(self, name: str, rule: str) -> ArchError:
        """The error that refuses field `name` of this config, whatever it holds."""
        return ArchError(f"{self._owner}: {name} {rule}, but it is {self._values.get(name)!r}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self._get(name, default)
        if type(value) is not int or value < minimum:
            raise self.refuse(name, f"must be a whole number of at least {minimum}")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.refuse(name, "must be a finite number above 0")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.refuse(name, "must be true or false")
        return value

    def choice(self, name: str, known: Mapping[str, Value], default: str | None = None) -> Value:
        value = self._get(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.refuse(name, f"must be one of {', '.join(known)}")
        return known[value]

    def section(self, name: str) -> Fields | None:
        """A nested object, or None where it is absent or null."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(name, "must be an object")
        return Fields(value, f"{self._owner}: {name}")

    def dtype(self) -> str:
        """Of the weights: `dtype`, or `torch_dtype` as older files call it."""
        return self.choice("dtype" if self.has("dtype") else "torch_dtype", _DTYPES, default="float32")

    def activation(self) -> Activation:
        return self.choice("hidden_act", _ACTIVATIONS)

    def heads(self) -> tuple[int, int]:
        """(query heads, KV heads); KV heads divide query heads."""
        num_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise self.refuse("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
        return num_heads, num_kv_heads

    def head_dim(self, num_heads: int) -> int:
        """`head_dim` where it is given, else hidden_size / heads; even, as rotary embedding needs it."""
        hidden_size = self.integer("hidden_size")
        if not self.has("head_dim") and hidden_size % num_heads:
            raise self.refuse(
                "hidden_size", f"must be a multiple of num_attention_heads ({num_heads}) without head_dim"
            )
        head_dim = self.integer("head_dim", default=hidden_size // num_heads)
        if head_dim % 2:
            raise ArchError(f"{self._owner}: head_dim must be even, but it is {head_dim}")
        return head_dim

    def rope(self, head_dim: int, max_positions: int) -> Rope:
        """Rotary embedding from `rope_parameters`, or from `rope_theta` and `rope_scaling` as older files have it."""
        section = self.section("rope_parameters") or self.section("rope_scaling") or Fields({}, self._owner)
        if section.has("full_attention") or section.has("sliding_attention"):
            raise ArchError(f"{self._owner}: rope_parameters that differ by layer type are not supported")
        theta = section.positive("rope_theta") if section.has("rope_theta") else self.positive("rope_theta", 10000.0)
        for fields in (self, section):
            if fields.has("partial_rotary_factor") and fields.positive("partial_rotary_factor") != 1.0:
                raise fields.refuse("partial_rotary_factor", "must be 1 in this family")
        return Rope(theta, head_dim, section.rope_scaling(max_positions))

    def rope_scaling(self, max_positions: int) -> LinearScaling | Llama3Scaling | None:
        """The scaling that this object, a `rope_parameters` or `rope_scaling`, describes."""
        name = "rope_type" if self.has("rope_type") else "type"
        rope_type = self.choice(name, {known: known for known in _ROPE_TYPES}, default="default")
        if rope_type == "linear":
            return LinearScaling(self.positive("factor"))
        if rope_type != "llama3":
            return None
        scaling = Llama3Scaling(
            factor=self.positive("factor"),
            low_freq_factor=self.positive("low_freq_factor"),
            high_freq_factor=self.positive("high_freq_factor"),
            original_max_positions=self.integer("original_max_position_embeddings", default=max_positions),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise self.refuse("high_freq_factor", f"must be above low_freq_factor ({scaling.low_freq_factor})")
        return scaling

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ArchError(f"{self._owner}: config.json lacks {name}")
        return default
