"""Errors in Anthropic's shape, with which every path under /v1/messages answers.

The rows are those of `errors.table`, and the messages those of `errors.messages`. This file knows Anthropic's names
for them. The shape has no `param`, so the message names the field.
"""

from __future__ import annotations

from typing import Annotated, Literal

import orjson
from pydantic import Field
from starlette.responses import Response

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.errors import messages as errors
from inferd.server.errors import table
from inferd.server.errors.answer import Answer

PREFIX = "/v1/messages"

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    426: "invalid_request_error",
    429: "rate_limit_error",
    431: "request_too_large",
    500: "api_error",
    501: "api_error",
    503: "overloaded_error",
}
"""HTTP status of a row -> Anthropic's type."""

OVERLOADED = 529
"""Anthropic's status for a 503. Its clients retry after both."""


class AnthropicErrorDetail(Answer):
    """Cause of an error."""

    type: Annotated[str, Field(json_schema_extra={"enum": sorted(set(TYPES.values()))})]
    message: Annotated[str, Field(min_length=1, max_length=errors.MAX_MESSAGE)]


class AnthropicError(Answer):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


def is_anthropic(path: str) -> bool:
    """Whether a path, as the routes know it, belongs to Anthropic's API. A path without a route may belong to it."""
    return path == PREFIX or path.startswith(PREFIX + "/")


def status_of(error: RequestError | EngineDeadError) -> int:
    status = table.row_of(error).status
    return OVERLOADED if status == 503 else status


def body_of(error: RequestError | EngineDeadError, request_id: str) -> AnthropicError:
    """The JSON body of an error, for a plain answer or inside a stream."""
    detail: AnthropicErrorDetail = {"type": TYPES[table.row_of(error).status], "message": _message(error)}
    return {"type": "error", "error": detail, "request_id": request_id}


def response_of(error: RequestError | EngineDeadError, request_id: str) -> Response:
    body = orjson.dumps(body_of(error, request_id))
    return Response(body, status_of(error), table.headers_of(error), media_type="application/json")


def _message(error: RequestError | EngineDeadError) -> str:
    """The message, with the name of the field, as long as in OpenAI's shape at most."""
    if isinstance(error, errors.ContextTooLongError):
        # Agents search for these words, and then shorten the conversation.
        return f"prompt is too long: {error.num_prompt} tokens > {error.limit - 1} maximum"
    detail = table.body_of(error)["error"]
    message, param = detail["message"], detail["param"]
    if param is None or f"'{param}'" in message:
        return message
    return errors.clip(f"{param}: {message}", errors.MAX_MESSAGE)
