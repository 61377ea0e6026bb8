"""Counts how many drafts of the draft model were right, and how much steps with drafts gained.

The odds of a draft are those that it is right if all before it in its row are, by its place in the row. They are
counted from the drafts that steps have verified, of the request and of all requests: some texts are easier than others,
and a higher temperature makes all of them harder. Knows no entries and no rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from inferd.engine.speculation.ports import MOST_DRAFTS

_EXPECTED = 0.7
"""Probability of a first draft before any was counted. A later place is expected to be as likely as the one before."""
_EXPECTED_WEIGHT, _ALL_WEIGHT = 2.0, 6.0
"""Weights of what is expected, and of the counts of all requests beside a request's own, in drafts."""
_FORGETTING = 0.998
_EXPECTED_GAIN, _LEAST_GAIN, _NEWEST_WEIGHT = 1.2, 1.05, 0.1
"""Gain of steps with drafts before any was measured, the least for which drafts go on, and the weight of the newest in
the usual one."""


class PlaceCounts:
    """How many drafts were verified at each place, and how many of them were right."""

    __slots__ = ("_num_right", "_num_verified", "newest")

    def __init__(self) -> None:
        self._num_right, self._num_verified = [0.0] * MOST_DRAFTS, [0.0] * MOST_DRAFTS
        self.newest: tuple[int, int] | None = None
        """(drafts, accepted drafts) of the newest row, which are not counted yet. If the row ends its request, drafts
        behind the end were neither right nor wrong, and are never counted."""

    def count(self, num_drafts: int, num_accepted: int) -> None:
        for place in range(min(num_accepted + 1, num_drafts)):
            self._num_right[place] = _FORGETTING * self._num_right[place] + (place < num_accepted)
            self._num_verified[place] = _FORGETTING * self._num_verified[place] + 1.0

    def odds(self, place: int, expected: float, weight: float) -> float:
        """Probability at a place, if `expected` were true of `weight` earlier drafts."""
        return (self._num_right[place] + expected * weight) / (self._num_verified[place] + weight)


class DraftOdds:
    """The odds of all requests' drafts."""

    def __init__(self) -> None:
        self._all = PlaceCounts()

    def of(self, own: PlaceCounts, most: int, least: float = 0.0) -> Sequence[float]:
        """Odds of the next drafts of a request: at most `most`, and one less likely than `least` is the last."""
        if own.newest is not None:
            own.count(*own.newest)
            self._all.count(*own.newest)
            own.newest = None
        odds, expected, chance = list[float](), _EXPECTED, 1.0
        for place in range(most):
            expected = self._all.odds(place, expected, _EXPECTED_WEIGHT)
            odds.append(own.odds(place, expected, _ALL_WEIGHT))
            chance *= odds[-1]
            if chance < least:
                break
        return odds


class DraftGains:
    """How many times the tokens a second of a step without drafts those with drafts have given, by number of rows.

    Odds and costs say what a step promises; this says what such steps have kept. So drafts end where they do not pay,
    for whatever reason.
    """

    def __init__(self, trial_steps: int) -> None:
        """`trial_steps`: steps without drafts after which one may have them all the same."""
        self._trial_steps = trial_steps
        self._gains: dict[int, float] = {}
        """By the number of binary digits of the number of rows."""
        self._num_without: dict[int, int] = {}
        """Steps since one had drafts."""

    def allows(self, num_rows: int) -> bool:
        """Whether a step of so many rows may have drafts."""
        place = num_rows.bit_length()
        is_gain = self._gains.get(place, _EXPECTED_GAIN) > _LEAST_GAIN
        return is_gain or self._num_without.get(place, 0) >= self._trial_steps

    def planned(self, num_rows: int) -> None:
        """Count a step of so many rows, with or without drafts."""
        place = num_rows.bit_length()
        self._num_without[place] = self._num_without.get(place, 0) + 1

    def measured(self, num_rows: int, gain: float) -> None:
        place = num_rows.bit_length()
        before = self._gains.get(place, _EXPECTED_GAIN)
        self._gains[place] = before + _NEWEST_WEIGHT * (gain - before)
        self._num_without[place] = 0
