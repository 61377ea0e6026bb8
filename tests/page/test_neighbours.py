"""The page's view of texts and their nearest neighbours, in a browser, beside models that embed and rerank by a script.

A text's vector has the number of each letter, scaled to length 1. So tests work out cosines by themselves.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferd.engine.api.classifier_folder import ClassifierFolder
from inferd.engine.api.errors import RequestError
from inferd.engine.api.sentence_folder import SentenceFolder
from inferd.server.endpoints.app import Backend
from inferd.server.observability.metrics import Metrics
from inferd.server.text.model import ServedModel
from tests.api.conftest import (
    MAX_MODEL_LEN,
    MODEL_PATH,
    VOCAB_SIZE,
    Script,
    ScriptedRouter,
    ScriptedStream,
    app_settings,
    serving,
)  # fmt: skip
from tests.page.conftest import opened
from tests.page.test_page import check_accessible

pytestmark = pytest.mark.browser
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPTS = {"query": "query: ", "document": "passage: "}
BATCH = 64
"""Texts of a request of the page."""
WAITS = Script(ends=False)
HOSTILE = '<img src=x onerror="alert(1)"> & <b>seven</b> "boxes"'


def vector(text: str) -> list[float]:
    counts = [text.lower().count(letter) for letter in LETTERS]
    return [count / math.hypot(*counts) for count in counts]


def cosine(query: str, text: str) -> float:
    pair = zip(vector(PROMPTS["query"] + query), vector(PROMPTS["document"] + text), strict=True)
    return sum(one * other for one, other in pair)


def texts(num: int) -> list[str]:
    draw = random.Random(1)
    return ["".join(draw.choices(LETTERS + "   ", k=30)).strip() + f" {i}" for i in range(num)]


@pytest.fixture(scope="module")
def model() -> ServedModel:
    loaded = ServedModel.load(MODEL_PATH, ("tiny",), max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE)
    return replace(loaded, template=None)


@pytest.fixture
def embedder(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> ScriptedRouter:
    """Embeds texts by their letters."""
    plain = ScriptedStream._pooled

    def pooled(stream: ScriptedStream, pooling: Any) -> bytes:
        if pooling.gives != "embedding":
            return plain(stream, pooling)
        assert pooling.is_normalized
        return struct.pack("<26f", *vector(model.tokenizer.decode(list(stream.submit.prompt_ids), False)))

    monkeypatch.setattr(ScriptedStream, "_pooled", pooled)
    embeds = SentenceFolder(pooling="mean", prompts=PROMPTS)
    return ScriptedRouter(replace(model, names=("org/embedder",), embeds=embeds), hidden_size=26)


@pytest.fixture
def url(model: ServedModel, embedder: ScriptedRouter) -> Iterator[str]:
    """A server with a model that chats, one that embeds and one that reranks."""
    judge = replace(model, names=("judge",), architectures=("BertForSequenceClassification",))
    judge = replace(judge, judges=ClassifierFolder({0: "LABEL_0"}))
    settings = app_settings(access_log=False)
    others = [
        Backend(router.model, router, Metrics(router.model.names[0]), settings)  # type: ignore[arg-type]
        for router in (embedder, ScriptedRouter(judge))
    ]
    with serving(model, ScriptedRouter(model), settings, others=others) as url:
        yield url


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    with opened(browser, url) as page:
        page.get_by_role("button", name="Embeddings").click()
        yield page


def give(page: Any, name: str, content: bytes) -> None:
    page.locator("input[type=file]").set_input_files({"name": name, "mimeType": "text/plain", "buffer": content})
    page.get_by_text(name).wait_for()


def embed(page: Any, num: int) -> None:
    page.get_by_role("button", name="Embed", exact=True).click()
    has_vectors(page, num)


def has_vectors(page: Any, num: int) -> None:
    page.locator("[role=status]", has_text=f"{num} of {num} texts have a vector of 26 components").wait_for()


def search(page: Any, query: str) -> None:
    page.get_by_label("Query").fill(query)
    page.locator("[role=status]", has_text=f"Nearest to “{query}” ").wait_for()


def found(page: Any) -> list[str]:
    return [str(one) for one in page.locator(".found .plain").all_inner_texts()]


def check_nearest(page: Any, query: str, given: list[str]) -> None:
    """Texts with equal cosines may come in any order."""
    texts = found(page)
    assert len(set(texts)) == 20 and set(texts) <= set(given)
    largest = sorted((cosine(query, text) for text in given), reverse=True)[:20]
    assert [cosine(query, text) for text in texts] == pytest.approx(largest, abs=1e-6)


def test_the_nearest_texts_are_those_of_the_largest_cosines(page: Any, embedder: ScriptedRouter) -> None:
    given = [*texts(2 * BATCH + 10), HOSTILE]
    give(page, "lines.txt", "\r\n\n".join(given).encode())
    embed(page, len(given))
    for query in ("seven boxes", "kayak"):
        search(page, query)
        check_nearest(page, query, given)
        for item, text in zip(page.locator(".found li").all_inner_texts(), found(page), strict=True):
            assert f"No. {given.index(text) + 1} · cosine {cosine(query, text):.4f}" in item
    assert len(embedder.submits) == len(given) + 2
    check_accessible(page)
    page.get_by_role("button", name="Chat", exact=True).click()
    page.get_by_label("Message", exact=True).wait_for()
    page.get_by_role("button", name="Embeddings").click()
    assert len(found(page)) == 20, "they are kept"
    page.get_by_label("Query").fill(" ")
    page.locator(".found").wait_for(state="detached")


def test_texts_that_were_stopped_or_refused_go_on(page: Any, embedder: ScriptedRouter) -> None:
    given = texts(2 * BATCH)
    embedder.will(*[Script()] * BATCH, WAITS)
    page.get_by_label("Texts, one a line").fill("\n".join(given))
    page.get_by_role("button", name="Embed", exact=True).click()
    page.get_by_text(f"{BATCH} of {2 * BATCH} texts have a vector,").wait_for()
    embedder.wait_for(lambda: len(embedder.submits) == 2 * BATCH)
    page.get_by_role("button", name="Stop").click()
    embedder.wait_for(lambda: len(embedder.aborted) == BATCH)
    embedder.will(Script())
    search(page, "kayak")
    check_nearest(page, "kayak", given[:BATCH])
    embedder.refusal = RequestError("queue_full", "The queue is full: try again.")
    page.get_by_role("button", name="Go on").click()
    page.locator("[role=alert]", has_text="The queue is full: try again.").wait_for()
    embedder.refusal = None
    page.get_by_role("button", name="Go on").click()
    has_vectors(page, 2 * BATCH)
    assert page.locator("[role=alert]").count() == 0
    check_nearest(page, "kayak", given)


def test_the_newest_query_alone_is_answered(page: Any, embedder: ScriptedRouter) -> None:
    page.get_by_label("Texts, one a line").fill("an apple\na fox")
    embed(page, 2)
    embedder.will(WAITS)
    page.get_by_label("Query").fill("apple")
    embedder.wait_for(lambda: len(embedder.submits) == 3)
    embedder.refusal = RequestError("queue_full", "The queue is full: try again.")
    page.get_by_label("Query").fill("an apple")
    page.locator("[role=alert]", has_text="The queue is full: try again.").wait_for()
    embedder.wait_for(lambda: len(embedder.aborted) == 1)
    embedder.refusal = None
    embedder.will(Script())
    search(page, "fox")
    assert found(page) == ["a fox", "an apple"]
    assert page.locator("[role=alert]").count() == 0


def test_a_reranker_reorders_what_was_found(page: Any, url: str) -> None:
    given = texts(30)
    page.get_by_label("Texts, one a line").fill("\n".join(given))
    embed(page, len(given))
    search(page, "kayak")
    nearest = found(page)
    page.get_by_role("button", name="Reorder by judge").click()
    page.locator(".found", has_text="score").wait_for()
    asked = {"model": "judge", "query": "kayak", "documents": nearest}
    results = httpx.post(f"{url}/v1/rerank", json=asked).json()["results"]
    assert found(page) == [nearest[result["index"]] for result in results] != nearest
    for item, result in zip(page.locator(".found li").all_inner_texts(), results, strict=True):
        assert f"score {result['relevance_score']:.4f}" in item
    search(page, "kayaks")
    assert page.locator(".found", has_text="score").count() == 0


def test_a_file_of_json_lines(page: Any, tmp_path: Path) -> None:
    lines = [json.dumps({"id": i, "body": text}) for i, text in enumerate(["a fox", "a box"])]
    give(page, "corpus.jsonl", "\n".join(lines).encode())
    page.get_by_role("button", name="Embed", exact=True).click()
    page.locator("[role=alert]", has_text='Line 1 has no text in "text". Its fields are id, body').wait_for()
    page.get_by_label("Field of the text").fill("body")
    embed(page, 2)
    search(page, "fox")
    assert found(page) == ["a fox", "a box"]
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    page.locator("input[type=file]").set_input_files(tmp_path / "image.png")
    page.locator("[role=alert]", has_text="image.png is no text in UTF-8").wait_for()


def test_a_server_that_only_embeds_has_no_chat(browser: Any, embedder: ScriptedRouter) -> None:
    settings = app_settings(access_log=False)
    with serving(embedder.model, embedder, settings) as url, opened(browser, url) as page:
        page.get_by_label("Texts, one a line").wait_for()
        assert page.get_by_role("button", name="Chat").count() == page.get_by_label("Message", exact=True).count() == 0


NEAREST = """async (rows) => {
    const { nearest } = await import("./playground/vectors.js");
    const vectors = new Float32Array(rows.flat());
    return nearest({ vectors, width: rows[0].length, numDone: rows.length }, new Float32Array(rows[1]));
}"""


@pytest.mark.parametrize("width", [1, 3, 4, 7, 32])
def test_vectors_of_any_width_are_compared_whole(page: Any, width: int) -> None:
    """Equal cosines keep the order of the texts."""
    draw = random.Random(width)
    rows = [[draw.choice([-1.0, 0.5, 2.0]) for _ in range(width)] for _ in range(40)]
    products = [sum(a * b for a, b in zip(row, rows[1], strict=True)) for row in rows]
    expected = sorted(range(40), key=lambda i: -products[i])[:20]
    got = page.evaluate(NEAREST, rows)
    assert [(one["index"], one["cosine"]) for one in got] == [(i, products[i]) for i in expected]
