"""uvicorn as this server runs it: its options, and its server class with methods that end connections."""

from __future__ import annotations

import contextlib
import functools
import math
import socket
from collections.abc import Iterator

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


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, but with methods that end connections."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Like uvicorn's, but the application shuts down in order even if connections were aborted."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def say_close(self) -> None:
        """Close each connection after its answer, so that the client's next request goes to another server.

        uvicorn's default headers do it. A middleware would run for each piece of a stream.
        """
        close = (b"connection", b"close")
        self.config.encoded_headers.append(close)
        self.server_state.default_headers = [*self.server_state.default_headers, close]

    def give_time(self, seconds: float) -> None:
        """At exit, wait this long for answers that are still being written, but at least as long as configured."""
        least_s = self.config.timeout_graceful_shutdown or 0
        self.config.timeout_graceful_shutdown = max(least_s, math.ceil(seconds))

    def break_off(self) -> None:
        """Abort all connections."""
        self.force_exit = True
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()

    def close_idle(self) -> None:
        """Close idle connections now, and the others after their answers."""
        for connection in tuple(self.server_state.connections):
            connection.shutdown()
