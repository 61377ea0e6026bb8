"""The wire type of /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass

from inferd.engine.api.params import MAX_LOGPROBS
from inferd.server import errors
from inferd.server.schema.fields import wire
from inferd.server.schema.generation import MAX_PROMPTS, GenerationFields
from inferd.server.schema.kinds import AnyOf, Array, Boolean, Integer, Only, Text, TokenIds

Prompt = str | tuple[int, ...]

_PROMPTS = AnyOf((Text(), TokenIds(1), Array(Text(), 1, MAX_PROMPTS), Array(TokenIds(1), 1, MAX_PROMPTS)))


@dataclass(frozen=True, slots=True)
class Prompts:
    """A prompt or several, each as text or as token ids; read as a tuple of prompts."""

    name: str = "one of a string, an array of strings, an array of integers or an array of arrays of integers"

    def accepts(self, value: object) -> bool:
        return isinstance(value, (str, list))

    def read(self, value: object, where: str) -> tuple[Prompt, ...]:
        if not _PROMPTS.accepts(value):
            raise errors.invalid_type(where, self.name, value)
        read = _PROMPTS.read(value, where)
        # An empty text is a prompt where the tokenizer begins every text with a token; the intake counts.
        if isinstance(read, str):
            return (read,)
        assert isinstance(read, tuple)
        return (read,) if isinstance(read[0], int) else read


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(GenerationFields):
    """A text to be continued."""

    prompt: tuple[Prompt, ...] = wire(Prompts(), required=True)
    echo: bool | None = wire(Boolean())
    logprobs: int | None = wire(Integer(0, MAX_LOGPROBS))
    suffix: object = wire(Only(("",), "Text cannot be inserted before a suffix."), has_effect=False)
    best_of: object = wire(Only((1,), "Use 'n' to get several completions."), has_effect=False)
    response_format: None = wire(Only(({"type": "text"},), 'Only {"type": "text"} is served.'))
