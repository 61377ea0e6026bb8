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
from inferd.engine.api.wire.messages import Submit
from inferd.engine.api.wire.params import Adapter, Pooling, SamplingParams, SchedulingParams
from inferd.server.auth.quotas import UNLIMITED, Account
from inferd.server.dispatch.router import Router
from inferd.server.errors import messages as errors
from inferd.server.generate import work
from inferd.server.generate.inputs import results_of, vector_of
from inferd.server.generate.prompts import Encoded, PromptReader
from inferd.server.generate.request import Caller
from inferd.server.schema.completions import Prompt
from inferd.server.schema.embeddings import EmbeddingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """A valid request for embeddings, with inputs that fit the model. Only the intake makes one."""

    engine_id: str
    inputs: tuple[tuple[int, ...], ...]
    params: SamplingParams
    scheduling: SchedulingParams
    account: Account = UNLIMITED
    """The account that its tokens are charged to."""

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_tokens(self) -> int:
        """Tokens of all inputs together."""
        return sum(map(len, self.inputs))

    def name_of(self, index: int) -> str:
        """Name of an input in error messages."""
        return name_of(index, len(self.inputs))

    def submits(self) -> Iterator[Submit]:
        """One submit for each input, in order."""
        for i, token_ids in enumerate(self.inputs):
            yield Submit(
                request_id=f"{self.engine_id}-{i}", prompt_ids=token_ids, params=self.params, scheduling=self.scheduling
            )


class EmbedIntake:
    """The only maker of a valid `EmbedRequest`."""

    def __init__(self, prompts: PromptReader, model: SentenceFolder) -> None:
        """`model`: how it embeds texts."""
        self._prompts, self._model = prompts, model

    async def take(
        self, body: EmbeddingRequest, caller: Caller, hidden_size: int, adapter: Adapter | None = None
    ) -> EmbedRequest:
        """`hidden_size`: components of the model's vectors; 0: it gives none. Raises `RequestError`."""
        if hidden_size == 0:
            message = "This server's engine gives no hidden states that embeddings could be made of."
            raise RequestError("not_implemented", message)
        if self._model.unsupported and body.pooling is None:
            message = f"The model's own embeddings cannot be computed: {self._model.unsupported}. Choose a 'pooling'."
            raise RequestError("not_implemented", message, "pooling")
        if body.dimensions is not None and body.dimensions > hidden_size:
            raise errors.above_max("dimensions", hidden_size, body.dimensions)
        add_special = body.add_special_tokens is not False
        inputs = self._with_prompt(body)
        kept = self._prompts.kept(body.truncate_prompt_tokens, 0, None)
        if body.truncate_prompt_tokens == -1 and kept is not None and self._model.max_tokens is not None:
            kept = min(kept, self._model.max_tokens)
        check_size = partial(self._prompts.check_least, "input") if kept is None else None
        all_encoded = await self._prompts.encode_all(
            inputs,
            add_special=add_special,
            param="input",
            check_size=check_size,
            kept=kept,
            check_total=partial(work.check_input_ids, "input"),
        )
        all_ids = tuple(self._fitted(i, len(all_encoded), encoded, kept) for i, encoded in enumerate(all_encoded))
        pooling = Pooling(
            body.pooling or self._model.pooling,
            body.dimensions or min(self._model.num_components or hidden_size, hidden_size),
            is_normalized=self._model.normalizes if body.normalize is None else body.normalize,
        )
        return EmbedRequest(
            engine_id=f"embd-{secrets.token_hex(8)}",
            inputs=all_ids,
            params=SamplingParams(max_tokens=0, seed=0, pooling=pooling, adapter=adapter),
            scheduling=caller.scheduling(body),
            account=caller.account,
        )

    def _fitted(self, index: int, num_inputs: int, encoded: Encoded, kept: int | None) -> tuple[int, ...]:
        """The ids of an input. Raises `RequestError` if the model was not made for so many."""
        name, most = name_of(index, num_inputs), self._model.max_tokens
        token_ids = self._prompts.fit(name, encoded, 0, None, kept).token_ids
        if most is not None and len(token_ids) > most:
            raise errors.context_too_long(name, most, len(token_ids), None)
        return token_ids

    def _with_prompt(self, body: EmbeddingRequest) -> tuple[Prompt, ...]:
        """The inputs, texts as the model wants them. Raises `RequestError` for a prompt that it does not have."""
        prompt, named = self._prompt_of(body)
        if named and not all(isinstance(given, str) for given in body.input):
            message = f"'{named}' begins texts, and some inputs are token ids: send texts, or write it into the ids."
            raise RequestError("invalid_value", message, named)
        lowers = self._model.lowercases
        return tuple(
            (prompt + (given.lower() if lowers else given)) if isinstance(given, str) else given for given in body.input
        )

    def _prompt_of(self, body: EmbeddingRequest) -> tuple[str, str]:
        """(text before each text, the parameter that chose it; empty if none did)."""
        prompts = self._model.prompts
        if body.prompt_name is not None:
            if body.prompt_name not in prompts:
                names = ", ".join(sorted(prompts)) or "none"
                raise errors.invalid_value("prompt_name", body.prompt_name, f"This model's prompts are: {names}.")
            return prompts[body.prompt_name], "prompt_name"
        if body.input_type is not None:
            if body.input_type not in _PROMPTS_OF:
                rule = f"Expected one of: {', '.join(_PROMPTS_OF)}."
                raise errors.invalid_value("input_type", body.input_type, rule)
            found = next((name for name in _PROMPTS_OF[body.input_type] if name in prompts), None)
            return ("", "") if found is None else (prompts[found], "input_type")
        return prompts.get(self._model.default_prompt or "", ""), ""


_QUERY = ("query", "s2p_query", "search_query", "Retrieval-query", "web_search_query")
_DOCUMENT = ("document", "passage", "search_document", "Retrieval-document", "corpus")
_PROMPTS_OF = {
    "query": _QUERY, "search_query": _QUERY, "document": _DOCUMENT, "passage": _DOCUMENT, "search_document": _DOCUMENT
}  # fmt: skip
"""Value of `input_type` -> names that published models give to the prompt of such texts."""


def prompt_for(input_type: str, model: SentenceFolder) -> str:
    """The model's prompt for such texts; empty if it has none. `input_type`: a value that requests may have."""
    return next((model.prompts[name] for name in _PROMPTS_OF[input_type] if name in model.prompts), "")


def name_of(index: int, num_inputs: int) -> str:
    """Name of an input in error messages."""
    return "input" if num_inputs == 1 else f"input[{index}]"


async def embed(router: Router, request: EmbedRequest) -> tuple[bytes, ...]:
    """The vectors in the order of the inputs, as little-endian fp32 bytes.

    Raises `RequestError` or `EngineDeadError` if an input fails, and `RequestError` if one is not taken.
    """
    return await results_of(router, request, vector_of)
