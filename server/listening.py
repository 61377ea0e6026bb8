"""uvicorn as this server runs it: its options, its connections' bounds, and the open files that those need."""

from __future__ import annotations

import functools
import logging
import resource
from dataclasses import replace
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from inferd.server.connection import KEEP_ALIVE_S, Connection, ConnectionLimits

logger = logging.getLogger("inferd.server")

_RESERVED_FILES = 256
"""Of the engine's sockets, of files and libraries."""
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
    """Raise this process's limit on open files as far as needed and allowed; what is then open at most is returned."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + _RESERVED_FILES
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft >= wanted:
        return limits
    num = max(1, soft - _RESERVED_FILES)
    asked = limits.max_connections
    logger.warning("%d connections are taken instead of %d: only %d files may be open", num, asked, hard)
    return replace(limits, max_connections=num)
