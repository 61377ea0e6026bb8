"""/info of text-embeddings-inference, and /api/tags, /api/show and the names of models on Ollama's routes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from inferd.engine.api.classifier_folder import ClassifierFolder, TokenPair
from inferd.engine.api.sentence_folder import SentenceFolder

from .conftest import HIDDEN_SIZE, MAX_MODEL_LEN, ServeAs

EMBEDS = SentenceFolder(pooling="mean", max_tokens=40)
CLASSIFIER = ("BertForSequenceClassification",)


def test_what_embeds_is_told_as_text_embeddings_inference_tells_it(serve_as: ServeAs) -> None:
    http, router = serve_as(embeds=EMBEDS)
    told = http.get("/info").json()
    assert (told["model_id"], told["model_type"]) == ("tiny", {"embedding": {"pooling": "mean"}})
    assert (told["max_input_length"], told["max_client_batch_size"], told["auto_truncate"]) == (40, 2_048, False)
    assert told["max_concurrent_requests"] == router.ready.max_num_seqs
    assert http.get("/info?model=tiny").json() == told and http.get("/info?model=other").status_code == 404


@pytest.mark.parametrize(("labels", "kind"), [(("good",), "reranker"), (("bad", "good"), "classifier")])
def test_what_judges_is_told_with_its_labels(serve_as: ServeAs, labels: tuple[str, ...], kind: str) -> None:
    judges = ClassifierFolder(dict(enumerate(labels)), max_tokens=30)
    http, _ = serve_as(len(labels), judges=judges, architectures=CLASSIFIER)
    told = http.get("/info").json()
    by_name = {name: i for i, name in enumerate(labels)}
    id2label = {str(i): name for name, i in by_name.items()}
    assert told["model_type"] == {kind: {"id2label": id2label, "label2id": by_name}}
    assert told["max_input_length"] == 30


def test_a_reranker_is_told_as_one_however_it_scores(serve_as: ServeAs) -> None:
    """Qwen3-Reranker's GGUF file compares two labels, and its folder two tokens."""
    compared = ClassifierFolder({0: "yes", 1: "no"}, compares_labels=True)
    http, _ = serve_as(2, judges=compared, architectures=CLASSIFIER)
    labels = {"id2label": {"0": "yes", "1": "no"}, "label2id": {"yes": 0, "no": 1}}
    assert http.get("/info").json()["model_type"] == {"reranker": labels}
    http, _ = serve_as(judges=ClassifierFolder(tokens=TokenPair(1, 2)))
    assert http.get("/info").json()["model_type"] == {"reranker": {"id2label": {}, "label2id": {}}}


def test_info_is_refused_before_the_first_engine_is_ready(serve_as: ServeAs) -> None:
    http, router = serve_as(embeds=EMBEDS)
    router.has_engine = False
    refusal = http.get("/info")
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (500, "engine_error")
    assert "size" not in http.get("/api/tags").json()["models"][0]


def test_ollama_lists_and_shows_what_embeds(serve_as: ServeAs) -> None:
    http, router = serve_as(embeds=EMBEDS)
    listed, *_ = http.get("/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == "tiny:latest"
    assert datetime.fromisoformat(listed["modified_at"]) == datetime.fromtimestamp(router.model.created, UTC)
    assert listed["size"] == router.ready.weights_bytes
    shown = http.post("/api/show", json={"model": listed["model"], "verbose": True}).json()
    assert shown["details"] == listed["details"] and shown["details"]["family"] == "llama"
    assert shown["model_info"] == {
        "general.architecture": "llama", "llama.context_length": 40, "llama.embedding_length": HIDDEN_SIZE,
    }  # fmt: skip
    assert shown["capabilities"] == ["embedding"]
    assert http.post("/api/show", json={"name": "tiny"}).json() == shown
    assert http.post("/api/show", json={"model": "other"}).status_code == 404


def test_what_generates_alone_is_not_listed(http: Any, serve_as: ServeAs) -> None:
    talker, _ = serve_as()
    for path in ("/info", "/info?model=tiny"):
        refusal = talker.get(path)
        assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "model")
        assert "GET /v1/models" in refusal.json()["error"]["message"]
    assert http.get("/api/tags").json() == {"models": []}
    shown = http.post("/api/show", json={"model": "tiny"}).json()
    assert (shown["capabilities"], shown["model_info"]["llama.context_length"]) == ([], MAX_MODEL_LEN)


@pytest.mark.parametrize(("path", "field"), [("/api/embed", "input"), ("/api/embeddings", "prompt")])
@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
def test_a_name_without_a_tag_is_the_latest(http: Any, path: str, field: str, name: str) -> None:
    answer = http.post(path, json={"model": name, field: "one"})
    assert answer.status_code == 200 and answer.json().get("model", name) == name
    assert http.post(path, json={"model": "tiny:small", field: "one"}).status_code == 404
    assert http.post("/v1/embeddings", json={"model": "tiny:latest", "input": "one"}).status_code == 404
