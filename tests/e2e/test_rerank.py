"""Rerank, scores and classes through a real daemon, whose model costs nothing: its logits depend on the ids alone."""

from __future__ import annotations

import math
import os
import signal
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from benchmarks.free_engine import free_numbers
from inferd.engine.api.checkpoint import EMBEDDED_PATH
from inferd.server.text.pretrained import load_pretrained
from inferd.server.text.tokenizer import Tokenizer
from tests.conftest import FRESH

from .conftest import Daemon, children, free_model, is_engine
from .test_client import wait_idle

QUERY, DOCUMENTS = "What runs?", [f"{i} rivers run past {i * 7} houses" + " and on" * (i % 5) for i in range(150)]


def scores_of(query: str, documents: list[str]) -> list[float]:
    read = load_pretrained(EMBEDDED_PATH)
    tokenizer = Tokenizer(read.backend, read.special_tokens, read.eos_token_id)
    first = tokenizer.encode(query, False)
    logits = [
        struct.unpack("<f", free_numbers((*first, *tokenizer.encode(each, False)), 1, len(first)))[0]
        for each in documents
    ]
    return [1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit)) for logit in logits]


def ranked(daemon: Daemon, path: str = "/v1/rerank") -> list[tuple[int, float]]:
    answer = httpx.post(f"{daemon.url}{path}", json={"query": QUERY, "documents": DOCUMENTS}, timeout=60)
    assert answer.status_code == 200, answer.text
    return [(result["index"], result["relevance_score"]) for result in answer.json()["results"]]


def test_documents_are_scored_again_if_the_engine_dies(start: Callable[..., Daemon]) -> None:
    daemon = start("--max-num-seqs", "16", program=free_model(100))
    expected = scores_of(QUERY, DOCUMENTS)
    order = sorted(range(len(expected)), key=lambda i: (-expected[i], i))
    with ThreadPoolExecutor(2) as pool:
        plain, other = pool.submit(ranked, daemon), pool.submit(ranked, daemon, "/v2/rerank")
        while not httpx.get(f"{daemon.url}/state", headers=FRESH).json()["requests"]["running"]:
            assert not plain.done()
        (engine,) = (pid for pid, command in children(daemon.process.pid).items() if is_engine(command))
        os.kill(engine, signal.SIGKILL)
        assert plain.result() == other.result() == [(i, expected[i]) for i in order]
    wait_idle(daemon)
    assert httpx.get(f"{daemon.url}/state", headers=FRESH).json()["restarts"] == 1


def test_scores_and_classes_of_a_real_daemon(start: Callable[..., Daemon]) -> None:
    daemon = start(program=free_model(0))
    asked = {"text_1": QUERY, "text_2": DOCUMENTS[:3]}
    scores = httpx.post(f"{daemon.url}/v1/score", json=asked, timeout=60).json()["data"]
    assert [item["score"] for item in scores] == scores_of(QUERY, DOCUMENTS[:3])
    (item,) = httpx.post(f"{daemon.url}/classify", json={"input": QUERY}, timeout=60).json()["data"]
    assert item["label"] == "LABEL_0" and item["num_classes"] == 1 and 0 < item["probs"][0] < 1
