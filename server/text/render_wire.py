"""Messages between the server and the processes that render its chat templates. Knows no templates.

A frame is a length (4 bytes, little-endian) and a msgpack body. Each worker first says that it has
begun, and gets its program. Then it gives one answer to each question. `render_process` has the processes,
`render_workers` the server's side.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

RENDER_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "inferd.server.text.render_process")

RENDER_MEMORY_BYTES = 512 * 2**20
"""Most address space that a worker may use beyond what it has at its start."""

RENDER_WALL_S = 60.0
"""Most wall-clock time of one rendering, which waits for nothing but a processor."""

MAX_RENDERED_CHARS = 2**26
"""Most characters that one rendering may join, those of macros and `set` blocks included: four times the largest body
taken by default. If all are ASCII they take 64 MiB, and twice that while the pieces are joined."""

MAX_ANSWER_BYTES = 4 * MAX_RENDERED_CHARS + 2**16
"""Longest answer that the server reads."""

FRAME_HEADER_BYTES = 4
WORKER_BEGAN = b"b"
"""Byte that a worker sends before it reads its program."""

STATUS_BYTES = 4
"""Size of a worker's wait status, little-endian."""

_BIG_INT = 1
"""Code of msgpack's extension type for a whole number of more than 64 bits, as its hexadecimal digits."""


class Program(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint's chat templates, and the tokens that they may name."""

    default: str
    with_tools: str
    """The template of conversations with tools. It equals `default` if the checkpoint has one template."""
    special_tokens: dict[str, str]


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """Bounds of one rendering."""

    cpu_s: float
    """Most seconds of processor time. Another process's work does not count, so a busy machine fails no request."""
    wall_s: float = RENDER_WALL_S
    is_nice: bool = False
    """Whether to render at low priority."""


class Question(msgspec.Struct, frozen=True, array_like=True):
    """A conversation to render."""

    limits: Limits
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    kwargs: Mapping[str, Any]


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The rendered text, or why there is none."""

    text: str = ""
    refusal: str | None = None
    """The words of the template's or Python's error; None if the text was rendered."""
    is_spent: bool = False
    """Whether the worker ran out of memory. It should render nothing more."""
    form: str = ""
    """Name of the form of the conversation that was rendered, of those in `turn_order`; empty: as it was given."""


def _read_big_int(code: int, data: memoryview) -> int:
    assert code == _BIG_INT
    return int(bytes(data), 16)


_ENCODER = msgspec.msgpack.Encoder()
_PROGRAM_DECODER = msgspec.msgpack.Decoder(Program)
_QUESTION_DECODER = msgspec.msgpack.Decoder(Question, ext_hook=_read_big_int)
_ANSWER_DECODER = msgspec.msgpack.Decoder(Answer)


def frame_of(message: Program | Question | Answer) -> bytearray:
    """A message as the bytes that are sent. Raises `UnicodeEncodeError` for half of a surrogate pair."""
    frame = bytearray()
    try:
        _ENCODER.encode_into(message, frame, FRAME_HEADER_BYTES)
    except OverflowError:
        packed = _with_packed_integers(msgspec.structs.astuple(message))
        _ENCODER.encode_into(packed, frame, FRAME_HEADER_BYTES)
    frame[:FRAME_HEADER_BYTES] = (len(frame) - FRAME_HEADER_BYTES).to_bytes(FRAME_HEADER_BYTES, "little")
    return frame


def _with_packed_integers(value: Any) -> Any:
    """`value` with whole numbers in a form that msgpack can hold."""
    if isinstance(value, Mapping):
        return {key: _with_packed_integers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_packed_integers(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return msgspec.msgpack.Ext(_BIG_INT, f"{value:x}".encode())
    return value


def body_length(header: bytes) -> int:
    return int.from_bytes(header, "little")


def read_program(body: bytes | bytearray) -> Program:
    return _PROGRAM_DECODER.decode(body)


def read_question(body: bytes | bytearray) -> Question:
    return _QUESTION_DECODER.decode(body)


def read_answer(body: bytes | bytearray) -> Answer:
    """Raises `msgspec.MsgspecError`."""
    return _ANSWER_DECODER.decode(body)
