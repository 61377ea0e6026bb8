"""Reads config.json field by field. An invalid value raises an error with the field's name, the rule and the value.

It knows the fields that many families share (dtype, head counts), but no family.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from inferd.engine.arch.description import Activation, ArchError
from inferd.engine.arch.shown import shown

Value = TypeVar("Value")

MAX_WHOLE = 2**40
"""Above every size of a model, and small enough that products of a few such numbers stay cheap to compute."""

_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}


class Fields:
    """The fields of one JSON object. A field that is absent or null takes the default; without a default it is an
    error."""

    def __init__(self, values: Mapping[str, Any], owner: str) -> None:
        self._values, self.owner = values, owner

    def with_defaults(self, **defaults: Any) -> Fields:
        """A copy in which absent fields (not null ones) have the values given here: the family's defaults, which its
        checkpoints omit."""
        return Fields({**defaults, **self._values}, self.owner)

    def renamed(self, **ours: str) -> Fields:
        """A copy in which fields of a family have the names of most others, its own first: `ours[theirs]`. Errors then
        show the latter."""
        values = {ours[name]: value for name, value in self._values.items() if name in ours}
        return Fields({**self._values, **values}, self.owner)

    def refuse(self, name: str, rule: str) -> ArchError:
        """The error for field `name` of this config, with its rule and the value that was found."""
        return ArchError(f"{self.owner}: {name} {rule}, but it is {shown(self._values.get(name))}")

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_WHOLE) -> int:
        value = self._get(name, default)
        if type(value) is not int or value < minimum:
            raise self.refuse(name, f"must be a whole number of at least {minimum}")
        if value > maximum:
            raise self.refuse(name, f"must be at most {maximum}")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        # Compared before it is converted: JSON has whole numbers too large for a float.
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.refuse(name, "must be a finite number above 0, at most 1.8e308")
        return float(value)

    def positive_or_none(self, name: str) -> float | None:
        """Like `positive`, but None if the field is absent or null."""
        return self.positive(name) if self.has(name) else None

    def positives(self, name: str, length: int) -> tuple[float, ...]:
        """A list of exactly `length` numbers above 0."""
        values = self._get(name, None)
        if not isinstance(values, list) or len(values) != length:
            raise self.refuse(name, f"must be a list of {length} numbers")
        items = Fields({str(index): value for index, value in enumerate(values)}, f"{self.owner}: {name}")
        return tuple(items.positive(str(index)) for index in range(length))

    def choices(self, name: str, known: Mapping[Any, Value], length: int) -> tuple[Value, ...]:
        """A list of exactly `length` values, each a key of `known`; returns what the keys stand for."""
        values = self._get(name, None)
        allowed = tuple(known)
        if not isinstance(values, list) or len(values) != length or any(value not in allowed for value in values):
            raise self.refuse(name, f"must be a list of {length}, each one of {', '.join(map(str, allowed))}")
        return tuple(known[value] for value in values)

    def value(self, name: str) -> Any:
        """The parsed value, unchecked; None if the field is absent."""
        return self._values.get(name)

    def names(self) -> tuple[str, ...]:
        """Names of all fields that are present."""
        return tuple(self._values)

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        values = self._get(name, None)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.refuse(name, "must be a list of texts")
        return tuple(values)

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
        """A nested object; None if it is absent or null."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(name, "must be an object")
        return Fields(value, f"{self.owner}: {name}")

    def dtype(self) -> str:
        """Dtype of the weights: `dtype`, or `torch_dtype` in older files."""
        return self.choice("dtype" if self.has("dtype") else "torch_dtype", _DTYPES, default="float32")

    def activation(self, name: str) -> Activation:
        return self.choice(name, _ACTIVATIONS)

    def heads(self) -> tuple[int, int]:
        """(query heads, KV heads); KV heads divide query heads."""
        num_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise self.refuse("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
        return num_heads, num_kv_heads

    def head_dim(self, num_heads: int) -> int:
        """`head_dim` if it is given, else hidden_size / heads. It must be even: rotary embedding turns pairs."""
        hidden_size = self.integer("hidden_size")
        if not self.has("head_dim") and hidden_size % num_heads:
            raise self.refuse(
                "hidden_size", f"must be a multiple of num_attention_heads ({num_heads}) without head_dim"
            )
        head_dim = self.integer("head_dim", default=hidden_size // num_heads)
        if head_dim % 2:
            raise ArchError(f"{self.owner}: head_dim must be even, but it is {head_dim}")
        return head_dim

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ArchError(f"{self.owner}: config.json lacks {name}")
        return default
