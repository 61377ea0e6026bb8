"""The wire type of /v1/chat/completions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from inferd.engine.api.params import MAX_LOGPROBS
from inferd.server import errors
from inferd.server.schema.fields import wire
from inferd.server.schema.generation import GenerationFields
from inferd.server.schema.kinds import (
    Array,
    Boolean,
    Choice,
    Integer,
    Json,
    Only,
    Text,
    check_properties,
)
from inferd.server.schema.messages import Message, Messages

_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the chat template shows to the model; passed on as it was given."""

    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> Mapping[str, object]:
        tool = check_properties(value, where, ("type", "function"), ())
        Choice(("function",)).read(tool["type"], f"{where}.type")
        function = check_properties(
            tool["function"], f"{where}.function", ("name",), ("description", "parameters", "strict")
        )
        name = Text().read(function["name"], f"{where}.function.name")
        if not _FUNCTION_NAME.fullmatch(name):
            rule = "Expected 1 to 128 letters, digits, '_', '-' or '.'."
            raise errors.invalid_value(f"{where}.function.name", name, rule)
        for key, kind in (("description", Text()), ("parameters", Json()), ("strict", Boolean())):
            if function.get(key) is not None:
                kind.read(function[key], f"{where}.function.{key}")
        return tool


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> None:
        given = Json().read(value, where)
        if given.get("type") is None:
            raise errors.missing(f"{where}.type")
        Only(("text",), "Only 'text' is served.").read(given["type"], f"{where}.type")


_NO_CALL_PARSING = "Only 'auto' and 'none' are served: a call cannot be enforced yet."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerationFields):
    """A conversation to be continued."""

    messages: tuple[Message, ...] = wire(Messages(), required=True)
    max_tokens: int | None = wire(Integer(1))
    max_completion_tokens: int | None = wire(Integer(1))
    logprobs: bool | None = wire(Boolean())
    top_logprobs: int | None = wire(Integer(0, MAX_LOGPROBS))
    tools: tuple[Mapping[str, object], ...] | None = wire(Array(Tool(), max_length=128))
    tool_choice: str | None = wire(Only(("auto", "none"), _NO_CALL_PARSING))
    parallel_tool_calls: bool | None = wire(Boolean(), has_effect=False)
    response_format: None = wire(ResponseFormat())
    modalities: object = wire(Only((["text"],), 'Only ["text"] is served.'), has_effect=False)
    prompt_cache_key: str | None = wire(Text(), has_effect=False)
    add_generation_prompt: bool | None = wire(Boolean())
    continue_final_message: bool | None = wire(Boolean())
    chat_template_kwargs: Mapping[str, object] | None = wire(Json())

    refused: ClassVar[Mapping[str, str]] = {
        **GenerationFields.refused,
        "reasoning_effort": "Switches of the model's own template can be given in 'chat_template_kwargs'.",
        "verbosity": "Ask for the length in the prompt.",
        "functions": "Use 'tools' instead.",
        "function_call": "Use 'tool_choice' instead.",
        "audio": "Only text is served.",
        "prediction": "Predicted output is not served.",
        "web_search_options": "Web search is not served.",
        "echo": "Only /v1/completions echoes its prompt.",
    }
