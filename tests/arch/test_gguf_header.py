"""Headers of GGUF files: what is written comes back, and no count, length or offset of a stranger is believed."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality.gguf_blocks import F16, F32, Q4_0, Stored
from benchmarks.quality.gguf_files import padded, start, tensor_entry, text, value, write
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.errors import ModelError
from inferd.engine.arch.gguf.header import GgufError, Header, parse_header

METADATA: dict[str, Any] = {
    "a.text": "caf\u00e9", "a.number": 7, "a.negative": -3, "a.float": 0.1, "a.flag": True, "a.texts": ["x", "", "y z"],
    "a.numbers": [1, -2], "a.floats": [0.5, 2.0], "a.flags": [True, False], "a.large": 2**40,
}  # fmt: skip
TENSORS = {
    "first": Stored((3, 5), F32, bytes(60)),
    "second": Stored((2, 64), Q4_0, bytes(72)),
    "third": Stored((2, 3, 4), F16, bytes(48)),
}


def parsed(content: bytes) -> Header:
    return parse_header(content, len(content))


@pytest.mark.parametrize("alignment", [8, 32, 64])
def test_what_was_written_is_read(tmp_path: Path, alignment: int) -> None:
    stated = METADATA | ({} if alignment == 32 else {"general.alignment": alignment})
    content = write(tmp_path / "x.gguf", stated, TENSORS, alignment).read_bytes()
    header = parsed(content)
    assert {key: list(found) if isinstance(found, tuple) else found for key, found in header.metadata.items()} == stated
    assert {tensor.name: (tensor.shape, tensor.num_bytes) for tensor in header.tensors} == {
        name: (stored.shape, len(stored.data)) for name, stored in TENSORS.items()
    }
    assert all(tensor.begin % alignment == 0 for tensor in header.tensors)


def test_texts_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    texts = ["x" * 50_000, "caf\u00e9", "", "\u2581" * 99]
    metadata = parsed(write(tmp_path / "x.gguf", {"a": texts, "b": [1, 2]}, {}).read_bytes()).metadata
    assert (metadata.num_items("a"), metadata.num_items("b"), metadata.num_items("c")) == (4, 2, 0)
    assert metadata["a"] == metadata["a"] == texts


def test_a_text_of_an_array_must_be_utf8() -> None:
    """It ends in the middle of a character, and the length behind it looks like the rest."""
    metadata = parsed(array(8, 2, struct.pack("<Q", 1) + b"\xe2" + struct.pack("<Q", 0x80BF) + b"x" * 0x80BF)).metadata
    with pytest.raises(GgufError, match=r"k must be UTF-8, but holds b'.xe2'"):
        _ = metadata["k"]


def test_a_number_in_32_bits_is_the_one_that_was_meant(tmp_path: Path) -> None:
    for meant in (1e-5, 1e-6, 0.1, 1e6, 0.0, -0.25, 3.3):
        content = write(tmp_path / "x.gguf", {"a": meant}, {}).read_bytes()
        assert parsed(content).metadata["a"] == meant


def header_of(*, keys: bytes = b"", num_keys: int = 0, entries: bytes = b"", num_tensors: int = 0) -> bytes:
    return padded(start(num_tensors, num_keys) + keys + entries)


def one_tensor(name: str = "w", shape: tuple[int, ...] = (4, 8), kind: int = F32, offset: int = 0) -> bytes:
    return header_of(entries=tensor_entry(name, shape, kind, offset), num_tensors=1) + bytes(128)


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return header_of(keys=text("k") + struct.pack("<IIQ", 9, kind, count) + content, num_keys=1)


HUGE = 2**62
REFUSED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "the magic needs 4 bytes, but 0 are left"),
    "another format": (b"PK\x03\x04" + bytes(99), "a GGUF file begins with b'GGUF', but this one with b'PK"),
    "version 1": (b"GGUF" + struct.pack("<IIQ", 1, 0, 0), "the version must be one of 2, 3, but is 1"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "the version must be one of 2, 3, but is 50331648"),
    "a header of one count": (b"GGUF" + struct.pack("<IQ", 3, 0), "the number of metadata keys needs 8 bytes, but 0"),
    "tensors without end": (start(HUGE, 0), f"the number of tensors must be at most 65536, but is {HUGE}"),
    "keys without end": (start(0, HUGE), f"the number of metadata keys must be at most 4096, but is {HUGE}"),
    "more keys than bytes": (start(0, 4096), "the length of a metadata key needs 8 bytes, but 0 are left"),
    "more tensors than bytes": (start(65536, 0), "the length of a tensor's name needs 8 bytes, but 0 are left"),
    "a key of 2^62 bytes": (
        header_of(keys=struct.pack("<Q", HUGE), num_keys=1),
        f"a metadata key must have at most 65535 bytes, but has {HUGE}",
    ),
    "a text of 2^62 bytes": (
        header_of(keys=text("k") + struct.pack("<IQ", 8, HUGE), num_keys=1),
        f"k must have at most .* bytes, but has {HUGE}",
    ),
    "a text beyond the end": (
        header_of(keys=text("k") + struct.pack("<IQ", 8, 999), num_keys=1), "k needs 999 bytes, but .* are left",
    ),
    "a text that is no UTF-8": (
        header_of(keys=text("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe", num_keys=1), "k must be UTF-8, but holds",
    ),
    "2^62 texts": (array(8, HUGE), f"k has {HUGE} items: all arrays may have 2097152 together"),
    "a million texts of nothing": (array(8, 10**6), "k needs 8000000 bytes, but"),
    "a text of an array beyond the end": (array(8, 1, struct.pack("<Q", 2**50)), "k needs 11258999[0-9]+ bytes, but"),
    "2^62 numbers": (array(5, HUGE), f"k has {HUGE} items: all arrays may have 2097152 together"),
    "a million numbers of nothing": (array(11, 10**6), "k needs 8000000 bytes, but"),
    "arrays of arrays": (array(9, 1), "k must be an array of numbers or texts, but has items of type 9"),
    "a value of no type": (header_of(keys=text("k") + struct.pack("<I", 99), num_keys=1), "k has the unknown type 99"),
    "a key twice": (header_of(keys=2 * (text("k") + value(1)), num_keys=2), "the metadata key 'k' appears twice"),
    "an alignment of 0": (header_of(keys=text("general.alignment") + value(0), num_keys=1), "a power of two"),
    "an alignment of 48": (header_of(keys=text("general.alignment") + value(48), num_keys=1), "but is 48"),
    "an alignment of words": (header_of(keys=text("general.alignment") + value("x"), num_keys=1), "but is 'x'"),
    "a name of 300 letters": (one_tensor("w" * 300), "a tensor's name must have at most 256 bytes, but has 300"),
    "5 axes": (one_tensor(shape=(1, 1, 1, 1, 1)), "w must have 1 to 4 axes, but has 5"),
    "no axes": (one_tensor(shape=()), "w must have 1 to 4 axes, but has 0"),
    "an axis of 0": (one_tensor(shape=(4, 0)), r"w has the shape \[4, 0\]: no axis may be 0"),
    "half a block": (one_tensor(shape=(4, 48), kind=Q4_0), "a row of Q4_0 must have a multiple of 32 values"),
    "a type that is not read": (
        one_tensor(kind=16), r"w has type 16 \(IQ2_XXS\), which is not read; known are F32, F16",
    ),
    "a type that is none": (one_tensor(kind=999), "w has type 999, which is not read"),
    "sizes whose product is 2^124": (one_tensor(shape=(HUGE, HUGE)), "the file is truncated: w ends at byte"),
    "an offset past the end": (one_tensor(offset=HUGE), f"w begins at byte {HUGE} of the data, but byte 0 is next"),
    "an offset between two places": (one_tensor(offset=7), "w begins at byte 7 of the data, but byte 0 is next"),
    "data that is cut off": (one_tensor()[:-1], "the file is truncated: w ends at byte"),
    "bytes of no tensor": (one_tensor() + bytes(64), "64 bytes come after the last tensor"),
    "a name twice": (
        header_of(entries=tensor_entry("w", (4, 8), F32, 0) + tensor_entry("w", (4, 8), F32, 128), num_tensors=2)
        + bytes(256),
        "the tensor w appears twice",
    ),
    "two tensors in one place": (
        header_of(entries=tensor_entry("v", (4, 8), F32, 0) + tensor_entry("w", (4, 8), F32, 0), num_tensors=2)
        + bytes(128),
        "w begins at byte 0 of the data, but byte 128 is next: tensors must follow one another .*, without overlap",
    ),
    "a hole": (
        header_of(entries=tensor_entry("v", (4, 8), F32, 0) + tensor_entry("w", (4, 8), F32, 160), num_tensors=2)
        + bytes(288),
        "w begins at byte 160 of the data, but byte 128 is next",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_header_that_lies_is_refused_before_it_costs_memory(name: str) -> None:
    content, words = REFUSED[name]
    tracemalloc.start()
    try:
        with pytest.raises(GgufError, match=words):
            parsed(content)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", REFUSED)
def test_the_refusal_names_the_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(REFUSED[name][0])
    with pytest.raises(ModelError, match=r"/model.gguf(:| is empty)"):
        Checkpoint.read(file)


def test_every_prefix_of_a_file_is_refused(tmp_path: Path) -> None:
    content = write(tmp_path / "x.gguf", METADATA, TENSORS).read_bytes()
    for length in range(len(content) - 16):  # the last 16 bytes are padding
        with pytest.raises(GgufError):
            parsed(content[:length])
    assert parsed(content[:-16]).tensors


def test_no_changed_byte_breaks_the_reader(tmp_path: Path) -> None:
    """The header is read or refused with an error of ours. No other exception is raised."""
    content = write(tmp_path / "x.gguf", METADATA, TENSORS).read_bytes()
    end = content.index(bytes(60))
    num_refused = 0
    for at in range(end):
        for changed in (0, 1, 0x7F, 0xFF, content[at] ^ 0x80):
            try:
                parsed(content[:at] + bytes((changed,)) + content[at + 1 :])
            except GgufError:
                num_refused += 1
    assert num_refused > end
