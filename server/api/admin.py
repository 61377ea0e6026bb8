"""What an operator may ask of a running server: /config and /reset_prefix_cache. Served with an admin key alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import RequestError
from inferd.server.api.respond import check_ready
from inferd.server.api.service import Service
from inferd.server.text.json_bytes import any_json

Handler = Callable[..., Awaitable[Response]]


class AdminApi:
    """The routes' handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def config(self, request: Request) -> Response:
        """Setting -> value, source and what it became. Keys are counted, never shown."""
        del request
        return Response(any_json(self._service.config), media_type="application/json")

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Blocks that running requests hold stay theirs. Raises `RequestError` where there is no engine to tell."""
        del request
        check_ready(self._service.router)
        self._service.router.reset_prefix_cache()
        return Response(b"{}", media_type="application/json")


def not_served(why: str) -> Handler:
    """A route that other servers have: 501, with the way out."""

    async def refuse(request: Request) -> Response:
        del request
        raise RequestError("not_implemented", why)

    return refuse


async def admin_only(request: Request) -> None:
    """A dependency of a route that only administrators may call, as the `Keys` middleware knows them.

    It belongs to the route, so that no spelling of the path goes around it. Raises `RequestError`.
    """
    role = request.state.role
    if role != "admin":
        raise _refused(role, has_admin_keys=request.state.has_admin_keys)


def at_port(port: int, *, is_there: bool) -> Callable[[Request], Awaitable[None]]:
    """A dependency of a route that is served at the local `port` alone, or at every other port; elsewhere it is a 404.

    It asks for the socket that the connection came to, which no header can change.
    """

    async def check(request: Request) -> None:
        if (request.scope["server"][1] == port) is not is_there:
            raise HTTPException(404)

    return check


def _refused(role: str, *, has_admin_keys: bool) -> RequestError:
    if not has_admin_keys:
        message = "This route is served with an admin key alone, and none is set: start the server with --admin-key."
    elif role == "user":
        message = "This route is served with an admin key alone; the API key that was sent is none."
    else:
        message = "You didn't provide an admin key. Send it in a header: 'Authorization: Bearer YOUR_ADMIN_KEY'."
        return RequestError("invalid_api_key", message)
    return RequestError("insufficient_permissions", message)
