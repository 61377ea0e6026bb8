"""How calls are written: markup, order and style of arguments, read from turns with calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inferd.server.tools.builtin import CallFormat
from inferd.server.tools.derived.probes import IDS, KEYS, NAMES, NUMBER, USUAL_ID, VALUES, Probes, call
from inferd.server.tools.derived.reasoning import Markers
from inferd.server.tools.derived.texts import TAG, common_prefix, common_suffix, flexible
from inferd.server.tools.derived.turn import Frame
from inferd.server.tools.fallback import Message
from inferd.server.tools.format import ID, INDEX, KEY, NAME, USUAL_KEYS, CallSyntax, JsonKeys, Tags

_DECODER = json.JSONDecoder()
_NAME = r"(?P<name>[\w.\-]{1,128})"
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_OBJECT = {"type": "function", "function": "{content}"}
_LONE_DIGIT = re.compile(r"(?<![\w.])[0-9](?![\w.])")
_TYPED: Mapping[str, Any] = {"object": {"inner": 1}, "array": [1], "boolean": True, "null": None}


class NotDerivedError(Exception):
    """The template's calls have no form that can be derived. Its text says why."""


class _QuotedError(NotDerivedError):
    """Only strings are quoted, as in JSON."""

    def __init__(self, opening: str, closing: str) -> None:
        super().__init__(f"only texts are quoted, by {opening} and {closing}")
        self.opening, self.closing = opening, closing


@dataclass(frozen=True, slots=True)
class _Call:
    """A turn with one call, cut into its texts."""

    before: str
    """Text before the name."""
    between: str
    """Text between the name and the arguments."""
    arguments: str
    after: str
    """Text behind the arguments, without the end of the turn."""


def calls_of(probes: Probes, frame: Frame, markers: Markers) -> CallFormat:
    """Raises `NotDerivedError`."""
    if not probes.support.calls:
        raise NotDerivedError("the template shows no calls")
    found = _Reader(probes, frame, markers).format()
    takes_usual_ids = probes.turn([call(0, {KEYS[0]: VALUES[0]}, USUAL_ID)]) is not None
    return replace(found, has_short_ids=not takes_usual_ids)


class _Reader:
    def __init__(self, probes: Probes, frame: Frame, markers: Markers) -> None:
        self._probes, self._frame, self._markers = probes, frame, markers
        self._ends: tuple[str, ...] = ()

    def format(self) -> CallFormat:
        one = self._body([call(0, {KEYS[0]: VALUES[0]})])
        name_at = one.find(NAMES[0])
        if name_at < 0 or KEYS[0] not in one[name_at:] or VALUES[0] not in one[name_at:]:
            raise NotDerivedError("the template does not show a call's name before its arguments")
        if one.startswith(f"({KEYS[0]}=", name_at + len(NAMES[0])):
            return self._as_python(one, name_at)
        found = self._json_arguments(one, name_at)
        if found is None:
            try:
                tags, start, end = self._tags(one, name_at)
            except _QuotedError as quotes:
                return self._as_relaxed_json(one, name_at, quotes)
        else:
            tags, (start, end) = None, found
        cut = _Call(one[:name_at], one[name_at + len(NAMES[0]) : start], one[start:end], one[end:])
        syntax = self._syntax(cut, tags)
        around = _object_around(one, name_at, start) if tags is None else None
        if around is not None:
            return self._as_json(one, around, syntax)
        return self._as_named(syntax)

    def _body(self, calls: Sequence[Message]) -> str:
        body = self._frame.body(self._probes.turn(calls))
        if body is None:
            raise NotDerivedError("the template renders turns with calls behind another header, or refuses them")
        text, ends = self._frame.without_end(body)
        self._ends = ends or self._ends
        return self._markers.without_empty(text).lstrip()

    # -- arguments ---------------------------------------------------------------------------------------------------

    def _json_arguments(self, body: str, name_at: int) -> tuple[int, int] | None:
        """Start and end of the arguments if they are one JSON object."""
        for at in range(name_at, body.find(KEYS[0])):
            if body[at] == "{":
                try:
                    value, end = _DECODER.raw_decode(body, at)
                except ValueError:
                    continue
                if value == {KEYS[0]: VALUES[0]}:
                    return at, end
        return None

    def _tags(self, one: str, name_at: int) -> tuple[Tags, int, int]:
        """(tags of arguments, start of the first one, end of the last one)."""
        name_end = name_at + len(NAMES[0])
        key_at = one.find(KEYS[0], name_end)
        key_end = key_at + len(KEYS[0])
        value_at = one.find(VALUES[0], key_end)
        value_end = value_at + len(VALUES[0])
        two = self._body([call(0, dict(zip(KEYS, VALUES, strict=True)))])
        second_key = two.find(KEYS[1])
        first_value = two.find(VALUES[0])
        if second_key < first_value or first_value < 0:
            raise NotDerivedError("the template does not show two arguments in their order")
        way = two[first_value + len(VALUES[0]) : second_key].replace(KEYS[0], KEY)
        after = one[value_end:].replace(KEYS[0], KEY)
        end = common_prefix(after, way)
        rest = way[len(end) :]
        before = common_suffix(one[name_end:key_at], rest) if rest else ""
        separator = rest[: len(rest) - len(before)]
        between = one[key_end:value_at]
        tags = self._typed(Tags(before, between, end, separator), one, key_end, value_end)
        if KEY in before + between + separator or one.count(KEYS[0]) > 1 + end.count(KEY):
            raise NotDerivedError("the template shows a key in several places")
        length = len(end.replace(KEY, KEYS[0]))
        return tags, key_at - len(before), value_end + length

    def _typed(self, tags: Tags, one: str, key_end: int, value_end: int) -> Tags:
        """The same with what depends on the type of the value."""
        between, end = self._around(NUMBER, str(NUMBER), one[:key_end])
        after = one[value_end:]
        if (between, end) == (tags.between, after):
            return self._quoted(tags)
        opening = tags.between[len(between) :] if tags.between.startswith(between) else ""
        closing = after[: len(after) - len(end)] if after.endswith(end) else ""
        if opening and closing:
            raise _QuotedError(opening, closing)
        if after != end:
            raise NotDerivedError("the end of an argument depends on its type")
        betweens = {"string": tags.between, "number": between}
        for kind, value in _TYPED.items():
            try:
                betweens[kind] = self._around(value, None, one[:key_end])[0]
            except NotDerivedError:
                continue
        return Tags(tags.before, tags.between, tags.end, tags.separator, tuple(betweens.items()))

    def _around(self, value: object, text: str | None, before: str) -> tuple[str, str]:
        """(text between the key and a value, text behind it). `text`: how the value is written, if that is known."""
        body = self._body([call(0, {KEYS[0]: value})])
        if not body.startswith(before):
            raise NotDerivedError("a call begins differently if its argument has another type")
        rest = body[len(before) :]
        if text is None:
            text = next((text for text in (json.dumps(value), str(value)) if text in rest), None)
        if text is None or text not in rest:
            raise NotDerivedError(f"the template does not show the value {value!r}")
        at = rest.find(text)
        return rest[:at], rest[at + len(text) :]

    def _quoted(self, tags: Tags) -> Tags:
        """The same with the texts that surround a string that has characters of markup."""
        hostile = "<b>&</b>\n"
        body = self._body([call(0, {KEYS[0]: hostile})])
        at = body.find(hostile.strip())
        if at < 0 or not (tags.between.strip() and tags.end.strip()):
            return tags
        before, after = body[:at], body[at + len(hostile) :]
        end = tags.end.replace(KEY, KEYS[0])
        opening = before.rpartition(tags.between)[2] if tags.between in before else ""
        closing = after.partition(end)[0] if end in after else ""
        if not (opening.strip() and closing.strip()):
            return tags
        return Tags(tags.before, tags.between, tags.end, tags.separator, tags.betweens, (opening, closing))

    # -- calls -------------------------------------------------------------------------------------------------------

    def _syntax(self, one: _Call, tags: Tags | None) -> CallSyntax:
        before, between, after = _placed(one.before), _placed(one.between), _placed(one.after)
        way = self._way_to_second(one)
        if way is None:
            return CallSyntax(_trigger(before), before, between, after, tags=tags, is_single=True)
        end = common_prefix(after, way)
        rest = way[len(end) :]
        begin = common_suffix(before, rest)
        if not begin and before.strip() and (tags is None or tags.is_raw):
            raise NotDerivedError("the second call of a turn begins differently")
        before_all = before[: len(before) - len(begin)]
        separator = rest[: len(rest) - len(begin)]
        trigger = _trigger(before_all + begin)
        return CallSyntax(trigger, begin, between, end, separator, before_all, after[len(end) :], tags)

    def _way_to_second(self, one: _Call) -> str | None:
        """The text between the arguments of a call and the name of the next; None if a turn shows only one."""
        if not self._probes.support.several_calls:
            return None
        two = self._body([call(0, {KEYS[0]: VALUES[0]}), call(1, {KEYS[0]: VALUES[0]})])
        first = one.before + NAMES[0] + one.between + one.arguments
        second = two.find(NAMES[1])
        if second < 0 or not two.startswith(first):
            raise NotDerivedError("a call is written differently if another one follows")
        return _placed(two[len(first) : second])

    # -- formats -----------------------------------------------------------------------------------------------------

    def _as_json(self, one: str, around: tuple[int, int, JsonKeys], syntax: CallSyntax) -> CallFormat:
        at, end, keys = around
        opening, closing = one[:at].strip(), one[end:].strip()
        syntax = _without_id_behind(syntax)
        if not opening:
            return CallFormat(None, syntax, is_bare=True, ends=self._ends, keys=keys)
        closes = {"close_pattern": flexible(_placed(closing))} if closing else {}
        field = {
            "open_pattern": flexible(_placed(opening)),
            **closes,
            "repeats": True,
            "content": "json",
            "transform": _OBJECT,
        }  # fmt: skip
        return CallFormat(field, syntax, ends=self._ends, keys=keys)

    def _as_python(self, one: str, name_at: int) -> CallFormat:
        start, end = name_at + len(NAMES[0]) + 1, one.find(")", one.find(VALUES[0]))
        cut = _Call(one[:name_at], one[start - 1 : start], one[start:end], one[end:])
        syntax = self._syntax(cut, Tags("", "=", "", ", ", is_raw=False))
        opening = (syntax.before_all + syntax.begin).rstrip().removesuffix("[").strip()
        closing = (syntax.end + syntax.after_all).lstrip(") ").removeprefix("]").strip()
        if not (_is_marker(opening) and closing) or syntax.begin.strip(" [\n"):
            raise NotDerivedError("calls in Python have no marker around them")
        field = {"open": opening, "close": closing, "repeats": True, "content": "text"}
        return CallFormat(field, syntax, ends=self._ends)

    def _as_relaxed_json(self, one: str, name_at: int, quotes: _QuotedError) -> CallFormat:
        """Arguments as JSON with bare keys and other quotes. No grammar is known for them."""
        start, key_at = name_at + len(NAMES[0]), one.find(KEYS[0])
        end = one.find(VALUES[0]) + len(VALUES[0]) + len(quotes.closing)
        written = f"{{{KEYS[0]}:{quotes.opening}{VALUES[0]}{quotes.closing}}}"
        if one[start:key_at] != "{" or one[start : end + 1] != written:
            raise quotes
        cut = _Call(one[:name_at], "", written, one[end + 1 :])
        named = self._as_named(self._syntax(cut, None))
        content_args = {"unquoted_keys": True, "string_delims": [[quotes.opening, quotes.closing]]}
        return replace(named, field={**(named.field or {}), "content_args": content_args}, syntax=None)

    def _as_named(self, syntax: CallSyntax) -> CallFormat:
        outer, inner = _inner(syntax.begin)
        if not (_is_marker(inner) or (inner.strip() and _is_marker(syntax.between))):
            raise NotDerivedError("calls have no marker before their name")
        tag, prefix = _prefix(inner.lstrip())
        parts = [
            _may_precede(syntax.before_all),
            _may_precede(outer),
            flexible(tag),
            f"(?:{flexible(prefix)})?" if tag else flexible(prefix),
        ]
        opening = "".join(parts) + _after_name(syntax.between.rstrip(), is_json=syntax.tags is None)
        ends = _ends_of(syntax.end, syntax.tags)
        closing = (flexible(ends[0].strip()) + _may_follow(ends[1])) if ends[0].strip() else ""
        if closing or syntax.after_all.strip():
            closing = closing + _may_follow(syntax.after_all) if closing else flexible(syntax.after_all.strip())
        if closing and TAG.search(syntax.separator):
            closing += _may_follow(syntax.separator)
        closes = {"close_pattern": closing} if closing else {}
        field: dict[str, object] = {"open_pattern": opening, **closes, "repeats": True, "transform": _NAMED}
        if syntax.tags is None:
            return CallFormat({**field, "content": "json"}, syntax, ends=self._ends)
        if not closing:
            raise NotDerivedError("calls with tags have no end")
        content = {"content": "xml-inline", "content_args": tag_arguments(syntax.tags)}
        return CallFormat({**field, **content}, syntax, ends=self._ends)


def _object_around(body: str, name_at: int, arguments_at: int) -> tuple[int, int, JsonKeys] | None:
    """(start and end of the JSON that holds the whole call, its keys)."""
    for at in range(name_at):
        if body[at] in "{[":
            try:
                value, end = _DECODER.raw_decode(body, at)
            except ValueError:
                continue
            if end <= arguments_at:
                continue
            keys = _keys_of(value[0] if isinstance(value, list) and len(value) == 1 else value)
            if keys is None:
                raise NotDerivedError("a call is JSON of an unknown form")
            return at, end, keys
    return None


def _keys_of(value: object) -> JsonKeys | None:
    arguments = {KEYS[0]: VALUES[0]}
    if not isinstance(value, dict):
        return None
    if value == {NAMES[0]: arguments}:
        return JsonKeys(name="")
    if isinstance(value.get("function"), dict):
        inner = _keys_of(value["function"])
        if inner is None:
            return None
        others = tuple(key for key in value if key != "function")
        return JsonKeys(inner.name, inner.arguments, (*inner.ignored, *others))
    names = [key for key, item in value.items() if item == NAMES[0]]
    held = [key for key, item in value.items() if item == arguments]
    if len(held) != 1 or not names:
        return None
    others = tuple(key for key in value if key not in (names[0], held[0]))
    usual = USUAL_KEYS
    arguments_keys = dict.fromkeys((held[0], *(key for key in usual.arguments if key != names[0])))
    return JsonKeys(names[0], tuple(arguments_keys), tuple(dict.fromkeys((*usual.ignored, *others))))


def _placed(text: str) -> str:
    """The text with places for what each call has of its own."""
    for call_id in IDS:
        text = text.replace(call_id, ID)
    for name in NAMES:
        text = text.replace(name, NAME)
    return _LONE_DIGIT.sub(INDEX, text)


def _without_id_behind(syntax: CallSyntax) -> CallSyntax:
    """JSON calls without an id behind the arguments: the server gives it."""
    end = re.sub(rf'\s*,\s*"\w+"\s*:\s*"?{ID}"?', "", syntax.end)
    return replace(syntax, end=end)


def _trigger(first: str) -> str:
    """The marker at the beginning of calls."""
    first = first.lstrip()
    tag = TAG.match(first)
    if tag is not None:
        return tag[0]
    brace = re.search(r"\s*[{\[]", first)
    return first if brace is None else first[: brace.start()]


def _inner(begin: str) -> tuple[str, str]:
    """(what may be missing before a call, the marker right before its name)."""
    tags = list(TAG.finditer(begin))
    opened = begin.rfind("<", tags[-1].end() if tags else 0)
    if opened > 0:
        return begin[:opened], begin[opened:]
    if len(tags) > 1:
        return begin[: tags[-1].start()], begin[tags[-1].start() :]
    return "", begin


def _prefix(inner: str) -> tuple[str, str]:
    """(the tag, the word between it and the name, which models leave out)."""
    tag = TAG.match(inner)
    return ("", inner) if tag is None or not tag[0] or "<" in inner[tag.end() :] else (tag[0], inner[tag.end() :])


def _after_name(between: str, *, is_json: bool) -> str:
    """A pattern of the name and the text between it and the arguments. Models leave out an id, and the marker before
    JSON."""
    named = re.search(rf"(?:{TAG.pattern}){ID}", between)
    if named is None:
        pattern = flexible(NAME + between, _NAME)
    else:
        before, after = between[: named.start()], between[named.end() :]
        pattern = flexible(NAME + before, _NAME) + f"(?:{flexible(named[0])})?" + flexible(after)
    if not (is_json and TAG.search(between)):
        return pattern
    whole = pattern.removeprefix(_NAME)
    return rf"{_NAME}(?:{whole}|(?=\s*\{{))"


def _ends_of(end: str, tags: Tags | None) -> tuple[str, str]:
    """(the end up to the first tag that no argument has, what may be missing behind it)."""
    inner = "" if tags is None else f"{tags.before} {tags.between} {tags.end}"
    at = next((tag.end() for tag in TAG.finditer(end) if end[: tag.end()].strip() not in inner), len(end))
    return end[:at], end[at:]


def _is_marker(text: str) -> bool:
    return bool(re.search(r"[<\[|]", text)) or len(text.strip()) > 4


def _may_precede(text: str) -> str:
    """A pattern of a marker that may be missing before another one."""
    return rf"(?:{flexible(text.strip())}\s*)?" if text.strip() else ""


def _may_follow(text: str) -> str:
    """A pattern of a marker that may be missing behind another one."""
    return rf"(?:\s*{flexible(text.strip())})?" if text.strip() else ""


def tag_arguments(tags: Tags) -> dict[str, object]:
    """`content_args` of a field whose arguments are in tags."""
    before, end = flexible(tags.before.lstrip()), tags.end.strip()
    betweens = [tags.between, *(text for _, text in tags.betweens)]
    closing = r"\n?" if tags.end.startswith("\n") else ""
    first = re.escape(betweens[0].lstrip()[:1] or "=")
    key = rf"(?P<key>[^\n{first}]{{1,256}}?)"
    patterns = "|".join(dict.fromkeys(_between(text) for text in betweens))
    kinds = {text: kind for kind, text in tags.betweens}
    value = r"(?P<value>.*?)"
    if tags.quotes != ("", ""):
        opening, ending = map(re.escape, tags.quotes)
        value = rf"(?:{opening}(?P<quoted>.*?){ending}|{value})"
    ends = [flexible(end)] if end else []
    ends += [rf"(?={before})"] if len(tags.before.strip()) > 2 else []
    ends += [rf"(?={flexible(tags.separator.strip())})"] if tags.separator.strip() and not end else []
    separator = _may_precede(tags.separator)
    pattern = rf"{separator}{before}{key}(?P<between>{patterns}){value}{closing}(?:{'|'.join(ends)}|\Z)"
    return {"tag_pattern": pattern, "separator": tags.separator.strip(), "kinds": kinds}


def _between(text: str) -> str:
    """A line break at its end may be missing; one that is not there belongs to the value."""
    stripped = text.rstrip()
    blanks = text[len(stripped) :]
    return flexible(stripped) + (r"\n?" if "\n" in blanks else re.escape(blanks))
