"""Grammars as both processes speak of them: bounds, and the wire to the process that tries them out.

A caller's grammar is compiled first in a child process of the server's (`engine/grammar/check.py`), which may be
killed: frames of a length (4 bytes, little-endian) and a msgpack body over its standard input and output, one answer a
question, in order. Knows no llguidance: this side of the door is loaded by the HTTP server.
"""

from __future__ import annotations

import sys

import msgspec

MAX_GRAMMAR_BYTES = 256 * 1024
"""Most bytes of a grammar as UTF-8: a schema for each of many tools makes long ones."""

CHECK_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inferd.engine.grammar.check")
"""What runs the checking process; its first argument is the checkpoint's folder, its second the embedding's rows."""

CHECK_TIMEOUT_S = 2.0
"""Longest that a grammar may take to be tried out; the process is killed then."""

CHECK_MEMORY_BYTES = 512 * 2**20
"""Address space that the checking process may take beyond what its tokenizer needs."""

MAX_REASON = 300
"""Most characters of a compiler's complaint that travel."""

FRAME_HEADER_BYTES = 4


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What came of a grammar: how the engine is to be given it, or why it cannot be served."""

    text: str = ""
    error: str = ""
    """Empty where it was taken."""
    is_broken: bool = False
    """The error is this model's or this machine's, not the grammar's."""


_ENCODER = msgspec.msgpack.Encoder()
_TEXT_DECODER = msgspec.msgpack.Decoder(str)
_VERDICT_DECODER = msgspec.msgpack.Decoder(Verdict)


def frame_of(message: str | Verdict) -> bytes:
    """A message as it travels."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(FRAME_HEADER_BYTES, "little") + body


def body_length(header: bytes) -> int:
    return int.from_bytes(header, "little")


def read_text(body: bytes) -> str:
    """A grammar to be checked. Raises `msgspec.MsgspecError`."""
    return _TEXT_DECODER.decode(body)


def read_verdict(body: bytes) -> Verdict:
    """The answer. Raises `msgspec.MsgspecError`."""
    return _VERDICT_DECODER.decode(body)
