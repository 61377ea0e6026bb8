"""Endpoints of ZeroMQ: which ones are bound, and the sockets that listen there. Knows no protocol."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

BACKLOG = 100
"""Connections that wait to be accepted."""


def is_bound(endpoint: str) -> bool:
    """Whether peers connect to this endpoint. Otherwise we connect to a peer there."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


class Listener:
    """A socket that listens at an endpoint, and the socket's file if it has one."""

    def __init__(self, endpoint: str) -> None:
        """Replaces a socket's file that is there. Raises `OSError` if the endpoint cannot be bound."""
        self.socket = _open(endpoint)
        name = self.socket.getsockname()
        is_file = self.socket.family == socket.AF_UNIX and isinstance(name, str)
        self._file = Path(name) if is_file else None
        self._inode = _inode(self._file)

    def close(self) -> None:
        """Let others bind the endpoint. A file that another process has put there stays."""
        self.socket.close()
        if self._file is not None and self._inode is not None and _inode(self._file) == self._inode:
            self._file.unlink(missing_ok=True)


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Host and port of a TCP endpoint. Raises `OSError`."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if int(port) > 65535:
        raise OSError(errno.EINVAL, "a port is at most 65535")
    return host.strip("[]"), int(port)


def _open(endpoint: str) -> socket.socket:
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(path).st_mode):
                os.unlink(path)
        address = "\0" + path[1:] if path.startswith("@") else path
        return _bound(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), address)
    host, port = host_and_port(endpoint)
    host = "0.0.0.0" if host == "*" else host
    flags = socket.AI_PASSIVE | socket.AI_NUMERICHOST
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return _bound(listener, place)


def _bound(listener: socket.socket, address: object) -> socket.socket:
    try:
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _inode(path: Path | None) -> int | None:
    if path is None:
        return None
    try:
        return path.stat().st_ino
    except OSError:
        return None
