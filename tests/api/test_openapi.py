"""/openapi.json: valid, complete, and in agreement with what the routes do."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from inferd.server import errors
from inferd.server.api.routes import ROUTES, Access
from inferd.server.openapi import default_of, document
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.fields import wire_fields


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return document("1.2.3")


def test_it_is_valid(described: dict[str, Any], http: httpx.Client) -> None:
    OpenAPIV31SpecValidator(described).validate()
    served = http.get("/openapi.json").json()
    assert served["paths"] == described["paths"]
    assert served["info"]["version"] == http.get("/version").json()["version"]


def test_every_route_is_in_it(described: dict[str, Any]) -> None:
    found = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert found == {(route.method, route.path.replace(":path}", "}")) for route in ROUTES}
    operations = [operation for methods in described["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    public = [route.path for route in ROUTES if route.access is Access.PUBLIC]
    assert [
        path for path, methods in described["paths"].items() if not next(iter(methods.values()))["security"]
    ] == public


def test_every_field_is_in_it_with_its_bounds_and_default(described: dict[str, Any]) -> None:
    schema = described["components"]["schemas"]["ChatRequest"]
    assert set(schema["properties"]) == {*wire_fields(ChatRequest), *ChatRequest.aliases}
    assert schema["required"] == ["messages"]
    assert not schema["additionalProperties"]
    n = schema["properties"]["n"]
    assert (n["type"], n["minimum"], n["maximum"], n["default"]) == (["integer", "null"], 1, 128, 1)
    assert "default" not in schema["properties"]["temperature"], "that is the checkpoint's"
    for name, wire in wire_fields(ChatRequest).items():
        if default_of(wire) is not None:
            assert Draft202012Validator(schema["properties"][name]).is_valid(default_of(wire)), name


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
    ],
)
def test_a_body_is_valid_where_the_server_takes_it(
    described: dict[str, Any], http: httpx.Client, body: dict[str, Any], is_valid: bool
) -> None:
    schema = described["components"]["schemas"]["ChatRequest"]
    assert Draft202012Validator(schema).is_valid(body) == is_valid
    assert (http.post("/v1/chat/completions", json=body).status_code == 200) == is_valid


def test_every_error_is_in_it(described: dict[str, Any]) -> None:
    describes = Draft202012Validator(described["components"]["schemas"]["Error"])
    for code in errors.ROWS:
        error = errors.RequestError(code, "x" * 5_000, "y" * 5_000)
        assert describes.is_valid(errors.body_of(error)), code
    assert not describes.is_valid({"error": {"message": "x", "type": "other", "param": None, "code": None}})
