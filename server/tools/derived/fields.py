"""Fields of a response template for calls of a known syntax: what opens and closes them, and how arguments are found.

Models leave out parts of their markup, so the patterns here let them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from inferd.server.tools.builtin import CallFormat
from inferd.server.tools.format import ID, NAME, USUAL_KEYS, CallSyntax, JsonKeys, Tags
from inferd.server.tools.patterns import TAG, flexible, may_follow, may_precede

_NAME = r"(?P<name>[\w.\-]{1,128})"
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_OBJECT = {"type": "function", "function": "{content}"}
_TOKEN = r"<\|\w{1,32}\|>"
"""A special token. Models write one beside calls for which their template has no marker."""
# The same, if its name says so.
_CALL_TOKEN = r"<\|(?=\w{0,32}(?:python|tool|func|call))\w{1,32}\|>"
_MOST_MARKERS = 4
"""Most times in a row that a model repeats a marker."""


def json_calls(opening: str, closing: str, syntax: CallSyntax, keys: JsonKeys = USUAL_KEYS) -> CallFormat:
    """Calls that are JSON objects, or a list of them, between two texts. If both are empty, calls begin an answer."""
    field: dict[str, object] = {"repeats": True, "content": "json", "transform": _OBJECT}
    if not opening:
        token = {**field, "open_pattern": _CALL_TOKEN}
        return CallFormat(token, syntax, is_bare=True, keys=keys)
    pattern = flexible(opening)
    field["open_pattern"] = rf"(?:{pattern}\s*){{1,{_MOST_MARKERS}}}" if is_marker(opening) else pattern
    if closing:
        field["close_pattern"] = flexible(closing)
    return CallFormat(field, syntax, keys=keys)


def python_calls(syntax: CallSyntax) -> CallFormat | None:
    """A list of calls in Python between markers, or alone at the beginning of an answer; None if it is neither."""
    opening = (syntax.before_all + syntax.begin).rstrip().removesuffix("[").strip()
    closing = (syntax.end + syntax.after_all).lstrip(") ").removeprefix("]").strip()
    if syntax.begin.strip(" [\n"):
        return None
    if is_marker(opening) and closing:
        return CallFormat({"open": opening, "close": closing, "repeats": True, "content": "text"}, syntax)
    return _bare_calls(syntax, {})


def listed_calls(written: CallSyntax, tags: Tags, syntax: CallSyntax) -> CallFormat | None:
    """Calls between markers around all of them, or alone at the beginning of an answer; None if they are neither.
    `written`: as the template writes them, for reading. `syntax`: the same for grammars."""
    content_args = {"tags": tags, "calls": written}
    opening, closing = written.before_all.strip(), written.after_all.strip()
    if is_marker(opening.rstrip("[({ ")) and closing:
        field = {"open_pattern": flexible(opening), "close_pattern": flexible(closing), "content_args": content_args}
        return CallFormat({**field, "repeats": True, "content": "text"}, syntax)
    return _bare_calls(syntax, content_args)


def _bare_calls(syntax: CallSyntax, content_args: Mapping[str, object]) -> CallFormat | None:
    opening = (syntax.before_all + syntax.begin).strip()
    if not (opening and syntax.between.strip()):
        return None
    follows = rf"(?=\s*[\w.]{{1,128}}\s*{flexible(syntax.between.strip())})"
    field = {
        "open_pattern": rf"(?:{_TOKEN}\s*)?{flexible(opening)}{follows}",
        "close_pattern": _TOKEN,
        "repeats": True,
        "content": "text",
        "content_args": dict(content_args),
    }
    return CallFormat(field, syntax, is_bare=True)


def named_calls(
    syntax: CallSyntax, others: Sequence[str], content_args: Mapping[str, object] | None = None
) -> CallFormat | None:
    """Calls with a marker before their name; None if they have none, or if calls with tags have no end.
    `others`: the markers that begin other parts. `content_args`: how to read arguments that are JSON with other
    quotes."""
    outer, inner = _inner(syntax.begin)
    if not (is_marker(inner) or (inner.strip() and is_marker(syntax.between))):
        return None
    tag, prefix = _prefix(inner.lstrip())
    is_shared = any(other.strip().startswith(tag) for other in others)
    parts = [
        may_precede(syntax.before_all),
        may_precede(outer),
        flexible(tag),
        f"(?:{flexible(prefix)})?" if tag and prefix.strip() and not is_shared else flexible(prefix),
    ]
    is_json = syntax.tags is None
    before, name = "".join(parts), _after_name(syntax.between.rstrip(), is_json=is_json)
    opening = before + "".join(_no_other(other, inner) for other in others) + name
    if is_json and not TAG.search(syntax.begin + syntax.between):
        opening += r"(?=\s*\{)"
    ends = _ends_of(syntax.end, syntax.tags)
    closing = (flexible(ends[0].strip()) + may_follow(ends[1])) if ends[0].strip() else ""
    if closing or syntax.after_all.strip():
        closing = closing + may_follow(syntax.after_all) if closing else flexible(syntax.after_all.strip())
    if closing and TAG.search(syntax.separator):
        closing += may_follow(syntax.separator)
    closes = {"close_pattern": closing} if closing else {}
    field: dict[str, object] = {"open_pattern": opening, **closes, "repeats": True, "transform": _NAMED}
    if syntax.tags is None:
        relaxed = {} if content_args is None else {"content_args": dict(content_args)}
        return CallFormat({**field, "content": "json", **relaxed}, syntax)
    if not closing:
        return None
    return CallFormat({**field, "content": "xml-inline", "content_args": tag_arguments(syntax.tags)}, syntax)


def is_marker(text: str) -> bool:
    """Whether no ordinary text has this one."""
    return bool(re.search(r"[<>\[|]", text)) or len(text.strip()) > 4


def _no_other(other: str, begin: str) -> str:
    """A pattern behind `begin` if another marker begins in the same way and goes on with what looks like a name."""
    other, begin = other.strip(), begin.strip()
    return rf"(?!{re.escape(other.removeprefix(begin))}\b)" if begin and other.startswith(begin) else ""


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


def tag_arguments(tags: Tags) -> dict[str, object]:
    """`content_args` of a field whose arguments are in tags."""
    if tags.string_end or tags.item or not tags.is_raw:
        return {"tags": tags}
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
    separator = may_precede(tags.separator)
    pattern = rf"{separator}{before}{key}(?P<between>{patterns}){value}{closing}(?:{'|'.join(ends)}|\Z)"
    return {"tag_pattern": pattern, "separator": tags.separator.strip(), "kinds": kinds}


def _between(text: str) -> str:
    """A line break at its end may be missing; one that is not there belongs to the value."""
    stripped = text.rstrip()
    blanks = text[len(stripped) :]
    return flexible(stripped) + (r"\n?" if "\n" in blanks else re.escape(blanks))
