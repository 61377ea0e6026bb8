"""The wire kind of a response's `input`: a text, or items that a conversation is made of.

Each item is read into one form, whatever shorthand it came in, so that it can be stored, shown and sent back as it is.
What items say to the model is not this file's business.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from inferd.server.errors import table as errors
from inferd.server.schema.kinds import Choice, Json, Schema, Text, check_array, check_properties
from inferd.server.schema.messages import MAX_MESSAGES, PART_WITHOUT_EFFECT, read_arguments
from inferd.server.schema.strict_json import Counts

Item = Mapping[str, object]
"""{"type": str, ...} as OpenAI has it; "id" where the caller gave one."""

ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("input_text", "output_text", "refusal")
ITEM_WITHOUT_EFFECT = (
    "status", "phase", "caller", "created_by", "internal_chat_message_metadata_passthrough", "provider_specific_fields",
    "cache_control",
)  # fmt: skip
"""What an item of an earlier answer carries, and what clients add for other servers."""
_SEALED = "inferd:"
"""How `encrypted_content` begins where it was made here."""


@dataclass(frozen=True, slots=True)
class Items:
    """At least one item; a text is a user's message."""

    name: str = "one of a string or an array of objects"

    def accepts(self, value: object) -> bool:
        return isinstance(value, (str, list))

    def read(self, value: object, where: str) -> tuple[Item, ...]:
        if isinstance(value, str):
            return ({"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]},)
        check_array(value, where, self.name, 1, MAX_MESSAGES)
        assert isinstance(value, list)
        return tuple(_item(item, f"{where}[{i}]") for i, item in enumerate(value))

    def schema(self) -> Schema:
        part = {"type": "object", "properties": {"type": {"enum": list(_PARTS)}}, "required": ["type"]}
        text = {"anyOf": [Text().schema(), {"type": "array", "items": part}]}
        role, string = Choice(ROLES).schema(), Text().schema()
        shapes: dict[str, tuple[dict[str, Schema], tuple[str, ...]]] = {
            "message": ({"role": role, "content": text}, ("role", "content")),
            "function_call": (dict.fromkeys(("call_id", "name", "arguments"), string), ("call_id", "name")),
            "function_call_output": ({"call_id": string, "output": text}, ("call_id", "output")),
            "reasoning": ({}, ()),
            "item_reference": ({"id": string}, ("id",)),
        }
        items: list[Schema] = [
            {"type": "object", "properties": {"type": {"const": kind}, **properties}, "required": list(required)}
            for kind, (properties, required) in shapes.items()
        ]
        array = {"type": "array", "items": {"type": "object", "anyOf": items}, "minItems": 1, "maxItems": MAX_MESSAGES}
        return {"anyOf": [string, array]}


def sealed(reasoning: str) -> str:
    """A reasoning text as `encrypted_content`, which clients pass back unread; it is shown too, and no secret."""
    return _SEALED + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def text_of(item: Item) -> str:
    """What a message, a result or a piece of reasoning says."""
    content = item.get("output") if item["type"] == "function_call_output" else item.get("content")
    if isinstance(content, list) and content:
        return "\n".join(str(part.get("text", part.get("refusal", ""))) for part in content)
    if item["type"] == "reasoning":
        return _unsealed(item.get("encrypted_content"), "encrypted_content")
    return content if isinstance(content, str) else ""


def _item(value: object, where: str) -> Item:
    given = Json().read(value, where)
    kind = given.get("type")
    if kind is None:
        kind = "message" if "role" in given else "item_reference" if set(given) <= {"id", "type"} and given else None
    if kind is None:
        raise errors.missing(f"{where}.type")
    reader = _READERS.get(Text().read(kind, f"{where}.type"))
    if reader is None:
        rule = f"Items may be {', '.join(_READERS)}: only functions are called, and this model reads text."
        raise errors.unsupported_value(f"{where}.type", kind, rule)
    return {"type": kind, **reader({key: value for key, value in given.items() if key != "type"}, where)}


def _message(given: Mapping[str, object], where: str) -> Item:
    message = check_properties(given, where, ("role", "content"), ("id",), ITEM_WITHOUT_EFFECT)
    role = Choice(ROLES).read(message["role"], f"{where}.role")
    kind = "output_text" if role == "assistant" else "input_text"
    return {**_identity(message, where), "role": role, "content": _parts(message["content"], f"{where}.content", kind)}


def _call(given: Mapping[str, object], where: str) -> Item:
    # The last is what openai-python makes of "async".
    known = ("arguments", "id", "namespace", "async", "async_")
    call = check_properties(given, where, ("call_id", "name"), known, ITEM_WITHOUT_EFFECT)
    for key in ("namespace", "async", "async_"):
        if call.get(key):
            raise errors.unsupported_parameter(f"{where}.{key}", "Functions have names alone, and are called one way.")
    arguments = Text().read("" if call.get("arguments") is None else call["arguments"], f"{where}.arguments")
    read_arguments(arguments, f"{where}.arguments", Counts())
    return {
        **_identity(call, where),
        "call_id": Text(1).read(call["call_id"], f"{where}.call_id"),
        "name": Text(1).read(call["name"], f"{where}.name"),
        "arguments": arguments or "{}",
    }


def _result(given: Mapping[str, object], where: str) -> Item:
    result = check_properties(given, where, ("call_id", "output"), ("id",), (*ITEM_WITHOUT_EFFECT, "name", "namespace"))
    output = result["output"]
    return {
        **_identity(result, where),
        "call_id": Text(1).read(result["call_id"], f"{where}.call_id"),
        "output": output if isinstance(output, str) else _parts(output, f"{where}.output", "input_text"),
    }


def _reasoning(given: Mapping[str, object], where: str) -> Item:
    item = check_properties(given, where, (), ("id", "summary", "content", "encrypted_content"), ITEM_WITHOUT_EFFECT)
    read: dict[str, object] = {**_identity(item, where), "summary": [], "content": []}
    if item.get("content"):
        parts = item["content"]
        check_array(parts, f"{where}.content", "an array of objects", 0, MAX_MESSAGES)
        assert isinstance(parts, list)
        read["content"] = [_part(part, f"{where}.content[{i}]", ("reasoning_text",)) for i, part in enumerate(parts)]
    if item.get("encrypted_content") is not None:
        _unsealed(item["encrypted_content"], f"{where}.encrypted_content")
        read["encrypted_content"] = item["encrypted_content"]
    if item.get("summary") is not None:
        check_array(item["summary"], f"{where}.summary", "an array of objects", 0, MAX_MESSAGES)
    return read


def _reference(given: Mapping[str, object], where: str) -> Item:
    reference = check_properties(given, where, ("id",), ())
    return {"id": Text(1).read(reference["id"], f"{where}.id")}


_READERS: Mapping[str, Callable[[Mapping[str, object], str], Item]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _result,
    "reasoning": _reasoning,
    "item_reference": _reference,
}


def _identity(given: Mapping[str, object], where: str) -> dict[str, object]:
    """What of an item is kept beside what it says."""
    read = {"status": "completed"}
    if given.get("id") is not None:
        read["id"] = Text(1, 128).read(given["id"], f"{where}.id")
    return {**read}


def _parts(value: object, where: str, kind: str) -> list[Item]:
    if isinstance(value, str):
        return [_text_part(kind, value)]
    check_array(value, where, "one of a string or an array of objects", 0, MAX_MESSAGES)
    assert isinstance(value, list)
    return [_part(part, f"{where}[{i}]", _PARTS) for i, part in enumerate(value)]


def _part(value: object, where: str, kinds: tuple[str, ...]) -> Item:
    part = Json().read(value, where)
    if part.get("type") is None:
        raise errors.missing(f"{where}.type")
    kind = Text().read(part["type"], f"{where}.type")
    if kind not in kinds:
        listed = " or ".join(f"'{known}'" for known in kinds)
        raise errors.unsupported_value(f"{where}.type", kind, f"Expected {listed}: this model reads text.")
    key = "refusal" if kind == "refusal" else "text"
    check_properties(part, where, ("type", key), (), PART_WITHOUT_EFFECT)
    return _text_part(kind, Text().read(part[key], f"{where}.{key}"))


def _text_part(kind: str, text: str) -> Item:
    if kind == "refusal":
        return {"type": kind, "refusal": text}
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _unsealed(value: object, where: str) -> str:
    text = "" if value is None else Text().read(value, where)
    try:
        if text and not text.startswith(_SEALED):
            raise ValueError
        return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode("utf-8")
    except (ValueError, binascii.Error) as error:
        raise errors.invalid_value(where, text, "It was not made by this server; leave the item out.") from error
