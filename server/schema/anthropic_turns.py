"""The turns of an Anthropic conversation: content of each role, and the texts in it.

`anthropic_blocks` says what there may be in a turn, `anthropic_conversation` what the model reads of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationInfo, field_validator

from inferd.server.errors import validation
from inferd.server.schema.anthropic_blocks import CONTENT, TextBlock, Texts
from inferd.server.schema.anthropic_parts import Effort
from inferd.server.schema.model import Part
from inferd.server.schema.values import Converted

BILLING_LINE = "x-anthropic-billing-header:"
"""Begins a line that Claude Code puts before its system prompt. It changes with every request and says nothing to the
model: read by one, it would keep any two requests from sharing a prefix."""

_CONTENT: Mapping[str, TypeAdapter[Any]] = {role: TypeAdapter(content) for role, content in CONTENT.items()}
_FOR_SYSTEM = "Only turns of the system have it."


class _TurnOutput(Part):
    effort: Effort | None = None


class Turn(Part):
    role: Literal["user", "assistant", "system"]
    content: Any = ""
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: _TurnOutput | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]},
                {
                    "properties": {"role": {"const": "system"}, "output_config": {"type": "object"}},
                    "required": ["output_config"],
                },
            ]
        }
    )

    @classmethod
    def given(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        """Only a turn of the system that sets the effort may say nothing."""
        given = super().given(value, info)
        sets_effort = given.get("role") == "system" and "output_config" in given
        if "role" in given and "content" not in given and not sets_effort:
            raise validation.missing_key("content")
        return given

    @field_validator("content", mode="plain", json_schema_input_type=CONTENT["user"] | CONTENT["assistant"])
    @classmethod
    def _read(cls, value: object, info: ValidationInfo) -> Any:
        """The role says which blocks there may be."""
        if "role" not in info.data:
            return ""  # it is refused
        return _CONTENT[info.data["role"]].validate_python(value, context=info.context)

    @field_validator("clear_at", "output_config", mode="before")
    @classmethod
    def _check_role(cls, value: object, info: ValidationInfo) -> object:
        if info.data.get("role", "system") != "system":
            raise validation.invalid_value(_FOR_SYSTEM)
        return value


def _system(content: str | tuple[TextBlock, ...], where: str) -> str:
    """The system prompt, its texts joined by newlines, without the billing line."""
    del where
    texts = plain(content)
    if texts:
        line, _, rest = texts[0].partition("\n")
        texts[0] = rest if line.startswith(BILLING_LINE) else texts[0]
    return "\n".join(text for text in texts if text)


System = Annotated[str, Converted(Texts, _system)]


def plain(content: str | tuple[TextBlock, ...]) -> list[str]:
    """The texts of content that holds nothing else."""
    return [content] if isinstance(content, str) else [block.text for block in content]


_SAID = frozenset(
    ("title", "url", "path", "text", "content", "source", "data", "stdout", "stderr", "lines", "tabs", "state_changes",
     "error_code", "error_message", "error")
)  # fmt: skip


def said(value: object) -> Iterator[str]:
    """The texts in an object that one of Anthropic's servers wrote, in its order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from said(item)
    elif isinstance(value, dict) and value.get("type") != "base64":
        for key, item in value.items():
            if key in _SAID:
                yield from said(item)


def tagged(tag: str, heads: Mapping[str, str | None], text: str) -> str:
    """A text between tags, with its heads, such as a title, in tags of their own."""
    lines = [f"<{name}>{value}</{name}>" for name, value in heads.items() if value]
    return "\n".join([f"<{tag}>", *lines, text, f"</{tag}>"])
