"""Refuses requests of web pages that may not call this server.

Any page that is open in a browser can send requests to a loopback address. If the server requires a key, the page has
none. Otherwise two headers reveal the page, because it cannot change them: `Origin` names it, and `Host` holds the
page's own name if its DNS answers with a loopback address (DNS rebinding). This file knows no routes and no keys.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from inferd.engine.api.errors import RequestError
from inferd.server.api.middleware import refusal
from inferd.server.errors import table as errors

ANY = "*"
_AUTHORITY = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:/?#@\s]+))(?::\d*)?")


class Origins:
    """Refuses requests of web pages that the operator did not list, preflights included."""

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
