"""The answers of /infill and /props, in the form of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from inferd.server.errors.answer import Answer, TokenIds


class InfillTimings(Answer):
    """Tokens and their times. A time is 0 if its event did not happen, or if there are several answers."""

    cache_n: int
    """Number of prompt tokens that the prefix cache had."""
    prompt_n: int
    """Number of prompt tokens that were computed."""
    prompt_ms: float
    """Milliseconds from the first step of the prompt to the first token."""
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    """Number of generated tokens."""
    predicted_ms: float
    """Milliseconds from the first token to the last."""
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillSettings(Answer):
    """The settings that an answer was generated with."""

    n_predict: int
    """Most tokens of the answer, as the context has cut it."""
    max_tokens: int
    """The same."""
    seed: int
    """Seed of this answer: alone, it is the same again with it."""
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    stop: Sequence[str]
    ignore_eos: bool
    stream: bool


class InfillHead(Answer):
    """Fields of an answer and of each event of a stream."""

    index: int
    """Number of the answer, from 0."""
    content: str
    """The text that fills the gap. In a stream the new text, which is empty in the last event."""
    tokens: TokenIds
    """Token ids of the text, if `return_tokens` is true. In a stream those of the event, always."""
    id_slot: int
    """Always 0: there are no slots."""
    tokens_predicted: int
    """Number of generated tokens so far."""
    tokens_evaluated: int
    """Number of prompt tokens."""


class InfillChunk(InfillHead):
    """An event of a stream that goes on."""

    stop: Literal[False]


class Infill(InfillHead):
    """The text that fills a gap. Also the last event of a stream. `response_fields` picks some of its fields."""

    stop: Literal[True]
    model: str
    """Name of the model, as the request wrote it."""
    generation_settings: InfillSettings
    prompt: str
    """Text of all that the model read, special tokens included."""
    has_new_line: bool
    """Whether the answer has a line break."""
    truncated: bool
    """Whether a part of the texts around the gap was left out, because the context is too short for it."""
    stop_type: Literal["eos", "word", "limit", "none"]
    """`eos`: the model ended the text. `word`: a stop string did. `limit`: it has `n_predict` tokens. `none`:
    another rule did."""
    stopping_word: str
    """The stop string that ended the text, or empty."""
    tokens_cached: int
    """Number of tokens of the prompt and the answer that the next request may find cached."""
    timings: InfillTimings | None
    """Null if there are several answers, which differ."""


class PropsParams(Answer):
    """Default sampling."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float


class PropsDefaults(Answer):
    """Settings of a request that names none."""

    n_ctx: int
    """Number of tokens of the context."""
    params: PropsParams


class PropsModalities(Answer):
    vision: bool
    audio: bool


class Props(Answer):
    """Properties of a model."""

    default_generation_settings: PropsDefaults
    total_slots: int
    """Number of requests that run at once."""
    model_alias: str
    """First name of the model."""
    model_path: str
    """Name of the checkpoint's directory or file, without its path."""
    modalities: PropsModalities
    chat_template: str
    """Empty if the model has none."""
    bos_token: str
    """Empty if the model has none."""
    eos_token: str
    """Empty if the model has none."""
    build_info: str
    """Version of inferd."""
