"""Middleware that decides who may call: web pages of allowed origins, then holders of keys, within their quotas.

It is pure ASGI. It runs before the body is read, so that a refusal is cheap. It knows no queue and logs no key.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferd.engine.api.errors import RequestError
from inferd.server.auth.keyring import Holder, Keyring
from inferd.server.errors import messages as errors
from inferd.server.transport.middleware import is_anthropic, refusal, route_path

ANY = "*"
_AUTHORITY = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:/?#@\s]+))(?::\d*)?")


class Origins:
    """Refuses requests of web pages that the operator did not list, preflights included.

    Any page that is open in a browser can send requests to a loopback address. If the server requires a key, the page
    has none. Otherwise two headers reveal the page, because it cannot change them: `Origin` names it, and `Host` holds
    the page's own name if its DNS answers with a loopback address (DNS rebinding).
    """

    def __init__(
        self, app: ASGIApp, allowed_origins: Collection[str], allowed_hosts: Collection[str] | None, *, asks_keys: bool
    ) -> None:
        """`allowed_hosts`: names that `Host` may hold besides those of the loopback; None allows any."""
        self._app, self._origins, self._hosts = app, allowed_origins, allowed_hosts
        self._asks_keys = asks_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope) if scope["type"] == "http" else None
        if error is not None:
            await refusal(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._hosts is not None and not self._is_known(host):
            return _unknown_host(host)
        if origin is None or origin in self._origins or ANY in self._origins:
            return None
        is_preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        if is_preflight or not (self._asks_keys or _is_own(origin, host)):
            return _foreign_origin(origin)
        return None

    def _is_known(self, host: str) -> bool:
        assert self._hosts is not None
        name = host_name(host)
        # HTTP/1.0 needs no Host, but browsers always send one.
        return not name or is_loopback_name(name) or name in self._hosts or ANY in self._hosts


class Keys:
    """Lets requests pass that have a valid key or ask for a public path. If the server has no keys, all may pass.

    It sets three values in the request's state: `role` is "admin" for an admin key, "user" for another key, otherwise
    "". `holder` is the key's holder, or None. `key_error` says what is wrong with a key that was sent, or is None.
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
        state["needs_key"], state["key_error"] = not self._keyring.is_open, None
        if self._keyring.is_empty:
            return None
        keys = _keys_of(scope)
        if not keys:
            also = " or 'x-api-key: YOUR_KEY'" if is_anthropic(scope) else ""
            message = f"You didn't provide an API key. Send it in a header: 'Authorization: Bearer YOUR_KEY'{also}."
            return RequestError("invalid_api_key", message)
        # If there are two, a proxy in front of this server may have checked the other one.
        holder = self._keyring.find(*keys) if len(keys) == 1 else None
        if holder is None:
            is_one = len(keys) == 1
            message = "Incorrect API key provided." if is_one else "Your request has two different API keys. Send one."
            error = state["key_error"] = RequestError("invalid_api_key", message)
            return error
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


def host_name(host: str) -> str:
    """The name or address of a `Host` header or an origin, without its port. Malformed text is returned unchanged."""
    host = host.strip().lower()
    match = _AUTHORITY.fullmatch(host)
    return host if match is None else (match[1] or match[2]).removesuffix(".")


def is_loopback_name(name: str) -> bool:
    """Whether the name stands for this machine. No DNS answers for names below localhost (RFC 6761)."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_own(origin: str, host: str) -> bool:
    """Whether the page comes from this server, or from another server on this machine."""
    scheme, _, authority = origin.partition("://")
    return scheme in ("http", "https") and (authority == host.lower() or is_loopback_name(host_name(authority)))


def _unknown_host(host: str) -> RequestError:
    shown = errors.shown(host)
    message = (
        f"The header 'Host' is '{shown}', but a server without keys accepts only names of this machine, such as "
        "localhost. If a proxy forwards this name, start the server with --allowed-hosts and the name, or with keys."
    )
    return RequestError("origin_not_allowed", message)


def _foreign_origin(origin: str) -> RequestError:
    shown = errors.shown(origin)
    message = (
        f"Web pages of '{shown}' may not call this server. To allow them, start the server with --allowed-origins and "
        "this origin."
    )
    return RequestError("origin_not_allowed", message)
