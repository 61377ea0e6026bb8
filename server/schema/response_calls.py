"""Items of calls, and of their results, of every tool that the caller runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from inferd.server.schema.chat_messages import MAX_MESSAGES
from inferd.server.schema.request_model import Kind, Part
from inferd.server.schema.response_parts import ITEM_WITHOUT_EFFECT, Content, Item, ItemPart, NotEmpty, shown_content
from inferd.server.schema.response_tools import GivenTools
from inferd.server.schema.strict_json import check_writable
from inferd.server.schema.values import JsonObject, Many, Text, Whole

_Count = Annotated[Whole, Field(ge=-(2**53), le=2**53)]


class _CalledTool(ItemPart):
    """Keys of calls and of their outputs."""

    call_id: NotEmpty


class _Call(_CalledTool):
    type: Literal["function_call"]
    name: NotEmpty
    namespace: Text | None = None
    arguments: Text = ""

    without_effect = (*ITEM_WITHOUT_EFFECT, "async", "async_")

    def shown(self) -> Item:
        return {"call_id": self.call_id, **_named(self), "arguments": self.arguments or "{}"}


class _CustomCall(_CalledTool):
    type: Literal["custom_tool_call"]
    name: NotEmpty
    namespace: Text | None = None
    input: Text

    without_effect = (*ITEM_WITHOUT_EFFECT, "async", "async_")

    def shown(self) -> Item:
        return {"call_id": self.call_id, **_named(self), "input": self.input}


def _named(call: _Call | _CustomCall) -> Item:
    return {"name": call.name, **({"namespace": call.namespace} if call.namespace else {})}


class _Result(ItemPart):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: NotEmpty | None = None
    """If it is not given, the last call before the output."""
    output: Content

    without_effect = (*ITEM_WITHOUT_EFFECT, "name", "namespace")

    def shown(self) -> Item:
        output = self.output if isinstance(self.output, str) else shown_content(self.output, "input_text")
        return {"call_id": self.call_id, "output": output}


def _as_dict(action: Part) -> dict[str, object]:
    """The keys of an action, for JSON."""
    given = {name: getattr(action, name) for name in action.names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


class _ShellAction(Part):
    commands: Annotated[tuple[Text, ...], Many(max_length=MAX_MESSAGES)]
    timeout_ms: _Count | None = None
    max_output_length: _Count | None = None


class _ShellCall(_CalledTool):
    type: Literal["shell_call"]
    action: _ShellAction

    without_effect = (*ITEM_WITHOUT_EFFECT, "environment")

    def shown(self) -> Item:
        return {"call_id": self.call_id, "action": _as_dict(self.action)}


class _ShellOutcome(Part):
    type: Literal["exit", "timeout"]
    exit_code: _Count | None = None


class _ShellOutput(Part):
    outcome: _ShellOutcome
    stdout: Text
    stderr: Text

    without_effect = ("created_by",)


class _ShellResult(_CalledTool):
    type: Literal["shell_call_output"]
    output: Annotated[tuple[_ShellOutput, ...], Many(max_length=MAX_MESSAGES)]
    max_output_length: _Count | None = None

    kinds: ClassVar[Mapping[str, Kind]] = {"max_output_length": "hint"}

    def shown(self) -> Item:
        output = [part.model_dump(exclude_none=True) for part in self.output]
        return {"call_id": self.call_id, "output": output, "max_output_length": self.max_output_length}


class _LocalAction(Part):
    type: Literal["exec"] = "exec"
    command: Annotated[tuple[Text, ...], Many(max_length=MAX_MESSAGES)]
    env: Annotated[JsonObject, AfterValidator(check_writable)] | None = None
    timeout_ms: _Count | None = None
    user: Text | None = None
    working_directory: Text | None = None

    kinds: ClassVar[Mapping[str, Kind]] = {"env": "hint", "user": "hint"}


class _LocalShellCall(_CalledTool):
    type: Literal["local_shell_call"]
    action: _LocalAction

    def shown(self) -> Item:
        return {"call_id": self.call_id, "action": {**_as_dict(self.action), "env": self.action.env or {}}}


class _LocalShellResult(ItemPart):
    """Its `id` is the call's, as OpenAI has it; some clients send `call_id`."""

    type: Literal["local_shell_call_output"]
    call_id: NotEmpty | None = None
    output: Text

    def shown(self) -> Item:
        return {"call_id": self.call_id or self.id or "", "output": self.output}


class _Operation(Part):
    type: Literal["create_file", "update_file", "delete_file"]
    path: Text
    diff: Text | None = None


class _PatchCall(_CalledTool):
    type: Literal["apply_patch_call"]
    operation: _Operation

    def shown(self) -> Item:
        return {"call_id": self.call_id, "operation": self.operation.model_dump(exclude_none=True)}


class _PatchResult(_CalledTool):
    """Its `status` says how it ended."""

    type: Literal["apply_patch_call_output"]
    status: Literal["completed", "failed"] = "completed"
    output: Text | None = None

    without_effect = tuple(key for key in ITEM_WITHOUT_EFFECT if key != "status")

    def shown(self) -> Item:
        return {"call_id": self.call_id, "status": self.status, "output": self.output}


class _SearchCall(ItemPart):
    type: Literal["tool_search_call"]
    call_id: NotEmpty | None = None
    arguments: Annotated[object, AfterValidator(check_writable)] = None
    execution: Literal["server", "client"] = "server"

    kinds: ClassVar[Mapping[str, Kind]] = {"execution": "hint"}

    def shown(self) -> Item:
        return {"call_id": self.call_id, "execution": self.execution, "arguments": self.arguments or {}}


class _SearchResult(ItemPart):
    type: Literal["tool_search_output"]
    call_id: NotEmpty | None = None
    tools: GivenTools
    execution: Literal["server", "client"] = "server"

    kinds: ClassVar[Mapping[str, Kind]] = {"execution": "hint"}

    def shown(self) -> Item:
        return {"call_id": self.call_id, "execution": self.execution, "tools": list(self.tools)}


CALL_ITEMS: Mapping[str, type[ItemPart]] = {
    "function_call": _Call,
    "function_call_output": _Result,
    "custom_tool_call": _CustomCall,
    "custom_tool_call_output": _Result,
    "shell_call": _ShellCall,
    "shell_call_output": _ShellResult,
    "local_shell_call": _LocalShellCall,
    "local_shell_call_output": _LocalShellResult,
    "apply_patch_call": _PatchCall,
    "apply_patch_call_output": _PatchResult,
    "tool_search_call": _SearchCall,
    "tool_search_output": _SearchResult,
}
"""Type of an item -> what it is read as."""
