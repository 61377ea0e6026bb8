"""The table of all errors in OpenAI's shape (code -> HTTP status and type), and the messages that several files use.

Every refusal is a `RequestError` whose `code` is a key of `ROWS`. This file makes its status, body and headers, for a
plain answer and for a stream. It knows no routes and no fields. No body contains a path, a stack trace, or more than
`MAX_ECHO` characters of what the caller sent.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from types import UnionType
from typing import Annotated

import orjson
from pydantic import Field
from starlette.responses import Response

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.errors.answer import Answer

logger = logging.getLogger("inferd.server")

MAX_ECHO = 200
"""Maximum number of characters of a caller's value that are sent back."""

MAX_MESSAGE = 1_000
"""Maximum number of characters of a message, also if a chat template or an engine wrote it."""

_MAX_LISTED_ITEMS = 8
"""Most items of an array that a message repeats."""

MAX_LISTED = 400
"""Number of characters of the names that a message lists."""


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
        409, _REFUSED, "model_is_busy", "The model cannot be unloaded, because it has requests or is being loaded."
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
        wait_s = _jittered(row.retry_after_s if known_s is None else known_s)
    wait_ms = max(1, math.ceil(wait_s * 1_000))
    return {**headers, "Retry-After": str(-(-wait_ms // 1_000)), "Retry-After-Ms": str(wait_ms)}


def _jittered(seconds: float) -> float:
    """One to two times as long, so that callers that were refused together do not return together."""
    return seconds * random.uniform(1, 2)


def response_of(error: RequestError | EngineDeadError) -> Response:
    return Response(
        orjson.dumps(body_of(error)), row_of(error).status, headers_of(error), media_type="application/json"
    )


# --- The messages ------------------------------------------------------------------------------------------------


def clip(text: str, limit: int) -> str:
    """At most `limit` characters of `text`. Lone surrogates, which UTF-8 cannot encode, become question marks."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return cut.encode("utf-8", "replace").decode("utf-8")


def shown(value: object) -> str:
    """A caller's value for a message, shortened if it is long."""
    if isinstance(value, str):
        return clip(value, MAX_ECHO)
    if value is None or isinstance(value, (dict, list, tuple)):
        return json_type(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 77 digits"
    return clip(str(value), MAX_ECHO)


def _listed(value: object) -> str:
    """A short array of strings and numbers as JSON; any other array of some length by that; empty if it is no array."""
    if not isinstance(value, (list, tuple)):
        return ""
    if not value or len(value) > _MAX_LISTED_ITEMS or not all(isinstance(item, (str, int, float)) for item in value):
        return f"an array of {len(value)} items" if len(value) != 1 else "an array of 1 item"
    items = (f'"{shown(item)}"' if isinstance(item, str) else shown(item) for item in value)
    return clip(f"[{', '.join(items)}]", MAX_ECHO)


def json_type(value: object) -> str:
    """The JSON type of a parsed value, in the words of OpenAI's messages."""
    if value is None:
        return "null"
    names: tuple[tuple[type | UnionType, str], ...] = (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a decimal number"),
        (str, "a string"),
        (list | tuple, "an array"),
        (dict, "an object"),
    )
    return next((name for kind, name in names if isinstance(value, kind)), "an unknown type")


def invalid_type(param: str, expected: str, value: object) -> RequestError:
    message = f"Invalid type for '{clip(param, MAX_ECHO)}': expected {expected}, but got {json_type(value)} instead."
    return RequestError("invalid_type", message, param)


def above_max(param: str, high: float, value: float) -> RequestError:
    return _out_of_bounds(param, "above maximum", "<=", high, value)


def min_tokens_too_large(high: int, value: int, *, is_cut: bool) -> RequestError:
    """`high`: the most tokens of the answer. `is_cut`: whether the context has cut them."""
    error = above_max("min_tokens", high, value)
    way_out = " The context holds no more behind the prompt: shorten the prompt, or ask for fewer." if is_cut else ""
    return error.reworded(error.message + way_out, error.param)


def below_min(param: str, low: float, value: float) -> RequestError:
    return _out_of_bounds(param, "below minimum", ">=", low, value)


def _out_of_bounds(param: str, side: str, relation: str, bound: float, value: float) -> RequestError:
    kind = "integer" if isinstance(bound, int) else "decimal"
    limit = str(bound) if isinstance(bound, int) else f"{bound:g}"
    message = (
        f"Invalid '{param}': {kind} {side} value. Expected a value {relation} {limit}, but got {shown(value)} instead."
    )
    return RequestError(f"{kind}_{'above_max' if relation == '<=' else 'below_min'}_value", message, param)


def invalid_value(param: str, value: object, rule: str) -> RequestError:
    return RequestError("invalid_value", f"Invalid value for '{param}': '{shown(value)}'. {rule}", param)


def not_among(param: str, value: object, supported: Iterable[str]) -> RequestError:
    names = [f"'{name}'" for name in supported]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return RequestError("invalid_value", f"Invalid value: '{shown(value)}'. Supported values are: {listed}.", param)


def unsupported_value(param: str, value: object, rule: str) -> RequestError:
    given = f"'{shown(value)}'" if isinstance(value, str) else _listed(value) or shown(value)
    return RequestError("unsupported_value", f"Unsupported value: '{param}' does not support {given}. {rule}", param)


def cannot_fill_in(param: str) -> RequestError:
    message = (
        f"Unsupported parameter: '{param}' is not supported by this model. Its tokenizer has no tokens for filling in "
        "the middle. Send the text before the gap alone, as 'prompt' of /v1/completions, or serve a code model that "
        "has them, such as Qwen2.5-Coder, StarCoder2, Codestral or DeepSeek-Coder."
    )
    return RequestError("unsupported_parameter", message, param)


def missing(param: str, way_out: str = "") -> RequestError:
    message = f"Missing required parameter: '{param}'. {way_out}".rstrip()
    return RequestError("missing_required_parameter", message, param)


def array_too_long(param: str, limit: int, length: int) -> RequestError:
    message = (
        f"Invalid '{param}': array too long. "
        f"Expected an array with maximum length {limit}, but got an array with length {length} instead."
    )
    return RequestError("array_above_max_length", message, param)


def empty_array(param: str, limit: int = 1) -> RequestError:
    message = (
        f"Invalid '{param}': empty array. "
        f"Expected an array with minimum length {limit}, but got an empty array instead."
    )
    return RequestError("empty_array", message, param)


def string_too_long(param: str, limit: int, length: int) -> RequestError:
    message = (
        f"Invalid '{param}': string too long. "
        f"Expected a string with maximum length {limit}, but got a string with length {length} instead."
    )
    return RequestError("string_above_max_length", message, param)


def empty_string(param: str) -> RequestError:
    message = (
        f"Invalid '{param}': empty string. Expected a string with minimum length 1, but got an empty string instead."
    )
    return RequestError("empty_string", message, param)


def too_many_properties(param: str, limit: int, count: int) -> RequestError:
    message = (
        f"Invalid '{param}': too many properties. "
        f"Expected an object with at most {limit} properties, but got an object with {count} properties instead."
    )
    return RequestError("object_above_max_properties", message, param)


def unknown_parameter(param: str, near: str | None) -> RequestError:
    hint = f" Did you mean '{near}'?" if near else ""
    shown_param = clip(param, MAX_ECHO)
    return RequestError("unknown_parameter", f"Unknown parameter: '{shown_param}'.{hint}", shown_param)


def unsupported_parameter(param: str, way_out: str) -> RequestError:
    message = f"Unsupported parameter: '{param}' is not supported by this server. {way_out}"
    return RequestError("unsupported_parameter", message.strip(), param)


class TryAgainError(RequestError):
    """A refusal whose message ends with the time that `Retry-After` says."""

    def __init__(self, code: str, message: str, wait_s: float) -> None:
        """`wait_s`: seconds before jitter."""
        self.wait_s = _jittered(wait_s)
        super().__init__(code, f"{message} Please try again in {duration_text(self.wait_s)}.", retry_after_s=wait_s)


def duration_text(seconds: float) -> str:
    """A duration as OpenAI writes it: "20ms", "1s", "6m0s", "1h2m3s". Rounded up, so that a client is not early."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1e3)}ms"
    whole = math.ceil(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s" if minutes else f"{rest}s"


class ContextTooLongError(RequestError):
    """A prompt that exceeds the context. It keeps the token counts, for APIs that word the message differently."""

    def __init__(self, message: str, param: str, limit: int, num_prompt: int) -> None:
        super().__init__("context_length_exceeded", message, param)
        self.limit, self.num_prompt = limit, num_prompt


def context_too_long(param: str, limit: int, num_prompt: int, num_output: int | None) -> ContextTooLongError:
    """Counts are in tokens. `num_output` is the requested length of the answer, or None."""
    head = f"This model's maximum context length is {limit} tokens. However, "
    if num_output is None:
        tail = f"your {param} resulted in {num_prompt} tokens. Please reduce the length of the {param}."
    else:
        tail = (
            f"you requested {num_prompt + num_output} tokens ({num_prompt} in the {param}, {num_output} in the "
            f"completion). Please reduce the length of the {param} or of the completion."
        )
    return ContextTooLongError(head + tail, param, limit, num_prompt)


def text_too_long(param: str, limit: int, num_bytes: int, least_tokens: int) -> ContextTooLongError:
    """Refuses a text before it is tokenized, because so many bytes must be too many tokens."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, your {param} has {num_bytes} bytes, which "
        f"are at least {least_tokens} tokens. Please reduce the length of the {param}."
    )
    return ContextTooLongError(message, param, limit, least_tokens)


def too_many_tokens(param: str, limit: int) -> RequestError:
    message = f"Invalid '{param}': string too long. Expected a string of at most {limit} tokens."
    return RequestError("string_above_max_length", message, param)


def no_place_to_cut(param: str, start: int, num_chars: int, limit: int) -> RequestError:
    """Refuses a text with a run of characters that is too long to tokenize at once."""
    message = (
        f"Invalid '{param}': string too long. Expected at most {limit} characters in a row that this model's tokenizer "
        f"cannot split, but got {num_chars} from character {start} on. Put single spaces into the text, or shorten it."
    )
    return RequestError("string_above_max_length", message, param)


def too_much_work(param: str, factors: Iterable[tuple[int, str]], limit: int, unit: str) -> RequestError:
    """Refuses a request because the product of some fields is too large.

    `factors`: (count, noun) of each field, such as `(16, "prompts")`. `limit`: maximum of the product, in `unit`.
    `param`: the field to make smaller.
    """
    factors = tuple(factors)
    product = math.prod(count for count, _ in factors)
    written = " x ".join(f"{count} {noun}" for count, noun in factors)
    message = (
        f"Invalid '{clip(param, MAX_ECHO)}': too much work for one request: {written} = {product} {unit}. Expected at "
        f"most {limit} {unit}; make one of these numbers smaller, or send several requests."
    )
    return RequestError("request_exceeds_work_limit", message, param)


def internal_error() -> RequestError:
    """A bug of the server. The log has the details under the request id."""
    return RequestError("internal_error", "The server had an error while processing your request. Please try again.")


def leaving() -> RequestError:
    return RequestError("server_is_overloaded", "The server is shutting down. Send the request to another server.")


def model_not_loaded(name: str, reason: str) -> RequestError:
    """`reason`: why none of the engines of the model `name` runs. It is shortened if it leaves no place for the way
    out."""
    way_out = f"POST /v1/models/{clip(name, MAX_ECHO)}/load, with an admin key, tries it again."
    why = clip(reason, MAX_MESSAGE - 2 * MAX_ECHO).rstrip(".")
    return RequestError("model_not_loaded", f"This model is not served: {why}. {way_out}")


def model_is_busy(reason: str) -> RequestError:
    return RequestError("model_is_busy", f"{reason}. Unload it afterwards.")


def model_not_found(name: str, served: Iterable[str]) -> RequestError:
    """`served`: all names that clients may send. The message has as many as `MAX_LISTED` characters hold."""
    names = list(dict.fromkeys(served))
    listed: list[str] = []
    for each in names:
        if sum(map(len, listed)) + len(each) > MAX_LISTED and listed:
            listed.append(f"{len(names) - len(listed)} more, which GET /v1/models lists")
            break
        listed.append(f"`{clip(each, MAX_ECHO)}`")
    message = f"The model `{clip(name, MAX_ECHO)}` does not exist or you do not have access to it."
    return RequestError("model_not_found", f"{message} This server serves {', '.join(listed)}.", "model")
