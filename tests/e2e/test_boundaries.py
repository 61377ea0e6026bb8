"""Sends every field of every request type at and beyond its bounds to the real engine.

The cases are made from the models of the requests. Each answer must be 2xx or 4xx in OpenAI's shape. The engine must be
the same process as before, with all blocks free.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from inferd.server.endpoints import embedding_routes, routes
from inferd.server.endpoints.route import Access
from inferd.server.endpoints.routes import ROUTES
from inferd.server.errors import anthropic as anthropic_errors
from inferd.server.errors import table
from inferd.server.schema.json_schema import schema_of, types_of
from inferd.server.schema.request_model import RequestModel

from .conftest import Daemon
from .test_client import wait_idle

BASES: dict[str, str] = {
    "ChatRequest": '"messages":[{"role":"user","content":"x"}],"max_completion_tokens":2',
    "CompletionRequest": '"prompt":"x","max_completion_tokens":2',
    "InfillRequest": '"n_predict":2',
    "MessagesRequest": '"messages":[{"role":"user","content":"x"}],"max_tokens":2',
    "CountTokensRequest": '"messages":[{"role":"user","content":"x"}]',
    "EmbeddingRequest": '"input":"x"',
    "RerankRequest": '"query":"x","documents":["x"]',
    "ScoreRequest": '"text_1":"x","text_2":"x"',
    "ClassifyRequest": '"input":"x"',
    "PredictRequest": '"inputs":"x"',
    "PoolingRequest": '"input":"x"',
    "CohereEmbedRequest": '"texts":["x"]',
    "TeiEmbedRequest": '"inputs":"x"',
    "OllamaEmbedRequest": '"input":"x"',
    "OllamaEmbeddingsRequest": '"prompt":"x"',
    "OllamaShowRequest": '"model":"tiny"',
    "LlamaCppEmbeddingRequest": '"content":"x"',
    "ResponsesRequest": '"input":"x","max_output_tokens":2',
    "TokenizeRequest": '"prompt":"x"',
    "DetokenizeRequest": '"tokens":[1]',
    "LoadAdapterRequest": '"lora_name":"x","lora_path":"x"',
    "UnloadAdapterRequest": '"lora_name":"x"',
}
"""A body that is accepted as it is, without its braces."""

HOSTILE = (
    "NaN", "Infinity", "-Infinity", "-0.0", "0", "-1", "1", "1.5", "1e-320", "1e400", "2147483648", "-2147483649",
    "9223372036854775808", "1" + "0" * 400, "null", "true", '"x"', '""', '"\\u0000"', '"\\ud800"', "[]", "[1]", '["x"]',
    "[null]", "[[1]]", "[-1]", "[4294967296]", "[9223372036854775808]", "{}", '{"x":1}', '{"0":0.5}', '{"0":1e400}',
    '{"type":"x"}', "[{}]",
)  # fmt: skip
"""Values that no field, or only some fields, accept. They are JSON texts, or texts that some parsers accept as JSON."""

SHORT_SHARE = 8
"""Bounds that the short tier tests in full too."""
MAX_GENERATED = 70_000
"""Maximum length of a string or list that is made to test a bound."""


def at_bounds(schema: dict[str, Any], depth: int = 0) -> Iterator[str]:
    """JSON texts at the bounds of `schema` and one step beyond, also inside lists and objects."""
    for option in schema.get("anyOf", ()):
        yield from at_bounds(option, depth)
    yield from (json.dumps(value) for value in schema.get("enum", ()))
    kind = next(iter(types_of({"type": schema.get("type", "null")}) - {"null"}), None)
    if kind in ("integer", "number"):
        step = 1 if kind == "integer" else 1e-6
        for bound, beyond in ((schema.get("minimum"), -step), (schema.get("maximum"), step)):
            if bound is not None:
                yield from (json.dumps(bound), json.dumps(bound + beyond))
    if kind == "string":
        yield from (json.dumps("a" * length) for length in lengths(schema, "minLength", "maxLength"))
    if kind == "array":
        item = next(iter(at_bounds(schema.get("items", {}), depth + 1)), "1")
        yield from ("[" + ",".join([item] * length) + "]" for length in lengths(schema, "minItems", "maxItems"))
    if kind == "array" and depth < 2:
        yield from (f"[{value}]" for value in at_bounds(schema.get("items", {}), depth + 1))
    if kind == "object":
        yield from objects(schema, depth)


def objects(schema: dict[str, Any], depth: int) -> Iterator[str]:
    """Objects with one key at its bounds or with a hostile value, and with one key too many."""
    for name, value in schema.get("properties", {}).items():
        hostile = HOSTILE if depth < 2 else ()
        for text in (*hostile, *at_bounds(value, depth + 1)):
            yield f'{{"{name}":{text}}}'
    for count in lengths(schema, "", "maxProperties"):
        yield "{" + ",".join(f'"{i}":0' for i in range(count)) + "}"


def lengths(schema: dict[str, Any], low_name: str, high_name: str) -> list[int]:
    low, high = schema.get(low_name), schema.get(high_name)
    found = [] if low is None else [low - 1, low]
    return found if high is None or high >= MAX_GENERATED else [*found, high, high + 1]


def bodies(fields: type[RequestModel], share: int) -> Iterator[bytes]:
    """The base with one more field, with that field in place of the base's, and with that field twice.

    `share`: a field gets every n-th hostile value. Different fields get different ones.
    """
    base = BASES[fields.__name__]
    given = json.loads("{" + base + "}")
    for number, name in enumerate(fields.names):
        schema = schema_of(fields)["properties"][name]
        others = ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in given.items() if key != name)
        for text in dict.fromkeys((*HOSTILE[number % share :: share], *at_bounds(schema))):
            yield f'{{{others}{"," if others else ""}"{name}":{text}}}'.encode()
        yield f'{{{base},"{name}":null,"{name}":null}}'.encode()


UNANSWERED = {
    route.path
    for route in (
        routes.INFILL, embedding_routes.TEI_EMBED_ALL, *routes.RERANKS, *routes.SCORES, *routes.CLASSIFIES,
        routes.PREDICT,
    )
}  # fmt: skip
"""Routes that the embedded model cannot answer: it has no tokens for filling in the middle, gives no vectors of tokens,
and judges no texts."""


def post(daemon: Daemon, path: str, some: list[bytes]) -> list[tuple[bytes, int, bytes]]:
    """(body, status, answer) of each body, over one connection. A connection that the server closed is opened again."""
    where = urlsplit(daemon.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    answers = []
    for body in some:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answers.append((body, response.status, response.read()))
    connection.close()
    return answers


@pytest.mark.parametrize(
    "path", [route.path for route in ROUTES if route.fields is not None and route.access is not Access.ADMIN]
)
def test_no_value_of_any_field_harms_anyone(daemon: Daemon, path: str, is_long: bool) -> None:
    fields = next(route.fields for route in ROUTES if route.path == path)
    assert fields is not None
    pid = daemon.engine_pid
    everything = list(bodies(fields, share=1 if is_long else SHORT_SHARE))
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(lambda i: post(daemon, path, everything[i::8]), range(8))
        answers = [answer for part in parts for answer in part]
    expected = {400} if path in UNANSWERED else {200, 400}
    assert {status for _, status, _ in answers} >= expected
    for body, status, answer in answers:
        assert 200 <= status < 300 or 400 <= status < 500, (body[:300], status, answer[:300])
        if status >= 400:
            (check_anthropic_error if anthropic_errors.is_anthropic(path) else check_error)(body, answer)
        assert b'"type":"server_error"' not in answer and b'"type":"api_error"' not in answer, body[:300]
    wait_idle(daemon)
    assert daemon.engine_pid == pid
    assert daemon.get("/ready").status_code == 200


def check_error(body: bytes, answer: bytes) -> None:
    error = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}, body[:300]
    assert error["message"]
    assert any((row.type, row.wire_code) == (error["type"], error["code"]) for row in table.ROWS.values()), error
    assert len(answer) < 2_500


def check_anthropic_error(body: bytes, answer: bytes) -> None:
    told = json.loads(answer)
    assert (set(told), told["type"]) == ({"type", "error", "request_id"}, "error"), body[:300]
    assert set(told["error"]) == {"type", "message"}
    assert told["error"]["message"]
    assert told["error"]["type"] in anthropic_errors.TYPES.values()
    assert len(answer) < 2_500


def test_the_generator_reaches_both_sides_of_every_bound() -> None:
    """Checks some of the made bounds by hand."""
    made = set(at_bounds({"type": "integer", "minimum": 0, "maximum": 20}))
    assert made == {"0", "-1", "20", "21"}
    texts = set(at_bounds({"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 2}))
    assert {'[""]', '["a"]', '["",""]', '["","",""]'} <= texts
    nested = {"type": "object", "properties": {"a": {"type": "number", "maximum": 2}}}
    assert {'{"a":2}', '{"a":2.000001}', '{"a":NaN}'} <= set(at_bounds(nested))
    for route in ROUTES:
        if route.fields is not None:
            assert len(list(bodies(route.fields, share=1))) > 30 * len(route.fields.names)
