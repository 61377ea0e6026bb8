"""Middleware that finds the holder of a request's key, and then counts the request toward the quota of that key.

It is pure ASGI. It runs before the body is read, so that a refusal is cheap. It knows no queue and logs no key.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferd.engine.api.errors import RequestError
from inferd.server.api.middleware import is_anthropic, refusal, route_path
from inferd.server.auth.keyring import Holder, Keyring


class Keys:
    """Lets requests pass that have a valid key or ask for a public path. If the server has no keys, all may pass.

    It sets two values in the request's state: `role` is "admin" for an admin key, "user" for another key, otherwise "".
    `holder` is the key's holder, or None.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, public_paths: Iterable[str]) -> None:
        """An admin key opens every route. If there are only admin keys, they protect only the admin routes."""
        self._app, self._keyring, self._public_paths = app, keyring, frozenset(public_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._check(scope)
            if error is not None and not self._keyring.is_open and route_path(scope) not in self._public_paths:
                await refusal(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> RequestError | None:
        """Set the caller in the request's state. Returns the error of the key, or None."""
        state = scope["state"]
        state["role"], state["has_admin_keys"], state["holder"] = "", self._keyring.has_admins, None
        state["needs_key"] = not self._keyring.is_open
        if self._keyring.is_empty:
            return None
        keys = _keys_of(scope)
        if not keys:
            also = " or 'x-api-key: YOUR_KEY'" if is_anthropic(scope) else ""
            message = f"You didn't provide an API key. Send it in a header: 'Authorization: Bearer YOUR_KEY'{also}."
            return RequestError("invalid_api_key", message)
        if len(keys) > 1:
            # A proxy in front of this server may have checked the other one.
            return RequestError("invalid_api_key", "Your request has two different API keys. Send one.")
        holder = self._keyring.find(*keys)
        if holder is None:
            return RequestError("invalid_api_key", "Incorrect API key provided.")
        state["role"], state["tenant"], state["holder"] = "admin" if holder.is_admin else "user", holder.tenant, holder
        return None


class Quotas:
    """Counts requests to `paths` toward the quota of their key. Headers of each answer show what is left of it."""

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


def _keys_of(scope: Scope) -> set[str]:
    """The different keys in the headers. Some clients send a key twice, as bearer token and in `x-api-key`."""
    headers = Headers(scope=scope)
    parts = [value.partition(" ") for value in headers.getlist("authorization")]
    found = {key.strip() for scheme, _, key in parts if scheme.lower() == "bearer"}
    if is_anthropic(scope):
        found.update(key.strip() for key in headers.getlist("x-api-key"))
    return found - {""}
