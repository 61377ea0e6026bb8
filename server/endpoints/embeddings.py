"""/v1/embeddings: parse -> embed -> render. A thread writes the vectors: a large answer has millions of numbers."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from functools import partial
from typing import Annotated, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.server.endpoints.body import body_of
from inferd.server.endpoints.respond import admit, while_asked
from inferd.server.endpoints.service import Services
from inferd.server.generate.embed import EmbedIntake, embed
from inferd.server.schema.answers.tokens import Embedding, Embeddings
from inferd.server.schema.embeddings import EmbeddingRequest
from inferd.server.schema.strict_json import exact

_COMPONENT_BYTES = 4


class EmbeddingsApi:
    """The route's handler."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, request: Request, body: Annotated[EmbeddingRequest, body_of(EmbeddingRequest)]) -> Response:
        """Raises `RequestError`, `EngineDeadError` and `ClientGoneError`."""
        service = self._services.of(body.model)
        name = service.intake.check_model(body.model)
        # The server sends inputs as places in the queue become free, so one free place is enough to begin.
        caller = admit(request, service, body.timeout, num_choices=1, has_target=False)
        hidden_size = service.router.replicas.ready.hidden_size
        adapter = service.intake.adapter_of(body.model)
        work = EmbedIntake(service.prompts, service.model.embeds).take(body, caller, hidden_size, adapter)
        accepted = await while_asked(request, caller.deadline, work)
        add_special = body.add_special_tokens is not False
        request.state.notices += service.prompts.second_bos(body.input, add_special=add_special)
        service.metrics.request_arrived("embeddings")
        is_base64 = body.encoding_format == "base64"

        async def answer() -> bytes:
            vectors = await embed(service.router, accepted)
            num_components = len(vectors) * len(vectors[0]) // _COMPONENT_BYTES
            work = partial(written, name, vectors, accepted.num_tokens, is_base64=is_base64)
            return await service.threads.run(work, num_components, is_begun=True)

        data = await while_asked(request, caller.deadline, answer())
        return Response(data, media_type="application/json")


def written(name: str, vectors: Sequence[bytes], num_tokens: int, *, is_base64: bool) -> bytes:
    """The answer as JSON. Vectors become Python numbers one after another, because those take eight times the bytes."""
    items = [orjson.Fragment(_item(i, vector, is_base64)) for i, vector in enumerate(vectors)]
    answer: Embeddings = {
        "object": "list",
        "data": cast("list[Embedding]", items),
        "model": name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return exact(orjson.dumps(answer))


def _item(index: int, vector: bytes, is_base64: bool) -> bytes:
    count = len(vector) // _COMPONENT_BYTES
    value = base64.b64encode(vector).decode() if is_base64 else struct.unpack(f"<{count}f", vector)
    item: Embedding = {"object": "embedding", "index": index, "embedding": value}
    return exact(orjson.dumps(item))
