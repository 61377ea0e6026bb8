"""Round trips of chat templates: what a template renders for an assistant's turn is parsed back to that turn.

A model continues the prompt as its template renders its earlier turns. So the text behind the prompt's end, up to the
end of the turn, is an answer whose content, reasoning and calls are known. `python -m tests.unit.round_trips
--templates FOLDER` tries every template of a folder and prints a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from inferd.engine.grammar.compiler import normal_form
from inferd.engine.grammar.vocabulary import load_vocabulary
from inferd.server.schema.caller_tool import functions
from inferd.server.structured.language import literal
from inferd.server.text.model import ServedModel
from inferd.server.text.render_wire import Limits, Program, RenderQuestion
from inferd.server.text.rendering import TEMPLATE_ERRORS, answer, check_syntax
from inferd.server.tools.answer_parser import AnswerParser
from inferd.server.tools.call_grammar import CallRules, answer_with_calls
from inferd.server.tools.derived.derive import derive
from inferd.server.tools.detect import Clues, detect
from inferd.server.tools.fallback import ToolSupport, probe
from inferd.server.tools.format import Format
from inferd.server.tools.parser_config import ParserConfig
from inferd.server.tools.pieces import CallArguments, CallBegun, Content, Piece, Reasoning, joined
from inferd.server.tools.second_look import Offer, SecondLook

SAID, THOUGHT = "The sky is blue today", "I ponder it well"
ASKED, ASKED_AGAIN = "What of the moon?", "What of the sun?"
MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
LIMITS = Limits(cpu_s=10.0)
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def tool(name: str, **properties: str) -> dict[str, Any]:
    fields = {key: {"type": kind, "description": f"The {key}."} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(fields)[:1]}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


TOOLS = (
    tool("find_flight", town="string", seats="integer", note="string"),
    tool("save_file", path="string", options="object", factor="number", names="array", quick="boolean"),
    tool("stop_all"),
)


def call(name: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


FLIGHT = call("find_flight", "flight001", town="Oslo", seats=2)
NOTED = call("find_flight", "flight002", town="Rome", note="one\ntwo  \"three\" <b>'four'</b> {5} \u20ac")
SAVED = call("save_file", "saving003", path="/tmp/a.txt", options={"mode": {"deep": [1, 2]}}, factor=1.5, quick=True)
LISTED = call("save_file", "saving004", path="b", names=["x", "y z"], quick=False)
STOPPED = call("stop_all", "stopping5")


@dataclass(frozen=True)
class Turn:
    """An assistant's turn."""

    calls: tuple[Mapping[str, Any], ...] = ()
    content: str = ""
    thought: str = ""


TURNS: dict[str, Turn] = {
    "content": Turn(content=SAID),
    "reasoning, content": Turn(content=SAID, thought=THOUGHT),
    "one call": Turn((FLIGHT,)),
    "a call of text": Turn((NOTED,)),
    "a call of every type": Turn((SAVED,)),
    "a call with a list": Turn((LISTED,)),
    "a call without arguments": Turn((STOPPED,)),
    "two calls": Turn((FLIGHT, SAVED)),
    "three calls": Turn((FLIGHT, FLIGHT, STOPPED)),
    "content, call": Turn((FLIGHT,), content=SAID),
    "reasoning, call": Turn((FLIGHT,), thought=THOUGHT),
    "reasoning, content, calls": Turn((SAVED, FLIGHT), content=SAID, thought=THOUGHT),
}


class Template:
    """Renders one template in this process."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.program = Program(text, text, SPECIAL_TOKENS)
        self.num_renderings = 0

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        is_prompt: bool = True,
        kwargs: Mapping[str, object] | None = None,
    ) -> str | None:
        """The text; None: the template refuses the messages."""
        self.num_renderings += 1
        question = RenderQuestion(LIMITS, messages, tools or None, None, is_prompt, False, kwargs or {})
        try:
            found = answer(self.program, question)
        except TEMPLATE_ERRORS:
            return None
        return None if found.form else found.text

    def render_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        is_prompt: bool,
        kwargs: Mapping[str, object],
    ) -> str | None:
        return self.render(messages, tools, is_prompt=is_prompt, kwargs=kwargs)

    def support(self) -> ToolSupport:
        return probe(lambda messages, tools: self.render(messages, tools))


def message_of(turn: Turn, support: ToolSupport) -> dict[str, Any]:
    empty = {"text": {"content": ""}, "null": {"content": None}, "absent": {}}[support.empty]
    message: dict[str, Any] = {"role": "assistant", **({"content": turn.content} if turn.content else empty)}
    if turn.thought:
        message |= {"reasoning_content": turn.thought, "reasoning": turn.thought}
    if turn.calls:
        message["tool_calls"] = list(turn.calls)
    return message


@dataclass(frozen=True)
class Trip:
    """One rendered turn: the prompt, the text behind it, and what the turn holds of what the template shows."""

    prompts: tuple[str, ...]
    """The prompt as far as the rendered turn repeats it, and the whole prompt."""
    texts: tuple[str, ...]
    """The text without the end of the turn. A long end may be known in part only."""
    turn: Turn


def trip(
    template: Template, support: ToolSupport, turn: Turn, kwargs: Mapping[str, object], *, follows: bool = False
) -> Trip | None:
    """None: the template does not render this turn, or not its calls. `follows`: whether another message of the user
    follows. Some templates take the last turn for the beginning of one that goes on."""
    asked = [{"role": "user", "content": ASKED}]
    shown = TOOLS if turn.calls else None
    prompt = template.render(asked, shown, kwargs=kwargs)
    whole = _turn_in(template, message_of(turn, support), shown, kwargs, follows=follows)
    plain = _turn_in(template, message_of(Turn(content=SAID), support), shown, kwargs, follows=follows)
    if prompt is None or whole is None or plain is None or SAID not in plain:
        return None
    if ASKED not in prompt or ASKED not in whole:
        return None
    head, tail = prompt[: prompt.rfind(ASKED)], prompt[prompt.rfind(ASKED) :]
    whole = whole[whole.rfind(ASKED) :]
    whole = ASKED + tail[len(ASKED) : len(tail) - len(tail[len(ASKED) :].lstrip())] + whole[len(ASKED) :].lstrip()
    names = [each["function"]["name"] for each in turn.calls]
    if any(whole.count(name) < names.count(name) for name in names):
        return None
    if any(key not in whole for given in turn.calls for key in given["function"]["arguments"]):
        return None
    begin, num_prompt = _same_beginning(tail, whole)
    text = whole[begin:]
    if turn.thought and THOUGHT in whole and THOUGHT not in text:
        return None
    again = template.render([*asked, message_of(Turn(content=SAID), support), *asked], shown, kwargs=kwargs) or SAID
    last = re.match(r"\s*(<[^<>]+>)?", again[again.rfind(SAID) + len(SAID) :])
    end = plain[plain.rfind(SAID) + len(SAID) :]
    texts = tuple(dict.fromkeys(_without_end(text, end, last and last[1], has_calls=bool(turn.calls))))
    marker = re.findall(r"<[^<>]+>|\S+", (head + tail)[: len(head) + num_prompt].rstrip())[-1]
    if (marker in texts[0] and re.search(r"\w", marker)) or (end.strip() and end.strip() in texts[0]):
        return None  # the template makes two turns of it
    thought = turn.thought if THOUGHT in text else ""
    content = turn.content if SAID in text else ""
    return Trip((head + tail[:num_prompt], prompt), texts, Turn(turn.calls, content, thought))


def _turn_in(
    template: Template,
    message: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
    kwargs: Mapping[str, object],
    *,
    follows: bool,
) -> str | None:
    """The text of a conversation up to an assistant's turn."""
    asked = [{"role": "user", "content": ASKED}]
    if not follows:
        return template.render([*asked, message], tools, is_prompt=False, kwargs=kwargs)
    asks_again = {"role": "user", "content": ASKED_AGAIN}
    text = template.render([*asked, message, asks_again], tools, is_prompt=False, kwargs=kwargs)
    header = (template.render(asked, tools, is_prompt=False, kwargs=kwargs) or ASKED).partition(ASKED)[0]
    if text is None or ASKED_AGAIN not in text:
        return None
    before = text.rpartition(ASKED_AGAIN)[0]
    last = header.rpartition("\n")[2] or header.rstrip().rpartition("\n")[2]
    return before.removesuffix(header[header.rfind(last) :]) if last else before


def _same_beginning(prompt: str, whole: str) -> tuple[int, int]:
    """Number of characters of `whole`, and of the prompt, that both begin with, without half a tag. Their blanks may
    differ, and the prompt may have more behind the user's message, such as the tools."""
    num = num_prompt = 0
    while num < len(whole) and num_prompt < len(prompt):
        if whole[num] == prompt[num_prompt]:
            num, num_prompt = num + 1, num_prompt + 1
        elif prompt[num_prompt].isspace():
            num_prompt += 1
        elif whole[num].isspace():
            num += 1
        else:
            break
    opened = max(whole.rfind("<", 0, num), whole.rfind("[", 0, num))
    closed = max(whole.rfind(">", 0, num), whole.rfind("]", 0, num))
    if opened > closed and num < len(whole) and num_prompt < len(prompt):
        num_prompt -= num - opened
        num = opened
    if whole[len(ASKED) : num].strip():
        return num, num_prompt
    ends = (prompt[-n:] for n in range(len(prompt) - len(ASKED), 0, -1))
    header = next((end for end in ends if end.strip() and whole.startswith(end, len(ASKED))), "")
    return (len(ASKED) + len(header), len(prompt)) if header else (num, num_prompt)


def _without_end(text: str, end: str, last: str | None, *, has_calls: bool) -> Iterator[str]:
    """The text without the end of the turn, which is a token that ends an answer. `last`: the tag that follows the turn
    in a conversation that goes on."""
    end = end.strip()
    stripped = text.rstrip()
    if last and not end and stripped.endswith(last):
        yield text[: len(stripped) - len(last)]
    found = [match.start() for match in re.finditer(r"^|<", end) if stripped.endswith(end[match.start() :])]
    yield from (text[: len(stripped) - len(end) + start] for start in found if end)
    if end and not found and has_calls and stripped.endswith((">", "]")):
        # Another token than that of plain answers.
        at = max(stripped.rfind("<"), stripped.rfind("[/"))
        if not stripped[at:].startswith(("</", "[/")):
            yield text[:at]
    yield text.removesuffix(SPECIAL_TOKENS["eos_token"])


def read(found: Format, trip: Trip, prompt: str, text: str, cuts: Sequence[int] = ()) -> Turn:
    """The turn as a request's answer. If calls without a marker stand behind content, `second_look` finds them."""
    config = ParserConfig(found, bool(trip.turn.calls), TOOLS, found.prefill(prompt))
    parser = AnswerParser(config)
    offer = Offer.of(TOOLS, None) if trip.turn.calls and found.is_bare else None
    look = None if offer is None else SecondLook(offer)
    bounds = [0, *sorted(cuts), len(text)]
    steps = [*(parser.feed(text[a:b]) for a, b in itertools.pairwise(bounds)), parser.finish()]
    pieces = [piece for step in steps for piece in (step if look is None else look.take(step))]
    return turn_of(joined([*pieces, *([] if look is None else look.finish())]))


def turn_of(pieces: Sequence[Piece]) -> Turn:
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    names = [piece.name for piece in pieces if isinstance(piece, CallBegun)]
    arguments = [_json(piece.text) for piece in pieces if isinstance(piece, CallArguments)]
    calls = tuple({"name": n, "arguments": a} for n, a in itertools.zip_longest(names, arguments))
    return Turn(calls, content, thought)


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def is_same(found: Turn, turn: Turn) -> bool:
    calls = tuple({"name": c["function"]["name"], "arguments": c["function"]["arguments"]} for c in turn.calls)
    return (found.calls, found.content.strip(), found.thought) == (calls, turn.content, turn.thought)


def cuts_of(text: str, seed: int) -> Iterator[list[int]]:
    """Every character alone, and some splits at random."""
    yield list(range(1, len(text)))
    rng = random.Random(seed)
    for _ in range(3):
        yield rng.sample(range(1, len(text)), min(5, max(0, len(text) - 1))) if len(text) > 1 else []


@dataclass
class Report:
    name: str
    found: Format
    support: ToolSupport
    results: dict[str, str] = field(default_factory=dict)
    """Turn -> ok, or what was read."""
    seconds: float = 0.0
    num_renderings: int = 0

    @property
    def is_ok(self) -> bool:
        return all(result == "ok" for result in self.results.values())


def tried(name: str, text: str, found: Format | None = None) -> Report:
    template = Template(text)
    support = template.support()
    template.num_renderings = 0
    began = time.perf_counter()
    found = found or format_of(template, support)
    report = Report(name, found, support, seconds=time.perf_counter() - began, num_renderings=template.num_renderings)
    for label, turn in TURNS.items():
        for switch, kwargs in (("", {}), (" (thinking)", {"enable_thinking": True, "thinking": True})):
            given = trip(template, support, turn, kwargs)
            if given is None:
                continue
            result = fault_of_reading(found, given)
            if result:
                followed = trip(template, support, turn, kwargs, follows=True)
                result = result if followed is None else fault_of_reading(found, followed) and result
            report.results[label + switch] = result or "ok"
            calls_only = turn.calls and not (turn.content or turn.thought)
            if not result and calls_only and found.call_syntax and not switch:
                report.results[f"{label}, required"] = fault_of_grammar(found, given) or "ok"
    return report


def fault_of_reading(found: Format, given: Trip) -> str:
    """The text that is not read back, with what was read; empty if all of it is, however it is cut."""
    wholes = {pair: read(found, given, *pair) for pair in itertools.product(given.prompts, given.texts)}
    right = next((pair for pair, whole in wholes.items() if is_same(whole, given.turn)), None)
    if right is None:
        return f"{given.texts[0]!r} -> {next(iter(wholes.values()))}"
    if any(read(found, given, *right, cuts) != wholes[right] for cuts in cuts_of(right[1], 1)):
        return f"{right[1]!r} is parsed differently if it is split"
    return ""


def _as_grammars_write(text: str) -> str:
    """The text with JSON's words, for which some templates write Python's, and without ids that the server gives."""
    text = re.sub(r"(?<=[>\n])(True|False)(?=[<\n])", lambda match: match[0].lower(), text)
    text = re.sub(r"(?<=>)\{'.*?\}(?=<)|(?<=>)\['.*?\](?=<)", lambda match: match[0].replace("'", '"'), text)
    return re.sub(r', "id": "\w+"(?=\})', "", text).replace("\\u20ac", "\u20ac").replace('">\n\n</', '">\n</')


@cache
def tiny() -> ServedModel:
    return ServedModel.load(MODEL_PATH, ("m",), max_model_len=256, vocab_size=3_072)


@cache
def vocabulary() -> LLTokenizer:
    return load_vocabulary(MODEL_PATH, 3_072)


def fault_of_grammar(found: Format, given: Trip) -> str:
    """Whether a grammar of required calls takes the template's own text of calls; else the part that it takes."""
    assert found.call_syntax is not None
    rules = CallRules(functions(TOOLS), is_required=True, is_single=False)
    tokenizer = tiny().tokenizer
    syntax, empty = found.call_syntax, literal("")
    begin = (syntax.before_all + syntax.begin).lstrip()
    written = begin if begin and given.prompts[0].endswith(begin) else ""
    language = answer_with_calls(rules, syntax, tokenizer.added_tokens, None, empty, empty, written)
    grammar = normal_form(language.text()).text
    begin = "" if written else re.split("\0", begin)[0]
    taken = ""
    for text in map(_as_grammars_write, given.texts):
        if begin not in text:
            return f"{text!r} does not begin with {begin!r}"
        calls = text[text.find(begin) :].rstrip()
        for ending in ("", "\n"):
            matcher = LLMatcher(vocabulary(), grammar)
            if matcher.is_error():
                return str(matcher.get_error())
            ids = list(tokenizer.encode(calls + ending, False))
            num = matcher.try_consume_tokens(ids)
            if num == len(ids) and matcher.is_accepting():
                return ""
            taken = taken or tokenizer.decode(ids[:num], False)
    return f"{given.texts[0]!r}: only {taken!r} is taken"


def format_of(template: Template, support: ToolSupport) -> Format:
    derived = derive(template.render_turn, support, check_syntax(template.text).names)
    if WHY:
        print("   ", derived)
    return detect(Clues(chat_template=template.text, shows_tools=support.tools, derived=derived))


WHY = False


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--templates", type=Path, required=True)
    options.add_argument("--only", default="")
    options.add_argument("--verbose", action="store_true")
    given = options.parse_args()
    global WHY
    WHY = given.verbose
    reports = []
    for path in sorted(given.templates.rglob("*.jinja")):
        if given.only in path.stem:
            report = tried(path.stem, path.read_text())
            reports.append(report)
            read = {label: result for label, result in report.results.items() if "required" not in label}
            required = [result for label, result in report.results.items() if "required" in label]
            num_ok, num_taken = sum(result == "ok" for result in read.values()), required.count("ok")
            print(
                f"{report.name:60} {report.found.tool_name:12} {report.found.reasoning_name:10} "
                f"{num_ok:3}/{len(read):3} {num_taken:2}/{len(required):2} {'ok' if report.is_ok else 'FAIL':5}"
                f"{'' if report.support.tools else ' no tools'}{'' if report.support.calls else ' no calls'}"
                f" {report.seconds * 1000:4.0f} ms {report.num_renderings}"
            )
            if given.verbose:
                for label, result in report.results.items():
                    if result != "ok":
                        print(f"    {label}: {result}")
    print(f"{sum(report.is_ok for report in reports)} of {len(reports)} templates: every turn comes back")
    calling = [report for report in reports if report.support.calls]
    num_derived = sum(report.found.tool_name == "derived" for report in calling)
    by_hand = [report.name for report in calling if report.found.tool_name not in ("derived", "none")]
    unknown = [report.name for report in calling if report.found.tool_name == "none"]
    print(f"{len(calling)} show calls: {num_derived} derived; by hand: {by_hand}; no format: {unknown}")


if __name__ == "__main__":
    main()
