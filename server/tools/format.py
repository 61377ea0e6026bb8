"""How one model writes reasoning, tool calls and content: a response template as transformers reads it, prepared for
parsing text as it arrives, and the syntax of calls for grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self, cast

from inferd.engine.api.errors import ModelError
from inferd.engine.api.grammars import PROPERTY
from inferd.server.tools.markers import Marker, recompiled
from inferd.server.tools.response_templates import ResponseTemplate, ResponseTemplateField, load_response_template

OWN = "own"
"""Name of a format that the checkpoint itself declares in its response_template."""
DERIVED = "derived"
"""Name of a format that was derived from the chat template."""

NAME, ID, INDEX, KEY = "\0name\0", "\0id\0", "\0index\0", PROPERTY
"""Places in the texts of a call syntax: for the call's name, its id, its number, and the argument's key."""

Role = Literal["reasoning", "content", "call", "unshown", "end"]
"""`unshown`: a message to somebody else than the caller, such as a tool that the request does not offer. `end`: the end
of a turn, at the end of an answer."""

_ROLES: dict[str, Role] = {
    "reasoning_content": "reasoning",
    "reasoning": "reasoning",
    "thinking": "reasoning",
    "content": "content",
    "tool_calls": "call",
    "turn_end": "end",
    "unshown": "unshown",
}

_LEADING_BLANKS = re.compile(r"^(\\s\*)+")
"""Blanks before a marker are left to the parser: a search that begins with them is quadratic in their number."""


@dataclass(frozen=True, slots=True)
class Tags:
    """How an argument of a call is written: `before` key `between` value `end`. A string is written as it is, any other
    value as JSON."""

    before: str
    between: str
    end: str
    separator: str = ""
    """Text between two arguments."""
    betweens: tuple[tuple[str, str], ...] = ()
    """(JSON type, text between key and value), if the type is written there."""
    quotes: tuple[str, str] = ("", "")
    """Texts that may surround a string, which then may hold any other text."""
    is_raw: bool = True
    """Whether strings are written as they are. Otherwise they are JSON."""
    string_end: str = ""
    """Text behind a string, if it is another than behind other values."""
    item: str = ""
    """Key of each item of a list, if lists and objects are written in tags, too. Otherwise they are JSON."""
    string_quote: str = ""
    """Text before and behind each string in a list or an object, whose keys are bare then. Otherwise they are JSON."""
    is_sorted: bool = False
    """Whether keys are written in the order of the alphabet."""
    is_python: bool = False
    """Whether values may also be written as Python writes them."""


@dataclass(frozen=True, slots=True)
class JsonKeys:
    """Names of the keys of a call that is a JSON object."""

    name: str = "name"
    """Empty: the object's only key is the name, and its value the arguments."""
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ignored: tuple[str, ...] = ("id", "type", "index", "call_id")


USUAL_KEYS = JsonKeys()


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are written: `begin` name `between` arguments `end` for each of them."""

    trigger: str
    """Marker at the beginning of the first call; empty: calls have no marker and begin the answer."""
    begin: str
    between: str
    end: str
    separator: str = "\n"
    before_all: str = ""
    after_all: str = ""
    tags: Tags | None = None
    """Tags of each argument; None: arguments are one JSON object."""
    is_single: bool = False
    """Whether the model's turn ends after one call."""

    @property
    def bare(self) -> CallSyntax | None:
        """The same calls without the markers around their JSON; None if they are not JSON objects between markers, or
        if the marker begins like JSON, by which an answer without markers is recognized."""
        start, end = self.begin.find("{"), self.end.rfind("}") + 1
        if self.trigger[:1] in ("", "{", "[") or self.tags is not None or start < 0 or NAME in self.end:
            return None
        begin, last = self.begin[start:], self.end[:end]
        try:
            json.loads(f"{begin}{self.between}{{}}{last}".replace(ID, "").replace(INDEX, "0"))
        except ValueError:
            return None
        return replace(self, trigger="", begin=begin, end=last, separator="\n", before_all="", after_all="")


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """The markers before and after reasoning."""

    begin: str
    end: str
    answer: str = ""
    """Marker before the answer itself; empty: it has none."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of an answer between markers."""

    role: Role
    open: Marker
    close: Marker | None
    """None: the region ends with the answer or, for JSON calls, with the JSON."""
    field: ResponseTemplateField
    is_json: bool
    """Whether the region holds calls as JSON, which can be parsed while they are written."""
    separator: str
    """Text put between two regions of one role."""
    keys: JsonKeys = USUAL_KEYS
    """Keys of calls as JSON."""
    is_bare: bool = False
    """Whether the region opens only at the beginning of an answer, holds nothing but calls of known tools, and may end
    with the answer."""

    @property
    def tag_pattern(self) -> str | None:
        """Pattern of one argument if calls are written in tags, else None."""
        pattern = self.field.content_args.get("tag_pattern") if self.field.content == "xml-inline" else None
        return pattern if isinstance(pattern, str) else None

    @property
    def tags(self) -> Tags | None:
        """The texts around arguments whose values show where they end; None if their tags have a pattern."""
        tags = self.field.content_args.get("tags")
        return tags if isinstance(tags, Tags) else None

    @property
    def calls(self) -> CallSyntax | None:
        """The syntax of the calls in the region, if they have no markers of their own."""
        calls = self.field.content_args.get("calls")
        return calls if isinstance(calls, CallSyntax) else None

    @property
    def is_python(self) -> bool:
        """Whether calls are written as Python, or in a syntax like it."""
        return self.role == "call" and self.field.content == "text"


@dataclass(frozen=True, slots=True)
class Format:
    """How a model writes its answers, as far as it is known."""

    tool_name: str
    """Name of the format of calls; "none" if it is not known."""
    reasoning_name: str
    source: str
    """Origin of the format in words, for the READY card."""
    template: ResponseTemplate | None = None
    regions: tuple[Region, ...] = ()
    is_bare: bool = False
    """Whether calls without a marker may begin an answer."""
    bare_keys: JsonKeys = USUAL_KEYS
    """Keys of calls without a marker."""
    call_syntax: CallSyntax | None = None
    reasoning_syntax: ReasoningSyntax | None = None
    has_short_ids: bool = False
    """Whether the template accepts only call ids of nine letters and digits."""
    ends: tuple[str, ...] = ()
    """Special tokens that end the model's turn, if the vocabulary has them. A checkpoint may leave them out."""
    why_not_derived: str = ""
    """Why no format of calls could be derived from the chat template; empty if one was, or if it was not tried."""

    @classmethod
    def of_template(
        cls, spec: Mapping[str, object], tool_name: str, reasoning_name: str, source: str, keys: JsonKeys = USUAL_KEYS
    ) -> Self:
        """Raises `ModelError` for a response template that transformers refuses."""
        try:
            template = load_response_template(dict(spec))
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"the response_template of the tokenizer cannot be read: {error}") from error
        regions = tuple(
            _region(field, _ROLES[field.name], keys)
            for field in template.fields.values()
            if field.name in _ROLES and field.open_re is not None
        )
        return cls(tool_name, reasoning_name, source, template, regions)

    @property
    def words(self) -> str:
        """The line of the READY card."""
        if not (self.reads_calls or self.reads_reasoning):
            return f"tool calls and reasoning: no known format, so answers are plain text{self._why}"
        calls, reasoning = (
            self._named(self.tool_name, self.written_call),
            self._named(self.reasoning_name, self.written_reasoning),
        )
        names = f"tool calls: {calls}; reasoning: {reasoning}"
        if OWN in (self.tool_name, self.reasoning_name):
            return names
        return f"{names} (from {self.source}{self._why})"

    @property
    def _why(self) -> str:
        is_told = self.why_not_derived and self.tool_name != DERIVED
        return f"; no calls derived: {self.why_not_derived}" if is_told else ""

    @staticmethod
    def _named(name: str, example: str) -> str:
        if name == OWN:
            return "the checkpoint's own format"
        if name == DERIVED:
            return f"derived, as {example}" if example else "derived"
        return name

    @property
    def written_call(self) -> str:
        """A call as the model writes it, on one line."""
        syntax = self.call_syntax
        if syntax is None:
            return ""
        text = f"{syntax.before_all}{syntax.begin}NAME{syntax.between}...{syntax.end}{syntax.after_all}"
        if syntax.tags is not None:
            argument = f"{syntax.tags.before}KEY{syntax.tags.between}VALUE{syntax.tags.end}"
            text = text.replace("...", f"{argument}...")
        places = {NAME: "NAME", ID: "ID", INDEX: "0", KEY: "KEY"}
        for place, word in places.items():
            text = text.replace(place, word)
        return " ".join(text.split())

    @property
    def written_reasoning(self) -> str:
        """Reasoning as the model writes it, on one line."""
        syntax = self.reasoning_syntax
        return "" if syntax is None else " ".join(f"{syntax.begin}...{syntax.end}".split())

    @property
    def reads_calls(self) -> bool:
        return self.is_bare or any(region.role == "call" for region in self.regions)

    @property
    def reads_reasoning(self) -> bool:
        return any(region.role == "reasoning" for region in self.regions)

    def watched(self, *, with_calls: bool) -> tuple[Region, ...]:
        """The regions to look for. Without tools, text that looks like a call is content."""
        return tuple(region for region in self.regions if with_calls or region.role != "call")

    def special_markers(self, tokens: Iterable[str], *, with_calls: bool) -> frozenset[str]:
        """The special tokens in `tokens` that markers consist of: the parser must see them."""
        regions = self.watched(with_calls=with_calls)
        regions = tuple(region for region in regions if region.role != "end")
        markers = [mark for region in regions for mark in (region.open, region.close) if mark is not None]
        arguments = [
            str(region.field.content_args).replace("\\", "") for region in regions if region.field.content_args
        ]
        return frozenset(
            token for token in tokens if token and (
                any(marker.mentions(token) for marker in markers)
                or any(token in text for text in arguments)
                or any(region.open.pattern.fullmatch(token) for region in regions)
            )
        )  # fmt: skip

    def prefill(self, prompt: str) -> str:
        """The beginning of the answer that is already in the prompt, behind the last start of an assistant's turn."""
        if self.template is None:
            return ""
        end = None
        for match in self.template.start_anchor_re.finditer(prompt):
            end = match.end()
        return self._opening_at_end(prompt) if end is None else prompt[end:]

    def _opening_at_end(self, prompt: str) -> str:
        """Used if the start of a turn is not known: an opening marker at the end of the prompt, which opens its
        region."""
        text = prompt.rstrip()
        literals = [text for region in self.regions for text in region.field.open_literals or ()]
        return next((literal for literal in literals if text.endswith(literal)), "")

    def with_bare_calls(self) -> Format:
        """The same, for answers whose calls may also have no markers."""
        return self if self.call_syntax is None or self.call_syntax.bare is None else replace(self, is_bare=True)

    def with_plain_calls(self, plain: Format) -> Format:
        """This format's reasoning, with the calls of `plain`."""
        return replace(
            self,
            tool_name=plain.tool_name,
            regions=self.watched(with_calls=False),
            is_bare=True,
            call_syntax=plain.call_syntax,
        )


def _region(field: ResponseTemplateField, role: Role, keys: JsonKeys) -> Region:
    is_json = role == "call" and field.content == "json" and not field.content_args and _is_plain(field.transform)
    close = None if field.close_re is None else _marker(field.close_re, field.close_literals)
    return Region(role, _marker(field.open_re, field.open_literals), close, field, is_json, field.join or "\n", keys)


def _marker(pattern: object, literals: list[str] | None) -> Marker:
    """A marker for the pattern, without its leading blanks."""
    compiled = cast("re.Pattern[str]", pattern)
    source = compiled.pattern
    trimmed = _LEADING_BLANKS.sub("", source)
    if literals is None and trimmed and trimmed != source:
        compiled = cast("re.Pattern[str]", recompiled(trimmed))
    is_final = literals is not None and not any(a != b and a.startswith(b) for a in literals for b in literals)
    return Marker(compiled, is_final)


def _is_plain(transform: object) -> bool:
    """Whether the JSON is a call, a list of calls, or the arguments of a call whose name is in the marker."""
    if transform is None:
        return True
    if not isinstance(transform, dict):
        return False
    function = transform.get("function", transform)
    if function == "{content}":
        return True
    if not isinstance(function, dict) or set(function) - {"name", "arguments", "type"}:
        return False
    shown = (function.get("name"), function.get("arguments"))
    return shown in (
        ("{name}", "{content}"),
        ("{name}", "{arguments}"),
        ("{name}", "{parameters}"),
        ("{content.name}", "{content.arguments}"),
        ("{content.name}", "{content.parameters}"),
    )
