"""The one table of errors, in OpenAI's shape: code -> (HTTP status, type), and the sentences that go with it.

Every refusal is a `RequestError` whose `code` is a key of `ROWS`; this file turns it into a status, a body and headers,
before a stream and inside one. Knows no routes and no fields. No body carries a path, a stack, or more than
`MAX_ECHO` characters of what the caller sent.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from types import UnionType

import orjson
from starlette.responses import Response

from inferd.engine.api.errors import EngineDeadError, RequestError

logger = logging.getLogger("inferd.server")

MAX_ECHO = 200
"""Most characters of a caller's value that are ever sent back."""

MAX_MESSAGE = 1_000
"""Most characters of a message, whoever wrote it (a chat template's own complaint, an engine's)."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """What a code means on the wire."""

    status: int
    type: str
    wire_code: str | None
    about: str
    """When it is answered, for the documentation."""
    retry_after_s: float | None = None
    """Base of the jittered Retry-After."""


_REFUSED, _BROKEN = "invalid_request_error", "server_error"
_LIMITED, _UNAVAILABLE = "rate_limit_error", "service_unavailable_error"

_BAD_REQUESTS = {
    "array_above_max_length": "An array has too many items.",
    "context_length_exceeded": "The prompt, or prompt and answer together, exceed the context; both counts are named.",
    "decimal_above_max_value": "A number is too large.",
    "decimal_below_min_value": "A number is too small.",
    "empty_array": "An array needs an item.",
    "empty_string": "A string needs a character.",
    "integer_above_max_value": "A whole number is too large.",
    "integer_below_min_value": "A whole number is too small.",
    "invalid_type": "A value has the wrong JSON type.",
    "invalid_value": "A value, or two fields together, cannot be.",
    "missing_required_parameter": "A field is missing.",
    "previous_response_not_found": "No response with the id of `previous_response_id` is stored for this key.",
    "object_above_max_properties": "An object has too many keys.",
    "string_above_max_length": "A string is too long.",
    "unknown_parameter": "Nobody knows the field.",
    "unsupported_parameter": "Other servers know the field and this one does not serve it; the way out is named.",
    "unsupported_value": "The field is served, this value of it is not.",
}

ROWS: dict[str, ErrorRow] = {
    **{code: ErrorRow(400, _REFUSED, code, about) for code, about in _BAD_REQUESTS.items()},
    "malformed_json": ErrorRow(400, _REFUSED, None, "The body is no JSON object, or more of one than is read."),
    "malformed_http": ErrorRow(400, _REFUSED, None, "The bytes are not one clear HTTP/1.1 request."),
    "invalid_api_key": ErrorRow(401, "authentication_error", "invalid_api_key", "No key, or a wrong one."),
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
        404, _REFUSED, "response_not_found", "No response with this id is stored for this key, or it is no longer."
    ),
    "model_not_found": ErrorRow(404, _REFUSED, "model_not_found", "The model is not served."),
    "method_not_supported": ErrorRow(405, _REFUSED, "method_not_supported", "`Allow` lists the methods of the path."),
    "deadline_exceeded": ErrorRow(
        408,
        "timeout_error",
        "deadline_exceeded",
        "The request's `timeout` ran out, or its head or body did not come in time.",
    ),
    "request_exceeds_work_limit": ErrorRow(
        400,
        _REFUSED,
        "request_exceeds_work_limit",
        "Each field is within its bounds, but their product is too large. The message shows both and the limit.",
    ),
    "request_too_large": ErrorRow(413, _REFUSED, "request_too_large", "The body is larger than `--max-body-bytes`."),
    "unsupported_content_type": ErrorRow(
        415, _REFUSED, "unsupported_content_type", "The body is not said to be JSON, or is compressed."
    ),
    "rate_limit_exceeded": ErrorRow(
        429,
        _LIMITED,
        "rate_limit_exceeded",
        "This client asks too often, or its first token would come later than the TTFT target, or the server has too "
        "much to do to compile its grammar now; `Retry-After` says when to ask again.",
        1.0,
    ),
    "slow_down": ErrorRow(429, _LIMITED, "slow_down", "This client asks for too much at a time.", 1.0),
    "head_too_large": ErrorRow(431, _REFUSED, "head_too_large", "Request line and headers are too long, or too many."),
    "internal_error": ErrorRow(500, _BROKEN, None, "A mistake of the server; its log has the request id."),
    "engine_error": ErrorRow(500, _BROKEN, "engine_error", "The engine failed this request, or stopped."),
    "numerical_error": ErrorRow(500, _BROKEN, "numerical_error", "The model computed NaN or infinity."),
    "not_implemented": ErrorRow(501, _BROKEN, "not_implemented", "Other servers have the route and this one does not."),
    "server_is_overloaded": ErrorRow(
        503, _UNAVAILABLE, "server_is_overloaded", "Too much waits, or the server starts or stops.", 1.0
    ),
}


def row_of(error: RequestError | EngineDeadError) -> ErrorRow:
    """What `error` is on the wire."""
    code = "engine_error" if isinstance(error, EngineDeadError) else error.code
    if code not in ROWS:
        logger.error("the error code %r is not in the table", code)
        return ROWS["internal_error"]
    return ROWS[code]


def body_of(error: RequestError | EngineDeadError) -> dict[str, object]:
    """The error envelope, before or inside a stream."""
    row = row_of(error)
    if isinstance(error, EngineDeadError):
        # How the engine died is for the operator's log, not for the caller.
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
    """What the status asks for besides the body: who to authenticate as, when to come back."""
    row = row_of(error)
    if row.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if row.status == 501:
        # OpenAI's clients take a 5xx for a passing trouble and ask twice more.
        return {"X-Should-Retry": "false"}
    if row.retry_after_s is None:
        return {}
    # Jitter: callers that were refused together must not come back together.
    known_s = error.retry_after_s if isinstance(error, RequestError) else None
    wait_ms = max(1, int((row.retry_after_s if known_s is None else known_s) * random.uniform(1_000, 2_000)))
    return {"Retry-After": str(-(-wait_ms // 1_000)), "Retry-After-Ms": str(wait_ms)}


def response_of(error: RequestError | EngineDeadError) -> Response:
    return Response(
        orjson.dumps(body_of(error)), row_of(error).status, headers_of(error), media_type="application/json"
    )


# --- The sentences -----------------------------------------------------------------------------------------------


def clip(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, fit for UTF-8."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return cut.encode("utf-8", "replace").decode("utf-8")


def shown(value: object) -> str:
    """A caller's value as a message may show it: bounded, whatever its size."""
    if isinstance(value, str):
        return clip(value, MAX_ECHO)
    if value is None or isinstance(value, (dict, list, tuple)):
        return json_type(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 77 digits"
    return clip(str(value), MAX_ECHO)


def json_type(value: object) -> str:
    """The JSON type of a parsed value, as OpenAI's messages name it."""
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
    given = f"'{shown(value)}'" if isinstance(value, str) else shown(value)
    return RequestError("unsupported_value", f"Unsupported value: '{param}' does not support {given}. {rule}", param)


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


class ContextTooLongError(RequestError):
    """With its counts, in tokens, for interfaces that word it otherwise."""

    def __init__(self, message: str, param: str, limit: int, num_prompt: int) -> None:
        super().__init__("context_length_exceeded", message, param)
        self.limit, self.num_prompt = limit, num_prompt


def context_too_long(param: str, limit: int, num_prompt: int, num_output: int | None) -> ContextTooLongError:
    """`num_output` is the number of tokens asked for, where asked for; counts are in tokens."""
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
    """Of a text that was not turned into tokens, because its bytes say that they are too many."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, your {param} has {num_bytes} bytes, which "
        f"are at least {least_tokens} tokens. Please reduce the length of the {param}."
    )
    return ContextTooLongError(message, param, limit, least_tokens)


def too_many_tokens(param: str, limit: int) -> RequestError:
    message = f"Invalid '{param}': string too long. Expected a string of at most {limit} tokens."
    return RequestError("string_above_max_length", message, param)


def no_place_to_cut(param: str, start: int, num_chars: int, limit: int) -> RequestError:
    """Of a text that would have to be tokenized at once."""
    message = (
        f"Invalid '{param}': string too long. Expected at most {limit} characters in a row that this model's tokenizer "
        f"cannot split, but got {num_chars} from character {start} on. Put single spaces into the text, or shorten it."
    )
    return RequestError("string_above_max_length", message, param)


def too_much_work(param: str, factors: Iterable[tuple[int, str]], limit: int, unit: str) -> RequestError:
    """A refusal of a product of fields.

    `factors`: (count, noun) of each field, as in `(16, "prompts")`. `limit`: of their product, in `unit`. `param` is
    the field to make smaller.
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
    """A mistake of ours: the log has the details, the caller has the request id."""
    return RequestError("internal_error", "The server had an error while processing your request. Please try again.")


def leaving() -> RequestError:
    return RequestError("server_is_overloaded", "The server is shutting down; retry against another one.")


def model_not_found(name: str) -> RequestError:
    message = f"The model `{clip(name, MAX_ECHO)}` does not exist or you do not have access to it."
    return RequestError("model_not_found", message, "model")
