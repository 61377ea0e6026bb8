"""Calls of tools that have items of their own: `shell`, `local_shell`, `apply_patch` and `tool_search`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from inferd.server.schema.answers.responses import CallItem, ItemStatus, PatchOperation
from inferd.server.schema.caller_tool import ToolKind
from inferd.server.schema.json_bytes import is_writable

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
