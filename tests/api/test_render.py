"""The render routes: prompts as token ids, without a step of the engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from inferd.server.dispatch.model_lifecycle import State

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    "body", [{}, {"tools": [TOOL]}, {"add_generation_prompt": False}, {"truncate_prompt_tokens": 3, "max_tokens": 5}]
)
def test_a_rendered_chat_is_what_is_submitted(http: httpx.Client, router: Any, body: dict[str, Any]) -> None:
    answer = http.post("/v1/chat/completions/render", json={"messages": MESSAGES, **body}).json()
    assert router.submits == []
    assert http.post("/v1/chat/completions", json={"messages": MESSAGES, **body}).status_code == 200
    assert answer == {"token_ids": list(router.submits[0].prompt_ids)}


def test_rendered_prompts_are_what_is_submitted(http: httpx.Client, router: Any) -> None:
    body = {"prompt": ["one", "and two"]}
    answer = http.post("/v1/completions/render", json=body).json()
    assert router.submits == []
    http.post("/v1/completions", json=body)
    assert answer == [{"token_ids": list(submit.prompt_ids)} for submit in router.submits]
    assert http.post("/v1/completions/render", json={"prompt": [5, 6]}).json() == [{"token_ids": [5, 6]}]


def test_what_would_be_refused_is_refused(http: httpx.Client, router: Any) -> None:
    router.state = State.STOPPED  # no engine is asked
    for path, body, status in (
        ("/v1/completions/render", {"prompt": [1] * 300}, 400),
        ("/v1/chat/completions/render", {"messages": MESSAGES, "temperature": 3}, 400),
        ("/v1/chat/completions/render", {"messages": MESSAGES, "model": "other"}, 404),
        ("/v1/chat/completions/render", {"messages": MESSAGES}, 200),
    ):
        assert http.post(path, json=body).status_code == status


def test_the_tokenizer_is_told(http: httpx.Client, router: Any) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["tokenizer_class"]
    assert info["chat_template"] == router.model.template.source
    assert info["eos_token"] == router.model.tokenizer.special_tokens["eos_token"]


def test_documents_need_a_template_that_reads_them(http: httpx.Client, router: Any) -> None:
    body = {"messages": MESSAGES, "documents": [{"title": "t", "text": "x"}]}
    for path in ("/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"):
        response = http.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "documents")
    assert http.post("/v1/chat/completions", json={"messages": MESSAGES, "documents": []}).status_code == 200
    assert len(router.submits) == 1
