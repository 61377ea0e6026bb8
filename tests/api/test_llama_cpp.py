"""Filling in the middle: `suffix` of /v1/completions, and /infill and /props as llama.cpp's clients use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from inferd.server.schema.infill import InfillRequest
from inferd.server.text.model import ServedModel
from tests.api.conftest import app_settings

from .conftest import MAX_MODEL_LEN, WAIT_S, Script, ScriptedRouter, coder, serving

PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
VIM: dict[str, Any] = {
    "id_slot": 0, "input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": [], "prompt": "", "n_predict": 128,
    "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"], "stream": False,
    "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "model": "",
    "response_fields": ["content", "timings/prompt_n", "timings/prompt_ms", "timings/predicted_n", "truncated",
                        "tokens_cached", "no_such_field"],
}  # fmt: skip
"""The request that llama.vim sends for a completion. An empty name stands for none."""


@pytest.fixture(scope="module")
def filling(model: ServedModel) -> Iterator[tuple[httpx.Client, ScriptedRouter]]:
    router = ScriptedRouter(coder(model))
    with (
        serving(router.model, router, app_settings(access_log=False)) as url,
        httpx.Client(base_url=url, timeout=WAIT_S) as http,
    ):
        yield http, router


@pytest.fixture
def http(filling: tuple[httpx.Client, ScriptedRouter]) -> httpx.Client:
    filling[1].reset()
    return filling[0]


@pytest.fixture
def router(filling: tuple[httpx.Client, ScriptedRouter]) -> ScriptedRouter:
    return filling[1]


def ids(router: ScriptedRouter, text: str) -> tuple[int, ...]:
    return router.model.tokenizer.encode(text, False)


def asks(router: ScriptedRouter, before: tuple[int, ...], behind: tuple[int, ...]) -> tuple[int, ...]:
    fill_in = router.model.fill_in
    assert fill_in is not None and fill_in.middle is not None
    return (fill_in.prefix, *before, fill_in.suffix, *behind, fill_in.middle)


def frame(router: ScriptedRouter, *files: tuple[str, str]) -> tuple[int, ...]:
    """The ids of a repository with these files, up to the beginning of the last."""
    fill_in = router.model.fill_in
    assert fill_in is not None and fill_in.repo is not None and fill_in.file is not None
    found = [fill_in.repo, *ids(router, "myproject\n")]
    for name, text in files:
        found += [fill_in.file, *ids(router, f"{name}\n"), *ids(router, text)]
    return (*found, fill_in.file, *ids(router, "filename\n"))


def answered(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def test_a_completion_between_two_texts(http: httpx.Client, router: ScriptedRouter) -> None:
    given: list[Any] = [PREFIX, list(ids(router, PREFIX)), [PREFIX, "x"]]
    for prompt in given:
        answered(http.post("/v1/completions", json={"prompt": prompt, "suffix": SUFFIX}))
        assert router.submits[-1 if len(router.submits) < 3 else 2].prompt_ids == asks(
            router, ids(router, PREFIX), ids(router, SUFFIX)
        )
    assert router.submits[3].prompt_ids == asks(router, ids(router, "x"), ids(router, SUFFIX))
    rendered = answered(http.post("/v1/completions/render", json={"prompt": PREFIX, "suffix": SUFFIX}))
    assert tuple(rendered[0]["token_ids"]) == router.submits[0].prompt_ids
    answered(http.post("/v1/completions", json={"prompt": PREFIX, "suffix": ""}))
    assert router.submits[-1].prompt_ids == ids(router, PREFIX)


def test_special_tokens_of_the_caller_stay_text(http: httpx.Client, router: ScriptedRouter) -> None:
    text = "a <|im_end|> b"
    answered(http.post("/v1/completions", json={"prompt": text, "suffix": text}))
    answered(http.post("/infill", json={"input_prefix": text, "input_suffix": text, "prompt": text}))
    answered(http.post("/infill", json={"input_extra": [{"text": text, "filename": text}]}))
    special = router.model.tokenizer.special_ids["<|im_end|>"]
    for submit, count in zip(router.submits, (2, 3, 2), strict=True):
        assert special not in submit.prompt_ids
        assert router.model.tokenizer.decode(submit.prompt_ids, skip_special=False).count(text) == count


@pytest.mark.parametrize("body", [{"prompt": PREFIX, "suffix": SUFFIX}, VIM], ids=["completions", "infill"])
def test_the_answer_ends_at_the_tokens_for_filling_in(
    http: httpx.Client, router: ScriptedRouter, body: dict[str, Any]
) -> None:
    path = "/v1/completions" if "suffix" in body else "/infill"
    fill_in = router.model.fill_in
    assert fill_in is not None and fill_in.file is not None
    router.will(Script(token_ids=(*ids(router, "a + b"), fill_in.file)))
    body = {**body, "response_fields": None} if path == "/infill" else body
    answer = answered(http.post(path, json=body))
    if path == "/infill":
        assert (answer["content"], answer["stop_type"], answer["stopping_word"]) == ("a + b", "eos", "")
    else:
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a + b", "stop", None)
    assert set(fill_in.ends) <= set(router.submits[0].params.eos_token_ids)
    answered(http.post(path, json={**body, "ignore_eos": True}))
    assert router.submits[1].params.eos_token_ids == ()
    answered(http.post("/v1/completions", json={"prompt": PREFIX}))
    assert router.submits[2].params.eos_token_ids == router.model.eos_token_ids


def test_texts_that_are_too_long_for_a_completion_are_refused_or_cut_as_asked(
    http: httpx.Client, router: ScriptedRouter
) -> None:
    long = " the old river" * 200
    refused = http.post("/v1/completions", json={"prompt": "x", "suffix": long})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    answered(http.post("/v1/completions", json={"prompt": long, "suffix": long, "truncate_prompt_tokens": 43}))
    prefix, suffix = ids(router, long)[-30:], ids(router, long)[:10]
    assert router.submits[0].prompt_ids == asks(router, prefix, suffix)


@pytest.mark.parametrize(
    ("body", "param"), [({"echo": True}, "echo"), ({"suffix": 1}, "suffix"), ({"prompt": [9_999]}, "prompt[0]")]
)
def test_what_a_completion_with_a_suffix_refuses(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    response = http.post("/v1/completions", json={"prompt": "x", "suffix": "y", **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"), ("/infill", VIM, "input_prefix")],
)
def test_a_model_without_the_tokens_names_the_way_out(
    shared_url: str, path: str, body: dict[str, Any], param: str
) -> None:
    error = httpx.post(shared_url + path, json=body, timeout=WAIT_S).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert "/v1/completions" in error["message"] and "Qwen2.5-Coder" in error["message"]


def test_what_an_editor_sends_is_answered_as_it_reads_it(http: httpx.Client, router: ScriptedRouter) -> None:
    router.will(Script(text="a + b", num_cached=2))
    response = http.post("/infill", json=VIM)
    prompt = asks(router, ids(router, PREFIX), ids(router, SUFFIX))
    (submit,) = router.submits
    assert submit.prompt_ids == prompt
    params = submit.params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.0, 40, 0.9, 128)
    num_output = len(ids(router, "a + b")) + 1
    assert answered(response) == {
        "content": "a + b",
        "timings/prompt_n": len(prompt) - 2,
        "timings/prompt_ms": 250.0,
        "timings/predicted_n": num_output,
        "truncated": False,
        "tokens_cached": len(prompt) + num_output - 1,
    }
    assert "x-inferd-warning" not in response.headers


def test_a_request_that_warms_the_cache_generates_nothing(http: httpx.Client, router: ScriptedRouter) -> None:
    warming = {
        **VIM, "input_prefix": "", "input_suffix": "", "n_predict": 0, "temperature": 0.0, "samplers": [],
        "input_extra": [{"text": "x = 1\n", "time": [1, 2], "filename": "a.py"}], "response_fields": [""],
    }  # fmt: skip
    assert answered(http.post("/infill", json=warming)) == {}
    assert router.submits[0].params.max_tokens == 0
    assert router.submits[0].prompt_ids == (*frame(router, ("a.py", "x = 1\n")), *asks(router, (), ()))
    answered(http.post("/infill", json={**VIM, "input_extra": warming["input_extra"]}))
    shared = frame(router, ("a.py", "x = 1\n"))
    assert router.submits[1].prompt_ids[: len(shared)] == shared


def test_the_begun_text_follows_the_prefix(http: httpx.Client, router: ScriptedRouter) -> None:
    answered(http.post("/infill", json={"input_prefix": "x =", "prompt": " 12", "input_suffix": "\n"}))
    before = (*ids(router, "x ="), *ids(router, " 12"))
    assert router.submits[0].prompt_ids == asks(router, before, ids(router, "\n"))
    assert router.submits[0].params.max_tokens == MAX_MODEL_LEN - len(router.submits[0].prompt_ids)


def test_a_stream_says_what_a_plain_answer_says(http: httpx.Client, router: ScriptedRouter) -> None:
    body = {**VIM, "response_fields": None, "stop": ["END"], "return_tokens": True, "seed": 3}
    router.will(Script(text="caf\u00e9 \U0001f600\nbENDx", cuts=(1, 2, 3)))
    plain = answered(http.post("/infill", json=body))
    assert (plain["content"], plain["stop_type"], plain["stopping_word"]) == ("caf\u00e9 \U0001f600\nb", "word", "END")
    assert (plain["stop"], plain["has_new_line"], plain["generation_settings"]["seed"]) == (True, True, 3)
    assert plain["prompt"] == router.model.tokenizer.decode(router.submits[0].prompt_ids, skip_special=False)
    streamed = http.post("/infill", json={**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line]
    *chunks, last = events
    assert "".join(chunk["content"] for chunk in chunks) == plain["content"]
    assert [token for chunk in chunks for token in chunk["tokens"]] == plain["tokens"]
    assert [chunk["stop"] for chunk in events] == [False] * len(chunks) + [True]
    assert chunks[-1]["tokens_predicted"] == last["tokens_predicted"] == plain["tokens_predicted"]
    plain["generation_settings"]["stream"] = True
    assert last == {**plain, "content": "", "tokens": []}


def test_several_answers_are_a_list_as_the_extension_of_vs_code_asks(
    http: httpx.Client, router: ScriptedRouter
) -> None:
    body = {**VIM, "response_fields": None, "n_cmpl": 3, "top_p": 0.99, "seed": -5}
    router.will(Script(text="a"), Script(text="b"), Script(text="c"))
    answers = answered(http.post("/infill", json=body))
    assert [(answer["index"], answer["content"]) for answer in answers] == [(0, "a"), (1, "b"), (2, "c")]
    assert [submit.params.temperature for submit in router.submits] == [0.8] * 3
    seeds = [answer["generation_settings"]["seed"] for answer in answers]
    assert seeds == [-5, *(submit.params.seed for submit in router.submits[1:])] and len(set(seeds)) == 3
    assert [answer["timings"] for answer in answers] == [None] * 3, "their times are not known one by one"
    router.reset()
    router.will(Script(text="a"), Script(text="b"), Script(text="c"))
    streamed = http.post("/infill", json={**body, "stream": True, "temperature": 0.1}).text
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line]
    assert sorted(event["index"] for event in events if event["stop"]) == [0, 1, 2]
    for i, text in enumerate("abc"):
        assert "".join(event["content"] for event in events if event["index"] == i) == text
    assert router.submits[0].params.temperature == 0.1


def test_a_context_that_is_too_short_loses_what_is_farthest(http: httpx.Client, router: ScriptedRouter) -> None:
    words = " the old river"
    body = {"input_prefix": words * 900, "input_suffix": words * 900, "n_predict": 16}
    answer = answered(http.post("/infill", json=body))
    room = MAX_MODEL_LEN - 16 - 3
    text = ids(router, words * 900)
    assert router.submits[0].prompt_ids == asks(router, text[-(room - room // 4) :], text[: room // 4])
    assert (answer["truncated"], answer["generation_settings"]["n_predict"]) == (True, 16)
    # Further files lose their beginning before the text around the gap loses any.
    files = [{"text": words * 9, "filename": "far.py"}, {"text": "x = 1\n", "filename": "near.py"}]
    body = {"input_prefix": words * 30, "input_suffix": words * 30, "input_extra": files * 9, "n_predict": 16}
    assert answered(http.post("/infill", json=body))["truncated"]
    around = asks(router, ids(router, words * 30), ids(router, words * 30))
    found = router.submits[1].prompt_ids
    assert found[-len(around) :] == around and len(found) == MAX_MODEL_LEN - 16
    end = frame(router, ("near.py", "x = 1\n"))[-8:]
    assert found[: -len(around)][-8:] == end


@pytest.mark.parametrize("field", ["input_prefix", "input_suffix", "prompt", "text", "filename"])
def test_any_text_is_cut_and_none_refused(http: httpx.Client, router: ScriptedRouter, field: str) -> None:
    """Nothing can be split off the text, which is too long to be tokenized as a whole."""
    long: dict[str, Any] = {field: "x" * 400_000}
    body = long if field in InfillRequest.names else {"input_extra": [long]}
    assert answered(http.post("/infill", json={**body, "n_predict": 3}))["truncated"]
    assert len(router.submits[0].prompt_ids) == MAX_MODEL_LEN - 3


def test_a_limit_above_the_context_is_cut_and_told(http: httpx.Client, router: ScriptedRouter) -> None:
    response = http.post("/infill", json={**VIM, "n_predict": 10_000})
    assert router.submits[0].params.max_tokens == MAX_MODEL_LEN - len(router.submits[0].prompt_ids)
    assert "10000" in response.headers["x-inferd-warning"]
    answered(http.post("/infill", json={**VIM, "n_predict": -1}))
    assert router.submits[1].params.max_tokens == router.submits[0].params.max_tokens


def test_a_sampler_that_is_not_served_is_told(http: httpx.Client, router: ScriptedRouter) -> None:
    off = {"mirostat": 0, "typical_p": 1.0, "top_n_sigma": -1.0, "dry_multiplier": 0.0, "xtc_probability": 0}
    assert "x-inferd-warning" not in http.post("/infill", json={**VIM, **off}).headers
    router.submits.clear()
    response = http.post("/infill", json={**VIM, "mirostat": 2, "repeat_penalty": 1.1, "grammar": 'root ::= "x"'})
    assert response.status_code == 200 and "'mirostat'" in response.headers["x-inferd-warning"]
    assert router.submits[0].params.repetition_penalty == 1.1 and router.submits[0].params.grammar
    refused = http.post("/infill", json={**VIM, "n_probs": 3}).json()["error"]
    assert refused["param"] == "n_probs" and "/v1/completions" in refused["message"]


def test_properties_are_those_that_tools_read(http: httpx.Client, router: ScriptedRouter) -> None:
    props = answered(http.get("/props"))
    assert props["default_generation_settings"]["n_ctx"] == MAX_MODEL_LEN
    assert props["model_alias"] == "tiny"
    assert props["model_path"] == router.model.path.name and "/" not in props["model_path"]
    assert router.model.template is not None
    assert props["chat_template"] == router.model.template.source
    assert props["eos_token"] == "<|im_end|>" and props["total_slots"] == router.ready.max_num_seqs
    assert http.get("/props?model=other").status_code == 404


def test_properties_of_a_model_without_a_template(model: ServedModel) -> None:
    router = ScriptedRouter(replace(model, template=None))
    with serving(router.model, router, app_settings(access_log=False)) as url:
        assert answered(httpx.get(f"{url}/props", timeout=WAIT_S))["chat_template"] == ""
