"""Bounds on grammars and schemas, counted while they are read, so that nothing too large is built.

Also the wording of a refused grammar.
"""

from __future__ import annotations

from collections.abc import Iterable

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.grammar_check import MAX_GRAMMAR_BYTES
from inferd.server.errors import messages as errors

_MOST_BITS = 1_024
"""Most bits of a whole number: the largest double has so many."""


class GrammarSize:
    """Counts the characters of one grammar while its parts are read."""

    def __init__(self, param: str) -> None:
        """`param`: the field to name in a refusal."""
        self._param, self._num_chars = param, 0

    def add(self, num_chars: int) -> None:
        """Raises `RequestError` once the grammar has more characters than allowed."""
        self._num_chars += num_chars
        if self._num_chars > MAX_GRAMMAR_BYTES:
            rule = f"it makes a grammar of at least {self._num_chars} characters"
            raise refusal(self._param, f"{rule}, but at most {MAX_GRAMMAR_BYTES} are allowed")


def check_json(value: object, where: str, noun: str, most_chars: int, most_levels: int | None = None) -> None:
    """Raises `RequestError` for JSON that is too long or too deep, or that holds a number too large for a double.

    Reads level by level, because a body may be nested deeper than the stack, and no further than `most_chars`.
    """
    num_chars = depth = 0
    level: list[object] = [value]
    while level:
        inner: list[object] = []
        for item in level:
            held, own_chars = _contents(item)
            num_chars += own_chars
            if num_chars > most_chars:
                raise refusal(where, f"{noun} has more than {most_chars} characters of JSON, the most allowed")
            if _is_too_large(item):
                raise refusal(where, f"{noun} holds a number that is too large: at most 1.797e308 is allowed")
            inner.extend(held)
        depth += any(isinstance(item, (dict, list)) for item in level)
        if most_levels is not None and depth > most_levels:
            raise refusal(where, f"{noun} is nested more than {most_levels} levels deep, the most allowed")
        level = inner


def _contents(item: object) -> tuple[Iterable[object], int]:
    """(values inside an item, number of characters of the item without them); escapes do not count."""
    if isinstance(item, str):
        return (), len(item) + 2
    if isinstance(item, dict):
        return item.values(), max(2, sum(map(len, item)) + 6 * len(item))
    if isinstance(item, list):
        return item, max(2, 2 * len(item))
    return (), 1 if isinstance(item, (int, float)) else 4


def _is_too_large(item: object) -> bool:
    if isinstance(item, int):
        return item.bit_length() > _MOST_BITS
    return isinstance(item, float) and item - item != 0  # NaN for infinities and NaN


def refusal(param: str, reason: str) -> RequestError:
    """The error for a grammar, schema or expression that cannot be served, with the reason."""
    reason = errors.clip(reason.rstrip("."), errors.MAX_MESSAGE // 2)
    shown = errors.clip(param, errors.MAX_ECHO)
    return RequestError("invalid_value", f"Invalid value for '{shown}': {reason}.", param)
