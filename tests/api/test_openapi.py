"""/openapi.json: valid, complete, and in agreement with what the routes do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from inferd.engine.api.errors import RequestError
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.endpoints import openapi
from inferd.server.endpoints.app import Backend, create_app
from inferd.server.endpoints.openapi import default_of, document
from inferd.server.endpoints.route import Access
from inferd.server.endpoints.routes import ROUTES
from inferd.server.errors import anthropic as anthropic_errors
from inferd.server.errors import messages as errors
from inferd.server.errors import table
from inferd.server.observability.metrics import Metrics
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.json_schema import schema_of
from tests.api.conftest import app_settings


@pytest.fixture
def app(model: Any, router: Any) -> FastAPI:
    return create_app(Backend(model, router, Metrics("tiny"), app_settings()))


@pytest.fixture
def described(app: FastAPI) -> dict[str, Any]:
    return document(app.routes, "1.2.3")


def test_it_is_valid(described: dict[str, Any], app: FastAPI, http: httpx.Client) -> None:
    OpenAPIV31SpecValidator(described).validate()
    served = http.get("/openapi.json").json()
    assert served["paths"] == document(app.routes, "1.2.3", needs_key=False)["paths"]
    assert served["info"]["version"] == http.get("/version").json()["version"]


def test_callers_at_the_same_time_have_it_made_once(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., str]) -> None:
    """It takes long, on a thread that reads prompts, and needs no key."""
    num_made = 0

    def counted(*args: Any, **kwargs: Any) -> dict[str, Any]:
        nonlocal num_made
        num_made += 1
        return document(*args, **kwargs)

    monkeypatch.setattr(openapi, "document", counted)
    url = serve(app_settings(api_key=("alice",), access_log=False))
    with ThreadPoolExecutor(8) as threads:
        bodies = set(threads.map(lambda _: httpx.get(f"{url}/openapi.json", timeout=60).content, range(8)))
    assert (num_made, len(bodies)) == (1, 1)


def test_every_route_is_in_it(described: dict[str, Any]) -> None:
    found = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert found == {(route.method, route.path.replace(":path}", "}")) for route in ROUTES}
    operations = [operation for methods in described["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    public = [route.path for route in ROUTES if route.access is Access.PUBLIC]
    assert [
        path for path, methods in described["paths"].items() if not next(iter(methods.values()))["security"]
    ] == public


def test_a_key_is_asked_for_where_one_is_needed(serve: Callable[..., str]) -> None:
    for keys, names in (((), []), (("sk-1",), ["key"])):
        url = serve(app_settings(access_log=False, api_key=keys))
        paths = httpx.get(f"{url}/openapi.json").json()["paths"]
        assert [name for one in paths["/v1/completions"]["post"]["security"] for name in one] == names
        assert not paths["/health"]["get"]["security"]
        assert paths["/config"]["get"]["security"], "an admin's key, also where no other is set"


JSON = {"Content-Type": "application/json"}


ASKED: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("GET", "/health", "/health", {}),
    ("GET", "/ready", "/ready", {}),
    ("GET", "/v1/responses/x?limit=1", "/v1/responses/{response_id}", {}),
    ("GET", "/v1/responses/x?stream=true", "/v1/responses/{response_id}", {}),
    ("GET", "/v1/responses/x/input_items?limit=0", "/v1/responses/{response_id}/input_items", {}),
    ("POST", "/v1/responses/x/cancel", "/v1/responses/{response_id}/cancel", {}),
    ("GET", "/version", "/version", {"headers": {"X-Long": "x" * 70_000}}),
    ("GET", "/live", "/live", {"headers": {"Content-Encoding": "gzip"}}),
    ("GET", "/config", "/config", {}),
    ("POST", "/sleep?level=1", "/sleep", {}),
    ("POST", "/wake_up?tags=weights", "/wake_up", {}),
    ("GET", "/is_sleeping?model=other", "/is_sleeping", {}),
    ("POST", "/start_profile", "/start_profile", {}),
    ("POST", "/v1/completions", "/v1/completions", {"json": {"prompt": "x"}}),
    ("POST", "/v1/completions", "/v1/completions", {"json": {"prompt": "x"}, "headers": {"X-SLO-TTFT-Ms": "soon"}}),
    ("POST", "/v1/completions", "/v1/completions", {"content": "{", "headers": JSON}),
    ("POST", "/v1/completions", "/v1/completions", {"content": "x", "headers": {"Content-Type": "text/plain"}}),
    ("POST", "/v1/completions", "/v1/completions", {"json": {"model": "other", "prompt": "x"}}),
    (
        "POST",
        "/v1/messages",
        "/v1/messages",
        {"json": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}},
    ),
    ("POST", "/v1/embeddings", "/v1/embeddings", {"json": {"input": "x"}}),
)
"""(method, path, the path in the document, options of the request)."""
NAMED = {"retry-after", "retry-after-ms", "www-authenticate", "x-should-retry"}


@pytest.mark.parametrize("state", ["ready", "leaving", "keyed"])
def test_what_is_answered_is_in_it_with_its_headers(
    described: dict[str, Any], serve: Callable[..., str], router: Any, state: str
) -> None:
    router.is_leaving = state == "leaving"
    router.state = State.STOPPED if router.is_leaving else State.SERVING
    url = serve(app_settings(access_log=False, api_key=("sk-1",) if state == "keyed" else ()))
    for method, path, template, options in ASKED:
        answer = httpx.request(method, url + path, **options)
        told = described["paths"][template][method.lower()]["responses"]
        assert str(answer.status_code) in told, (path, answer.text)
        response = told[str(answer.status_code)]
        if "$ref" in response:
            response = described["components"]["responses"][response["$ref"].rpartition("/")[2]]
        named = {name.lower() for name in response.get("headers", {})}
        if answer.status_code in (503, anthropic_errors.OVERLOADED) and "x-should-retry" not in answer.headers:
            named -= {"x-should-retry"}  # only some of them say that another try is useless
        assert named & NAMED == answer.headers.keys() & NAMED, path


def test_the_headers_of_every_error_are_in_it(described: dict[str, Any]) -> None:
    for code, row in table.ROWS.items():
        sent = set(table.headers_of(RequestError(code, "why")))
        overloaded = anthropic_errors.OVERLOADED if row.status == 503 else row.status
        for name in (f"Error{row.status}", f"AnthropicError{overloaded}"):
            assert sent <= set(described["components"]["responses"][name].get("headers", {})), (code, name)


def test_what_may_be_asked_for_in_headers_is_in_it(described: dict[str, Any]) -> None:
    for route in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"):
        parameters = described["paths"][route]["post"]["parameters"]
        assert {"X-Request-Timeout", "X-SLO-TTFT-Ms", "X-SLO-TPOT-Ms"} <= {item["name"] for item in parameters}


def test_every_field_is_in_it_with_its_bounds_and_default(described: dict[str, Any]) -> None:
    schema = described["components"]["schemas"]["ChatRequest"]
    assert set(schema["properties"]) == {*ChatRequest.names, *ChatRequest.aliases, *ChatRequest.offered}
    assert schema["required"] == ["messages"]
    assert not schema["additionalProperties"]
    n = schema["properties"]["n"]
    assert (n["type"], n["minimum"], n["maximum"], n["default"]) == (["integer", "null"], 1, 128, 1)
    assert "default" not in schema["properties"]["temperature"], "that is the checkpoint's"
    for name, field in schema_of(ChatRequest)["properties"].items():
        default = default_of(field["x-unset"])
        if default is not None:
            assert Draft202012Validator(schema["properties"][name]).is_valid(default), name


@pytest.mark.parametrize(
    ("body", "is_valid"),
    [
        ({"messages": [{"role": "user", "content": "x"}], "temperature": 1, "stop": ["a"], "n": None}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, True),
        ({"messages": []}, False),
        ({"messages": [{"role": "user", "content": "x"}], "temperature": 2.5}, False),
        ({"messages": [{"role": "user", "content": "x"}], "nonsense": 1}, False),
        ({"messages": [{"role": "user", "content": "x"}], "logit_bias": {"x": 1}}, False),
        ({"messages": [{"role": "user", "content": "x"}], "repetition_detection": {"max_pattern_size": 300}}, False),
        ({}, False),
        ({"messages": [{"role": "user"}]}, False),
        ({"messages": [{"role": "tool", "content": None}]}, False),
        ({"messages": [{"role": "user", "content": "x"}], "truncate_prompt_tokens": 0}, False),
        ({"messages": [{"role": "user", "content": "x"}], "truncate_prompt_tokens": -1, "max_tokens": -1}, True),
        ({"messages": [{"role": "user", "content": "x"}], "rid": "a", "request_id": "b"}, False),
        ({"messages": [{"role": "user", "content": "x"}], "rid": None, "request_id": "b"}, True),
    ],
)
def test_a_body_is_valid_where_the_server_takes_it(
    described: dict[str, Any], http: httpx.Client, body: dict[str, Any], is_valid: bool
) -> None:
    schema = described["components"]["schemas"]["ChatRequest"]
    assert Draft202012Validator(schema).is_valid(body) == is_valid
    assert (http.post("/v1/chat/completions", json=body).status_code == 200) == is_valid


def test_every_error_is_in_it(described: dict[str, Any]) -> None:
    describes = Draft202012Validator({**described, "$ref": "#/components/schemas/Error"})
    for code in table.ROWS:
        error = errors.RequestError(code, "x" * 5_000, "y" * 5_000)
        assert describes.is_valid(table.body_of(error)), code
    assert not describes.is_valid({"error": {"message": "x", "type": "other", "param": None, "code": None}})
