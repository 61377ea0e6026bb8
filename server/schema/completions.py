"""The wire type of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from inferd.engine.api.wire.params import MAX_LOGPROBS
from inferd.server.errors import table as errors
from inferd.server.schema.fields import wire
from inferd.server.schema.generation import MAX_PROMPTS, OUTPUT, PROMPT, REQUEST, GenerationFields
from inferd.server.schema.kinds import AnyOf, Array, Boolean, Integer, Only, Schema, Text, TokenIds

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompts:
    """A prompt or several, each as text or as token ids; read as a tuple of prompts."""

    min_chars: int = 0
    """Of a text: an empty one is a prompt where the tokenizer begins every text with a token; the intake counts."""
    name: str = "one of a string, an array of strings, an array of integers or an array of arrays of integers"

    def accepts(self, value: object) -> bool:
        return isinstance(value, (str, list))

    def read(self, value: object, where: str) -> tuple[Prompt, ...]:
        if not self._forms.accepts(value):
            raise errors.invalid_type(where, self.name, value)
        read = self._forms.read(value, where)
        if isinstance(read, str):
            return (read,)
        assert isinstance(read, tuple)
        return (read,) if isinstance(read[0], int) else read

    def schema(self) -> Schema:
        return self._forms.schema()

    @property
    def _forms(self) -> AnyOf:
        text, ids = Text(self.min_chars), TokenIds(1)
        return AnyOf((text, ids, Array(text, 1, MAX_PROMPTS), Array(ids, 1, MAX_PROMPTS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(GenerationFields):
    """A text to be continued."""

    prompt: tuple[Prompt, ...] = wire(
        Prompts(), "A text, a list of texts, a list of token ids, or a list of such lists.", required=True, area=PROMPT
    )
    echo: bool | None = wire(
        Boolean(), "Begin the text with the prompt, scored where `logprobs` are asked for.", unset="false", area=OUTPUT
    )
    logprobs: int | None = wire(
        Integer(0, MAX_LOGPROBS),
        "Log probabilities of the generated tokens, with so many alternatives.",
        unset="none",
        area=OUTPUT,
    )
    suffix: object = wire(
        Only(("",), "Text cannot be inserted before a suffix."), "Only an empty suffix is accepted.", has_effect=False
    )
    best_of: object = wire(
        Only((1,), "Use 'n' to get several completions."), "Only 1 is accepted.", area=REQUEST, has_effect=False
    )

    refused: ClassVar[Mapping[str, str]] = {
        **GenerationFields.refused,
        **dict.fromkeys(
            ("tools", "tool_choice", "reasoning_effort", "include_reasoning", "thinking_token_budget"),
            "Completions are one text; use /v1/chat/completions.",
        ),
    }
