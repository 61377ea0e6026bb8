"""Notices an answer that repeats itself: its last tokens are so many copies of one pattern (vLLM's definition)."""

from __future__ import annotations

from inferd.server.schema.repetition import RepetitionRule


class Repetition:
    """Watches one choice's tokens. A token costs a comparison for each size a pattern may have."""

    def __init__(self, rule: RepetitionRule | None) -> None:
        """None: nothing is ever found."""
        self._rule = rule
        self._ids: list[int] = []
        self._runs = [0] * (rule.max_pattern_size + 1 if rule else 0)
        """Size p -> how many tokens, up to the last, equal the one p places before them."""

    def feed(self, token_id: int) -> bool:
        """Whether this token completes the last copy."""
        rule = self._rule
        if rule is None:
            return False
        ids, runs, copies = self._ids, self._runs, rule.min_count - 1
        ids.append(token_id)
        num_ids, is_found = len(ids), False
        for size in range(rule.min_pattern_size, min(rule.max_pattern_size, num_ids - 1) + 1):
            runs[size] = runs[size] + 1 if ids[-1 - size] == token_id else 0
            is_found = is_found or runs[size] >= size * copies
        return is_found
