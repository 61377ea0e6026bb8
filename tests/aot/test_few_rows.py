"""Products of few rows read memory, not shared memory: the compiled loop moves few bytes of shared memory for each byte
of the weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferd.kernels import sass
from tests.aot.compiling import run

pytest.importorskip("triton")

MOST = 5.0
"""Most bytes of shared memory for each byte of the weight. An H200 moves 7 while memory moves one."""

COMPILED = """
import json, tempfile
from inferd.kernels import aot, sass

def loop_of(form, sm):
    binary, _ = aot._compile(form, sm)
    with tempfile.NamedTemporaryFile(suffix=".code") as file:
        file.write(binary.code)
        file.flush()
        listing = sass._tool("nvdisasm", "--binary", binary.target.replace("sm_", "SM"), file.name)
    return sass.longest_loop(listing)

def weight_bytes(form):
    c = form.constants
    bits = 8 if form.signature["weight"] == "*fp8e4nv" else 16
    return c["BLOCK_N"] * c["BLOCK_K"] * (1 + c["HAS_GATE"]) * bits // 8

def moved(form):
    loop = loop_of(form, 90)
    shared = sum(map(sass.shared_bytes, loop)) * form.num_warps
    return {"shared": shared / weight_bytes(form), "copies": sum(name.startswith("LDGSTS") for name in loop)}

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


LISTING = """
        /*0000*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/              @!P0 LDGSTS.E.BYPASS.128 [R7], desc[UR4][R2.64] ;
        /*0030*/              @P0 BRA 0x10 ;
        /*0040*/                   LDS.U16 R4, [R2] ;
        /*0050*/                   STS R4, [R2] ;
        /*0060*/              @P1 BRA 0x40 ;
        /*0070*/                   BRA 0x70;
        /*0080*/              @P1 BRA 0xa0 ;
"""


def test_bytes_of_shared_memory_are_counted_in_the_loop_that_multiplies() -> None:
    loop = sass.longest_loop(LISTING)
    assert loop == ["HMMA.16816.F32.BF16", "LDGSTS.E.BYPASS.128", "BRA"]
    assert sass.longest_loop(LISTING.replace("HMMA", "FFMA")) == []
    names = ("LDSM.16.M88.4", "LDSM.16.MT88.2", "LDS.128", "LDS.U16", "STS.U8", "STS", "LDGSTS.E.BYPASS.128", "LDG.E")
    assert list(map(sass.shared_bytes, names)) == [512, 256, 512, 64, 32, 128, 512, 0]
