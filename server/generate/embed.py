"""Embeddings: inputs -> vectors. Each input is one request that draws no token; the engine batches it like any other.

Checks a request for embeddings and sends it through the router. Knows no HTTP.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from inferd.engine.api.errors import RequestError
from inferd.engine.api.sentence_folder import SentenceFolder
from inferd.engine.api.wire.messages import Ready, Submit
from inferd.engine.api.wire.params import Adapter, PooledKind, Pooling, SamplingParams, SchedulingParams
from inferd.server.auth.quotas import UNLIMITED, Account
from inferd.server.dispatch.router import Router
from inferd.server.errors import messages as errors
from inferd.server.generate import work
from inferd.server.generate.inputs import results_of, vector_of
from inferd.server.generate.prompts import Encoded, PromptReader
from inferd.server.generate.request import Caller
from inferd.server.schema.completions import Prompt
from inferd.server.schema.embeddings import Side, VectorFields
from inferd.server.text.model import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """A valid request for embeddings, with inputs that fit the model. Only the intake makes one."""

    engine_id: str
    inputs: tuple[tuple[int, ...], ...]
    params: SamplingParams
    scheduling: SchedulingParams
    account: Account = UNLIMITED
    """The account that its tokens are charged to."""
    param: str = "input"
    """The caller's name of the inputs."""

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_tokens(self) -> int:
        """Tokens of all inputs together."""
        return sum(map(len, self.inputs))

    def name_of(self, index: int) -> str:
        """Name of an input in error messages."""
        return name_of(index, len(self.inputs), self.param)

    def submits(self) -> Iterator[Submit]:
        """One submit for each input, in order."""
        for i, token_ids in enumerate(self.inputs):
            yield Submit(
                request_id=f"{self.engine_id}-{i}", prompt_ids=token_ids, params=self.params, scheduling=self.scheduling
            )


class EmbedIntake:
    """The only maker of a valid `EmbedRequest`."""

    def __init__(self, prompts: PromptReader, model: ServedModel) -> None:
        self._prompts, self._model, self._folder = prompts, model, model.embeds

    async def take(
        self,
        body: VectorFields,
        caller: Caller,
        ready: Ready,
        adapter: Adapter | None = None,
        *,
        param: str = "input",
        per_token: bool = False,
        way_to_cut: str,
    ) -> EmbedRequest:
        """`ready`: what the engine can do. `param`: the caller's name of the inputs. `per_token`: a vector for each
        token. `way_to_cut`: as in `with_way_to_cut`. Raises `RequestError`."""
        try:
            return await self._taken(body, caller, ready, adapter, param, per_token=per_token)
        except errors.ContextTooLongError as error:
            raise errors.with_way_to_cut(error, way_to_cut) from error

    async def _taken(
        self,
        body: VectorFields,
        caller: Caller,
        ready: Ready,
        adapter: Adapter | None,
        param: str,
        *,
        per_token: bool,
    ) -> EmbedRequest:
        pooling = self._pooling_of(body, ready, "token_embeddings" if per_token else "embedding")
        if not per_token:
            work.check_vectors(param, len(body.input), pooling.num_components)
        kept, side = self._kept(body), body.truncation_side or self._model.truncation_side
        check_size = partial(self._prompts.check_least, param) if kept is None else None
        all_encoded = await self._prompts.encode_all(
            self._with_prompt(body),
            add_special=body.add_special_tokens is not False,
            param=param,
            check_size=check_size,
            kept=kept,
            side=side,
            check_total=partial(work.check_input_ids, param),
        )
        all_ids = tuple(
            self._fitted(name_of(i, len(all_encoded), param), encoded, kept, side)
            for i, encoded in enumerate(all_encoded)
        )
        if per_token:
            work.check_token_vectors(param, sum(map(len, all_ids)), pooling.num_components)
        return EmbedRequest(
            engine_id=f"embd-{secrets.token_hex(8)}",
            inputs=all_ids,
            params=SamplingParams(max_tokens=0, seed=0, pooling=pooling, adapter=adapter),
            scheduling=caller.scheduling(body),
            account=caller.account,
            param=param,
        )

    def _pooling_of(self, body: VectorFields, ready: Ready, gives: PooledKind) -> Pooling:
        """Raises `RequestError` for what this engine does not compute, and for components that the model lacks."""
        hidden_size, unsupported = ready.hidden_size, self._folder.unsupported
        if hidden_size == 0:
            message = "This server's engine gives no hidden states that embeddings could be made of."
            raise RequestError("not_implemented", message)
        if gives == "token_embeddings" and not ready.gives_token_embeddings:
            name = errors.clip(self._model.names[0], errors.MAX_ECHO)
            message = f"The model '{name}' gives one vector for each input, and none for each token. Serve an encoder."
            raise RequestError("invalid_value", message, "model")
        if not unsupported and self._folder.pooling not in ready.poolings:
            unsupported = f"its pooling is {self._folder.pooling}, and its engine pools by {', '.join(ready.poolings)}"
        if unsupported and body.pooling is None:
            message = f"The model's own embeddings cannot be computed: {unsupported}. Choose a 'pooling'."
            raise RequestError("not_implemented", message, "pooling")
        if body.pooling is not None and body.pooling not in ready.poolings:
            raise errors.not_among("pooling", body.pooling, ready.poolings)
        self._check_dimensions(body.dimensions, hidden_size)
        return Pooling(
            body.pooling or self._folder.pooling,
            body.dimensions or min(self._folder.num_components or hidden_size, hidden_size),
            is_normalized=self._folder.normalizes if body.normalize is None else body.normalize,
            gives=gives,
        )

    def _check_dimensions(self, given: int | None, hidden_size: int) -> None:
        """Raises `RequestError` for a number of leading components that is too large or that the model was not trained
        for."""
        trained = self._model.trained_dimensions
        if given is not None and given > hidden_size:
            raise errors.above_max("dimensions", hidden_size, given)
        if given is not None and trained and given not in (*trained, hidden_size):
            allowed = ", ".join(map(str, sorted({*trained, hidden_size})))
            raise errors.invalid_value("dimensions", given, f"This model was trained for: {allowed}.")

    def _kept(self, body: VectorFields) -> int | None:
        """Most tokens that are kept of an input, at most those that the model takes; None: all. Raises `RequestError`
        for fewer than are always added."""
        kept = self._prompts.kept(body.most_kept, 0, None)
        if kept is not None:
            kept = min(kept, self._model.max_model_len, self._folder.max_tokens or kept)
        num_added = self._model.tokenizer.num_added if body.add_special_tokens is not False else 0
        if kept is not None and kept <= num_added and any(isinstance(given, str) for given in body.input):
            raise errors.below_min("truncate_prompt_tokens", num_added + 1, kept)
        return kept

    def _fitted(self, name: str, encoded: Encoded, kept: int | None, side: Side) -> tuple[int, ...]:
        """The ids of the input `name`. Raises `RequestError` if the model was not made for so many."""
        token_ids, text = encoded
        cut = self._prompts.cut(token_ids, kept, side)
        token_ids, most = self._prompts.fit(name, (cut, text), 0, None, None).token_ids, self._folder.max_tokens
        if most is not None and len(token_ids) > most:
            raise errors.context_too_long(name, most, len(token_ids), None)
        return token_ids

    def _with_prompt(self, body: VectorFields) -> tuple[Prompt, ...]:
        """The inputs, texts as the model wants them. Raises `RequestError` for a prompt that it does not have."""
        prompt, named = self._prompt_of(body)
        if named and not all(isinstance(given, str) for given in body.input):
            message = f"'{named}' begins texts, and some inputs are token ids: send texts, or write it into the ids."
            raise RequestError("invalid_value", message, named)
        lowers = self._folder.lowercases
        return tuple(
            (prompt + (given.lower() if lowers else given)) if isinstance(given, str) else given for given in body.input
        )

    def _prompt_of(self, body: VectorFields) -> tuple[str, str]:
        """(text before each text, the parameter that chose it; empty if none did)."""
        prompts = self._folder.prompts
        if body.prompt_name is not None:
            if body.prompt_name not in prompts:
                names = ", ".join(sorted(prompts)) or "none"
                raise errors.invalid_value("prompt_name", body.prompt_name, f"This model's prompts are: {names}.")
            return prompts[body.prompt_name], "prompt_name"
        if body.input_type is not None:
            names_of = (*_PROMPTS_OF.get(body.input_type, ()), body.input_type)
            found = next((name for name in names_of if name in prompts), None)
            if found is None and body.input_type not in _PROMPTS_OF:
                rule = f"Expected one of: {', '.join(dict.fromkeys((*_PROMPTS_OF, *sorted(prompts))))}."
                raise errors.invalid_value("input_type", body.input_type, rule)
            return ("", "") if found is None else (prompts[found], "input_type")
        return prompts.get(self._folder.default_prompt or "", ""), ""


_QUERY = ("query", "s2p_query", "search_query", "Retrieval-query", "web_search_query", "retrieval.query")
_DOCUMENT = ("document", "passage", "search_document", "Retrieval-document", "corpus", "retrieval.passage")
_CLUSTERING = ("Clustering", "clustering", "separation")
_LISTS = ("texts",)
"""Fields that take no text alone: Cohere's."""
_PROMPTS_OF = {
    "query": _QUERY, "search_query": _QUERY, "retrieval.query": _QUERY,
    "document": _DOCUMENT, "passage": _DOCUMENT, "search_document": _DOCUMENT, "retrieval.passage": _DOCUMENT,
    "classification": ("Classification",), "clustering": _CLUSTERING, "separation": _CLUSTERING,
    "text-matching": ("STS", "sts"), "code.query": ("nl2code_query", *_QUERY),
    "code.passage": ("nl2code_document", *_DOCUMENT),
}  # fmt: skip
"""Value of `input_type` -> names that published models give to the prompt of such texts."""


def prompt_for(input_type: str, model: SentenceFolder) -> str:
    """The model's prompt for such texts; empty if it has none. `input_type`: a value that requests may have."""
    return next((model.prompts[name] for name in _PROMPTS_OF[input_type] if name in model.prompts), "")


def name_of(index: int, num_inputs: int, param: str = "input") -> str:
    """Name of an input in error messages. `param`: the field, whose only input is the whole of it, unless the field is
    always a list."""
    return param if num_inputs == 1 and param not in _LISTS else f"{param}[{index}]"


async def embed(router: Router, request: EmbedRequest) -> tuple[bytes, ...]:
    """The vectors in the order of the inputs, as little-endian fp32 bytes.

    Raises `RequestError` or `EngineDeadError` if an input fails, and `RequestError` if one is not taken.
    """
    return await results_of(router, request, vector_of)
