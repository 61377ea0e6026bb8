"""Scores of pairs of texts: how well the second answers the first. Each pair, or text, is one request to the engine.

A model scores in one of three ways: by its classifier, by the tokens with which it would answer, or by the cosine of
its embeddings. Checks a request, and sends it through the router. Knows no HTTP.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from typing import Protocol

import msgspec

from inferd.engine.api.classifier_folder import Activation, ClassifierFolder, TokenPair
from inferd.engine.api.errors import RequestError
from inferd.engine.api.sentence_folder import PLAIN
from inferd.engine.api.wire.messages import Delta, Ready
from inferd.engine.api.wire.params import MAX_LOGPROBS, Adapter, Pooling, SamplingParams
from inferd.server.auth.quotas import UNLIMITED
from inferd.server.dispatch.router import Router
from inferd.server.errors import messages as errors
from inferd.server.generate.embed import prompt_for
from inferd.server.generate.inputs import results_of, vector_of
from inferd.server.generate.prompts import PromptReader
from inferd.server.generate.request import Caller
from inferd.server.generate.texts import Form, Inputs, Pair, TextReader, cut_of
from inferd.server.schema.scores import JudgingFields, ScoringFields
from inferd.server.text.model import ServedModel
from inferd.server.text.text_threads import TextThreads

_NUMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Pairs:
    """The texts of a request: one first text for all second ones, or one for each."""

    firsts: tuple[str, ...]
    seconds: tuple[str, ...]
    first_name: str
    second_name: str
    """Names of the request's fields."""

    def __post_init__(self) -> None:
        assert len(self.firsts) in (1, len(self.seconds))

    def each(self) -> Sequence[Pair]:
        firsts = self.firsts * len(self.seconds) if len(self.firsts) == 1 else self.firsts
        return [Pair(first, second) for first, second in zip(firsts, self.seconds, strict=True)]


class Scoring(Protocol):
    """A valid request for scores. Only an intake makes one."""

    @property
    def num_tokens(self) -> int: ...

    async def scores(self, router: Router, threads: TextThreads) -> tuple[float, ...]:
        """The scores in the order of the second texts. Raises `RequestError` and `EngineDeadError`."""
        ...


@dataclass(frozen=True, slots=True)
class _OfInputs:
    """Scores that the engine's results for these inputs give."""

    inputs: Inputs

    @property
    def num_tokens(self) -> int:
        return self.inputs.num_tokens


@dataclass(frozen=True, slots=True)
class ByClassifier(_OfInputs):
    """The logit of a classifier with one label, or that of the first of two less that of the second."""

    activation: Activation

    async def scores(self, router: Router, threads: TextThreads) -> tuple[float, ...]:
        del threads
        logits = await results_of(router, self.inputs, vector_of)
        return tuple(activated((_compared(numbers(each)),), self.activation)[0] for each in logits)


def _compared(logits: Sequence[float]) -> float:
    return logits[0] - sum(logits[1:])


@dataclass(frozen=True, slots=True)
class ByTokens(_OfInputs):
    """The logit of one token less that of another, at the first token of a generating model's answer."""

    tokens: TokenPair
    activation: Activation

    async def scores(self, router: Router, threads: TextThreads) -> tuple[float, ...]:
        del threads
        ids = (self.tokens.true_id, self.tokens.false_id)
        found = await results_of(router, self._drawing(self.inputs, *ids), _logprobs)
        # The likelier of the two is drawn. The other one may be none of the likeliest of all: then it is drawn, too.
        # Its prompt was paid for, and is cached.
        for token_id in ids:
            lacking = [i for i, each in enumerate(found) if token_id not in each]
            if lacking:
                again = replace(
                    self.inputs,
                    inputs=tuple(self.inputs.inputs[i] for i in lacking),
                    account=UNLIMITED,
                    engine_id=f"{self.inputs.engine_id}-{token_id}",
                )
                for i, more in zip(
                    lacking, await results_of(router, self._drawing(again, token_id), _logprobs), strict=True
                ):
                    found[i].update(more)
        return tuple(activated((each[ids[0]] - each[ids[1]],), self.activation)[0] for each in found)

    @staticmethod
    def _drawing(inputs: Inputs, *token_ids: int) -> Inputs:
        return replace(inputs, params=msgspec.structs.replace(inputs.params, allowed_token_ids=token_ids))


def _logprobs(deltas: tuple[Delta, ...]) -> dict[int, float]:
    """Token id -> log probability, at the first token."""
    (drawn,) = (logprobs for delta in deltas for logprobs in delta.logprobs)
    return {**dict(drawn.top), drawn.token_id: drawn.logprob}


@dataclass(frozen=True, slots=True)
class ByCosine(_OfInputs):
    """The cosine of the embeddings of both texts."""

    num_firsts: int

    async def scores(self, router: Router, threads: TextThreads) -> tuple[float, ...]:
        vectors = await results_of(router, self.inputs, vector_of)
        size = sum(map(len, vectors)) // _NUMBER_BYTES
        return await threads.run(partial(cosines, vectors, self.num_firsts), size, is_begun=True)


def cosines(vectors: Sequence[bytes], num_firsts: int) -> tuple[float, ...]:
    """The cosine of each vector of length 1 behind the first ones with its first one, or with the only one."""
    firsts = [numbers(each) for each in vectors[:num_firsts]]
    seconds = vectors[num_firsts:]
    return tuple(
        max(-1.0, min(1.0, sum(map(mul, firsts[i if num_firsts > 1 else 0], numbers(second)))))
        for i, second in enumerate(seconds)
    )


def numbers(data: bytes) -> tuple[float, ...]:
    """The numbers of a vector, which is fp32 in little-endian bytes."""
    return struct.unpack(f"<{len(data) // _NUMBER_BYTES}f", data)


def activated(logits: Sequence[float], activation: Activation) -> tuple[float, ...]:
    """The logits behind their activation."""
    if activation == "identity":
        return tuple(logits)
    if activation == "softmax":
        top = max(logits)
        weights = [math.exp(logit - top) for logit in logits]
        total = sum(weights)
        return tuple(weight / total for weight in weights)
    return tuple(_sigmoid(logit) for logit in logits)


def _sigmoid(logit: float) -> float:
    small = math.exp(-abs(logit))
    return (1.0 if logit >= 0 else small) / (1.0 + small)


def activation_of(judges: ClassifierFolder, num_labels: int, body: JudgingFields) -> Activation:
    """The activation that a request gets. Raises `RequestError` if it is not computed here."""
    wanted = body.wants_activation
    reason = judges.unsupported_for(num_labels, wanted=wanted)
    if reason:
        field, value = body.logits_option
        message = f"The model's scores cannot be computed: {reason}. Set '{field}' to {value}, which gives the logits."
        raise RequestError("not_implemented", message, field)
    return judges.activation_for(num_labels, wanted=wanted)


class ScoreIntake:
    """The only maker of a valid request for scores."""

    def __init__(self, prompts: PromptReader, model: ServedModel) -> None:
        self._model, self._reader = model, TextReader(prompts, model)

    async def take(
        self, pairs: Pairs, body: ScoringFields, caller: Caller, ready: Ready, adapter: Adapter | None
    ) -> Scoring:
        """`ready`: what the engine said of the model. Raises `RequestError`."""
        model, judges = self._model, self._model.judges
        is_generating = judges.tokens is not None and model.generates and model.pair_templates is not None
        if is_generating:
            assert judges.tokens is not None
            activation = activation_of(judges, 1, body)
            params = SamplingParams(max_tokens=1, seed=0, temperature=0.0, logprobs=MAX_LOGPROBS, adapter=adapter)
            return ByTokens(await self._pairs(pairs, body, caller, params), judges.tokens, activation)
        if judges.scores_by_labels(ready.num_labels):
            activation = activation_of(judges, 1, body)
            params = SamplingParams(max_tokens=0, seed=0, pooling=Pooling(gives="logits"), adapter=adapter)
            return ByClassifier(await self._pairs(pairs, body, caller, params), activation)
        self._check_embeds(ready)
        return await self._embedded(pairs, body, caller, ready, adapter)

    def _check_embeds(self, ready: Ready) -> None:
        """Raises `RequestError` for a model that is neither a reranker nor made for embeddings."""
        model = self._model
        name = errors.clip(model.names[0], errors.MAX_ECHO)
        if ready.num_labels:
            message = (
                f"The model '{name}' sorts texts into {ready.num_labels} classes and gives no score of a pair. POST "
                "/v1/classify for its classes, or serve a reranker, which has one label."
            )
            raise RequestError("invalid_value", message, "model")
        if ready.hidden_size == 0 or (model.generates and model.embeds is PLAIN):
            message = (
                f"The model '{name}' cannot score pairs: it has no classifier, and was not made for embeddings. Serve "
                "a reranker, such as bge-reranker-v2-m3 or Qwen3-Reranker, or a model that embeds texts."
            )
            raise RequestError("invalid_value", message, "model")
        unsupported, how = model.embeds.unsupported, model.embeds.pooling
        if how not in ready.poolings:
            unsupported = unsupported or f"its pooling is {how}, which its engine does not compute"
        if unsupported:
            message = f"The model's embeddings cannot be computed: {unsupported}. Serve a reranker."
            raise RequestError("not_implemented", message, "model")

    async def _pairs(self, pairs: Pairs, body: ScoringFields, caller: Caller, params: SamplingParams) -> Inputs:
        """The pairs as a reranker reads them."""
        model = self._model
        return Inputs(
            inputs=await self._reader.read(
                pairs.each(),
                _names(pairs.second_name, pairs.seconds),
                cut_of(body, model.max_model_len - params.max_tokens, model.judges.max_tokens),
                Form.of(model, body.instruction),
                first_name=pairs.first_name,
            ),
            params=params,
            scheduling=caller.scheduling(body),
            account=caller.account,
        )

    async def _embedded(
        self, pairs: Pairs, body: ScoringFields, caller: Caller, ready: Ready, adapter: Adapter | None
    ) -> ByCosine:
        """Both texts apart from each other, each with the prompt that the model has for such texts."""
        model, embeds = self._model, self._model.embeds
        if body.instruction is not None:
            way_out = "This model embeds each text alone: write it into the query."
            raise errors.unsupported_parameter("instruction", way_out)
        before, behind = (prompt_for(kind, embeds) for kind in ("query", "document"))
        firsts, seconds = (
            [text + each for each in of] for text, of in ((before, pairs.firsts), (behind, pairs.seconds))
        )
        names = [*_names(pairs.first_name, firsts), *_names(pairs.second_name, seconds)]
        cut, form = cut_of(body, model.max_model_len, embeds.max_tokens), Form(embeds.lowercases)
        pooling = Pooling(embeds.pooling, min(embeds.num_components or ready.hidden_size, ready.hidden_size))
        inputs = Inputs(
            inputs=await self._reader.read((*firsts, *seconds), names, cut, form),
            params=SamplingParams(max_tokens=0, seed=0, pooling=pooling, adapter=adapter),
            scheduling=caller.scheduling(body),
            account=caller.account,
        )
        return ByCosine(inputs, len(firsts))


def _names(field: str, texts: Sequence[str]) -> list[str]:
    """Names of the texts of a field: it may be one text."""
    return [field] if len(texts) == 1 else [f"{field}[{i}]" for i in range(len(texts))]
