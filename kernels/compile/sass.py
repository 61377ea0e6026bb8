"""Reads a compiled kernel's registers, stack, machine instructions and loops, by the tools that Triton ships.

Each start of the disassembler takes 0.2 to 0.3 s, however small the kernel (measured: CUDA 13.1, AMD EPYC Zen 4,
2026-11-21), more than compiling one. So the code of many kernels is disassembled as one image. This module knows no
kernel and no rule.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

INSTRUCTION_BYTES = 16
"""Bytes of one instruction, on every architecture from Volta on."""
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
"""An instruction's address, predicate, whole name and operands. The shapes of matrix instructions have small letters.
"""
_LANES = 32
_MATRIX = re.compile(r"[A-Z]*MMA(\.|$)")
_WARP_GROUP_MATRIX = re.compile(r"[A-Z]GMMA\.64x(\d+)x\d+\.")
_MATRIX_ROW_BYTES = 32
"""Bytes of a row of an operand of one warp group instruction, whatever its numbers are."""
_LOADS, _COPIES = ("LDG.",), ("LDGSTS.", "UTMALDG")
WAIT = "ACQBULK"
"""The instruction by which a kernel that starts early waits for the one before it."""
_ENDS = ("EXIT", "KILL", "BRX", "JMP", "RET", "BREAK")
"""Beginnings of instructions that end a thread, or lead to an address that is not known."""
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
"""Bytes that a lane moves, by the part of an instruction's name that says so. Others move 4."""


@dataclass(frozen=True, slots=True)
class Binary:
    """One kernel for one architecture."""

    target: str
    """The architecture as the assembler calls it: sm_90a."""
    registers: int
    stack_bytes: int
    code: bytes


class Instruction(NamedTuple):
    name: str
    operands: str
    is_predicated: bool


@dataclass(frozen=True, slots=True)
class Loop:
    """An innermost loop among those that read global memory or multiply on the tensor cores."""

    num_instructions: int
    names: Mapping[str, int]
    """Number of instructions by name."""
    global_bytes: int
    """Bytes that a warp reads from global memory, asynchronous copies included."""
    shared_bytes: float
    """Bytes that a warp moves from and to shared memory. Operands that sm_100's tensor cores read are not known."""

    @property
    def matrix(self) -> int:
        return sum(count for name, count in self.names.items() if is_matrix(name))

    def starting(self, *prefixes: str) -> int:
        """Number of instructions whose names start with one of `prefixes`."""
        return sum(count for name, count in self.names.items() if name.startswith(prefixes))

    @property
    def copies(self) -> int:
        """Asynchronous copies from global to shared memory."""
        return self.starting(*_COPIES)

    @property
    def loads(self) -> int:
        """Loads from global memory into registers."""
        return self.starting(*_LOADS)


@dataclass(frozen=True, slots=True)
class Code:
    """The instructions of one kernel."""

    names: Mapping[str, int]
    """Number of instructions by name."""
    loops: tuple[Loop, ...]
    passing_wait: tuple[str, ...] = ()
    """Instructions by which a thread may pass the first `WAIT`."""

    def main_loop(self) -> Loop | None:
        """The loop that multiplies most, else the one that reads most. Of equal ones it is the shortest."""
        return max(self.loops, key=lambda loop: (loop.matrix, loop.global_bytes, -loop.num_instructions), default=None)


def read_binary(cubin: bytes, target: str) -> Binary:
    """Read an ELF file that holds one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
    registers, stack_bytes = (int(_found(rf"\b{name}:(\d+)", usage)) for name in ("REG", "STACK"))
    code = b"".join(part for name, part in _sections(cubin) if name.startswith(".text."))
    return Binary(target, registers, stack_bytes, code)


def disassemble(target: str, codes: Sequence[bytes]) -> list[Code]:
    """The instructions of each of `codes`, all for one architecture."""
    return [measure(instructions) for instructions in listings(target, codes)]


def listings(target: str, codes: Sequence[bytes]) -> list[list[Instruction]]:
    """The instructions of each of `codes` in order, all for one architecture."""
    with tempfile.NamedTemporaryFile(suffix=".code") as file:
        file.write(b"".join(codes))
        file.flush()
        listing = _tool("nvdisasm", "--binary", target.replace("sm_", "SM"), file.name)
    return split(listing, [len(code) for code in codes])


def split(listing: str, sizes: Sequence[int]) -> list[list[Instruction]]:
    """The instructions of a listing, split after each of `sizes` bytes of code. Branches get the index of their target
    as the only operand."""
    found = _INSTRUCTION.findall(listing)
    assert len(found) * INSTRUCTION_BYTES == sum(sizes), f"{len(found)} instructions in {sum(sizes)} bytes"
    assert all(int(address, 16) == INSTRUCTION_BYTES * index for index, (address, *_) in enumerate(found))
    first, parts = 0, []
    for size in sizes:
        last = first + size // INSTRUCTION_BYTES
        parts.append([_instruction(first, *fields[1:]) for fields in found[first:last]])
        first = last
    return parts


def _instruction(first: int, predicate: str, name: str, operands: str) -> Instruction:
    target = re.search(r"0x([0-9a-f]+)\s*$", operands) if name.startswith("BRA") else None
    if target is not None:
        operands = str(int(target[1], 16) // INSTRUCTION_BYTES - first)
    return Instruction(name, operands.strip(), bool(predicate) or name.startswith("BRA.U"))


def measure(instructions: Sequence[Instruction]) -> Code:
    """Count a kernel's instructions, and find its loops."""
    loops = [_loop(instructions[first : last + 1]) for first, last in _innermost(instructions)]
    return Code(Counter(one.name for one in instructions), tuple(loops), tuple(_passing_wait(instructions)))


def _passing_wait(instructions: Sequence[Instruction]) -> Iterator[str]:
    at = next((index for index, one in enumerate(instructions) if one.name.startswith(WAIT)), None)
    if at is None:
        return
    for one in instructions[:at]:
        leaves = one.name.startswith("BRA") and one.operands.isdigit() and int(one.operands) > at
        if leaves or one.name.startswith(_ENDS):
            yield one.name
    if instructions[at].is_predicated:
        yield f"a condition of {instructions[at].name}"


def _innermost(instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    """(first, last) index of each innermost loop that reads global memory or multiplies."""
    exits = [index for index, one in enumerate(instructions) if one.name == "EXIT" and not one.is_predicated]
    # Code behind the last exit is waiting that was moved out of the way. It jumps back, which is no loop.
    end = exits[-1] if exits else len(instructions)
    spans = set()
    for last, one in enumerate(instructions[:end]):
        if one.name.startswith("BRA") and one.operands.lstrip("-").isdigit() and int(one.operands) < last:
            first = int(one.operands)
            if any(_is_work(inner.name) for inner in instructions[first : last + 1]):
                spans.add((first, last))
    return sorted(
        (first, last)
        for first, last in spans
        if not any(first <= other[0] and other[1] <= last and other != (first, last) for other in spans)
    )


def _is_work(name: str) -> bool:
    return name.startswith((*_LOADS, *_COPIES)) or is_matrix(name)


def _loop(instructions: Sequence[Instruction]) -> Loop:
    return Loop(
        num_instructions=len(instructions),
        names=Counter(one.name for one in instructions),
        global_bytes=sum(_LANES * _width(one.name) for one in instructions if one.name.startswith(("LDG.", "LDGSTS."))),
        shared_bytes=sum(map(_shared_bytes, instructions)),
    )


def _width(name: str) -> int:
    """Bytes that each lane moves."""
    return next((_WIDTHS[part] for part in name.split(".") if part in _WIDTHS), 4)


def _shared_bytes(one: Instruction) -> float:
    """Bytes that a warp moves from or to shared memory."""
    shape = _WARP_GROUP_MATRIX.match(one.name)
    if shape is not None:
        # The second operand is the left matrix. If it is in shared memory, one descriptor names both.
        rows = int(shape[1]) + (64 if "gdesc" in one.operands.split(",")[1] else 0)
        return rows * _MATRIX_ROW_BYTES / 4
    if one.name.startswith(("LDSM", "STSM")):
        count = one.name.rsplit(".", 1)[1]
        return 128.0 * (int(count) if count.isdigit() else 1)
    return float(_LANES * _width(one.name)) if one.name.split(".")[0] in ("LDS", "STS", "LDGSTS") else 0.0


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
