"""The parts of a responses request that are objects of their own, besides tools: `text`, `reasoning`, `include`,
`tool_choice`, ...

The answer repeats what the caller said, so that is kept beside what it means. `tool_choice` names the tools that the
model may or must call, flat, and `toolset` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, Tag, ValidationInfo, WithJsonSchema, field_validator

from inferd.server.errors import messages as errors
from inferd.server.errors import validation
from inferd.server.schema import structured, tool_choice
from inferd.server.schema.chat import ReasoningEffort, Verbosity
from inferd.server.schema.request_model import Kind, Part, Row, tell
from inferd.server.schema.response_tools import BESIDE_TYPE, CALLED, TOOLS, hosted_type
from inferd.server.schema.strict_json import NOT_WRITABLE, check_repeated, is_writable
from inferd.server.schema.structured import AnswerFormat, NamedSchema, PlainFormat, format_of
from inferd.server.schema.tool_choice import MAX_NAMED, MODES, Mode, word_or_type
from inferd.server.schema.values import Converted, JsonObject, Kept, Many, Text, form, union_of

LOGPROBS, SEALED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512


# --- text ------------------------------------------------------------------------------------------------------------


FORMATS: Mapping[str, Row] = {kind: structured.FORMATS[kind] for kind in ("text", "json_object", "json_schema")}
"""Type of a `format` -> what is done with it."""


class _FlatSchema(NamedSchema):
    type: Literal["json_schema"]

    refused = {"json_schema": BESIDE_TYPE}  # noqa: RUF012

    @classmethod
    def given(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        if not is_writable(value.get("schema")):
            raise validation.invalid_key("schema", value.get("schema"), NOT_WRITABLE)
        return super().given(value, info)


_FORMATS: Mapping[str, type[Part]] = {"text": PlainFormat, "json_object": PlainFormat, "json_schema": _FlatSchema}


class _Text(Part):
    verbosity: Verbosity = "medium"
    format: union_of(FORMATS, _FORMATS) = PlainFormat(type="text")  # type: ignore[valid-type]

    kinds: ClassVar[Mapping[str, Kind]] = {"verbosity": "offer"}


@dataclass(frozen=True, slots=True)
class TextOption:
    """`text` as given, and what it asks of the answer; None: any text."""

    format: Mapping[str, object]
    means: AnswerFormat | None
    verbosity: Verbosity = "medium"


def _text(given: JsonObject, text: _Text, where: str) -> TextOption:
    asked = given.get("format")
    shown = asked if isinstance(asked, dict) else {"type": "text"}
    check_repeated(shown, f"{where}.format")
    return TextOption(shown, format_of(text.format, f"{where}.format"), text.verbosity)


TextField = Annotated[TextOption, Kept(_Text, _text)]


# --- reasoning, include, metadata ------------------------------------------------------------------------------------


class ReasoningOption(Part):
    """`reasoning` as given; `effort` None: the model's own."""

    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: Text | None = None
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    kinds: ClassVar[Mapping[str, Kind]] = {
        "context": "offer", "mode": "offer", "summary": "hint", "generate_summary": "hint",
    }  # fmt: skip

    @classmethod
    def given(cls, value: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        """With the older name of `summary` in its place."""
        given = super().given(value, info)
        summary = given.pop("summary", None) or given.pop("generate_summary", None)
        given.pop("generate_summary", None)
        return given if summary is None else {**given, "summary": summary}

    @field_validator("context", "mode")
    @classmethod
    def _tell(cls, value: str | None, info: ValidationInfo) -> str | None:
        """The chat template alone says which reasoning the model reads again."""
        if value not in (None, "auto", "standard"):
            tell(info, "no_effect", f"'reasoning.{info.field_name}' has no effect: the chat template decides it")
        return value


_OfHosted = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
INCLUDES: Mapping[str, Row] = {
    LOGPROBS: Row("enforced", "The log probabilities of the text's tokens."),
    SEALED_REASONING: Row("enforced", "The reasoning in the form that clients send back."),
    **dict.fromkeys(get_args(_OfHosted), Row("hint", "It adds nothing, because no answer has such items.")),
}
"""Name in `include` -> what is done with it."""
Included = Annotated[
    tuple[Literal["message.output_text.logprobs", "reasoning.encrypted_content", _OfHosted], ...], Many(max_length=16)
]


def _metadata(pairs: JsonObject, where: str) -> Mapping[str, str]:
    texts: dict[str, str] = {}
    for key, text in pairs.items():
        if len(key) > MAX_METADATA_KEY:
            raise errors.string_too_long(f"{where}.{key}", MAX_METADATA_KEY, len(key))
        if not isinstance(text, str):
            raise errors.invalid_type(f"{where}.{key}", "a string", text)
        if len(text) > MAX_METADATA_VALUE:
            raise errors.string_too_long(f"{where}.{key}", MAX_METADATA_VALUE, len(text))
        texts[key] = text
    return texts


Metadata = Annotated[
    Mapping[str, str],
    Converted(Annotated[JsonObject, Field(max_length=MAX_METADATA)], _metadata),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"maxLength": MAX_METADATA_KEY},
            "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
            "maxProperties": MAX_METADATA,
        }
    ),
]
"""Up to 16 texts under short names."""


_RUN_ELSEWHERE = "No answer can use it: name a tool that the caller runs, or leave the choice to the model."

CHOICES: Mapping[str, Row] = {
    **tool_choice.CHOICES,
    **dict.fromkeys(
        ("shell", "local_shell", "apply_patch", "tool_search"), Row("enforced", "The model calls this tool once.")
    ),
    **dict.fromkeys(
        (*(kind for kind, row in TOOLS.items() if row.kind == "offer"), "computer_use"), Row("demand", _RUN_ELSEWHERE)
    ),
}
"""A choice of tools, by its word or the type of its object -> what is done with it."""


class _NamedTool(Part):
    type: Literal["function", "custom"]
    name: Text = Field(min_length=1)
    namespace: Text | None = None

    refused = dict.fromkeys(("function", "custom"), BESIDE_TYPE)


class _TypedTool(Part):
    type: Literal["shell", "local_shell", "apply_patch", "tool_search"]


class _NamedSpace(Part):
    type: Literal["namespace"]
    name: Text = Field(min_length=1)


def _choice_tag(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    row = CHOICES.get(hosted_type(kind) or kind) if isinstance(kind, str) else None
    return "<hosted>" if row is not None and row.kind == "demand" else word_or_type(value)


def _refuse_hosted(value: JsonObject) -> JsonObject:
    raise validation.unsupported_type(str(value.get("type")), _RUN_ELSEWHERE)


_AllowedTool = Annotated[
    Annotated[_NamedTool, Tag("<function>")]
    | Annotated[_NamedTool, Tag("<custom>")]
    | Annotated[_NamedSpace, Tag("<namespace>")]
    | Annotated[_TypedTool, Tag("<shell>")]
    | Annotated[_TypedTool, Tag("<local_shell>")]
    | Annotated[_TypedTool, Tag("<apply_patch>")]
    | Annotated[_TypedTool, Tag("<tool_search>")]
    | Annotated[JsonObject, Tag("<hosted>")],
    form("an object", _choice_tag, tuple(TOOLS)),
]


class _AllowedTools(Part):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[tuple[_AllowedTool, ...], Many(1, MAX_NAMED)]


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool that `tool_choice` names."""

    kind: str
    name: str
    """Empty for tools that have none."""
    namespace: str | None
    path: str


@dataclass(frozen=True, slots=True)
class AskedChoice:
    """`tool_choice` as given, and what it means."""

    given: str | JsonObject
    mode: Mode
    names: tuple[ToolName, ...] | None = None
    """The tools that may be called; None: all."""
    is_single: bool = False
    """Whether it names the one tool to call."""


def _choice(given: str | JsonObject, choice: Any, where: str) -> AskedChoice:
    check_repeated(given, where)
    if choice in MODES:
        return AskedChoice(given, choice)
    if isinstance(choice, _AllowedTools):
        names = (_name(tool, f"{where}.tools[{i}]") for i, tool in enumerate(choice.tools))
        return AskedChoice(given, choice.mode, tuple(name for name in names if name is not None))
    name = _name(choice, where)
    assert name is not None, "hosted tools were refused"
    return AskedChoice(given, "required", (name,), is_single=True)


def _name(tool: _NamedTool | _TypedTool | _NamedSpace | JsonObject, path: str) -> ToolName | None:
    match tool:
        case _NamedTool():
            return ToolName(tool.type, tool.name, tool.namespace, f"{path}.name")
        case _NamedSpace():
            return ToolName("namespace", "", tool.name, f"{path}.name")
        case _TypedTool():
            return ToolName(tool.type, "", None, f"{path}.type")
    return None


_Choice = Annotated[
    Annotated[Mode, Tag("<word>")]
    | Annotated[_NamedTool, Tag("<function>")]
    | Annotated[_NamedTool, Tag("<custom>")]
    | Annotated[_TypedTool, Tag("<shell>")]
    | Annotated[_TypedTool, Tag("<local_shell>")]
    | Annotated[_TypedTool, Tag("<apply_patch>")]
    | Annotated[_TypedTool, Tag("<tool_search>")]
    | Annotated[_AllowedTools, Tag("<allowed_tools>")]
    | Annotated[JsonObject, AfterValidator(_refuse_hosted), Tag("<hosted>")],
    form("one of a string or an object", _choice_tag, (*CALLED, "allowed_tools")),
]
ToolChoiceOption = Annotated[AskedChoice, Kept(_Choice, _choice)]
