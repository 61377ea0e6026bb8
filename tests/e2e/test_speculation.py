"""Speculation over HTTP: streams with several tokens an event say what streams of single tokens say.

The model is free. Its answers repeat the prompt, so that guesses come true, and are known.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import httpx
import pytest

from inferd.engine.api.checkpoint import EMBEDDED_PATH
from tests.reliability.asking import Answer, Ask, Asker
from tests.reliability.conftest import count, wait_until
from tests.reliability.workloads import copies, free_answer

from .conftest import Daemon, free_model

STEP_MS = 2.0
NUM_PROMPT, NUM_TOKENS = 40, 60


def asks_of(daemon: Daemon) -> list[Ask]:
    """Requests that end in different ways, all in the middle of what is guessed."""
    (ask,) = copies(1, NUM_TOKENS)
    ids = free_answer(NUM_PROMPT, NUM_TOKENS)
    texts = [httpx.post(daemon.url + "/detokenize", json={"tokens": [i]}).json()["prompt"] for i in ids[:30]]
    # It begins within one token and ends within another.
    stop = texts[20][-1:] + texts[21] + texts[22][:1]
    options: list[dict[str, Any]] = [
        {},
        {"stop": [stop]},
        {"stop": [stop], "include_stop_str_in_output": True},
        {"stop": [stop], "min_tokens": 25},
        {"stop_token_ids": [ids[17]]},
        {"stop_token_ids": [ids[17]], "min_tokens": 30},
        {"max_tokens": 23},
        {"n": 3},
    ]
    streams = [Ask(ask.path, {**ask.body, **changes}) for changes in options]
    plain = {name: value for name, value in ask.body.items() if name not in ("stream", "stream_options")}
    return [*streams, Ask(ask.path, {**plain, "stop": [stop]})]


@pytest.fixture
def answers(start: Callable[..., Daemon]) -> tuple[list[Answer], list[Answer], Daemon]:
    """The answers without and with speculation, one request at a time, and the daemon with it."""
    found = []
    for flag in ("none", "ngram"):
        daemon = start("--no-prefix-caching", "--speculative", flag, program=free_model(STEP_MS))
        asker = Asker(daemon.url)
        found.append([answer for ask in asks_of(daemon) for answer in asker.ask([ask])])
    return found[0], found[1], daemon


def test_guesses_change_no_answer_and_save_steps(answers: tuple[list[Answer], list[Answer], Daemon]) -> None:
    plain, guessed, daemon = answers
    assert [answer.said for answer in guessed] == [answer.said for answer in plain]
    assert [answer.status for answer in plain] == [200] * len(plain)
    lengths = [len(answer.choices[0]["token_ids"]) for answer in plain]
    assert (lengths[0], lengths[4], lengths[6]) == (NUM_TOKENS, 18, 23), "they end where they should"
    assert plain[0].choices[0]["token_ids"] == free_answer(NUM_PROMPT, NUM_TOKENS)
    assert len(set(lengths[:4])) > 1 and lengths[2] == lengths[1] == lengths[8] < lengths[0], "a stop string ended them"
    state = daemon.get("/state").json()
    assert state["engine"]["speculative"] == "ngram"
    assert state["speculation"]["accepted_draft_tokens"] > 0.5 * state["speculation"]["draft_tokens"] > 0
    num_tokens = count(daemon, "inferd_generation_tokens_total")
    assert num_tokens - count(daemon, "inferd_engine_steps_total") > 0.4 * num_tokens, "hardly a step was saved"
    # Events came with several tokens, and each token counts as one in the latencies.
    assert len(guessed[0].times_s) < 0.7 * NUM_TOKENS
    wait_until(lambda: num_of_latencies(daemon) == count(daemon, "inferd_generation_tokens_total"))


def num_of_latencies(daemon: Daemon) -> float:
    """The engine may still compute a token behind a stop string when the last answer has ended."""
    gaps = count(daemon, "inferd_inter_token_latency_seconds_count")
    return gaps + count(daemon, "inferd_time_to_first_token_seconds_count")


def empty_head(path: Path) -> str:
    """A draft head for the embedded model that knows 100 tokens and likes all of them alike."""
    size, wide, kv, known = 256, 640, 128, 100
    shapes = {"fc": (size, 3 * size), "norm": (size,), "lm_head": (known, size), "midlayer.hidden_norm": (size,),
              "midlayer.input_layernorm": (size,), "midlayer.post_attention_layernorm": (size,),
              "midlayer.self_attn.q_proj": (size, 2 * size), "midlayer.self_attn.k_proj": (kv, 2 * size),
              "midlayer.self_attn.v_proj": (kv, 2 * size), "midlayer.self_attn.o_proj": (size, size),
              "midlayer.mlp.gate_proj": (wide, size), "midlayer.mlp.up_proj": (wide, size),
              "midlayer.mlp.down_proj": (size, wide)}  # fmt: skip
    entries: dict[str, Any] = {}
    end = 0
    for name, dtype, num_bytes, shape in [
        *((f"{name}.weight", "BF16", 2, shape) for name, shape in shapes.items()),
        ("d2t", "I64", 8, (known,)),
    ]:
        begin, end = end, end + num_bytes * prod(shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(end))
    config = json.loads((EMBEDDED_PATH / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": known}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_drafts_change_no_answer_and_save_steps(start: Callable[..., Daemon], tmp_path: Path) -> None:
    """A draft head that is never right changes nothing. The embedded model drafts for itself, so that all drafts are
    right, at a temperature too."""
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "seed": 4, "top_p": 0.8},
    ]
    answers = []
    head = empty_head(tmp_path)
    for flags in ((), ("--speculative", head), ("--speculative", "tiny")):
        daemon = start(*flags)
        bodies = [{"model": "tiny", "prompt": "Once", "max_tokens": 60, "ignore_eos": True, **one} for one in asked]
        found = [httpx.post(daemon.url + "/v1/completions", json=body, timeout=60).json() for body in bodies]
        answers.append([(answer["choices"], answer["usage"]) for answer in found])
        if head in flags:
            told = daemon.get("/state").json()
            assert told["engine"]["speculative"] == f"draft head {head}" and told["speculation"]["draft_tokens"] > 3
    assert answers[0] == answers[1] == answers[2]
    for _ in range(20):  # these drafts take as long as tokens, so few are made, and fewer beside other work
        state = daemon.get("/state").json()
        if state["speculation"]["draft_tokens"] >= 30:
            break
        again = httpx.post(daemon.url + "/v1/completions", json=bodies[1], timeout=60).json()
        assert again["choices"] == answers[0][1][0]
    assert state["engine"]["speculative"] == "draft model tiny"
    assert state["speculation"]["draft_tokens"] >= 30
    num_tokens = count(daemon, "inferd_generation_tokens_total")
    assert num_tokens - count(daemon, "inferd_engine_steps_total") > 20
    assert "speculative: draft model tiny" in daemon.output


def test_a_request_says_what_was_guessed_for_it(start: Callable[..., Daemon]) -> None:
    daemon = start("--speculative", "ngram", program=free_model(STEP_MS))
    body = {"model": "tiny", "prompt": free_answer(NUM_PROMPT, NUM_PROMPT), "ignore_eos": True, "include_metrics": True}

    def metrics(**changes: Any) -> dict[str, Any]:
        answer = httpx.post(daemon.url + "/v1/completions", json={**body, **changes}, timeout=60)
        found: dict[str, Any] = answer.json()["metrics"]
        return found

    told = metrics(max_tokens=NUM_TOKENS)
    assert told["draft_tokens"] >= told["accepted_draft_tokens"] > 10
    assert told["not_speculated"] is None
    assert told["draft_tokens"] == daemon.get("/state").json()["speculation"]["draft_tokens"]
    assert told["mean_itl_ms"] == pytest.approx(told["generation_time_ms"] / (NUM_TOKENS - 1), rel=0.01)
    told = metrics(max_tokens=1)
    assert (told["draft_tokens"], told["not_speculated"]) == (0, "it draws no more than one token")
