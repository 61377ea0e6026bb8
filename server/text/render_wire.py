"""Messages between the server and the processes that render its chat templates. Knows no templates.

A frame is a length (4 bytes, little-endian) and a msgpack body. Each worker first says that it has
begun, and gets its program. Then it gives one answer to each question. `render_process` has the processes,
`render_workers` the server's side.
"""

from __future__ import annotations

import re
import sys
from array import array
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

MAX_ANSWER_BYTES = 8 * MAX_RENDERED_CHARS + 2**16
"""Longest answer that the server reads: a character of at most 4 bytes, and its place."""

FRAME_HEADER_BYTES = 4
WORKER_BEGAN = b"b"
"""Byte that a worker sends before it reads its program."""

STATUS_BYTES = 4
"""Size of a worker's wait status, little-endian."""

_BIG_INT = 1
"""Code of msgpack's extension type for a whole number of more than 64 bits, as its hexadecimal digits."""
_MARKED_TEXT, _MARKED_KEYS = 2, 3
"""Codes for a text with marks, and for an object with such keys, as a list of its keys and a list of its values."""

MAX_MARKS = 1024
_FIRST_MARK = 0xDC00
_MARK = re.compile("[\udc00-\udfff]")


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


class RenderQuestion(msgspec.Struct, frozen=True, array_like=True):
    """A conversation to render."""

    limits: Limits
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None
    documents: Sequence[Any] | None
    """Both are objects of JSON. Their keys may be marked, which msgspec reads as no object's."""
    add_generation_prompt: bool
    continue_final_message: bool
    kwargs: Mapping[str, Any]
    marks: str = ""
    """The characters that marks in its texts stand for: `mark(i)` for the one with index i. Empty: there are none."""


class RenderAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The rendered text, or why there is none."""

    text: str = ""
    refusal: str | None = None
    """The words of the template's or Python's error; None if the text was rendered."""
    is_spent: bool = False
    """Whether the worker ran out of memory. It should render nothing more."""
    form: str = ""
    """Name of the form of the conversation that was rendered, of those in `turn_order`; empty: as it was given."""
    places: bytes = b""
    """Indices of the characters in `text` that were marked, in order, as 32-bit numbers of this machine."""


def mark(index: int) -> str:
    """The character that stands for another one in a marked text: half of a surrogate pair, which no request can hold,
    because it is no Unicode. So a caller cannot write marks."""
    return chr(_FIRST_MARK + index)


def unmarked(text: str, marks: str) -> tuple[str, bytes]:
    """The text with the characters that its marks stand for, and their places. `marks`: as in `RenderQuestion`."""
    places = array("I")
    found = set()
    for match in () if text.isascii() else _MARK.finditer(text):
        places.append(match.start())
        found.add(match[0])
    for i, char in enumerate(marks):
        if mark(i) in found:
            text = text.replace(mark(i), char)
    return text, places.tobytes()


def _read_extension(code: int, data: memoryview) -> Any:
    if code == _BIG_INT:
        return int(bytes(data), 16)
    if code == _MARKED_TEXT:
        return str(data, "utf-8", "surrogatepass")
    assert code == _MARKED_KEYS
    keys, values = _ANY_DECODER.decode(data)
    return dict(zip(keys, values, strict=True))


_ENCODER = msgspec.msgpack.Encoder()
_PROGRAM_DECODER = msgspec.msgpack.Decoder(Program)
_ANY_DECODER = msgspec.msgpack.Decoder(ext_hook=_read_extension)
_QUESTION_DECODER = msgspec.msgpack.Decoder(RenderQuestion, ext_hook=_read_extension)
_ANSWER_DECODER = msgspec.msgpack.Decoder(RenderAnswer)


def frame_of(message: Program | RenderQuestion | RenderAnswer) -> bytearray:
    """A message as the bytes that are sent. Raises `UnicodeEncodeError` for half of a surrogate pair that is no
    mark."""
    frame = bytearray()
    has_marks = isinstance(message, RenderQuestion) and bool(message.marks)
    try:
        _ENCODER.encode_into(message, frame, FRAME_HEADER_BYTES)
    except (OverflowError, UnicodeEncodeError):
        packed = [_packed(part, has_marks=has_marks) for part in msgspec.structs.astuple(message)]
        _ENCODER.encode_into(packed, frame, FRAME_HEADER_BYTES)
    frame[:FRAME_HEADER_BYTES] = (len(frame) - FRAME_HEADER_BYTES).to_bytes(FRAME_HEADER_BYTES, "little")
    return frame


def _packed(value: Any, *, has_marks: bool) -> Any:
    """`value` with long whole numbers and marked texts in a form that msgpack can hold. The rest is encoded as ever."""
    try:
        return msgspec.Raw(_ENCODER.encode(value))
    except (OverflowError, UnicodeEncodeError):
        if isinstance(value, str):
            if not has_marks:
                raise
            return msgspec.msgpack.Ext(_MARKED_TEXT, value.encode("utf-8", "surrogatepass"))
        if isinstance(value, int):
            return msgspec.msgpack.Ext(_BIG_INT, f"{value:x}".encode())
    if not isinstance(value, Mapping):
        return [_packed(item, has_marks=has_marks) for item in value]
    values = [_packed(item, has_marks=has_marks) for item in value.values()]
    keys = [_packed(key, has_marks=has_marks) for key in value]
    if all(isinstance(key, msgspec.Raw) for key in keys):
        return dict(zip(value, values, strict=True))
    return msgspec.msgpack.Ext(_MARKED_KEYS, _ENCODER.encode([keys, values]))


def body_length(header: bytes) -> int:
    return int.from_bytes(header, "little")


def read_program(body: bytes | bytearray) -> Program:
    return _PROGRAM_DECODER.decode(body)


def read_question(body: bytes | bytearray) -> RenderQuestion:
    return _QUESTION_DECODER.decode(body)


def read_answer(body: bytes | bytearray) -> RenderAnswer:
    """Raises `msgspec.MsgspecError`."""
    return _ANSWER_DECODER.decode(body)
