"""uvicorn as this server runs it: its options, its connections' bounds, and the open files that those need."""

from __future__ import annotations

import functools
import logging
import resource
from dataclasses import replace
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from inferd.engine.api.errors import ConfigError
from inferd.server.transport.connection import KEEP_ALIVE_S, Connection, ConnectionLimits

logger = logging.getLogger("inferd.server")

_RESERVED_FILES = 96
"""Open files besides connections. A server with a standby has 46; a restart, grammar checks and connections that are
refused need some more."""
_LEAST_CONNECTIONS = 16
"""The server does not start with fewer, unless they were asked for."""
_CLOSE_GRACE_S = 5


class HttpMetrics(Protocol):
    """What counts answers."""

    def http_request(self, route: str, method: str, status: int, duration_s: float) -> None: ...


def http_config(
    app: ASGIApp, metrics: HttpMetrics, limits: ConnectionLimits | None = None, root_path: str = ""
) -> uvicorn.Config:
    """Refused connections are counted under the route "connection"."""
    connection = functools.partial(
        Connection,
        limits=limits or ConnectionLimits(),
        on_refused=lambda status: metrics.http_request("connection", "OTHER", status, 0.0),
    )
    return uvicorn.Config(
        app,
        loop="none",
        http=connection,  # type: ignore[arg-type]  # called like the class
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=root_path,
        timeout_keep_alive=KEEP_ALIVE_S,
        # Streams have ended by then: what is left is a client that reads slowly, for which `Drain` gives what time it
        # has left, or a body that never comes.
        timeout_graceful_shutdown=_CLOSE_GRACE_S,
    )


def fit_open_files(limits: ConnectionLimits) -> ConnectionLimits:
    """Raise this process's limit on open files as far as needed and allowed, and fit `max_connections` into it.

    Raises `ConfigError` if so few connections remain that the server would refuse nearly everybody.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    asked = limits.max_connections
    wanted = asked + _RESERVED_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    num = allowed - _RESERVED_FILES
    if num >= asked:
        return limits
    reason = (
        f"this process may open {allowed} files and needs {_RESERVED_FILES} besides its connections; raise the hard "
        "limit (ulimit -Hn, systemd's LimitNOFILE=, Docker's --ulimit nofile=)"
    )
    if num < _LEAST_CONNECTIONS:
        raise ConfigError(f"--max-connections {asked} needs more open files than are allowed: {reason}")
    logger.warning("the server takes %d connections, not %d: %s, or set --max-connections %d", num, asked, reason, num)
    return replace(limits, max_connections=num)
