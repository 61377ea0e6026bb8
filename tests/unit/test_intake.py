"""Intake: the result of a valid request, and refusals before anything is submitted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.params import MAX_SEED, SchedulingParams
from inferd.server.generate.intake import Intake
from inferd.server.generate.prompts import PromptReader
from inferd.server.generate.request import Caller, GenerateRequest, choice_seed
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.request_model import read
from inferd.server.text.model import GenerationDefaults, ServedModel
from inferd.server.text.template import conversation_of
from inferd.server.text.text_threads import TextThreads
from tests.unit.test_tokenizer import with_bos

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
LIMIT, VOCAB_SIZE = 64, 3_072
CALLER = Caller("tenant", 1.5)
DEFAULTS = GenerationDefaults(
    temperature=0.5, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.1, max_new_tokens=20
)
TOOL: dict[str, object] = {"type": "function", "function": {"name": "f"}}
HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def model() -> ServedModel:
    loaded = ServedModel.load(MODEL_PATH, ("a", "b"), max_model_len=LIMIT, vocab_size=VOCAB_SIZE)
    return replace(loaded, defaults=DEFAULTS)


@pytest.fixture(scope="module")
def threads() -> Iterator[TextThreads]:
    threads = TextThreads()
    yield threads
    threads.close()


class Taken:
    """Accepts every grammar unchanged."""

    async def check(self, text: str, param: str, tenant: str) -> str:
        return f"{param}: {text}"


class Asker:
    """Reads JSON bodies as the routes do."""

    def __init__(self, model: ServedModel, threads: TextThreads) -> None:
        self.model = model
        self.grammars = Taken()
        self.intake = Intake(model, PromptReader(model, threads), self.grammars)

    def chat(self, **body: object) -> GenerateRequest:
        return asyncio.run(self.intake.chat(read(ChatRequest, {**HI, **body}), CALLER))

    def completion(self, **body: object) -> GenerateRequest:
        return asyncio.run(self.intake.completion(read(CompletionRequest, {"prompt": [1, 2, 3], **body}), CALLER))


@pytest.fixture(scope="module")
def ask(model: ServedModel, threads: TextThreads) -> Asker:
    return Asker(model, threads)


def refusal(work: object, /, **body: object) -> RequestError:
    assert callable(work)
    with pytest.raises(RequestError) as caught:
        work(**body)
    return caught.value


def test_defaults_are_the_checkpoints_then_openais(ask: Asker) -> None:
    taken = ask.chat()
    params = taken.params
    found = (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty)
    assert found == (0.5, 40, 0.9, 0.1, 1.1)
    assert (params.presence_penalty, params.frequency_penalty, params.min_tokens, params.logprobs) == (
        0.0,
        0.0,
        0,
        None,
    )
    assert params.eos_token_ids == ask.model.eos_token_ids
    assert taken.n == 1
    assert taken.scheduling == SchedulingParams(arrival_s=1.5, cache_salt="tenant", tenant="tenant")
    assert taken.prompts[0].max_tokens == 20


def test_what_is_given_wins(ask: Asker) -> None:
    taken = ask.chat(
        temperature=0, top_k=-1, top_p=1, min_p=0, repetition_penalty=1, presence_penalty=1.5, frequency_penalty=-2,
        seed=MAX_SEED, min_tokens=2, max_tokens=9, logit_bias={"7": 3, "2": -100}, stop="x", stop_token_ids=[5, 5],
        ignore_eos=True, allowed_token_ids=[1, 2], logprobs=True, top_logprobs=3, prompt_logprobs=1, priority=-4,
        cache_salt="s", include_stop_str_in_output=True, skip_special_tokens=False,
    )  # fmt: skip
    params = taken.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (0, 0, 1, 0, 1)
    assert (params.presence_penalty, params.frequency_penalty, params.seed, params.min_tokens) == (1.5, -2, MAX_SEED, 2)
    assert (params.logit_bias, params.stop_token_ids, params.eos_token_ids) == (((2, -100.0), (7, 3.0)), (5,), ())
    assert (params.allowed_token_ids, params.logprobs, params.prompt_logprobs) == ((1, 2), 3, 1)
    assert (taken.stop.stops, taken.include_stop, taken.skip_special_tokens) == (("x",), True, False)
    assert (taken.scheduling.priority, taken.scheduling.cache_salt) == (-4, "tenant/s")


def test_null_is_not_given(ask: Asker) -> None:
    nothing = dict.fromkeys(("stop", "temperature", "max_tokens", "tools", "user", "logit_bias", "n", "guided_json"))
    assert replace(ask.chat(**nothing, seed=3), response_id="", engine_id="") == replace(
        ask.chat(seed=3), response_id="", engine_id=""
    )


def test_every_choice_is_a_submit_with_its_own_id_seed_and_room(ask: Asker) -> None:
    taken = ask.completion(prompt=[[1, 2], [3] * 50], n=2, seed=11, request_id="mine")
    assert [len(submits) for submits in taken.submits()] == [2, 2]
    submits = [submit for submits in taken.submits() for submit in submits]
    assert [submit.prompt_ids for submit in submits] == [(1, 2)] * 2 + [(3,) * 50] * 2
    assert [submit.params.seed for submit in submits] == [11, choice_seed(11, 1)] * 2
    assert [submit.params.max_tokens for submit in submits] == [16, 16, 14, 14]
    assert [submit.request_id for submit in submits] == [f"{taken.engine_id}-{i}" for i in range(4)]
    assert taken.response_id == "cmpl-mine"
    assert len({ask.completion(request_id="mine").engine_id for _ in range(4)}) == 4


def test_a_seed_is_chosen_where_none_is_given(ask: Asker) -> None:
    seeds = {ask.completion().params.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


@pytest.mark.parametrize(
    ("num_prompt", "asked", "room"),
    [(10, None, 16), (60, None, 4), (63, None, 1), (60, 4, 4), (64, 0, 0), (1, 63, 63), (60, 5, 4), (63, 10**30, 1)],
)
def test_an_answer_has_the_room_that_the_prompt_leaves(
    ask: Asker, num_prompt: int, asked: int | None, room: int
) -> None:
    taken = ask.completion(prompt=[1] * num_prompt, max_tokens=asked)
    assert taken.prompts[0].max_tokens == room
    assert bool(taken.notices) == (asked is not None and asked > room)


def test_a_limit_that_the_context_cuts_is_told_once(ask: Asker) -> None:
    taken = ask.completion(prompt=[[1] * 60, [1] * 50, [1]], max_tokens=20)
    assert [prompt.max_tokens for prompt in taken.prompts] == [4, 14, 20]
    (notice,) = taken.notices
    assert notice.name == "max_tokens"
    assert notice.text == (
        "the limit of the answer is cut from 20 to 4 tokens: the context holds 64, and the prompt has 60"
    )
    for name in ("max_tokens", "max_completion_tokens"):
        chat = ask.chat(**{name: 10**30})
        assert chat.prompts[0].max_tokens == LIMIT - len(chat.prompts[0].token_ids)
        assert [notice.name for notice in chat.notices] == ["max_tokens"]
    # The checkpoint's recommendation is no demand of the caller's.
    assert ask.chat(messages=[{"role": "user", "content": "word " * 30}]).notices == ()


def test_what_must_be_generated_is_not_cut(ask: Asker) -> None:
    error = refusal(ask.completion, prompt=[1] * 60, min_tokens=5, max_tokens=10)
    assert (error.code, error.param) == ("integer_above_max_value", "min_tokens")
    assert "<= 4, but got 5" in error.message and "shorten the prompt" in error.message
    error = refusal(ask.completion, prompt=[1], min_tokens=11, max_tokens=10)
    assert "<= 10, but got 11" in error.message and "context" not in error.message
    assert ask.completion(prompt=[1] * 60, min_tokens=4, max_tokens=10).params.min_tokens == 4


@pytest.mark.parametrize(
    ("num_prompt", "asked", "words"),
    [
        (64, None, "you requested 65 tokens (64 in the prompt, 1 in the completion)"),
        (65, 0, "64 tokens. However, your prompt resulted in 65 tokens"),
        (64, 5, "you requested 65 tokens (64 in the prompt, 1 in the completion)"),
        (64, 10**30, "you requested 65 tokens (64 in the prompt, 1 in the completion)"),
    ],
)
def test_what_does_not_fit_says_the_limit_and_the_count(
    ask: Asker, num_prompt: int, asked: int | None, words: str
) -> None:
    error = refusal(ask.completion, prompt=[1] * num_prompt, max_tokens=asked)
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert words in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [[1]] * 2048, "allowed_token_ids": [*range(600)]}, "allowed_token_ids"),
        ({"n": 128, "bad_words": [f"{i} b c d e f g h i j k l m n o p q r" for i in range(600)]}, "bad_words"),
        ({"prompt": [[1] * 60] * 1000, "n": 1, "echo": True, "logprobs": 20, "max_tokens": 0}, "logprobs"),
    ],
)
def test_a_small_body_cannot_become_gigabytes(ask: Asker, body: dict[str, object], param: str) -> None:
    error = refusal(ask.completion, **body)
    assert (error.code, error.param) == ("request_exceeds_work_limit", param)
    assert f"at most {2**20 if param != 'logprobs' else 3 * 2**18} " in error.message


def test_ids_listed_twice_count_once(ask: Asker) -> None:
    assert ask.completion(allowed_token_ids=[5, 6, 5, 5]).params.allowed_token_ids == (5, 6)


def test_a_prompt_is_cut_only_where_asked_for(ask: Asker) -> None:
    ids = [*range(5, 75)]
    assert ask.completion(prompt=ids, truncate_prompt_tokens=10).prompts[0].token_ids == tuple(ids[-10:])
    # An answer as long as the context has no bound of its own, so that it costs the prompt one token alone.
    for asked, kept in ((0, 64), (4, 60), (None, 64 - 16), (63, 1), (64, 63), (10**9, 63)):
        prompt = ask.completion(prompt=ids, truncate_prompt_tokens=-1, max_tokens=asked).prompts[0]
        assert prompt.token_ids == tuple(ids[-kept:])
    assert refusal(ask.completion, prompt=ids).code == "context_length_exceeded"
    refused = refusal(ask.completion, prompt=[5] * 90, truncate_prompt_tokens=80)
    assert (refused.code, refused.param) == ("integer_above_max_value", "truncate_prompt_tokens")
    assert "<= 64" in refused.message and "80" in refused.message


def test_a_recommended_length_beyond_the_context_costs_the_prompt_one_token(
    model: ServedModel, threads: TextThreads
) -> None:
    long = replace(model, defaults=replace(DEFAULTS, max_new_tokens=1_000))
    messages = [{"role": "user", "content": "word " * 100}]
    prompt = Asker(long, threads).chat(messages=messages, truncate_prompt_tokens=-1).prompts[0]
    assert (len(prompt.token_ids), prompt.max_tokens) == (LIMIT - 1, 1)


def test_a_chat_is_rendered_and_tokenized_once(model: ServedModel, threads: TextThreads) -> None:
    ask = Asker(replace(model, max_model_len=256), threads)
    template, tokenizer = ask.model.template, ask.model.tokenizer
    assert template is not None
    messages = ({"role": "user", "content": "hi"},)
    for added in ({}, {"add_generation_prompt": False}, {"tool_choice": "none", "tools": [TOOL]}):
        text = template.render(conversation_of(messages, None, added.get("add_generation_prompt"), None, None))  # type: ignore[arg-type]
        assert ask.chat(**added).prompts[0].token_ids == tokenizer.encode(text, False)
    with_tools = ask.chat(tools=[TOOL]).prompts[0].token_ids
    assert with_tools == tokenizer.encode(template.render(conversation_of(messages, [TOOL], None, None, None)), False)
    assert with_tools != ask.chat().prompts[0].token_ids


def test_bad_words_are_both_spellings(ask: Asker) -> None:
    encode = ask.model.tokenizer.encode
    assert ask.chat(bad_words=["answer"]).params.bad_words == (encode("answer", False), encode(" answer", False))


def test_echo_with_logprobs_scores_the_prompt(ask: Asker) -> None:
    assert ask.completion(echo=True, logprobs=2).params.prompt_logprobs == 2
    assert ask.completion(echo=True).params.prompt_logprobs is None
    assert ask.completion(logprobs=2).params.prompt_logprobs is None
    assert ask.completion(echo=True, logprobs=0, prompt_logprobs=5).params.prompt_logprobs == 5


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"allowed_token_ids": [VOCAB_SIZE]}, "integer_above_max_value", "allowed_token_ids[0]"),
        ({"stop_token_ids": [1, -1]}, "integer_below_min_value", "stop_token_ids[1]"),
        ({"logit_bias": {str(VOCAB_SIZE): 1}}, "integer_above_max_value", f"logit_bias.{VOCAB_SIZE}"),
        ({"min_tokens": 10, "max_tokens": 5}, "integer_above_max_value", "min_tokens"),
        ({"truncate_prompt_tokens": 0}, "integer_below_min_value", "truncate_prompt_tokens"),
        ({"request_id": "a b"}, "invalid_value", "request_id"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "invalid_value", "prompt_logprobs"),
    ],
)
def test_what_fields_and_model_forbid(ask: Asker, body: dict[str, object], code: str, param: str) -> None:
    for work in (ask.chat, ask.completion):
        error = refusal(work, **body)
        assert (error.code, error.param) == (code, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_what_chat_fields_forbid_together(ask: Asker, body: dict[str, object], param: str) -> None:
    error = refusal(ask.chat, **body)
    assert (error.code, error.param) == ("invalid_value", param)


def test_prompts_that_cannot_be(ask: Asker) -> None:
    assert refusal(ask.completion, prompt="").message == "Invalid 'prompt': it has no tokens. Expected at least one."
    error = refusal(ask.completion, prompt=[[1], [2, VOCAB_SIZE]])
    assert (error.code, error.param) == ("integer_above_max_value", "prompt[1][1]")
    assert refusal(ask.completion, prompt=[1, -1]).param == "prompt[1]"
    error = refusal(ask.completion, prompt=[[1]] * 100, n=100)
    assert (error.code, error.param) == ("request_exceeds_work_limit", "n")
    assert "100 prompts x 100 choices per prompt = 10000 choices. Expected at most 2048" in error.message


def test_a_model_without_a_template_refuses_chats(model: ServedModel, threads: TextThreads) -> None:
    error = refusal(Asker(replace(model, template=None), threads).chat)
    assert (error.code, error.param) == ("unsupported_value", "messages")


def test_models_are_known_by_all_their_names(ask: Asker) -> None:
    assert [ask.intake.check_model(name) for name in ("a", "b", None)] == ["a", "b", "a"]
    error = refusal(lambda: ask.intake.check_model("gpt-4"))
    assert error.message == (
        "The model `gpt-4` does not exist or you do not have access to it. This server serves `a`, `b`."
    )


def test_only_so_many_prompts_may_wait() -> None:
    async def fill() -> None:
        threads = TextThreads(max_pending=1)
        try:
            first = asyncio.create_task(threads.run(release.wait, 1))
            await asyncio.sleep(0)
            with pytest.raises(RequestError) as caught:
                await threads.run(lambda: True, 1)
            assert caught.value.code == "server_is_overloaded"
            release.set()
            assert await first
            assert await threads.run(lambda: 7, 1) == 7
        finally:
            release.set()
            threads.close()

    release = threading.Event()
    asyncio.run(fill())


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": [[1] * 60] * 1_000, "n": 2, "max_tokens": 1}, None, ""),
        ({"prompt": [[1]] * 17, "n": 128}, "n", "17 prompts x 128 choices per prompt = 2176 choices"),
        (
            {"prompt": "a", "n": 128, "logprobs": 20, "max_tokens": 63},
            None,
            "",
        ),
        (
            {"prompt": [[1]] * 16, "n": 128, "logprobs": 20, "max_tokens": 30},
            "max_tokens",
            "2048 choices x 30 tokens x 21 log probabilities per token = 1290240 log probabilities",
        ),
        (
            {"prompt": [[1] * 60] * 500, "echo": True, "logprobs": 19, "prompt_logprobs": 20, "n": 2, "max_tokens": 0},
            "prompt_logprobs",
            "30000 prompt tokens x 2 choices per prompt x 41 log probabilities",
        ),
    ],
)
def test_products_of_fields_are_bounded_with_their_factors(
    ask: Asker, body: dict[str, object], param: str | None, words: str
) -> None:
    if param is None:
        assert ask.completion(**body).num_choices > 0
        return
    error = refusal(ask.completion, **body)
    assert (error.code, error.param) == ("request_exceeds_work_limit", param)
    assert words in error.message and "Expected at most" in error.message


def test_prompt_tokens_times_choices_are_bounded(ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit and one above it, for ids, texts and conversations."""
    monkeypatch.setattr("inferd.server.generate.work.MAX_PROMPT_IDS", 120)
    assert ask.completion(prompt=[1] * 60, n=2).num_choices == 2
    for body in ({"prompt": [1] * 61, "n": 2, "max_tokens": 1}, {"prompt": [[1], [1] * 60], "n": 2}):
        error = refusal(ask.completion, **body)
        assert (error.code, error.param) == ("request_exceeds_work_limit", "prompt")
        assert "61 prompt tokens x 2 choices per prompt = 122 prompt tokens" in error.message
    assert refusal(ask.completion, prompt="a b " * 12, n=128).code == "request_exceeds_work_limit"
    error = refusal(ask.chat, n=128)
    assert (error.code, error.param) == ("request_exceeds_work_limit", "messages")


def test_a_default_answer_stays_within_the_budget_of_log_probabilities(
    ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.server.generate.work.MAX_LOGPROBS", 120)
    assert ask.chat(logprobs=True, top_logprobs=5).prompts[0].max_tokens == 20
    assert ask.chat(logprobs=True, top_logprobs=5, n=2).prompts[0].max_tokens == 10
    assert ask.chat(logprobs=True, top_logprobs=5, n=2, max_tokens=10).prompts[0].max_tokens == 10
    assert refusal(ask.chat, logprobs=True, top_logprobs=5, n=2, max_completion_tokens=11).param == (
        "max_completion_tokens"
    )


def test_log_probabilities_are_counted_for_the_tokens_that_the_context_leaves(
    ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.server.generate.work.MAX_LOGPROBS", 24)
    assert ask.completion(prompt=[1] * 60, logprobs=5, max_tokens=10**9).prompts[0].max_tokens == 4
    error = refusal(ask.completion, prompt=[1] * 59, logprobs=5, max_tokens=10**9)
    assert "1 choices x 5 tokens x 6 log probabilities per token = 30" in error.message


def test_a_prompt_gets_one_bos(model: ServedModel, threads: TextThreads) -> None:
    """Prompts that a client rendered itself begin with the BOS. A second one makes answers worse."""
    bos = "<|im_start|>"
    ask = Asker(replace(model, tokenizer=with_bos(MODEL_PATH)), threads)
    twice, once = ask.completion(prompt=f"{bos}hi"), ask.completion(prompt="hi")
    assert twice.prompts[0].token_ids == once.prompts[0].token_ids
    assert [notice.name for notice in twice.notices] == ["second_bos"] and once.notices == ()
    assert bos in twice.notices[0].text
    bare = ask.completion(prompt=f"{bos}hi", add_special_tokens=False)
    assert (bare.prompts, bare.notices) == (twice.prompts, ())
    rendered = ask.chat(add_special_tokens=True)
    assert rendered.prompts[0].text is not None and rendered.prompts[0].text.startswith(bos)
    assert rendered.prompts[0].token_ids == ask.chat().prompts[0].token_ids
    assert [notice.name for notice in rendered.notices] == ["second_bos"]
    cut = ask.completion(prompt=f"{bos}hi", truncate_prompt_tokens=1)
    assert cut.prompts[0].token_ids == once.prompts[0].token_ids[-1:]
