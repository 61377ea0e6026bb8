"""/v1/embeddings: parse -> embed -> render. A thread writes the vectors: a large answer has millions of numbers.

`Embedder` has what every route that embeds does, whatever its protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import RequestError
from inferd.server.endpoints.body import body_of
from inferd.server.endpoints.respond import admit, while_asked
from inferd.server.endpoints.service import Services
from inferd.server.endpoints.vectors import VectorForm
from inferd.server.errors import messages as errors
from inferd.server.generate.embed import EmbedIntake, embed
from inferd.server.schema.answers.embeddings import Embedding, Embeddings
from inferd.server.schema.embeddings import EmbeddingRequest, VectorFields, VectorType
from inferd.server.schema.notices import Notice
from inferd.server.schema.strict_json import exact
from inferd.server.text.model import ServedModel

_COMPONENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vectors of a request, as JSON in the forms that it asked for."""

    name: str
    """Name of the model, as the request wrote it."""
    values: Sequence[Sequence[orjson.Fragment]]
    """For each form, the value of each input."""
    num_tokens: int


Render = Callable[[Embedded], object]
"""Makes the answer of a route, which becomes JSON."""


class Embedder:
    """Embeds the inputs of a request."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def answer(
        self,
        request: Request,
        body: VectorFields,
        render: Render,
        *,
        kinds: Sequence[VectorType] = ("float",),
        is_base64: Sequence[bool] = (False,),
        per_token: bool = False,
        param: str = "input",
        way_to_cut: str | None = None,
    ) -> Response:
        """`kinds` and `is_base64`: of each form. `param`: the caller's name of the inputs. `way_to_cut`: what a caller
        may do to have a text cut that is too long; None: what the body says. Raises `RequestError`, `EngineDeadError`
        and `ClientGoneError`."""
        service = self._services.made_for(body.model, lambda model: model.is_made_to_embed)
        name = service.intake.check_model(body.model)
        # The server sends inputs as places in the queue become free, so one free place is enough to begin.
        caller = admit(request, service, body.timeout, num_choices=1, has_target=False)
        ready, adapter = service.router.replicas.ready, service.intake.adapter_of(body.model)
        intake = EmbedIntake(service.prompts, service.model)
        way = body.way_to_cut if way_to_cut is None else way_to_cut
        work = intake.take(body, caller, ready, adapter, param=param, per_token=per_token, way_to_cut=way)
        try:
            accepted = await while_asked(request, caller.deadline, work)
        except RequestError as error:
            if not body.has_own_word(error):
                raise
            raise body.in_its_words(error) from error
        add_special = body.add_special_tokens is not False
        request.state.notices += service.prompts.second_bos(body.input, add_special=add_special)
        if not service.model.is_made_to_embed:
            request.state.notices.append(_not_trained(service.model))
        service.metrics.request_arrived("embeddings")
        pooling = accepted.params.pooling
        assert pooling is not None
        width = pooling.num_components if per_token else 0
        forms = [VectorForm(*form, width) for form in zip(kinds, is_base64, strict=True)]

        async def answer() -> bytes:
            vectors = await embed(service.router, accepted)
            num_components = sum(map(len, vectors)) // _COMPONENT_BYTES
            work = partial(written, name, vectors, accepted.num_tokens, forms, render)
            return await service.threads.run(work, num_components * len(forms), is_begun=True)

        data = await while_asked(request, caller.deadline, answer())
        return Response(data, media_type="application/json")


def _not_trained(model: ServedModel) -> Notice:
    name = errors.clip(model.names[0], errors.MAX_ECHO)
    text = f"the model '{name}' was not trained to embed: its vectors compare texts poorly; serve one that was"
    return Notice("not_trained_to_embed", text)


def written(name: str, vectors: Sequence[bytes], num_tokens: int, forms: Sequence[VectorForm], render: Render) -> bytes:
    """The answer as JSON."""
    values = [[orjson.Fragment(form.value(vector)) for vector in vectors] for form in forms]
    return exact(orjson.dumps(render(Embedded(name, values, num_tokens))))


class EmbeddingsApi:
    """The route's handler."""

    def __init__(self, services: Services) -> None:
        self._embedder = Embedder(services)

    async def create(self, request: Request, body: Annotated[EmbeddingRequest, body_of(EmbeddingRequest)]) -> Response:
        """Raises `RequestError`, `EngineDeadError` and `ClientGoneError`."""
        per_token = bool(body.return_multivector)
        return await self._embedder.answer(
            request,
            body,
            partial(_rendered, "embeddings" if per_token else "embedding"),
            kinds=(kind_of(body),),
            is_base64=(body.encoding_format == "base64",),
            per_token=per_token,
        )


def kind_of(body: VectorFields) -> VectorType:
    """Raises `RequestError` if two fields name different types."""
    listed = body.embedding_types[0] if body.embedding_types else None
    if listed and body.output_dtype and listed != body.output_dtype:
        raise errors.invalid_value("embedding_types", listed, f"'output_dtype' is {body.output_dtype}: send one.")
    return listed or body.output_dtype or "float"


def _rendered(key: str, embedded: Embedded) -> Embeddings:
    items: Any = [{"object": "embedding", "index": i, key: value} for i, value in enumerate(embedded.values[0])]
    return {
        "object": "list",
        "data": cast("list[Embedding]", items),
        "model": embedded.name,
        "usage": {"prompt_tokens": embedded.num_tokens, "total_tokens": embedded.num_tokens},
    }
