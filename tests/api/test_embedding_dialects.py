"""Embeddings in the forms of other servers: what is asked of the engine, and the same vectors in each form.

The official clients of OpenAI and Cohere, and those of libraries, ask the same routes in tests/clients.
"""

from __future__ import annotations

import base64
from typing import Any

import httpx
import orjson
import pytest

from inferd.engine.api.wire.params import Pooling
from inferd.server.endpoints.vectors import VectorForm
from inferd.server.schema.embedding_dialects import CohereType

from .conftest import HIDDEN_SIZE, MAX_MODEL_LEN, vector_of
from .test_embeddings import numbers


def ids_of(router: Any, text: str) -> tuple[int, ...]:
    ids: tuple[int, ...] = router.model.tokenizer.encode(text, True)
    return ids


def refused(http: httpx.Client, path: str, **body: Any) -> tuple[int, str | None, str | None]:
    response = http.post(path, json=body)
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def test_pooling_of_vllm(http: httpx.Client, router: Any) -> None:
    answer = http.post("/pooling", json={"input": [[5, 6], [7]], "use_activation": False}).json()
    assert (answer.pop("id")[:5], answer.pop("created") > 1e9) == ("pool-", True)
    assert answer == {
        "object": "list",
        "model": "tiny",
        "data": [
            {"index": 0, "object": "pooling", "data": numbers((5, 6))},
            {"index": 1, "object": "pooling", "data": numbers((7,))},
        ],
        "usage": {"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0, "prompt_tokens_details": None},
    }
    assert router.submits[-1].params.pooling == Pooling("last", HIDDEN_SIZE, is_normalized=False)
    assert refused(http, "/pooling", input="a", task="token_embed") == (400, "invalid_value", "model")
    router.gives_token_embeddings = True
    answer = http.post("/pooling", json={"input": [5, 6], "task": "token_embed"}).json()
    assert answer["data"][0]["data"] == [numbers((5,)), numbers((6,))]
    assert refused(http, "/pooling", input="a", task="plugin") == (400, "invalid_value", "task")


@pytest.mark.parametrize("path", ["/v1/embed", "/v2/embed"])
def test_cohere_gives_every_type_at_once(http: httpx.Client, router: Any, path: str) -> None:
    kinds: list[CohereType] = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    texts = ["one two", "three"]
    answer = http.post(path, json={"texts": texts, "embedding_types": kinds, "input_type": "search_query"}).json()
    assert (answer["texts"], answer["response_type"]) == (texts, "embeddings_by_type")
    vectors = [vector_of(ids_of(router, text), HIDDEN_SIZE) for text in texts]
    num_tokens = sum(len(ids_of(router, text)) for text in texts)
    version = path[2]
    assert answer["meta"] == {"api_version": {"version": version}, "billed_units": {"input_tokens": num_tokens}}
    assert list(answer["embeddings"]) == kinds
    for kind in kinds[:-1]:
        form = VectorForm("float" if kind == "base64" else kind)
        assert [orjson.dumps(value) for value in answer["embeddings"][kind]] == list(map(form.value, vectors))
    assert [base64.b64decode(value) for value in answer["embeddings"]["base64"]] == vectors


def test_cohere_without_types_gives_floats(http: httpx.Client, router: Any) -> None:
    vector = numbers(ids_of(router, "one"))
    assert http.post("/v1/embed", json={"texts": ["one"]}).json()["embeddings"] == [vector]
    assert http.post("/v2/embed", json={"texts": ["one"]}).json()["embeddings"] == {"float": [vector]}
    inputs = [{"content": [{"type": "text", "text": "one"}]}]
    assert http.post("/v2/embed", json={"inputs": inputs}).json()["embeddings"] == {"float": [vector]}


def test_cohere_cuts_texts_as_it_is_told(http: httpx.Client, router: Any) -> None:
    text = "one two three four five"
    whole = ids_of(router, text)
    for fields, expected in (
        ({}, whole),
        ({"max_tokens": 2}, whole[:2]),
        ({"max_tokens": 10_000}, whole),
        ({"max_tokens": 2, "truncate": "START"}, whole[-2:]),
        ({"truncate": "NONE"}, whole),
    ):
        assert http.post("/v2/embed", json={"texts": [text], **fields}).status_code == 200
        assert router.submits[-1].prompt_ids == expected
    long = "one " * MAX_MODEL_LEN
    assert http.post("/v2/embed", json={"texts": [long]}).status_code == 200
    assert len(router.submits[-1].prompt_ids) == MAX_MODEL_LEN
    assert refused(http, "/v2/embed", texts=["a", long], truncate="NONE") == (
        400,
        "context_length_exceeded",
        "texts[1]",
    )
    assert refused(http, "/v2/embed", texts=[long], truncate="NONE")[2] == "texts[0]"
    assert refused(http, "/v2/embed", texts=["a"], truncate="NONE", max_tokens=4)[1:] == ("invalid_value", "max_tokens")


def test_what_cohere_is_refused(http: httpx.Client) -> None:
    inputs = [{"content": [{"type": "text", "text": "a"}]}]
    assert refused(http, "/v2/embed") == (400, "missing_required_parameter", "texts")
    assert refused(http, "/v2/embed", texts=["a"], inputs=inputs) == (400, "invalid_value", "inputs")
    assert refused(http, "/v2/embed", texts=[""]) == (400, "empty_string", "texts[0]")
    assert refused(http, "/v2/embed", texts=["a"] * 2_049) == (400, "array_above_max_length", "texts")
    assert refused(http, "/v2/embed", images=["a"]) == (400, "unsupported_parameter", "images")
    assert refused(http, "/v2/embed", texts=["a"], embedding_types=["int4"])[1:] == (
        "invalid_value",
        "embedding_types[0]",
    )


def test_text_embeddings_inference(http: httpx.Client, router: Any) -> None:
    one, two = numbers(ids_of(router, "one")), numbers(ids_of(router, "two"))
    assert http.post("/embed", json={"inputs": "one"}).json() == [one]
    assert router.submits[-1].params.pooling == Pooling("last", HIDDEN_SIZE)
    assert http.post("/embed", json={"inputs": ["one", "two"], "normalize": False}).json() == [one, two]
    assert not router.submits[-1].params.pooling.is_normalized
    long = "one " * MAX_MODEL_LEN
    assert refused(http, "/embed", inputs=["a", long]) == (400, "context_length_exceeded", "inputs[1]")
    for direction, end in (("Right", slice(None, MAX_MODEL_LEN)), ("left", slice(-MAX_MODEL_LEN, None))):
        body = {"inputs": long, "truncate": True, "truncation_direction": direction}
        assert http.post("/embed", json=body).status_code == 200
        assert router.submits[-1].prompt_ids == ids_of(router, long)[end]
    assert refused(http, "/embed_all", inputs="a") == (400, "invalid_value", "model")
    router.gives_token_embeddings = True
    assert http.post("/embed_all", json={"inputs": [[5, 6], [7]]}).json() == [
        [numbers((5,)), numbers((6,))],
        [numbers((7,))],
    ]
    assert refused(http, "/embed_sparse", inputs="a")[0] == 404


def test_ollama(http: httpx.Client, router: Any) -> None:
    one = ids_of(router, "one")
    answer = http.post("/api/embed", json={"model": "tiny", "input": ["one"], "keep_alive": -1, "options": {}}).json()
    assert answer.pop("total_duration") > 0
    assert answer == {"model": "tiny", "embeddings": [numbers(one)], "load_duration": 0, "prompt_eval_count": len(one)}
    assert http.post("/api/embeddings", json={"model": "tiny", "prompt": "one"}).json() == {"embedding": numbers(one)}
    long = "one " * MAX_MODEL_LEN
    assert http.post("/api/embed", json={"input": long}).status_code == 200
    assert len(router.submits[-1].prompt_ids) == MAX_MODEL_LEN
    assert refused(http, "/api/embed", input=long, truncate=False) == (400, "context_length_exceeded", "input")


@pytest.mark.parametrize(
    ("path", "body", "field", "way"),
    [
        ("/v1/embeddings", {}, "input", "Or set 'truncate_prompt_tokens' to -1, which cuts it."),
        ("/pooling", {}, "input", "Or set 'truncate_prompt_tokens' to -1, which cuts it."),
        ("/v2/embed", {"truncate": "NONE"}, "texts", "Or set 'truncate' to END, which cuts it."),
        ("/embed", {}, "inputs", "Or set 'truncate' to true, which cuts it."),
        ("/api/embed", {"truncate": False}, "input", "Or set 'truncate' to true, which cuts it."),
        ("/embedding", {}, "content", ""),
    ],
)
@pytest.mark.parametrize("num_words", [MAX_MODEL_LEN + 1, 40 * MAX_MODEL_LEN], ids=["counted", "by its bytes"])
def test_a_text_that_is_too_long_may_be_cut_as_its_route_says(
    http: httpx.Client, path: str, body: dict[str, Any], field: str, way: str, num_words: int
) -> None:
    texts = ["one " * num_words, "two"]
    answer = http.post(path, json={field: texts, **body})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert answer.json()["error"]["message"].partition(". Please reduce ")[2].partition(". ")[2] == way


def test_llama_cpp(http: httpx.Client, router: Any) -> None:
    answer = http.post("/embedding", json={"content": [[5, 6], [7]]}).json()
    assert answer == [{"index": 0, "embedding": [numbers((5, 6))]}, {"index": 1, "embedding": [numbers((7,))]}]
    assert http.post("/embedding", json={"input": "one", "embd_normalize": -1}).status_code == 200
    assert not router.submits[-1].params.pooling.is_normalized
    assert refused(http, "/embedding", content="a", embd_normalize=1) == (400, "unsupported_value", "embd_normalize")
