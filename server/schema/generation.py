"""The fields that every generating request shares: sampling, stopping, streaming, and what to return."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from inferd.engine.api.params import MAX_LOGPROBS, MAX_SEED
from inferd.server import errors
from inferd.server.schema.fields import RequestFields, wire
from inferd.server.schema.kinds import (
    Array,
    Boolean,
    Decimal,
    Integer,
    Json,
    OneOrMany,
    Text,
    TokenIds,
    check_properties,
)

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1_024
MAX_LISTED_IDS = 65_536
MAX_PROMPTS = 2_048
MAX_CHOICES_IN_ALL = 2_048
"""Prompts times n of one HTTP request."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")

_STRUCTURED = "Constrained output is not served yet; ask for the format in the prompt."
_REMOVED_GUIDED = "The field's successor is 'structured_outputs', which is not served yet."


def is_sane_id(text: str) -> bool:
    """Whether a caller's id may be repeated in headers, logs and answers."""
    return _REQUEST_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """When a stream carries usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


@dataclass(frozen=True, slots=True)
class StreamOptionsObject:
    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> StreamOptions:
        known = ("include_usage", "continuous_usage_stats")
        given = check_properties(value, where, (), (*known, "include_obfuscation"))
        flags = {key: Boolean().read(given[key], f"{where}.{key}") for key in known if given.get(key) is not None}
        return StreamOptions(**flags)


@dataclass(frozen=True, slots=True)
class LogitBias:
    """{"token id": added value}; read as pairs in order of id. The embedding's bound is known only later."""

    name: str = "an object"

    def accepts(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: object, where: str) -> tuple[tuple[int, float], ...]:
        entries = Json(max_properties=MAX_LISTED_IDS).read(value, where)
        pairs: dict[int, float] = {}
        for key, bias in entries.items():
            # Bounded before `int`, which is quadratic in the number of digits.
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise errors.invalid_value(where, key, "Keys must be token ids, as strings of digits.")
            if int(key) in pairs:
                raise errors.invalid_value(where, key, "Each token id may be given once.")
            pairs[int(key)] = Decimal(-100, 100).read(bias, f"{where}.{key}")
        return tuple(sorted(pairs.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFields(RequestFields):
    """Everything that does not say what the prompt is. None means "not given": the intake knows the default."""

    model: str | None = wire(Text())
    n: int | None = wire(Integer(1, MAX_CHOICES))
    stream: bool | None = wire(Boolean())
    stream_options: StreamOptions | None = wire(StreamOptionsObject())  # noqa: RUF009  # it makes a dataclass field
    max_tokens: int | None = wire(Integer(0))
    max_completion_tokens: int | None = wire(Integer(0))
    min_tokens: int | None = wire(Integer(0))
    temperature: float | None = wire(Decimal(0, 2))
    top_p: float | None = wire(Decimal(0, 1))
    top_k: int | None = wire(Integer(-1, 2**31 - 1))
    min_p: float | None = wire(Decimal(0, 1))
    presence_penalty: float | None = wire(Decimal(-2, 2))
    frequency_penalty: float | None = wire(Decimal(-2, 2))
    repetition_penalty: float | None = wire(Decimal(0.01, 100))
    seed: int | None = wire(Integer(0, MAX_SEED))
    logit_bias: tuple[tuple[int, float], ...] | None = wire(LogitBias())
    allowed_token_ids: tuple[int, ...] | None = wire(TokenIds(1, MAX_LISTED_IDS))
    bad_words: tuple[str, ...] | None = wire(Array(Text(1, MAX_STOP_LENGTH), max_length=1_024))
    stop: tuple[str, ...] | None = wire(OneOrMany(Text(1, MAX_STOP_LENGTH), max_length=MAX_STOP_STRINGS))
    stop_token_ids: tuple[int, ...] | None = wire(TokenIds(0, 1_024))
    include_stop_str_in_output: bool | None = wire(Boolean())
    ignore_eos: bool | None = wire(Boolean())
    skip_special_tokens: bool | None = wire(Boolean())
    spaces_between_special_tokens: bool | None = wire(Boolean(), has_effect=False)
    prompt_logprobs: int | None = wire(Integer(0, MAX_LOGPROBS))
    add_special_tokens: bool | None = wire(Boolean())
    truncate_prompt_tokens: int | None = wire(Integer(-1))
    priority: int | None = wire(Integer(-(2**31), 2**31 - 1))
    cache_salt: str | None = wire(Text(1, 1_024))
    request_id: str | None = wire(Text(1, 128))
    return_token_ids: bool | None = wire(Boolean())
    user: str | None = wire(Text(), has_effect=False)
    metadata: Mapping[str, object] | None = wire(Json(), has_effect=False)
    store: bool | None = wire(Boolean(), has_effect=False)
    service_tier: str | None = wire(Text(), has_effect=False)
    safety_identifier: str | None = wire(Text(), has_effect=False)

    refused: ClassVar[Mapping[str, str]] = {
        "structured_outputs": _STRUCTURED,
        "regex": _STRUCTURED,
        "ebnf": _STRUCTURED,
        **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _REMOVED_GUIDED),
        "guided_decoding_backend": _REMOVED_GUIDED,
        "thinking_token_budget": "Bound the whole answer with 'max_tokens' instead.",
        "include_reasoning": "Answers are returned as one text.",
        "repetition_detection": "Use 'repetition_penalty' instead.",
        "timeout": "Close the connection instead: the request is then aborted.",
        "rid": "Use 'request_id' instead.",
        "no_stop_trim": "Use 'include_stop_str_in_output' instead.",
        "lora_path": "No adapters are served.",
        "documents": "Put the documents into the messages.",
        "chat_template": "Only the model's own chat template is rendered; 'chat_template_kwargs' reach it.",
        "use_beam_search": "Use 'n' with a temperature instead.",
        "length_penalty": "It belongs to beam search, which is not served.",
        "return_tokens_as_token_ids": "Use 'return_token_ids' instead.",
    }
