"""Compares a choice's events, collected into results, with the text computed from all of its ids at once."""

from __future__ import annotations

import asyncio
import codecs
import itertools
from bisect import bisect_left
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tokenizers import Tokenizer

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import Delta, Failure, FinishReason, Submit, WireLogprobs
from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.server.auth.quotas import KeyAccount, Quota
from inferd.server.dispatch.token_stream import TokenStream, merge
from inferd.server.generate import answer_events
from inferd.server.generate import stream as stream_module
from inferd.server.generate.choice import Choice
from inferd.server.generate.events import ChoiceResult, Event, Finished, ResultBuilder, TextDelta
from inferd.server.generate.request import GenerateRequest, Prompt, choice_seed
from inferd.server.generate.stream import ChoiceStreams
from inferd.server.schema.repetition import RepetitionRule
from inferd.server.text.detokenizer import TokenBytes
from inferd.server.text.stops import StopTables
from inferd.server.tools.detect import Clues, detect
from inferd.server.tools.parser_config import ParserConfig

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
PROMPT_IDS = (5, 6, 7)
STOP_ID = 9
CUTS = st.lists(st.integers(0, 40), max_size=8)
IDS = st.lists(st.integers(0, 400), max_size=24)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))


@cache
def table() -> TokenBytes:
    return TokenBytes(tokenizer())


def request(
    stop: tuple[str, ...] = (), *, logprobs: int | None = None, min_tokens: int = 0, include_stop: bool = False
) -> GenerateRequest:
    params = SamplingParams(
        max_tokens=64, seed=1, logprobs=logprobs, min_tokens=min_tokens, stop_token_ids=(STOP_ID,), eos_token_ids=(2,)
    )
    return GenerateRequest(
        response_id="cmpl-1",
        engine_id="cmpl-1",
        prompts=(Prompt(PROMPT_IDS, 64),),
        n=1,
        params=params,
        stop=StopTables.of(stop),
        include_stop=include_stop,
        skip_special_tokens=True,
        echo=False,
        scheduling=SchedulingParams(),
    )


def scored(token_id: int) -> WireLogprobs:
    return WireLogprobs(token_id, -0.25, 1, ())


def deltas(ids: list[int], cuts: list[int], reason: FinishReason, *, logprobs: bool = False) -> list[Delta]:
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    spans = list(itertools.pairwise(bounds))
    return [
        Delta(
            request_id="cmpl-1-0",
            token_ids=tuple(ids[a:b]),
            logprobs=tuple(map(scored, ids[a:b])) if logprobs else (),
            finish_reason=reason if i == len(spans) - 1 else None,
            stop_token_id=ids[-1] if reason == "stop" and i == len(spans) - 1 else None,
        )
        for i, (a, b) in enumerate(spans)
    ]


def events_of(asked: GenerateRequest, given_deltas: list[Delta]) -> list[Event]:
    choice = Choice(0, asked, table())
    events: list[Event] = []
    for delta in given_deltas:
        events.extend(choice.feed(delta))
        if choice.is_finished:
            break
    return events


def folded(asked: GenerateRequest, events: list[Event]) -> ChoiceResult:
    fold = ResultBuilder(asked)
    for event in events:
        fold.add(event)
    return fold.results()[0]


@settings(deadline=None)
@given(ids=IDS, cuts=CUTS)
def test_text_is_the_librarys_however_the_ids_arrive(ids: list[int], cuts: list[int]) -> None:
    asked = request()
    result = folded(asked, events_of(asked, deltas(ids, cuts, "length")))
    assert result.text == tokenizer().decode(ids, skip_special_tokens=True)
    assert (result.token_ids, result.reason, result.stop_reason) == (tuple(ids), "length", None)


@settings(deadline=None)
@given(ids=IDS, cuts=CUTS, stop=st.lists(st.text("ae to", min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_stop_string_ends_every_cut_at_the_same_token(ids: list[int], cuts: list[int], stop: list[str]) -> None:
    asked = request(tuple(stop), logprobs=0)
    whole = folded(asked, events_of(asked, deltas(ids, list(range(len(ids))), "length", logprobs=True)))
    result = folded(asked, events_of(asked, deltas(ids, cuts, "length", logprobs=True)))
    assert result == whole
    assert [token.logprobs.token_id for token in result.scored] == list(result.token_ids)
    text = tokenizer().decode(list(result.token_ids), skip_special_tokens=True)
    assert result.text == (text if result.stop_reason is None else text.partition(str(result.stop_reason))[0])
    if result.reason == "stop":
        before = tokenizer().decode(list(result.token_ids[:-1]), skip_special_tokens=True).removesuffix("\ufffd")
        assert str(result.stop_reason) not in before, "a token after the one that completed the stop string was counted"


class Replay:
    """A router of one choice whose deltas are known."""

    num_generated = 0
    scheduled_s: float | None = None

    def __init__(self, given_deltas: list[Delta]) -> None:
        self._deltas = iter(given_deltas)
        self.aborts: list[str] = []

    def submit_choices(self, submits: tuple[object, ...], **_: object) -> list[Replay]:
        return [self] * len(submits)

    def __aiter__(self) -> Replay:
        return self

    async def __anext__(self) -> Delta:
        for delta in self._deltas:
            return delta
        raise StopAsyncIteration

    def abort(self, reason: str = "abort") -> None:
        self.aborts.append(reason)


class Silent(Replay):
    """A stream that never yields."""

    async def __anext__(self) -> Delta:
        return await asyncio.Event().wait()  # type: ignore[return-value]


@pytest.mark.parametrize("stop", [(), ("nope",), ("e",)])
def test_a_pile_of_tokens_is_read_as_if_it_had_come_singly(stop: tuple[str, ...]) -> None:
    """Long deltas are read in slices, so that other tasks get their turn. The result does not change."""
    ids = [*range(3, 1_500)]
    asked = request(stop, logprobs=0)

    async def events(router: Any) -> list[Event]:
        return [event async for event in (await ChoiceStreams.begin(router, asked, table())).events()]

    results = []
    for cuts in ([], list(range(len(ids)))):
        router = Replay(deltas(ids, cuts, "length", logprobs=True))
        results.append(folded(asked, asyncio.run(events(router))))
    assert results[0] == results[1]
    assert results[0].reason == ("stop" if stop == ("e",) else "length")


@pytest.mark.parametrize("cuts", [[], [1, 2, 3], list(range(40))])
@pytest.mark.parametrize("stop", [(), ("e",)])
def test_a_key_is_charged_for_the_answer_however_its_tokens_came(stop: tuple[str, ...], cuts: list[int]) -> None:
    """A step may give tokens behind the one that completes a stop string. The answer does not have them."""
    ids = tokenizer().encode("One two three four five six").ids
    account = KeyAccount(Quota(tokens_per_minute=1_000), lambda: 0.0)
    asked = replace(request(stop), account=account)

    async def run() -> list[Event]:
        router: Any = Replay(deltas(ids, cuts, "length"))
        router.num_generated = len(ids)
        return [event async for event in (await ChoiceStreams.begin(router, asked, table())).events()]

    result = folded(asked, asyncio.run(run()))
    assert (len(result.token_ids) < len(ids)) == bool(stop), "the stop string cut nothing off"
    left = 1_000 - len(PROMPT_IDS) - len(result.token_ids)
    assert account.headers()["x-ratelimit-remaining-tokens"] == str(left)


def test_a_key_is_charged_once_for_an_answer_that_nobody_reads() -> None:
    account = KeyAccount(Quota(tokens_per_minute=1_000), lambda: 0.0)

    async def run() -> None:
        router: Any = Silent([])
        router.num_generated = 7
        streams = await ChoiceStreams.begin(router, replace(request(), account=account), table())
        events = streams.events()  # closed before it began, so that no code of it runs
        streams.close()
        await events.aclose()
        streams.close()

    asyncio.run(run())
    assert account.headers()["x-ratelimit-remaining-tokens"] == str(1_000 - len(PROMPT_IDS) - 7)


@pytest.mark.parametrize(
    ("code", "scheduled_s", "n", "is_given_back"),
    [
        ("rate_limit_exceeded", None, 1, True),
        ("server_is_overloaded", None, 1, True),
        ("engine_error", None, 1, False),
        ("rate_limit_exceeded", 1.0, 1, False),
        ("rate_limit_exceeded", None, 2, True),
        ("rate_limit_exceeded", 1.0, 2, False),
    ],
)
def test_a_prompt_that_was_shed_is_given_back(
    code: str, scheduled_s: float | None, n: int, is_given_back: bool
) -> None:
    async def run() -> None:
        account = KeyAccount(Quota(tokens_per_minute=100), lambda: 0.0)
        router = Replay([Delta(request_id="a", finish_reason="error", failure=Failure(code, "no"))])
        router.scheduled_s = scheduled_s
        streams = await ChoiceStreams.begin(router, replace(request(), account=account, n=n), table())  # type: ignore[arg-type]
        with pytest.raises(RequestError):
            async for _ in streams.events():
                pass
        left = 100 if is_given_back else 100 - len(PROMPT_IDS)
        assert account.headers()["x-ratelimit-remaining-tokens"] == str(left)

    asyncio.run(run())


def test_of_several_prompts_those_are_given_back_of_which_nothing_was_begun() -> None:
    """A prompt counts as computed if one of its choices was begun, and one refusal ends the whole request."""
    shed = Delta(request_id="a", finish_reason="error", failure=Failure("rate_limit_exceeded", "no"))
    streams = [Silent([]), Replay([shed]), Silent([]), Silent([])]
    streams[0].scheduled_s = 1.0

    class Router:
        waiting = iter(streams)

        def submit_choices(self, submits: tuple[object, ...], **_: object) -> list[Replay]:
            return [next(self.waiting) for _ in submits]

    async def run() -> None:
        account = KeyAccount(Quota(tokens_per_minute=100), lambda: 0.0)
        asked = replace(request(), account=account, n=2, prompts=(request().prompts[0],) * 2)
        streams = await ChoiceStreams.begin(Router(), asked, table())  # type: ignore[arg-type]
        with pytest.raises(RequestError):
            async for _ in streams.events():
                pass
        assert account.headers()["x-ratelimit-remaining-tokens"] == str(100 - len(PROMPT_IDS))

    asyncio.run(run())


@pytest.mark.parametrize("num_choices", [2, 9])
def test_choices_are_read_in_the_order_of_their_tokens_until_all_have_ended(num_choices: int) -> None:
    """Each turn gives one choice a token, and the last turns give the ends. Each is read before the next turn."""
    turns = [(i * 5) % num_choices for i in range(3 * num_choices)]
    ends = list(range(num_choices))[::-1]

    async def run() -> None:
        def submit(i: int) -> Submit:
            return Submit(request_id=str(i), prompt_ids=(1,), params=SamplingParams(max_tokens=9, seed=1))

        streams = [TokenStream(submit(i), lambda _: None) for i in range(num_choices)]
        read: list[int] = []

        async def take() -> None:
            async for index, delta in stream_module._merged(list(streams)):
                assert delta.request_id == str(index)
                read.append(index)

        taking = asyncio.ensure_future(take())
        for turn, index in enumerate((*turns, *ends)):
            reason: Any = "length" if turn >= len(turns) else None
            streams[index].push(Delta(request_id=str(index), token_ids=(turn,), finish_reason=reason))
            for _ in range(5):
                await asyncio.sleep(0)
            assert read[-1:] == [index]
        await taking
        assert read == [*turns, *ends]

    asyncio.run(run())


@settings(deadline=None)
@given(ids=IDS, cuts=CUTS)
def test_offsets_point_at_each_tokens_text(ids: list[int], cuts: list[int]) -> None:
    asked = request(logprobs=0)
    result = folded(asked, events_of(asked, deltas(ids, cuts, "length", logprobs=True)))
    for i, token in enumerate(result.scored):
        whole = codecs.getincrementaldecoder("utf-8")("replace").decode(table().join(ids[:i], skip_special=True))
        assert token.offset == len(whole)


def test_the_token_that_ends_an_answer_is_counted_and_not_shown() -> None:
    asked = request()
    hello = tokenizer().encode("Hello").ids
    end = tokenizer().get_vocab()["<|im_end|>"]
    result = folded(asked, events_of(asked, deltas([*hello, end], [], "stop")))
    assert (result.text, result.token_ids, result.stop_reason) == ("Hello", (*hello, end), None)


def test_a_callers_stop_token_is_named_and_shown_only_if_asked_for() -> None:
    shown = table().of(STOP_ID).decode()
    for include in (False, True):
        asked = request(include_stop=include)
        result = folded(asked, events_of(asked, deltas([STOP_ID], [], "stop")))
        assert (result.text, result.stop_reason) == (shown if include else "", STOP_ID)


@pytest.mark.parametrize("min_tokens", range(8))
@pytest.mark.parametrize("text", ["ababab", "bbbbbb"])
def test_stop_strings_wait_for_the_least_number_of_tokens(text: str, min_tokens: int) -> None:
    """One token for each character: the stop string may only end behind the first `min_tokens` tokens."""
    ids = [tokenizer().get_vocab()[char] for char in text]
    asked = request(("b",), min_tokens=min_tokens)
    result = folded(asked, events_of(asked, deltas(ids, [1, 2, 3, 4, 5], "length")))
    end = text.find("b", min_tokens)
    expected = (text, tuple(ids), "length") if end < 0 else (text[:end], tuple(ids[: end + 1]), "stop")
    assert (result.text, result.token_ids, result.reason) == expected


@pytest.mark.parametrize(
    ("num_ids", "cuts", "min_tokens", "reason", "num_kept"),
    [
        (2, [], 0, "length", 2),
        (3, [], 0, "length", 3),  # the model ends the answer at the token that completes the repetition
        (3, [1, 2], 0, "length", 3),
        (4, [], 0, "repetition", 3),
        (4, [1, 2, 3], 0, "repetition", 3),
        (6, [1, 2, 3, 4, 5], 4, "repetition", 4),
        (4, [], 4, "length", 4),
    ],
)
def test_a_repetition_ends_an_answer_that_does_not_end_by_itself(
    num_ids: int, cuts: list[int], min_tokens: int, reason: str, num_kept: int
) -> None:
    """Three equal tokens are a repetition, but not before `min_tokens`."""
    asked = replace(request(min_tokens=min_tokens), repetition=RepetitionRule(1, 1, 3))
    ids = [tokenizer().get_vocab()["a"]] * num_ids
    choice = Choice(0, asked, table())
    for delta in deltas(ids, cuts, "length"):
        if not choice.is_finished:
            list(choice.feed(delta))
    result = folded(asked, events_of(asked, deltas(ids, cuts, "length")))
    assert (result.reason, len(result.token_ids)) == (reason, num_kept)
    assert choice.was_stopped_by_text == (reason == "repetition"), "the engine has to be told"


def test_an_unfinished_character_is_shown_at_the_end_only() -> None:
    ids = [i for byte in "a\u20ac".encode()[:-1] for i in range(400) if table().of(i) == bytes((byte,))]
    asked = request()
    events = events_of(asked, deltas(ids, list(range(len(ids))), "length"))
    texts = [event.text for event in events if isinstance(event, TextDelta)]
    assert "".join(texts) == "a\ufffd"
    assert isinstance(events[-1], Finished)
    assert texts[-1] == "\ufffd"


THOUGHT = "<think>One, two \u20ac.</think>"
CALL = '<tool_call>{"name": "f", "arguments": {"a": "\u20ac b"}}</tool_call>'


def test_each_stretch_of_reasoning_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may begin thousands of them, and the event loop counts their tokens at each token."""
    num_searches = 0

    def counting(offsets: list[int], place: int) -> int:
        nonlocal num_searches
        num_searches += 1
        return bisect_left(offsets, place)

    monkeypatch.setattr(answer_events, "bisect_left", counting)
    asked = replace(request(), parser_config=ParserConfig(detect(Clues(), "hermes", "think"), with_calls=False))
    ids = tokenizer().encode(f"{THOUGHT} Well. " * 40).ids
    result = folded(asked, events_of(asked, deltas(ids, list(range(len(ids))), "length")))
    assert result.num_reasoning_tokens == 40 * len(tokenizer().encode(THOUGHT).ids)
    assert num_searches <= 2 * len(ids)


def reading(**fields: Any) -> ParserConfig:
    return ParserConfig(detect(Clues(), "hermes", "think"), with_calls=True, **fields)


def answer(text: str, asked: GenerateRequest, cuts: list[int], reason: FinishReason = "stop") -> ChoiceResult:
    """The result of a text that the model ends, if the reason is `stop`."""
    ids = [*tokenizer().encode(text).ids, *([2] if reason == "stop" else [])]
    return folded(asked, events_of(asked, deltas(ids, cuts, reason)))


@settings(deadline=None)
@given(cuts=CUTS, stop=st.sampled_from([(), ("never",), (" b",), ("two",), ("</",), ("ell",), ("\n",), ("{",)]))
def test_reasoning_and_calls_are_the_same_however_the_ids_arrive(cuts: list[int], stop: tuple[str, ...]) -> None:
    """Stop strings see content alone: neither reasoning, nor arguments, nor markers."""
    asked = replace(request(stop, logprobs=0), parser_config=reading())
    ids = tokenizer().encode(f"{THOUGHT} Well.\n{CALL}").ids
    whole = folded(asked, events_of(asked, deltas(ids, [], "length", logprobs=True)))
    result = folded(asked, events_of(asked, deltas(ids, cuts, "length", logprobs=True)))
    without_ids = [[(call.name, call.arguments) for call in found.calls] for found in (whole, result)]
    assert without_ids[0] == without_ids[1]
    assert replace(result, calls=()) == replace(whole, calls=())
    is_stopped = stop == ("ell",)
    assert (result.text, result.reasoning) == ("W" if is_stopped else "Well.", "One, two \u20ac.")
    assert without_ids[1] == ([] if is_stopped else [("f", '{"a": "\u20ac b"}')])
    assert (result.reason, result.stop_reason) == (("stop", "ell") if is_stopped else ("length", None))
    # Well-formed reasoning ends at the end of a token, so that its tokens are those of its text.
    assert result.num_reasoning_tokens == len(tokenizer().encode(THOUGHT).ids)


@pytest.mark.parametrize("cuts", [[], [5, 9], list(range(60))])
def test_a_stop_string_inside_reasoning_ends_it_only_if_asked_for(cuts: list[int]) -> None:
    for stop, text in (("two", "One, "), (".", "One, two \u20ac"), ("Well", "One, two \u20ac.")):
        asked = replace(request((stop,)), parser_config=reading(stops_reasoning=True))
        result = answer(f"{THOUGHT}Well.", asked, cuts)
        assert (result.reasoning, result.text, result.reason, result.stop_reason) == (text, "", "stop", stop)


@pytest.mark.parametrize("cuts", [[], [5, 9], list(range(60))])
def test_no_stop_string_reaches_from_one_part_of_an_answer_into_another(cuts: list[int]) -> None:
    asked = replace(request(("ab", "y.Z")), parser_config=reading(stops_reasoning=True))
    result = answer(f"<think>a</think>b, ay.{CALL}Z and a", asked, cuts)
    assert (result.text, result.reasoning, result.reason) == ("b, ay.Z and a", "a", "tool_calls")


@pytest.mark.parametrize("cuts", [[], [5, 9], list(range(60))])
def test_a_stop_string_behind_a_call_leaves_the_call_whole(cuts: list[int]) -> None:
    result = answer(f"{CALL}\nDone. {CALL}", replace(request(("e.",)), parser_config=reading()), cuts)
    assert [(call.name, call.arguments) for call in result.calls] == [("f", '{"a": "\u20ac b"}')]
    assert (result.text, result.reason, result.stop_reason) == ("Don", "tool_calls", "e.")


def test_a_stop_string_of_blanks_ends_content_and_not_the_call_behind_it() -> None:
    for text, stop, content, stop_reason in (
        (f"Well.\n{CALL}", "\n", "Well.", None),
        ("Well.\nYes.", "\n", "Well.", "\n"),
        ("Well.\n", "\n", "Well.", "\n"),
        (CALL.replace('{"name', '\n{"name'), "\n", "", None),
    ):
        for cuts in ([], list(range(60))):
            result = answer(text, replace(request((stop,)), parser_config=reading()), cuts)
            assert (result.text, result.stop_reason) == (content, stop_reason)
            assert bool(result.calls) == (CALL[-30:] in text)


@pytest.mark.parametrize("cuts", [[], [5, 9], list(range(60))])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_works_in_content_alone(cuts: list[int], include: bool) -> None:
    """The server looks for it: the engine cannot tell the parts of an answer apart."""
    (comma,), (dot,) = tokenizer().encode(",").ids, tokenizer().encode(".").ids
    asked = replace(request(include_stop=include), parser_config=reading(), content_stop_ids=frozenset((comma, dot)))
    thought, called = "<think>A, b.</think>", CALL.replace("\u20ac b", "a, b.")
    result = answer(f"{thought}{called}Yes, no.", asked, cuts)
    assert (result.text, result.reasoning, result.stop_reason) == ("Yes," if include else "Yes", "A, b.", comma)
    assert [call.arguments for call in result.calls] == ['{"a": "a, b."}']
    assert result.token_ids[-1] == comma
    in_reasoning = replace(asked, parser_config=reading(stops_reasoning=True))
    assert answer(f"{thought}Yes", in_reasoning, cuts).reasoning == ("A," if include else "A")
    late = replace(asked, params=structs.replace(asked.params, min_tokens=200))
    assert answer(f"{thought}Yes, no.", late, cuts).text == "Yes, no."


@pytest.mark.parametrize("end", [len(CALL) - 13, len(CALL) - 18, len(CALL)])
def test_a_call_that_is_not_whole_never_ends_with_tool_calls(end: int) -> None:
    """Whether a limit ended it, or the model itself."""
    asked, is_whole = replace(request(), parser_config=reading()), end == len(CALL)
    for reason, wanted in (("stop", "tool_calls" if is_whole else "length"), ("length", "length")):
        result = answer(CALL[:end], asked, [], reason)  # type: ignore[arg-type]
        assert (result.reason, len(result.calls), result.text) == (wanted, 1, "")


def test_markers_that_belong_to_nothing_are_counted() -> None:
    asked = replace(request(), parser_config=reading())
    choice = Choice(0, asked, table())
    for delta in deltas(tokenizer().encode(f"a</think>b {CALL}</tool_call>").ids, [3, 4], "length"):
        list(choice.feed(delta))
    assert choice.repairs == {"stray_marker": 2, "call_in_other_format": 0}


def test_special_tokens_are_seen_by_the_reader_and_not_by_the_caller() -> None:
    """The parser sees markers that are special tokens. Other special tokens stay hidden, and without a parser all
    do."""
    markers = {"open": "<|im_start|>", "close": "<|endoftext|>"}
    own = {"start_anchor": "-", "fields": {"thinking": markers, "content": {}}}
    ids = [1, *tokenizer().encode("Hm.").ids, 0, *tokenizer().encode("Yes").ids, 2, *tokenizer().encode("!").ids]
    asked = replace(
        request(), parser_config=ParserConfig(detect(Clues(response_template=own)), False, kept_ids=frozenset((0, 1)))
    )
    result = folded(asked, events_of(asked, deltas(ids, [3], "length")))
    assert (result.reasoning, result.text) == ("Hm.", "Yes!")
    assert folded(request(), events_of(request(), deltas(ids, [3], "length"))).text == "Hm.Yes!"


def test_the_ids_of_calls_fit_the_template_that_reads_them() -> None:
    ids = tokenizer().encode("[TOOL_CALLS]f[ARGS]{}").ids
    asked = replace(request(), parser_config=ParserConfig(detect(Clues(), "mistral_args"), with_calls=True))
    (call,) = folded(asked, events_of(asked, deltas(ids, [], "length"))).calls
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_a_failure_of_the_engine_is_raised_with_its_code() -> None:
    failure = Failure("numerical_error", "the logits hold a NaN")
    with pytest.raises(RequestError) as caught:
        events_of(request(), [Delta(request_id="x", finish_reason="error", failure=failure)])
    assert caught.value.code == "numerical_error"


def test_seeds_of_choices_are_the_documented_hash() -> None:
    assert choice_seed(7, 0) == 7
    assert choice_seed(7, 1) == 2136759435719648, "answers given before could not be made again"
    seeds = {choice_seed(seed, choice) for seed in range(50) for choice in range(1, 50)}
    assert len(seeds) == 50 * 49
    assert max(seeds) < 2**53


@pytest.mark.parametrize("extra", [-1, 0, 1, stream_module._SLICE + 3])
@pytest.mark.parametrize("reason", [None, "stop", "error"])
def test_a_long_delta_says_in_pieces_what_it_says_whole(extra: int, reason: FinishReason | None) -> None:
    """A field that occurs once comes with the first piece or, if it ends the choice, with the last."""
    ids = tuple(range(stream_module._SLICE + extra))
    whole = Delta(
        request_id="a",
        token_ids=ids,
        logprobs=tuple(map(scored, ids)),
        prompt_logprobs=(scored(1), scored(2)),
        finish_reason=reason,
        stop_token_id=ids[-1] if reason == "stop" else None,
        num_cached_tokens=7,
        num_drafts=5,
        failure=Failure("engine_error", "it broke") if reason == "error" else None,
    )
    pieces = stream_module._slices(whole)
    assert merge(pieces) == whole
    assert [len(piece.token_ids) for piece in pieces] == [
        min(stream_module._SLICE, len(ids) - start) for start in range(0, len(ids), stream_module._SLICE)
    ]
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    assert not any(piece.prompt_logprobs for piece in pieces[1:])
    ends = [(piece.finish_reason, piece.stop_token_id, piece.failure) for piece in pieces[:-1]]
    assert ends == [(None, None, None)] * len(ends)
