"""How soon a request wants its answer: its priority, its timeout, and its latency targets.

The timeout, in seconds, is a field or the header `X-Request-Timeout`. The targets, in milliseconds, are the headers
`X-SLO-TTFT-Ms` and `X-SLO-TPOT-Ms`; the server has targets of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferd.server.errors import messages as errors
from inferd.server.schema.request_model import option
from inferd.server.schema.values import check_number

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86_400.0
MAX_PRIORITY = 1_000
"""The largest value of either sign. A level counts as 10 s of waiting, so the most urgent is three hours ahead."""
TIMEOUT_HEADER = "X-Request-Timeout"

MIN_TARGET_S, MAX_TARGET_S = 0.0001, 3600.0
TTFT_HEADER, TPOT_HEADER = "X-SLO-TTFT-Ms", "X-SLO-TPOT-Ms"
MIN_TARGET_MS, MAX_TARGET_MS = MIN_TARGET_S * 1e3, MAX_TARGET_S * 1e3


def priority_option(area: str = "") -> Any:
    """The field `priority` of a request."""
    about = "A lower value is scheduled earlier. One level counts as 10 s of waiting."
    return option(about, unset="0", area=area, ge=-MAX_PRIORITY, le=MAX_PRIORITY)


def timeout_option() -> Any:
    """The field `timeout` of a request that is answered as a whole."""
    about = (
        "Seconds from the request's arrival to its answer. After them the server aborts it with 408 "
        "`deadline_exceeded`. The header `X-Request-Timeout` has the same meaning, and the shorter time counts."
    )
    return option(about, unset="no limit", ge=MIN_TIMEOUT_S, le=MAX_TIMEOUT_S)


def timeout_of(field: float | None, header: str | None) -> float | None:
    """The shorter of both; None if neither is given. Raises `RequestError` for a header that is no such number."""
    if header is None:
        return field
    stated = _number(TIMEOUT_HEADER, header, "seconds", MIN_TIMEOUT_S, MAX_TIMEOUT_S)
    return stated if field is None else min(stated, field)


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
            others.ttft_s if self.ttft_s is None else self.ttft_s, others.tpot_s if self.tpot_s is None else self.tpot_s
        )


NO_TARGETS = Targets()


def targets_of(headers: Mapping[str, str]) -> Targets:
    """Targets of a request's headers. Raises `RequestError` for a header that is no such number of milliseconds."""
    return Targets(_seconds(TTFT_HEADER, headers), _seconds(TPOT_HEADER, headers))


def _seconds(name: str, headers: Mapping[str, str]) -> float | None:
    given = headers.get(name)
    if given is None:
        return None
    return _number(name, given, "milliseconds", MIN_TARGET_MS, MAX_TARGET_MS) / 1e3


def _number(name: str, given: str, unit: str, least: float, most: float) -> float:
    """The number that a header holds. Raises `RequestError`."""
    try:
        stated = float(given)
    except ValueError as error:
        raise errors.invalid_value(name, given, f"Expected a number of {unit}.") from error
    return check_number(stated, name, least, most)
