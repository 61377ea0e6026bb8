"""Bounds of grammars, and the wire to the process that checks them.

A client's grammar is first compiled in a process that may be killed: a child of a child process of the server
(`engine/grammar/check.py`). Frames travel over the child's standard input and output: a length (4 bytes, little-endian)
and a msgpack body. Each question gets one verdict, in any order. The HTTP server imports this file, so it does not
import llguidance.
"""

from __future__ import annotations

import sys
from typing import Literal

import msgspec

MAX_GRAMMAR_BYTES = 256 * 1024
"""Most bytes of a grammar as UTF-8. Schemas of many tools make long grammars."""

MAX_LARK_CHARS = 4 * MAX_GRAMMAR_BYTES
"""Most characters of a grammar after its schemas are written in Lark, four times as long as the schemas were."""

CHECK_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inferd.engine.grammar.check")
"""Command of the checking process. Its arguments: the checkpoint's folder, the number of rows of the embedding,
the path of the server's file for the vocabulary, and the files that the server holds open."""

CHECK_CPU_S = 1.0
"""Most processor time for the check of a grammar: three times that of the slowest valid one of a service (0.3 s; one
core, AMD EPYC Zen 4, 2026-11-22). Clock time does not count, so a busy machine makes no grammar invalid."""

CHECK_MEMORY_BYTES = 512 * 2**20
"""Most address space that the checking process may use beyond that of its tokenizer."""

MAX_REASON = 300
"""Most characters of a compiler's error that are sent."""

MAX_LEFT = 64
"""Most parts of schemas that a verdict names as left to the model."""

FRAME_HEADER_BYTES = 4


class Question(msgspec.Struct, frozen=True, array_like=True):
    """A grammar to check, with the time allowed for it."""

    number: int
    text: str
    cpu_s: float
    wall_s: float
    is_nice: bool = False
    """Whether to check at low priority."""


class Left(msgspec.Struct, frozen=True, array_like=True):
    """A part of a schema that is left to the model."""

    text: str
    """The part's path in the request, and why it is not enforced."""
    is_whole: bool = False
    """Whether that is the whole schema, not a keyword."""


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """Result of a check: the grammar's text for the engine, or why it cannot be served."""

    text: str = ""
    error: str = ""
    """Why the grammar was refused; empty if it was accepted."""
    is_broken: bool = False
    """Whether the error comes from this model or machine, not from the grammar."""
    stopped: Literal["", "cpu", "wall"] = ""
    """The time that ran out before there was a result."""
    number: int = 0
    """Number of the question. A verdict with 0 says that the process is ready, or why it never will be."""
    left: tuple[Left, ...] = ()
    """Parts of schemas that are not enforced. Their schemas are not strict."""


_ENCODER = msgspec.msgpack.Encoder()
_QUESTION_DECODER = msgspec.msgpack.Decoder(Question)
_VERDICT_DECODER = msgspec.msgpack.Decoder(Verdict)


def frame_of(message: Question | Verdict) -> bytes:
    """A message as the bytes that are sent."""
    return framed(_ENCODER.encode(message))


def framed(body: bytes) -> bytes:
    """A body with its length before it."""
    return len(body).to_bytes(FRAME_HEADER_BYTES, "little") + body


def body_length(header: bytes) -> int:
    return int.from_bytes(header, "little")


def read_question(body: bytes) -> Question:
    """Raises `msgspec.MsgspecError`."""
    return _QUESTION_DECODER.decode(body)


def read_verdict(body: bytes) -> Verdict:
    """Raises `msgspec.MsgspecError`."""
    return _VERDICT_DECODER.decode(body)
