"""The refusals that several files raise, worded as OpenAI words them, and what they repeat of a caller's values.

The code of each is a row of `errors.table`. No message has more than `MAX_ECHO` characters of what the caller sent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from types import UnionType
from urllib.parse import quote

from inferd.engine.api.errors import RequestError

MAX_ECHO = 200
"""Maximum number of characters of a caller's value that are sent back."""

MAX_MESSAGE = 1_000
"""Maximum number of characters of a message, also if a chat template or an engine wrote it."""

_MAX_LISTED_ITEMS = 8
"""Most items of an array that a message repeats."""

MAX_LISTED = 400
"""Number of characters of the names that a message lists."""


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
    code = f"{kind}_{'above_max' if relation == '<=' else 'below_min'}_value"
    return _unexpected(code, param, f"{kind} {side} value", f"a value {relation} {limit}", shown(value))


def _unexpected(code: str, param: str, what: str, expected: str, given: str) -> RequestError:
    return RequestError(code, f"Invalid '{param}': {what}. Expected {expected}, but got {given} instead.", param)


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
    expected, given = f"an array with maximum length {limit}", f"an array with length {length}"
    return _unexpected("array_above_max_length", param, "array too long", expected, given)


def empty_array(param: str, limit: int = 1) -> RequestError:
    expected = f"an array with minimum length {limit}"
    return _unexpected("empty_array", param, "empty array", expected, "an empty array")


def string_too_long(param: str, limit: int, length: int) -> RequestError:
    expected, given = f"a string with maximum length {limit}", f"a string with length {length}"
    return _unexpected("string_above_max_length", param, "string too long", expected, given)


def empty_string(param: str) -> RequestError:
    expected = "a string with minimum length 1"
    return _unexpected("empty_string", param, "empty string", expected, "an empty string")


def too_many_properties(param: str, limit: int, count: int) -> RequestError:
    expected, given = f"an object with at most {limit} properties", f"an object with {count} properties"
    return _unexpected("object_above_max_properties", param, "too many properties", expected, given)


def unknown_parameter(param: str, near: str | None) -> RequestError:
    hint = f" Did you mean '{near}'?" if near else ""
    shown_param = clip(param, MAX_ECHO)
    return RequestError("unknown_parameter", f"Unknown parameter: '{shown_param}'.{hint}", shown_param)


def unsupported_parameter(param: str, way_out: str) -> RequestError:
    message = f"Unsupported parameter: '{param}' is not supported by this server. {way_out}"
    return RequestError("unsupported_parameter", message.strip(), param)


def jittered(seconds: float) -> float:
    """One to two times as long, so that callers that were refused together do not return together."""
    return seconds * random.uniform(1, 2)


class TryAgainError(RequestError):
    """A refusal whose message ends with the time that `Retry-After` says."""

    def __init__(self, code: str, message: str, wait_s: float) -> None:
        """`wait_s`: seconds before jitter."""
        self.wait_s = jittered(wait_s)
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


def with_way_to_cut(error: ContextTooLongError, way_to_cut: str) -> ContextTooLongError:
    """A new refusal, with what the caller may do to have the text cut: an imperative; empty if there is nothing."""
    way = f" Or {way_to_cut}, which cuts it." if way_to_cut else ""
    return error.reworded(error.message + way, error.param)


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


def no_engine_to_clear(name: str) -> RequestError:
    """The model's directory of KV segments cannot be cleared, because its engines do that."""
    way_out = "Send a request, which loads it, and try again; or run `inferd kv clear` with the directory."
    message = f"No engine of the model {clip(name, MAX_ECHO)} runs, so its KV directory was not cleared. {way_out}"
    return RequestError("server_is_overloaded", message)


def model_is_busy(reason: str) -> RequestError:
    return RequestError("model_is_busy", f"{reason}. Send the request again afterwards.")


def model_is_asleep(name: str) -> RequestError:
    shown_name = clip(name, MAX_ECHO)
    way_out = f"POST /wake_up?model={quote(shown_name)}, with an admin key, wakes it."
    return RequestError("model_is_asleep", f"The model `{shown_name}` is asleep. {way_out}")


def woken() -> RequestError:
    return RequestError(
        "model_is_busy", "This model was woken before it slept. Send the request again if it is to sleep."
    )


def given_up() -> RequestError:
    """Ends an answer that the server aborted."""
    message = "This answer was given up, because the server is shutting down or its model was put to sleep."
    return RequestError("server_is_overloaded", message)


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
