"""The check of compiled kernels sees every fault, counts each by itself, and knows which forms to compile again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from inferd.kernels import aot, sass
from tests.aot.compiling import run

pytest.importorskip("triton")


SPILLING = """
import sys
import triton, triton.language as tl
from inferd.kernels.aot import compile_form, render
from inferd.kernels.gpu import Shipped

@triton.jit
def kernel(x, out, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    values = tl.load(x + column)
    tl.store(out + column, values * tl.sum(values))

form = Shipped("sum", "one warp", kernel, {"x": "*fp32", "out": "*fp32"}, {"BLOCK": 16384}, 1, is_matrix=True)
print(*compile_form(form, 90).faults, sep="; ")
"""


def test_faults_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "spilling.py"
    path.write_text(SPILLING)
    code, output, errors = run(program=str(path))
    assert code == 0, errors[-2000:]
    assert "spills: " in output
    assert "multiplies without HGMMA or QGMMA or IGMMA" in output


DISASSEMBLED = """
import re, tempfile
import triton
from inferd.kernels import aot, gpu, sass
from pathlib import Path

def theirs(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = sass._tool("cuobjdump", "-sass", file.name)
    found = re.findall(r"(?m)^ +/\\*[0-9a-f]{4}\\*/ +([^;]*);", text)
    return [line.split() for line in found]

cubins = []
read = sass.read_binary
sass.read_binary = lambda cubin, target: (cubins.append(cubin), read(cubin, target))[1]
forms = {form.op: form for form in reversed(aot.all_shipped())}
binaries = [aot._compile(forms[op], 90)[0] for op in ("linear_few_rows", "linear_invariant", "linear_fp8")]
ours = sass.disassemble("sm_90a", [binary.code for binary in binaries])
for names, cubin in zip(ours, cubins, strict=True):
    words = theirs(cubin)
    assert names == [line[1] if line[0].startswith("@") else line[0] for line in words], names[:20]
    assert any(map(sass.is_matrix, names))
print(len(ours), "alike")
"""


def test_kernels_in_one_image_have_the_instructions_that_they_have_alone(tmp_path: Path) -> None:
    path = tmp_path / "disassembled.py"
    path.write_text(DISASSEMBLED)
    code, output, errors = run(program=str(path))
    assert (code, output) == (0, "3 alike\n"), errors[-2000:]


LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0 ;
        /*0030*/             @!UP1 UTCHMMA gdesc[UR20], gdesc[UR22], tmem[UR12], tmem[UR4], idesc[UR5], UP0 ;
        /*0040*/               @P6 HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
"""


def test_instructions_have_their_whole_names() -> None:
    first, second, third = sass.split(LISTING, [32, 16, 32])
    assert first == ["LDC", "LDG.E.128"] and second == ["HGMMA.64x64x16.F32.BF16"]
    assert third == ["UTCHMMA", "HMMA.16816.F32.BF16"]
    assert [sass.is_matrix(name) for name in (*first, *second, *third)] == [False, False, True, True, True]
    assert not any(map(sass.is_matrix, ("FFMA", "HFMA2.MMA", "DFMA", "IMAD.MOV.U32", "R2UR")))
    with pytest.raises(AssertionError, match="5 instructions in 96 bytes"):
        sass.split(LISTING, [64, 32])


class Kernel:
    def __init__(self, source: str) -> None:
        self.src, self.fn = source, lambda: None


def form(op: str, config: str, source: str = "x", width: int = 1) -> aot.Shipped:
    return aot.Shipped(op, config, Kernel(source), {"x": "*bf16"}, {"WIDTH": width}, 1)


EVERYWHERE = (80, 90, 100)


def everywhere(*indices: int) -> list[tuple[int, int]]:
    return [(index, sm) for index in indices for sm in EVERYWHERE]


def test_what_is_compiled_again() -> None:
    """Forms that differ from the table are compiled for every architecture; of the others one form each, for one
    architecture."""
    forms = [form("a", "1"), form("a", "2"), form("b", "1"), form("b", "2"), form("b", "3"), form("c", "1")]
    known = {(one.op, one.config): aot.digest(one) for one in forms}
    assert aot.chosen(forms, known, one_each=False, sms=EVERYWHERE) == everywhere(*range(6))
    assert aot.chosen(forms, known, one_each=True, sms=EVERYWHERE) == [(0, 80), (2, 90), (5, 100)]
    assert aot.chosen(forms, {}, one_each=True, sms=EVERYWHERE) == everywhere(*range(6))
    del known["b", "2"]
    assert aot.chosen(forms, known, one_each=True, sms=EVERYWHERE) == [(0, 80), (2, 90), *everywhere(3), (5, 100)]
    del known["b", "1"]
    assert aot.chosen(forms, known, one_each=True, sms=EVERYWHERE) == [(0, 80), *everywhere(2, 3), (5, 100)]
    known["b", "1"] = aot.digest(forms[2])
    changes = (form("b", "3", "other source"), form("b", "3", width=2), replace(forms[4], num_warps=2))
    more = (replace(forms[4], signature={"x": "*fp16"}), replace(forms[4], is_matrix=True))
    for changed in (*changes, *more, replace(forms[4], options={"enable_fp_fusion": False})):
        found = aot.chosen([*forms[:4], changed, forms[5]], known, one_each=True, sms=EVERYWHERE)
        assert found == [(0, 80), (2, 90), *everywhere(3, 4), (5, 100)], changed
    new = replace(forms[0], min_sm=90)
    known["a", "1"] = aot.digest(new)
    forms[0] = new
    assert aot.chosen(forms, known, one_each=True, sms=EVERYWHERE) == [(0, 90), (2, 90), *everywhere(3), (5, 100)]
    assert aot.chosen(forms, known, one_each=True, sms=[80]) == [(2, 80), (3, 80), (5, 80)]


WORDED = (
    'def kernel(x):\n    """Some."""\n    y = x  # one\n    tl.store(x, y)\n',
    "def kernel(x):\n    y = x\n\n    # two\n    tl.store(x, y)\n",
)


def test_words_and_layout_do_not_change_a_digest() -> None:
    """A kernel with other comments compiles to the same code."""
    first, second = (aot.digest(form("a", "1", source)) for source in WORDED)
    assert first == second != aot.digest(form("a", "1", WORDED[1].replace("y = x", "y = x + x")))


CONSTANTS = """
from dataclasses import replace
from triton.language import constexpr
from inferd.kernels import aot
from inferd.kernels.top_k_top_p import triton as ops
forms = {form.op: form for form in aot.all_shipped()}
first = {op: aot.digest(form) for op, form in forms.items()}
ops._WHOLE = constexpr(1.0)
print(*sorted(op for op, form in forms.items() if aot.digest(form) != first[op]))
"""


def test_a_constant_of_a_called_function_changes_a_digest(tmp_path: Path) -> None:
    path = tmp_path / "constants.py"
    path.write_text(CONSTANTS)
    code, output, errors = run(program=str(path))
    assert (code, output) == (0, "top_k_top_p_select top_k_top_p_sort\n"), errors[-2000:]


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert aot.read_table(tmp_path / "none.json") == aot.Table("", ())
    row = aot.CompiledForm("a", "1", 90, 1, 2, 3, 4, 5, {"HGMMA.64x64x16.F32.BF16": 4}, "x", ("a fault",))
    path = tmp_path / "table.json"
    aot.write_table(path, [row, replace(row, sm=100)])
    table = aot.read_table(path)
    assert table == aot.Table(aot.triton_version(), (row, replace(row, sm=100)))
    assert table.sources() == {("a", "1"): "x"} and replace(table, triton="0").sources() == {}
    assert "4 HGMMA.64x64x16.F32.BF16  FAULT a fault" in aot.render([row])
    assert len(path.read_text().splitlines()) == 4
