"""The table of all errors in OpenAI's shape: code -> HTTP status and type.

Every refusal is a `RequestError` whose `code` is a key of `ROWS`. This file makes its status, body and headers, for a
plain answer and for a stream. It knows no routes and no fields. No body contains a path, a stack trace, or more than
`MAX_ECHO` characters of what the caller sent.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Annotated

import orjson
from pydantic import Field
from starlette.responses import Response

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.errors.answer import Answer
from inferd.server.errors.messages import MAX_ECHO, MAX_MESSAGE, TryAgainError, clip, jittered

logger = logging.getLogger("inferd.server")


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """The wire form of an error code."""

    status: int
    type: str
    wire_code: str | None
    about: str
    """Cause of the error, for the documentation."""
    retry_after_s: float | None = None
    """Seconds of Retry-After before jitter; None sends no such header."""
    is_retried: bool = True
    """Whether OpenAI's clients may retry, which they do twice after a 5xx."""


_REFUSED, _BROKEN = "invalid_request_error", "server_error"
_LIMITED, _UNAVAILABLE = "rate_limit_error", "service_unavailable_error"

_BAD_REQUESTS = {
    "array_above_max_length": "An array has too many items.",
    "context_length_exceeded": "The prompt exceeds the context, or leaves no place for an answer. The message has "
    "both counts.",
    "decimal_above_max_value": "A number is too large.",
    "decimal_below_min_value": "A number is too small.",
    "empty_array": "An array is empty, but needs an item.",
    "empty_string": "A string is empty, but needs a character.",
    "integer_above_max_value": "A whole number is too large.",
    "integer_below_min_value": "A whole number is too small.",
    "invalid_type": "A value has the wrong JSON type.",
    "invalid_value": "A value is not allowed, or two fields contradict each other.",
    "missing_required_parameter": "A required field is missing.",
    "previous_response_not_found": "No response with the id of `previous_response_id` is stored for this key.",
    "object_above_max_properties": "An object has too many keys.",
    "string_above_max_length": "A string is too long.",
    "unknown_parameter": "There is no such field.",
    "unsupported_parameter": "Other servers have this field, but this server does not. The message names a way out.",
    "unsupported_value": "This server has the field, but does not support this value.",
}

ROWS: dict[str, ErrorRow] = {
    **{code: ErrorRow(400, _REFUSED, code, about) for code, about in _BAD_REQUESTS.items()},
    "malformed_json": ErrorRow(400, _REFUSED, None, "The body is not a JSON object, or has too many values."),
    "malformed_http": ErrorRow(400, _REFUSED, None, "The bytes are not one unambiguous HTTP/1.1 request."),
    "invalid_api_key": ErrorRow(401, "authentication_error", "invalid_api_key", "The key is missing or wrong."),
    "insufficient_permissions": ErrorRow(403, _REFUSED, "insufficient_permissions", "The route needs an admin key."),
    "origin_not_allowed": ErrorRow(
        403,
        _REFUSED,
        "origin_not_allowed",
        "`--allowed-origins` does not list the page's origin. Or the server has no keys, and `Host` is neither "
        "a name of this machine nor in `--allowed-hosts`.",
    ),
    "invalid_url": ErrorRow(404, _REFUSED, None, "There is no such path."),
    "response_not_found": ErrorRow(
        404, _REFUSED, "response_not_found", "No response with this id is stored for this key, or it has expired."
    ),
    "model_not_found": ErrorRow(404, _REFUSED, "model_not_found", "This server does not serve the model."),
    "method_not_supported": ErrorRow(
        405,
        _REFUSED,
        "method_not_supported",
        "The path does not support the method. The header `Allow` lists the methods that it supports.",
    ),
    "deadline_exceeded": ErrorRow(
        408,
        "timeout_error",
        "deadline_exceeded",
        "The request's `timeout` ran out, or its head or body did not arrive in time.",
    ),
    "model_is_busy": ErrorRow(
        409,
        _REFUSED,
        "model_is_busy",
        "The model cannot be unloaded or put to sleep, because it has requests or is being loaded. Or it was woken "
        "before it slept.",
    ),
    "websocket_not_supported": ErrorRow(
        426,
        _REFUSED,
        "websocket_not_supported",
        "The request asks for a WebSocket, and this server has none. The header `Allow` lists the methods of the path.",
    ),
    "request_exceeds_work_limit": ErrorRow(
        400,
        _REFUSED,
        "request_exceeds_work_limit",
        "Each field is within its bounds, but their product is too large. The message shows the fields and the limit.",
    ),
    "request_too_large": ErrorRow(413, _REFUSED, "request_too_large", "The body is larger than `--max-body-bytes`."),
    "unsupported_content_type": ErrorRow(
        415, _REFUSED, "unsupported_content_type", "`Content-Type` is not JSON, or the body is compressed."
    ),
    "rate_limit_exceeded": ErrorRow(
        429,
        _LIMITED,
        "rate_limit_exceeded",
        "The key's quota is used up, or the first token would come later than the TTFT target, or the server is too "
        "busy to compile the grammar now. `Retry-After` says when to send the request again.",
        1.0,
    ),
    "slow_down": ErrorRow(
        429, _LIMITED, "slow_down", "This client has too many requests running or waiting at the same time.", 1.0
    ),
    "head_too_large": ErrorRow(
        431, _REFUSED, "head_too_large", "The request line and headers are too long, or there are too many headers."
    ),
    "internal_error": ErrorRow(
        500, _BROKEN, None, "The server has a bug. Its log has the details under the request id."
    ),
    "engine_error": ErrorRow(500, _BROKEN, "engine_error", "The engine failed this request, or stopped."),
    "numerical_error": ErrorRow(500, _BROKEN, "numerical_error", "The model computed NaN or infinity."),
    "not_implemented": ErrorRow(
        501,
        _BROKEN,
        "not_implemented",
        "Other servers have this route, but this one does not.",
        is_retried=False,
    ),
    "model_not_loaded": ErrorRow(
        503,
        _UNAVAILABLE,
        "model_not_loaded",
        "The model could not be loaded, or its engines died again and again, while the server serves other models. Or "
        "one of its files was written to, or its kernels are others. The message says why.",
        is_retried=False,
    ),
    "model_is_asleep": ErrorRow(
        503,
        _UNAVAILABLE,
        "model_is_asleep",
        "Somebody put the model to sleep. It takes no request until `/wake_up`.",
        is_retried=False,
    ),
    "server_is_overloaded": ErrorRow(
        503,
        _UNAVAILABLE,
        "server_is_overloaded",
        "Too many requests wait, or the server is starting or stopping, or the machine lacks memory or processes to "
        "render the chat template.",
        1.0,
    ),
}
_WIRE_CODES = [*sorted({row.wire_code for row in ROWS.values() if row.wire_code}), None]


class ErrorDetail(Answer):
    """Cause of an error."""

    message: Annotated[str, Field(min_length=1, max_length=MAX_MESSAGE)]
    type: Annotated[str, Field(json_schema_extra={"enum": sorted({row.type for row in ROWS.values()})})]
    param: Annotated[str, Field(max_length=MAX_ECHO)] | None
    """Path of the request's field that is wrong."""
    code: Annotated[str | None, Field(json_schema_extra={"enum": _WIRE_CODES})]


class Error(Answer):
    """An error in OpenAI's shape."""

    error: ErrorDetail


def row_of(error: RequestError | EngineDeadError) -> ErrorRow:
    """The row of the table for `error`."""
    code = "engine_error" if isinstance(error, EngineDeadError) else error.code
    if code not in ROWS:
        logger.error("the error code %r is not in the table", code)
        return ROWS["internal_error"]
    return ROWS[code]


def cause_of(error: RequestError | EngineDeadError) -> tuple[str, str | None]:
    """(code, param), for the log."""
    return (error.code, error.param) if isinstance(error, RequestError) else ("engine_error", None)


def body_of(error: RequestError | EngineDeadError) -> Error:
    """The JSON body of an error, for a plain answer or inside a stream."""
    row = row_of(error)
    if isinstance(error, EngineDeadError):
        # How the engine died is in the operator's log. The caller does not see it.
        message, param = "The engine stopped while it was working on this request. Please try again.", None
    else:
        message, param = clip(error.message, MAX_MESSAGE) or "The request could not be served.", error.param
    return {
        "error": {
            "message": message,
            "type": row.type,
            "param": None if param is None else clip(param, MAX_ECHO),
            "code": row.wire_code,
        }
    }


def headers_of(error: RequestError | EngineDeadError) -> dict[str, str]:
    """The headers that the status needs: how to authenticate, when to retry."""
    row = row_of(error)
    if row.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    headers = {} if row.is_retried else {"X-Should-Retry": "false"}
    if row.retry_after_s is None:
        return headers
    if isinstance(error, TryAgainError):
        wait_s = error.wait_s
    else:
        known_s = error.retry_after_s if isinstance(error, RequestError) else None
        wait_s = jittered(row.retry_after_s if known_s is None else known_s)
    wait_ms = max(1, math.ceil(wait_s * 1_000))
    return {**headers, "Retry-After": str(-(-wait_ms // 1_000)), "Retry-After-Ms": str(wait_ms)}


def response_of(error: RequestError | EngineDeadError) -> Response:
    return Response(
        orjson.dumps(body_of(error)), row_of(error).status, headers_of(error), media_type="application/json"
    )
