"""The routes of models, tokens and probes."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from inferd.engine.api.classifier_folder import ClassifierFolder, TokenPair
from inferd.engine.api.sentence_folder import SentenceFolder
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.text.model import ServedModel

from .conftest import MODEL_PATH

WAIT_S = 60.0


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    names = [model.id for model in client.models.list()]
    assert names == ["tiny", "alias"]
    card = http.get("/v1/models/alias").json()
    expected = {"id": "alias", "object": "model", "owned_by": "inferd", "root": "tiny", "parent": None}
    assert expected.items() <= card.items()
    assert card["max_model_len"] == card["context_length"] == 256
    assert card["task"] == "generate"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/none")


def test_a_model_is_made_for_one_task(model: ServedModel) -> None:
    classifier = replace(model, architectures=("BertForSequenceClassification",))
    assert replace(model, generates=False).task == replace(model, embeds=SentenceFolder(pooling="mean")).task == "embed"
    assert replace(classifier, judges=ClassifierFolder({0: "LABEL_0"})).task == "rerank"
    assert replace(model, judges=ClassifierFolder(tokens=TokenPair(1, 2))).task == "rerank"
    assert replace(classifier, judges=ClassifierFolder({0: "no", 1: "yes"})).task == "classify"
    unnamed = ClassifierFolder.read(MODEL_PATH, {"num_labels": 1})
    assert replace(classifier, judges=unnamed).task == "rerank", "a config may count its label and not name it"
    compared = ClassifierFolder({0: "yes", 1: "no"}, compares_labels=True)
    assert replace(classifier, judges=compared).task == "rerank", "Qwen3-Reranker of a GGUF file"


def test_tokenize_and_detokenize(http: httpx.Client, router: Any) -> None:
    tokenizer = router.model.tokenizer
    text = "caf\u00e9 \U0001f600 12"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    ids = list(tokenizer.encode(text, True))
    strings = [tokenizer.token(token_id) for token_id in ids]
    assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": strings}
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    assert http.post("/tokenize", json={"prompt": "x"}).json()["token_strs"] is None


def test_ids_whose_text_would_be_large_are_refused(http: httpx.Client, router: Any) -> None:
    table = router.model.tokenizer.bytes
    longest = max(range(3_072), key=lambda token_id: len(table.of(token_id)))
    count = 2**24 // len(table.of(longest)) + 1
    answer = http.post("/detokenize", json={"tokens": [longest] * count})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
    assert "at most 16777216" in answer.json()["error"]["message"]


def test_a_conversation_is_tokenized_as_it_would_be_answered(http: httpx.Client, router: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = http.post("/tokenize", json={"model": "tiny", "messages": messages}).json()["tokens"]
    http.post("/v1/chat/completions", json={"messages": messages})
    assert ids == list(router.submits[0].prompt_ids)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 3_072]}, "tokens[1]"),
        ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
    ],
)
def test_what_cannot_be_tokenized(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = http.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_probes(http: httpx.Client, router: Any) -> None:
    assert [http.get(path).status_code for path in ("/live", "/ready", "/health", "/version")] == [200] * 4
    assert http.get("/version").json()["version"]
    router.state = State.STOPPED
    assert [http.get(path).status_code for path in ("/live", "/ready", "/health")] == [200, 503, 503]
    assert http.head("/health").status_code == 503
    assert http.get("/ready").json()["error"]["code"] == "server_is_overloaded"


def test_metrics_are_the_registrys(http: httpx.Client) -> None:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "inferd_engine_up" in response.text
    openmetrics = http.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert openmetrics.text.endswith("# EOF\n")


def test_answers_are_counted_by_template_and_never_by_a_callers_path(http: httpx.Client) -> None:
    for path in ("/v1/models", "/v1/models/never-heard-of-this", "/no/such/path"):
        http.get(path)
    page = http.get("/metrics").text
    assert 'route="/v1/models",status="200"' in page
    assert 'route="/v1/models/{model_id:path}",status="404"' in page
    assert 'route="unknown",status="404"' in page
    assert "never-heard" not in page


def test_a_long_prompt_holds_up_nobody(url: str) -> None:
    """While a megabyte is tokenized, the server goes on answering. No answer waits for most of the work.

    If the tokenizer held the interpreter lock, one answer would wait for four fifths of it.
    """
    text = "The quick brown fox jumps over the lazy dog. " * 22_000
    answered_s = [time.monotonic()]
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url) as client:
        long = pool.submit(httpx.post, f"{url}/tokenize", json={"prompt": text}, timeout=WAIT_S)
        while not long.done():
            assert client.get("/live").status_code == 200
            answered_s.append(time.monotonic())
        assert long.result().json()["count"] > 100_000
    longest_s = max(later - earlier for earlier, later in itertools.pairwise(answered_s))
    assert longest_s < 0.5 * (answered_s[-1] - answered_s[0])
