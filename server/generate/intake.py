"""The only maker of a valid `GenerateRequest`: wire fields + the model's defaults and limits -> a request, or a refusal.

Renders and tokenizes on threads. Everything that can be wrong with a request is found here, so that the router and the
engine are given only what they can do.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from inferd.engine.api.errors import RequestError
from inferd.engine.api.params import ParamError, SamplingParams
from inferd.server import errors
from inferd.server.generate.request import GenerateRequest, Prompt
from inferd.server.generate.sampling import sampling_params
from inferd.server.schema import completions
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.generation import MAX_CHOICES_IN_ALL, GenerationFields
from inferd.server.text.lanes import Lanes
from inferd.server.text.model import ServedModel
from inferd.server.text.template import Conversation

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as far as it matters here."""

    tenant: str
    """Prefix blocks are shared only within one; empty where there are no keys."""
    arrival_s: float
    """`time.monotonic` when the request arrived."""


def is_sane_id(text: str) -> bool:
    """Whether a caller's id may be repeated in headers and logs."""
    return _REQUEST_ID.fullmatch(text) is not None


class Intake:
    """Takes requests for one model."""

    def __init__(self, model: ServedModel, lanes: Lanes) -> None:
        self._model, self._lanes = model, lanes

    def check_model(self, name: str | None) -> str:
        """The name to answer under. Raises `RequestError` for a model that is not served here."""
        if name is None:
            return self._model.names[0]
        if name not in self._model.names:
            raise errors.model_not_found(name)
        return name

    async def chat(self, wire: ChatRequest, caller: Caller) -> GenerateRequest:
        """Raises `RequestError`."""
        _check_chat(wire)
        conversation = Conversation(
            messages=wire.messages,
            tools=None if wire.tool_choice == "none" else wire.tools,
            add_generation_prompt=_generation_prompt(wire.add_generation_prompt, wire.continue_final_message),
            continue_final_message=bool(wire.continue_final_message),
            kwargs=wire.chat_template_kwargs,
        )
        text, token_ids = await self.render(conversation, add_special=bool(wire.add_special_tokens))
        asked = wire.max_completion_tokens if wire.max_completion_tokens is not None else wire.max_tokens
        prompt = self._fit("messages", token_ids, text, asked, self._model.defaults.max_new_tokens, wire)
        logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
        return await self._request("chatcmpl-", wire, caller, (prompt,), logprobs, wire.prompt_logprobs, echo=False)

    async def completion(self, wire: CompletionRequest, caller: Caller) -> GenerateRequest:
        """Raises `RequestError`."""
        _check_generation(wire)
        num_choices = len(wire.prompt) * (wire.n or 1)
        if num_choices > MAX_CHOICES_IN_ALL:
            raise errors.array_too_long("prompt", MAX_CHOICES_IN_ALL // (wire.n or 1), len(wire.prompt))
        encoded = await self._encode_all(wire)
        asked = wire.max_completion_tokens if wire.max_completion_tokens is not None else wire.max_tokens
        prompts = tuple(
            self._fit("prompt", token_ids, text, asked, COMPLETION_MAX_TOKENS, wire) for token_ids, text in encoded
        )
        prompt_logprobs = wire.prompt_logprobs
        if wire.echo and wire.logprobs is not None:
            prompt_logprobs = max(wire.logprobs, prompt_logprobs or 0)
        return await self._request("cmpl-", wire, caller, prompts, wire.logprobs, prompt_logprobs, echo=bool(wire.echo))

    async def render(self, conversation: Conversation, *, add_special: bool) -> tuple[str, tuple[int, ...]]:
        """(text, ids) of a conversation. Raises `RequestError` where the model has no template, or it refuses."""
        template, tokenizer = self._model.template, self._model.tokenizer
        if template is None:
            raise RequestError(
                "unsupported_value", "This model has no chat template; use /v1/completions instead.", "messages"
            )

        def work() -> tuple[str, tuple[int, ...]]:
            text = template.render(conversation)
            return text, tokenizer.encode(text, add_special)

        return await self._lanes.run(work, _num_chars(conversation.messages))

    async def encode(self, text: str, *, add_special: bool) -> tuple[int, ...]:
        """The ids of a text."""
        return await self._lanes.run(lambda: self._model.tokenizer.encode(text, add_special), len(text))

    def check_ids(self, token_ids: Sequence[int], where: str) -> None:
        """Raises `RequestError` for the first id that is no row of the embedding."""
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._model.vocab_size):
            high = self._model.vocab_size - 1
            i, wrong = next((i, token_id) for i, token_id in enumerate(token_ids) if not 0 <= token_id <= high)
            bound = errors.below_min if wrong < 0 else errors.above_max
            raise bound(f"{where}[{i}]", 0 if wrong < 0 else high, wrong)

    async def _encode_all(self, wire: CompletionRequest) -> list[tuple[tuple[int, ...], str | None]]:
        tokenizer = self._model.tokenizer
        add_special = wire.add_special_tokens is not False
        many = len(wire.prompt) > 1

        def encode(i: int, prompt: completions.Prompt) -> tuple[tuple[int, ...], str | None]:
            if isinstance(prompt, str):
                return tokenizer.encode(prompt, add_special), prompt
            self.check_ids(prompt, f"prompt[{i}]" if many else "prompt")
            return prompt, None

        size = sum(map(len, wire.prompt))
        return await self._lanes.run(lambda: [encode(i, prompt) for i, prompt in enumerate(wire.prompt)], size)

    def _fit(
        self,
        param: str,
        token_ids: tuple[int, ...],
        text: str | None,
        asked: int | None,
        default: int | None,
        wire: GenerationFields,
    ) -> Prompt:
        """A prompt and its `max_tokens`, within the context. Raises `RequestError`."""
        limit = self._model.max_model_len
        if wire.truncate_prompt_tokens is not None:
            kept = limit if wire.truncate_prompt_tokens == -1 else wire.truncate_prompt_tokens
            token_ids, text = (token_ids, text) if len(token_ids) <= kept else (token_ids[-kept:], None)
        if not token_ids:
            message = f"Invalid '{param}': it has no tokens. Expected at least one."
            raise RequestError("invalid_value", message, param)
        if asked is not None and asked > limit:
            raise errors.above_max("max_tokens", limit, asked)
        room = limit - len(token_ids)
        if asked is None and room >= 1:
            return Prompt(token_ids, min(room, default or room), text)
        if asked is not None and room >= asked:
            return Prompt(token_ids, asked, text)
        raise errors.context_too_long(param, limit, len(token_ids), asked)

    async def _request(
        self,
        prefix: str,
        wire: GenerationFields,
        caller: Caller,
        prompts: tuple[Prompt, ...],
        logprobs: int | None,
        prompt_logprobs: int | None,
        *,
        echo: bool,
    ) -> GenerateRequest:
        words = wire.bad_words or ()
        bad_words = await self._lanes.run(lambda: self._bad_words(words), sum(map(len, words))) if words else ()
        params = sampling_params(
            wire,
            self._model,
            max_tokens=min(prompt.max_tokens for prompt in prompts),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            bad_words=bad_words,
        )
        self._check_params(wire, params)
        nonce = secrets.token_hex(8)
        return GenerateRequest(
            response_id=f"{prefix}{wire.request_id or nonce}",
            engine_id=f"{prefix}{wire.request_id}-{nonce}" if wire.request_id else f"{prefix}{nonce}",
            prompts=prompts,
            n=wire.n or 1,
            params=params,
            stop=wire.stop or (),
            include_stop=bool(wire.include_stop_str_in_output),
            skip_special_tokens=wire.skip_special_tokens is not False,
            echo=echo,
            priority=wire.priority or 0,
            cache_salt=f"{caller.tenant}/{wire.cache_salt}" if wire.cache_salt else caller.tenant,
            arrival_s=caller.arrival_s,
        )

    def _bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenized at a text's start and after a space: both spellings are one word to a caller."""
        encode = self._model.tokenizer.encode
        spelt = (encode(spelling, False) for word in words for spelling in (word, " " + word.lstrip()))
        return tuple(dict.fromkeys(token_ids for token_ids in spelt if token_ids))

    def _check_params(self, wire: GenerationFields, params: SamplingParams) -> None:
        self.check_ids(params.allowed_token_ids, "allowed_token_ids")
        self.check_ids(wire.stop_token_ids or (), "stop_token_ids")
        for token_id, _ in params.logit_bias:
            if token_id >= self._model.vocab_size:
                raise errors.above_max(f"logit_bias.{token_id}", self._model.vocab_size - 1, token_id)
        if params.min_tokens > params.max_tokens:
            raise errors.above_max("min_tokens", params.max_tokens, params.min_tokens)
        try:
            params.check(self._model.vocab_size)
        except ParamError as error:
            raise errors.invalid_value(error.param, error.value, f"It {error.rule}.") from error


def _generation_prompt(asked: bool | None, continues: bool | None) -> bool:
    """A continued message has no room for a new one's header, unless asked for (which is then refused)."""
    return asked if asked is not None else not continues


def _check_generation(wire: GenerationFields) -> None:
    """What fields say together."""
    if wire.stream_options is not None and not wire.stream:
        message = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise RequestError("invalid_value", message, "stream_options")
    if wire.truncate_prompt_tokens == 0:
        raise errors.below_min("truncate_prompt_tokens", 1, 0)
    if wire.request_id is not None and not is_sane_id(wire.request_id):
        rule = "Expected letters, digits, '.', '_', ':' or '-'."
        raise errors.invalid_value("request_id", wire.request_id, rule)


def _check_chat(wire: ChatRequest) -> None:
    _check_generation(wire)
    if wire.top_logprobs is not None and not wire.logprobs:
        message = "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled."
        raise RequestError("invalid_value", message, "top_logprobs")
    if wire.prompt_logprobs is not None and wire.stream:
        message = "The 'prompt_logprobs' parameter is not available when 'stream' is enabled."
        raise RequestError("invalid_value", message, "prompt_logprobs")
    if wire.tool_choice == "auto" and not wire.tools:
        message = "The 'tool_choice' parameter is only allowed when 'tools' are specified."
        raise RequestError("invalid_value", message, "tool_choice")
    if wire.continue_final_message and wire.add_generation_prompt:
        message = "Only one of 'continue_final_message' and 'add_generation_prompt' can be true."
        raise RequestError("invalid_value", message, "continue_final_message")


def _num_chars(messages: Sequence[object]) -> int:
    """Rough size of a conversation: its longest contents are strings."""
    return sum(
        len(value) for message in messages if isinstance(message, dict) for value in message.values() if isinstance(value, str)
    )


def now_s() -> float:
    return time.monotonic()
