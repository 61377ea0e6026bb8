"""ZMTP 3.1, the protocol of ZeroMQ, as one peer speaks it without encryption: bytes <-> frames, within bounds.

libzmq bounds one frame and nothing else. It keeps every subscription of a peer, and collects a message of any number of
parts before anybody sees it. So ports that strangers can reach read with `Reader`. Knows no sockets.
The protocol: https://rfc.zeromq.org/spec/37/
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

MAX_FRAME_BYTES = 1024
MAX_PARTS = 8
"""Most parts of a message."""

_MORE, _LONG, _COMMAND = 1, 2, 4
_MECHANISM = b"NULL".ljust(20, b"\0")
_MAJOR, _MINOR = 3, 1
GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes((_MAJOR, _MINOR)) + _MECHANISM + bytes(32)
_VERSION_AT, _MECHANISM_AT = 10, 12
_MAX_PING_CONTEXT = 16


class PeerError(Exception):
    """A peer broke the protocol or a bound, and is disconnected. The text says what it did and what is allowed."""


@dataclass(frozen=True, slots=True)
class Received:
    """One thing that a peer sent."""

    kind: Literal["greeting", "command", "message"]
    parts: tuple[bytes, ...] = ()
    """Name and content of a command, or the parts of a message."""


class Reader:
    """Bytes of one peer that are not read yet: at most one frame, and the parts of one message."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._parts: list[bytes] = []
        self._is_greeted = False

    def feed(self, data: bytes) -> Iterator[Received]:
        """Read on. Raises `PeerError`."""
        self._buffer += data
        if not self._is_greeted:
            self._is_greeted = _take_greeting(self._buffer)
            if not self._is_greeted:
                return
            yield Received("greeting")
        while (frame := _take_frame(self._buffer)) is not None:
            flags, body = frame
            if flags & _COMMAND:
                yield Received("command", _command_parts(flags, body))
                continue
            self._parts.append(body)
            if len(self._parts) > MAX_PARTS:
                raise PeerError(f"it sent a message of more than {MAX_PARTS} parts, the most allowed")
            if not flags & _MORE:
                whole, self._parts = tuple(self._parts), []
                yield Received("message", whole)


def _take_greeting(buffer: bytearray) -> bool:
    """Whether the buffer began with a whole greeting, which is then removed. Raises `PeerError`."""
    if (buffer and buffer[0] != 0xFF) or (len(buffer) >= _VERSION_AT and not buffer[_VERSION_AT - 1] & 1):
        raise PeerError("it does not speak ZeroMQ's protocol")
    if len(buffer) > _VERSION_AT and buffer[_VERSION_AT] < _MAJOR:
        raise PeerError(f"it speaks version {buffer[_VERSION_AT]} of ZeroMQ's protocol; ZeroMQ 4.0 or newer is needed")
    if len(buffer) < len(GREETING):
        return False
    mechanism = bytes(buffer[_MECHANISM_AT : _MECHANISM_AT + len(_MECHANISM)])
    if mechanism != _MECHANISM:
        raise PeerError(f"it asks for the security mechanism {mechanism.rstrip(bytes(1))!a}, but there is only NULL")
    del buffer[: len(GREETING)]
    return True


def _take_frame(buffer: bytearray) -> tuple[int, bytes] | None:
    """(flags, body) of the first frame, which is then removed; None if it is not whole. Raises `PeerError`."""
    if len(buffer) < 2:
        return None
    flags = buffer[0]
    if flags & ~(_MORE | _LONG | _COMMAND):
        raise PeerError(f"it sent a frame with the unknown flags {flags:#04x}")
    begin = 9 if flags & _LONG else 2
    if len(buffer) < begin:
        return None
    num_bytes = int.from_bytes(buffer[1:begin], "big")
    if num_bytes > MAX_FRAME_BYTES:
        raise PeerError(f"it sent a frame of {num_bytes} bytes, but at most {MAX_FRAME_BYTES} are allowed")
    end = begin + num_bytes
    if len(buffer) < end:
        return None
    body = bytes(buffer[begin:end])
    del buffer[:end]
    return flags, body


def _command_parts(flags: int, body: bytes) -> tuple[bytes, bytes]:
    end = 1 + body[0] if body else 0
    if flags & _MORE or end < 2 or len(body) < end:
        raise PeerError("it sent a malformed command")
    return body[1:end], body[end:]


def head(num_bytes: int, *, more: bool) -> bytes:
    """Flags and length, which come before a part of a message."""
    return _head(num_bytes, _MORE if more else 0)


def message(*parts: bytes) -> bytes:
    """A whole message."""
    last = len(parts) - 1
    return b"".join(head(len(part), more=i < last) + part for i, part in enumerate(parts))


def ready(socket_type: bytes) -> bytes:
    """The command that ends the handshake."""
    name = b"Socket-Type"
    return _command(b"READY", bytes((len(name),)) + name + len(socket_type).to_bytes(4, "big") + socket_type)


def ping() -> bytes:
    """A command that the peer answers. It asks for no timeout at the peer."""
    return _command(b"PING", bytes(2))


def pong(content: bytes) -> bytes:
    """The answer to a peer's PING: it repeats the context behind the two bytes of its timeout."""
    return _command(b"PONG", content[2 : 2 + _MAX_PING_CONTEXT])


def socket_type_of(content: bytes) -> bytes:
    """The peer's type of socket, from its READY. Raises `PeerError`."""
    at = 0
    while at < len(content):
        name_end = at + 1 + content[at]
        value_begin = name_end + 4
        end = value_begin + int.from_bytes(content[name_end:value_begin], "big")
        if end > len(content):
            break
        if content[at + 1 : name_end].lower() == b"socket-type":
            return content[value_begin:end]
        at = end
    raise PeerError("it sent a malformed READY: it needs a Socket-Type")


def _command(name: bytes, content: bytes) -> bytes:
    body = bytes((len(name),)) + name + content
    return _head(len(body), _COMMAND) + body


def _head(num_bytes: int, flags: int) -> bytes:
    if num_bytes > 255:
        return bytes((flags | _LONG,)) + num_bytes.to_bytes(8, "big")
    return bytes((flags, num_bytes))
