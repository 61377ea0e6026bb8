"""Compiles every form of every Triton kernel for every supported architecture, without a GPU. `faults.py` judges the
code of each.

    python -m inferd.kernels.compile.aot [--one-each | --known-for S] [--op OPS] [--since TABLE] [--write TABLE]
        [--triton=DIR]

`--one-each` compiles the first form of each kernel for one architecture, which differs from kernel to kernel. It also
compiles, for all architectures, the forms that differ from those of TABLE: by their source, types or constants, or by
the version of Triton. `--known-for` compiles the other forms for so many seconds, in any order, and takes the rows of
the rest from TABLE. `--op` compiles the forms of these ops alone. With it, `--write` keeps what TABLE of `--since` says
of other ops. `--triton` compiles by another version, which pip installed with `--target DIR`. Exits with 1 if a form
has a fault that is not a known one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import math
import os
import random
import re
import subprocess
import sys
import time
import tokenize
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from inferd.kernels.compile import faults, sass
from inferd.kernels.compile.compiled import CompiledForm, Table, joined, read_table, render, triton_version, write_table
from inferd.kernels.device import SHARED_BYTES
from inferd.kernels.gpu import Shipped

_OPS = Path(__file__).parents[1] / "ops"
Task = tuple[int, int]
"""Index of a form, and the architecture to compile it for."""


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled form that has not been checked yet."""

    index: int
    """Index of the form."""
    sm: int
    binary: sass.Binary
    shared_bytes: int
    log: str
    """Log of the assembler."""


def all_shipped() -> list[Shipped]:
    """Every form of every kernel, by op."""
    forms: list[Shipped] = []
    for path in sorted(_OPS.glob("*/triton.py")):
        module = importlib.import_module(f"inferd.kernels.ops.{path.parent.name}.triton")
        forms += module.shipped()
    names = [(form.op, form.config) for form in forms]
    assert len(names) == len(set(names)), "two forms of one op have one name"
    return forms


def targets(form: Shipped) -> list[int]:
    """The architectures that the form is compiled for."""
    return [sm for sm in SHARED_BYTES if form.min_sm <= sm <= form.max_sm]


def digest(form: Shipped) -> str:
    """Identifies all that decides the compiled code, except the compiler's version: the form, the code of its kernel,
    and the functions and constants that the kernel uses. Comments, docstrings and positions in a file do not count."""
    content = [
        _code_of(form.kernel),
        *(sorted(map(repr, mapping.items())) for mapping in (form.signature, form.constants, form.options)),
        (form.num_warps, form.num_stages, sorted(form.multiples)),
        (form.is_matrix, form.is_warp_matrix, form.is_streaming, form.is_prefetching),
    ]
    fewer = [(sm, form.stages_on(sm)) for sm in targets(form) if form.stages_on(sm) != form.num_stages]
    content += [fewer] if fewer else []
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


def source_of(form: Shipped) -> Any:
    """A form as the compiler takes it: an `ASTSource`, whose addresses and `multiples` are multiples of 16."""
    from triton.compiler import ASTSource  # noqa: PLC0415

    _complete_cache_key(form.kernel)
    names = form.kernel.arg_names
    types = {**form.signature, **dict.fromkeys(form.constants, "constexpr")}
    aligned = {name for name in names if types[name].startswith("*") or name in form.multiples}
    attributes = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name in aligned}
    return ASTSource(form.kernel, {name: types[name] for name in names}, dict(form.constants), attributes)


def _compile(form: Shipped, sm: int, index: int = 0) -> Built:
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415

    options = {"num_warps": form.num_warps, "num_stages": form.stages_on(sm), **form.options}
    compiled, log = _assemble(source_of(form), GPUTarget("cuda", sm, 32), options)
    target = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
    assert target is not None
    return Built(index, sm, sass.read_binary(compiled.asm["cubin"], target[1]), int(compiled.metadata.shared), log)


def _assemble(source: Any, target: Any, options: Mapping[str, Any]) -> tuple[Any, str]:
    """(compiled kernel, log of its assembler). Triton's cache keeps no logs, so this puts them there. Only code with
    instructions of warp groups is compiled again for its log."""
    import triton  # noqa: PLC0415
    from triton.runtime.cache import get_cache_manager  # noqa: PLC0415

    nvidia, compilation = triton.knobs.nvidia, triton.knobs.compilation
    with nvidia.scope(), compilation.scope(), contextlib.redirect_stdout(io.StringIO()) as said:
        nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target, options=options)
        kept, name = get_cache_manager(compiled.hash), "assembler.log"
        path = kept.get_file(name)
        if not said.getvalue() and path is None and "wgmma.mma_async" in compiled.asm["ptx"]:
            compilation.always_compile = True
            compiled = triton.compile(source, target=target, options=options)
    if said.getvalue():
        kept.put(said.getvalue(), name, binary=False)
        return compiled, said.getvalue()
    return compiled, "" if path is None else Path(path).read_text()


def _judge(form: Shipped, built: Built, code: sass.Code) -> CompiledForm:
    loop = code.main_loop()
    known = faults.known_by(triton_version())
    verdict = faults.judge(form, built.sm, built.binary, built.shared_bytes, code, built.log, known)
    return CompiledForm(
        op=form.op,
        config=form.config,
        sm=built.sm,
        registers=built.binary.registers,
        stack_bytes=built.binary.stack_bytes,
        spills=faults.spills(code),
        shared_bytes=built.shared_bytes,
        wide_loads=faults.wide_loads(code),
        loop_instructions=0 if loop is None else loop.num_instructions,
        shared_per_global=0.0 if loop is None else round(loop.shared_bytes / max(1, loop.global_bytes), 2),
        matrix={name: count for name, count in sorted(code.names.items()) if sass.is_matrix(name)},
        source=digest(form),
        faults=verdict.faults,
        accepted=verdict.accepted,
    )


def compile_tasks(tasks: Sequence[Task], jobs: int, until_s: float = math.inf) -> dict[Task, CompiledForm]:
    """Compile in `jobs` processes. Matrix kernels come first, because they take longest. None starts after `until_s` of
    the monotonic clock."""
    forms = _forms()
    ordered = sorted(tasks, key=lambda task: not (forms[task[0]].is_matrix or forms[task[0]].is_warp_matrix))
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        built = [one for one in pool.map(partial(_build, until_s), ordered) if one is not None]
        return {(one.index, one.sm): row for one, row in zip(built, _judged(pool, built), strict=True)}


def _build(until_s: float, task: Task) -> Built | None:
    index, sm = task
    return _compile(_forms()[index], sm, index) if time.monotonic() < until_s else None


def _judged(pool: Executor, built: Sequence[Built]) -> list[CompiledForm]:
    by_target: dict[str, list[int]] = {}
    for place, one in enumerate(built):
        by_target.setdefault(one.binary.target, []).append(place)
    codes = [[built[place].binary.code for place in places] for places in by_target.values()]
    read = {
        place: code
        for places, found in zip(by_target.values(), pool.map(sass.disassemble, by_target, codes), strict=True)
        for place, code in zip(places, found, strict=True)
    }
    return [_judge(_forms()[one.index], one, read[place]) for place, one in enumerate(built)]


_all: list[Shipped] = []


def _forms() -> list[Shipped]:
    if not _all:
        _all.extend(all_shipped())
    return _all


def chosen(
    forms: Sequence[Shipped],
    known: Mapping[tuple[str, str], str],
    *,
    one_each: bool,
    sms: Sequence[int],
    ops: Sequence[str] = (),
) -> list[Task]:
    """The tasks to compile, of `ops` alone if there are any. Without `one_each`: all. With it: for all of `sms` the
    forms whose digest `known` does not have by (op, config), and each op's first form for one of `sms`."""
    first = {form.op: index for index, form in reversed(list(enumerate(forms)))}
    turns = {index: turn for turn, index in enumerate(sorted(first.values()))}
    tasks: list[Task] = []
    for index, form in enumerate(forms):
        asked = [sm for sm in targets(form) if sm in sms and (not ops or form.op in ops)]
        if not one_each or known.get((form.op, form.config)) != digest(form):
            tasks += [(index, sm) for sm in asked]
        elif index in turns and asked:
            tasks.append((index, asked[turns[index] % len(asked)]))
    return tasks


def rows_of(tasks: Sequence[Task], table: Table, jobs: int, known_for_s: float) -> tuple[list[CompiledForm], int]:
    """(row of each task, number of those that were compiled). Tasks that `table` has are compiled for so long only."""
    forms, sources = _forms(), table.sources()
    listed = {(row.op, row.config, row.sm): row for row in table.rows}
    same = [sources.get((form.op, form.config)) == digest(form) for form in forms]
    is_known = {task: same[task[0]] and (forms[task[0]].op, forms[task[0]].config, task[1]) in listed for task in tasks}
    found = compile_tasks([task for task in tasks if not is_known[task]], jobs)
    others = random.sample(tasks, len(tasks))
    found |= compile_tasks([task for task in others if is_known[task]], jobs, time.monotonic() + known_for_s)
    rows = [found.get((index, sm)) or listed[forms[index].op, forms[index].config, sm] for index, sm in tasks]
    return rows, len(found)


def _with_triton(folder: Path, arguments: Sequence[str]) -> int:
    """Run this program again, with the Triton of another folder."""
    if not (folder / "triton").is_dir():
        raise SystemExit(f"--triton: {folder} has no Triton: pip install --no-deps --target {folder} triton==3.6.0")
    paths = (str(folder), *filter(None, sys.path))
    kept = [one for one in arguments if not one.startswith("--triton")]
    command = [sys.executable, "-P", "-m", "inferd.kernels.compile.aot", *kept]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", type=lambda text: [int(part) for part in text.split(",")], default=[*SHARED_BYTES])
    parser.add_argument("--one-each", action="store_true")
    parser.add_argument("--op", type=lambda text: text.split(","), default=[])
    parser.add_argument("--since", type=Path, metavar="TABLE", default=Path("no table"))
    parser.add_argument("--known-for", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--triton", type=Path, metavar="FOLDER", help="given as --triton=FOLDER")
    parser.add_argument("--write", type=Path, metavar="TABLE")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(arguments)
    if asked.triton:
        return _with_triton(asked.triton, sys.argv[1:] if arguments is None else arguments)
    known, names = read_table(asked.since), [(form.op, form.config) for form in _forms()]
    unknown = sorted({*asked.op} - {op for op, _ in names})
    if unknown:
        parser.error(f"no op is called {', '.join(unknown)}; the first column of the table has their names")
    if asked.op and asked.write and known.triton != triton_version():
        parser.error(f"--op with --write keeps other rows of --since, made by Triton {triton_version()}; it has none")
    tasks = chosen(_forms(), known.sources(), one_each=asked.one_each, sms=asked.sm, ops=asked.op)
    rows, num_compiled = rows_of(tasks, known, asked.jobs, asked.known_for)
    print(render(rows))
    if asked.write:
        write_table(asked.write, joined(rows, known, asked.op, names) if asked.op else rows)
    faulty = [row for row in rows if row.faults]
    print(f"{num_compiled} compiled, {len(rows) - num_compiled} as the table says, {len(faulty)} with faults")
    return int(bool(faulty))


if __name__ == "__main__":
    sys.exit(main())
