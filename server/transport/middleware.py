"""The middleware that every request passes through, in pure ASGI. It buffers no body and no response.

The order, outermost first, is `RequestIds`, `AnswerMetrics`, `AccessLog`, `LastResort`, `BodyLimit`. `app` puts the
middleware of `access` between them, and that of traces. This file knows a route's path template, whether its requests
are logged, and whether it belongs to Anthropic's API. It knows no keys and logs no bodies. Paths are without the prefix
that a proxy removes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.errors import anthropic as anthropic_errors
from inferd.server.errors import messages as errors
from inferd.server.errors import table
from inferd.server.observability.metrics import Metrics
from inferd.server.schema.generation import is_sane_id
from inferd.server.schema.notices import Notice, header_of, names_of

MIN_BODY_RATE = 16 * 1024
"""Minimum bytes per second, 128 kbit/s. 16 MiB may take 17 minutes."""

MAX_HELD_BYTES = 2**30
"""Maximum number of bytes of all bodies whose requests are not answered yet. Thousands of connections could send 16 MiB
each, but the memory plan gives that memory to the model."""
MAX_TENANT_SHARE = 0.75
"""Fraction of `MAX_HELD_BYTES` that one tenant may fill, so that bodies of other tenants are still read."""

access_logger = logging.getLogger("inferd.access")
logger = logging.getLogger("inferd.server")

WARNING_HEADER = "x-inferd-warning"

_UNAVAILABLE = 503

_FIELD = re.compile(r"\w+(\[\d+\])*")
"""The field that a param begins with, such as `tools[4]`."""
_CLIENT_GONE = 499
"""Status of an answer of which nothing was sent, as in nginx."""


@dataclass(slots=True)
class Sent:
    """The part of an answer that was sent so far."""

    status: int = _CLIENT_GONE
    num_bytes: int = 0
    """Number of bytes of the body."""

    @property
    def has_begun(self) -> bool:
        return self.status != _CLIENT_GONE


class RequestIds:
    """Adds `x-request-id` to every answer: the caller's own id if it is well-formed, otherwise a new one.

    Anthropic's clients read it as `request-id`. Inner layers find in the request's state how much of the answer was
    `sent`, and add `notices` to it, which become a header of the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if is_sane_id(given) else f"req_{secrets.token_hex(16)}"
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["arrival_s"] = time.monotonic()
        state["tenant"] = ""
        state["sent"] = sent = Sent()
        notices: list[Notice] = []
        state["notices"] = notices
        names = ("x-request-id", "request-id") if is_anthropic(scope) else ("x-request-id",)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent.status = message["status"]
                headers = MutableHeaders(scope=message)
                for name in names:
                    headers[name] = request_id
                if notices:
                    headers[WARNING_HEADER] = header_of(notices)
            else:
                sent.num_bytes += len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_with_id)


class AnswerMetrics:
    """Counts and times every answer up to its last byte, by the template of its route. Counts notices, and refusals by
    tenant."""

    def __init__(self, app: ASGIApp, metrics: Metrics, templates: Iterable[str]) -> None:
        """`templates`: the paths of all routes."""
        self._app, self._metrics = app, metrics
        self._exact = {template for template in templates if "{" not in template}
        self._patterns = {template: compile_path(template)[0] for template in templates if "{" in template}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            state = scope["state"]
            template, duration_s = self._template(route_path(scope)), time.monotonic() - state["arrival_s"]
            self._metrics.http_request(template, scope["method"], state["sent"].status, duration_s)
            if state["notices"]:
                self._metrics.notices_sent(names_of(state["notices"]))
            if state["tenant"] and "refused_with" in state:
                self._metrics.tenant_refused_with(state["tenant"], state["refused_with"])

    def _template(self, path: str) -> str:
        if path in self._exact:
            return path
        return next((template for template, pattern in self._patterns.items() if pattern.match(path)), "unknown")


class AccessLog:
    """Logs one line per request when its answer has ended. The line of a failure, even inside a stream, has the
    error's code, its param and the request's model. The lines of probes and scrapes have the debug level."""

    def __init__(self, app: ASGIApp, quiet_paths: Iterable[str]) -> None:
        self._app, self._quiet_paths = app, frozenset(quiet_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._log(scope, scope["state"]["sent"])

    def _log(self, scope: Scope, sent: Sent) -> None:
        state = scope["state"]
        fields = {
            "method": scope["method"],
            "path": errors.clip(scope["path"].encode("unicode_escape").decode(), errors.MAX_ECHO),
            "status": sent.status,
            "duration_ms": round((time.monotonic() - state["arrival_s"]) * 1_000, 1),
            "response_bytes": sent.num_bytes,
            "request_id": state["request_id"],
        }
        line = "%(method)s %(path)s %(status)d %(duration_ms).1f ms %(response_bytes)d B %(request_id)s"
        if "cause" in state:
            code, param = state["cause"]
            # A key within a field may be the caller's own text, which no log holds. So may a field that is unknown.
            field = None if param is None or code == "unknown_parameter" else _FIELD.match(param)
            place = None if field is None else field[0]
            # The same holds for the name of a model that is not served.
            model = state.get("model")
            served = model if model in scope["app"].state.services.names else None
            for name, value in (("code", code), ("param", place), ("model", served)):
                if value:
                    fields[name] = errors.clip(value.encode("unicode_escape").decode(), errors.MAX_ECHO)
                    line += f" {name}=%({name})s"
        if state["notices"]:
            fields["notices"] = ",".join(names_of(state["notices"]))
            line += " %(notices)s"
        # A probe's 503 is its normal answer while the server starts, stops, or has no engine, which other lines say.
        is_quiet = route_path(scope) in self._quiet_paths and (sent.status < 500 or sent.status == _UNAVAILABLE)
        level = logging.DEBUG if is_quiet else logging.INFO
        access_logger.log(level, line, fields, extra=fields)


class LastResort:
    """Handles unexpected exceptions: logs them with their stack, and answers without it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except Exception:
            logger.exception("request %s failed", scope["state"]["request_id"])
            if scope["state"]["sent"].has_begun:
                # The connection must break, or the client would mistake half an answer for a whole one.
                raise
            await refusal(scope, errors.internal_error())(scope, receive, send)


class BodyLimit:
    """Refuses bodies that are compressed, too large or too slow.

    A body is too large if it states or reaches more than `max_bytes`. It is too slow if nothing comes for `idle_s`, or
    if it is slower than `MIN_BODY_RATE` after that time. A body is also refused if all bodies together would exceed
    `MAX_HELD_BYTES`, or those of one tenant its share. A lone body within `max_bytes` always fits.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, idle_s: float) -> None:
        self._app, self._max_bytes, self._idle_s = app, max_bytes, idle_s
        self._num_held, self._max_held = 0, max(MAX_HELD_BYTES, max_bytes)
        self._held_by: Counter[str] = Counter()
        self._max_held_by_one = max(int(MAX_HELD_BYTES * MAX_TENANT_SHARE), max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = self._check(Headers(scope=scope))
        if error is not None:
            await refusal(scope, error)(scope, receive, send)
            return
        began_s, num_bytes, is_whole, tenant = time.monotonic(), 0, False, scope["state"]["tenant"]

        async def pace() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:
                return await receive()  # to learn that the client has gone
            left_s = min(self._idle_s, began_s + self._idle_s + num_bytes / MIN_BODY_RATE - time.monotonic())
            try:
                async with asyncio.timeout(left_s):
                    message = await receive()
            except TimeoutError as late:
                raise self._too_slow(num_bytes) from late
            num_new = len(message.get("body", b""))
            num_bytes += num_new
            self._num_held += num_new
            self._held_by[tenant] += num_new
            if num_bytes > self._max_bytes:
                raise self._too_large()
            if self._num_held > self._max_held:
                raise self._too_many(f"The bodies of all current requests together exceed {self._max_held}")
            if self._held_by[tenant] > self._max_held_by_one:
                raise self._too_many(f"The bodies of your current requests together exceed {self._max_held_by_one}")
            is_whole = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, pace, send)
        finally:
            self._num_held -= num_bytes
            self._held_by[tenant] -= num_bytes
            if not self._held_by[tenant]:
                del self._held_by[tenant]

    def _check(self, headers: Headers) -> RequestError | None:
        encoding = headers.get("content-encoding", "identity").strip()
        if encoding.lower() != "identity":
            message = f"This server does not decode the Content-Encoding '{errors.shown(encoding)}'. Send a plain body."
            return RequestError("unsupported_content_type", message)
        stated = headers.get("content-length", "")
        if stated.isdigit() and (len(stated) > 18 or int(stated) > self._max_bytes):
            return self._too_large()
        return None

    def _too_large(self) -> RequestError:
        message = f"The request body is too large: this server accepts at most {self._max_bytes} bytes."
        return RequestError("request_too_large", message)

    def _too_many(self, what: str) -> RequestError:
        return RequestError(
            "server_is_overloaded",
            f"{what} bytes, the maximum that this server holds at the same time. Try again later.",
        )

    def _too_slow(self, num_bytes: int) -> RequestError:
        message = (
            f"The request body did not arrive in time: after {num_bytes} bytes nothing came for {self._idle_s:g} s, or "
            f"the mean rate fell below {MIN_BODY_RATE} bytes per second."
        )
        return RequestError("deadline_exceeded", message)


def refusal(scope: Scope, error: RequestError | EngineDeadError) -> Response:
    """An error in the shape of the API that the path belongs to. The request's state gets it, for the log and the
    metrics."""
    scope["state"]["cause"] = table.cause_of(error)
    if isinstance(error, RequestError):
        scope["state"]["refused_with"] = error.code
    if is_anthropic(scope):
        return anthropic_errors.response_of(error, scope["state"]["request_id"])
    return table.response_of(error)


def route_path(scope: Scope) -> str:
    """The path as the routes know it, without the proxy's prefix that the server adds."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_anthropic(scope: Scope) -> bool:
    """Whether the path belongs to Anthropic's API."""
    return anthropic_errors.is_anthropic(route_path(scope))
