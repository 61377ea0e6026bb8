"""/v1/embeddings: inputs of every form, both formats, the order of the answer, and what is refused or given up."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import httpx
import openai
import orjson
import pytest

from inferd.engine.api.sentence_folder import SentenceFolder
from inferd.engine.api.wire.messages import Failure
from inferd.engine.api.wire.params import Pooling
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.endpoints.vectors import VectorForm
from inferd.server.generate import work
from inferd.server.generate.inputs import MAX_AT_ONCE
from inferd.server.text.model import ServedModel

from .conftest import (
    HIDDEN_SIZE,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Script,
    ScriptedRouter,
    app_settings,
    serving,
    vector_of,
)
from .test_stream import connected

PATH = "/v1/embeddings"


def numbers(token_ids: tuple[int, ...], count: int = HIDDEN_SIZE) -> list[float]:
    return list(struct.unpack(f"<{count}f", vector_of(token_ids, count)))


def refused(http: httpx.Client, **body: Any) -> tuple[int, str | None, str | None]:
    response = http.post(PATH, json={"input": "x", **body})
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def test_text_and_ids_are_one_input(client: openai.OpenAI, router: Any) -> None:
    ids = router.model.tokenizer.encode("Once upon", True)
    inputs: list[Any] = ["Once upon", ["Once upon"], list(ids), [list(ids)]]
    for given in inputs:
        answer = client.embeddings.create(model="tiny", input=given)
        assert (answer.object, answer.model) == ("list", "tiny")
        assert [(item.object, item.index, item.embedding) for item in answer.data] == [("embedding", 0, numbers(ids))]
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (len(ids), len(ids))
    assert [submit.prompt_ids for submit in router.submits] == [ids] * 4
    assert {submit.params.max_tokens for submit in router.submits} == {0}


def test_the_answer_is_written_as_openai_writes_it(http: httpx.Client) -> None:
    plain = http.post(PATH, json={"input": [[5, 6], [7]], "encoding_format": "float"}).json()
    assert plain == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": numbers((5, 6))},
            {"object": "embedding", "index": 1, "embedding": numbers((7,))},
        ],
        "model": "tiny",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }
    assert http.post(PATH, json={"input": [[5, 6], [7]]}).json() == plain
    coded = http.post(PATH, json={"input": [[5, 6], [7]], "encoding_format": "base64"}).json()
    decoded = [base64.b64decode(item["embedding"]) for item in coded["data"]]
    assert decoded == [vector_of((5, 6), HIDDEN_SIZE), vector_of((7,), HIDDEN_SIZE)]
    assert {**coded, "data": None} == {**plain, "data": None}


def test_as_many_inputs_as_there_may_be_come_back_in_order(http: httpx.Client, router: Any) -> None:
    inputs = [[i % VOCAB_SIZE] for i in range(2_048)]
    answer = http.post(PATH, json={"input": inputs}).json()
    assert [item["index"] for item in answer["data"]] == list(range(2_048))
    assert [item["embedding"] for item in answer["data"]] == [numbers((ids[0],)) for ids in inputs]
    assert len(router.submits) == len({submit.request_id for submit in router.submits}) == 2_048


def test_what_is_asked_for_is_submitted(http: httpx.Client, router: Any) -> None:
    http.post(PATH, json={"input": "one two", "priority": -2})
    http.post(PATH, json={"input": [1, 2, 3, 4], "dimensions": 2, "pooling": "mean", "normalize": False, "user": "u"})
    http.post(PATH, json={"input": [1, 2, 3, 4], "truncate_prompt_tokens": 3})
    first, second, third = router.submits
    assert first.params.pooling == Pooling("last", HIDDEN_SIZE)
    assert first.scheduling.priority == -2
    assert second.params.pooling == Pooling("mean", 2, is_normalized=False)
    assert (second.prompt_ids, third.prompt_ids) == ((1, 2, 3, 4), (2, 3, 4))


E5 = SentenceFolder(
    pooling="mean",
    normalizes=False,
    prompts={"query": "QUERY: ", "passage": "passage: "},
    default_prompt="passage",
    max_tokens=40,
    num_components=2,
    lowercases=True,
)


@pytest.fixture(scope="module")
def e5(model: ServedModel) -> Iterator[tuple[httpx.Client, ScriptedRouter]]:
    """The embedded model, as if its folder were of sentence-transformers."""
    served = replace(model, embeds=E5)
    router = ScriptedRouter(served)
    with serving(served, router, app_settings(access_log=False)) as url, httpx.Client(base_url=url) as http:
        yield http, router


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "passage: once upon"),
        ({"prompt_name": "query"}, "QUERY: once upon"),
        ({"input_type": "search_query"}, "QUERY: once upon"),
        ({"input_type": "document"}, "passage: once upon"),
        ({"prompt_name": "query", "input_type": "document"}, "QUERY: once upon"),
    ],
)
def test_a_text_begins_with_the_prompt_that_is_chosen(
    e5: tuple[httpx.Client, ScriptedRouter], given: dict[str, str], text: str
) -> None:
    http, router = e5
    answer = http.post(PATH, json={"input": "Once UPON", **given})
    assert answer.status_code == 200, answer.text
    assert router.submits[-1].prompt_ids == router.model.tokenizer.encode(text, True)
    assert router.submits[-1].params.pooling == Pooling("mean", 2, is_normalized=False)


def test_a_request_may_depart_from_the_folder(e5: tuple[httpx.Client, ScriptedRouter]) -> None:
    http, router = e5
    asked = {"input": "x", "pooling": "last", "normalize": True, "dimensions": 3}
    assert http.post(PATH, json=asked).status_code == 200
    assert router.submits[-1].params.pooling == Pooling("last", 3)
    assert http.post(PATH, json={"input": [5, 6, 7]}).status_code == 200
    assert router.submits[-1].prompt_ids == (5, 6, 7), "the default prompt is for texts"
    assert http.post(PATH, json={"input": [5] * 50, "truncate_prompt_tokens": -1}).status_code == 200
    assert len(router.submits[-1].prompt_ids) == 40


def test_prompts_that_the_model_lacks_are_refused(e5: tuple[httpx.Client, ScriptedRouter], http: httpx.Client) -> None:
    assert refused(e5[0], prompt_name="other") == (400, "invalid_value", "prompt_name")
    assert refused(e5[0], input_type="other") == (400, "invalid_value", "input_type")
    assert refused(e5[0], input=[[1]], prompt_name="query") == (400, "invalid_value", "prompt_name")
    assert refused(e5[0], input=[1] * 41) == (400, "context_length_exceeded", "input")
    assert refused(http, prompt_name="query") == (400, "invalid_value", "prompt_name")
    assert http.post(PATH, json={"input": "x", "input_type": "query"}).status_code == 200, "it embeds both alike"


def test_a_model_whose_vectors_cannot_be_computed_asks_for_a_pooling(model: ServedModel) -> None:
    served = replace(model, embeds=SentenceFolder(unsupported="modules.json has Dense"))
    settings = app_settings(access_log=False)
    with serving(served, ScriptedRouter(served), settings) as url, httpx.Client(base_url=url) as http:
        assert refused(http) == (501, "not_implemented", "pooling")
        assert http.post(PATH, json={"input": "x", "pooling": "mean"}).status_code == 200


def test_a_model_that_embeds_loses_the_end_of_its_inputs(model: ServedModel) -> None:
    served = replace(model, embeds=E5, truncation_side="right", trained_dimensions=(2, 4))
    router, settings = ScriptedRouter(served), app_settings(access_log=False)
    with serving(served, router, settings) as url, httpx.Client(base_url=url) as http:
        whole = served.tokenizer.encode("passage: one two three four", True)
        for side, expected in ((None, whole[:4]), ("right", whole[:4]), ("left", whole[-4:])):
            body = {"input": "one two three four", "truncate_prompt_tokens": 4, "truncation_side": side}
            assert http.post(PATH, json=body).status_code == 200
            assert router.submits[-1].prompt_ids == expected
        assert refused(http, dimensions=3) == (400, "invalid_value", "dimensions")
        for allowed in (2, 4, HIDDEN_SIZE):
            assert http.post(PATH, json={"input": "x", "dimensions": allowed}).status_code == 200


def test_the_engine_says_how_it_pools(http: httpx.Client, router: Any) -> None:
    assert http.post(PATH, json={"input": "x", "pooling": "mean"}).status_code == 200
    answer = http.post(PATH, json={"input": "x", "pooling": "max"}).json()
    assert answer["error"]["message"] == "Invalid value: 'max'. Supported values are: 'last' and 'mean'."
    router.poolings = ("cls", "max")
    assert http.post(PATH, json={"input": "x", "pooling": "max"}).status_code == 200
    assert router.submits[-1].params.pooling.how == "max"
    assert refused(http) == (501, "not_implemented", "pooling")
    assert refused(http, pooling="mean") == (400, "invalid_value", "pooling")


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"output_dtype": "int8"}, VectorForm("int8")),
        ({"output_dtype": "uint8", "normalize": False}, VectorForm("uint8")),
        ({"embedding_types": ["binary"]}, VectorForm("binary")),
        ({"embedding_type": "ubinary", "output_dimension": 3}, VectorForm("ubinary")),
        ({"output_dtype": "binary", "encoding_format": "base64"}, VectorForm("binary", is_base64=True)),
    ],
)
def test_components_may_have_fewer_bits(http: httpx.Client, asked: dict[str, Any], form: VectorForm) -> None:
    one = {"input": [[3, 5, 1]]}
    vector = vector_of((3, 5, 1), asked.get("output_dimension", HIDDEN_SIZE))
    answer = http.post(PATH, json={**one, **asked}).json()
    assert orjson.dumps(answer["data"][0]["embedding"]) == form.value(vector)


def test_two_types_of_components_contradict_each_other(http: httpx.Client) -> None:
    assert refused(http, output_dtype="int8", embedding_types=["binary"]) == (400, "invalid_value", "embedding_types")
    assert refused(http, embedding_types=["int8", "float"])[1:] == ("array_above_max_length", "embedding_types")
    assert refused(http, output_dtype="int4") == (400, "invalid_value", "output_dtype")


def test_late_interaction_gets_a_vector_for_each_token(http: httpx.Client, router: Any) -> None:
    body = {"input": [[5, 6], [7]], "return_multivector": True}
    assert refused(http, return_multivector=True) == (400, "invalid_value", "model")
    router.gives_token_embeddings = True
    answer = http.post(PATH, json=body).json()
    assert [item["embeddings"] for item in answer["data"]] == [[numbers((5,)), numbers((6,))], [numbers((7,))]]
    assert [set(item) for item in answer["data"]] == [{"object", "index", "embeddings"}] * 2
    assert router.submits[-1].params.pooling == Pooling("last", HIDDEN_SIZE, gives="token_embeddings")
    coded = http.post(PATH, json={**body, "encoding_format": "base64"}).json()
    assert base64.b64decode(coded["data"][0]["embeddings"]) == vector_of((5,), HIDDEN_SIZE) + vector_of(
        (6,), HIDDEN_SIZE
    )
    num_submits = len(router.submits)
    with patch.object(work, "MAX_COMPONENTS", 3 * HIDDEN_SIZE - 1):
        assert refused(http, **body) == (400, "request_exceeds_work_limit", "input")
    assert len(router.submits) == num_submits


def test_vectors_of_too_many_components_in_all_are_refused(http: httpx.Client, router: Any) -> None:
    with patch.object(work, "MAX_COMPONENTS", 2 * HIDDEN_SIZE):
        assert http.post(PATH, json={"input": ["a", "b"]}).status_code == 200
        assert refused(http, input=["a"] * 3) == (400, "request_exceeds_work_limit", "input")
        assert http.post(PATH, json={"input": ["a"] * 3, "dimensions": 2}).status_code == 200
    assert len(router.submits) == 5


@pytest.mark.parametrize("name", ["truncate", "truncation"])
def test_jinas_and_voyages_switches_cut(http: httpx.Client, router: Any, name: str) -> None:
    assert http.post(PATH, json={"input": [1] * 300, name: True}).status_code == 200
    assert len(router.submits[-1].prompt_ids) == MAX_MODEL_LEN
    assert http.post(PATH, json={"input": [1] * 300, name: True, "truncate_prompt_tokens": 9}).status_code == 200
    assert len(router.submits[-1].prompt_ids) == 9
    error = http.post(PATH, json={"input": "one " * 300, name: False}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].endswith(f"Or set '{name}' to true, which cuts it.")
    assert refused(http, **{name: "END"}) == (400, "invalid_type", name)


def test_errors_name_the_field_that_the_client_sent(http: httpx.Client) -> None:
    assert refused(http, output_dimension=10**6) == (400, "integer_above_max_value", "output_dimension")
    error = http.post(PATH, json={"input": "x", "task": "none"}).json()["error"]
    assert error["param"] == "task" and "'task'" in error["message"] and "input_type" not in error["message"]


def test_jinas_texts_may_be_objects(http: httpx.Client, router: Any) -> None:
    whole = http.post(PATH, json={"input": ["one", "two"]}).json()["data"]
    for given in (
        [{"text": "one"}, {"text": "two"}],
        ["one", {"text": "two"}],
        [{"text": "one", "image": None}, "two"],
    ):
        assert http.post(PATH, json={"input": given}).json()["data"] == whole
    assert http.post(PATH, json={"input": {"text": "one"}}).json()["data"] == whole[:1]
    assert refused(http, input=[{"image": "x"}])[1:] == ("unsupported_parameter", "input[0].image")
    assert refused(http, input=["a", {}])[1:] == ("missing_required_parameter", "input[1].text")
    assert refused(http, input=[{"text": ""}])[2] == refused(http, input=[{"text": 1}])[2] == "input[0].text"
    assert refused(http, input=[[1], {"text": "x"}])[2] == "input[1]"


@pytest.mark.parametrize(
    "task",
    [
        "retrieval.query",
        "retrieval.passage",
        "text-matching",
        "classification",
        "separation",
        "code.query",
        "code.passage",
    ],
)
def test_jinas_tasks_are_taken(http: httpx.Client, task: str) -> None:
    assert http.post(PATH, json={"input": "x", "task": task}).status_code == 200


def test_the_context_bounds_an_input_to_the_last_token(http: httpx.Client, router: Any) -> None:
    assert http.post(PATH, json={"input": [1] * MAX_MODEL_LEN}).status_code == 200
    response = http.post(PATH, json={"input": [[1], [1] * (MAX_MODEL_LEN + 1)]})
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")
    assert f"{MAX_MODEL_LEN + 1} tokens" in error["message"]
    assert "completion" not in error["message"]
    for most in (-1, MAX_MODEL_LEN + 1, 10**6):
        assert http.post(PATH, json={"input": [1] * 300, "truncate_prompt_tokens": most}).status_code == 200
        assert len(router.submits[-1].prompt_ids) == MAX_MODEL_LEN


def test_what_is_refused(http: httpx.Client, router: Any) -> None:
    assert refused(http, input=None) == (400, "missing_required_parameter", "input")
    assert refused(http, input="") == (400, "empty_string", "input")
    assert refused(http, input=["a", ""]) == (400, "empty_string", "input[1]")
    assert refused(http, input=[]) == (400, "empty_array", "input")
    assert refused(http, input=[[1]] * 2_049) == (400, "array_above_max_length", "input")
    assert refused(http, input=["x"] * 100_000) == (400, "array_above_max_length", "input")
    assert refused(http, input=[[1], [VOCAB_SIZE]]) == (400, "integer_above_max_value", "input[1][0]")
    assert refused(http, dimensions=HIDDEN_SIZE + 1) == (400, "integer_above_max_value", "dimensions")
    assert refused(http, dimensions=0) == (400, "integer_below_min_value", "dimensions")
    assert refused(http, truncate_prompt_tokens=0) == (400, "integer_below_min_value", "truncate_prompt_tokens")
    assert refused(http, encoding_format="int8") == (400, "invalid_value", "encoding_format")
    assert refused(http, pooling="cls") == (400, "invalid_value", "pooling")
    assert refused(http, messages=[]) == (400, "unsupported_parameter", "messages")
    assert refused(http, temperature=1) == (400, "unknown_parameter", "temperature")
    assert refused(http, model="other") == (404, "model_not_found", "model")
    assert router.submits == []


def test_an_engine_without_hidden_states_says_so_once(http: httpx.Client, router: Any) -> None:
    router.hidden_size = 0
    response = http.post(PATH, json={"input": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (501, "not_implemented")
    assert response.headers["x-should-retry"] == "false"


def test_an_input_that_fails_fails_the_request_and_ends_the_others(http: httpx.Client, router: Any) -> None:
    router.will(Script(ends=False), Script(failure=Failure("context_length_exceeded", "too long", "prompt")))
    response = http.post(PATH, json={"input": [[1], [2]]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input[1]")
    router.wait_for(lambda: router.submits[0].request_id in router.aborted)
    router.will(Script(dies=True))
    assert refused(http) == (500, "engine_error", None)


def test_a_client_that_leaves_ends_every_input_on_its_way(url: str, router: Any) -> None:
    router.will(Script(ends=False))
    with connected(url, PATH, {"input": [[1]] * (MAX_AT_ONCE + 5)}):
        router.wait_for(lambda: len(router.submits) == MAX_AT_ONCE)
    router.wait_for(lambda: len(router.aborted) == MAX_AT_ONCE)
    assert len(router.submits) == MAX_AT_ONCE, "the others waited here"


def test_a_deadline_ends_every_input(http: httpx.Client, router: Any) -> None:
    router.will(Script(ends=False))
    assert refused(http, input=[[1], [2]], timeout=1) == (408, "deadline_exceeded", None)
    assert set(router.aborted) == {submit.request_id for submit in router.submits}


def test_a_server_that_is_not_ready_says_so(http: httpx.Client, router: Any) -> None:
    router.state = State.STOPPED
    assert refused(http) == (503, "server_is_overloaded", None)


def test_a_request_is_counted(http: httpx.Client) -> None:
    http.post(PATH, json={"input": ["a", "b"]})
    page = http.get("/metrics").text
    assert 'inferd_requests_arrived_total{api="embeddings"' in page


@pytest.mark.parametrize("kind", ["ids", "text", "truncated"])
def test_a_request_of_too_many_tokens_in_all_is_refused(http: httpx.Client, router: Any, kind: str) -> None:
    """Each input fits the context, but together they exceed `MAX_INPUT_IDS`."""
    one: Any = [5] * 250 if kind == "ids" else "7" * 250 if kind == "text" else "7" * 2_000
    body = {"input": [one] * 2_000, **({"truncate_prompt_tokens": 250} if kind == "truncated" else {})}
    assert http.post(PATH, json={**body, "input": body["input"][:2]}).status_code == 200
    num_submits = len(router.submits)
    with patch.object(work, "MAX_INPUT_IDS", 2**18):
        answer = http.post(PATH, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_exceeds_work_limit")
    inputs = 1_045 if kind == "truncated" else 1_049  # one more token says that an input was cut
    assert f"{inputs} inputs counted x" in answer.json()["error"]["message"]
    assert len(router.submits) == num_submits, "and none of it is begun"
