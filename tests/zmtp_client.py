"""A peer of ZeroMQ that breaks rules, written from the protocol's text alone: https://rfc.zeromq.org/spec/37/"""

from __future__ import annotations

import socket
from pathlib import Path

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
SMALL, MORE, LONG, COMMAND = 0, 1, 2, 4


def frame(body: bytes, flags: int = SMALL) -> bytes:
    if len(body) > 255:
        return bytes((flags | LONG,)) + len(body).to_bytes(8, "big") + body
    return bytes((flags, len(body))) + body


def command(name: bytes, content: bytes = b"") -> bytes:
    return frame(bytes((len(name),)) + name + content, COMMAND)


def ready(socket_type: bytes) -> bytes:
    return command(b"READY", b"\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type)


class Client:
    """A connection to a socket file. Every call ends within 20 s."""

    def __init__(self, path: Path, socket_type: bytes | None = None) -> None:
        """Ends the handshake if a type is given."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(20)
        self.socket.connect(str(path))
        if socket_type is not None:
            self.socket.sendall(GREETING + ready(socket_type))

    def flood(self, pieces: list[bytes], num_rounds: int) -> int:
        """Send the pieces again and again; returns the number of bytes that the server took."""
        num_bytes = 0
        try:
            for _ in range(num_rounds):
                for piece in pieces:
                    self.socket.sendall(piece)
                    num_bytes += len(piece)
        except ConnectionError:
            pass
        return num_bytes

    def rest(self) -> bytes | None:
        """All that the server sends until it closes the connection; None if it does not."""
        found = b""
        try:
            while piece := self.socket.recv(65536):
                found += piece
        except TimeoutError:
            return None
        except ConnectionError:
            pass
        return found
