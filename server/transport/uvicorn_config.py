"""uvicorn's options for this server."""

from __future__ import annotations

import functools

import uvicorn
from starlette.types import ASGIApp

from inferd.server.observability.metrics import Metrics
from inferd.server.transport.connection import KEEP_ALIVE_S, Connection
from inferd.server.transport.limits import ConnectionLimits

_CLOSE_GRACE_S = 5


def http_config(
    app: ASGIApp, metrics: Metrics, limits: ConnectionLimits | None = None, root_path: str = ""
) -> uvicorn.Config:
    """Options for `app`. Refused connections are counted under the route "connection"."""
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
        # Streams have ended by then. What remains are bodies that never come, and clients that read slowly, to which
        # `Drain` gives the rest of its time.
        timeout_graceful_shutdown=_CLOSE_GRACE_S,
    )
