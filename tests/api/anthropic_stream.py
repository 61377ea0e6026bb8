"""Reads a stream of /v1/messages by Anthropic's rules alone."""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic_core import from_json

_EVENT = re.compile(rb"event: ([a-z_]+)\ndata: (\{[^\n]*\})\n\n")
_DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


def events_of(content: bytes) -> list[dict[str, Any]]:
    """Parses events, and checks that no byte lies outside of one and that each event has its name twice."""
    events = []
    at = 0
    for match in _EVENT.finditer(content):
        assert match.start() == at
        at = match.end()
        events.append(json.loads(match[2]))
        assert events[-1]["type"] == match[1].decode()
    assert at == len(content)
    return events


def folded(content: bytes) -> dict[str, Any]:
    """The message that the events make. Fails for an event in a wrong place."""
    events = [event for event in events_of(content) if event["type"] != "ping"]
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    open_block: dict[str, Any] | None = None
    pieces: list[str] = []
    for event in events[1:-2]:
        kind = event["type"]
        assert event["index"] == len(message["content"]) - (kind != "content_block_start")
        if kind == "content_block_start":
            assert open_block is None, "one block at a time"
            open_block, pieces = event["content_block"], []
            message["content"].append(open_block)
        elif kind == "content_block_stop":
            close(open_block, pieces)
            open_block = None
        else:
            assert kind == "content_block_delta"
            assert open_block is not None
            if event["delta"]["type"] == "signature_delta":
                open_block["signature"] = event["delta"]["signature"]
                continue
            assert event["delta"]["type"] == _DELTAS[open_block["type"]]
            pieces.append(event["delta"][event["delta"]["type"].removesuffix("_delta").replace("input", "partial")])
    assert open_block is None
    message.update(events[-2]["delta"])
    message["usage"].update(events[-2]["usage"])
    return message


def close(block: dict[str, Any] | None, pieces: list[str]) -> None:
    assert block is not None
    text = "".join(pieces)
    assert all(pieces), "no delta is empty"
    if block["type"] != "tool_use":
        assert block[block["type"]] == ""
        block[block["type"]] = text
        return
    assert block["input"] == {}
    # As SDKs do: of an input that was cut off, the complete part.
    block["input"] = from_json(text, allow_partial=True) if text else {}


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """The message without its random ids and its seed."""
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": None, "seed": None, "content": blocks}
