"""Combines the fields that constrain an answer into one language."""

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
    """The language of an answer, and the field that asks for it."""

    param: str
    language: Language


def asks_for_format(wire: GenerationFields) -> bool:
    """Whether any field constrains the answer."""
    return any(getattr(wire, name, None) is not None for name in FIELDS)


def answer_language(wire: GenerationFields, tokens: Tokens) -> AnswerLanguage | None:
    """The language of the answer; None for free text. Raises `RequestError` if two fields constrain it."""
    given: dict[str, AnswerFormat] = {
        name: wanted for name in FIELDS if (wanted := getattr(wire, name, None)) is not None
    }
    if len(given) > 1:
        first, second, *_ = given
        message = f"Only one of '{first}' and '{second}' can be given: both constrain the answer."
        raise RequestError("invalid_value", message, second)
    for wanted in given.values():
        language = read_tags(wanted.tags, wanted.param, tokens) if wanted.language is None else wanted.language
        return AnswerLanguage(wanted.param, language)
    return None
