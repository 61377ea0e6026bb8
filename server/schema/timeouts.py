"""How long a caller is willing to wait: the `timeout` field and the header `X-Request-Timeout`, in seconds."""

from __future__ import annotations

from inferd.server.errors import table as errors
from inferd.server.schema.values import check_number

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86_400.0
HEADER = "X-Request-Timeout"


def timeout_of(field: float | None, header: str | None) -> float | None:
    """The shorter of both; None if neither is given. Raises `RequestError` for a header that is no such number."""
    if header is None:
        return field
    try:
        given = float(header)
    except ValueError as error:
        raise errors.invalid_value(HEADER, header, "Expected a number of seconds.") from error
    stated = check_number(given, HEADER, MIN_TIMEOUT_S, MAX_TIMEOUT_S)
    return stated if field is None else min(stated, field)
