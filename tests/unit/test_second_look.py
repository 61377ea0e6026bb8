"""Calls that a model writes in another way than its format: which texts are calls, and which stay text."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferd.server.tools.pieces import CallArguments, CallBegun, CallEnded, Content, Piece, Reasoning, joined
from inferd.server.tools.schema_fit import MAX_STEPS, fits
from inferd.server.tools.second_look import MAX_CHARS, Offer, SecondLook
from tests.unit.test_results import answer, reading, request, tokenizer
from tests.unit.tool_samples import NOW, PARIS, TOOLS, call, dumped

TWO = {"city": "Rome", "days": 2}
PARIS_CALL, NOW_CALL = call(*PARIS), call(*NOW)

CALLS: dict[str, tuple[str, str, tuple[tuple[str, dict[str, object]], ...]]] = {
    "bare": (PARIS_CALL, "", (PARIS,)),
    "bare, with line breaks": (json.dumps(json.loads(PARIS_CALL), indent=4) + "\n", "", (PARIS,)),
    "the other name of arguments": (call(*PARIS, key="parameters"), "", (PARIS,)),
    "arguments first": (f'{{"arguments": {dumped(TWO)}, "name": "get_weather"}}', "", (("get_weather", TWO),)),
    "arguments as a string": (
        f'{{"name": "get_weather", "arguments": {json.dumps(dumped(TWO))}}}', "", (("get_weather", TWO),)
    ),
    "a list": (f"[{PARIS_CALL}, {NOW_CALL}]", "", (PARIS, NOW)),
    "one behind the other": (f"{PARIS_CALL}\n{NOW_CALL}", "", (PARIS, NOW)),
    "commas between": (f"{PARIS_CALL}, {NOW_CALL};", "", (PARIS, NOW)),
    "a fence": (f"```json\n{PARIS_CALL}\n```", "", (PARIS,)),
    "a fence without a name": (f"```\n{PARIS_CALL}\n```\n", "", (PARIS,)),
    "a fence that stays open": (f"```json\n{PARIS_CALL}", "", (PARIS,)),
    "two fences": (f"```json\n{PARIS_CALL}\n```\n\n```json\n{NOW_CALL}\n```", "", (PARIS, NOW)),
    "prose and a fence": (f"I look it up:\n\n```json\n[{PARIS_CALL}]\n```", "I look it up:", (PARIS,)),
    "prose and JSON on one line": (f"I use [it]: {PARIS_CALL}", "I use [it]:", (PARIS,)),
    "prose with JSON that is no call": (f'{{"a": 1}} then\n{PARIS_CALL}', '{"a": 1} then', (PARIS,)),
    "a tag of tools": (f"<tools>\n{PARIS_CALL}\n{NOW_CALL}\n</tools>", "", (PARIS, NOW)),
    "a tag of a call": (f"<tool_call>\n{PARIS_CALL}\n</tool_call>", "", (PARIS,)),
    "a tag of a call without its end": (f"<tool_call>{PARIS_CALL}", "", (PARIS,)),
    "a tag of a function call": (f"<function_call>{PARIS_CALL}</function_call>", "", (PARIS,)),
    "a tag with a prefix": (f"I look.\n<my_tool_call>{PARIS_CALL}</my_tool_call>", "I look.", (PARIS,)),
    "tags around all and around each": (
        f"<x:tool_calls>\n<x:tool_call>{PARIS_CALL}</x:tool_call>\n<x:tool_call>{NOW_CALL}</x:tool_call>\n</x:tool_calls>",
        "", (PARIS, NOW),
    ),
    "tags around tags of parameters": (
        "<x_tool_calls><function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function></x_tool_calls>", "",
        (("get_weather", {"city": "Rome"}),),
    ),
    "a tag in a fence": (f"```xml\n<tool_call>\n{PARIS_CALL}\n</tool_call>\n```", "", (PARIS,)),
    "a function's tag": (f"<function=get_weather>{dumped(TWO)}</function>", "", (("get_weather", TWO),)),
    "a function's tag without its end": (f"<function=get_weather>{dumped(TWO)}", "", (("get_weather", TWO),)),
    "a function's tag with nothing": ("<function=time.now></function>", "", (NOW,)),
    "tags of parameters": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>", "", (("get_weather", TWO),),
    ),
    "tags of parameters without the function's end": (
        "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</tool_call>", "",
        (("get_weather", {"city": "Rome"}),),
    ),
    "Python": ('get_weather(city="Rome", days=2)', "", (("get_weather", TWO),)),
    "a list of Python": ("[get_weather(city='Rome', days=2), time.now()]", "", (("get_weather", TWO), NOW)),
    "Python in a fence": ("Sure.\n```tool_code\nget_weather(city='Paris')\n```", "Sure.", (PARIS,)),
    "single quotes": ("{'name': 'get_weather', 'arguments': {'city': \"L'Aquila\", 'days': 2}}", "",
                      (("get_weather", {"city": "L'Aquila", "days": 2}),)),
    "a comma behind the last part": (
        '{"name": "get_weather", "arguments": {"city": "Paris", }, }', "", (PARIS,)
    ),
    "a line break in a string": (
        '{"name": "get_weather", "arguments": {"city": "a\nb"}}', "", (("get_weather", {"city": "a\nb"}),)
    ),
    "an unknown argument": (
        call("get_weather", {"city": "Paris", "required": ["city"]}), "",
        (("get_weather", {"city": "Paris", "required": ["city"]}),)
    ),
    "each outer brace twice": (f"```json\n{{{PARIS_CALL}}}\n{{{NOW_CALL}}}\n```", "", (PARIS, NOW)),
    "the word of phi": (f"functools[{PARIS_CALL}]", "", (PARIS,)),
    "quotes and brackets in a string": (
        call("get_weather", {"city": 'a "]} \\ b'}), "", (("get_weather", {"city": 'a "]} \\ b'}),)
    ),
}  # fmt: skip
"""(text, content, calls)."""

TEXTS = {
    "another name": call("get_rain", {"city": "Paris"}),
    "a name that is longer": call("get_weather_now", {"city": "Paris"}),
    "an argument of another type": call("get_weather", {"city": 5}),
    "a missing argument": call("get_weather", {"days": 2}),
    "nothing but unknown arguments": call("time.now", {"zip": "75001"}),
    "no arguments": '{"name": "time.now"}',
    "a description of a tool": '{"name": "time.now", "parameters": {"type": "object", "properties": {}}}',
    "prose behind it": f"{PARIS_CALL} is the call.",
    "prose behind a fence": f"```json\n{PARIS_CALL}\n```\nShall I?",
    "prose between two": f"{PARIS_CALL}\nand then\n{NOW_CALL}",
    "another key": '{"name": "get_weather", "arguments": {"city": "Paris"}, "why": "asked"}',
    "an id": '{"id": "1", "name": "get_weather", "arguments": {"city": "Paris"}}',
    "a key twice": '{"name": "get_weather", "arguments": {"city": "Paris", "city": "Rome"}}',
    "both names of arguments": '{"name": "get_weather", "arguments": {"city": "Paris"}, "parameters": {}}',
    "one of two": f"[{PARIS_CALL}, {call('get_rain', {})}]",
    "JSON that is no call": '{"answer": [1, 2]}',
    "JSON in a fence": '```json\n{"city": "Paris"}\n```',
    "a call that ends early": PARIS_CALL[:-1],
    "a call with a brace too many": PARIS_CALL + "}",
    "the first brace twice": "{" + PARIS_CALL,
    "each outer brace three times": f"{{{{{PARIS_CALL}}}}}",
    "another tag": f"<my_example>{PARIS_CALL}</my_example>",
    "inline code": f"`{PARIS_CALL}`",
    "Python within a line": 'Use get_weather(city="Paris")',
    "Python and more": 'get_weather(city="Paris") gives it.',
    "Python with a computation": 'get_weather(city="Pa" + "ris")',
    "Python with a place": 'get_weather("Paris")',
    "a program": '```python\nimport weather\nget_weather(city="Paris")\nprint("done")\n```',
    "a name": "get_weather",
    "a fence alone": "```",
    "brackets": "a [b] {c} (d) [[{{ ((",
    "a parameter twice": "<function=get_weather>\n<parameter=city>\na\n</parameter>\n<parameter=city>\nb\n</parameter>",
    "an unknown function's tag": "<function=get_rain>{}</function>",
    "a number that JSON does not have": '{"name": "get_weather", "arguments": {"city": "Paris", "days": NaN}}',
}


def look(text: str, cuts: list[int], max_calls: int | None = None) -> list[Piece]:
    offer = Offer.of(TOOLS, max_calls)
    assert offer is not None
    reader, pieces, start = SecondLook(offer), list[Piece](), 0
    for end in (*sorted(cuts), len(text)):
        pieces += reader.take([Content(text[start:end])] if end > start else [])
        start = max(start, end)
    return joined([*pieces, *reader.finish()])


def cuts_of(name: str, text: str) -> list[list[int]]:
    draw = random.Random(name)
    return [[], list(range(len(text))), *([draw.randrange(len(text)) for _ in range(3)] for _ in range(6))]


@pytest.mark.parametrize("name", CALLS)
def test_what_is_a_call_to_any_reader_is_a_call(name: str) -> None:
    text, content, calls = CALLS[name]
    for cuts in cuts_of(name, text):
        pieces = look(text, cuts)
        assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == content
        names = [piece.name for piece in pieces if isinstance(piece, CallBegun)]
        arguments = [json.loads(piece.text) for piece in pieces if isinstance(piece, CallArguments)]
        assert tuple(zip(names, arguments, strict=True)) == calls
        assert len([piece for piece in pieces if isinstance(piece, CallEnded)]) == len(calls)


@pytest.mark.parametrize("name", TEXTS)
def test_everything_else_stays_the_text_that_it_is(name: str) -> None:
    text = TEXTS[name]
    for cuts in cuts_of(name, text):
        assert look(text, cuts) == [Content(text)]


@settings(deadline=None, max_examples=300)
@given(
    parts=st.lists(
        st.sampled_from(
            [PARIS_CALL, NOW_CALL, "```json\n", "\n```", "<tools>", "</tools>", "[", "]", ",", "{", "}", "'", '"', "\n",
             "word", "get_weather(", ")", 'city="Paris"', "<function=time.now>", "</function>", " ", "```"]
        ),
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)  # fmt: skip
def test_any_text_reads_the_same_however_it_arrives(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = look(text, [])
    assert look(text, [cut % (len(text) + 1) for cut in cuts]) == whole
    assert look(text, list(range(len(text)))) == whole
    if not any(isinstance(piece, CallBegun) for piece in whole):
        assert whole == ([Content(text)] if text else [])


def test_arguments_in_tags_have_the_types_of_their_schema() -> None:
    properties = {"to": {"$ref": "#/$defs/Code"}, "at": {"$ref": "#/$defs/Place"}, "now": {"type": "boolean"}}
    defs = {"Code": {"type": "string"}, "Place": {"type": "object"}}
    function = {"name": "go", "parameters": {"type": "object", "properties": properties, "$defs": defs}}
    offer = Offer.of([{"type": "function", "function": function}], None)
    assert offer is not None
    values = {"to": "5", "at": '{"x": 1}', "now": "True"}
    written = "\n".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in values.items())
    reader = SecondLook(offer)
    found = [*reader.take([Content(f"<function=go>\n{written}\n</function>")]), *reader.finish()]
    arguments = dumped({"to": "5", "at": {"x": 1}, "now": True})
    assert found == [CallBegun("go"), CallArguments(arguments), CallEnded()]


def read_argument(schema: object, text: str) -> object:
    """The argument of a call in tags; None if it is no call."""
    properties = {"type": "object", "properties": {"x": schema}}
    offer = Offer.of([{"type": "function", "function": {"name": "go", "parameters": properties}}], None)
    assert offer is not None
    reader = SecondLook(offer)
    pieces = reader.take([Content(f"<function=go>\n<parameter=x>\n{text}\n</parameter>\n</function>")])
    found = [piece.text for piece in (*pieces, *reader.finish()) if isinstance(piece, CallArguments)]
    return json.loads(found[0])["x"] if found else None


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "object"}, '{"a": 1, "a": 2}', None),
        ({"type": ["object", "string"]}, '{"a": 1, "a": 2}', '{"a": 1, "a": 2}'),
        ({"anyOf": [{"const": i} for i in range(80)]}, "5", 5),
        ({"anyOf": [{"const": i} for i in range(800)]}, "5", 5),
        ({"enum": ["Rome"]}, '"Rome"', "Rome"),
        ({"type": "string", "enum": ["Rome"]}, '"Rome"', "Rome"),
        ({"type": "string"}, '"Rome"', '"Rome"'),
        ({"type": "boolean"}, "5", None),
    ],
)
def test_an_argument_in_tags_is_json_if_its_text_does_not_fit(schema: object, text: str, value: object) -> None:
    assert read_argument(schema, text) == value


@pytest.mark.parametrize("part", ["</tool_call>", "</a_tool_call> ", " "])
def test_the_end_of_a_call_in_tags_is_found_in_linear_time(part: str) -> None:
    """A quadratic search took seconds."""
    text = f"<function=time.now>\n{{}}{part * (31_000 // len(part))}x"
    began = time.process_time()
    assert look(text, []) == [Content(text)]
    assert time.process_time() - began < 1
    ended = f"<function=time.now>\n{{}}{'</tool_call> ' * 2_000}"
    assert [type(piece) for piece in look(ended, [])] == [CallBegun, CallArguments, CallEnded]


@pytest.mark.parametrize("part", [{"$ref": "#" + "/x" * 20_000}, {"enum": list(range(8_000))}])
def test_a_large_schema_is_compared_in_bounded_time(part: object) -> None:
    schema = {"items": {"anyOf": [{"$ref": "#/$defs/e"}] * 3_000}, "$defs": {"e": part}}
    began = time.process_time()
    assert not fits([-1] * 100, schema)
    assert time.process_time() - began < 1


def test_a_list_of_tools_is_no_call_of_one_whose_arguments_are_named_like_keywords() -> None:
    named = ("type", "required", "description")
    schema = {"type": "object", "properties": {name: {} for name in named}, "required": ["type"]}
    offer = Offer.of([{"type": "function", "function": {"name": "add_field", "parameters": schema}}], None)
    assert offer is not None
    listed = json.dumps({"name": "add_field", "parameters": schema})
    called = json.dumps({"name": "add_field", "parameters": {"type": "text", "of": "a form"}})
    for text, kinds in ((listed, [Content]), (called, [CallBegun, CallArguments, CallEnded])):
        reader = SecondLook(offer)
        assert [type(piece) for piece in joined([*reader.take([Content(text)]), *reader.finish()])] == kinds


def test_text_is_held_back_only_while_it_may_be_a_call() -> None:
    offer = Offer.of(TOOLS, None)
    assert offer is not None
    for text, most in (
        ("It is [sunny] and {warm}, `so` <b>go</b> out.\n```python\nprint(1)\n```\n", 11),
        ('{"answer": 1, "name": "get_weather"}', 3),
        ('```json\n{"name": "get_rain", "arguments": {}}\n```', 22),
        (f"{PARIS_CALL} is how it is written.", len(PARIS_CALL) + 1),
    ):
        reader, num_shown, longest = SecondLook(offer), 0, 0
        for i, char in enumerate(text, start=1):
            num_shown += sum(len(piece.text) for piece in reader.take([Content(char)]) if isinstance(piece, Content))
            longest = max(longest, i - num_shown)
        assert longest <= most


def test_a_text_that_is_too_long_is_text() -> None:
    long = call("get_weather", {"city": "x" * MAX_CHARS})
    assert look(long, []) == look(long, list(range(0, len(long), 1_000))) == [Content(long)]
    near = call("get_weather", {"city": "x" * (MAX_CHARS - 100)})
    assert [type(piece) for piece in look(near, [])] == [CallBegun, CallArguments, CallEnded]
    for text, num_calls in (
        (f"{NOW_CALL}\n" * 128, 128),
        (f"{NOW_CALL}\n" * 129, 0),
        (f"get_weather(city='a', hours=[{'1, ' * 700}])", 1),
        (f"get_weather(city='a', hours=[{'1, ' * 1_500}])", 0),
    ):
        assert len([piece for piece in look(text, []) if isinstance(piece, CallBegun)]) == num_calls


def test_many_tools_are_read_as_few() -> None:
    """Their names are too many for a pattern of them all."""
    more = [{"type": "function", "function": {"name": f"tool_number_{i}", "parameters": {}}} for i in range(1_000)]
    offer = Offer.of([*TOOLS, *more], None)
    assert offer is not None
    texts = [(text, True) for text, _, _ in CALLS.values()] + [(text, False) for text in TEXTS.values()]
    for text, is_call in texts:
        for size in (1, 3, len(text)):
            reader = SecondLook(offer)
            pieces = [one for i in range(0, len(text), size) for one in reader.take([Content(text[i : i + size])])]
            pieces = joined([*pieces, *reader.finish()])
            assert any(isinstance(piece, CallBegun) for piece in pieces) == is_call
            assert is_call or pieces == [Content(text)]


def test_only_the_first_call_counts_if_one_is_wanted() -> None:
    assert [piece for piece in look(f"{PARIS_CALL}\n{NOW_CALL}", [], 1) if isinstance(piece, CallBegun)] == [
        CallBegun("get_weather")
    ]


def test_calls_in_the_models_own_format_make_everything_else_text() -> None:
    offer = Offer.of(TOOLS, None)
    assert offer is not None
    reader = SecondLook(offer)
    own = [CallBegun("time.now"), CallArguments("{}"), CallEnded()]
    pieces = [*reader.take([Content(NOW_CALL), *own, Content(PARIS_CALL)]), *reader.finish()]
    assert joined(pieces) == [Content(NOW_CALL), *own, Content(PARIS_CALL)]
    reader = SecondLook(offer)
    pieces = [*reader.take([Content("Hm. " + NOW_CALL), Reasoning("So."), Content(PARIS_CALL)]), *reader.finish()]
    assert [type(piece) for piece in joined(pieces)] == [Content, Reasoning, CallBegun, CallArguments, CallEnded]


def test_an_answer_gets_a_second_look() -> None:
    """Behind reasoning, in a format whose own markers the model left out; stop strings do not see the call."""
    offer = Offer.of(TOOLS, None)
    asked = replace(request(("Paris", "{")), parser_config=reading(tools=TOOLS, offer=offer))
    text = f"<think>A city.</think>\n\nI look.\n```json\n{PARIS_CALL}\n```"
    for cuts in ([], list(range(len(tokenizer().encode(text).ids)))):
        result = answer(text, asked, cuts)
        assert (result.text, result.reasoning, result.reason) == ("I look.", "A city.", "tool_calls")
        assert [(found.name, json.loads(found.arguments)) for found in result.calls] == [PARIS]
        cut = answer(text, asked, cuts, "length")
        assert (len(cut.calls), cut.reason) == (1, "length")
        unread = answer(text, replace(request(), parser_config=reading(tools=TOOLS)), cuts)
        assert (unread.calls, unread.text) == ((), text.partition("</think>")[2].lstrip())


def test_a_stop_token_does_not_cut_a_call_in_another_format() -> None:
    (comma,) = tokenizer().encode(",").ids
    asked = replace(
        request(),
        parser_config=reading(tools=TOOLS, offer=Offer.of(TOOLS, None)),
        content_stop_ids=frozenset((comma,)),
    )
    assert [found.arguments for found in answer(PARIS_CALL, asked, []).calls] == [dumped(PARIS[1])]
    assert answer("Well, no.", asked, []).text == "Well"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 2.0]) | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
TYPES = st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null"])
SCHEMAS: Any = st.recursive(
    st.booleans()
    | st.fixed_dictionaries({"type": TYPES | st.lists(TYPES, min_size=1, max_size=3, unique=True)})
    | st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=3)})
    | st.fixed_dictionaries({"const": VALUES})
    | st.fixed_dictionaries({"minimum": st.integers(-2, 2)}, optional={"exclusiveMaximum": st.integers(-2, 3)})
    | st.fixed_dictionaries({"minLength": st.integers(0, 2)}, optional={"maxItems": st.integers(0, 3)})
    | st.just({"$ref": "#/$defs/named"}),
    lambda inner: (
        st.fixed_dictionaries({"items": inner}, optional={"prefixItems": st.lists(inner, min_size=1, max_size=2)})
        | st.fixed_dictionaries(
            {"properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=2)},
            optional={"required": st.lists(st.sampled_from("abc"), unique=True), "additionalProperties": inner},
        )
        | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)})
        | st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)})
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=400)
@given(value=VALUES, schema=SCHEMAS)
def test_arguments_fit_as_another_checker_says(value: object, schema: Any) -> None:
    whole = {"allOf": [schema], "$defs": {"named": {"type": ["integer", "string"]}}}
    assert fits(value, whole) == jsonschema.Draft202012Validator(whole).is_valid(value)


def test_a_schema_that_never_ends_fits_nothing() -> None:
    assert not fits({}, {"$ref": "#"})
    assert not fits({}, {"$ref": "#/$defs/missing"})
    assert not fits([1] * (MAX_STEPS + 1), {"items": {"type": "integer"}})
    doubled: Any = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": False}}
    for i in range(40):
        doubled["$defs"][f"b{i}"] = {"anyOf": [{"$ref": f"#/$defs/b{i + 1}"}, {"$ref": f"#/$defs/b{i + 1}"}]}
    doubled["$defs"]["b40"] = False
    assert not fits({}, {**doubled, "anyOf": [{"$ref": "#/$defs/b0"}]})


def written(draw: random.Random) -> str:
    """An answer that holds no call of an offered tool: prose, code and JSON that resemble one."""
    name = draw.choice(["get_weather", "time.now", "get_rain", "name"])
    city = draw.choice(['"Paris"', '"Rome"', "5", "null", "[]", "{}"])
    key = draw.choice(["arguments", "parameters", "args", "input", "properties"])
    near = draw.choice(
        [
            f'{{"name": "{name}", "{key}": {{"town": {city}}}}}',
            f'{{"{key}": {{"city": {city}}}, "tool": "{name}"}}',
            f'{{{{"name": "{name}", "{key}": {{"town": {city}}}}}}}',
            f'{{"name": "{name}", "description": "The weather", "{key}": {{"type": "object"}}}}',
            f'{{"name": "{name}", "{key}": {{"type": "object", "properties": {{"city": {city}}}, "required": []}}}}',
            f'{{"name": "{name}", "arguments": {{"city": {city}}}, "id": 1}}',
            f'{{"type": "function", "function": {{"name": "{name}", "arguments": {{"city": {city}}}}}}}',
            f"Call `{name}(city={city})` for it",
            f"{name}({city})",
            f"{name}(city={city}).text",
            f"result = {name}(city={city})",
            f"<function={name}><city>{city}</city></function>",
            f"<tools>{name}</tools>",
            f"- {name}: needs a city such as {city}",
            f'{{"city": {city}, "days": 3}}',
        ]
    )
    fence = draw.choice(["", "```json\n", "```python\n", "```\n", "`", "> "])
    end = {"": "", "`": "`", "> ": ""}.get(fence, "\n```")
    before = draw.choice(["", "Sure!\n\n", "1. ", "The tool is called so:\n", "{", "[", "a < b, "])
    after = draw.choice(["", "\n", "\nShall I call it?", " is what I would send.", "\n\nIt takes a city."])
    more = draw.choice(["", f"\n{PARIS_CALL}\nis another.", f"\n```\n{NOW_CALL}\n```\nor so"])
    return f"{before}{fence}{near}{end}{after}{more}"


@pytest.mark.parametrize("seed", range(5))
def test_no_answer_without_a_call_has_one(seed: int) -> None:
    """1,000 answers a seed, each kept to the last character."""
    draw = random.Random(seed)
    for _ in range(1_000):
        text = written(draw)
        pieces = look(text, [draw.randrange(len(text) + 1) for _ in range(3)])
        assert pieces == [Content(text)]
