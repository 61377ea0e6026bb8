"""Latency targets of a request: the headers `X-SLO-TTFT-Ms` and `X-SLO-TPOT-Ms`, and the server's own targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inferd.server.errors import table as errors
from inferd.server.schema.values import check_number

MIN_TARGET_S, MAX_TARGET_S = 0.0001, 3600.0
TTFT_HEADER, TPOT_HEADER = "X-SLO-TTFT-Ms", "X-SLO-TPOT-Ms"

MIN_TARGET_MS, MAX_TARGET_MS = MIN_TARGET_S * 1e3, MAX_TARGET_S * 1e3


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds; None: any."""

    ttft_s: float | None = None
    """From arrival to the first token."""
    tpot_s: float | None = None
    """A token after the first, in the mean."""

    def over(self, others: Targets) -> Targets:
        """These targets. A target that is not set is taken from `others`."""
        return Targets(
            others.ttft_s if self.ttft_s is None else self.ttft_s,
            others.tpot_s if self.tpot_s is None else self.tpot_s,
        )


NO_TARGETS = Targets()


def targets_of(headers: Mapping[str, str]) -> Targets:
    """Targets of a request's headers. Raises `RequestError` for a header that is no such number of milliseconds."""
    return Targets(_seconds(TTFT_HEADER, headers), _seconds(TPOT_HEADER, headers))


def _seconds(name: str, headers: Mapping[str, str]) -> float | None:
    given = headers.get(name)
    if given is None:
        return None
    try:
        stated = float(given)
    except ValueError as error:
        raise errors.invalid_value(name, given, "Expected a number of milliseconds.") from error
    return check_number(stated, name, MIN_TARGET_MS, MAX_TARGET_MS) / 1e3
