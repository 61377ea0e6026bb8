"""Middleware that counts requests toward the quota of their key. Headers of each answer show what is left of it.

It is pure ASGI. It runs after `middleware.Keys`, which finds the key's holder, and before the body is read, so that a
refusal is cheap. It knows no queue.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferd.engine.api.errors import RequestError
from inferd.server.api.middleware import refusal, route_path
from inferd.server.auth.keyring import Holder


class Quotas:
    """Counts requests to `paths` toward the quota of their key."""

    def __init__(self, app: ASGIApp, paths: Iterable[str]) -> None:
        self._app, self._paths = app, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        holder: Holder | None = scope["state"].get("holder") if scope["type"] == "http" else None
        account = holder.account if holder is not None else None
        if account is None or scope["method"] != "POST" or route_path(scope) not in self._paths:
            await self._app(scope, receive, send)
            return

        async def send_with_quota(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(account.headers())
            await send(message)

        try:
            account.enter()
        except RequestError as error:
            await refusal(scope, error)(scope, receive, send_with_quota)
            return
        try:
            await self._app(scope, receive, send_with_quota)
        finally:
            account.leave()
