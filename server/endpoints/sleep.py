"""/sleep, /wake_up and /is_sleeping, as vLLM's server has them: a model gives its memory up until it is woken."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Annotated, cast

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.server.dispatch.model_lifecycle import State
from inferd.server.dispatch.sleeping import Level
from inferd.server.endpoints.body import query_of
from inferd.server.endpoints.respond import while_asked
from inferd.server.endpoints.service import Service, Services
from inferd.server.errors import messages as errors
from inferd.server.schema.answers.operation import Done, Sleeping
from inferd.server.schema.sleep import SleepingQuery, SleepQuery, WakeQuery

logger = logging.getLogger(__name__)


class SleepApi:
    """The routes' handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def sleep(self, request: Request, query: Annotated[SleepQuery, query_of(SleepQuery)]) -> Response:
        """Answers when the memory is free, also if the caller has gone. Raises `RequestError`."""
        del request
        level, mode = cast("Level", 1 if query.level is None else query.level), query.mode or "abort"

        async def one(service: Service) -> None:
            await service.router.sleeping.sleep(level, mode)
            asleep = service.router.sleeping.level
            logger.info("%s: asleep at level %s; POST /wake_up wakes it", service.model.names[0], asleep)

        # Each of them gets its answer, also if another one refuses.
        for outcome in await asyncio.gather(*map(one, self._asked(query.model)), return_exceptions=True):
            if outcome is not None:
                raise outcome
        return _done()

    async def wake_up(self, request: Request, query: Annotated[WakeQuery, query_of(WakeQuery)]) -> Response:
        """Answers when requests are taken. Raises `RequestError` if an engine cannot start."""
        services = self._asked(query.model)
        is_partial = query.tags is not None and not {"weights", "kv_cache"} <= set(query.tags)
        if is_partial and any(service.router.lifecycle.state is State.SLEEPING for service in services):
            rule = "Weights and KV cache come back together: name both, or leave 'tags' out."
            raise errors.unsupported_value("tags", query.tags, rule)
        asleep = [service for service in services if service.router.lifecycle.is_asleep]
        await while_asked(request, None, asyncio.gather(*(service.router.sleeping.wake() for service in services)))
        for service in asleep:
            logger.info("%s: awake", service.model.names[0])
        return _done()

    async def is_sleeping(self, request: Request, query: Annotated[SleepingQuery, query_of(SleepingQuery)]) -> Response:
        """Says whether the model is asleep, or all of them. Raises `RequestError` for a name that is not served."""
        del request
        services = self._asked(query.model)
        answer: Sleeping = {"is_sleeping": all(service.router.lifecycle.is_asleep for service in services)}
        return Response(orjson.dumps(answer), media_type="application/json")

    def _asked(self, name: str | None) -> Sequence[Service]:
        """The named model, or else all that have not failed. Raises `RequestError`."""
        if name is None:
            return [each for each in self._services if not each.router.lifecycle.failure] or tuple(self._services)
        service = self._services.of(name)
        if name not in service.model.names:
            raise errors.model_not_found(name, self._services.names_of_models)
        return [service]


def _done() -> Response:
    answer: Done = {}
    return Response(orjson.dumps(answer), media_type="application/json")
