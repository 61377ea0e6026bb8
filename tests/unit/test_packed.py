"""A packed collection is read as its values came, and takes a tenth of the memory of objects."""

from __future__ import annotations

import pytest

from inferd.engine.api.wire.messages import WireLogprobs
from inferd.server.generate.events import SCORED_PROMPT, Packed, ScoredToken

TOKENS = [
    ScoredToken(WireLogprobs(i, -1.5, 1, tuple((i + j, -1.5 - j / 7) for j in range(20))), 3 * i) for i in range(1_000)
]


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 1_000])
def test_values_are_read_as_they_came_in_whatever_pieces(size: int) -> None:
    scores = Packed(SCORED_PROMPT, (None,))
    for start in range(0, len(TOKENS), size):
        scores.extend(TOKENS[start : start + size])
        assert len(scores) == 1 + len(TOKENS[: start + size])
    assert list(scores) == [None, *TOKENS]
    assert list(scores) == [None, *TOKENS], "and read again"
    assert None in scores and TOKENS[500] in scores and 3 not in scores


def test_many_values_at_once_are_cut_into_small_packs() -> None:
    """A reader makes the objects of one pack at a time: more would be freed in one long turn of the event loop."""
    scores = Packed(SCORED_PROMPT, (None,))
    scores.extend(TOKENS)
    sizes = [len(scores._decoder.decode(pack)) for pack in scores._packs]
    assert sizes == [64] * (1_001 // 64) and len(scores._open) == 1_001 % 64
    assert sum(map(len, scores._packs)) < 1_000 * 21 * 20
