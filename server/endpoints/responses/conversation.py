"""Collects the items of a conversation from the request and the stored responses, and prepares them for storage."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import orjson

from inferd.server.endpoints.responses.chat_request import Placed, chat_request
from inferd.server.endpoints.responses.open_response import OpenResponse
from inferd.server.endpoints.responses.store import Stored
from inferd.server.errors import messages as errors
from inferd.server.schema.answers.responses import ResponseObject
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.response_parts import Item
from inferd.server.schema.response_tools import shown_tool
from inferd.server.schema.responses import ResponsesRequest
from inferd.server.schema.strict_json import exact

_PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "shell_call": "sh", "shell_call_output": "sho",
    "local_shell_call": "lsh", "local_shell_call_output": "lsho", "apply_patch_call": "apc",
    "apply_patch_call_output": "apco", "tool_search_call": "tsc", "tool_search_output": "tso", "additional_tools": "at",
}  # fmt: skip
"""Type of an item -> prefix of its id, if the server makes the id."""

_PREVIOUS = "previous_response_id"

MAX_REFERRED_BYTES = 2**26
"""JSON of the stored items that one request refers to. A reference has 60 bytes, and its item may have millions."""


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """A request with the conversation before it."""

    chat: ChatRequest
    context: bytes
    """All its items, as JSON for storage."""
    item_ids: tuple[str, ...]
    """Ids of those items."""
    tools: bytes
    """The request's tools as the response repeats them, as JSON: every event with the whole response has them."""


def conversation_of(
    body: ResponsesRequest, previous: Stored | None, with_item: Callable[[str], Stored | None]
) -> ResponseContext:
    """`with_item` finds the stored response that has an item. Raises `RequestError`."""
    placed = [*_history(previous), *_resolved(body.input, with_item)]
    items = [_with_id(item) for item, _ in placed]
    item_ids = tuple(dict.fromkeys(str(item["id"]) for item in items))
    tools = _array(map(shown_tool, body.tools or ()))
    return ResponseContext(chat_request(body, placed), _array(items), item_ids, tools)


def _array(values: Iterable[object]) -> bytes:
    """A JSON array, written value by value: no other thread runs while orjson writes one."""
    return b"[" + b",".join(exact(orjson.dumps(value)) for value in values) + b"]"


def stored_of(conversation: ResponseContext, open_response: OpenResponse) -> Stored:
    """The response as it is now, for storage."""
    item_ids = tuple(dict.fromkeys((*conversation.item_ids, *open_response.item_ids)))
    return Stored(open_response.id, exact(orjson.dumps(open_response.shown())), conversation.context, item_ids)


def _history(previous: Stored | None) -> Iterator[Placed]:
    """The items up to the end of the previous response. Raises `RequestError` if that has failed or still runs."""
    if previous is None:
        return
    response: ResponseObject = orjson.loads(previous.response)
    if response["status"] not in ("completed", "incomplete"):
        rule = f"Its status is '{response['status']}', but only a completed or incomplete response can be continued."
        raise errors.invalid_value(_PREVIOUS, previous.id, rule)
    for item in (*orjson.loads(previous.context), *response["output"]):
        yield item, _PREVIOUS


def _resolved(items: tuple[Item, ...], with_item: Callable[[str], Stored | None]) -> Iterator[Placed]:
    """Each item, or the item that it refers to. Raises `RequestError` if that is not stored, and for references to more
    than `MAX_REFERRED_BYTES`."""
    known: dict[str, Item] = {}
    """Items of the responses that were read, so that each response is read only once."""
    num_bytes = 0
    for i, item in enumerate(items):
        place = f"input[{i}]"
        if item["type"] != "item_reference":
            yield item, place
            continue
        item_id = str(item["id"])
        if item_id not in known and (stored := with_item(item_id)) is not None:
            every = (*orjson.loads(stored.context), *orjson.loads(stored.response)["output"])
            for one_id, one in {one["id"]: one for one in every}.items():
                known.setdefault(one_id, one)
        if item_id not in known:
            rule = "No item with this id is stored. Send the item itself."
            raise errors.invalid_value(f"{place}.id", item_id, rule)
        num_bytes += len(orjson.dumps(known[item_id]))
        if num_bytes > MAX_REFERRED_BYTES:
            rule = f"The items that are referred to have more than {MAX_REFERRED_BYTES} bytes together. Refer to fewer."
            raise errors.invalid_value(f"{place}.id", item_id, rule)
        yield known[item_id], place


def _with_id(item: Item) -> Item:
    """An item that another server wrote, and that no model reads, may hold anything as its id."""
    if item.get("id") and isinstance(item["id"], str):
        return item
    return {**item, "id": f"{_PREFIXES.get(str(item['type']), 'item')}_{secrets.token_hex(24)}"}
