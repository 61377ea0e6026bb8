"""Reads a compiled kernel's registers, stack and the names of its machine instructions, by the tools that Triton ships.

Each start of the disassembler takes 0.2 to 0.3 s, however small the kernel (measured: CUDA 13.1, AMD EPYC Zen 4,
2026-11-21), more than compiling one. So the code of many kernels is disassembled as one image. This module knows no
kernel and no rule.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION_BYTES = 16
"""Bytes of one instruction, on every architecture from Volta on."""
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
"""An instruction's address and whole name, without a predicate. The shapes of matrix instructions have small letters.
"""
_MATRIX = re.compile(r"[A-Z]*MMA(\.|$)")


@dataclass(frozen=True, slots=True)
class Binary:
    """One kernel for one architecture."""

    target: str
    """The architecture as the assembler calls it: sm_90a."""
    registers: int
    stack_bytes: int
    code: bytes


def read_binary(cubin: bytes, target: str) -> Binary:
    """Read an ELF file that holds one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
    registers, stack_bytes = (int(_found(rf"\b{name}:(\d+)", usage)) for name in ("REG", "STACK"))
    code = b"".join(part for name, part in _sections(cubin) if name.startswith(".text."))
    return Binary(target, registers, stack_bytes, code)


def disassemble(target: str, codes: Sequence[bytes]) -> list[list[str]]:
    """The instruction names of each of `codes` in order, all for one architecture."""
    with tempfile.NamedTemporaryFile(suffix=".code") as file:
        file.write(b"".join(codes))
        file.flush()
        listing = _tool("nvdisasm", "--binary", target.replace("sm_", "SM"), file.name)
    return split(listing, [len(code) for code in codes])


def split(listing: str, sizes: Sequence[int]) -> list[list[str]]:
    """The instructions of a listing, split after each of `sizes` bytes of code."""
    found = _INSTRUCTION.findall(listing)
    assert len(found) * INSTRUCTION_BYTES == sum(sizes), f"{len(found)} instructions in {sum(sizes)} bytes"
    assert all(int(address, 16) == INSTRUCTION_BYTES * index for index, (address, _) in enumerate(found))
    names = iter(found)
    return [[next(names)[1] for _ in range(size // INSTRUCTION_BYTES)] for size in sizes]


def is_matrix(instruction: str) -> bool:
    """Whether the instruction runs on the tensor cores."""
    return _MATRIX.match(instruction) is not None


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each section of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + index * entry_bytes) for index in range(count)]
    names_at = headers[names_index][4]
    for name, _, _, _, at, size in headers:
        first = names_at + name
        yield elf[first : elf.index(b"\0", first)].decode(), elf[at : at + size]


def _tool(name: str, *arguments: str) -> str:
    import triton  # noqa: PLC0415

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"cuobjdump prints no {pattern}"
    return match[1]
