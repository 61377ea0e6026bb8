"""Compiles every form of every Triton kernel for an AMD GPU, without one, and lists what fails. Early starts are left
out, because only NVIDIA has them.

    python -m inferd.kernels.compile.amd [--arch gfx942] [--op OPS] [--write TABLE] [--jobs N]

That a form compiles says nothing about its results or its speed: no kernel has run on an AMD GPU, and the server
refuses to start on one.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from inferd.kernels.compile import aot
from inferd.kernels.compile.compiled import triton_version
from inferd.kernels.device import DeviceProperties
from inferd.kernels.gpu import Shipped

LDS_BYTES = 64 << 10
"""Most shared memory of one program (local data share; CDNA3 instruction set, section 11)."""
WAVE = 64
"""Threads of a warp."""
_OF_NVIDIA = ("maxnreg", "launch_pdl")
"""Options that this compiler does not know."""
_STAGES_WITHOUT_ROOM = 1
_NUMBERS = re.compile(r"^(needs|spills) [\d,]+")
_DEVICE = DeviceProperties(sm=0, shared_bytes=LDS_BYTES, num_multiprocessors=304)


@dataclass(frozen=True, slots=True)
class AmdForm:
    """One form of a kernel, compiled for one AMD architecture."""

    op: str
    config: str
    arch: str
    num_stages: int
    registers: int
    """Vector registers of a thread, accumulators included."""
    spills: int
    """Vector registers that did not fit."""
    shared_bytes: int
    matrix: int
    """Number of matrix instructions (v_mfma)."""
    faults: tuple[str, ...]
    """Why it could not be launched, or would be slow."""


@functools.cache
def forms() -> list[Shipped]:
    """The forms to compile."""
    return [form for form in aot.all_shipped() if not form.constants.get("IS_DEPENDENT")]


def compiled(form: Shipped, arch: str) -> AmdForm:
    from triton import compile as compile_source  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415

    num_stages = form.num_stages
    if form.shared is not None:
        num_stages = form.shared.stages_on(_DEVICE, form.num_stages) or _STAGES_WITHOUT_ROOM
    options = {name: value for name, value in form.options.items() if name not in _OF_NVIDIA}
    try:
        found = compile_source(
            aot.source_of(form),
            target=GPUTarget("hip", arch, WAVE),
            options={"num_warps": form.num_warps, "num_stages": num_stages, **options},
        )
    except Exception as error:  # the compiler raises errors of many kinds, and each is a row of the table
        return AmdForm(form.op, form.config, arch, num_stages, 0, 0, 0, 0, (_refusal(str(error)),))
    code, shared_bytes = found.asm["amdgcn"], int(found.metadata.shared)
    spills, matrix = _count(code, "vgpr_spill_count"), code.count("v_mfma")
    faults = []
    if shared_bytes > LDS_BYTES:
        faults.append(f"needs {shared_bytes:,} of {LDS_BYTES:,} bytes of shared memory")
    if spills:
        faults.append(f"spills {spills} registers")
    if not matrix and (form.is_matrix or form.is_warp_matrix):
        faults.append("multiplies without matrix instructions")
    registers = _count(code, "vgpr_count")
    return AmdForm(form.op, form.config, arch, num_stages, registers, spills, shared_bytes, matrix, tuple(faults))


def _refusal(error: str) -> str:
    """The compiler's error as one fault. It names files of its own."""
    lines = [line for line in error.splitlines() if line.strip()] or ["the compiler gives no reason"]
    is_assembly = "failed to link hsaco" in error
    return f"does not compile: {'the assembler refuses its code' if is_assembly else lines[-1][:200]}"


def _count(code: str, name: str) -> int:
    found = re.search(rf"\.{name}:\s*(\d+)", code)
    return int(found[1]) if found else 0


def _compiled(arch: str, index: int) -> AmdForm:
    return compiled(forms()[index], arch)


def render(rows: Sequence[AmdForm]) -> str:
    """A line for each op: its forms and those with faults, and each kind of fault once."""
    lines = []
    for op in dict.fromkeys(row.op for row in rows):
        own = [row for row in rows if row.op == op]
        kinds = Counter(_NUMBERS.sub(r"\1 ...", fault) for row in own for fault in row.faults)
        told = "".join(f"; {count}: {kind}" for kind, count in kinds.items())
        lines.append(f"{op:22} {len(own):4} forms, {sum(bool(row.faults) for row in own):3} with faults{told}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="gfx942")
    parser.add_argument("--op", type=lambda text: text.split(","), default=[])
    parser.add_argument("--write", type=Path, metavar="TABLE")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args(arguments)
    chosen = [index for index, form in enumerate(forms()) if not asked.op or form.op in asked.op]
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("fork")) as pool:
        rows = list(pool.map(functools.partial(_compiled, asked.arch), chosen))
    print(render(rows))
    print(f"{len(rows)} forms for {asked.arch}, {sum(bool(row.faults) for row in rows)} with faults")
    if asked.write:
        body = ",\n".join(json.dumps(asdict(row)) for row in rows)
        asked.write.write_text(f'{{"triton": {json.dumps(triton_version())}, "rows": [\n{body}\n]}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
