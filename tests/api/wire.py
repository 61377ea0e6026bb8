"""Requests as bytes, for requests that no client library would send."""

from __future__ import annotations

import json
import socket
import sys
from typing import Any
from urllib.parse import urlsplit

from .conftest import WAIT_S

CLOSE = b"Connection: close\r\n"


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname or "", address.port or 0), WAIT_S)


def raw(path: str, body: dict[str, Any] | None = None, headers: bytes = b"") -> bytes:
    """The bytes of a request."""
    data = b"" if body is None else json.dumps(body).encode()
    method = b"GET" if body is None else b"POST"
    return b"%b %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n" % (
        method, path.encode(), len(data), headers
    ) + data  # fmt: skip


def say(url: str, data: bytes, num_read: int = sys.maxsize) -> bytes:
    """Send the bytes, read so many bytes of the answer, and disconnect."""
    got = b""
    with connect(url) as client:
        client.sendall(data)
        while len(got) < num_read and (piece := client.recv(65536)):
            got += piece
    return got
