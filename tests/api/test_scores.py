"""/v1/rerank, /v1/score, /v1/classify and their other paths: every shape, what a model can do, and what is refused."""

from __future__ import annotations

import base64
import math
import struct
import threading
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pytest

from inferd.engine.api.classifier_folder import ClassifierFolder, TokenPair
from inferd.engine.api.sentence_folder import SentenceFolder
from inferd.engine.api.wire.messages import Failure
from inferd.engine.api.wire.params import Pooling
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.generate import work
from inferd.server.generate.inputs import MAX_AT_ONCE
from inferd.server.generate.texts import Form
from inferd.server.text.model import ServedModel
from inferd.server.text.pair_template import templates_of
from inferd.server.text.template import ChatTemplate

from .conftest import HIDDEN_SIZE, MAX_MODEL_LEN, Script, ScriptedRouter, ServeAs, logits_of, vector_of
from .test_stream import connected

QUERY, DOCUMENTS = "What runs?", ["The river runs.", "Nobody knows why.", "Seven houses, and the river."]
CLASSIFIER = ("BertForSequenceClassification",)
RERANKS = ("/v1/rerank", "/v2/rerank", "/rerank")


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


def logits(router: ScriptedRouter, *texts: str, num_first: int = 0, num_labels: int = 1) -> list[float]:
    ids = tuple(token_id for text in texts for token_id in router.model.tokenizer.encode(text, False))
    return list(struct.unpack(f"<{num_labels}f", logits_of(ids, num_labels, num_first)))


def pair_logit(router: ScriptedRouter, first: str, second: str) -> float:
    """The embedded tokenizer puts nothing around the texts, and the second has another type."""
    return logits(router, first, second, num_first=len(router.model.tokenizer.encode(first, False)))[0]


def refused(http: httpx.Client, path: str, **body: Any) -> tuple[int, str | None, str | None]:
    response = http.post(path, json=body)
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


@pytest.mark.parametrize("path", RERANKS)
def test_documents_are_sorted_by_their_scores(http: httpx.Client, router: ScriptedRouter, path: str) -> None:
    answer = http.post(path, json={"model": "tiny", "query": QUERY, "documents": DOCUMENTS}).json()
    scores = {i: sigmoid(pair_logit(router, QUERY, text)) for i, text in enumerate(DOCUMENTS)}
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)
    assert [result["index"] for result in answer["results"]] == ranked
    assert [result["relevance_score"] for result in answer["results"]] == [scores[i] for i in ranked]
    shown = [result.get("document") for result in answer["results"]]
    assert shown == [{"text": DOCUMENTS[i]} if path != "/v2/rerank" else None for i in ranked]
    num_tokens = sum(len(submit.prompt_ids) for submit in router.submits)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert answer["meta"]["tokens"] == {"input_tokens": num_tokens, "output_tokens": 0}
    assert answer["meta"]["billed_units"] == {"search_units": 1}
    assert (answer["model"], answer["object"]) == ("tiny", "list") and answer["id"].startswith("rerank-")
    assert {submit.params.pooling for submit in router.submits} == {
        Pooling(gives="logits", num_first=len(router.model.tokenizer.encode(QUERY, False)))
    }


def test_what_the_answer_has_may_be_chosen(http: httpx.Client) -> None:
    def ranked(**body: Any) -> list[dict[str, Any]]:
        answer = http.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS, **body})
        assert answer.status_code == 200, answer.text
        results: list[dict[str, Any]] = answer.json()["results"]
        return results

    whole = ranked()
    assert ranked(top_n=2) == whole[:2] and ranked(top_n=0) == ranked(top_n=9) == whole
    assert ranked(documents=[{"text": text, "id": 7} for text in DOCUMENTS], query={"text": QUERY}) == whole
    assert ranked(max_chunks_per_doc=10, return_embeddings=False, user="u", priority=-1) == whole
    assert all("document" not in result for result in ranked(return_documents=False))
    raw = ranked(use_activation=False)
    assert [sigmoid(result["relevance_score"]) for result in raw] == [result["relevance_score"] for result in whole]


def test_equal_scores_keep_the_order_of_the_documents(http: httpx.Client) -> None:
    answer = http.post("/v1/rerank", json={"query": QUERY, "documents": ["same"] * 5}).json()
    assert [result["index"] for result in answer["results"]] == [0, 1, 2, 3, 4]


def test_the_request_of_text_embeddings_inference(http: httpx.Client, router: ScriptedRouter) -> None:
    asked = {"query": QUERY, "texts": DOCUMENTS}
    plain = http.post("/rerank", json=asked).json()
    found = [pair_logit(router, QUERY, text) for text in DOCUMENTS]
    ranked = sorted(range(3), key=lambda i: -found[i])
    assert plain == [{"index": i, "score": sigmoid(found[i])} for i in ranked]
    shown = http.post("/rerank", json={**asked, "return_text": True, "raw_scores": True, "truncate": True}).json()
    assert shown == [{"index": i, "score": found[i], "text": DOCUMENTS[i]} for i in ranked]


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_pairs_are_scored(http: httpx.Client, router: ScriptedRouter, names: tuple[str, str]) -> None:
    first, second = names
    forms: list[tuple[Any, Any, list[tuple[str, str]]]] = [
        ("q", "d", [("q", "d")]),
        ("q", ["d", "e"], [("q", "d"), ("q", "e")]),
        (["q"], ["d", "e"], [("q", "d"), ("q", "e")]),
        (["q", "r"], ["d", "e"], [("q", "d"), ("r", "e")]),
    ]
    for path in ("/v1/score", "/score"):
        for one, other, pairs in forms:
            answer = http.post(path, json={first: one, second: other}).json()
            assert [item["score"] for item in answer["data"]] == [sigmoid(pair_logit(router, *pair)) for pair in pairs]
            assert [(item["index"], item["object"]) for item in answer["data"]] == [
                (i, "score") for i in range(len(pairs))
            ]
            assert (answer["object"], answer["model"]) == ("list", "tiny")


def test_the_folder_says_what_is_made_of_a_logit(serve_as: ServeAs) -> None:
    judges = ClassifierFolder(activation="identity", prompt="Find: ", lowercases=True, max_tokens=30)
    http, router = serve_as(1, judges=judges)

    def score(**body: Any) -> float:
        answer = http.post("/score", json={"text_1": "What", "text_2": "RIVER", **body}).json()
        found: float = answer["data"][0]["score"]
        return found

    logit = pair_logit(router, "find: what", "river")
    assert score() == logit == score(use_activation=False)
    assert score(use_activation=True) == score(activation=True) == sigmoid(logit)
    ranked = http.post("/rerank", json={"query": "What", "texts": ["RIVER"]}).json()
    assert ranked == [{"index": 0, "score": sigmoid(logit)}], "text-embeddings-inference always gives 0 to 1"
    assert refused(http, "/score", text_1="a", text_2="b " * 40) == (400, "context_length_exceeded", "text_2")
    http.post("/score", json={"text_1": "a", "text_2": "b " * 40, "truncate_prompt_tokens": -1})
    assert len(router.submits[-1].prompt_ids) == 30


def test_an_activation_that_is_not_computed_here_must_be_chosen(serve_as: ServeAs) -> None:
    http, _ = serve_as(1, judges=ClassifierFolder(unsupported="its activation is Tanh, which inferd does not compute"))
    asked = {"text_1": "a", "text_2": "b"}
    assert refused(http, "/score", **asked) == (501, "not_implemented", "use_activation")
    assert http.post("/score", json={**asked, "use_activation": False}).status_code == 200


@pytest.mark.parametrize("has_template", [False, True])
def test_every_path_reads_a_pair_the_same_way(serve_as: ServeAs, model: ServedModel, has_template: bool) -> None:
    template = ChatTemplate(TEMPLATE, {})
    templates = templates_of(template, model.tokenizer) if has_template else None
    template.close()
    assert (templates is not None) == has_template
    judges = ClassifierFolder(prompt="Judge: ", lowercases=True)
    http, router = serve_as(1, judges=judges, pair_templates=templates)
    ranked = http.post("/rerank", json={"query": "What", "texts": ["RIVER"]}).json()[0]["score"]
    scored = http.post("/score", json={"text_1": "What", "text_2": "RIVER"}).json()["data"][0]["score"]
    predicted = http.post("/predict", json={"inputs": ["What", "RIVER"]}).json()[0]["score"]
    assert ranked == scored == predicted
    assert len({submit.prompt_ids for submit in router.submits}) == 1
    expected = "Judge: |what|river" if has_template else "judge: whatriver"
    assert model.tokenizer.decode(router.submits[0].prompt_ids, False) == expected


def test_logits_may_be_asked_for_on_every_path(serve_as: ServeAs) -> None:
    http, _ = serve_as(3, architectures=CLASSIFIER)
    (found,) = http.post("/v1/classify", json={"input": "a", "use_activation": False}).json()["data"]
    plain = http.post("/predict", json={"inputs": "a"}).json()
    assert math.isclose(sum(each["score"] for each in plain), 1.0)
    for field in ({"raw_scores": True}, {"use_activation": False}, {"raw_scores": True, "use_activation": True}):
        raw = http.post("/predict", json={"inputs": "a", **field}).json()
        assert [each["score"] for each in raw] == sorted(found["probs"], reverse=True)
        assert [each["label"] for each in raw] == [each["label"] for each in plain]
    assert http.post("/predict", json={"inputs": "a", "raw_scores": False, "use_activation": False}).json() == plain
    http, _ = serve_as(1)
    asked = {"query": "a", "documents": ["b"]}
    (logit,) = http.post("/rerank", json={**asked, "use_activation": False}).json()["results"]
    assert http.post("/rerank", json={**asked, "raw_scores": True}).json()["results"] == [logit]


def test_pooling_gives_the_classes_that_classify_gives(serve_as: ServeAs) -> None:
    http, router = serve_as(3, architectures=CLASSIFIER)
    texts = ["What runs?", "The river."]
    expected = [item["probs"] for item in http.post("/v1/classify", json={"input": texts}).json()["data"]]
    for task in ({}, {"task": "classify"}):
        answer = http.post("/pooling", json={"model": "tiny", "input": texts, **task}).json()
        assert [item["data"] for item in answer["data"]] == [[float(np.float32(x)) for x in row] for row in expected]
        assert (answer["data"][1]["object"], answer["data"][1]["index"]) == ("pooling", 1)
        assert answer["usage"]["prompt_tokens"] == sum(len(submit.prompt_ids) for submit in router.submits[:2])
    coded = http.post("/pooling", json={"input": texts, "encoding_format": "base64"}).json()["data"][0]["data"]
    assert np.array_equal(np.frombuffer(base64.b64decode(coded), np.float32), np.float32(expected[0]))
    raw = http.post("/pooling", json={"input": texts[0], "use_activation": False}).json()["data"][0]["data"]
    assert raw == pytest.approx(logits(router, texts[0], num_labels=3), abs=1e-7)
    assert http.post("/pooling", json={"input": "a", "task": "embed"}).json()["data"][0]["data"] != expected
    for field, value in (("dimensions", 2), ("pooling", "mean"), ("output_dtype", "int8"), ("prompt_name", "x")):
        assert refused(http, "/pooling", input="a", **{field: value}) == (400, "unsupported_parameter", field)


@pytest.mark.parametrize(("options", "is_raw"), [({}, False), ({"use_activation": False}, True)])
def test_texts_get_scores_from_0_to_1_unless_asked_otherwise(
    serve_as: ServeAs, options: dict[str, Any], is_raw: bool
) -> None:
    http, router = serve_as(1, judges=ClassifierFolder(activation="identity"))
    logit = pair_logit(router, "q", "one")
    (found,) = http.post("/rerank", json={"query": "q", "texts": ["one"], **options}).json()
    assert found["score"] == pytest.approx(logit if is_raw else sigmoid(logit), abs=1e-6)


def test_names_of_labels_bound_an_answer_that_has_them_all(serve_as: ServeAs) -> None:
    """They count by their bytes, and so does a name that the folder does not give: LABEL_2."""
    judges = ClassifierFolder({0: "a" * 4_096, 1: "\u00e4" * 2_044 + "b"})
    http, router = serve_as(3, judges=judges, architectures=CLASSIFIER)
    with patch.object(work, "MAX_LABEL_BYTES", 3 * 8_192):
        assert http.post("/predict", json={"inputs": [["x"]] * 3}).status_code == 200
        refusal = http.post("/predict", json={"inputs": [["x"]] * 4})
        assert http.post("/v1/classify", json={"input": ["x"] * 4}).status_code == 200, "it names one for each input"
    assert refusal.status_code == 400 and "8192 bytes of labels per input" in refusal.json()["error"]["message"]
    assert len(router.submits) == 7


def test_a_query_is_written_once_on_a_thread(serve_as: ServeAs) -> None:
    http, _ = serve_as(1, judges=ClassifierFolder(prompt="Find: ", lowercases=True))
    threads: list[str] = []
    first = Form.first

    def noting(form: Form, text: str) -> str:
        threads.append(threading.current_thread().name)
        return first(form, text)

    with patch.object(Form, "first", noting):
        assert http.post("/rerank", json={"query": "What", "documents": ["d"] * 50}).status_code == 200
    assert len(threads) == 1 and threads[0].startswith("inferd-")


def test_an_embedding_model_scores_by_the_cosine(serve_as: ServeAs) -> None:
    embeds = SentenceFolder(pooling="mean", prompts={"query": "Q: ", "passage": "P: "}, num_components=4)
    http, router = serve_as(embeds=embeds)
    answer = http.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()
    encode = router.model.tokenizer.encode
    texts = [f"Q: {QUERY}", *(f"P: {text}" for text in DOCUMENTS)]
    assert [submit.prompt_ids for submit in router.submits] == [encode(text, True) for text in texts]
    assert {submit.params.pooling for submit in router.submits} == {Pooling("mean", 4)}
    assert answer["usage"]["total_tokens"] == sum(len(submit.prompt_ids) for submit in router.submits)
    query, *others = (struct.unpack("<4f", vector_of(submit.prompt_ids, 4)) for submit in router.submits)
    expected = [max(-1.0, min(1.0, sum(a * b for a, b in zip(query, other, strict=True)))) for other in others]
    assert {result["index"]: result["relevance_score"] for result in answer["results"]} == dict(enumerate(expected))
    assert refused(http, "/v1/rerank", query="q", documents=["d"], instruction="x")[1:] == (
        "unsupported_parameter", "instruction"
    )  # fmt: skip


TEMPLATE = (
    "{{ messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first | default('Find') }}"
    "|{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    "|{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
)


@pytest.mark.parametrize("prompt", ["", "Judge"])
def test_a_generating_model_scores_by_two_tokens(serve_as: ServeAs, model: ServedModel, prompt: str) -> None:
    template = ChatTemplate(TEMPLATE, {})
    templates = templates_of(template, model.tokenizer)
    template.close()
    assert templates is not None
    http, router = serve_as(
        judges=ClassifierFolder(tokens=TokenPair(400, 900), prompt=prompt), pair_templates=templates
    )
    answer = http.post("/v1/score", json={"text_1": "q", "text_2": ["d", "e"]}).json()
    assert all(0 < item["score"] < 1 for item in answer["data"])
    head = prompt or "Find"
    encode = model.tokenizer.encode
    assert {submit.prompt_ids for submit in router.submits} == {
        encode(f"{head}|q|d", False),
        encode(f"{head}|q|e", False),
    }
    assert {submit.params.allowed_token_ids for submit in router.submits[:2]} == {(400, 900)}
    assert all((submit.params.max_tokens, submit.params.pooling) == (1, None) for submit in router.submits)
    http.post("/v1/rerank", json={"query": "q", "documents": ["d"], "instruction": "Other"})
    assert router.submits[-1].prompt_ids == encode("Other|q|d", False)
    long = {"query": "q", "documents": ["d e " * 400]}
    assert refused(http, "/v1/rerank", **long)[1] == "context_length_exceeded"
    assert http.post("/v1/rerank", json={**long, "truncate": True}).status_code == 200
    assert len(router.submits[-1].prompt_ids) == MAX_MODEL_LEN - 1, "one token is drawn"


def test_a_pair_is_cut_if_that_is_asked_for(http: httpx.Client, router: ScriptedRouter) -> None:
    encode = router.model.tokenizer.encode
    query, document = encode(QUERY, False), encode("river " * 400, False)
    asked = {"query": QUERY, "documents": ["river " * 400]}

    def sent(**body: Any) -> tuple[int, ...]:
        assert http.post("/v1/rerank", json={**asked, **body}).status_code == 200
        return router.submits[-1].prompt_ids

    assert sent(truncate_prompt_tokens=-1) == (*query, *document[: MAX_MODEL_LEN - len(query)])
    assert sent(truncate=True) == sent(truncate_prompt_tokens=-1)
    assert sent(truncate_prompt_tokens=20) == (*query, *document[: 20 - len(query)])
    assert sent(max_tokens_per_doc=7) == (*query, *document[:7])
    assert sent(max_tokens_per_doc=10_000) == sent(truncate=True)
    assert sent(max_tokens_per_doc=7, truncate_prompt_tokens=len(query) + 3) == (*query, *document[:3])
    assert refused(http, "/v1/rerank", **asked, truncate=False)[1:] == ("context_length_exceeded", "documents")
    for num_words in (400, 40_000):
        answer = http.post("/v1/rerank", json={**asked, "documents": ["river " * num_words]})
        assert answer.json()["error"]["message"].endswith("Or set 'truncate_prompt_tokens' to -1, which cuts it.")
        answer = http.post("/rerank", json={"query": asked["query"], "texts": ["river " * num_words]})
        assert answer.json()["error"]["message"].endswith("Or set 'truncate' to true, which cuts it.")


def test_cohere_cuts_unless_the_request_forbids_it(http: httpx.Client, router: ScriptedRouter) -> None:
    asked = {"query": QUERY, "documents": ["river " * 400]}
    assert http.post("/v2/rerank", json=asked).status_code == 200
    assert len(router.submits[-1].prompt_ids) == MAX_MODEL_LEN
    assert refused(http, "/v2/rerank", **asked, truncate=False)[1] == "context_length_exceeded"
    assert refused(http, "/rerank", **asked)[1] == "context_length_exceeded"


@pytest.mark.parametrize("path", RERANKS)
def test_a_wrong_rerank_request_is_refused(http: httpx.Client, router: ScriptedRouter, path: str) -> None:
    def told(**body: Any) -> tuple[int, str | None, str | None]:
        return refused(http, path, **{"query": "q", "documents": ["d"], **body})

    assert told(query=None) == (400, "missing_required_parameter", "query")
    assert told(query="") == told(query={"text": ""}) == (400, "empty_string", "query")
    assert told(query=5) == (400, "invalid_type", "query")
    assert told(documents=None) == (400, "missing_required_parameter", "documents")
    assert told(documents=[]) == (400, "empty_array", "documents")
    assert told(documents="d") == (400, "invalid_type", "documents")
    assert told(documents=["a", 5]) == (400, "invalid_type", "documents[1]")
    assert told(documents=[{"title": "a"}]) == (400, "missing_required_parameter", "documents[0].text")
    assert told(documents=[{"text": 5}]) == (400, "invalid_type", "documents[0].text")
    assert told(documents=["d"] * 2_049) == (400, "array_above_max_length", "documents")
    assert told(texts=["d"]) == (400, "invalid_value", "texts")
    assert told(documents=["d", "a " * 600], truncate=False) == (400, "context_length_exceeded", "documents[1]")
    assert told(query="a " * 600, truncate=False)[1] == "context_length_exceeded"
    assert told(top_n=-1) == (400, "integer_below_min_value", "top_n")
    assert told(max_tokens_per_doc=0) == (400, "integer_below_min_value", "max_tokens_per_doc")
    assert told(truncate_prompt_tokens=0) == (400, "integer_below_min_value", "truncate_prompt_tokens")
    assert told(rank_fields=["text"]) == (400, "unsupported_parameter", "rank_fields")
    assert told(return_embeddings=True) == (400, "unsupported_value", "return_embeddings")
    assert told(truncation_direction="left") == (400, "invalid_value", "truncation_direction")
    assert told(instruction="x") == (400, "unsupported_parameter", "instruction")
    assert told(nothing=1) == (400, "unknown_parameter", "nothing")
    assert told(model="other") == (404, "model_not_found", "model")
    assert router.submits == []


def test_other_wrong_requests_are_refused(http: httpx.Client, router: ScriptedRouter) -> None:
    assert refused(http, "/score", text_1=["a", "b"], text_2=["c"]) == (400, "invalid_value", "text_1")
    assert refused(http, "/score", text_1="a") == (400, "missing_required_parameter", "text_2")
    assert refused(http, "/score", text_1=[], text_2="a") == (400, "empty_array", "text_1")
    assert refused(http, "/score", queries="a", text_1="b", text_2="c")[1] == "invalid_value"
    assert refused(http, "/classify", input=[]) == (400, "empty_array", "input")
    assert refused(http, "/classify", input="") == (400, "invalid_value", "input")
    assert refused(http, "/classify", input=[[1], [99_999]]) == (400, "integer_above_max_value", "input[1][0]")
    assert refused(http, "/classify", input="x", messages=[])[1:] == ("unsupported_parameter", "messages")
    assert refused(http, "/predict", inputs=[]) == (400, "empty_array", "inputs")
    assert refused(http, "/predict", inputs=["a"]) == (400, "empty_array", "inputs")
    assert refused(http, "/predict", inputs=["a", "b", "c"]) == (400, "array_above_max_length", "inputs")
    assert refused(http, "/predict", inputs=[["a"], ["a", "b", "c"]])[1:] == (
        "array_above_max_length", "inputs[1]"
    )  # fmt: skip
    assert refused(http, "/predict", inputs=[["a"], [5]]) == (400, "invalid_type", "inputs[1][0]")
    assert refused(http, "/predict", inputs=5) == (400, "invalid_type", "inputs")
    assert router.submits == []


def test_a_model_that_cannot_is_refused_with_the_way_out(
    http: httpx.Client, router: ScriptedRouter, serve_as: ServeAs
) -> None:
    router.num_labels = 0
    asked: dict[str, Any] = {"query": "q", "documents": ["d"]}
    for path in RERANKS:
        assert refused(http, path, **asked) == (400, "invalid_value", "model")
    assert "Serve a reranker" in http.post("/v1/rerank", json=asked).json()["error"]["message"]
    assert refused(http, "/v1/score", text_1="a", text_2="b") == (400, "invalid_value", "model")
    assert refused(http, "/v1/classify", input="a") == refused(http, "/predict", inputs="a")
    assert refused(http, "/v1/classify", input="a") == (400, "invalid_value", "model")
    router.num_labels = 3
    assert "/v1/classify" in http.post("/v1/rerank", json=asked).json()["error"]["message"]
    unsupported, _ = serve_as(embeds=SentenceFolder(unsupported="modules.json has Dense"))
    assert refused(unsupported, "/v1/rerank", **asked) == (501, "not_implemented", "model")
    assert router.submits == []


def test_a_document_that_fails_fails_the_request_and_ends_the_others(
    http: httpx.Client, router: ScriptedRouter
) -> None:
    router.will(Script(ends=False), Script(failure=Failure("context_length_exceeded", "too long", "prompt")))
    assert refused(http, "/v1/rerank", query="q", documents=["a", "b"]) == (
        400, "context_length_exceeded", "documents[1]"
    )  # fmt: skip
    router.wait_for(lambda: router.submits[0].request_id in router.aborted)
    router.will(Script(dies=True))
    assert refused(http, "/score", text_1="q", text_2="a") == (500, "engine_error", None)


def test_a_client_that_leaves_ends_every_document_on_its_way(url: str, router: ScriptedRouter) -> None:
    router.will(Script(ends=False))
    with connected(url, "/v1/rerank", {"query": "q", "documents": ["d"] * (MAX_AT_ONCE + 5)}):
        router.wait_for(lambda: len(router.submits) == MAX_AT_ONCE)
    router.wait_for(lambda: len(router.aborted) == MAX_AT_ONCE)
    assert len(router.submits) == MAX_AT_ONCE, "the others waited here"


def test_a_deadline_ends_every_document(http: httpx.Client, router: ScriptedRouter) -> None:
    router.will(Script(ends=False))
    told = refused(http, "/v1/rerank", query="q", documents=["a", "b"], timeout=1)
    assert told == (408, "deadline_exceeded", None)
    assert set(router.aborted) == {submit.request_id for submit in router.submits}


def test_a_server_that_is_not_ready_says_so(http: httpx.Client, router: ScriptedRouter) -> None:
    router.state = State.STOPPED
    assert refused(http, "/v1/rerank", query="q", documents=["d"]) == (503, "server_is_overloaded", None)


def test_a_request_of_too_many_tokens_in_all_is_refused(http: httpx.Client, router: ScriptedRouter) -> None:
    with patch.object(work, "MAX_INPUT_IDS", 2**10):
        told = refused(http, "/v1/rerank", query="q " * 20, documents=["d"] * 100)
    assert told == (400, "request_exceeds_work_limit", "documents")
    assert router.submits == []


def test_requests_are_counted(http: httpx.Client) -> None:
    http.post("/v1/rerank", json={"query": "q", "documents": ["d"]})
    http.post("/v1/score", json={"text_1": "q", "text_2": "d"})
    http.post("/v1/classify", json={"input": "q"})
    page = http.get("/metrics").text
    for api in ("rerank", "score", "classify"):
        assert f'inferd_requests_arrived_total{{api="{api}"' in page


def test_an_answer_with_all_documents_is_whole(http: httpx.Client) -> None:
    documents = [f"{i} " + "é\n" * 40 for i in range(2_048)]
    answer = http.post("/v1/rerank", json={"query": "q", "documents": documents, "truncate": True}).json()
    assert sorted(result["index"] for result in answer["results"]) == list(range(2_048))
    assert all(result["document"]["text"] == documents[result["index"]] for result in answer["results"])


def test_the_hidden_size_bounds_the_components(serve_as: ServeAs) -> None:
    http, router = serve_as(embeds=SentenceFolder(num_components=9))
    http.post("/score", json={"text_1": "a", "text_2": "b"})
    assert {submit.params.pooling for submit in router.submits} == {Pooling("last", HIDDEN_SIZE)}
