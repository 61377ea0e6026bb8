"""The table of errors in Anthropic's shape, which every path under /v1/messages answers with, whatever is wrong.

The rows and the sentences are those of `errors`; this file knows what Anthropic calls them. There is no `param` in the
shape, so that the message names the field.
"""

from __future__ import annotations

import orjson
from starlette.responses import Response

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.errors import table as errors

PREFIX = "/v1/messages"

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "request_too_large",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
}
"""HTTP status of a row -> Anthropic's type."""

OVERLOADED = 529
"""Anthropic's status of what is a 503 elsewhere; its clients ask again after either."""


def is_anthropic(path: str) -> bool:
    """Whether a path, as the routes know it, belongs to Anthropic's interface; also one that no route has."""
    return path == PREFIX or path.startswith(PREFIX + "/")


def status_of(error: RequestError | EngineDeadError) -> int:
    status = errors.row_of(error).status
    return OVERLOADED if status == 503 else status


def body_of(error: RequestError | EngineDeadError, request_id: str) -> dict[str, object]:
    """The envelope, before or inside a stream."""
    told = {"type": TYPES[errors.row_of(error).status], "message": _message(error)}
    return {"type": "error", "error": told, "request_id": request_id}


def response_of(error: RequestError | EngineDeadError, request_id: str) -> Response:
    body = orjson.dumps(body_of(error, request_id))
    return Response(body, status_of(error), errors.headers_of(error), media_type="application/json")


def _message(error: RequestError | EngineDeadError) -> str:
    """Bounded as the other shape's."""
    if isinstance(error, errors.ContextTooLongError):
        # Agents look for these words, and shorten the conversation where they find them.
        return f"prompt is too long: {error.num_prompt} tokens > {error.limit - 1} maximum"
    envelope = errors.body_of(error)["error"]
    assert isinstance(envelope, dict)
    message, param = str(envelope["message"]), envelope["param"]
    if param is None or f"'{param}'" in message:
        return message
    return errors.clip(f"{param}: {message}", errors.MAX_MESSAGE)
