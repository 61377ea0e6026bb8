"""/v1/classify, /classify and /predict: the activation of classes, their bound, and the thread that makes them."""

from __future__ import annotations

import math
import threading
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from inferd.engine.api.classifier_folder import ClassifierFolder
from inferd.server.generate import classify, work
from inferd.server.generate.score import activated

from .conftest import ScriptedRouter, ServeAs
from .test_scores import logits, pair_logit, refused, sigmoid


def test_texts_are_classified(http: httpx.Client, router: ScriptedRouter) -> None:
    router.num_labels = 3
    ids = [list(router.model.tokenizer.encode(text, True)) for text in ("one", "two")]
    for path, given in (("/v1/classify", ["one", "two"]), ("/classify", ids)):
        answer = http.post(path, json={"input": given, "model": "tiny"}).json()
        for item, text in zip(answer["data"], ("one", "two"), strict=True):
            weights = [math.exp(logit) for logit in logits(router, text, num_labels=3)]
            assert item["probs"] == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-12)
            assert (item["label"], item["num_classes"]) == (f"LABEL_{weights.index(max(weights))}", 3)
        assert [item["index"] for item in answer["data"]] == [0, 1]
        assert answer["usage"]["prompt_tokens"] == sum(len(submit.prompt_ids) for submit in router.submits[-2:])
    raw = http.post("/classify", json={"input": "one", "use_activation": False}).json()
    assert raw["data"][0]["probs"] == logits(router, "one", num_labels=3)
    assert http.post("/classify", json={"input": "one", "softmax": False}).json()["data"] == raw["data"]


def test_labels_of_a_folder_that_may_all_be_true(serve_as: ServeAs) -> None:
    judges = ClassifierFolder({0: "angry", 1: "glad"}, problem="multi_label_classification")
    http, router = serve_as(2, judges=judges)
    found = [sigmoid(logit) for logit in logits(router, "one", num_labels=2)]
    likeliest = found.index(max(found))
    item = http.post("/classify", json={"input": "one"}).json()["data"][0]
    assert (item["probs"], item["label"]) == (found, ["angry", "glad"][likeliest])
    predicted = http.post("/predict", json={"inputs": "one"}).json()
    assert predicted == [
        {"score": found[i], "label": ["angry", "glad"][i]} for i in sorted(range(2), key=lambda i: -found[i])
    ]


def test_the_prediction_of_text_embeddings_inference(http: httpx.Client, router: ScriptedRouter) -> None:
    router.num_labels = 2
    first = len(router.model.tokenizer.encode("a", False))
    single = logits(router, "a", num_labels=2)
    pair = logits(router, "a", "b", num_first=first, num_labels=2)

    def named(values: list[float]) -> list[dict[str, object]]:
        ranked = sorted(range(2), key=lambda i: -values[i])
        return [{"score": values[i], "label": f"LABEL_{i}"} for i in ranked]

    forms: list[tuple[Any, Any]] = [
        ("a", named(single)),
        (["a", "b"], named(pair)),
        ([["a"], ["a", "b"]], [named(single), named(pair)]),
        ([["a"]], [named(single)]),
    ]
    for inputs, expected in forms:
        assert http.post("/predict", json={"inputs": inputs, "raw_scores": True}).json() == expected
    scores = [item["score"] for item in http.post("/predict", json={"inputs": "a"}).json()]
    assert sum(scores) == pytest.approx(1)


def test_classes_get_the_folders_activation(serve_as: ServeAs) -> None:
    http, router = serve_as(3, judges=ClassifierFolder(activation="identity"))
    assert http.post("/classify", json={"input": "one"}).json()["data"][0]["probs"] == logits(
        router, "one", num_labels=3
    )
    likely = http.post("/predict", json={"inputs": "one"}).json()
    assert sum(item["score"] for item in likely) == pytest.approx(1)
    http, _ = serve_as(3, judges=ClassifierFolder(unsupported="its activation is Tanh, which inferd does not compute"))
    assert refused(http, "/classify", input="one") == (501, "not_implemented", "use_activation")
    for wanted in (True, False):
        assert http.post("/classify", json={"input": "one", "use_activation": wanted}).status_code == 200


def test_softmax_of_one_label_is_refused_unless_logits_are_asked_for(serve_as: ServeAs) -> None:
    http, router = serve_as(1, judges=ClassifierFolder(activation="softmax"))
    assert refused(http, "/score", text_1="a", text_2="b") == (501, "not_implemented", "use_activation")
    assert refused(http, "/classify", input="a") == (501, "not_implemented", "use_activation")
    assert refused(http, "/rerank", query="a", texts=["b"]) == (501, "not_implemented", "raw_scores")
    assert refused(http, "/predict", inputs=["a", "b"]) == (501, "not_implemented", "raw_scores")
    assert router.submits == []
    raw = http.post("/rerank", json={"query": "a", "texts": ["b"], "raw_scores": True}).json()
    assert raw == [{"index": 0, "score": pair_logit(router, "a", "b")}]


def test_classes_are_made_on_a_thread(http: httpx.Client, router: ScriptedRouter) -> None:
    router.num_labels = 3
    threads: list[str] = []

    def noting(*given: Any) -> tuple[float, ...]:
        threads.append(threading.current_thread().name)
        return activated(*given)

    with patch.object(classify, "activated", noting):
        assert http.post("/classify", json={"input": ["a", "b"]}).status_code == 200
        assert http.post("/predict", json={"inputs": "a"}).status_code == 200
    assert len(threads) == 3 and all(name.startswith("inferd-") for name in threads)


def test_classes_of_too_many_labels_in_all_are_refused(http: httpx.Client, router: ScriptedRouter) -> None:
    router.num_labels = 3
    with patch.object(work, "MAX_COMPONENTS", 6):
        assert http.post("/classify", json={"input": ["a", "b"]}).status_code == 200
        num_submits = len(router.submits)
        assert refused(http, "/classify", input=["a"] * 3) == (400, "request_exceeds_work_limit", "input")
        assert refused(http, "/predict", inputs=[["a"]] * 3) == (400, "request_exceeds_work_limit", "inputs")
    assert len(router.submits) == num_submits
