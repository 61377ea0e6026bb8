"""Random faulty requests, made from the models that requests are read with: bodies, queries, headers and bytes.

Each is a valid request of some route with up to three faults. One seed gives one list. This file knows no daemon.
"""

from __future__ import annotations

import copy
import json
import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from inferd.server.endpoints.route import Route
from inferd.server.endpoints.routes import ROUTES
from inferd.server.schema.json_schema import schema_of
from inferd.server.schema.request_model import RequestModel
from tests.e2e.test_boundaries import BASES

MAX_TOKENS = 4
"""Maximum answer of a valid request. It is enough to stream, to call a tool and to follow a grammar."""

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, -0.0, 0.5, 1e-320, 2**31, -(2**31) - 1, 2**53, 2**63, -(2**63) - 1, 10**400, 1e308,
    "", " ", "x", "\u0000", "\ud800", "\U0001f600" * 9, "<|im_start|>", "<|vision_start|><|image_pad|><|vision_end|>",
    "{{ 7 * 7 }}", "../../etc/passwd", "a" * 5_000, [], [[]], [None], ["x", 1], [-1], [2**32], [1] * 3_000,
    {}, {"": {}}, {"x": None}, {"type": "x"}, {"$ref": "#"}, {"0": 1e3}, [{"role": "user"}], {"__proto__": {"a": 1}},
)  # fmt: skip
_NOT_JSON = ("NaN", "-Infinity", "01", "1e400", "'x'", "{", "[1,]", "\\u12", "tru", "\x00", "\ufeff1", "1" * 5_000)
_NAMES = ("temperature", "n", "stream", "__class__", "", "model", "\u0000", "prompt_embeds", "guided_json", "a" * 999)
_HEADERS: tuple[tuple[str, str], ...] = (
    ("Content-Type", "text/plain"), ("Content-Type", "application/json; charset=utf-16"), ("Content-Type", ""),
    ("Content-Encoding", "gzip"), ("X-Request-Id", "\u00e9" * 50), ("X-Request-Id", "a" * 600), ("Accept", "text/html"),
    ("X-Request-Timeout", "nan"), ("X-Request-Timeout", "-1"), ("X-Request-Timeout", "1e400"), ("Priority", "u=9"),
    ("Authorization", "Basic x"), ("Cookie", "a" * 4_000), ("Origin", "http://x"), ("Expect", "100-continue"),
    ("X-Forwarded-For", "\u00ff"), ("anthropic-version", "0"), ("Range", "bytes=9-"),
)  # fmt: skip
_PATHS = (
    "/", "//v1/models", "/v1/%00", "/v1/%ff%fe", "/v1/models/..%2f..%2fetc", "/v1/responses/%0a", "/v1/" + "a" * 3_000,
)  # fmt: skip
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    body: bytes | None = None
    headers: Sequence[tuple[str, str]] = field(default=(("Content-Type", "application/json"),))


def requests(seed: int, count: int) -> Iterator[Request]:
    """`count` requests. Half of them go to the routes that generate."""
    rng = random.Random(seed)
    with_body = [route for route in ROUTES if route.fields is not None]
    others = [route for route in ROUTES if route.fields is None and not route.missing]
    for _ in range(count):
        route = rng.choice(with_body if rng.random() < 0.85 else others)
        yield _Writer(rng).request(route)


def pairs(seed: int, count: int) -> Iterator[Request]:
    """`count` requests with two fields at their bounds. Each field alone may be served, but not their product.

    A third of them are two hostile numbers in one JSON schema, or JSON within a string.
    """
    rng = random.Random(f"pairs {seed}")
    routes = [route for route in ROUTES if route.fields is not None and route.fields.__name__ in BASES]
    for _ in range(count):
        draw = rng.random()
        if draw < 0.2:
            yield _post("/v1/chat/completions", _CHAT | _two_numbers(rng))
        elif draw < 0.33:
            yield _post("/v1/chat/completions", _CHAT | {"messages": _json_in_strings(rng)})
        elif draw < 0.6:
            yield _post("/v1/completions", _many_choices(rng))
        else:
            route = rng.choice(routes)
            assert route.fields is not None
            yield _post(route.path, _at_bounds(rng, route.fields))


def _post(path: str, body: dict[str, Any]) -> Request:
    return Request("POST", path, json.dumps(body).encode("utf-8", "surrogatepass"))


_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = (0, -0.0, 0.1, 1e-300, 1e308, -1e308, 10**400, -(10**400), 2**53 + 1, 2**63, 0.5, -1, 3, 1e-9)


def _two_numbers(rng: random.Random) -> dict[str, Any]:
    kind, names = rng.choice((("integer", _BOUNDS), ("number", _BOUNDS), ("string", _COUNTS), ("array", _COUNTS)))
    schema: dict[str, Any] = {"type": kind, **{name: rng.choice(_NUMBERS) for name in rng.sample(names, 2)}}
    if rng.random() < 0.5:
        schema = {"type": "object", "properties": {"a": schema, "b": {"anyOf": [schema, schema]}}}
    form = {"name": "x", "schema": schema, "strict": rng.random() < 0.7}
    if rng.random() < 0.5:
        return {"response_format": {"type": "json_schema", "json_schema": form}}
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]}


_WITHIN = (
    '{"a": "\\ud800"}', '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 200 + "]" * 200, '{"a":' * 100 + "1" + "}" * 100,
    "1" * 5_000, '{"a": 1e400}', "[]", "null", '"x"', "", " ", "{", '{"": {"": {"": ""}}}',
    '{"a": "' + "x" * 9_000 + '"}', "[" + "1," * 50_000 + "1]", '{"\\u0000": "\\uD83D\\uDE00"}',
)  # fmt: skip


def _json_in_strings(rng: random.Random) -> list[dict[str, Any]]:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": rng.choice(_WITHIN)}}
        for i in range(rng.randint(1, 3))
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": rng.choice(_WITHIN)} for call in calls]
    return [*_CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": calls}, *results]


def _many_choices(rng: random.Random) -> dict[str, Any]:
    """Prompts times choices times the size of each, around the bounds of their products."""
    prompts = [[5] * rng.choice((1, 1, 500))] * rng.choice((1, 16, 17, 2_048))
    further: dict[str, Any] = rng.choice(
        (
            {}, {"stop": ["a" * 1_023 + chr(97 + i) for i in range(16)]}, {"logprobs": 20, "echo": True},
            {"logit_bias": {str(i): 1 for i in range(3_000)}}, {"bad_words": ["a" * 99] * 1_000}, {"regex": "a{1,99}b"},
            {"allowed_token_ids": list(range(3_000))}, {"prompt_logprobs": 5}, {"repetition_detection":
            {"max_pattern_size": 256, "min_pattern_size": 1, "min_count": 2}},
        )
    )  # fmt: skip
    return {"prompt": prompts, "n": rng.choice((1, 128, 128)), "max_tokens": 1, **further}


def _at_bounds(rng: random.Random, fields: type[RequestModel]) -> dict[str, Any]:
    """A valid body, with two of its route's fields at their maximum."""
    schema = schema_of(fields)
    body: dict[str, Any] = json.loads("{" + BASES[fields.__name__] + "}")
    large = {name: _largest(kind) for name, kind in schema["properties"].items()}
    names = sorted(name for name, value in large.items() if value is not None)
    for name in rng.sample(names, min(2, len(names))):
        body[name] = large[name]
    for name in _LENGTHS:
        if name in schema["properties"]:
            body[name] = rng.randint(1, MAX_TOKENS)
    if isinstance(body.get("min_tokens"), int):
        body["min_tokens"] = 1
    body.pop("timeout", None)
    return body


_MOST_CHARS = 2**20


def _largest(schema: dict[str, Any], most: int = _MOST_CHARS) -> Any:
    """The largest value of a schema, with about `most` characters; None if the schema has no bound."""
    options = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    if options:
        return max((_largest(option, most) for option in options), key=lambda value: len(json.dumps(value)))
    match schema.get("type"):
        case "integer" | "number":
            return schema.get("maximum")
        case "string" if "enum" not in schema and "pattern" not in schema:
            return "a" * min(schema["maxLength"], most) if "maxLength" in schema else None
        case "array" if "maxItems" in schema:
            item = _largest(schema.get("items", {}), max(1, most // schema["maxItems"]))
            item = item if item is not None else 1 if schema.get("items", {}).get("type") == "integer" else "a"
            num_items = min(schema["maxItems"], most // len(json.dumps(item)))
            return [item] * num_items
        case "object" if schema.get("additionalProperties") and "maxProperties" in schema:
            return {str(i): 1 for i in range(schema["maxProperties"])}
    return None


class _Writer:
    """Writes one request at a time."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def request(self, route: Route) -> Request:
        rng = self._rng
        path, method = self._path(route), route.method
        headers = [("Content-Type", "application/json")]
        body = self._body(route) if route.fields is not None else None
        if rng.random() < 0.05:
            headers = [*headers[rng.randint(0, 1) :], rng.choice(_HEADERS)]
        if rng.random() < 0.03:
            method = rng.choice(("GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "POST"))
        if rng.random() < 0.03:
            path = rng.choice(_PATHS)
        if route.fields is None and rng.random() < 0.1:
            body = rng.choice((b"", b"{}", b"\xff", b"[" * 500))
        return Request(method, path, body, tuple(headers))

    def _path(self, route: Route) -> str:
        rng = self._rng
        name = rng.choice(("resp_x", "tiny", "%2e%2e", "a" * 300, "\u00e9".encode().hex(), "resp_" + "0" * 48))
        path = route.path
        for placeholder in ("{response_id}", "{model_id:path}"):
            path = path.replace(placeholder, name)
        if rng.random() < (0.6 if route.query is not None else 0.05):
            fields = list(schema_of(route.query)["properties"]) if route.query is not None else ["stream"]
            values = ("", "0", "-1", "1e9", "true", "%00", "%ff", "x" * 300, "desc", "asc", "99999999999999999999")
            path += "?" + "&".join(f"{rng.choice(fields)}={rng.choice(values)}" for _ in range(rng.randint(1, 3)))
        return path

    def _body(self, route: Route) -> bytes:
        """A body of the route's type, mostly a valid one with a few more fields."""
        rng = self._rng
        assert route.fields is not None
        schema = schema_of(route.fields)
        value: Any = self._object(schema, 0, sparse=True)
        if rng.random() < 0.7:
            value |= json.loads("{" + BASES[route.fields.__name__] + "}")
        if "model" in value and rng.random() < 0.9:
            value["model"] = "tiny"
        self._bound_work(value, schema)
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
            value = self._spoil(value, schema)
        if isinstance(value, dict) and not any(name in value for name in _LENGTHS):
            self._bound_work(value, schema)
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
        raw = text.encode("utf-8", "surrogatepass")
        return self._spoil_bytes(raw) if rng.random() < 0.1 else raw

    def _bound_work(self, value: dict[str, Any], schema: dict[str, Any]) -> None:
        """Limits the length of valid answers, because answers of minutes find no fault."""
        for name in [name for name in _LENGTHS if name in schema["properties"]]:
            value[name] = self._rng.randint(1, MAX_TOKENS)
        if isinstance(value.get("min_tokens"), int):
            value["min_tokens"] = min(value["min_tokens"], 2)

    # -- valid values --------------------------------------------------------------------------------------------------

    def _value(self, schema: dict[str, Any], depth: int) -> Any:
        rng = self._rng
        options = schema.get("anyOf") or schema.get("oneOf")
        if options and "properties" not in schema:
            some = [option for option in options if option.get("type") != "null"]
            return self._value(rng.choice(some or options), depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return copy.deepcopy(rng.choice(schema["enum"]))  # what is spoilt later is not the schema
        kind = schema.get("type")
        write = self._writers().get(rng.choice(kind) if isinstance(kind, list) else kind)
        return rng.choice(("x", 1, {}, [], True)) if write is None else write(schema, depth)

    def _writers(self) -> dict[Any, Callable[[dict[str, Any], int], Any]]:
        return {
            "boolean": lambda schema, depth: self._rng.random() < 0.5,
            "integer": self._integer,
            "number": self._number,
            "string": self._string,
            "array": self._array,
            "object": self._object,
            "null": lambda schema, depth: None,
        }

    def _integer(self, schema: dict[str, Any], depth: int) -> int:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
        high = min(schema.get("maximum", low + 9), low + 2**31)
        return self._rng.choice((low, high, self._rng.randint(low, min(high, low + 9))))

    def _number(self, schema: dict[str, Any], depth: int) -> float:
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0.0))
        high = schema.get("maximum", low + 2.0)
        return self._rng.choice((high, self._rng.uniform(low, high), (low + high) / 2))

    def _string(self, schema: dict[str, Any], depth: int) -> str:
        rng = self._rng
        least = schema.get("minLength", 0)
        most = min(schema.get("maxLength", 12), least + 12)
        letters = string.ascii_letters if "pattern" in schema else string.printable + "\u00e9\u4e2d\U0001f600"
        return "".join(rng.choice(letters) for _ in range(rng.randint(max(least, 1), max(most, 1))))

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", 3), least + 2)
        if depth > 6:
            most = least
        return [self._value(schema.get("items", {}), depth + 1) for _ in range(self._rng.randint(least, most))]

    def _object(self, schema: dict[str, Any], depth: int, *, sparse: bool = False) -> dict[str, Any]:
        """The required fields, and a few of the others."""
        rng, properties = self._rng, schema.get("properties", {})
        required = set(schema.get("required", ()))
        share = 0.08 if sparse else 0.4 if depth < 6 else 0.0
        chosen = [name for name in properties if name in required or rng.random() < share]
        return {name: self._value(properties[name], depth + 1) for name in chosen}

    # -- what is wrong with them ---------------------------------------------------------------------------------------

    def _hostile(self) -> Any:
        return copy.deepcopy(self._rng.choice(HOSTILE))

    def _spoil(self, value: Any, schema: dict[str, Any]) -> Any:
        """The body with one value changed."""
        rng = self._rng
        places = list(_places(value))
        if not places or rng.random() < 0.25:
            name = rng.choice((*schema["properties"], *_NAMES))
            return {**value, name: self._hostile()} if isinstance(value, dict) else self._hostile()
        owner, key = rng.choice(places)
        match rng.randrange(5):
            case 0 if isinstance(owner, dict):
                del owner[key]
            case 1 if isinstance(owner, list):
                owner.insert(key, self._hostile())
            case 2:
                owner[key] = [owner[key]] * rng.choice((1, 2, 130))
            case 3:
                owner[key] = {rng.choice(_NAMES): owner[key]}
            case _:
                owner[key] = self._hostile()
        return value

    def _spoil_bytes(self, raw: bytes) -> bytes:
        """Bytes that no writer of JSON writes."""
        rng, at = self._rng, self._rng.randrange(len(raw))
        return rng.choice(
            (
                raw[:at],
                raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :],
                raw[:at] + rng.choice(_NOT_JSON).encode() + raw[at:],
                raw[:-1] + b',"n":1,"n":1}',
                b"\xef\xbb\xbf" + raw,
                raw + raw,
                raw.decode("utf-8", "replace").encode("utf-16"),
                b'{"messages":' + b"[" * rng.choice((100, 130, 100_000)),
                b"",
            )
        )


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value inside."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])
