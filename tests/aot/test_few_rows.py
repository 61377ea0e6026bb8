"""Products of few rows read memory, not shared memory: the compiled loop moves few bytes of shared memory for each byte
of the weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.aot.compiling import run

pytest.importorskip("triton")

MOST = 5.0
"""Most bytes of shared memory for each byte of the weight. An H200 moves 7 while memory moves one."""

COMPILED = """
import json
from inferd.kernels.compile import aot, sass

def loop_of(form, sm):
    binary = aot._compile(form, sm).binary
    return sass.disassemble(binary.target, [binary.code])[0].main_loop()

def weight_bytes(form):
    c = form.constants
    bits = 8 if form.signature["weight"] == "*fp8e4nv" else 16
    return c["BLOCK_N"] * c["BLOCK_K"] * (1 + c["HAS_GATE"]) * bits // 8

def moved(form):
    loop = loop_of(form, 90)
    return {"shared": loop.shared_bytes * form.num_warps / weight_bytes(form), "copies": loop.copies}

wanted = __WANTED__
print(json.dumps({f"{form.op} {form.config}": moved(form) for form in aot.all_shipped()
                  if (form.op, form.config) in wanted}))
"""

FORMS = [
    ("linear_few_rows", "bf16 tile 8 x 16 x 256"),
    ("norm_linear", "bf16 tile 8 x 16 x 256"),
    ("norm_linear", "bf16 tile 16 x 32 x 256"),
    ("norm_gate_up", "bf16 silu tile 8 x 16 x 256"),
    ("linear_fp8_few_rows", "bf16 weight fp8 groups tile 8 x 32 x 512"),
    ("norm_linear", "bf16 weight fp8 blocks tile 8 x 32 x 512"),
    ("norm_gate_up", "bf16 weight fp8 groups silu tile 8 x 16 x 256"),
]


def test_the_loop_moves_few_bytes_of_shared_memory(tmp_path: Path) -> None:
    path = tmp_path / "compiled.py"
    path.write_text(COMPILED.replace("__WANTED__", repr(FORMS)))
    code, output, errors = run(program=str(path))
    assert code == 0, errors[-2000:]
    found = json.loads(output)
    assert len(found) == len(FORMS)
    for name, moved in found.items():
        assert 2.0 < moved["shared"] < MOST and moved["copies"] > 0, (name, moved)
