"""Compiles every form of every Triton kernel for every supported architecture, without a GPU. Checks registers, stack,
shared memory, spills and tensor core instructions.

    python -m inferd.kernels.aot [--one-each] [--since TABLE] [--write TABLE]

`--one-each` compiles the first form of each kernel for one architecture, which differs from kernel to kernel. It also
compiles, for all architectures, the forms that differ from those of TABLE: by their source, types or constants, or by
the version of Triton. Exits with 1 if a form spills, takes more shared memory than the device has, or is a matrix
kernel without the architecture's matrix instructions.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import io
import json
import os
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from inferd.kernels import sass
from inferd.kernels.gpu import Shipped

SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that one program may have, by architecture (CUDA C++ Programming Guide, compute
capabilities)."""
_MATRIX_INSTRUCTIONS = {80: ("HMMA", "IMMA"), 90: ("HGMMA", "QGMMA", "IGMMA"), 100: ("UTCHMMA", "UTCQMMA", "UTCIMMA")}
_WARP_GROUP_INSTRUCTIONS = (*_MATRIX_INSTRUCTIONS[90], *_MATRIX_INSTRUCTIONS[100])
_ROOT = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class CompiledForm:
    """One form of a kernel, compiled for one architecture."""

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
    matrix: Mapping[str, int]
    """Number of tensor core instructions of each kind."""
    source: str
    """The form's `digest`."""
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """The compiled forms, and the version of Triton that compiled them."""

    triton: str
    rows: tuple[CompiledForm, ...]

    def sources(self) -> dict[tuple[str, str], str]:
        """The digest of each form by (op, config); empty if another version of Triton is installed."""
        return {(row.op, row.config): row.source for row in self.rows} if self.triton == triton_version() else {}


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled form that has not been checked yet."""

    index: int
    """Index of the form."""
    sm: int
    binary: sass.Binary
    shared_bytes: int


def triton_version() -> str:
    return importlib.metadata.version("triton")


def all_shipped() -> list[Shipped]:
    """Every form of every kernel, by op."""
    forms: list[Shipped] = []
    for path in sorted(_ROOT.glob("*/triton.py")):
        module = importlib.import_module(f"inferd.kernels.{path.parent.name}.triton")
        forms += module.shipped()
    names = [(form.op, form.config) for form in forms]
    assert len(names) == len(set(names)), "two forms of one op have one name"
    return forms


def targets(form: Shipped) -> list[int]:
    """The architectures that the form is compiled for."""
    return [sm for sm in SHARED_LIMITS if sm >= form.min_sm]


def digest(form: Shipped) -> str:
    """Identifies all that decides the compiled code, except the compiler's version: the form, the code of its kernel,
    and the functions and constants that the kernel uses. Comments, docstrings and positions in a file do not count."""
    content = [
        _code_of(form.kernel),
        *(sorted(map(repr, mapping.items())) for mapping in (form.signature, form.constants, form.options)),
        (form.num_warps, form.num_stages, sorted(form.multiples)),
        (form.is_matrix, form.is_warp_matrix, form.is_streaming),
    ]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _code_of(kernel: Any) -> list[Any]:
    """The tokens of a kernel, then the same of every function that it calls, and the constants that these name."""
    used = ((name, _code_of(one) if _is_kernel(one) else repr(one)) for name, one in _used(kernel))
    return [_tokens(kernel.src), *used]


def _used(kernel: Any) -> list[tuple[str, Any]]:
    """Kernels and constants that the source of `kernel` names, by name."""
    found = {name: kernel.fn.__globals__.get(name) for name in kernel.fn.__code__.co_names}
    return sorted((name, one) for name, one in found.items() if _is_kernel(one) or type(one).__name__ == "constexpr")


def _is_kernel(value: Any) -> bool:
    return hasattr(type(value), "cache_key")  # asking the value itself would compute its digest


def _tokens(source: str) -> list[str]:
    """The tokens of a function, without comments and docstring."""
    kept: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = kept and kept[-1].type == tokenize.INDENT and token.type in (tokenize.STRING, tokenize.NEWLINE)
        if token.type not in (tokenize.COMMENT, tokenize.NL) and not is_docstring:
            kept.append(token)
    return [token.string for token in kept]


def _complete_cache_key(kernel: Any) -> None:
    """Compute the cache keys of called functions first: else Triton leaves their constants out of the kernel's own."""
    for _, used in _used(kernel):
        if _is_kernel(used):
            _complete_cache_key(used)
    _ = kernel.cache_key


def compile_form(form: Shipped, sm: int) -> CompiledForm:
    """Compile and check one form for one architecture, without a GPU or a driver."""
    binary, shared_bytes = _compile(form, sm)
    (instructions,) = sass.disassemble(binary.target, [binary.code])
    return _judge(form, sm, binary, shared_bytes, instructions)


def _compile(form: Shipped, sm: int) -> tuple[sass.Binary, int]:
    """(compiled kernel, its bytes of shared memory)."""
    import triton  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    _complete_cache_key(form.kernel)
    names = form.kernel.arg_names
    types = {**form.signature, **dict.fromkeys(form.constants, "constexpr")}
    aligned = {name for name in names if types[name].startswith("*") or name in form.multiples}
    attributes = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name in aligned}
    source = ASTSource(form.kernel, {name: types[name] for name in names}, dict(form.constants), attributes)
    options = {"num_warps": form.num_warps, "num_stages": form.num_stages, **form.options}
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
    assert target is not None
    return sass.read_binary(compiled.asm["cubin"], target[1]), int(compiled.metadata.shared)


def _judge(form: Shipped, sm: int, binary: sass.Binary, shared_bytes: int, instructions: Sequence[str]) -> CompiledForm:
    spills = sum(name.startswith(("LDL", "STL")) for name in instructions)
    wide_loads = sum(
        (name.startswith(("LDG", "LDGSTS")) and ".128" in name) or name.startswith("UTMALDG") for name in instructions
    )
    matrix = Counter(name for name in instructions if sass.is_matrix(name))
    faults = [*_matrix_faults(form, sm, matrix)]
    if binary.stack_bytes or spills:
        faults.append(f"spills: {binary.stack_bytes} bytes of stack, {spills} accesses")
    if shared_bytes > SHARED_LIMITS[sm]:
        faults.append(f"needs {shared_bytes} bytes of shared memory; the device has {SHARED_LIMITS[sm]}")
    if form.is_streaming and not wide_loads:
        faults.append("reads memory in loads of less than 16 bytes a thread")
    return CompiledForm(
        op=form.op,
        config=form.config,
        sm=sm,
        registers=binary.registers,
        stack_bytes=binary.stack_bytes,
        spills=spills,
        shared_bytes=shared_bytes,
        wide_loads=wide_loads,
        matrix=dict(sorted(matrix.items())),
        source=digest(form),
        faults=tuple(faults),
    )


def _matrix_faults(form: Shipped, sm: int, matrix: Mapping[str, int]) -> list[str]:
    wanted = _MATRIX_INSTRUCTIONS[80 if form.is_warp_matrix else sm]
    faults = []
    if (form.is_matrix or form.is_warp_matrix) and not any(name.startswith(wanted) for name in matrix):
        faults.append(f"multiplies without {' or '.join(wanted)}")
    if form.is_warp_matrix and any(name.startswith(_WARP_GROUP_INSTRUCTIONS) for name in matrix):
        faults.append("uses warp group instructions")
    return faults


def compile_tasks(tasks: Sequence[tuple[int, int]], jobs: int) -> list[CompiledForm]:
    """Compile (index of a form, architecture) pairs in `jobs` processes. Matrix kernels come first, because they take
    longest."""
    forms = _forms()
    ordered = sorted(tasks, key=lambda task: not (forms[task[0]].is_matrix or forms[task[0]].is_warp_matrix))
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        built = list(pool.map(_build, ordered))
        found = {(one.index, one.sm): row for one, row in zip(built, _judged(pool, built), strict=True)}
    return [found[task] for task in tasks]


def _build(task: tuple[int, int]) -> Built:
    return Built(*task, *_compile(_forms()[task[0]], task[1]))


def _judged(pool: Executor, built: Sequence[Built]) -> list[CompiledForm]:
    by_target: dict[str, list[int]] = {}
    for place, one in enumerate(built):
        by_target.setdefault(one.binary.target, []).append(place)
    codes = [[built[place].binary.code for place in places] for places in by_target.values()]
    listings = pool.map(sass.disassemble, by_target, codes)
    instructions = {
        place: names
        for places, found in zip(by_target.values(), listings, strict=True)
        for place, names in zip(places, found, strict=True)
    }
    return [
        _judge(_forms()[one.index], one.sm, one.binary, one.shared_bytes, instructions[place])
        for place, one in enumerate(built)
    ]


_all: list[Shipped] = []


def _forms() -> list[Shipped]:
    if not _all:
        _all.extend(all_shipped())
    return _all


def chosen(
    forms: Sequence[Shipped], known: Mapping[tuple[str, str], str], *, one_each: bool, sms: Sequence[int]
) -> list[tuple[int, int]]:
    """The (index of a form, architecture) pairs to compile. Without `one_each`: all. With it: for all of `sms` the
    forms whose digest `known` does not have by (op, config), and each op's first form for one of `sms`."""
    first = {form.op: index for index, form in reversed(list(enumerate(forms)))}
    turns = {index: turn for turn, index in enumerate(sorted(first.values()))}
    tasks: list[tuple[int, int]] = []
    for index, form in enumerate(forms):
        asked = [sm for sm in targets(form) if sm in sms]
        if not one_each or known.get((form.op, form.config)) != digest(form):
            tasks += [(index, sm) for sm in asked]
        elif index in turns and asked:
            tasks.append((index, asked[turns[index] % len(asked)]))
    return tasks


def read_table(path: Path) -> Table:
    """The table that `write_table` wrote; an empty one if there is no file."""
    if not path.exists():
        return Table("", ())
    content = json.loads(path.read_text())
    return Table(
        content["triton"], tuple(CompiledForm(**{**row, "faults": tuple(row["faults"])}) for row in content["rows"])
    )


def write_table(path: Path, rows: Sequence[CompiledForm]) -> None:
    """Write JSON with one row a line."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    path.write_text(f'{{"triton": {json.dumps(triton_version())}, "rows": [\n{lines}\n]}}\n')


def render(rows: Sequence[CompiledForm]) -> str:
    """A readable table with one row a line."""
    lines = [f"{'op':18} {'config':44} {'sm':>4} {'regs':>5} {'stack':>6} {'smem':>7} {'16 B':>5}  matrix"]
    for row in rows:
        matrix = ", ".join(f"{count} {name}" for name, count in row.matrix.items())
        lines.append(
            f"{row.op:18} {row.config:44} {row.sm:4} {row.registers:5} {row.stack_bytes:6} {row.shared_bytes:7} "
            f"{row.wide_loads:5}  {matrix}{''.join(f'  FAULT {fault}' for fault in row.faults)}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", type=lambda text: [int(part) for part in text.split(",")], default=[*SHARED_LIMITS])
    parser.add_argument("--one-each", action="store_true")
    parser.add_argument("--since", type=Path, metavar="TABLE", default=Path("no table"))
    parser.add_argument("--write", type=Path, metavar="TABLE")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(arguments)
    known = read_table(asked.since).sources()
    tasks = chosen(_forms(), known, one_each=asked.one_each, sms=asked.sm)
    rows = compile_tasks(tasks, asked.jobs)
    print(render(rows))
    if asked.write:
        write_table(asked.write, rows)
    faulty = [row for row in rows if row.faults]
    print(f"{len(rows)} compiled, {len(faulty)} with faults")
    return int(bool(faulty))


if __name__ == "__main__":
    sys.exit(main())
