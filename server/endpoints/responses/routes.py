"""/v1/responses: create, read, cancel and delete. A request is answered like the equal chat request."""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import RequestError
from inferd.server.endpoints.body import body_of, query_of
from inferd.server.endpoints.chunks import AnswerOptions
from inferd.server.endpoints.respond import admit, respond, while_asked
from inferd.server.endpoints.responses.background import Job
from inferd.server.endpoints.responses.chat_request import callers_words, check, in_callers_words
from inferd.server.endpoints.responses.conversation import ResponseContext, conversation_of, stored_of
from inferd.server.endpoints.responses.open_response import OpenResponse, ResponsesRendering
from inferd.server.endpoints.responses.store import Stored
from inferd.server.endpoints.service import Service, Services
from inferd.server.errors import messages as errors
from inferd.server.generate.request import Caller, GenerateRequest, until
from inferd.server.generate.stream import ChoiceStreams
from inferd.server.schema.answers.responses import DeletedResponse, InputItem, InputItemList, ResponseObject
from inferd.server.schema.responses import InputItemsQuery, ResponsesRequest, RetrieveQuery
from inferd.server.schema.strict_json import exact

logger = logging.getLogger("inferd.server")

_LONG = 32 * 1024
"""Bytes of items from which on a thread reads them."""

_DEFAULT_LIMIT = 20
"""Number of items in one list, as in OpenAI's API."""


class ResponsesApi:
    """The routes' handlers."""

    def __init__(self, services: Services) -> None:
        self._services, first = services, services.first
        self._store, self._background, self._threads = first.responses, first.background, first.threads

    async def create(self, request: Request, body: Annotated[ResponsesRequest, body_of(ResponsesRequest)]) -> Response:
        """Raises `RequestError`, `EngineDeadError` and `ClientGoneError`."""
        service = self._services.generating(body.model)
        model = service.intake.check_model(body.model)
        caller = admit(request, service, body.timeout, num_choices=1)
        check(body)
        num_bytes = len(await request.body())
        conversation, accepted = await while_asked(
            request, caller.deadline, self._read(service, body, caller, num_bytes)
        )
        service.metrics.request_arrived("responses")
        response = OpenResponse(service, body, accepted, model, conversation.tools)
        if body.background:
            request.state.notices += accepted.notices
            shown = await self._start(service, response, accepted, caller, conversation, num_bytes)
            return _json(exact(orjson.dumps(shown)))
        rendering = ResponsesRendering(response, partial(self._keep, caller.tenant, conversation))
        options = AnswerOptions(model, bool(body.stream), False, False, False, None)
        return await respond(request, service, accepted, options, rendering)

    async def get(self, request: Request, query: Annotated[RetrieveQuery, query_of(RetrieveQuery)]) -> Response:
        """A response as it is now. The query has no effect. Raises `RequestError`."""
        del query
        return _json(self._find(request).response)

    async def cancel(self, request: Request) -> Response:
        """Cancel a response in the background. A response that has ended stays as it is. Raises `RequestError`."""
        found = self._find(request)
        if not orjson.loads(found.response)["background"]:
            raise RequestError("invalid_value", "Cannot cancel a synchronous response: close its connection.", "id")
        await self._background.cancel(request.state.tenant, found.id)
        return _json((self._store.get(request.state.tenant, found.id) or found).response)

    async def delete(self, request: Request) -> Response:
        """Delete a response, and end it if it still runs. Raises `RequestError`."""
        found = self._find(request)
        await self._background.cancel(request.state.tenant, found.id)
        self._store.delete(request.state.tenant, found.id)
        answer: DeletedResponse = {"id": found.id, "object": "response", "deleted": True}
        return _json(orjson.dumps(answer))

    async def input_items(
        self, request: Request, query: Annotated[InputItemsQuery, query_of(InputItemsQuery)]
    ) -> Response:
        """The items before a response's output, newest first unless the query says otherwise. Raises `RequestError`."""
        found = self._find(request)
        work, size = partial(_page, found.context, query), len(found.context)
        return _json(work() if size < _LONG else await self._threads.run(work, size))

    async def _read(
        self, service: Service, body: ResponsesRequest, caller: Caller, num_bytes: int
    ) -> tuple[ResponseContext, GenerateRequest]:
        """`num_bytes`: size of the request. Raises `RequestError`."""
        conversation = await self._conversation(body, caller.tenant, num_bytes)
        with in_callers_words():
            accepted = await service.intake.chat(conversation.chat, caller, prefix="resp_")
        return conversation, accepted.in_words(callers_words)

    async def _conversation(self, body: ResponsesRequest, tenant: str, num_bytes: int) -> ResponseContext:
        """Raises `RequestError`, also if a response or an item is not stored."""
        previous = None
        if body.previous_response_id is not None:
            previous = self._background.get(tenant, body.previous_response_id)
            previous = previous or self._store.get(tenant, body.previous_response_id)
            if previous is None:
                message = f"Previous response with id '{errors.shown(body.previous_response_id)}' not found."
                raise RequestError("previous_response_not_found", message, "previous_response_id")
        work = partial(conversation_of, body, previous, partial(self._store.with_item, tenant))
        if previous is not None:
            num_bytes += len(previous.context) + len(previous.response)
        # The size of responses that items refer to is known only when they are read.
        is_short = num_bytes < _LONG and all(item["type"] != "item_reference" for item in body.input)
        return work() if is_short else await self._threads.run(work, num_bytes)

    async def _start(
        self,
        service: Service,
        response: OpenResponse,
        accepted: GenerateRequest,
        caller: Caller,
        conversation: ResponseContext,
        num_bytes: int,
    ) -> ResponseObject:
        """Start a response in the background, and return its first state. `num_bytes`: size of its request. Raises
        `RequestError` if it cannot start."""
        if not self._store.keeps_any:
            message = "This server stores no responses (--stored-responses 0), so it has none in the background."
            raise RequestError("unsupported_value", message, "background")
        num_bytes += len(conversation.context)
        self._background.check_room(caller.tenant, num_bytes)
        streams = await ChoiceStreams.begin(service.router, accepted, service.model.tokenizer.bytes, service.metrics)
        shown = response.shown()

        def keep() -> None:
            caller.account.leave()
            self._keep(caller.tenant, conversation, response)

        job = Job(
            tenant=caller.tenant,
            response=response,
            events=until(accepted.deadline, streams.events()),
            close=streams.close,
            snapshot=partial(stored_of, conversation, response),
            keep=keep,
            num_bytes=num_bytes,
        )
        caller.account.stay()
        self._background.start(job)
        return shown

    def _keep(self, tenant: str, conversation: ResponseContext, response: OpenResponse) -> None:
        if response.is_kept:
            stored = stored_of(conversation, response)
            response.is_kept = self._store.put(tenant, stored)
            if not response.is_kept and self._store.keeps_any:
                logger.warning(
                    "%s is not stored: its %d bytes exceed --stored-responses", response.id, stored.num_bytes
                )

    def _find(self, request: Request) -> Stored:
        """The response of a path. Raises `RequestError` if this key has no such response."""
        response_id, tenant = request.path_params["response_id"], request.state.tenant
        found = self._background.get(tenant, response_id) or self._store.get(tenant, response_id)
        if found is None:
            message = f"Response with id '{errors.shown(response_id)}' not found."
            raise RequestError("response_not_found", message, "id")
        return found


def _page(context: bytes, query: InputItemsQuery) -> bytes:
    """A page of the list of items. Raises `RequestError` if the query's `after` names none of them."""
    items: list[InputItem] = orjson.loads(context)
    if query.order != "asc":
        items.reverse()
    if query.after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == query.after), None)
        if place is None:
            raise errors.invalid_value("after", query.after, "No input item of this response has this id.")
        items = items[place + 1 :]
    shown = items[: query.limit or _DEFAULT_LIMIT]
    page: InputItemList = {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(shown) < len(items),
    }
    return exact(orjson.dumps(page))


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")
