"""`repetition_detection`: when an answer that repeats itself is ended. The names and their meaning are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

from inferd.server.errors import table as errors
from inferd.server.schema.kinds import Integer, Schema, check_properties, object_schema

MAX_PATTERN_SIZE = 256
"""Tokens: each further one costs a comparison for every token generated."""
MAX_COUNT = 1_024

_KINDS = {
    "max_pattern_size": Integer(0, MAX_PATTERN_SIZE),
    "min_pattern_size": Integer(0, MAX_PATTERN_SIZE),
    "min_count": Integer(0, MAX_COUNT),
}


@dataclass(frozen=True, slots=True)
class RepetitionRule:
    """An answer ends once its last tokens are `min_count` copies of one pattern of these sizes (in tokens)."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> RepetitionRule | None:
        """None: a `max_pattern_size` of 0, or none, switches it off."""
        given = check_properties(value, where, (), tuple(_KINDS))
        sizes = {
            name: 0 if given.get(name) is None else kind.read(given[name], f"{where}.{name}")
            for name, kind in _KINDS.items()
        }
        rule = RepetitionRule(**{**sizes, "min_pattern_size": sizes["min_pattern_size"] or 1})
        if rule.max_pattern_size == 0:
            return None
        if rule.min_count < 2:
            raise errors.below_min(f"{where}.min_count", 2, rule.min_count)
        if rule.min_pattern_size > rule.max_pattern_size:
            raise errors.above_max(f"{where}.min_pattern_size", rule.max_pattern_size, rule.min_pattern_size)
        return rule

    def schema(self) -> Schema:
        return object_schema({name: kind.schema() for name, kind in _KINDS.items()})
