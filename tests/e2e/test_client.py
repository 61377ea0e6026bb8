"""The official client with the real engine: answers match the requests, and dropped requests are freed."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from .conftest import Daemon

LONG: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}


def ask(daemon: Daemon, **options: Any) -> Any:
    """A completion whose length does not depend on the model's training."""
    defaults = {"model": "tiny", "prompt": "Tell me a short story.", "max_tokens": 40, "seed": 3, "temperature": 1.0}
    extra = {"ignore_eos": True, "skip_special_tokens": False, **options.pop("extra_body", {})}
    return daemon.client().completions.create(**{**defaults, **options}, extra_body=extra)


def gauge(daemon: Daemon, name: str) -> dict[str, float]:
    """Label set -> value of every sample of a metric."""
    page = daemon.get("/metrics").text
    return {labels: float(value) for labels, value in re.findall(rf"^{name}({{[^}}]*}})? (\S+)$", page, re.MULTILINE)}


def wait_idle(daemon: Daemon) -> None:
    """Waits until nothing runs, waits or holds a block. The time limit only keeps a broken test from hanging."""
    deadline = time.monotonic() + 20
    while True:
        counts = [gauge(daemon, f"inferd_requests_{state}") for state in ("running", "waiting")]
        used = {labels: n for labels, n in gauge(daemon, "inferd_kv_cache_blocks").items() if 'state="used"' in labels}
        if not any(value for count in (*counts, used) for value in count.values()):
            return
        assert time.monotonic() < deadline, (counts, used)


def test_n_choices_are_those_of_their_seeds(daemon: Daemon) -> None:
    """Choice 0 has the request's seed, and the others differ. The same request gives the same choices again."""
    first = ask(daemon, n=3)
    texts = [choice.text for choice in first.choices]
    assert texts[0] == ask(daemon).choices[0].text
    assert len(set(texts)) == 3
    assert [choice.text for choice in ask(daemon, n=3).choices] == texts


def test_the_seed_that_was_chosen_makes_the_answer_again(daemon: Daemon) -> None:
    first = ask(daemon, seed=openai.omit)
    again = ask(daemon, seed=first.seed)
    assert again.choices[0].text == first.choices[0].text
    assert ask(daemon, seed=openai.omit).seed != first.seed


def test_a_stop_string_ends_the_text_and_the_count(daemon: Daemon) -> None:
    whole = ask(daemon, temperature=0, extra_body={"return_token_ids": True}).choices[0]
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 4]
    expected = whole.text[: whole.text.index(stop)]
    plain = ask(daemon, temperature=0, stop=stop)
    streamed = list(ask(daemon, temperature=0, stop=stop, stream=True))
    assert plain.choices[0].text == "".join(chunk.choices[0].text for chunk in streamed) == expected
    assert plain.choices[0].finish_reason == "stop"
    assert plain.usage.completion_tokens < len(whole.token_ids)
    wait_idle(daemon)


def test_logprobs_are_those_of_the_greedy_choice(daemon: Daemon) -> None:
    answer = ask(daemon, temperature=0, logprobs=2, max_tokens=8).choices[0]
    assert "".join(answer.logprobs.tokens) == answer.text
    for token, logprob, top in zip(
        answer.logprobs.tokens, answer.logprobs.token_logprobs, answer.logprobs.top_logprobs, strict=True
    ):
        assert max(top.values()) == top[token] == logprob <= 0.0


def test_scoring_a_prompt_as_an_evaluation_does(daemon: Daemon) -> None:
    """echo + logprobs + max_tokens 0 over prompts of ids: the sums are those of scoring token by token."""
    ids = daemon_ids(daemon, "The sky is blue and the grass is green.")
    scored = ask(daemon, prompt=[ids, ids[:5]], echo=True, logprobs=1, max_tokens=0).choices
    assert scored[0].logprobs.token_logprobs[0] is None
    assert len(scored[0].logprobs.token_logprobs) == len(ids)
    assert scored[0].logprobs.token_logprobs[:5] == scored[1].logprobs.token_logprobs
    step = ask(daemon, prompt=ids[:5], logprobs=1, max_tokens=1, extra_body={"allowed_token_ids": [ids[5]]}).choices[0]
    assert step.logprobs.token_logprobs == [pytest.approx(scored[0].logprobs.token_logprobs[5], abs=1e-5)]


def daemon_ids(daemon: Daemon, text: str) -> list[int]:
    answer = httpx.post(daemon.url + "/tokenize", json={"model": "tiny", "prompt": text, "add_special_tokens": False})
    ids: list[int] = answer.json()["tokens"]
    return ids


def test_a_repeated_prompt_is_a_prefix_hit_with_the_same_answer(daemon: Daemon) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 12
    first, again = ask(daemon, prompt=prompt), ask(daemon, prompt=prompt)
    assert again.usage.prompt_tokens_details.cached_tokens >= 32
    assert again.choices[0].text == first.choices[0].text


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "plain"])
def test_a_client_that_goes_away_frees_what_it_held(daemon: Daemon, stream: bool) -> None:
    """A request whose client has gone ends, in decode and in the queue."""

    def drop(number: int) -> None:
        body = {**LONG, "stream": stream, "seed": number}
        try:
            with httpx.stream("POST", daemon.url + "/v1/completions", json=body, timeout=0.5 + number / 50) as answer:
                for _, _ in zip(range(number % 4), answer.iter_lines(), strict=False):
                    pass
        except httpx.TimeoutException:
            pass

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(drop, range(16)))
    wait_idle(daemon)


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"model": "gpt-4o"}, 404, "model_not_found"),
        ({"prompt": []}, 400, "empty_array"),
        ({"prompt": [999_999]}, 400, "integer_above_max_value"),
        ({"prompt": [-1]}, 400, "integer_below_min_value"),
        ({"prompt": "word " * 4000}, 400, "context_length_exceeded"),
        ({"max_tokens": -2}, 400, "integer_below_min_value"),
        ({"temperature": -0.1}, 400, "decimal_below_min_value"),
        ({"logit_bias": {"999999": 1}}, 400, "integer_above_max_value"),
        ({"nonsense": 1}, 400, "unknown_parameter"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong_and_others_notice_nothing(
    daemon: Daemon, change: dict[str, Any], status: int, code: str
) -> None:
    pid = daemon.engine_pid
    answer = httpx.post(daemon.url + "/v1/completions", json={"model": "tiny", "prompt": "x", **change})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert ask(daemon, max_tokens=2).usage.completion_tokens <= 2
    assert daemon.engine_pid == pid


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"temperature": NaN}', b"\xff", b""])
def test_malformed_json_is_a_400(daemon: Daemon, body: bytes) -> None:
    answer = httpx.post(daemon.url + "/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
