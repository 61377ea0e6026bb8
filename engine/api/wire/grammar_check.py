"""Grammars as both processes speak of them: bounds, and the wire to the process that tries them out.

A caller's grammar is compiled first in a process that may be killed: a child of a child process of the server's
(`engine/grammar/check.py`). Frames of a length (4 bytes, little-endian) and a msgpack body travel over the child's
standard input and output, one verdict a question, in any order. Knows no llguidance: this side of the door is loaded by
the HTTP server.
"""

from __future__ import annotations

import sys
from typing import Literal

import msgspec

MAX_GRAMMAR_BYTES = 256 * 1024
"""Most bytes of a grammar as UTF-8: a schema for each of many tools makes long ones."""

CHECK_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inferd.engine.grammar.check")
"""What runs the checking process; its first argument is the checkpoint's folder, its second the embedding's rows."""

CHECK_CPU_S = 1.0
"""Most processor time that a grammar may take to be tried out: three times what the slowest valid one of a service took
(0.3 s; one core, AMD EPYC Zen 4, 2026-11-22). Not time on the clock: a busy machine makes no grammar invalid."""

CHECK_MEMORY_BYTES = 512 * 2**20
"""Address space that the checking process may take beyond what its tokenizer needs."""

MAX_REASON = 300
"""Most characters of a compiler's complaint that travel."""

FRAME_HEADER_BYTES = 4


class Question(msgspec.Struct, frozen=True, array_like=True):
    """A grammar to be tried out, within so much time."""

    number: int
    text: str
    cpu_s: float
    wall_s: float
    is_nice: bool = False
    """The machine's other work comes first."""


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What came of a grammar: how the engine is to be given it, or why it cannot be served."""

    text: str = ""
    error: str = ""
    """Empty where it was taken."""
    is_broken: bool = False
    """The error is this model's or this machine's, not the grammar's."""
    stopped: Literal["", "cpu", "wall"] = ""
    """Which of its times ran out before anything was known."""
    number: int = 0
    """Of the question; 0: the process is ready for questions, or says why it never will be."""


_ENCODER = msgspec.msgpack.Encoder()
_QUESTION_DECODER = msgspec.msgpack.Decoder(Question)
_VERDICT_DECODER = msgspec.msgpack.Decoder(Verdict)


def frame_of(message: Question | Verdict) -> bytes:
    """A message as it travels."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(FRAME_HEADER_BYTES, "little") + body


def body_length(header: bytes) -> int:
    return int.from_bytes(header, "little")


def read_question(body: bytes) -> Question:
    """Raises `msgspec.MsgspecError`."""
    return _QUESTION_DECODER.decode(body)


def read_verdict(body: bytes) -> Verdict:
    """The answer. Raises `msgspec.MsgspecError`."""
    return _VERDICT_DECODER.decode(body)
