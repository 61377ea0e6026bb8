"""`repetition_detection`: when an answer that repeats itself is ended. The names and their meaning are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from inferd.server.errors import messages as errors
from inferd.server.schema.request_model import Part
from inferd.server.schema.values import Converted, Whole

MAX_PATTERN_SIZE = 256
"""Tokens: each further one costs a comparison for every token generated."""
MAX_COUNT = 1_024


@dataclass(frozen=True, slots=True)
class RepetitionRule:
    """An answer ends once its last tokens are `min_count` copies of one pattern of these sizes (in tokens)."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


class _RepetitionRule(Part):
    max_pattern_size: Whole = Field(default=0, ge=0, le=MAX_PATTERN_SIZE)
    min_pattern_size: Whole = Field(default=0, ge=0, le=MAX_PATTERN_SIZE)
    min_count: Whole = Field(default=0, ge=0, le=MAX_COUNT)


def _read(given: _RepetitionRule, where: str) -> RepetitionRule | None:
    """None: a `max_pattern_size` of 0 switches it off."""
    rule = RepetitionRule(given.max_pattern_size, given.min_pattern_size or 1, given.min_count)
    if rule.max_pattern_size == 0:
        return None
    if "min_count" not in given.model_fields_set:
        way_out = "It is how often the pattern comes in a row before the answer ends, at least 2."
        raise errors.missing(f"{where}.min_count", way_out)
    if rule.min_count < 2:
        raise errors.below_min(f"{where}.min_count", 2, rule.min_count)
    if rule.min_pattern_size > rule.max_pattern_size:
        raise errors.above_max(f"{where}.min_pattern_size", rule.max_pattern_size, rule.min_pattern_size)
    return rule


RepetitionDetection = Annotated[RepetitionRule | None, Converted(_RepetitionRule, _read)]
