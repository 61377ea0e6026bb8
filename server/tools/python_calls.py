"""Reads calls that a model writes as Python: a list of calls whose arguments are keywords with literals.

    [get_weather(city="Paris", days=3), time.now()]

The text is parsed and never run.
"""

from __future__ import annotations

import ast
import warnings

_WORDS = {"true": True, "false": False, "null": None}
"""JSON's words, which models write in Python too."""
_LARGEST = 10**4000
"""Hexadecimal numbers have any size, and Python refuses to write one of more than 4,300 decimal digits."""


class _NoLiteralError(Exception):
    pass


def python_calls(text: str) -> list[dict[str, object]] | None:
    """`name` and `arguments` of each call; None if the text is anything else than calls with literals as keywords."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            body = ast.parse(text.strip(), mode="eval").body
        items = body.elts if isinstance(body, ast.List) else [body]
        return [_call(item) for item in items] or None
    except (SyntaxError, ValueError, RecursionError, MemoryError, _NoLiteralError):
        return None


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
        case ast.Constant(str() | int() | float() | None as value):
            return value
        case ast.Name(word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)) if not isinstance(value, bool):
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [_literal(item) for item in items]
        case ast.Dict(keys, values):
            found = {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
            if len(found) == len(keys):
                return found
    raise _NoLiteralError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise _NoLiteralError
