"""Compiles every form of every Triton kernel for every supported architecture, on a machine without a GPU, and judges
the result: registers, stack, shared memory, spills, tensor core instructions.

    python -m inferd.kernels.aot [--one-each] [--since TABLE] [--write TABLE]

`--one-each` compiles the first form of each kernel, and those of kernels whose source is not the one that TABLE was
made from. Exits with 1 where a form spills, takes more shared memory than the device has, or is a matrix kernel without
the architecture's matrix instructions.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from inferd.kernels.gpu import Shipped

SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one program may have, by architecture (CUDA C++ Programming Guide, compute
capabilities)."""
_MATRIX_INSTRUCTIONS = {80: ("HMMA", "IMMA"), 90: ("HGMMA", "QGMMA", "IGMMA"), 100: ("UTCHMMA", "UTCQMMA", "UTCIMMA")}
_WARP_GROUP_INSTRUCTIONS = (*_MATRIX_INSTRUCTIONS[90], *_MATRIX_INSTRUCTIONS[100])
_ROOT = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Row:
    """What one form of a kernel became on one architecture."""

    op: str
    config: str
    sm: int
    registers: int
    stack_bytes: int
    spills: int
    """Loads from and stores to local memory."""
    shared_bytes: int
    wide_loads: int
    """Loads of 16 bytes from global memory, asynchronous copies included."""
    matrix: str
    """The tensor core instruction that it uses, empty where none."""
    source: str
    """Digest of the kernel's source and of all that it calls."""
    faults: tuple[str, ...]


def all_shipped() -> list[Shipped]:
    """Every form of every kernel, by op."""
    forms: list[Shipped] = []
    for path in sorted(_ROOT.glob("*/triton.py")):
        module = importlib.import_module(f"inferd.kernels.{path.parent.name}.triton")
        forms += module.shipped()
    names = [(form.op, form.config) for form in forms]
    assert len(names) == len(set(names)), "two forms of one op have one name"
    return forms


def compile_form(form: Shipped, sm: int) -> Row:
    """One form for one architecture, without a GPU or a driver."""
    import triton  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    names = form.kernel.arg_names
    types = {**form.signature, **dict.fromkeys(form.constants, "constexpr")}
    aligned = {name for name in names if types[name].startswith("*") or name in form.multiples}
    attributes = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name in aligned}
    source = ASTSource(form.kernel, {name: types[name] for name in names}, dict(form.constants), attributes)
    options = {"num_warps": form.num_warps, "num_stages": form.num_stages, **form.options}
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    return _judge(form, sm, compiled.asm["cubin"], int(compiled.metadata.shared), form.kernel.cache_key[:16])


def _judge(form: Shipped, sm: int, cubin: bytes, shared_bytes: int, source: str) -> Row:
    usage, assembly = _disassemble(cubin)
    registers, stack_bytes = (int(_found(rf"\b{name}:(\d+)", usage)) for name in ("REG", "STACK"))
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", assembly)
    spills = sum(name.startswith(("LDL", "STL")) for name in instructions)
    wide_loads = sum(
        (name.startswith(("LDG", "LDGSTS")) and ".128" in name) or name.startswith("UTMALDG") for name in instructions
    )
    wanted = _MATRIX_INSTRUCTIONS[80 if form.is_warp_matrix else sm]
    matrix = next((name for name in instructions if name.startswith(wanted)), "")
    faults = []
    if stack_bytes or spills:
        faults.append(f"spills: {stack_bytes} bytes of stack, {spills} accesses")
    if shared_bytes > SHARED_LIMITS[sm]:
        faults.append(f"{shared_bytes} bytes of shared memory, and there are {SHARED_LIMITS[sm]}")
    if (form.is_matrix or form.is_warp_matrix) and not matrix:
        faults.append(f"multiplies without {' or '.join(wanted)}")
    if form.is_warp_matrix and any(name.startswith(_WARP_GROUP_INSTRUCTIONS) for name in instructions):
        faults.append("multiplies by instructions of warp groups")
    if form.is_streaming and not wide_loads:
        faults.append("reads memory in less than 16 bytes a thread")
    return Row(
        form.op,
        form.config,
        sm,
        registers,
        stack_bytes,
        spills,
        shared_bytes,
        wide_loads,
        matrix,
        source,
        tuple(faults),
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    import triton  # noqa: PLC0415

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, assembly = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    return usage, assembly


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"cuobjdump says nothing of {pattern}"
    return match[1]


def _task(task: tuple[int, int]) -> Row:
    index, sm = task
    return compile_form(_forms()[index], sm)


_all: list[Shipped] = []


def _forms() -> list[Shipped]:
    if not _all:
        _all.extend(all_shipped())
    return _all


def chosen(forms: Sequence[Shipped], known: Iterable[Row], *, one_each: bool) -> list[int]:
    """Indices of the forms to compile: all, or the first of each op and those whose source is not in `known`."""
    if not one_each:
        return list(range(len(forms)))
    sources = {row.op: row.source for row in known}
    first = {form.op: index for index, form in reversed(list(enumerate(forms)))}
    return [
        index
        for index, form in enumerate(forms)
        if first[form.op] == index or sources.get(form.op) != form.kernel.cache_key[:16]
    ]


def read_table(path: Path) -> list[Row]:
    """Rows as `--write` wrote them; none where there is no file."""
    if not path.exists():
        return []
    return [Row(**{**row, "faults": tuple(row["faults"])}) for row in json.loads(path.read_text())]


def render(rows: Iterable[Row]) -> str:
    """A table to read, a line a row."""
    lines = [f"{'op':18} {'config':44} {'sm':>4} {'regs':>5} {'stack':>6} {'smem':>7} {'16 B':>5}  matrix"]
    for row in rows:
        lines.append(
            f"{row.op:18} {row.config:44} {row.sm:4} {row.registers:5} {row.stack_bytes:6} {row.shared_bytes:7} "
            f"{row.wide_loads:5}  {row.matrix}{''.join(f'  FAULT {fault}' for fault in row.faults)}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", type=lambda text: [int(part) for part in text.split(",")], default=[*SHARED_LIMITS])
    parser.add_argument("--one-each", action="store_true")
    parser.add_argument("--since", type=Path, metavar="TABLE", default=Path("no table"))
    parser.add_argument("--write", type=Path, metavar="TABLE")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args(arguments)
    tasks = [
        (index, sm)
        for index in chosen(_forms(), read_table(asked.since), one_each=asked.one_each)
        for sm in asked.sm
        if sm >= _forms()[index].min_sm
    ]
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("fork")) as pool:
        rows = list(pool.map(_task, tasks, chunksize=1 + len(tasks) // (16 * asked.jobs)))
    print(render(rows))
    if asked.write:
        asked.write.write_text("[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]\n")
    faulty = [row for row in rows if row.faults]
    print(f"{len(rows)} compiled, {len(faulty)} with faults")
    return int(bool(faulty))


if __name__ == "__main__":
    sys.exit(main())
