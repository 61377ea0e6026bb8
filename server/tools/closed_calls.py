"""Parses calls that can be read only when their region has closed: those in tags by transformers' parser, those written
as Python, and those whose values show where they end.

One region at a time, so that a failure concerns exactly this region's text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

from inferd.server.tools.argument_schema import ArgumentSchema, value_of
from inferd.server.tools.format import Region
from inferd.server.tools.python_calls import python_calls
from inferd.server.tools.response_templates import ResponseTemplateField, process_field
from inferd.server.tools.scanned_calls import arguments_of, calls_in

_NO_SCHEMA = ArgumentSchema()


def calls_of(
    region: Region, opening: str, body: str, closing: str, schemas: Mapping[str, ArgumentSchema]
) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON) of each call between two markers; None if the text is no call, or if an argument would
    be lost.

    `schemas`: those of the offered tools, by name. They tell which arguments are numbers.
    """
    if region.is_python:
        return _python_calls_of(body, region, opening, schemas)
    if region.tags is not None:
        name = region.open.pattern.fullmatch(opening)["name"]
        arguments = arguments_of(body, region.tags, _schema_of(name, schemas).part)
        return None if arguments is None else _normal([{"name": name, "arguments": arguments}])
    if _leaves_text(region, body) or _repeats_argument(region, body):
        return None
    try:
        found = _parsed(region.field, opening + body + closing)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    if not found:
        return None
    calls = found if isinstance(found, list) else [found]
    for call in calls:
        _convert(call, region, body, schemas)
    return _normal(calls)


def _parsed(field: ResponseTemplateField, text: str) -> object:
    """The field's value in `text`, from its opening marker to its closing one; None if it has no opening marker."""
    opened = field.open_re.search(text)
    if opened is None:
        return None
    closed = None if field.close_re is None else field.close_re.search(text, opened.end())
    captures = {name: value for name, value in opened.groupdict().items() if value is not None}
    value: object = process_field(text[opened.end() : None if closed is None else closed.start()], field, captures)
    return [value] if field.repeats else value


def _convert(call: object, region: Region, body: str, schemas: Mapping[str, ArgumentSchema]) -> None:
    """Replace values that are still text: by their quoted text, and by values of the types that their tag or the tool's
    schema has."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not (isinstance(function, dict) and isinstance(arguments, dict)):
        return
    kinds = region.field.content_args.get("kinds") or {}
    parameters, quoted, strings = _schema_of(function.get("name"), schemas), set[str](), set[str]()
    for match in re.finditer(region.tag_pattern, body, flags=re.DOTALL) if region.tag_pattern is not None else ():
        groups = match.groupdict()
        key, kind = groups["key"], kinds.get(groups.get("between"))
        if groups.get("quoted") is not None:
            arguments[key] = groups["quoted"]
            quoted.add(key)
        elif kind == "string":
            strings.add(key)
        elif kind is not None and isinstance(arguments.get(key), str):
            arguments[key] = _json_or(arguments[key], arguments[key])
    for key, value in arguments.items():
        if isinstance(value, str) and key not in quoted:
            types = parameters.part(key).types
            arguments[key] = value if key in strings and "string" in types else value_of(value, types)


def _json_or(text: str, default: object) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return default


def _schema_of(name: object, schemas: Mapping[str, ArgumentSchema]) -> ArgumentSchema:
    return schemas.get(name, _NO_SCHEMA) if isinstance(name, str) else _NO_SCHEMA


def _python_calls_of(
    body: str, region: Region, opening: str, schemas: Mapping[str, ArgumentSchema]
) -> list[tuple[str, str]] | None:
    """Models that write Python write JSON if they are asked to, which is no Python if a word of JSON is in it."""
    text = f"[{body}" if region.is_bare and opening.endswith("[") else body
    found: object = None
    if region.calls is not None and region.tags is not None:
        found = calls_in(text, region.calls, region.tags, lambda name: _schema_of(name, schemas).part)
    if found is None:
        found = python_calls(text)
    if region.is_bare and (not isinstance(found, list) or any(call["name"] not in schemas for call in found)):
        return None
    if found is None:
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            return None
    return _normal(found if isinstance(found, list) else [found]) or None


def _leaves_text(region: Region, body: str) -> bool:
    """Whether there is text between the tags that belongs to no argument."""
    return region.tag_pattern is not None and bool(re.sub(region.tag_pattern, "", body, flags=re.DOTALL).strip())


def _repeats_argument(region: Region, body: str) -> bool:
    """Whether tags have an argument twice: JSON has each key once, and neither value may be dropped."""
    if region.tag_pattern is None:
        return False
    keys = [match.groupdict().get("key") for match in re.finditer(region.tag_pattern, body, flags=re.DOTALL)]
    return len(set(keys)) != len(keys)


def _normal(found: Sequence[object]) -> list[tuple[str, str]] | None:
    calls: list[tuple[str, str]] = []
    for item in found:
        if isinstance(item, list):
            inner = _normal(item)
            if inner is None:
                return None
            calls += inner
            continue
        function = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        arguments = function.get("arguments", {})
        calls.append((function["name"], arguments if isinstance(arguments, str) else dumped(arguments)))
    return calls


def dumped(arguments: object) -> str:
    """Arguments as JSON."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return dumped(_without_nan(arguments))
    # JSON can spell half of a surrogate pair, and UTF-8 cannot.
    return text if _is_utf8(text) else json.dumps(arguments)


def _without_nan(value: object) -> object:
    """Replace NaN and Infinity, which Python reads as numbers and JSON does not have, by the text that the model
    wrote."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
