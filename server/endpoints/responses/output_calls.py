"""The calls in a response's output while they grow, and the stream's events about each."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from inferd.server.endpoints.responses.built_in_calls import read_call
from inferd.server.endpoints.responses.output_items import Ending, Item, Scored, Style
from inferd.server.generate.events import ToolCallStart
from inferd.server.schema.answers.response_events import CommandDeltaEvent, CommandEvent, OutputEvent
from inferd.server.schema.answers.responses import CallItem, CustomCallItem, FunctionCallItem
from inferd.server.schema.caller_tool import ToolKind

_PREFIXES: Mapping[ToolKind, str] = {"shell": "sh", "local_shell": "lsh", "apply_patch": "apc", "tool_search": "tsc"}
"""Kind of a tool -> prefix of its items' ids."""


class _Call(Item):
    """A call of a function, or of a tool that the request does not list."""

    prefix = "fc"

    def __init__(self, index: int, style: Style, start: ToolCallStart) -> None:
        super().__init__(index, style)
        self.start, self.tool = start, style.tools.get(start.name)

    def delta(self, text: str, scored: Scored) -> OutputEvent:
        return {"type": "response.function_call_arguments.delta", **self.growth(), "delta": text}

    def close(self, status: Ending) -> Iterator[OutputEvent]:
        yield {
            "type": "response.function_call_arguments.done",
            **self.growth(),
            "name": self.name,
            "arguments": self.text,
        }

    @property
    def name(self) -> str:
        """The caller's name of the tool."""
        return (self.tool.given_name if self.tool is not None else "") or self.start.name

    def shown(self) -> CallItem:
        item: FunctionCallItem = {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self.start.id,
            "name": self.name,
            "arguments": self.text,
        }
        if self.tool is not None and self.tool.namespace is not None:
            item["namespace"] = self.tool.namespace
        return item


class _CustomCall(_Call):
    """A call of a custom tool."""

    prefix = "ctc"

    def delta(self, text: str, scored: Scored) -> OutputEvent:
        return {"type": "response.custom_tool_call_input.delta", **self.growth(), "delta": text}

    def close(self, status: Ending) -> Iterator[OutputEvent]:
        yield {"type": "response.custom_tool_call_input.done", **self.growth(), "input": self.text}

    def shown(self) -> CallItem:
        item: CustomCallItem = {
            "id": self.id,
            "type": "custom_tool_call",
            "status": self.status,
            "call_id": self.start.id,
            "name": self.name,
            "input": self.text,
        }
        if self.tool is not None and self.tool.namespace is not None:
            item["namespace"] = self.tool.namespace
        return item


class _WholeCall(_Call):
    """A call whose item holds no text but what the text says. It is shown when it is complete: until then, and if the
    text cannot be read, it is a call of a function."""

    def __init__(self, index: int, style: Style, start: ToolCallStart, kind: ToolKind) -> None:
        super().__init__(index, style, start)
        self.kind = kind
        self._read: tuple[int, CallItem | None] = (0, None)
        """(number of pieces that were read, the item that they make)."""
        self.id = f"{_PREFIXES[kind]}_{secrets.token_hex(24)}"

    def begin(self) -> Iterator[OutputEvent]:
        return iter(())

    def more(self, text: str, scored: Scored) -> Iterator[OutputEvent]:
        self.pieces.append(text)
        return iter(())

    def close(self, status: Ending) -> Iterator[OutputEvent]:
        yield self.whole("response.output_item.added")
        if (item := self.read()) is None:
            yield from super().close(status)
        elif item["type"] == "shell_call":
            yield from self._commands(item["action"]["commands"])

    def _commands(self, commands: Sequence[str]) -> Iterator[OutputEvent]:
        for i, command in enumerate(commands):
            for kind, text in (("added", ""), ("delta", command), ("done", command)):
                yield self._command(kind, i, text)

    def _command(self, kind: str, index: int, text: str) -> CommandEvent | CommandDeltaEvent:
        number = next(self.style.numbers)
        if kind == "delta":
            return {
                "type": "response.shell_call_command.delta",
                "sequence_number": number,
                "output_index": self.index,
                "command_index": index,
                "delta": text,
            }
        return {
            "type": "response.shell_call_command.added" if kind == "added" else "response.shell_call_command.done",
            "sequence_number": number,
            "output_index": self.index,
            "command_index": index,
            "command": text,
        }

    def shown(self) -> CallItem:
        return self.read() or super().shown()

    def read(self) -> CallItem | None:
        """The item that the text makes; None if it cannot be read. A text is parsed once: it is shown five times."""
        if self._read[0] != len(self.pieces):
            found = read_call(self.kind, self.text, self.id, self.status, self.start.id)
            self._read = len(self.pieces), found
        item = self._read[1]
        return None if item is None else cast("CallItem", {**item, "status": self.status})


def call_item(index: int, style: Style, start: ToolCallStart) -> Item:
    tool = style.tools.get(start.name)
    if tool is None or tool.kind == "function":
        return _Call(index, style, start)
    return _CustomCall(index, style, start) if tool.kind == "custom" else _WholeCall(index, style, start, tool.kind)
