"""One grammar of an answer: its reasoning, content and calls, also if a model writes their markers loosely."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from inferd.server.tools.answer_parser import AnswerParser
from inferd.server.tools.builtin import CALLS
from inferd.server.tools.detect import PLAIN_CALLS
from inferd.server.tools.parser_config import ParserConfig
from inferd.server.tools.pieces import CallArguments, CallBegun, Content, Piece, Reasoning, joined
from tests.unit.test_tool_formats import Calls, format_of, read, reading, shown
from tests.unit.tool_samples import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, NOW, PARIS, SEP, TOOLS, call, dumped

PARIS_CALL = f"<tool_call>\n{call(*PARIS)}\n</tool_call>"
NOW_CALL = f"<tool_call>\n{call(*NOW)}\n</tool_call>"
CODER_CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
GLM_CALL = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
START = "<|start|>assistant"
OPEN, GEMMA = "<|im_start|>assistant\n<think>\n", "<|turn>model\n"

Answer = tuple[str, str, Calls]
LOOSE: dict[str, tuple[str, str, str, str, Answer]] = {
    "a call that reasoning ends with": (
        "qwen3_coder", "think", OPEN, f"I look.\n{CODER_CALL}", ("", "I look.", (PARIS,)),
    ),
    "a call instead of reasoning": ("glm45", "think", "<|assistant|><think>", GLM_CALL, ("", "", (PARIS,))),
    "two calls that reasoning ends with": (
        "hermes", "think", OPEN, f"Both.\n{PARIS_CALL}\n{NOW_CALL}\n", ("", "Both.", (PARIS, NOW)),
    ),
    "a call and then the end of reasoning": (
        "hermes", "think", OPEN, f"I look.\n{PARIS_CALL}\n</think>\n", ("", "I look.", (PARIS,)),
    ),
    "a call that reasoning mentions": (
        "hermes", "think", OPEN, f"Say {PARIS_CALL} or not?\n</think>\n\n{NOW_CALL}",
        ("", f"Say {PARIS_CALL} or not?", (NOW,)),
    ),
    "a call that is tried in reasoning": (
        "hermes", "think", OPEN, f"So:\n{PARIS_CALL}\n</think>\n{PARIS_CALL}", ("", f"So:\n{PARIS_CALL}", (PARIS,)),
    ),
    "a call and few words in reasoning that has no end": (
        "hermes", "think", OPEN, f"So:\n{PARIS_CALL}\nI wait.", ("I wait.", "So:", (PARIS,)),
    ),
    "a call and many words in reasoning that has no end": (
        "hermes", "think", OPEN, f"So:\n{PARIS_CALL}\n{'Or not. ' * 40}", (
            "", f"So:\n{PARIS_CALL}\n{'Or not. ' * 40}", ()),
    ),
    "two calls and words about them": (
        "hermes", "think", OPEN, f"{PARIS_CALL} or {NOW_CALL}? The first.</think>{PARIS_CALL}", (
            "", f"{PARIS_CALL} or {NOW_CALL}? The first.", (PARIS,)),
    ),
    "a marker that reasoning mentions": (
        "hermes", "think", OPEN, "A <tool_call> it is.</think>No.", ("No.", "A <tool_call> it is.", ()),
    ),
    "reasoning begun twice": ("none", "think", OPEN, "<think>Hm.\n</think>\nYes.", ("Yes.", "Hm.", ())),
    "reasoning begun in its middle": ("none", "think", "", "<think>A <think> B</think>C", ("C", "A  B", ())),
    "reasoning ended twice": ("none", "think", OPEN, "Hm.</think>\n</think>\n\nYes.", ("Yes.", "Hm.", ())),
    "an end of reasoning alone": ("none", "mistral", "", "Yes.[/THINK] No.", ("Yes. No.", "", ())),
    "an empty channel": ("gemma4", "gemma4", GEMMA, "<|channel>thought<channel|>Yes.", ("Yes.", "", ())),
    "a channel without its name": ("gemma4", "gemma4", GEMMA, "<|channel>Hm.<channel|>Yes.", ("Yes.", "Hm.", ())),
    "a channel whose text begins like its name": (
        "gemma4", "gemma4", GEMMA, "<|channel>thoughtless<channel|>Yes.", ("Yes.", "thoughtless", ()),
    ),
    "ends of channels alone": (
        "gemma4", "gemma4", GEMMA, "Yes.<channel|><|channel>thought\n<channel|><channel|>", ("Yes.", "", ()),
    ),
    "an end of a call alone": ("hermes", "none", "", f"{PARIS_CALL}\n</tool_call>\nDone.", ("Done.", "", (PARIS,))),
    "a brace too many": (
        "hermes", "none", "", f"<tool_call>\n{call(*PARIS)}}}\n</tool_call>", ("", "", (PARIS,)),
    ),
    "a comma behind the last part": (
        "hermes", "none", "",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "hours": [1, 2,],},}\n</tool_call>',
        ("", "", (("get_weather", {"city": "Paris", "hours": [1, 2]}),)),
    ),
    "a comma behind the last call": (
        "mistral", "none", "", f"[TOOL_CALLS] [{call(*PARIS)}, {call(*NOW)}, ]", ("", "", (PARIS, NOW)),
    ),
    "a call without its list": ("mistral", "none", "", f"[TOOL_CALLS] {call(*PARIS)}", ("", "", (PARIS,))),
    "a marker twice": ("mistral", "none", "", f"[TOOL_CALLS] [TOOL_CALLS] [{call(*PARIS)}]", ("", "", (PARIS,))),
    "arguments without their marker": (
        "mistral_args", "none", "", f"I look.[TOOL_CALLS]get_weather{dumped(PARIS[1])}[TOOL_CALLS]time.now{{}}",
        ("I look.", "", (PARIS, NOW)),
    ),
    "a line break at the end of an argument": (
        "seed_oss", "none", "",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>\n Paris\n\n</parameter>\n</function>\n"
        "</seed:tool_call>", ("", "", (("get_weather", {"city": "\n Paris\n\n"}),)),
    ),
    "a line break in Python": (
        "lfm2", "none", "", "<|tool_call_start|>[get_weather(city='a\nb')]<|tool_call_end|>",
        ("", "", (("get_weather", {"city": "a\nb"}),)),
    ),
    "quotes in quotes": (
        "lfm2", "none", "",
        """<|tool_call_start|>[get_weather(city='sh -c "echo 'a, b'"', days=1)]<|tool_call_end|>""",
        ("", "", (("get_weather", {"city": """sh -c "echo 'a, b'\"""", "days": 1}),)),
    ),
    "a zero before a number": (
        "lfm2", "none", "", "<|tool_call_start|>[get_weather(city='07', days=07, hours=[01, 0, 10])]<|tool_call_end|>",
        ("", "", (("get_weather", {"city": "07", "days": 7, "hours": [1, 0, 10]}),)),
    ),
    "a set": (
        "lfm2", "none", "", "<|tool_call_start|>[get_weather(hours={1, 2})]<|tool_call_end|>",
        ("", "", (("get_weather", {"hours": [1, 2]}),)),
    ),
    "a message to a tool of the model's own": (
        "harmony", "harmony", START,
        f"<|channel|>analysis<|message|>I run it.<|end|>{START} to=container.exec<|channel|>commentary<|message|>ls -l",
        ("", "I run it.", ()),
    ),
    "a message to Python in the analysis": (
        "harmony", "harmony", START,
        f"<|channel|>analysis to=python code<|message|>1 + 1<|call|>{START}<|channel|>final<|message|>Two.",
        ("Two.", "", ()),
    ),
    "an offered tool without its namespace": (
        "harmony", "harmony", START,
        f"<|channel|>commentary to=get_weather <|constrain|>json<|message|>{dumped(PARIS[1])}<|call|>",
        ("", "", (PARIS,)),
    ),
    "a message to the assistant": (
        "harmony", "harmony", START,
        f"<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.<|end|>{START}"
        "<|channel|>commentary to=assistant<|channel|>final<|message|>Yes.", ("Yes.", "Hm.", ()),
    ),
    "reasoning that is not ended": (
        "harmony", "harmony", START, f"<|channel|>analysis<|message|>Hm.{START}<|channel|>final<|message|>Yes.",
        ("Yes.", "Hm.", ()),
    ),
    "a blank before a recipient": (
        "harmony", "harmony", "", f"Yes to=functions.get_weather<|message|>{dumped(PARIS[1])}and no",
        ("Yes and no", "", (PARIS,)),
    ),
    "an end of several calls alone": (
        "deepseek_v31", "think", "",
        f"{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEP}{dumped(PARIS[1])}{CALL_END}{CALLS_END}{CALLS_END}",
        ("", "", (PARIS,)),
    ),
}  # fmt: skip
"""(format of calls, of reasoning, end of the prompt, text, what it means)."""


@pytest.mark.parametrize("name", LOOSE)
def test_what_models_write_loosely_is_read(name: str) -> None:
    tools, reasoning, prompt, text, meant = LOOSE[name]
    asked = reading(format_of(tools, reasoning), prompt)
    whole, reader = read(asked, text)
    assert shown(whole) == meant
    draw = random.Random(name)
    for cuts in (list(range(len(text))), *([draw.randrange(len(text)) for _ in range(4)] for _ in range(8))):
        pieces, again = read(asked, text, cuts)
        assert pieces == whole
        assert (again.num_strays, again.reasoning_spans) == (reader.num_strays, reader.reasoning_spans)


def finished(asked: ParserConfig, text: str, *, is_cut: bool) -> tuple[list[Piece], AnswerParser]:
    reader = AnswerParser(asked)
    return joined([*reader.feed(text), *reader.finish(is_cut=is_cut)]), reader


WRITTEN = {
    "hermes": PARIS_CALL,
    "qwen3_coder": CODER_CALL,
    "glm45": GLM_CALL,
    "mistral": f"[TOOL_CALLS] [{call(*PARIS)}]",
    "mistral_args": f"[TOOL_CALLS]get_weather[ARGS]{dumped(PARIS[1])}",
    "deepseek_v31": f"{CALLS_BEGIN}{CALL_BEGIN}get_weather{SEP}{dumped(PARIS[1])}{CALL_END}{CALLS_END}",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
    "lfm2": "<|tool_call_start|>[get_weather(city='Paris')]<|tool_call_end|>",
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{dumped(PARIS[1])}",
    "seed_oss": CODER_CALL.replace("tool_call", "seed:tool_call").replace(">\nParis\n<", ">Paris<"),
}


@pytest.mark.parametrize("tools", WRITTEN)
def test_a_call_that_a_limit_cuts_anywhere_shows_none_of_its_markup(tools: str) -> None:
    """Up to two characters of a marker may be a text's own."""
    asked = reading(format_of(tools, "harmony" if tools == "harmony" else "none"))
    text = WRITTEN[tools]
    for end in range(len(text) + 1):
        pieces, reader = finished(asked, f"I look.{text[:end]}" if tools != "harmony" else text[:end], is_cut=True)
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        assert content.removeprefix("I look.") in ("", text[: min(end, 2)])
        calls = [piece.name for piece in pieces if isinstance(piece, CallBegun)]
        assert calls in ([], ["get_weather"])
        assert reader.is_in_call == bool(calls and not reader.num_calls)
    assert (calls, reader.num_calls) == (["get_weather"], 1)


@pytest.mark.parametrize("tools", [*WRITTEN, "json", "llama3_json"])
def test_a_required_call_cut_anywhere_has_no_content(tools: str) -> None:
    asked = replace(reading(format_of(tools, "harmony" if tools == "harmony" else "none")), only_calls=True)
    text = WRITTEN.get(tools, call(*PARIS))
    for end in range(len(text) + 1):
        for is_cut in (False, True):
            pieces, _ = finished(asked, text[:end], is_cut=is_cut)
            assert not [piece for piece in pieces if isinstance(piece, (Content, Reasoning))]
    assert [piece.name for piece in pieces if isinstance(piece, CallBegun)] == ["get_weather"]


def test_every_format_but_those_without_markers_is_cut_in_a_test() -> None:
    alike = {"glm47": "glm45", "deepseek_v3": "deepseek_v31", "phi4": "hermes", "granite": "hermes"}
    alike |= {"functools": "hermes", "kimi_k2": "deepseek_v31", "olmo3": "lfm2"}
    assert {*WRITTEN, *alike, "json", "llama3_json", "pythonic"} == set(CALLS)


def test_reasoning_may_hold_markers_of_calls_under_a_grammar() -> None:
    """A grammar lets reasoning end by its own marker only."""
    asked = replace(reading(format_of("hermes", "think"), OPEN), call_ends_reasoning=False)
    text = f"Say {PARIS_CALL}</think>{NOW_CALL}"
    assert shown(read(asked, text)[0]) == ("", f"Say {PARIS_CALL}", (NOW,))


def test_only_the_first_call_in_reasoning_counts_if_one_is_wanted() -> None:
    asked = replace(reading(format_of("hermes", "think"), OPEN), max_calls=1)
    assert shown(read(asked, f"Hm.\n{PARIS_CALL}\n{NOW_CALL}")[0]) == ("", "Hm.", (PARIS,))


def test_a_call_in_reasoning_costs_no_more_than_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each character is read at most twice, however many calls the reasoning mentions."""
    fed: list[int] = []
    feed = AnswerParser.feed

    def counted(reader: AnswerParser, text: str) -> list[Piece]:
        fed.append(len(text))
        return feed(reader, text)

    monkeypatch.setattr(AnswerParser, "feed", counted)
    text = f"{PARIS_CALL} {'and so on ' * 30}" * 20
    pieces, _ = read(reading(format_of("hermes", "think"), OPEN), text, list(range(len(text))))
    assert shown(pieces) == ("", text, ())
    assert len(text) < sum(fed) < 3 * len(text)


def test_json_behind_reasoning_is_content_unless_it_is_a_call() -> None:
    """The calls of this format have no marker."""
    asked = reading(format_of("none", "think").with_plain_calls(PLAIN_CALLS))
    for text, meant in (
        ('<think>a</think>{"answer": 1}', ('{"answer": 1}', "a", ())),
        (f"<think>a</think>{call(*PARIS)}", ("", "a", (PARIS,))),
    ):
        for cuts in ([], list(range(len(text)))):
            assert shown(read(asked, text, cuts)[0]) == meant


def test_a_call_without_tools_is_text_and_so_are_its_markers() -> None:
    asked = ParserConfig(format_of("hermes", "think"), with_calls=False, tools=TOOLS)
    assert shown(read(asked, f"{PARIS_CALL}</think>")[0]) == (PARIS_CALL, "", ())


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("{}", {}),
        ('{"a": 1, }', {"a": 1}),
        ('{"a": [1,]\n, "b": {"c": "d",} ,\n}', {"a": [1], "b": {"c": "d"}}),
        ('{"a": ",]", "b": [",}", ]}', {"a": ",]", "b": [",}"]}),
    ],
)
def test_arguments_are_json_whatever_commas_are_written(written: str, meant: object) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    for cuts in ([], list(range(len(text)))):
        pieces, _ = read(reading(format_of("hermes")), text, cuts)
        (arguments,) = [piece.text for piece in pieces if isinstance(piece, CallArguments)]
        assert json.loads(arguments) == meant


def test_a_second_comma_is_no_json() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1,, "b": 2}}</tool_call>'
    pieces, _ = read(reading(format_of("hermes")), text)
    assert pieces == [CallBegun("f"), CallArguments('{"a": 1,'), Content(', "b": 2}}')]
