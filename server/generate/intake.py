"""The only maker of a valid `GenerateRequest`, from a request's fields and the model's defaults and limits.

Everything that can be wrong with a request is found here, so that the router and the engine only get what they can do.
Knows no queue.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

import msgspec

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.grammar_check import Left
from inferd.engine.api.wire.params import Adapter, ParamError, SamplingParams
from inferd.server.dispatch.adapter_places import AdapterPlaces
from inferd.server.errors import messages as errors
from inferd.server.generate import work
from inferd.server.generate.answer_rules import (
    AnswerLanguage,
    AnswerRules,
    answer_language,
    answer_rules,
    asks_for_format,
    check_tools,
    notices_of,
    template_kwargs,
    tools_of,
    tools_shown,
)
from inferd.server.generate.gaps import Gap, GapReader
from inferd.server.generate.prompts import CheckSize, Encoded, PromptReader
from inferd.server.generate.request import Caller, GenerateRequest, Prompt, choose_seed, sampling_params
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.generation import GenerationFields, is_sane_id
from inferd.server.schema.infill import InfillRequest
from inferd.server.schema.latency import NO_TARGETS, Targets
from inferd.server.schema.notices import Notice
from inferd.server.structured.checker import GrammarChecker
from inferd.server.text.model import ServedModel
from inferd.server.text.stops import StopTables
from inferd.server.text.template import conversation_of

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Number of alternatives to report at each position; None: no log probabilities."""

    output: int | None
    prompt: int | None
    prompt_param: str = "prompt_logprobs"
    """Field that asks for the prompt's log probabilities."""
    num_each: int = 0
    """Log probabilities that the answer shows for each prompt token, in all its forms together."""


class Intake:
    """Takes requests for one model."""

    def __init__(
        self,
        model: ServedModel,
        prompts: PromptReader,
        grammars: GrammarChecker,
        targets: Targets = NO_TARGETS,
        adapters: AdapterPlaces | None = None,
    ) -> None:
        """`targets`: the server's, for requests that name none. `adapters`: those that requests may name."""
        self._model, self._prompts, self._grammars, self._targets = model, prompts, grammars, targets
        self._gaps = GapReader(model, prompts)
        self._adapters = adapters or AdapterPlaces()

    def check_model(self, name: str | None) -> str:
        """The name to answer under. Raises `RequestError` for a model that is not served here."""
        if name is None:
            return self._model.names[0]
        self.adapter_of(name)
        return name

    def adapter_of(self, name: str | None) -> Adapter | None:
        """The adapter of that name; None for a name of the model. Raises `RequestError` for a model that is not served
        here."""
        if name is None or name in self._model.names:
            return None
        served = self._adapters.named.get(name)
        if served is None:
            raise errors.model_not_found(name, (*self._model.names, *self._adapters.named))
        return served.adapter

    def _check_generates(self) -> None:
        """Raises `RequestError` for a model that only embeds."""
        if not self._model.generates:
            name = self._model.names[0]
            does = "It embeds texts: POST /v1/embeddings."
            if self._model.is_made_to_judge:
                does = "It judges texts: POST /v1/rerank, /v1/score or /v1/classify."
            message = f"The model '{name}' has no head that tokens are drawn from. {does}"
            raise RequestError("invalid_value", message, "model")

    async def read_chat(
        self, body: ChatRequest, notices: list[Notice], check_size: CheckSize | None = None, kept: int | None = None
    ) -> Encoded:
        """The conversation as the model's token ids, whether it fits the context or not. `notices` gets what was
        changed in it. Raises `RequestError`."""
        _check_chat(body)
        template = self._model.template
        conversation = conversation_of(
            body.messages,
            tools_shown(body),
            body.add_generation_prompt,
            body.continue_final_message,
            template_kwargs(body, template.source if template is not None else ""),
            body.documents,
        )
        return await self._prompts.render(
            conversation, add_special=bool(body.add_special_tokens), check_size=check_size, kept=kept, notices=notices
        )

    def _check_size(self, body: GenerationFields, param: str) -> CheckSize:
        """Called before a text is tokenized. Raises `RequestError` if its bytes alone show that it is too long."""

        def check(num_bytes: int, least_tokens: int) -> None:
            if body.truncate_prompt_tokens is None:
                self._prompts.check_least(param, num_bytes, least_tokens)
                work.check_prompt_ids(param, least_tokens, body.n or 1)

        return check

    async def chat(
        self, body: ChatRequest, caller: Caller, *, prefix: str = "chatcmpl-", most: int | None = None
    ) -> GenerateRequest:
        """A chat request as a `GenerateRequest`. Raises `RequestError`.

        `prefix`: prefix of the answer's id. `most`: default of `max_tokens`, which may exceed the context.
        """
        self._check_generates()
        num_each = 0 if body.prompt_logprobs is None else 1 + body.prompt_logprobs
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        logprobs = _Logprobs(num_top, body.prompt_logprobs, num_each=num_each)
        default = self._model.defaults.max_new_tokens if most is None else most
        max_tokens, default = self._answer_tokens(body, default, 1, logprobs.output)
        asked = most if max_tokens is None else max_tokens
        kept = self._prompts.kept(body.truncate_prompt_tokens, max_tokens, default)
        notices = list(notices_of(body, self._model))
        encoded = await self.read_chat(body, notices, self._check_size(body, "messages"), kept)
        prompt = self._prompts.fit("messages", encoded, max_tokens, default, kept)
        self._check_answer_tokens(body, (prompt,), logprobs.output)
        rendered = encoded[1] or ""
        rules = await self._prompts.run(lambda: self._answer_rules(body, rendered), len(rendered))
        accepted = await self._request(prefix, "messages", body, caller, (prompt,), logprobs, rules.answer, echo=False)
        if rules.parser_config is not None and accepted.params.stop_token_ids:
            ids = frozenset(accepted.params.stop_token_ids)
            params = msgspec.structs.replace(accepted.params, stop_token_ids=())
            accepted = replace(accepted, content_stop_ids=ids, params=params)
        return replace(
            accepted,
            parser_config=rules.parser_config,
            tools={tool.name: tool for tool in tools_of(body)},
            notices=(*self._cut((prompt,), asked), *notices, *accepted.notices),
        )

    async def completion(self, body: CompletionRequest, caller: Caller) -> GenerateRequest:
        """A completion request as a `GenerateRequest`. Raises `RequestError`."""
        self._check_generates()
        _check_completion(body)
        given_ids = sum(len(prompt) for prompt in body.prompt if not isinstance(prompt, str))
        work.check_prompt_ids("prompt", given_ids, body.n or 1)
        scores_echo = body.echo and body.logprobs is not None
        in_prompt = [k for k in (body.prompt_logprobs, body.logprobs if scores_echo else None) if k is not None]
        scored_by = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        num_each = sum(1 + num_top for num_top in in_prompt)
        logprobs = _Logprobs(body.logprobs, max(in_prompt, default=None), scored_by, num_each)
        max_tokens, default = self._answer_tokens(body, COMPLETION_MAX_TOKENS, len(body.prompt), logprobs.output)
        kept = self._prompts.kept(body.truncate_prompt_tokens, max_tokens, default)
        all_encoded = await self._read_texts(body, kept)
        prompts = tuple(self._prompts.fit("prompt", encoded, max_tokens, default, kept) for encoded in all_encoded)
        self._check_answer_tokens(body, prompts, logprobs.output)
        answer = await self._prompts.run(lambda: self._answer_language(body), 0) if asks_for_format(body) else None
        accepted = await self._request("cmpl-", "prompt", body, caller, prompts, logprobs, answer, echo=bool(body.echo))
        second_bos = self._prompts.second_bos(body.prompt, add_special=body.add_special_tokens is not False)
        accepted = replace(accepted, notices=(*self._cut(prompts, max_tokens), *second_bos, *accepted.notices))
        return self._ending(accepted) if body.suffix else accepted

    async def _read_texts(self, body: CompletionRequest, kept: int | None) -> list[Encoded]:
        """The ids of each prompt, with the text behind it if there is one. Raises `RequestError`."""
        add_special, check_size = body.add_special_tokens is not False, self._check_size(body, "prompt")
        if not body.suffix:
            return await self._prompts.encode_all(
                body.prompt, add_special=add_special, check_size=check_size, kept=kept
            )
        return await self._gaps.fill(
            body.prompt,
            body.suffix,
            add_special=add_special,
            check_size=check_size,
            kept=kept,
            check_total=lambda _, num_ids: work.check_prompt_ids("prompt", num_ids, body.n or 1),
        )

    async def infill(self, body: InfillRequest, caller: Caller) -> tuple[GenerateRequest, bool]:
        """(a gap to fill as a `GenerateRequest`, whether its surroundings were cut to fit). Raises `RequestError`."""
        self._check_generates()
        text, limit = body.completion(), self._model.max_model_len
        _check_completion(text)
        # A quarter of the context is left for the answer, unless the caller asks for less.
        most = limit // 4 if body.n_predict is None else min(limit // 4, body.n_predict)
        room = min(limit - max(1, most), body.truncate_prompt_tokens or limit)
        gap = Gap(body.input_prefix or "", body.input_suffix or "", body.prompt or "", body.files)
        add_special = body.add_special_tokens is not False
        token_ids, is_cut = await self._gaps.fill_gap(gap, room, add_special=add_special)
        prompt = self._prompts.fit("input_prefix", (token_ids, None), body.n_predict, None, None)
        if body.shows_prompt:
            (prompt,) = await self._prompts.read_back((prompt,), skip_special=False)
        answer = await self._prompts.run(lambda: self._answer_language(text), 0) if asks_for_format(text) else None
        param, logprobs = "input_prefix", _Logprobs(None, None)
        accepted = await self._request("infill-", param, text, caller, (prompt,), logprobs, answer, echo=False)
        notices = (*self._cut((prompt,), body.n_predict), *accepted.notices)
        return replace(self._ending(accepted), notices=notices), is_cut

    def _ending(self, accepted: GenerateRequest) -> GenerateRequest:
        """The request, whose answer the tokens for filling in the middle end, too, unless the caller ignores ends."""
        fill_in, params = self._model.fill_in, accepted.params
        if fill_in is None or not params.eos_token_ids:
            return accepted
        ends = tuple(dict.fromkeys((*params.eos_token_ids, *fill_in.ends)))
        return replace(accepted, params=msgspec.structs.replace(params, eos_token_ids=ends))

    def _answer_rules(self, body: ChatRequest, rendered: str) -> AnswerRules:
        """Runs on a thread: a tool's schema may be long, and so may the prompt, which is searched for a begun
        answer."""
        return answer_rules(body, self._model, rendered, self._answer_language(body))

    def _answer_language(self, body: GenerationFields) -> AnswerLanguage | None:
        return answer_language(body, self._model.tokenizer.added_tokens)

    async def _request(
        self,
        prefix: str,
        param: str,
        body: GenerationFields,
        caller: Caller,
        prompts: tuple[Prompt, ...],
        logprobs: _Logprobs,
        answer: AnswerLanguage | None,
        *,
        echo: bool,
    ) -> GenerateRequest:
        n, num_ids = body.n or 1, sum(len(prompt.token_ids) for prompt in prompts)
        work.check_prompt_ids(param, num_ids, n)
        work.check_prompt_logprobs(logprobs.prompt_param, num_ids, n, logprobs.num_each)
        seed = choose_seed() if body.seed is None else body.seed
        params, notices = await self._params(body, caller.tenant, prompts, logprobs, answer, seed)
        skip_special = body.skip_special_tokens is not False
        if echo or logprobs.prompt is not None:
            prompts = await self._prompts.read_back(prompts, skip_special)
        nonce = secrets.token_hex(8)
        return GenerateRequest(
            response_id=f"{prefix}{body.request_id or nonce}",
            engine_id=f"{prefix}{body.request_id}-{nonce}" if body.request_id else f"{prefix}{nonce}",
            prompts=prompts,
            n=n,
            params=params,
            stop=StopTables.of(body.stop or ()),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=skip_special,
            echo=echo,
            scheduling=caller.scheduling(body, body.cache_salt, self._targets),
            deadline=caller.deadline,
            repetition=body.repetition_detection,
            account=caller.account,
            grammar_param="" if answer is None else answer.param,
            seed=seed,
            notices=notices,
        )

    async def _params(
        self,
        body: GenerationFields,
        tenant: str,
        prompts: tuple[Prompt, ...],
        logprobs: _Logprobs,
        answer: AnswerLanguage | None,
        seed: int,
    ) -> tuple[SamplingParams, tuple[Notice, ...]]:
        """The checked parameters of choice 0, and what of a schema they leave to the model. Raises `RequestError`."""
        num_choices = len(prompts) * (body.n or 1)
        bad_words = await self._prompts.bad_words(body.bad_words or ())
        grammar, left = "", tuple[Left, ...]()
        if answer is not None:
            checked = await self._grammars.check(answer.language.text(), answer.param, tenant)
            grammar, left = checked.text, checked.left
            work.check_grammar(answer.param, len(grammar), num_choices)
        # Checked with the smallest `max_tokens` of any prompt; each choice is submitted with its own.
        max_tokens = min(prompt.max_tokens for prompt in prompts)
        params = sampling_params(
            body, self._model, seed, max_tokens, logprobs.output, logprobs.prompt, bad_words, grammar
        )
        adapter = self.adapter_of(body.model)
        if adapter is not None:
            params = msgspec.structs.replace(params, adapter=adapter)
        self._check_params(body, params)
        work.check_lists(params, num_choices)
        return params, tuple(
            Notice("schema_not_enforced" if part.is_whole else "schema_keyword", part.text) for part in left
        )

    def _answer_tokens(
        self, body: GenerationFields, default: int | None, num_prompts: int, num_top: int | None
    ) -> tuple[int | None, int | None]:
        """(`max_tokens` of the request, its default); None: no bound but the context.

        Many clients send both names of the field; the newer one counts. `num_top`: alternatives with log probabilities
        at each token.
        """
        bounds = (default, work.most_scored_tokens(num_prompts * (body.n or 1), num_top))
        return getattr(body, _limit_name(body)), min((most for most in bounds if most is not None), default=None)

    def _check_answer_tokens(self, body: GenerationFields, prompts: tuple[Prompt, ...], num_top: int | None) -> None:
        """Check the numbers of tokens that the answers may have, as the context has cut them. Raises `RequestError`."""
        most = max(prompt.max_tokens for prompt in prompts)
        work.check_output_logprobs(_limit_name(body), most, len(prompts) * (body.n or 1), num_top)

    def _cut(self, prompts: tuple[Prompt, ...], asked: int | None) -> tuple[Notice, ...]:
        """The notice of an answer that may have fewer tokens than were `asked` for; None: no number was."""
        prompt = min(prompts, key=lambda prompt: prompt.max_tokens)
        if asked is None or asked <= prompt.max_tokens:
            return ()
        text = (
            f"the limit of the answer is cut from {errors.shown(asked)} to {prompt.max_tokens} tokens: the context "
            f"holds {self._model.max_model_len}, and the prompt has {len(prompt.token_ids)}"
        )
        return (Notice("max_tokens", text),)

    def _check_params(self, body: GenerationFields, params: SamplingParams) -> None:
        """Check the parameters against the model. Raises `RequestError`."""
        self._prompts.check_ids(params.allowed_token_ids, "allowed_token_ids")
        self._prompts.check_ids(body.stop_token_ids or (), "stop_token_ids")
        for token_id, _ in params.logit_bias:
            if token_id >= self._model.vocab_size:
                raise errors.above_max(f"logit_bias.{token_id}", self._model.vocab_size - 1, token_id)
        if params.min_tokens > params.max_tokens:
            asked = getattr(body, _limit_name(body))
            cut = asked is not None and asked > params.max_tokens
            raise errors.min_tokens_too_large(params.max_tokens, params.min_tokens, is_cut=cut)
        try:
            params.check(self._model.vocab_size)
        except ParamError as error:
            raise errors.invalid_value(error.param, error.value, f"It {error.rule}.") from error


def _limit_name(body: GenerationFields) -> str:
    """The field with the caller's limit of the answer."""
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def _check_chat(body: ChatRequest) -> None:
    """Raises `RequestError` for fields that are valid alone and wrong together."""
    _check_generation(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise _needs("top_logprobs", "'logprobs' is enabled")
    check_tools(body)
    if body.continue_final_message and body.add_generation_prompt:
        raise _needs("continue_final_message", "'add_generation_prompt' is false")


def _check_completion(body: CompletionRequest) -> None:
    """As `_check_chat`."""
    _check_generation(body)
    work.check_choices(len(body.prompt), body.n or 1)
    if body.suffix and body.echo:
        raise _needs("echo", "there is no 'suffix'")


def _check_generation(body: GenerationFields) -> None:
    if body.stream_options is not None and not body.stream:
        raise _needs("stream_options", "'stream' is enabled")
    if body.prompt_logprobs is not None and body.stream:
        raise _needs("prompt_logprobs", "'stream' is disabled")
    if body.include_metrics and body.stream and not (body.stream_options and body.stream_options.include_usage):
        raise _needs("include_metrics", "'stream_options.include_usage' or no 'stream' is asked for")
    if body.request_id is not None and not is_sane_id(body.request_id):
        rule = "Expected letters, digits, '.', '_', ':' or '-'."
        raise errors.invalid_value("request_id", body.request_id, rule)


def _needs(param: str, condition: str) -> RequestError:
    return RequestError("invalid_value", f"The '{param}' parameter is only allowed when {condition}.", param)
