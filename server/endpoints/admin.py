"""The admin routes: settings, prefix cache and adapters, and the checks that let only admin keys call them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import ModelError, RequestError
from inferd.server.config.names import NAME_RULE, is_name
from inferd.server.endpoints.body import ResetQuery, body_of, query_of
from inferd.server.endpoints.respond import check_ready
from inferd.server.endpoints.service import Service, Services
from inferd.server.errors import messages as errors
from inferd.server.schema.adapters import LoadAdapterRequest, UnloadAdapterRequest
from inferd.server.schema.answers.operation import Done
from inferd.server.schema.strict_json import any_json

logger = logging.getLogger(__name__)

Handler = Callable[..., Awaitable[Response]]


class AdminApi:
    """The routes' handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._reading = asyncio.Lock()
        """Held while an adapter's files are read: several threads that parse would slow the event loop together."""

    async def config(self, request: Request) -> Response:
        """Setting -> its value, its source and what it became. Keys are counted, never shown.

        They are those of the first model. `models` has those of the others that differ.
        """
        del request
        first, *others = self._services
        config = dict(first.config)
        if others:
            config["models"] = {
                "value": ", ".join(service.model.names[0] for service in self._services),
                "source": first.config["models"]["source"],
                "became": {
                    other.model.names[0]: {
                        name: setting for name, setting in other.config.items() if setting != first.config[name]
                    }
                    for other in others
                },
            }
        return Response(any_json(config), media_type="application/json")

    async def reset_prefix_cache(
        self, request: Request, query: Annotated[ResetQuery, query_of(ResetQuery)]
    ) -> Response:
        """Running requests keep the blocks that they hold. Answers before the directory is cleared, which the engines
        do beside their steps. Raises `RequestError` if there is no engine."""
        del request
        with_running, with_tiers = bool(query.reset_running_requests), bool(query.reset_external)
        refused: RequestError | None = None
        for service in [service for service in self._services if not service.router.lifecycle.failure]:
            name = service.model.names[0]
            try:
                check_ready(service.router.lifecycle, name)
                is_told = service.router.reset_prefix_cache(with_running=with_running, with_tiers=with_tiers)
                if with_tiers and not is_told:
                    raise errors.no_engine_to_clear(name)
            except RequestError as error:
                refused = refused or error  # the others are cleared all the same
        if refused is not None:
            raise refused
        answer: Done = {}
        return Response(orjson.dumps(answer), media_type="application/json")

    async def load_adapter(
        self, request: Request, body: Annotated[LoadAdapterRequest, body_of(LoadAdapterRequest)]
    ) -> Response:
        """Answers when the adapter can be used. Raises `RequestError` if it cannot be loaded."""
        del request
        service, name, path = self._base(body.base_model_name), body.lora_name, body.lora_path
        check_ready(service.router.lifecycle, service.model.names[0])
        others = (each for each in self._services if each is not service)
        if not is_name(name):
            raise errors.invalid_value("lora_name", name, f"Expected {NAME_RULE}.")
        if name in service.model.names or any(name in other.names for other in others):
            raise errors.invalid_value("lora_name", name, "Expected a name that no model or adapter has.")
        try:
            async with self._reading:
                files = await asyncio.to_thread(service.router.adapters.read, name, Path(path))
        except ModelError as error:
            raise RequestError("invalid_value", f"{error}.", "lora_path") from error
        await service.router.adapter_loading.load(name, files)
        logger.info("adapter %r is served from %s", name, files.path)
        return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")

    async def unload_adapter(
        self, request: Request, body: Annotated[UnloadAdapterRequest, body_of(UnloadAdapterRequest)]
    ) -> Response:
        """Raises `RequestError` if there is no such adapter."""
        del request
        name = body.lora_name
        found = (service.router.adapters for service in self._services if name in service.router.adapters.named)
        adapters = next(found, None)
        if adapters is None:
            message = f"The LoRA adapter '{errors.clip(name, errors.MAX_ECHO)}' is not loaded."
            raise RequestError("model_not_found", message, "lora_name")
        served = adapters.named[name]
        adapters.leave(served)
        logger.info("adapter %r is unloaded; %d sequences that use it go on", name, served.num_requests)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")

    def _base(self, name: str | None) -> Service:
        """The model that an adapter is for. Raises `RequestError`."""
        if name is None and self._services.are_several:
            raise errors.missing("base_model_name", "This server has several models: name the adapter's.")
        service = self._services.of(name)
        if name is not None and name not in service.model.names:
            raise errors.model_not_found(name, self._services.names_of_models)
        return service


def not_served(why: str) -> Handler:
    """A handler for a route that only other servers have. It answers 501 with the reason."""

    async def refuse(request: Request) -> Response:
        del request
        raise RequestError("not_implemented", why)

    return refuse


async def admin_only(request: Request) -> None:
    """A dependency of routes that only admin keys may call. The `Keys` middleware has found the caller's role.

    It belongs to the route, so no other spelling of the path avoids it. Raises `RequestError`.
    """
    state = request.state
    if state.role != "admin":
        raise _refused(state.role, state.key_error, has_admin_keys=state.has_admin_keys)


def at_port(port: int, *, is_there: bool) -> Callable[[Request], Awaitable[None]]:
    """A dependency of routes that exist only at the local `port`, or only at other ports. Elsewhere they are a 404.

    It looks at the connection's own socket, which no header can change.
    """

    async def check(request: Request) -> None:
        if (request.scope["server"][1] == port) is not is_there:
            raise HTTPException(404)

    return check


def _refused(role: str, key_error: RequestError | None, *, has_admin_keys: bool) -> RequestError:
    if not has_admin_keys:
        message = "This route needs an admin key, but the server has none: start the server with --admin-key."
    elif role == "user":
        message = "This route needs an admin key, but you sent an API key of a client."
    elif key_error is not None:
        return key_error
    else:
        message = "You didn't provide an admin key. Send it in a header: 'Authorization: Bearer YOUR_ADMIN_KEY'."
        return RequestError("invalid_api_key", message)
    return RequestError("insufficient_permissions", message)
