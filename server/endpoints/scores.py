"""/v1/rerank and its other paths, /v1/score and /v1/classify, and /predict: parse -> judge -> render.

Each shape of a request is translated into pairs or texts, and their scores into its answer. A thread writes the answer,
which may hold all documents.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeVar, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import RequestError
from inferd.server.endpoints.body import body_of
from inferd.server.endpoints.respond import admit, while_asked
from inferd.server.endpoints.service import Service, Services
from inferd.server.errors import messages as errors
from inferd.server.generate.classify import Classifying, ClassifyIntake
from inferd.server.generate.request import Caller
from inferd.server.generate.score import Pairs, ScoreIntake
from inferd.server.generate.texts import Item, Pair
from inferd.server.schema.answers import scores as answers
from inferd.server.schema.answers.embeddings import EmbeddingUsage
from inferd.server.schema.classes import ClassifyRequest, PredictRequest
from inferd.server.schema.scores import JudgingFields, RerankRequest, ScoreRequest, ScoringFields
from inferd.server.schema.strict_json import exact
from inferd.server.text.model import ServedModel

T = TypeVar("T")

_V2_PATH = "/v2/rerank"

Purpose = Callable[[ServedModel], bool]
_SCORES: tuple[Purpose, ...] = (
    lambda model: model.task == "rerank",
    lambda model: model.is_made_to_embed,
    lambda model: model.is_made_to_judge,  # its refusal says where it gives classes
)
CLASSES: tuple[Purpose, ...] = (lambda model: model.has_classes,)
"""Purposes of the model that answers a request for scores, or for classes, without a name. The best one is first."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, its service and its caller."""

    request: Request
    service: Service
    name: str
    """Name of the model in the answer."""
    caller: Caller

    def while_asked(self, work: Awaitable[T]) -> Awaitable[T]:
        return while_asked(self.request, self.caller.deadline, work)

    async def answer(self, write: Callable[[], bytes], size: int) -> Response:
        data = await self.while_asked(self.service.threads.run(write, size, is_begun=True))
        return Response(data, media_type="application/json")


class ScoresApi:
    """The handlers of the routes."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._classifying = {
            service.model.names[0]: ClassifyIntake(service.prompts, service.model) for service in services
        }

    async def rerank(self, request: Request, body: Annotated[RerankRequest, body_of(RerankRequest)]) -> Response:
        """Raises `RequestError`, `EngineDeadError` and `ClientGoneError`."""
        texts, name = _documents_of(body)
        is_second = request.url.path == _V2_PATH
        if is_second and body.truncate is None:
            body = body.model_copy(update={"truncate": True})  # as Cohere's API does
        asked = self._asked(request, body, _SCORES)
        scores, num_tokens = await _scored(asked, "rerank", Pairs((body.query,), texts, "query", name), body)
        ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n or None]
        is_plain = body.texts is None
        shows = body.return_documents
        if shows is None:
            shows = is_plain and not is_second
        shown = texts if shows else None
        size = sum(len(texts[i]) for i in ranked) if shows else len(ranked)
        if not is_plain:
            return await asked.answer(partial(_ranks, scores, ranked, shown), size)
        return await asked.answer(partial(_reranked, asked.name, scores, ranked, shown, num_tokens), size)

    async def score(self, request: Request, body: Annotated[ScoreRequest, body_of(ScoreRequest)]) -> Response:
        """Raises as `rerank`."""
        if len(body.text_1) not in (1, len(body.text_2)):
            rule = f"Expected 1 text, or as many as 'text_2' has ({len(body.text_2)})."
            raise errors.invalid_value("text_1", f"{len(body.text_1)} texts", rule)
        asked = self._asked(request, body, _SCORES)
        pairs = Pairs(body.text_1, body.text_2, "text_1", "text_2")
        scores, num_tokens = await _scored(asked, "score", pairs, body)
        return await asked.answer(partial(_scores, asked.name, scores, num_tokens), len(scores))

    async def classify(self, request: Request, body: Annotated[ClassifyRequest, body_of(ClassifyRequest)]) -> Response:
        """Raises as `rerank`."""

        def write(asked: _Asked, accepted: Classifying, logits: Sequence[bytes]) -> bytes:
            return _classified(asked.name, accepted, logits, asked.service.model.judges.label)

        return await self._judged(request, body, body.input, "input", write)

    async def predict(self, request: Request, body: Annotated[PredictRequest, body_of(PredictRequest)]) -> Response:
        """Raises as `rerank`."""
        inputs, is_batch = body.inputs
        items: list[Item] = [Pair(*texts) if len(texts) == 2 else texts[0] for texts in inputs]

        def write(asked: _Asked, accepted: Classifying, logits: Sequence[bytes]) -> bytes:
            return _predictions(accepted, logits, asked.service.model.judges.label, is_batch=is_batch)

        return await self._judged(request, body, items, "inputs", write, names_all=True)

    async def pool(
        self, request: Request, body: ClassifyRequest, render: Callable[[str, Sequence[bytes], int], object]
    ) -> Response:
        """`render` makes the answer of the model's name, of the numbers of each input as fp32, and of the number of
        tokens. Raises as `rerank`."""

        def write(asked: _Asked, accepted: Classifying, logits: Sequence[bytes]) -> bytes:
            rows = [array("f", values).tobytes() for values in accepted.classes(logits)]
            return exact(orjson.dumps(render(asked.name, rows, accepted.inputs.num_tokens)))

        return await self._judged(request, body, body.input, "input", write)

    async def _judged(
        self,
        request: Request,
        body: JudgingFields,
        items: Sequence[Item],
        param: str,
        write: Callable[[_Asked, Classifying, Sequence[bytes]], bytes],
        *,
        names_all: bool = False,
    ) -> Response:
        """The answer that `write` makes of the logits of each item, on a thread. `names_all`: as of `ClassifyIntake`.
        Raises as `rerank`."""
        asked = self._asked(request, body, CLASSES)
        service = asked.service
        adapter, ready = service.intake.adapter_of(body.model), service.router.replicas.ready
        accepted = await asked.while_asked(
            self._classifying[service.model.names[0]].take(
                items,
                param,
                body,
                asked.caller,
                ready,
                adapter,
                add_special=not isinstance(body, ClassifyRequest) or body.add_special_tokens is not False,
                names_all=names_all,
            )
        )
        service.metrics.request_arrived("classify")
        logits = await asked.while_asked(accepted.logits(service.router))
        return await asked.answer(partial(write, asked, accepted, logits), sum(map(len, logits)))

    def _asked(self, request: Request, body: JudgingFields, purposes: Sequence[Purpose]) -> _Asked:
        """Raises `RequestError`."""
        service = self._services.made_for(body.model, *purposes)
        name = service.intake.check_model(body.model)
        # The server sends inputs as places in the queue become free, so one free place is enough to begin.
        caller = admit(request, service, body.timeout, num_choices=1, has_target=False)
        return _Asked(request, service, name, caller)


async def _scored(asked: _Asked, api: str, pairs: Pairs, body: ScoringFields) -> tuple[tuple[float, ...], int]:
    """(the scores of the pairs, the tokens of all inputs). Every shape of a request for scores takes this path."""
    service = asked.service
    adapter, ready = service.intake.adapter_of(body.model), service.router.replicas.ready
    intake = ScoreIntake(service.prompts, service.model)
    accepted = await asked.while_asked(intake.take(pairs, body, asked.caller, ready, adapter))
    service.metrics.request_arrived(api)
    return await asked.while_asked(accepted.scores(service.router, service.threads)), accepted.num_tokens


def _documents_of(body: RerankRequest) -> tuple[tuple[str, ...], str]:
    """(the documents, the field that has them). Raises `RequestError`."""
    if body.documents is not None and body.texts is not None:
        raise RequestError("invalid_value", "Only one of 'documents' and 'texts' can be given.", "texts")
    if body.documents is not None:
        return body.documents, "documents"
    if body.texts is None:
        raise errors.missing("documents")
    return body.texts, "texts"


def _reranked(
    name: str, scores: Sequence[float], ranked: Sequence[int], texts: Sequence[str] | None, num_tokens: int
) -> bytes:
    def result(i: int) -> answers.RankedResult:
        plain: answers.RankedResult = {"index": i, "relevance_score": scores[i]}
        return plain if texts is None else {**plain, "document": {"text": texts[i]}}

    answer: answers.Reranked = {
        "id": f"rerank-{secrets.token_hex(8)}",
        "object": "list",
        "model": name,
        "results": cast("list[answers.RankedResult]", [_piece(result(i)) for i in ranked]),
        "usage": _usage(num_tokens),
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": num_tokens, "output_tokens": 0},
        },
    }
    return exact(orjson.dumps(answer))


def _ranks(scores: Sequence[float], ranked: Sequence[int], texts: Sequence[str] | None) -> bytes:
    def rank(i: int) -> answers.Rank:
        plain: answers.Rank = {"index": i, "score": scores[i]}
        return plain if texts is None else {**plain, "text": texts[i]}

    return exact(orjson.dumps([_piece(rank(i)) for i in ranked]))


def _scores(name: str, scores: Sequence[float], num_tokens: int) -> bytes:
    answer: answers.Scores = {
        "id": f"score-{secrets.token_hex(8)}",
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)],
        "usage": _usage(num_tokens),
    }
    return exact(orjson.dumps(answer))


def _classified(name: str, accepted: Classifying, logits: Sequence[bytes], label: Callable[[int], str]) -> bytes:
    def item(i: int, values: Sequence[float]) -> answers.Classes:
        likeliest = max(range(len(values)), key=values.__getitem__)
        return {"index": i, "label": label(likeliest), "probs": values, "num_classes": len(values)}

    answer: answers.Classified = {
        "id": f"classify-{secrets.token_hex(8)}",
        "object": "list",
        "created": int(time.time()),
        "model": name,
        "data": cast(
            "list[answers.Classes]", [_piece(item(i, values)) for i, values in enumerate(accepted.classes(logits))]
        ),
        "usage": _usage(accepted.inputs.num_tokens),
    }
    return exact(orjson.dumps(answer))


def _predictions(
    accepted: Classifying, logits: Sequence[bytes], label: Callable[[int], str], *, is_batch: bool
) -> bytes:
    """The classes of each input, the likeliest first. An input that is no batch has a list of its own."""

    def predictions(values: Sequence[float]) -> list[answers.Prediction]:
        ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))
        return [{"score": values[i], "label": label(i)} for i in ranked]

    items = [_piece(predictions(values)) for values in accepted.classes(logits)]
    return exact(orjson.dumps(items if is_batch else items[0]))


def _piece(value: object) -> orjson.Fragment:
    """A part of the answer, encoded for itself: no other thread runs while a part is encoded."""
    return orjson.Fragment(orjson.dumps(value))


def _usage(num_tokens: int) -> EmbeddingUsage:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
