"""The fields that every generating request shares: sampling, stopping, streaming, and what to return."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from inferd.engine.api.wire.params import MAX_LOGPROBS
from inferd.server.errors import table as errors
from inferd.server.schema.fields import RequestFields, wire
from inferd.server.schema.kinds import (
    Anything,
    Array,
    Boolean,
    Decimal,
    Integer,
    Json,
    OneOrMany,
    Only,
    OrNotGiven,
    Schema,
    Text,
    TokenIds,
    check_properties,
    object_schema,
)
from inferd.server.schema.repetition import RepetitionDetection, RepetitionRule
from inferd.server.schema.structured import AnswerFormat, Expression, ResponseFormat, StructuredOutputs
from inferd.server.schema.timeouts import TIMEOUT

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1_024
MAX_LISTED_IDS = 65_536
MAX_PROMPTS = 2_048
MAX_PRIORITY = 1_000
"""Of either sign; a level is worth 10 s of waiting, so that the most urgent is three hours ahead of any other."""

REQUEST, PROMPT, SAMPLING, STOPPING, OUTPUT = "Request", "Prompt", "Sampling", "Stopping", "Output"
TOOLS = "Tools and reasoning"
"""Parts of the documentation, in its order."""

_RECOMMENDED = "the checkpoint's, else "
_ONE_SERVER = "OpenRouter's choice among servers and models; here there is one."

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")

_REMOVED_GUIDED = {
    f"guided_{way}": f"Use 'structured_outputs' with '{way}' instead." for way in ("json", "regex", "choice", "grammar")
} | {
    "guided_decoding_backend": "Constrained output has one backend.",
    "guided_whitespace_pattern": "JSON is written with at most one space or line break between its parts.",
}


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

    def schema(self) -> Schema:
        names = ("include_usage", "continuous_usage_stats", "include_obfuscation")
        return object_schema({name: Boolean().schema() for name in names})


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

    def schema(self) -> Schema:
        keys = {"type": "string", "pattern": "^[0-9]{1,10}$"}
        values = Decimal(-100, 100).schema()
        return {
            "type": "object",
            "propertyNames": keys,
            "additionalProperties": values,
            "maxProperties": MAX_LISTED_IDS,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFields(RequestFields):
    """What a request of any family of generating routes may say. None is "not given": the intake knows the default."""

    model: str | None = wire(
        Text(), "The name of the served model; any other is a 404.", unset="the served model", area=REQUEST
    )
    stream: bool | None = wire(
        Boolean(), "Answer as server-sent events, as it is generated.", unset="false", area=OUTPUT
    )
    min_tokens: int | None = wire(Integer(0), "No end and no stop before so many tokens.", unset="0", area=STOPPING)
    temperature: float | None = wire(
        Decimal(0, 2), "0 takes the likeliest token; more is more random.", unset=_RECOMMENDED + "1", area=SAMPLING
    )
    top_p: float | None = wire(
        Decimal(0, 1),
        "Only the likeliest tokens that together have this probability; 0 is the likeliest alone.",
        unset=_RECOMMENDED + "1",
        area=SAMPLING,
    )
    top_k: int | None = wire(
        Integer(-1, 2**31 - 1),
        "Only the so many likeliest tokens; 0 and -1 are all of them.",
        unset=_RECOMMENDED + "0",
        area=SAMPLING,
    )
    min_p: float | None = wire(
        Decimal(0, 1),
        "Only tokens at least this likely, relative to the likeliest.",
        unset=_RECOMMENDED + "0",
        area=SAMPLING,
    )
    presence_penalty: float | None = wire(
        Decimal(-2, 2), "Taken from the logit of every token that was generated.", unset="0", area=SAMPLING
    )
    frequency_penalty: float | None = wire(
        Decimal(-2, 2), "Taken from a token's logit once for each time it was generated.", unset="0", area=SAMPLING
    )
    repetition_penalty: float | None = wire(
        Decimal(0.01, 100),
        "Divides positive logits, and multiplies negative ones, of tokens in the prompt or the answer.",
        unset=_RECOMMENDED + "1",
        area=SAMPLING,
    )
    seed: int | None = wire(
        OrNotGiven(Integer(-(2**63), 2**63 - 1), (-1,)),
        "The same request with the same seed gives the same answer. Every answer carries the seed it was made with. -1 "
        'is "not given", as at vLLM. Seeds outside 0 to 2^53 - 1 are mapped into that range by a hash, so that two of '
        "them may give the same answer.",
        unset="chosen at random",
        area=SAMPLING,
    )
    logit_bias: tuple[tuple[int, float], ...] | None = wire(
        LogitBias(), "Token id, as a string, to what is added to its logit.", unset="none", area=SAMPLING
    )
    allowed_token_ids: tuple[int, ...] | None = wire(
        TokenIds(1, MAX_LISTED_IDS), "Only these tokens are generated.", unset="all", area=SAMPLING
    )
    bad_words: tuple[str, ...] | None = wire(
        Array(Text(1, MAX_STOP_LENGTH), max_length=1_024),
        "Words that are never completed, at a text's start or after a space.",
        unset="none",
        area=SAMPLING,
    )
    stop: tuple[str, ...] | None = wire(
        OneOrMany(Text(1, MAX_STOP_LENGTH), max_length=MAX_STOP_STRINGS),
        "Strings that end the answer; none of one's characters is ever streamed. `stop_reason` says which.",
        unset="none",
        area=STOPPING,
    )
    stop_token_ids: tuple[int, ...] | None = wire(
        TokenIds(0, 1_024), "Tokens that end the answer. `stop_reason` says which.", unset="none", area=STOPPING
    )
    include_stop_str_in_output: bool | None = wire(
        Boolean(), "Show the stop string or stop token that ended the answer.", unset="false", area=STOPPING
    )
    ignore_eos: bool | None = wire(Boolean(), "Go on after the model's own end.", unset="false", area=STOPPING)
    repetition_detection: RepetitionRule | None = wire(  # noqa: RUF009
        RepetitionDetection(),
        "Ends an answer whose last tokens are one pattern of `min_pattern_size` to `max_pattern_size` tokens, "
        "`min_count` times in a row: `finish_reason` is `repetition`. Costs `max_pattern_size` comparisons a token.",
        unset="off",
        area=STOPPING,
    )
    timeout: float | None = wire(
        TIMEOUT,
        "Seconds from the request's arrival to the end of its answer. Then it is aborted: 408 `deadline_exceeded`, or "
        "an error event in a stream. The header `X-Request-Timeout` says the same; of the two the shorter holds.",
        unset="no limit",
        area=STOPPING,
    )
    skip_special_tokens: bool | None = wire(
        Boolean(), "Leave special tokens out of the text.", unset="true", area=OUTPUT
    )
    add_special_tokens: bool | None = wire(
        Boolean(),
        "Begin the text as the tokenizer begins every text. A chat template writes such tokens itself.",
        unset="false for chat, true for completions",
        area=PROMPT,
    )
    truncate_prompt_tokens: int | None = wire(
        Integer(1, also=(-1,)),
        "Keep only this many tokens at the end of the prompt; -1 keeps as many as leave room for the answer. If not "
        "given, the server refuses a prompt that is too long and never cuts it.",
        unset="never cut",
        area=PROMPT,
    )
    structured_outputs: AnswerFormat | None = wire(  # noqa: RUF009  # it makes a dataclass field
        StructuredOutputs(),
        "Constrains the answer token by token, by exactly one of `json` (a schema, as under `strict`), `json_object`, "
        "`regex` (Rust's syntax, but `\\d`, `\\w`, `\\s` match ASCII only), `choice` (one of a few texts), `grammar` "
        "(GBNF, or Lark, in which these three match Unicode) and `structural_tag`.",
        unset="none",
        area=OUTPUT,
    )
    regex: AnswerFormat | None = wire(  # noqa: RUF009  # it makes a dataclass field
        Expression("regex"), "SGLang's name of `structured_outputs.regex`.", unset="none", area=OUTPUT
    )
    ebnf: AnswerFormat | None = wire(  # noqa: RUF009  # it makes a dataclass field
        Expression("grammar"), "SGLang's name of `structured_outputs.grammar`.", unset="none", area=OUTPUT
    )
    priority: int | None = wire(
        Integer(-MAX_PRIORITY, MAX_PRIORITY),
        "Lower goes first. One level is worth 10 s of waiting.",
        unset="0",
        area=REQUEST,
    )
    cache_salt: str | None = wire(
        Text(1, 1_024),
        "Cached prefixes are shared only among requests with the same salt, and always only within one key.",
        unset="the key's own",
        area=REQUEST,
    )
    user: str | None = wire(Text(), "Callers are told apart by their key.", has_effect=False)
    service_tier: str | None = wire(Text(), "There is one tier; `priority` orders requests.", has_effect=False)
    safety_identifier: str | None = wire(Text(), "Callers are told apart by their key.", has_effect=False)
    client_metadata: object = wire(Anything(), "Callers are told apart by their key.", has_effect=False)
    prompt_cache_key: str | None = wire(
        Text(), "Prefixes are found by their content; `cache_salt` keeps them apart.", has_effect=False
    )
    prompt_cache_retention: str | None = wire(
        Text(), "Cached prefixes stay until newer ones need the room.", has_effect=False
    )
    prompt_cache_options: Mapping[str, object] | None = wire(
        Json(16), "Every prefix is cached, and stays until newer ones need the room.", has_effect=False
    )
    cache_control: object = wire(Anything(), "Every prefix is cached, and found by its content.", has_effect=False)
    moderation: object = wire(Anything(), "Nothing is moderated here.", has_effect=False)
    length_penalty: object = wire(
        Only((1,), "It belongs to beam search, which is not served."), "Only 1 is accepted.", has_effect=False
    )
    early_stopping: object = wire(
        Only((False,), "It belongs to beam search, which is not served."), "Only false is accepted.", has_effect=False
    )

    aliases: ClassVar[Mapping[str, str]] = {"no_stop_trim": "include_stop_str_in_output"}

    refused: ClassVar[Mapping[str, str]] = {
        **_REMOVED_GUIDED,
        "lora_path": "No adapters are served.",
        "chat_template": "Only the model's own chat template is rendered; 'chat_template_kwargs' reach it.",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFields(SharedFields):
    """What chat and completions say besides, but for the prompt."""

    n: int | None = wire(
        Integer(1, MAX_CHOICES),
        "Answers to each prompt. Each has a seed of its own, derived from `seed`; the first has `seed` itself.",
        unset="1",
        area=REQUEST,
    )
    stream_options: StreamOptions | None = wire(  # noqa: RUF009  # it makes a dataclass field
        StreamOptionsObject(),
        "`include_usage`: a last chunk with usage and empty `choices`. `continuous_usage_stats`: usage in every chunk. "
        "Only with `stream`. `include_obfuscation` is accepted: no chunk is ever padded.",
        unset="no usage",
        area=OUTPUT,
    )
    max_tokens: int | None = wire(
        OrNotGiven(Integer(0), (-1,)),
        'Most tokens to generate; 0 scores the prompt alone, -1 is "not given". More than the context holds beside the '
        "prompt is refused.",
        unset="16",
        area=STOPPING,
    )
    max_completion_tokens: int | None = wire(
        OrNotGiven(Integer(0), (-1,)),
        "The newer name of `max_tokens`. If both are given, this one counts.",
        unset="`max_tokens`",
        area=STOPPING,
    )
    spaces_between_special_tokens: bool | None = wire(
        Boolean(),
        "The text is what the tokens are, byte for byte; no tokenizer served here puts spaces between special tokens.",
        area=OUTPUT,
        has_effect=False,
    )
    prompt_logprobs: int | None = wire(
        Integer(0, MAX_LOGPROBS),
        "Log probabilities of every prompt token, with so many alternatives. Takes no prefix hit, and is not streamed.",
        unset="none",
        area=OUTPUT,
    )
    return_token_ids: bool | None = wire(
        Boolean(), "Add `prompt_token_ids`, and `token_ids` to each choice.", unset="false", area=OUTPUT
    )
    include_metrics: bool | None = wire(
        Boolean(),
        "Add `metrics`: `queue_time_ms`, `time_to_first_token_ms` (from the first step), `generation_time_ms` (first "
        "to last token), `mean_itl_ms`, `tokens_per_second` (first step to last token). Null for several prompts or "
        "choices; a stream has it in its usage chunk.",
        unset="false",
        area=OUTPUT,
    )
    response_format: AnswerFormat | None = wire(  # noqa: RUF009  # it makes a dataclass field
        ResponseFormat(),
        "What the answer may be: `text`, `json_object` (any JSON object), `json_schema` or `structural_tag`. Output is "
        "constrained token by token; one that ends by itself is valid. `strict` refuses a schema with a keyword that "
        "cannot be enforced, without it such keywords are left to the model.",
        unset="`text`",
        area=OUTPUT,
    )
    request_id: str | None = wire(
        Text(1, 128), "Becomes part of the answer's `id`: letters, digits and `._:-`.", unset="random", area=REQUEST
    )
    use_beam_search: object = wire(
        Only((False,), "Use 'n' with a temperature instead."), "Only false is accepted.", has_effect=False
    )
    return_tokens_as_token_ids: object = wire(
        Only((False,), "Use 'return_token_ids' instead."), "Only false is accepted.", has_effect=False
    )
    top_a: object = wire(Only((0,), "Use 'min_p' or 'top_p' instead."), "Only 0 is accepted.", has_effect=False)
    usage: object = wire(
        Anything(), "Every answer has usage; a stream has it if `stream_options` asks for it.", has_effect=False
    )
    provider: object = wire(Anything(), _ONE_SERVER, has_effect=False)
    models: object = wire(Anything(), _ONE_SERVER, has_effect=False)
    route: object = wire(Anything(), _ONE_SERVER, has_effect=False)
    transforms: object = wire(Anything(), "What does not fit is refused: no message is ever dropped.", has_effect=False)
    plugins: object = wire(Only(([],), "No plugins run here."), "Only an empty list is accepted.", has_effect=False)
    safety_settings: object = wire(Anything(), "Nothing is moderated here.", has_effect=False)
    metadata: Mapping[str, object] | None = wire(Json(), "Only /v1/responses stores answers.", has_effect=False)
    store: bool | None = wire(Boolean(), "Only /v1/responses stores answers.", has_effect=False)

    aliases: ClassVar[Mapping[str, str]] = {**SharedFields.aliases, "rid": "request_id"}

    refused: ClassVar[Mapping[str, str]] = SharedFields.refused
