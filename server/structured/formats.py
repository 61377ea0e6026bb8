"""What a request's fields say together about its answer, as one language."""

from __future__ import annotations

from dataclasses import dataclass

from inferd.engine.api.errors import RequestError
from inferd.server.schema.generation import GenerationFields
from inferd.server.schema.structured import AnswerFormat
from inferd.server.structured.language import Language
from inferd.server.structured.tags import Tokens, read_tags

FIELDS = ("response_format", "structured_outputs", "regex", "ebnf")


@dataclass(frozen=True, slots=True)
class AnswerLanguage:
    """The texts that an answer may be, and the field that says so."""

    param: str
    language: Language


def asks_for_format(wire: GenerationFields) -> bool:
    """Whether any field says what the answer may be."""
    return any(getattr(wire, name, None) is not None for name in FIELDS)


def answer_language(wire: GenerationFields, tokens: Tokens) -> AnswerLanguage | None:
    """None where the answer is free text. Raises `RequestError` where two fields ask for something."""
    given: dict[str, AnswerFormat] = {
        name: asked for name in FIELDS if (asked := getattr(wire, name, None)) is not None
    }
    if len(given) > 1:
        first, second, *_ = given
        message = f"Only one of '{first}' and '{second}' can be given: both say what the answer may be."
        raise RequestError("invalid_value", message, second)
    for asked in given.values():
        if asked.language is not None:
            return AnswerLanguage(asked.param, asked.language)
        return AnswerLanguage(asked.param, read_tags(asked.tags, asked.param, tokens))
    return None
