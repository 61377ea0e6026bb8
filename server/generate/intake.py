"""The only maker of a valid `GenerateRequest`: wire fields + the model's defaults and limits -> it, or a refusal.

Everything that can be wrong with a request is found here, so that the router and the engine are given only what they
can do.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from inferd.engine.api.params import ParamError, SamplingParams
from inferd.server import errors
from inferd.server.generate.ports import Grammars
from inferd.server.generate.prompts import CheckSize, Encoded, Prompts, any_size
from inferd.server.generate.request import GenerateRequest, Prompt
from inferd.server.generate.rules import check_chat, check_completion
from inferd.server.generate.sampling import sampling_params
from inferd.server.generate.seeds import choose_seed
from inferd.server.quotas import UNLIMITED, Account
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.generation import GenerationFields
from inferd.server.schema.targets import NO_TARGETS, Targets
from inferd.server.structured.formats import AnswerLanguage, answer_language, asks_for_format
from inferd.server.text.model import ServedModel
from inferd.server.text.template import conversation_of
from inferd.server.tools.asked import Asked, ask, template_kwargs, tools_shown, warnings_of

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""


def any_room(num_tokens: int, left_s: float | None) -> None:
    """Of what stands in no queue."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as far as it matters here."""

    tenant: str
    """Prefix blocks are shared only within one; empty where there are no keys."""
    arrival_s: float
    """`time.monotonic` when the request arrived."""
    deadline_s: float | None = None
    """When its answer must be complete; None: whenever it is."""
    targets: Targets = NO_TARGETS
    """What it asks for itself."""
    weight: float = 1.0
    """Of its tenant's share of the machine, where others want it too."""
    account: Account = UNLIMITED
    """Pays for its tokens."""
    check_room: Callable[[int, float | None], None] = any_room
    """Raises `RequestError` where the queue has no place for a prompt of at least so many tokens, or none that gives a
    first token within so many seconds from now on (None: any)."""

    def ask_for_room(self, num_tokens: int, ttft_target_s: float | None) -> None:
        """Raises `RequestError` where there is none in what is left of the target: reading a body takes of it."""
        left_s = None if ttft_target_s is None else self.arrival_s + ttft_target_s - time.monotonic()
        self.check_room(num_tokens, left_s)


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Alternatives to report at each position; None: no log probabilities."""

    output: int | None
    prompt: int | None


class Intake:
    """Takes requests for one model."""

    def __init__(self, model: ServedModel, prompts: Prompts, grammars: Grammars, targets: Targets = NO_TARGETS) -> None:
        """`targets`: of requests that ask for none."""
        self._model, self._prompts, self._grammars, self._targets = model, prompts, grammars, targets

    def check_model(self, name: str | None) -> str:
        """The name to answer under. Raises `RequestError` for a model that is not served here."""
        if name is None:
            return self._model.names[0]
        if name not in self._model.names:
            raise errors.model_not_found(name)
        return name

    async def read_chat(self, wire: ChatRequest, check_size: CheckSize = any_size) -> Encoded:
        """The conversation as the model reads it, whether it fits or not. Raises `RequestError`."""
        check_chat(wire)
        template = self._model.template
        conversation = conversation_of(
            wire.messages,
            tools_shown(wire),
            wire.add_generation_prompt,
            wire.continue_final_message,
            template_kwargs(wire, template.source if template is not None else ""),
            wire.documents,
        )
        return await self._prompts.render(
            conversation, add_special=bool(wire.add_special_tokens), check_size=check_size
        )

    def _check_size(self, wire: GenerationFields, caller: Caller, param: str) -> CheckSize:
        """What a text must pass before it is turned into tokens: is it too long by its bytes alone?"""
        truncates = wire.truncate_prompt_tokens is not None
        target_s = caller.targets.over(self._targets).ttft_s

        def check(num_bytes: int, least_tokens: int) -> None:
            if not truncates:
                self._prompts.check_least(param, num_bytes, least_tokens)
                caller.ask_for_room(max(1, least_tokens), target_s)

        caller.ask_for_room(1, target_s)
        return check

    async def chat(
        self, wire: ChatRequest, caller: Caller, *, prefix: str = "chatcmpl-", most: int | None = None
    ) -> GenerateRequest:
        """Raises `RequestError`.

        `prefix`: of the answer's id. `most`: tokens that the answer may have where `wire` does not say; more than the
        context holds is no mistake.
        """
        encoded = await self.read_chat(wire, self._check_size(wire, caller, "messages"))
        default = self._model.defaults.max_new_tokens if most is None else most
        prompt = self._prompts.fit("messages", encoded, self._max_tokens(wire), default, wire.truncate_prompt_tokens)
        logprobs = _Logprobs((wire.top_logprobs or 0) if wire.logprobs else None, wire.prompt_logprobs)
        rendered = encoded[1] or ""
        asked = await self._prompts.run(lambda: self._asked(wire, rendered), len(rendered))
        taken = await self._request(prefix, wire, caller, (prompt,), logprobs, asked.answer, echo=False)
        return replace(taken, reading=asked.reading, warnings=warnings_of(wire, self._model))

    async def completion(self, wire: CompletionRequest, caller: Caller) -> GenerateRequest:
        """Raises `RequestError`."""
        check_completion(wire)
        all_encoded = await self._prompts.encode_all(
            wire.prompt,
            add_special=wire.add_special_tokens is not False,
            check_size=self._check_size(wire, caller, "prompt"),
        )
        asked, default = self._max_tokens(wire), COMPLETION_MAX_TOKENS
        prompts = tuple(
            self._prompts.fit("prompt", encoded, asked, default, wire.truncate_prompt_tokens) for encoded in all_encoded
        )
        scores_echo = wire.echo and wire.logprobs is not None
        in_prompt = [k for k in (wire.prompt_logprobs, wire.logprobs if scores_echo else None) if k is not None]
        logprobs = _Logprobs(wire.logprobs, max(in_prompt, default=None))
        answer = await self._prompts.run(lambda: self._answer_language(wire), 0) if asks_for_format(wire) else None
        return await self._request("cmpl-", wire, caller, prompts, logprobs, answer, echo=bool(wire.echo))

    def _asked(self, wire: ChatRequest, rendered: str) -> Asked:
        """On a thread: a tool's schema may be long, and so may the prompt that is searched for a begun answer."""
        return ask(wire, self._model, rendered, self._answer_language(wire))

    def _answer_language(self, wire: GenerationFields) -> AnswerLanguage | None:
        return answer_language(wire, self._model.tokenizer.added_tokens)

    async def _request(
        self,
        prefix: str,
        wire: GenerationFields,
        caller: Caller,
        prompts: tuple[Prompt, ...],
        logprobs: _Logprobs,
        answer: AnswerLanguage | None,
        *,
        echo: bool,
    ) -> GenerateRequest:
        bad_words = await self._prompts.bad_words(wire.bad_words or ())
        # Checked with the least that any prompt leaves room for; each choice is submitted with its own.
        max_tokens = min(prompt.max_tokens for prompt in prompts)
        grammar = ""
        if answer is not None:
            grammar = await self._grammars.check(answer.language.text(), answer.param, caller.tenant)
        seed = choose_seed() if wire.seed is None else wire.seed
        params = sampling_params(
            wire, self._model, seed, max_tokens, logprobs.output, logprobs.prompt, bad_words, grammar
        )
        self._check_params(wire, params)
        _check_volume(params, prompts, wire.n or 1)
        if answer is not None:
            _check_grammar_volume(grammar, answer.param, len(prompts) * (wire.n or 1))
        skip_special = wire.skip_special_tokens is not False
        if echo or logprobs.prompt is not None:
            prompts = await self._prompts.read_back(prompts, skip_special)
        nonce = secrets.token_hex(8)
        return GenerateRequest(
            response_id=f"{prefix}{wire.request_id or nonce}",
            engine_id=f"{prefix}{wire.request_id}-{nonce}" if wire.request_id else f"{prefix}{nonce}",
            prompts=prompts,
            n=wire.n or 1,
            params=params,
            stop=wire.stop or (),
            include_stop=bool(wire.include_stop_str_in_output),
            skip_special_tokens=skip_special,
            echo=echo,
            priority=wire.priority or 0,
            cache_salt=f"{caller.tenant}/{wire.cache_salt}" if wire.cache_salt else caller.tenant,
            arrival_s=caller.arrival_s,
            deadline_s=caller.deadline_s,
            repetition=wire.repetition_detection,
            targets=caller.targets.over(self._targets),
            tenant=caller.tenant,
            weight=caller.weight,
            account=caller.account,
            seed=seed,
        )

    def _max_tokens(self, wire: GenerationFields) -> int | None:
        """As asked for; of the two names the newer wins, and many clients send both. Raises `RequestError`."""
        name = "max_tokens" if wire.max_completion_tokens is None else "max_completion_tokens"
        asked: int | None = getattr(wire, name)
        if asked is not None and asked > self._model.max_model_len:
            raise errors.above_max(name, self._model.max_model_len, asked)
        return asked

    def _check_params(self, wire: GenerationFields, params: SamplingParams) -> None:
        """What depends on the model. Raises `RequestError`."""
        self._prompts.check_ids(params.allowed_token_ids, "allowed_token_ids")
        self._prompts.check_ids(wire.stop_token_ids or (), "stop_token_ids")
        for token_id, _ in params.logit_bias:
            if token_id >= self._model.vocab_size:
                raise errors.above_max(f"logit_bias.{token_id}", self._model.vocab_size - 1, token_id)
        if params.min_tokens > params.max_tokens:
            raise errors.above_max("min_tokens", params.max_tokens, params.min_tokens)
        try:
            params.check(self._model.vocab_size)
        except ParamError as error:
            raise errors.invalid_value(error.param, error.value, f"It {error.rule}.") from error


_MAX_VOLUME = 2**20
"""Ids that the choices of one request may carry to the engine in lists, and log probabilities of prompts that may come
back: each choice has its own copy."""

_MAX_GRAMMAR_VOLUME = 2**25
"""Characters of grammars that the choices of one request may carry."""


def _check_grammar_volume(grammar: str, param: str, num_choices: int) -> None:
    """Raises `RequestError` where a small body would become gigabytes."""
    volume = len(grammar) * num_choices
    if volume > _MAX_GRAMMAR_VOLUME:
        rule = f"Over {num_choices} choices that is {volume} characters, and at most {_MAX_GRAMMAR_VOLUME} are taken."
        raise errors.invalid_value(param, f"a grammar of {len(grammar)} characters", rule)


def _check_volume(params: SamplingParams, prompts: tuple[Prompt, ...], n: int) -> None:
    """Raises `RequestError` where a small body would become gigabytes."""
    num_choices, words = len(prompts) * n, params.bad_words
    num_scored = 0
    if params.prompt_logprobs is not None:
        num_scored = n * sum(len(prompt.token_ids) for prompt in prompts) * (1 + params.prompt_logprobs)
    volumes = {
        "allowed_token_ids": len(params.allowed_token_ids) * num_choices,
        "logit_bias": len(params.logit_bias) * num_choices,
        "bad_words": len(words) * max(map(len, words), default=0) * num_choices,
        "logprobs": num_scored,
    }
    for name, volume in volumes.items():
        if volume > _MAX_VOLUME:
            rule = f"Over {num_choices} choices that is {volume} entries, and at most {_MAX_VOLUME} are taken."
            raise errors.invalid_value(name, getattr(params, name, None), rule)
