"""The limits of HTTP connections, and how many connections fit the process's limit on open files.

This file knows no HTTP and no uvicorn, so that `inferd doctor` can ask it too.
"""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass, replace

from inferd.engine.api.errors import ConfigError

logger = logging.getLogger("inferd.server")

RESERVED_FILES = 96
"""Open files that are not connections. A server with a standby has 46 of them. A restart, grammar checks and refused
connections need some more."""
LEAST_CONNECTIONS = 16
"""The server does not start with fewer connections, unless the operator asked for fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """The limits of connections. Times are seconds of the event loop's clock."""

    max_connections: int = 8_192
    max_head_bytes: int = 64 * 1024
    """Maximum size of request line and headers."""
    max_headers: int = 256
    """Maximum number of headers. Every layer that looks for a header reads all of them."""
    max_pipelined: int = 16
    """Maximum number of requests behind the one that is being answered. Later bytes are parsed as answers end."""
    max_framing_bytes: int = 16 * 1024
    """Maximum number of bytes of a chunked body besides its data: chunk extensions and trailers. As in Go's net/http,
    16 bytes per chunk and two for each byte of data do not count."""
    max_pipelined_bytes: int = 64 * 1024
    """Maximum number of bytes of waiting requests. Above it, as above `max_pipelined`, the server stops reading. It
    then notices that the client has gone only at the next request's turn, or when a write fails."""
    head_idle_s: float = 10.0
    """Time for the first byte of a head, and between two of its bytes."""
    head_s: float = 30.0
    """Time for a whole head, from the connection or from its first byte."""
    linger_s: float = 5.0
    """Time for the rest of a body whose answer is complete. The client can read the answer before the connection
    closes."""
    stall_s: float = 120.0
    """Time in which a client must take at least one byte of its answer."""
    write_buffer_bytes: int = 16 * 1024
    """Bytes of answers that this process buffers when the kernel takes no more. A stream then waits."""
    unsent_bytes: int = 64 * 1024
    """Bytes of answers that the kernel buffers before it sends them."""


def connections_within(max_files: int, asked: int, num_reserved: int = RESERVED_FILES) -> int:
    """How many of the `asked` connections fit a limit of `max_files` open files. `RLIM_INFINITY` fits all."""
    return asked if max_files == resource.RLIM_INFINITY else min(asked, max_files - num_reserved)


def fit_open_files(limits: ConnectionLimits, num_held: int = 0) -> ConnectionLimits:
    """Raise this process's soft limit on open files as far as needed and allowed, and fit `max_connections` into it.

    `num_held`: files of models that are held open. Raises `ConfigError` if so few connections remain that the server
    would refuse nearly every client.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    asked, reserved = limits.max_connections, RESERVED_FILES + num_held
    if connections_within(soft, asked, reserved) == asked:
        return limits
    wanted = asked + reserved
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    num = connections_within(allowed, asked, reserved)
    if num == asked:
        return limits
    reason = (
        f"this process may open {allowed} files and needs {reserved} besides its connections; raise the hard "
        "limit (ulimit -Hn, systemd's LimitNOFILE=, Docker's --ulimit nofile=)"
    )
    if num < LEAST_CONNECTIONS:
        raise ConfigError(f"--max-connections {asked} needs more open files than allowed: {reason}")
    logger.warning(
        "the server accepts %d connections instead of %d: %s, or set --max-connections %d", num, asked, reason, num
    )
    return replace(limits, max_connections=num)
