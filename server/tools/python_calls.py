"""Reads calls that a model writes as Python: a list of calls whose arguments are keywords with literals.

    [get_weather(city="Paris", days=3), time.now()]

Some write one call a line, without a list. Models also write line breaks and quotes inside a string, or zeros before a
number, which is no Python. Such a text is mended and parsed again. The text is never run.
"""

from __future__ import annotations

import ast
import re
import warnings

_WORDS = {"true": True, "false": False, "null": None}
"""JSON's words, which models write in Python too."""
_LARGEST = 10**4000
"""Hexadecimal numbers have any size, and Python refuses to write one of more than 4,300 decimal digits."""


class _NoLiteralError(Exception):
    pass


_STRING_IN_CALL = re.compile(r"\s{0,64}(?:,\s{0,64}\w{1,128}\s{0,64}=|\)\s{0,64}(?:[\],;]|\Z))")
_STRING_IN_VALUE = re.compile(r"\s{0,64}[,:\]}]")
"""Text behind the quote that ends a string: of an argument, and of a part of a list or dict."""
_NEXT_PART = re.compile(r"""['"()\[\]{}]|(?<![\w.])0+(?=[1-9])""")
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|\n|[\\'\"abfnrtv0])")


def python_calls(text: str, *, mends: bool = True) -> list[dict[str, object]] | None:
    """`name` and `arguments` of each call; None if the text is anything else than calls with literals as keywords.

    `mends`: whether a text that is no Python may be mended.
    """
    text = text.strip()
    found = _parsed(text)
    return _parsed(_mended(text)) if found is None and mends else found


def literal(text: str) -> object:
    """The value of a literal, in which JSON's words are known too; None if the text is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _literal(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, _NoLiteralError):
        return None


def _parsed(text: str) -> list[dict[str, object]] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            lines = ast.parse(text).body
        items: list[ast.expr] = []
        for line in lines:
            if not isinstance(line, ast.Expr):
                return None
            items += line.value.elts if isinstance(line.value, ast.List) else [line.value]
        return [_call(item) for item in items] or None
    except (SyntaxError, ValueError, RecursionError, MemoryError, _NoLiteralError):
        return None


def _mended(text: str) -> str:
    """The text with strings and numbers as Python writes them. Reads each character a bounded number of times."""
    parts: list[str] = []
    opened: list[str] = []
    at = 0
    while (found := _NEXT_PART.search(text, at)) is not None:
        parts.append(text[at : found.start()])
        mark, at = found[0], found.end()
        if mark in "'\"":
            behind = _STRING_IN_CALL if opened[-1:] == ["("] else _STRING_IN_VALUE
            end = _string_end(text, at, mark, behind)
            parts.append(repr(_ESCAPE.sub(_unescaped, text[at:end])))
            at = end + 1
        elif mark[0] != "0":
            parts.append(mark)
            if mark in "([{":
                opened.append(mark)
            elif opened:
                opened.pop()
    return "".join((*parts, text[at:]))


def _string_end(text: str, start: int, quote: str, behind: re.Pattern[str]) -> int:
    """Index of the first quote that something follows which can follow a string, else the end of the text."""
    at = start
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        if text[at] == quote and behind.match(text, at + 1):
            return at
        at += 1
    return len(text)


def _unescaped(escape: re.Match[str]) -> str:
    try:
        value: str = ast.literal_eval(f'"{escape[0]}"')
    except (SyntaxError, ValueError):
        return escape[0]
    return value


def _call(node: ast.expr) -> dict[str, object]:
    if not isinstance(node, ast.Call) or node.args:
        raise _NoLiteralError
    arguments = {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
    if None in arguments or len(arguments) < len(node.keywords):
        raise _NoLiteralError
    return {"name": _name(node.func), "arguments": arguments}


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(inner, name):
            return f"{_name(inner)}.{name}"
    raise _NoLiteralError


def _literal(node: ast.expr) -> object:
    match node:
        case ast.Constant(int(value)) if abs(value) > _LARGEST:
            raise _NoLiteralError
        case ast.Constant(str() as value):
            return _with_whole_characters(value)
        case ast.Constant(int() | float() | None as value):
            return value
        case ast.Name(word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)) if not isinstance(value, bool):
            return -value
        case ast.List(items) | ast.Tuple(items) | ast.Set(items):
            return [_literal(item) for item in items]
        case ast.Dict(keys, values):
            found = {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
            if len(found) == len(keys):
                return found
    raise _NoLiteralError


def _with_whole_characters(text: str) -> str:
    """The text with one character for two escapes of JSON that spell its halves."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16") if not text.isprintable() else text
    except UnicodeDecodeError:
        return text


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise _NoLiteralError
