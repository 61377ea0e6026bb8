"""The fields that every generating request shares: sampling, stopping, streaming, and what to return."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, Tag, ValidationInfo, WithJsonSchema

from inferd.engine.api.wire.params import MAX_LOGPROBS
from inferd.server.errors import messages as errors
from inferd.server.errors import validation
from inferd.server.schema.latency import MAX_TIMEOUT_S, MIN_TIMEOUT_S, priority_option
from inferd.server.schema.repetition import RepetitionDetection
from inferd.server.schema.request_model import Kind, Part, RequestModel, option, tell
from inferd.server.schema.structured import Grammar, Regex, ResponseFormat, StructuredOutputs
from inferd.server.schema.token_ids import MAX_LISTED_IDS, LogitBias, token_ids
from inferd.server.schema.values import Besides, Converted, Flag, JsonObject, Many, Number, Only, Text, Whole, form

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1_024
MAX_PROMPTS = 2_048

REQUEST, PROMPT, SAMPLING, STOPPING, OUTPUT = "Request", "Prompt", "Sampling", "Stopping", "Output"
TOOLS = "Tools and reasoning"
"""Parts of the documentation, in its order."""

CUT = "It is cut to what the context holds behind the prompt, and `x-inferd-warning` says so."
"""Said of each field that limits the tokens of an answer."""

_RECOMMENDED = "the checkpoint's, else "
_NO_BEAM_SEARCH = "It belongs to beam search, which is not served."
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


class StreamOptions(Part):
    """When a stream carries usage."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    include_obfuscation: Annotated[object, WithJsonSchema({"type": "boolean"})] = False
    """Not even checked: no chunk is ever padded."""

    kinds: ClassVar[Mapping[str, Kind]] = {"include_obfuscation": "hint"}


SEED = (
    "The same request with the same seed gives the same answer. Every answer carries its seed. -1 means "
    '"not given", as in vLLM. A hash maps seeds outside 0 to 2^53 - 1 into that range, so two of them may give the '
    "same answer."
)
Seed = Annotated[Whole | None, Field(ge=-(2**63), le=2**63 - 1), Besides(-1, None)]

StopString = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


def _num_stops(value: object) -> str | None:
    return "<one>" if isinstance(value, str) else "<many>" if isinstance(value, list) else None


StopField = Annotated[
    Annotated[StopString, Tag("<one>")]
    | Annotated[tuple[StopString, ...], Many(max_length=MAX_STOP_STRINGS), Tag("<many>")],
    form("one of a string or an array of strings", _num_stops),
]


def _as_many(value: Any, where: str) -> tuple[str, ...]:
    del where
    return (value,) if isinstance(value, str) else value


def _check_moderation(value: object, info: ValidationInfo) -> object:
    """A caller relies on a policy that blocks."""
    policy = value.get("policy") if isinstance(value, dict) else None
    for side, rule in policy.items() if isinstance(policy, dict) else ():
        if isinstance(rule, dict) and rule.get("mode") == "block":
            way_out = "This server moderates nothing: let another service judge the texts, and leave 'moderation' out."
            where = f"moderation.policy.{errors.clip(side, 64)}.mode"
            raise validation.refused(errors.unsupported_value(where, "block", way_out))
    if value:
        tell(info, "no_effect", "'moderation' has no effect: this server moderates nothing")
    return value


class SharedFields(RequestModel):
    """Fields of every generating request. None means "not given"; the intake knows the default."""

    model: Text | None = option(
        "The name of the served model; any other is a 404.", unset="the served model", area=REQUEST
    )
    stream: Flag | None = option(
        "Send the answer as server-sent events while it is generated.", unset="false", area=OUTPUT
    )
    min_tokens: Whole | None = option(
        "The answer does not end before it has this many tokens. More than the answer may have, or than the context "
        "holds behind the prompt, is refused.",
        unset="0",
        area=STOPPING,
        ge=0,
    )
    temperature: Number | None = option(
        "0 always takes the likeliest token. A higher value makes the answer more random.",
        unset=_RECOMMENDED + "1",
        area=SAMPLING,
        ge=0,
        le=2,
    )
    top_p: Number | None = option(
        "Draw only among the likeliest tokens whose probabilities add up to this value. 0 takes the likeliest token.",
        unset=_RECOMMENDED + "1",
        area=SAMPLING,
        ge=0,
        le=1,
    )
    top_k: Whole | None = option(
        "Draw only among this many of the likeliest tokens. 0 and -1 mean all.",
        unset=_RECOMMENDED + "0",
        area=SAMPLING,
        ge=-1,
        le=2**31 - 1,
    )
    min_p: Number | None = option(
        "Draw only tokens whose probability is at least this share of the likeliest token's.",
        unset=_RECOMMENDED + "0",
        area=SAMPLING,
        ge=0,
        le=1,
    )
    presence_penalty: Number | None = option(
        "Subtracted from the logit of every token that was already generated.", unset="0", area=SAMPLING, ge=-2, le=2
    )
    frequency_penalty: Number | None = option(
        "Subtracted from a token's logit once for each time it was generated.", unset="0", area=SAMPLING, ge=-2, le=2
    )
    repetition_penalty: Number | None = option(
        "For tokens in the prompt or the answer: divides positive logits and multiplies negative logits.",
        unset=_RECOMMENDED + "1",
        area=SAMPLING,
        ge=0.01,
        le=100,
    )
    seed: Seed = option(SEED, unset="chosen at random", area=SAMPLING)
    logit_bias: LogitBias | None = option(
        "Maps token ids, written as strings, to the value that is added to the token's logit.",
        unset="none",
        area=SAMPLING,
    )
    allowed_token_ids: Annotated[tuple[int, ...], token_ids(1, MAX_LISTED_IDS)] | None = option(
        "Generate only these tokens.", unset="all", area=SAMPLING
    )
    bad_words: (
        Annotated[tuple[Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)], ...], Many(max_length=1_024)]
        | None
    ) = option(
        "Words that the answer never contains, at the start of a text or after a space.", unset="none", area=SAMPLING
    )
    stop: Annotated[tuple[str, ...], Converted(StopField, _as_many)] | None = option(
        "Strings that end the answer. They work in its content, but not in reasoning, calls or markers. No part of a "
        "stop string is ever streamed. `stop_reason` names the string.",
        unset="none",
        area=STOPPING,
    )
    stop_token_ids: Annotated[tuple[int, ...], token_ids(0, 1_024)] | None = option(
        "Tokens that end the answer, in its content as `stop`. `stop_reason` names the token.",
        unset="none",
        area=STOPPING,
    )
    include_stop_str_in_output: Flag | None = option(
        "Keep the stop string or stop token in the answer.", unset="false", area=STOPPING
    )
    ignore_eos: Flag | None = option("Continue after the model's end-of-sequence token.", unset="false", area=STOPPING)
    repetition_detection: RepetitionDetection | None = option(
        "Ends an answer whose last tokens are one pattern of `min_pattern_size` to `max_pattern_size` tokens, "
        "`min_count` times in a row: `finish_reason` is `repetition`. Costs `max_pattern_size` comparisons a token.",
        unset="off",
        area=STOPPING,
    )
    timeout: Number | None = option(
        "Seconds from the request's arrival to the end of its answer. After them the server aborts it with 408 "
        "`deadline_exceeded`, or with an error event in a stream. The header `X-Request-Timeout` has the same meaning, "
        "and the shorter time counts.",
        unset="no limit",
        area=STOPPING,
        ge=MIN_TIMEOUT_S,
        le=MAX_TIMEOUT_S,
    )
    skip_special_tokens: Flag | None = option("Leave special tokens out of the text.", unset="true", area=OUTPUT)
    add_special_tokens: Flag | None = option(
        "Begin the text as the tokenizer begins every text. A chat template writes such tokens itself.",
        unset="false for chat and responses, else true",
        area=PROMPT,
    )
    truncate_prompt_tokens: Annotated[Whole | None, Field(ge=1), Besides(-1, -1)] = option(
        "Keep only this many tokens at the end of the prompt; -1 keeps as many as leave room for `max_tokens`. A "
        "`max_tokens` of the whole context or more bounds nothing, so -1 then keeps all but one token of the context. "
        "If not given, the server refuses a prompt that is too long and never cuts it.",
        unset="never cut",
        area=PROMPT,
    )
    structured_outputs: StructuredOutputs | None = option(
        "Constrains the answer token by token. Give exactly one of `json`, `json_object`, `regex`, `choice`, `grammar` "
        "and `structural_tag`. `json` is a schema, as under `strict`. `regex` has Rust's syntax, but `\\d`, `\\w` and "
        "`\\s` match ASCII only. `choice` lists a few texts. `grammar` is GBNF or Lark, in which these three match "
        "Unicode.",
        unset="none",
        area=OUTPUT,
    )
    regex: Regex | None = option("SGLang's name for `structured_outputs.regex`.", unset="none", area=OUTPUT)
    ebnf: Grammar | None = option("SGLang's name for `structured_outputs.grammar`.", unset="none", area=OUTPUT)
    priority: Whole | None = priority_option(REQUEST)
    cache_salt: Text | None = option(
        "Cached prefixes are shared only among requests with the same salt, and always only within one key.",
        unset="the key's own",
        area=REQUEST,
        min_length=1,
        max_length=1_024,
    )
    user: Text | None = option("Clients are identified by their key.", has_effect=False)
    service_tier: Text | None = option("There is one tier. `priority` orders requests.", has_effect=False)
    safety_identifier: Text | None = option("Clients are identified by their key.", has_effect=False)
    client_metadata: object = option("Clients are identified by their key.", has_effect=False)
    prompt_cache_key: Text | None = option(
        "Prefixes are found by their content. `cache_salt` separates them.", has_effect=False
    )
    prompt_cache_retention: Text | None = option(
        "Cached prefixes stay until newer ones need their memory.", has_effect=False
    )
    prompt_cache_options: JsonObject | None = option(
        "Every prefix is cached until newer ones need its memory.", has_effect=False, max_length=16
    )
    cache_control: object = option("Every prefix is cached, and found by its content.", has_effect=False)
    moderation: Annotated[object, AfterValidator(_check_moderation)] = option(
        "This server moderates nothing, and `x-inferd-warning` says so. `moderation.policy.input.mode` and "
        "`moderation.policy.output.mode` may not be `block`.",
        has_effect=False,
        kind="offer",
    )
    length_penalty: Annotated[object, Only((1,), _NO_BEAM_SEARCH)] | None = option(
        "Only 1 is accepted.", has_effect=False, kind="demand"
    )
    early_stopping: Annotated[object, Only((False,), "It belongs to beam search, which is not served.")] | None = (
        option("Only false is accepted.", has_effect=False, kind="demand")
    )

    aliases: ClassVar[Mapping[str, str]] = {"no_stop_trim": "include_stop_str_in_output"}

    refused: ClassVar[Mapping[str, str]] = {
        **_REMOVED_GUIDED,
        "lora_path": "Adapters are chosen by `model`.",
        "chat_template": "Only the model's own chat template is rendered; 'chat_template_kwargs' reach it.",
    }


class GenerationFields(SharedFields):
    """Further fields of chat and completions, except the prompt."""

    n: Whole | None = option(
        "Number of answers to each prompt. The first uses `seed`, and each other answer uses a seed derived from it.",
        unset="1",
        area=REQUEST,
        ge=1,
        le=MAX_CHOICES,
    )
    stream_options: StreamOptions | None = option(
        "`include_usage` adds a last chunk with usage and empty `choices`. `continuous_usage_stats` adds usage to "
        "every chunk. Only with `stream`. `include_obfuscation` has no effect: no chunk is ever padded.",
        unset="no usage",
        area=OUTPUT,
    )
    max_tokens: Annotated[Whole | None, Field(ge=0), Besides(-1, None)] = option(
        'Most tokens to generate; 0 scores the prompt alone, -1 is "not given". ' + CUT, unset="16", area=STOPPING
    )
    max_completion_tokens: Annotated[Whole | None, Field(ge=0), Besides(-1, None)] = option(
        "The newer name of `max_tokens`. If both are given, this one counts.", unset="`max_tokens`", area=STOPPING
    )
    spaces_between_special_tokens: Flag | None = option(
        "No tokenizer served here puts spaces between special tokens.", area=OUTPUT, has_effect=False
    )
    prompt_logprobs: Whole | None = option(
        "Add the log probabilities of every prompt token, with this many alternatives. Such a request uses no cached "
        "prefix and cannot be streamed.",
        unset="none",
        area=OUTPUT,
        ge=0,
        le=MAX_LOGPROBS,
    )
    return_token_ids: Flag | None = option(
        "Add `prompt_token_ids` to the answer and `token_ids` to each choice.", unset="false", area=OUTPUT
    )
    include_metrics: Flag | None = option(
        "Add `metrics`: `queue_time_ms`, `time_to_first_token_ms` (from the first step), `generation_time_ms` (first "
        "to last token), `mean_itl_ms`, `tokens_per_second` (first step to last token), `draft_tokens`, "
        "`accepted_draft_tokens`, `not_speculated`, `cached_tokens`, `not_cached`, `pool_tokens`, `loaded_tokens`, "
        "`computed_tokens`, `restarts`. It is null for several prompts or choices. A stream has it in its "
        "usage chunk.",
        unset="false",
        area=OUTPUT,
    )
    response_format: ResponseFormat | None = option(
        "What the answer may be: `text`, `json_object` (any JSON object), `json_schema` or `structural_tag`. The "
        "server constrains the answer token by token, so an answer that ends by itself is valid. `strict` refuses a "
        "schema with a keyword that cannot be enforced. Without it, such keywords are left to the model, and "
        "`x-inferd-warning` names them.",
        unset="`text`",
        area=OUTPUT,
    )
    request_id: Text | None = option(
        "Becomes part of the answer's `id`. It may have letters, digits and `._:-`.",
        unset="random",
        area=REQUEST,
        min_length=1,
        max_length=128,
    )
    use_beam_search: Annotated[object, Only((False,), "Use 'n' with a temperature instead.")] | None = option(
        "Only false is accepted.", has_effect=False, kind="demand"
    )
    best_of: Annotated[object, Only((1,), "Use 'n' to get several answers.")] | None = option(
        "Only 1 is accepted.", has_effect=False, kind="demand"
    )
    return_tokens_as_token_ids: Annotated[object, Only((False,), "Use 'return_token_ids' instead.")] | None = option(
        "Only false is accepted.", has_effect=False, kind="demand"
    )
    top_a: Annotated[object, Only((0,), "Use 'min_p' or 'top_p' instead.")] | None = option(
        "Only 0 is accepted.", has_effect=False, kind="demand"
    )
    usage: object = option("Every answer has usage. A stream has it if `stream_options` asks for it.", has_effect=False)
    provider: object = option(_ONE_SERVER, has_effect=False)
    models: object = option(_ONE_SERVER, has_effect=False)
    route: object = option(_ONE_SERVER, has_effect=False)
    transforms: object = option(
        "The server refuses a conversation that is too long and never drops a message.", has_effect=False
    )
    plugins: Annotated[object, Only(([],), "Only an empty list is accepted: no plugins run here.")] | None = option(
        "Only an empty list is accepted.", has_effect=False, kind="demand"
    )
    safety_settings: object = option("This server moderates nothing.", has_effect=False)
    cache_prompt: object = option("Every prefix is cached until newer ones need its memory.", has_effect=False)
    id_slot: object = option("Requests have no slots of their own: all share the memory.", has_effect=False)
    timings_per_token: object = option("`include_metrics` gives an answer's times.", has_effect=False)
    metadata: JsonObject | None = option("Only `/v1/responses` stores answers.", has_effect=False)
    store: Flag | None = option("Only `/v1/responses` stores answers.", has_effect=False)

    aliases: ClassVar[Mapping[str, str]] = {**SharedFields.aliases, "rid": "request_id"}

    refused: ClassVar[Mapping[str, str]] = SharedFields.refused
