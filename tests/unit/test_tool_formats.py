"""Formats: detected from a checkpoint, and used to parse the output of its model."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from inferd.engine.api.errors import ModelError
from inferd.server.config.settings import Settings
from inferd.server.tools.answer_parser import AnswerParser, with_prefill_parsed
from inferd.server.tools.builtin import CALLS, REASONING
from inferd.server.tools.detect import NO_FORMAT, PLAIN_CALLS, Clues, detect
from inferd.server.tools.format import Format
from inferd.server.tools.parser_config import ParserConfig
from inferd.server.tools.pieces import CallArguments, CallBegun, CallEnded, Content, Piece, Reasoning, joined
from tests.unit.tool_samples import BROKEN, SAMPLES, TEMPLATES, TOOLS

Calls = tuple[tuple[str, object], ...]
CUTS = st.lists(st.integers(0, 400), max_size=12)


def format_of(tools: str, reasoning: str = "none") -> Format:
    return PLAIN_CALLS if tools == "json" else detect(Clues(), tools, reasoning)


def reading(found: Format, prompt: str = "", *, with_calls: bool = True) -> ParserConfig:
    return ParserConfig(found, with_calls, TOOLS, found.prefill(prompt))


def read(asked: ParserConfig, text: str, cuts: list[int] | None = None) -> tuple[list[Piece], AnswerParser]:
    """Every piece of an answer whose text arrives in parts split at `cuts`."""
    reader = AnswerParser(asked)
    bounds = [0, *sorted(cut % (len(text) + 1) for cut in cuts or ()), len(text)]
    pieces = [piece for a, b in itertools.pairwise(bounds) for piece in reader.feed(text[a:b])]
    return joined([*pieces, *reader.finish()]), reader


def shown(pieces: list[Piece]) -> tuple[str, str, Calls]:
    """(content, reasoning, calls)."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    names = [piece.name for piece in pieces if isinstance(piece, CallBegun)]
    arguments = [json.loads(piece.text) for piece in pieces if isinstance(piece, CallArguments)]
    assert len([piece for piece in pieces if isinstance(piece, CallEnded)]) == len(names)
    return content, thought, tuple(zip(names, arguments, strict=True))


def everything(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, (Content, Reasoning, CallArguments)))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_models_answer_is_read(name: str) -> None:
    sample = SAMPLES[name]
    pieces, _ = read(reading(format_of(sample.tools, sample.reasoning), sample.prompt), sample.text)
    assert shown(pieces) == (sample.content, sample.thought, sample.calls)


@settings(deadline=None, max_examples=300)
@given(sample=st.sampled_from(sorted(SAMPLES)), cuts=CUTS)
def test_an_answer_reads_the_same_however_it_arrives(sample: str, cuts: list[int]) -> None:
    given_sample = SAMPLES[sample]
    asked = reading(format_of(given_sample.tools, given_sample.reasoning), given_sample.prompt)
    whole, reader = read(asked, given_sample.text)
    pieces, again = read(asked, given_sample.text, cuts)
    assert pieces == whole
    assert again.reasoning_spans == reader.reasoning_spans


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if sample.is_as_transformers])
def test_transformers_reads_the_same(name: str) -> None:
    """transformers' parser needs the whole text and ignores blanks. In well-formed answers both find the same."""
    sample = SAMPLES[name]
    found = format_of(sample.tools, sample.reasoning)
    assert found.template is not None
    message = parse_response(sample.text, found.template, prefix=sample.prompt, tools=list(TOOLS))
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert [(call["name"], call["arguments"]) for call in calls] == list(sample.calls)
    assert message.get("reasoning_content", "").strip() == sample.thought


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_call_is_content_without_its_markers(name: str) -> None:
    tools, text, content = BROKEN[name]
    found = format_of(tools, "harmony" if tools == "harmony" else "none")
    for size in (1, 2, 5, len(text)):
        pieces, reader = read(reading(found), text, list(range(0, len(text), size)))
        assert pieces == ([Content(content)] if content else [])
        assert (reader.num_strays > 0) == (content != text) or tools == "harmony"


PARTS = st.lists(
    st.sampled_from(
        [
            "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<function=f>",
            "</function>", "<parameter=a>", "</parameter>", "<|channel|>", "analysis", "final", "<|message|>",
            "<|end|>", "<|start|>assistant", '{"name": "get_weather", ', '"arguments": ', '{"a": [1, "x"]}', "}", "[",
            "]", ", ", "; ", " ", "\n", '"', "\\", "word", "<", "get_weather", "```json\n", "<|python_tag|>",
            "<|tool_call>call:f{a:1}", "<tool_call|>", "\u20ac",
        ]
    ),
    max_size=14,
)  # fmt: skip


@settings(deadline=None, max_examples=600)
@given(
    tools=st.sampled_from(sorted(CALLS)),
    reasoning=st.sampled_from(["none", *sorted(REASONING)]),
    parts=PARTS,
    cuts=CUTS,
)
def test_any_text_reads_the_same_however_it_arrives(
    tools: str, reasoning: str, parts: list[str], cuts: list[int]
) -> None:
    if (tools == "harmony") != (reasoning == "harmony"):
        reasoning = "harmony" if tools == "harmony" else "none"
    asked = reading(format_of(tools, reasoning))
    text = "".join(parts)
    whole, reader = read(asked, text)
    assert read(asked, text, cuts)[0] == whole
    assert read(asked, text, list(range(len(text))))[0] == whole
    is_plain = not (reader.num_strays or asked.format.reads_reasoning)
    if is_plain and all(isinstance(piece, Content) for piece in whole):
        assert everything(whole) == text


@settings(deadline=None, max_examples=300)
@given(parts=PARTS, cuts=CUTS)
def test_no_word_is_lost_beside_reasoning_and_calls(parts: list[str], cuts: list[int]) -> None:
    """Numbered words between other text: each comes back once, in order."""
    text = "".join(f"{part}w{i}w" for i, part in enumerate(parts))
    for tools in ("hermes", "mistral_args", "llama3_json", "qwen3_coder"):
        pieces, _ = read(reading(format_of(tools, "think")), text, cuts)
        found = everything(pieces) + "".join(piece.name for piece in pieces if isinstance(piece, CallBegun))
        assert [i for i in range(len(parts)) if f"w{i}w" not in found] == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_format_is_found_in_what_the_checkpoint_shows(name: str) -> None:
    clues, tools, reasoning = TEMPLATES[name]
    found = detect(clues)
    assert (found.tool_name, found.reasoning_name, found.source) == (tools, reasoning, "the chat template")


OWN = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open_pattern": r"\s*<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>"},
    },
}  # fmt: skip


def test_what_the_checkpoint_declares_goes_before_what_its_template_shows() -> None:
    clues = Clues("[TOOL_CALLS] [THINK]", (), "mistral", OWN)
    found = detect(clues)
    assert (found.tool_name, found.reasoning_name) == ("own", "own")
    assert found.words == "tool calls: the checkpoint's own format; reasoning: the checkpoint's own format"
    text = '<think>\nHm.</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert shown(read(reading(found), text)[0]) == ("", "Hm.", (("f", {}),))
    assert found.call_syntax is not None
    assert found.call_syntax.begin == '<tool_call>\n{"name": "'


def test_settings_have_the_last_word() -> None:
    clues = Clues("<tool_call> <think>", (), "qwen3")
    assert detect(clues, "none", "auto").reads_calls is False
    assert detect(clues, "auto", "none").reads_reasoning is False
    assert detect(clues, "mistral").tool_name == "mistral"
    assert detect(replace(clues, response_template=OWN), "qwen3_coder").tool_name == "qwen3_coder"
    assert detect(clues, "none", "none").source == "settings"


def test_every_format_can_be_set_by_name() -> None:
    names = {name: get_args(Settings.model_fields[f"{name}_format"].annotation) for name in ("tool", "reasoning")}
    assert names == {"tool": ("auto", "none", *sorted(CALLS)), "reasoning": ("auto", "none", *sorted(REASONING))}


@pytest.mark.parametrize(
    ("tools", "reasoning", "words"),
    [
        ("harmony", "think", "harmony and --reasoning-format think do not go together"),
        ("hermes", "harmony", "hermes and --reasoning-format harmony do not go together"),
        ("harmony", "none", "do not go together"),
        ("xml", "auto", "--tool-format xml is not known: expected auto, none or one of deepseek_v3"),
        ("auto", "cot", "--reasoning-format cot is not known"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(tools: str, reasoning: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        detect(Clues(), tools, reasoning)


def test_a_response_template_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ModelError, match=r"response_template .* unknown content parser 'yaml'"):
        detect(Clues(response_template={**OWN, "fields": {"tool_calls": {"open": "<c>", "content": "yaml"}}}))


def test_without_tools_a_call_is_text() -> None:
    sample = SAMPLES["hermes, two after words"]
    pieces, _ = read(reading(format_of("hermes", "think"), with_calls=False), sample.text)
    content, thought, calls = shown(pieces)
    assert (thought, calls) == ("Both.", ())
    assert content == sample.text.partition("</think>")[2].lstrip()


def test_a_user_who_writes_a_marker_opens_nothing() -> None:
    found = format_of("none", "think")
    for prompt in (
        "Human: what is <think>?\nAssistant: ",
        "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n",
    ):
        assert shown(read(reading(found, prompt), "A tag.")[0]) == ("A tag.", "", ())
    assert shown(read(reading(found, "Human: 1+1\nAssistant: <think>\n"), "Two.</think>2")[0]) == ("2", "Two.", ())


def test_reasoning_spans_hold_the_markers() -> None:
    text = "a <think>b c</think> d"
    _, reader = read(reading(format_of("none", "think")), text)
    assert [text[a:b] for a, b in reader.reasoning_spans] == ["<think>b c</think>"]
    reader = AnswerParser(reading(format_of("none", "think"), "<|im_start|>assistant\n<think>\n"))
    reader.feed("still thinking")
    assert (reader.reasoning_start, reader.reasoning_spans) == (0, [])


def test_an_answer_ends_after_the_calls_that_are_wanted() -> None:
    sample = SAMPLES["phi-4-mini"]
    asked = replace(reading(format_of(sample.tools)), max_calls=1)
    pieces, reader = read(asked, sample.text)
    assert reader.is_full
    assert shown(pieces) == ("", "", sample.calls[:1])


def test_a_marker_inside_what_may_become_another_waits_for_it() -> None:
    fields = {"thinking": {"open": "<<think>>", "close": "."}, "tool_calls": {"open": "<think", "content": "json"}}
    found = detect(Clues(response_template={"start_anchor": "A", "fields": {**fields, "content": {}}}))
    for text, pieces in (("<<think>>a.", [Reasoning("a")]), ("<<think> a", [Content("<<think> a")])):
        for cut in range(len(text)):
            assert read(reading(found), text, [cut])[0] == pieces


def test_arguments_stream_as_they_are_written() -> None:
    reader = AnswerParser(reading(format_of("hermes")))
    assert reader.feed('<tool_call>{"name": "f", "arguments": {"a') == [CallBegun("f"), CallArguments('{"a')]
    assert reader.feed('": "x y') == [CallArguments('": "x y')]
    assert reader.feed('"}') == [CallArguments('"}')]
    assert reader.feed("}") == [CallEnded()]


@pytest.mark.parametrize(
    ("arguments", "read_as"),
    [
        ('{"a": "1\n2"}', {"a": "1\n2"}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("null", {}),
        ('{"a": "\\ud83d\\ude00 \\" {"}', {"a": '\U0001f600 " {'}),
    ],
)
def test_the_ways_in_which_models_write_arguments(arguments: str, read_as: object) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert shown(read(reading(format_of("hermes")), text, list(range(len(text))))[0]) == ("", "", (("f", read_as),))


def test_a_call_cut_off_keeps_what_it_has() -> None:
    for tools, text, rest in (
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, ', '{"a": [1'),
        ("qwen3_coder", "<tool_call><function=f>\n<parameter=a>\n1", "\n<parameter=a>\n1"),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x', '{a:<|"|>x'),
    ):
        pieces, _ = read(reading(format_of(tools)), text, list(range(len(text))))
        assert pieces == [CallBegun("f"), CallArguments(rest)]


NUMBERS: Any = (
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "x": {"type": "number"}, "xs": {"type": "array", "items": {"type": "number"}}}}}},
)  # fmt: skip


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ("<parameter=x>\nNaN\n</parameter>\n", {"x": "NaN"}),
        ("<parameter=x>\n-Infinity\n</parameter>\n", {"x": "-Infinity"}),
        ("<parameter=x>\n1e999\n</parameter>\n", {"x": "1e999"}),
        ('<parameter=xs>\n[1.5, NaN, {"a": Infinity}]\n</parameter>\n', {"xs": [1.5, "NaN", {"a": "Infinity"}]}),
        ("<parameter=x>\n1.5\n</parameter>\n", {"x": 1.5}),
    ],
)
def test_tagged_arguments_are_json_whatever_number_is_written(written: str, read_as: object) -> None:
    text = f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    asked = replace(reading(format_of("qwen3_coder")), tools=NUMBERS)
    for cuts in ([], list(range(len(text)))):
        (arguments,) = [piece.text for piece in read(asked, text, cuts)[0] if isinstance(piece, CallArguments)]
        assert json.loads(arguments, parse_constant=pytest.fail) == read_as


def test_an_argument_that_is_written_twice_is_not_lost() -> None:
    """JSON has each key once, so the model's text is given as it is."""
    written = "\n<parameter=x>\n1\n</parameter>\n<parameter=x>\n2\n</parameter>\n"
    text = f"<tool_call>\n<function=f>{written}</function>\n</tool_call>"
    pieces, _ = read(replace(reading(format_of("qwen3_coder")), tools=NUMBERS), text, list(range(len(text))))
    assert pieces == [CallBegun("f"), CallArguments(written), CallEnded()]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_copy_of_a_begun_reader_reads_as_a_new_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many choices share one parse of the prompt's part of the answer, and nothing afterwards."""
    sample = SAMPLES[name]
    asked = reading(format_of(sample.tools, sample.reasoning), sample.prompt)
    expected = read(asked, sample.text, [3, 5])
    shared = with_prefill_parsed(asked)
    monkeypatch.setattr(AnswerParser, "_begin_after", lambda *_: pytest.fail("the prompt was read again"))
    for _ in range(3):
        reader = AnswerParser.of(shared)
        pieces = joined([*reader.feed(sample.text), *reader.finish()])
        assert (pieces, reader.reasoning_spans, reader.num_calls) == (
            expected[0], expected[1].reasoning_spans, expected[1].num_calls)  # fmt: skip


def test_special_tokens_of_markers_are_the_readers() -> None:
    tokens = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]", "</s>")
    found = format_of("mistral_args", "mistral")
    assert found.special_markers(tokens, with_calls=True) == {"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"}
    assert found.special_markers(tokens, with_calls=False) == {"[THINK]", "[/THINK]"}
    assert format_of("gemma4").special_markers(('<|"|>', "<turn|>"), with_calls=True) == {'<|"|>'}
    assert NO_FORMAT.special_markers(tokens, with_calls=True) == frozenset()


def test_a_long_run_of_blanks_costs_no_more_than_its_length() -> None:
    """The text is held back completely and read once. The test counts characters taken from it, not time."""
    own = format_of("hermes", "think")
    assert all(not region.open.pattern.pattern.startswith("\\s") for region in own.regions)
    assert all(
        not region.open.pattern.pattern.startswith("\\s") for region in detect(Clues(response_template=OWN)).regions
    )
    blanks = " \n" * 20_000
    reader = AnswerParser(reading(own))
    for start in range(0, len(blanks), 4):
        assert reader.feed(blanks[start : start + 4]) == []
    assert reader.feed("x") == [Content(blanks + "x")]
