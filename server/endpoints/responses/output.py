"""The output of one response: turns events of a choice into items, and into the stream's events about them.

Reasoning, text and calls become items in their order. An item is open until the next one begins. Calls are here, those
of tools with items of their own among them (`shell`, `local_shell`, `apply_patch` and `tool_search`). This file knows
nothing of the response around the items.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from inferd.server.endpoints.responses.output_items import Ending, Item, Message, Reasoning, Scored, Style
from inferd.server.generate.events import (
    Event,
    Finished,
    PromptRead,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from inferd.server.schema.answers.response_events import CommandDeltaEvent, CommandEvent, OutputEvent
from inferd.server.schema.answers.responses import (
    CallItem,
    CustomCallItem,
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    PatchOperation,
)
from inferd.server.schema.caller_tool import ToolKind
from inferd.server.schema.strict_json import is_writable

_Count = Annotated[int, Field(ge=-(2**53), le=2**53)]
"""A number that every client reads."""


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _Shell(_Arguments):
    commands: list[str]
    timeout_ms: _Count | None = None
    max_output_length: _Count | None = None


class _LocalShell(_Arguments):
    command: list[str]
    timeout_ms: _Count | None = None
    working_directory: str | None = None


def _checked(value: dict[str, Any]) -> dict[str, Any]:
    if not is_writable(value):
        raise ValueError("the answer could not hold it")
    return value


class _Patch(_Arguments):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str = ""


_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(Annotated[dict[str, Any], AfterValidator(_checked)])


def read_call(kind: ToolKind, arguments: str, item_id: str, status: ItemStatus, call_id: str) -> CallItem | None:
    """The item of a call; None if its arguments cannot be read, as those of a call that was cut off."""
    try:
        match kind:
            case "shell":
                shell = _Shell.model_validate_json(arguments)
                return {
                    "id": item_id, "type": "shell_call", "status": status, "call_id": call_id, "environment": None,
                    "action": {
                        "commands": shell.commands,
                        "timeout_ms": shell.timeout_ms,
                        "max_output_length": shell.max_output_length,
                    },
                }  # fmt: skip
            case "local_shell":
                local = _LocalShell.model_validate_json(arguments)
                return {
                    "id": item_id, "type": "local_shell_call", "status": status, "call_id": call_id,
                    "action": {
                        "type": "exec",
                        "command": local.command,
                        "env": {},
                        "timeout_ms": local.timeout_ms,
                        "user": None,
                        "working_directory": local.working_directory,
                    },
                }  # fmt: skip
            case "apply_patch":
                patch = _Patch.model_validate_json(arguments)
                operation: PatchOperation = {"type": patch.type, "path": patch.path}
                if patch.type != "delete_file":
                    operation["diff"] = patch.diff
                return {
                    "id": item_id, "type": "apply_patch_call", "status": status, "call_id": call_id,
                    "operation": operation,
                }  # fmt: skip
            case "tool_search":
                return {
                    "id": item_id, "type": "tool_search_call", "status": status, "call_id": call_id,
                    "execution": "client", "arguments": _OBJECT.validate_json(arguments),
                }  # fmt: skip
    except ValidationError:
        return None
    return None


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


class Output:
    """The items while they grow."""

    def __init__(self, style: Style) -> None:
        self.end: Finished | None = None
        self._style = style
        self._items: list[Item] = []
        self._pending: Scored = ()
        """Tokens that came without text, because a character or a stop string was unfinished, or they have none."""

    @property
    def item_ids(self) -> tuple[str, ...]:
        return tuple(item.id for item in self._items)

    def items(self) -> list[OutputItem]:
        """The items as they are now, for orjson to write."""
        return [item.shown() for item in self._items]

    def feed(self, event: Event) -> Iterator[OutputEvent]:
        """The stream's events for an event of the choice. Must be read to its end."""
        match event:
            case PromptRead():
                raise AssertionError("the prompt of a response is not shown")
            case TextDelta():
                self._pending += event.scored
                if event.text:
                    yield from self._more(Message, event.text)
            case ReasoningDelta():
                self._pending = ()
                yield from self._more(Reasoning, event.text)
            case ToolCallStart():
                self._pending = ()
                yield from self._close("completed")
                yield from self._begin(call_item(len(self._items), self._style, event))
            case ToolCallArguments():
                self._pending = ()
                yield from self._items[-1].more(event.text, ())
            case Finished():
                self.end = event
                if not self._items:
                    yield from self._begin(Message(0, self._style))
                yield from self._close("incomplete" if event.reason == "length" else "completed")

    def stop(self) -> None:
        """Close the open item as incomplete, because no more events come."""
        if (item := self._filled()) is not None:
            item.status = "incomplete"

    def _filled(self) -> Item | None:
        """The open item with all of its tokens; None if no item is open."""
        if not self._items or self._items[-1].status != "in_progress":
            return None
        item, scored = self._items[-1], self._take_scored()
        if isinstance(item, Message):
            item.add(scored)
        return item

    def _more(self, kind: type[Message | Reasoning], text: str) -> Iterator[OutputEvent]:
        if not (self._items and isinstance(self._items[-1], kind)):
            yield from self._close("completed")
            yield from self._begin(kind(len(self._items), self._style))
        yield from self._items[-1].more(text, self._take_scored())

    def _begin(self, item: Item) -> Iterator[OutputEvent]:
        self._items.append(item)
        yield from item.begin()

    def _close(self, status: Ending) -> Iterator[OutputEvent]:
        if (item := self._filled()) is not None:
            yield from item.close(status)
            item.status = status
            yield item.whole("response.output_item.done")

    def _take_scored(self) -> Scored:
        taken, self._pending = self._pending, ()
        return taken
