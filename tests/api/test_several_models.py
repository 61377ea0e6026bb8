"""One server with two models: each request goes to the model that it names, and every list has both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from inferd.engine.api.classifier_folder import ClassifierFolder, TokenPair
from inferd.engine.api.sentence_folder import SentenceFolder
from inferd.engine.api.wire.messages import EngineStats
from inferd.server.dispatch.model_lifecycle import State
from inferd.server.endpoints.app import Backend
from inferd.server.observability.metrics import Metrics
from inferd.server.text.model import ServedModel
from inferd.server.transport import sse
from tests.api.conftest import app_settings
from tests.conftest import FRESH

from .conftest import Script, ScriptedRouter, serving

MESSAGES = [{"role": "user", "content": "hi"}]
GENERATING = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "hi"},
}
READING = {
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/v1/completions/render": {"prompt": "hi"},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "hi", "documents": ["hi"]},
    "/v1/score": {"text_1": "hi", "text_2": "hi"},
    "/v1/classify": {"input": "hi"},
}
ADMIN = {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def second(model: ServedModel) -> ScriptedRouter:
    return ScriptedRouter(
        replace(model, names=("second", "2nd"), max_model_len=128, tokenizer_info=b'{"is_second": true}')
    )


@pytest.fixture(scope="module")
def first(model: ServedModel) -> ScriptedRouter:
    return ScriptedRouter(model)


@pytest.fixture(scope="module")
def two(model: ServedModel, first: ScriptedRouter, second: ScriptedRouter) -> Iterator[httpx.Client]:
    settings = app_settings(admin_key=("boss",), ttft_target=3.0, access_log=False)
    other = settings.model_copy(update={"ttft_target": 5.0, "dtype": "float16"})
    beside = Backend(second.model, second, Metrics("second"), other)  # type: ignore[arg-type]
    with (
        serving(model, first, settings, others=[beside]) as url,
        httpx.Client(base_url=url, timeout=20, headers=FRESH) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def forget(first: ScriptedRouter, second: ScriptedRouter) -> None:
    for router in (first, second):
        router.reset()


@pytest.mark.parametrize(("path", "fields"), GENERATING.items())
def test_a_request_goes_to_the_model_that_it_names(
    two: httpx.Client, first: ScriptedRouter, second: ScriptedRouter, path: str, fields: dict[str, Any]
) -> None:
    for name, taking, other in (("second", second, first), ("2nd", second, first), ("tiny", first, second)):
        before = len(taking.submits), len(other.submits)
        answer = two.post(path, json={"model": name, **fields})
        assert answer.status_code == 200 and answer.json()["model"] == name
        assert (len(taking.submits), len(other.submits)) == (before[0] + 1, before[1])
    assert first.submits[-1].scheduling.ttft_target_s == 3.0 and second.submits[-1].scheduling.ttft_target_s == 5.0
    two.post(path, json=fields)
    assert len(first.submits) == 2, "a request without a model is for the first"


BY_TOKENS = {"judges": ClassifierFolder(tokens=TokenPair(1, 2))}
SORTER = {"architectures": ("BertForSequenceClassification",), "judges": ClassifierFolder(dict(enumerate("abc")))}
EMBEDDER = {"embeds": SentenceFolder(pooling="mean")}
KINDS = {"reranker": (BY_TOKENS, 1), "sorter": (SORTER, 3), "embedder": (EMBEDDER, 0)}
"""Name -> (fields of a model, number of its labels)."""


@pytest.mark.parametrize(
    ("served", "path", "answering"),
    [
        (("reranker", "sorter"), "/v1/classify", "sorter"),
        (("reranker", "sorter"), "/predict", "sorter"),
        (("reranker", "sorter"), "/pooling", "sorter"),
        (("reranker", "embedder"), "/pooling", "embedder"),
        (("sorter", "reranker"), "/v1/rerank", "reranker"),
        (("sorter", "embedder", "reranker"), "/v1/score", "reranker"),
        (("sorter", "embedder"), "/v1/rerank", "embedder"),
    ],
)
def test_a_request_that_names_no_model_goes_to_one_that_is_made_for_it(
    model: ServedModel, served: tuple[str, ...], path: str, answering: str
) -> None:
    routers = []
    for name in ("talker", *served):
        fields, num_labels = KINDS.get(name, ({}, 0))
        routers.append(ScriptedRouter(replace(model, names=(name,), **fields), num_labels=num_labels))
    settings, bodies = app_settings(access_log=False), {**READING, "/predict": {"inputs": "hi"}}
    others = [Backend(each.model, each, Metrics(each.model.names[0]), settings) for each in routers[1:]]  # type: ignore[arg-type]
    with serving(routers[0].model, routers[0], settings, others=others) as url:
        answer = httpx.post(f"{url}{path}", json=bodies.get(path, {"input": "hi"}), timeout=20)
    assert answer.status_code == 200, answer.text
    assert [router.model.names[0] for router in routers if router.submits] == [answering]


@pytest.mark.parametrize(("path", "fields"), [*GENERATING.items(), *READING.items()])
def test_a_model_that_is_not_served_is_not_found(two: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    answer = two.post(path, json={"model": "third", **fields})
    assert answer.status_code == 404
    assert (
        "`third` does not exist" in answer.text
        and "This server serves `tiny`, `alias`, `second`, `2nd`." in answer.text
    )


def test_texts_are_read_by_the_model_that_is_named(two: httpx.Client) -> None:
    lengths = [
        two.post("/tokenize", json={"model": name, "prompt": "hi"}).json()["max_model_len"] for name in ("tiny", "2nd")
    ]
    assert lengths == [256, 128]
    for path in ("/v1/chat/completions/render", "/v1/completions/render"):
        text = "word " * 150
        said = {"prompt": text} if "prompt" in READING[path] else {"messages": [{"role": "user", "content": text}]}
        long = {"model": "second", **said}
        assert two.post(path, json=long).status_code == 400
        assert two.post(path, json={**long, "model": "tiny"}).status_code == 200


def test_lists_have_both(two: httpx.Client) -> None:
    cards = {card["id"]: card["max_model_len"] for card in two.get("/v1/models").json()["data"]}
    assert cards == {"tiny": 256, "alias": 256, "second": 128, "2nd": 128}
    assert two.get("/v1/models/2nd").json()["root"] == two.get("/v1/models/tiny").json()["root"]
    assert two.get("/v1/models/third").status_code == 404
    state = two.get("/state").json()
    assert [state["model"]["id"], *(other["model"]["id"] for other in state["models"])] == ["tiny", "second"]
    assert [state["targets"]["ttft_ms"], state["models"][0]["targets"]["ttft_ms"]] == [3000.0, 5000.0]
    assert two.get("/health").json() == {"status": "ready", "models": {"tiny": "ready", "second": "ready"}}


def test_the_query_names_the_model_that_a_route_is_about(two: httpx.Client, second: ScriptedRouter) -> None:
    second.stats = EngineStats(num_running=7)
    for query, length, name, num_running in (
        ("", 256, "tiny", 0),
        ("alias", 256, "tiny", 0),
        ("2nd", 128, "second", 7),
    ):
        params = {"model": query, "include": "core"} if query else {}
        assert two.get("/model_info", params=params).json()["max_model_len"] == length
        assert two.get("/server_info", params=params).json()["served_model_name"] == name
        assert two.get("/v1/loads", params=params).json()["loads"][0]["num_running_reqs"] == num_running
        assert two.get("/tokenizer_info", params=params).json().get("is_second", False) is (name == "second")


@pytest.mark.parametrize("path", ["/model_info", "/server_info", "/v1/loads", "/tokenizer_info"])
def test_a_query_that_names_no_served_model_is_not_found(two: httpx.Client, http: httpx.Client, path: str) -> None:
    for client, served in ((two, "`tiny`, `alias`, `second`, `2nd`."), (http, "`tiny`, `alias`.")):
        answer = client.get(path, params={"model": "third"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"].endswith(f"This server serves {served}")
    assert http.get(path, params={"model": "alias"}).status_code == 200


def test_a_stream_says_that_its_model_is_being_loaded(
    two: httpx.Client, second: ScriptedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "NOTICE_S", 0.05)
    second.state = State.LOADING
    assert [card.get("status") for card in two.get("/v1/models").json()["data"]] == [None, None, "loading", "loading"]
    second.will(Script(text="", ends=False))
    body = {"model": "second", "stream": True, "timeout": 0.3}
    for path in ("/v1/chat/completions", "/v1/completions"):
        lines = two.post(path, json={**body, **GENERATING[path]}).text.split("\n\n")
        assert lines.count(": the model second is being loaded") >= 2 and "deadline_exceeded" in lines[-2]
    second.state = State.SERVING
    assert "being loaded" not in two.post(path, json={**body, **GENERATING[path]}).text


@pytest.mark.parametrize(("path", "fields"), GENERATING.items())
def test_requests_of_a_model_that_failed_are_told_why(
    two: httpx.Client, second: ScriptedRouter, path: str, fields: dict[str, Any]
) -> None:
    second.fail("tensor x is NaN")
    answer = two.post(path, json={"model": "second", **fields})
    assert answer.status_code in (503, 529) and "This model is not served: tensor x is NaN" in answer.text
    assert "POST /v1/models/second/load" in answer.text and "retry-after" not in answer.headers
    assert two.post(path, json={"model": "tiny", **fields}).status_code == 200
    assert two.post("/tokenize", json={"model": "second", "prompt": "hi"}).status_code == 200, "this needs no engine"
    assert two.get("/v1/models/2nd").json()["error"] == "tensor x is NaN"
    assert two.get("/health").json()["models"] == {"tiny": "ready", "second": "failed"}
    assert two.post("/v1/models/third/load", headers=ADMIN).status_code == 404
    assert "status" not in two.post("/v1/models/2nd/load", headers=ADMIN).json()


def test_each_model_has_its_series(two: httpx.Client) -> None:
    two.post("/v1/completions", json={"model": "second", "prompt": "hi"})
    lines = two.get("/metrics").text.splitlines()
    arrived = [line for line in lines if line.startswith("inferd_requests_arrived_total{")]
    assert any('api="completions"' in line and 'model_name="second"' in line for line in arrived)
    assert len([line for line in lines if line.startswith("inferd_engine_up{")]) == 2
    assert len([line for line in lines if line == "# TYPE inferd_engine_up gauge"]) == 1
    assert len([line for line in lines if line.startswith("inferd_api_keys")]) <= 1, "the server has its series once"


def test_the_settings_of_the_second_that_differ_are_shown(two: httpx.Client) -> None:
    config = two.get("/config", headers=ADMIN).json()
    assert config["dtype"]["value"] == "auto" and config["models"]["value"] == "tiny, second"
    others = {name: told["value"] for name, told in config["models"]["became"]["second"].items()}
    assert others == {"dtype": "float16", "ttft_target": "5s"}


def test_the_prefix_caches_of_all_are_cleared(two: httpx.Client, first: ScriptedRouter, second: ScriptedRouter) -> None:
    assert two.post("/reset_prefix_cache", headers=ADMIN).status_code == 200
    assert (first.num_resets, second.num_resets) == (1, 1)


def test_an_adapter_says_which_model_it_is_for(two: httpx.Client) -> None:
    load = {"lora_name": "sql", "lora_path": "/nowhere"}
    answers = [
        two.post("/v1/load_lora_adapter", headers=ADMIN, json={**load, **base}).json()["error"]
        for base in ({}, {"base_model_name": "third"}, {"base_model_name": "second"})
    ]
    assert [answer["param"] for answer in answers] == ["base_model_name", "model", "lora_name"]
    assert "no memory for adapters" in answers[2]["message"]


@pytest.fixture
def beside_encoder(model: ServedModel, second: ScriptedRouter) -> Iterator[tuple[httpx.Client, ScriptedRouter]]:
    encoder = ScriptedRouter(replace(model, names=("encoder",), generates=False, template=None))
    backend = Backend(second.model, second, Metrics("second"), app_settings())  # type: ignore[arg-type]
    with (
        serving(encoder.model, encoder, app_settings(), others=[backend]) as url,
        httpx.Client(base_url=url, timeout=20, headers=FRESH) as client,
    ):
        yield client, second


def test_a_chat_without_a_model_goes_to_the_first_that_generates(
    beside_encoder: tuple[httpx.Client, ScriptedRouter],
) -> None:
    client, generating = beside_encoder
    infill = {"/infill": {"input_prefix": "a", "input_suffix": "b"}}
    for path, fields in {**GENERATING, **infill}.items():
        answer = client.post(path, json=fields)
        assert "has no head" not in answer.text
        if path != "/infill":
            assert answer.status_code == 200 and answer.json()["model"] == "second"
    assert len(generating.submits) == len(GENERATING)
    for path in ("/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/count_tokens"):
        assert client.post(path, json=READING[path]).status_code == 200
    named = client.post("/v1/chat/completions", json={"model": "encoder", "messages": MESSAGES})
    assert named.status_code == 400 and "has no head" in named.text
