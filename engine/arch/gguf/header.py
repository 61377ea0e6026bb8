"""Parses the header of a GGUF file: its metadata, and the name, type, shape and place of each tensor.

It opens no file and reads no weights. Each count and length is compared with the bytes that are there before memory is
taken for it. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap

from inferd.engine.arch.gguf.types import NAMES, TYPES, UNREAD, TensorType
from inferd.engine.arch.shown import shown

Value = int | float | bool | str | list[str] | tuple[int | float | bool, ...]

MAX_HEADER_BYTES = 2**27
"""Most bytes of a header: five times the largest known, of a vocabulary of 262,144 tokens."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS = 4096
_MAX_TENSORS = 2**16
_MAX_ITEMS = 2**21
"""Most items of all arrays together. A vocabulary of 262,144 tokens has 1.4 million with its merges."""
_MAX_KEY_BYTES = 2**16 - 1
_MAX_NAME_BYTES = 256
_MAX_AXES = 4
_MAX_ALIGNMENT = 2**16
_DEFAULT_ALIGNMENT = 32

_SCALARS = {code: struct.Struct(f"<{letter}") for code, letter in enumerate("BbHhIif?")} | {
    code: struct.Struct(f"<{letter}") for code, letter in ((10, "Q"), (11, "q"), (12, "d"))
}
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_COUNT, _TYPE = struct.Struct("<Q"), struct.Struct("<I")


class GgufError(ValueError):
    """The file is damaged or not supported. The message has the rule and the value, without the file's name."""


class HeaderCutError(GgufError):
    """The header goes on behind the bytes that were given."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor, as the header states it."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    """Rows first. The file states the axes in the other order."""
    begin: int
    """First byte in the file."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.type.block_size * self.type.block_bytes


@dataclass(frozen=True, slots=True)
class _Texts:
    """An array of texts as the file has them: each behind its length."""

    raw: bytes
    count: int
    what: str

    def decoded(self) -> list[str]:
        """Raises `GgufError` for a text that is no UTF-8."""
        raw, at, found = self.raw, 0, []
        for _ in range(self.count):
            begin = at + 8
            at = begin + int.from_bytes(raw[at:begin], "little")
            found.append(raw[begin:at])
        return [_decoded(text, self.what) for text in found]


class Values(Mapping[str, Value]):
    """The metadata by key. Arrays of texts are decoded when they are first read: most starts read no merges, and
    engines read no tokens."""

    def __init__(self, found: dict[str, Value | _Texts]) -> None:
        self._found = found
        self._raw = {key: value.raw for key, value in found.items() if isinstance(value, _Texts)}

    def __getitem__(self, key: str) -> Value:
        """Raises `GgufError` for a text of an array that is no UTF-8."""
        value = self._found[key]
        if isinstance(value, _Texts):
            value = self._found[key] = value.decoded()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def num_items(self, key: str) -> int:
        """Number of items of an array; 0 if there is no such array."""
        value = self._found.get(key)
        return value.count if isinstance(value, _Texts) else len(value) if isinstance(value, list | tuple) else 0

    def written(self, key: str) -> bytes | Value:
        """The value, or of an array of texts the bytes in the file."""
        return self._raw.get(key) or self[key]


@dataclass(frozen=True, slots=True)
class Header:
    metadata: Values
    tensors: tuple[GgufTensor, ...]


def parse_header(data: bytes | mmap, file_bytes: int) -> Header:
    """The header that `data` begins with: the first bytes of a file of `file_bytes`.

    Raises `GgufError` unless the tensors cover the rest of the file, without overlap and without a hole. If it is a
    `HeaderCutError`, more bytes may help.
    """
    cursor = _Cursor(data)
    magic = cursor.take(len(_MAGIC), "the magic")
    if magic != _MAGIC:
        raise GgufError(f"a GGUF file begins with {_MAGIC!r}, but this one with {magic!r}")
    version = cursor.number(_TYPE, "the version")
    if version not in _VERSIONS:
        # A file for big-endian machines has the bytes of its version in the other order.
        raise GgufError(f"the version must be one of {', '.join(map(str, _VERSIONS))}, but is {version}")
    num_tensors = cursor.count("tensors", _MAX_TENSORS)
    metadata = _metadata(cursor, cursor.count("metadata keys", _MAX_KEYS))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise GgufError(f"general.alignment must be a power of two up to {_MAX_ALIGNMENT}, but is {shown(alignment)}")
    entries = [_tensor(cursor) for _ in range(num_tensors)]
    tensors = _placed(entries, _aligned(cursor.at, alignment), alignment, file_bytes)
    return Header(metadata, tensors)


class _Cursor:
    """Reads the header from its first byte on. Refuses to read beyond its last."""

    def __init__(self, data: bytes | mmap) -> None:
        self._data, self.at, self._end = data, 0, len(data)
        self._num_items = 0

    def take(self, num_bytes: int, what: str) -> bytes:
        self._check(num_bytes, what)
        self.at += num_bytes
        return self._data[self.at - num_bytes : self.at]

    def number(self, form: struct.Struct, what: str) -> int:
        value: int = form.unpack(self.take(form.size, what))[0]
        return value

    def count(self, what: str, most: int) -> int:
        found = self.number(_COUNT, f"the number of {what}")
        if found > most:
            raise GgufError(f"the number of {what} must be at most {most}, but is {found}")
        return found

    def text(self, what: str, most_bytes: int = MAX_HEADER_BYTES) -> str:
        num_bytes = self.number(_COUNT, f"the length of {what}")
        if num_bytes > most_bytes:
            raise GgufError(f"{what} must have at most {most_bytes} bytes, but has {num_bytes}")
        return _decoded(self.take(num_bytes, what), what)

    def array(self, what: str) -> _Texts | tuple[int | float | bool, ...]:
        kind, count = self.number(_TYPE, f"the type of {what}"), self.number(_COUNT, f"the length of {what}")
        self._num_items += count
        if self._num_items > _MAX_ITEMS:
            raise GgufError(f"{what} has {count} items: all arrays may have {_MAX_ITEMS} together")
        if kind == _STRING:
            return self._texts(count, what)
        if kind not in _SCALARS:
            raise GgufError(f"{what} must be an array of numbers or texts, but has items of type {kind}")
        form = _SCALARS[kind].format[-1]
        return struct.unpack(f"<{count}{form}", self.take(count * _SCALARS[kind].size, what))

    def _texts(self, count: int, what: str) -> _Texts:
        """Reads the lengths alone, in one loop over local names: it runs 300,000 times for a large vocabulary."""
        self._check(count * _COUNT.size, what)
        data, at, end, length_at = self._data, self.at, self._end, _COUNT.unpack_from
        try:
            for _ in range(count):
                at += 8 + length_at(data, at)[0]
        except (struct.error, IndexError, OverflowError):  # the next length, or a part of it, is behind the end
            at = max(at, end) + 8
        if at > end:
            self._check(at - self.at, what)
        return _Texts(self.take(at - self.at, what), count, what)

    def _check(self, num_bytes: int, what: str) -> None:
        left = self._end - self.at
        if num_bytes > left:
            limit = f"; a header has at most {MAX_HEADER_BYTES} bytes" if self._end >= MAX_HEADER_BYTES else ""
            kind = GgufError if num_bytes > MAX_HEADER_BYTES else HeaderCutError
            raise kind(f"{what} needs {num_bytes} bytes, but {left} are left{limit}")


def _decoded(text: bytes, what: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise GgufError(f"{what} must be UTF-8, but holds {text[:40]!r}") from error


def _metadata(cursor: _Cursor, num_keys: int) -> Values:
    metadata: dict[str, Value | _Texts] = {}
    for _ in range(num_keys):
        key = cursor.text("a metadata key", _MAX_KEY_BYTES)
        if key in metadata:
            raise GgufError(f"the metadata key {shown(key)} appears twice")
        metadata[key] = _value(cursor, key[:200])
    return Values(metadata)


def _value(cursor: _Cursor, key: str) -> Value | _Texts:
    kind = cursor.number(_TYPE, f"the type of {key}")
    if kind == _STRING:
        return cursor.text(key)
    if kind == _ARRAY:
        return cursor.array(key)
    if kind not in _SCALARS:
        raise GgufError(f"{key} has the unknown type {kind}")
    value: int | float | bool = _SCALARS[kind].unpack(cursor.take(_SCALARS[kind].size, key))[0]
    return _shortest(value) if kind == _FLOAT else value


def _shortest(value: float) -> float:
    """The shortest decimal number that has this value in 32 bits: the number that the original config states."""
    packed = struct.pack("<f", value)
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if abs(short) < 3e38 and struct.pack("<f", short) == packed:
            return short
    return value


def _tensor(cursor: _Cursor) -> tuple[str, TensorType, tuple[int, ...], int]:
    """(name, type, shape, offset in the data) of the next tensor."""
    name = cursor.text("a tensor's name", _MAX_NAME_BYTES)
    num_axes = cursor.number(_TYPE, f"the number of axes of {name}")
    if not 1 <= num_axes <= _MAX_AXES:
        raise GgufError(f"{name} must have 1 to {_MAX_AXES} axes, but has {num_axes}")
    shape = tuple(cursor.number(_COUNT, f"the shape of {name}") for _ in range(num_axes))[::-1]
    code, offset = cursor.number(_TYPE, f"the type of {name}"), cursor.number(_COUNT, f"the offset of {name}")
    kind = TYPES.get(code)
    if kind is None:
        label = f" ({UNREAD[code]})" if code in UNREAD else ""
        raise GgufError(f"{name} has type {code}{label}, which is not read; known are {', '.join(NAMES)}")
    if 0 in shape or shape[-1] % kind.block_size:
        raise GgufError(
            f"{name} has the shape {list(shape)}: no axis may be 0, and a row of {kind.name} must have a multiple of "
            f"{kind.block_size} values"
        )
    return name, kind, shape, offset


def _placed(
    entries: list[tuple[str, TensorType, tuple[int, ...], int]], start: int, alignment: int, file_bytes: int
) -> tuple[GgufTensor, ...]:
    """The tensors, whose data begins at byte `start` of the file."""
    tensors: dict[str, GgufTensor] = {}
    expected = 0
    for name, kind, shape, offset in sorted(entries, key=lambda entry: entry[3]):
        if name in tensors:
            raise GgufError(f"the tensor {name} appears twice")
        if offset != expected:
            raise GgufError(
                f"{name} begins at byte {offset} of the data, but byte {expected} is next: tensors must follow one "
                f"another at multiples of {alignment} bytes, without overlap and without a hole"
            )
        tensor = GgufTensor(name, kind, shape, start + offset)
        end = tensor.begin + tensor.num_bytes
        if end > file_bytes:
            raise GgufError(f"the file is truncated: {name} ends at byte {end} of {file_bytes}")
        tensors[name] = tensor
        expected = _aligned(end - start, alignment)
    behind = file_bytes - start - expected
    if behind > 0:
        raise GgufError(
            f"{behind} bytes come after the last tensor, which belong to no tensor; "
            "parts of a split model must stay separate files"
        )
    return tuple(tensors.values())


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
