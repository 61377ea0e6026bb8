"""How calls are written: markup, order and style of arguments, read from turns with calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from inferd.server.tools.builtin import CallFormat
from inferd.server.tools.derived.fields import json_calls, listed_calls, named_calls, python_calls
from inferd.server.tools.derived.probes import IDS, KEYS, NAMES, NUMBER, USUAL_ID, VALUES, Probes, call
from inferd.server.tools.derived.reasoning import Markers
from inferd.server.tools.derived.texts import parted
from inferd.server.tools.derived.turn import Frame
from inferd.server.tools.fallback import Message
from inferd.server.tools.format import ID, INDEX, KEY, NAME, USUAL_KEYS, CallSyntax, JsonKeys, Tags
from inferd.server.tools.patterns import TAG

_DECODER = json.JSONDecoder()
_PYTHON = Tags("", "=", "", ", ", is_raw=False, is_python=True)
_HOSTILE, _INNER = 'a"b\n', "inner"
_NO_MARKER = "calls have no marker before their name, or none behind them"
_LONE_DIGIT = re.compile(r"(?<![\w.])[0-9](?![\w.])")
_TYPED: Mapping[str, Any] = {"object": {"inner": 1}, "array": [1], "boolean": True, "null": None}


class NotDerivedError(Exception):
    """The template's calls have no form that can be derived. Its text says why."""


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


def calls_of(probes: Probes, frame: Frame, markers: Markers) -> Iterator[CallFormat]:
    """Formats that the template's calls may have, the likeliest first. Raises `NotDerivedError`."""
    if not probes.support.calls:
        raise NotDerivedError("the template shows no calls")
    takes_usual_ids = probes.turn([call(0, {KEYS[0]: VALUES[0]}, USUAL_ID)]) is not None
    reader = _Reader(probes, frame, markers)
    for found in reader.formats():
        yield replace(found, has_short_ids=not takes_usual_ids, ends=reader.ends)


class _Reader:
    """Reads the calls of one template."""

    def __init__(self, probes: Probes, frame: Frame, markers: Markers) -> None:
        self._probes, self._frame, self._markers = probes, frame, markers
        self.ends: tuple[str, ...] = ()
        """Tags that end a turn with calls."""

    def formats(self) -> Iterator[CallFormat]:
        """The formats that one call may have. Raises `NotDerivedError`."""
        one = self._body([call(0, {KEYS[0]: VALUES[0]})])
        name_at = one.find(NAMES[0])
        if name_at < 0 or KEYS[0] not in one[name_at:] or VALUES[0] not in one[name_at:]:
            raise NotDerivedError("the template does not show a call's name before its arguments")
        if one.startswith(f"({KEYS[0]}=", name_at + len(NAMES[0])) and (found := self._as_python(one, name_at)):
            yield found
        arguments = self._json_arguments(one, name_at)
        if arguments is None:
            yield self._in_tags(one, name_at)
            return
        start, end = arguments
        syntax = self._syntax(_Call(one[:name_at], one[name_at + len(NAMES[0]) : start], one[start:end], one[end:]))
        around = _object_around(one, name_at, start)
        if around is not None:
            yield self._as_json(one, around, syntax)
        elif (named := named_calls(syntax, (self._markers.begin, self._markers.answer))) is not None:
            yield named
        else:
            raise NotDerivedError(_NO_MARKER)

    def _body(self, calls: Sequence[Message]) -> str:
        body = self._frame.body(self._probes.turn(calls))
        if body is None:
            raise NotDerivedError("the template renders turns with calls behind another header, or refuses them")
        text, ends = self._frame.without_end(body)
        self.ends = ends or self.ends
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
        end, separator, before = parted(after, way, one[name_end:key_at])
        between = one[key_end:value_at]
        if KEY in before + between + separator or one.count(KEYS[0]) > 1 + end.count(KEY):
            raise NotDerivedError("the template shows a key in several places")
        start, length = key_at - len(before), len(end.replace(KEY, KEYS[0]))
        turned = self._body([call(0, dict(reversed(list(zip(KEYS, VALUES, strict=True)))))])
        is_sorted = -1 < turned.find(KEYS[0]) < turned.find(KEYS[1])
        tags = self._typed(Tags(before, between, end, separator, is_sorted=is_sorted), one, key_end, value_end)
        return tags, start, value_end + length

    def _typed(self, tags: Tags, one: str, key_end: int, value_end: int) -> Tags:
        """The same with what depends on the type of the value."""
        between, end = self._around(NUMBER, str(NUMBER), one[:key_end])
        after = one[value_end:]
        if (between, end) == (tags.between, after):
            return self._nested(tags, one[:key_end]) or self._quoted(tags)
        opening = tags.between[len(between) :] if tags.between.startswith(between) else ""
        closing = after[: len(after) - len(end)] if after.endswith(end) else ""
        if opening and closing:
            return self._with_quotes(tags, between, opening, closing)
        if after != end:
            raise NotDerivedError("the end of an argument depends on its type")
        betweens = {"string": tags.between, "number": between}
        for kind, value in _TYPED.items():
            try:
                betweens[kind] = self._around(value, None, one[:key_end])[0]
            except NotDerivedError:
                continue
        return replace(tags, betweens=tuple(betweens.items()))

    def _with_quotes(self, tags: Tags, between: str, opening: str, closing: str) -> Tags:
        """The same for strings between two texts: those of JSON, or as they are."""
        end = tags.end.removeprefix(closing)
        if opening == closing == '"' and json.dumps(_HOSTILE) in self._body([call(0, {KEYS[0]: _HOSTILE})]):
            return replace(tags, between=between, end=end, is_raw=False)
        relaxed = self._body([call(0, {KEYS[0]: {KEYS[1]: VALUES[1]}})])
        quote = opening if f"{{{KEYS[1]}{between}{opening}{VALUES[1]}{closing}}}" in relaxed else ""
        betweens = (("string", tags.between),)
        return replace(tags, between=between, end=end, betweens=betweens, string_end=tags.end, string_quote=quote)

    def _nested(self, tags: Tags, before: str) -> Tags | None:
        """The same for templates that write objects and lists in tags, too."""
        inner = f"{tags.before}{_INNER}{tags.between}1{tags.end.replace(KEY, _INNER)}"
        body = self._body([call(0, {KEYS[0]: {_INNER: 1}})])
        if not (body.startswith(before) and body[len(before) :].removeprefix(tags.between).startswith(inner)):
            return None
        items = self._body([call(0, {KEYS[0]: [1]})])
        pattern = f"{re.escape(tags.before)}(\\w+){re.escape(tags.between)}1"
        item = re.match(pattern, items[len(before) + len(tags.between) :])
        return None if item is None else replace(tags, item=item[1])

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
        return replace(tags, quotes=(opening, closing))

    # -- calls -------------------------------------------------------------------------------------------------------

    def _syntax(self, one: _Call, tags: Tags | None = None) -> CallSyntax:
        before, between, after = _placed(one.before), _placed(one.between), _placed(one.after)
        way, after_two = self._way_to_second(one)
        if way is None:
            return CallSyntax(_trigger(before), before, between, after, tags=tags, is_single=True)
        end, separator, begin = parted(after, way, before)
        before_all = before[: len(before) - len(begin)]
        # Some templates write the end of all calls only behind several.
        after_all = after[len(end) :] or after_two.removeprefix(end)
        return CallSyntax(_trigger(before_all + begin), begin, between, end, separator, before_all, after_all, tags)

    def _way_to_second(self, one: _Call) -> tuple[str | None, str]:
        """(text between the arguments of a call and the name of the next, text behind the second call's arguments).
        None if a turn shows only one."""
        if not self._probes.support.several_calls:
            return None, ""
        two = self._body([call(0, {KEYS[0]: VALUES[0]}), call(1, {KEYS[0]: VALUES[0]})])
        first = one.before + NAMES[0] + one.between + one.arguments
        second = two.find(NAMES[1])
        # The text before the first call may tell how many there are.
        begin = two[: len(one.before)]
        is_same = _LONE_DIGIT.sub(INDEX, begin) == _LONE_DIGIT.sub(INDEX, one.before)
        if second < 0 or not is_same or not two.startswith(first[len(begin) :], len(begin)):
            raise NotDerivedError("a call is written differently if another one follows")
        behind = two[second + len(NAMES[1]) :].rpartition(one.arguments)[2]
        return _placed(two[len(first) : second]), _placed(behind)

    # -- formats -----------------------------------------------------------------------------------------------------

    def _as_json(self, one: str, around: tuple[int, int, JsonKeys], syntax: CallSyntax) -> CallFormat:
        at, end, keys = around
        if not syntax.is_single and not syntax.begin.strip():
            raise NotDerivedError("the second call of a turn begins differently")
        opening, closing = one[:at].strip(), one[end:].strip()
        return json_calls(_placed(opening), _placed(closing), _without_id_behind(syntax), keys)

    def _as_python(self, one: str, name_at: int) -> CallFormat | None:
        start, end = name_at + len(NAMES[0]) + 1, one.find(")", one.find(VALUES[0]))
        cut = _Call(one[:name_at], one[start - 1 : start], one[start:end], one[end:])
        return python_calls(self._syntax(cut, _PYTHON))

    def _in_tags(self, one: str, name_at: int) -> CallFormat:
        tags, start, end = self._tags(one, name_at)
        name_end = name_at + len(NAMES[0])
        if tags.string_quote and one[name_end:start] == "{" and one[end : end + 1] == "}":
            return self._as_relaxed_json(one, name_at, tags, end)
        syntax = self._syntax(_Call(one[:name_at], one[name_end:start], one[start:end], one[end:]), tags)
        named = named_calls(syntax, (self._markers.begin, self._markers.answer))
        if named is not None:
            return named
        # The template prints a text as it is, without quotes or with quotes that may stand in it, too.
        written = replace(syntax, tags=_PYTHON) if tags.is_raw and tags.end in ("", "'", '"') else syntax
        listed = listed_calls(syntax, tags, written)
        if listed is None:
            raise NotDerivedError(_NO_MARKER)
        return listed

    def _as_relaxed_json(self, one: str, name_at: int, tags: Tags, end: int) -> CallFormat:
        """Arguments as JSON with bare keys and other quotes."""
        start = name_at + len(NAMES[0])
        syntax = self._syntax(_Call(one[:name_at], "", one[start : end + 1], one[end + 1 :]))
        quotes = {"unquoted_keys": True, "string_delims": [[tags.string_quote, tags.string_end]]}
        found = named_calls(syntax, (self._markers.begin, self._markers.answer), quotes)
        if found is None:
            raise NotDerivedError(_NO_MARKER)
        return replace(found, syntax=replace(syntax, between="{", end=f"}}{syntax.end}", tags=tags))


def _object_around(body: str, name_at: int, arguments_at: int) -> tuple[int, int, JsonKeys] | None:
    """(start and end of the JSON that holds the whole call or the list of calls, its keys). Larger JSON may hold it."""
    is_json = False
    for at in range(name_at):
        if body[at] in "{[":
            try:
                value, end = _DECODER.raw_decode(body, at)
            except ValueError:
                continue
            if end <= arguments_at:
                continue
            keys = _keys_of(value[0] if isinstance(value, list) and len(value) == 1 else value)
            if keys is not None:
                return at, end, keys
            is_json = True
    if is_json:
        raise NotDerivedError("a call is JSON of an unknown form")
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
    first = first.lstrip().partition("\0")[0]
    tag = TAG.match(first)
    if tag is not None:
        return tag[0]
    word = first.split(maxsplit=1)[0] if first else ""
    if TAG.search(word) and word.endswith(">"):
        return word
    brace = re.search(r"\s*[{\[]", first)
    return first if brace is None else first[: brace.start()]
