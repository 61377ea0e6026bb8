"""The check of compiled kernels sees every fault, counts each by itself, and knows which forms to compile again."""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import dry
from benchmarks.gpu.runner import Options
from inferd.kernels.compile import aot, compiled, faults, sass
from tests.aot.compiling import run
from tests.conftest import CACHE_HOME, ROOT

pytest.importorskip("triton")


PLANTED = """
import triton, triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from inferd.kernels.gpu import Shipped

@triton.jit
def early(x, out, count, WAITS: tl.constexpr, READS: tl.constexpr, LEAVES: tl.constexpr):
    column = tl.arange(0, 1024)
    gdc_launch_dependents()
    if LEAVES:
        if tl.program_id(0) >= count:
            return
    if READS:
        values = tl.load(x + column)
    if WAITS:
        gdc_wait()
    if not READS:
        values = tl.load(x + column)
    tl.store(out + column, values)

@triton.jit
def spilling(x, out, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    values = tl.load(x + column)
    tl.store(out + column, values * tl.sum(values))

@triton.jit
def products(x, out, count, IS_SERIAL: tl.constexpr):
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    left = tl.load(x + row * 64 + column)
    total, part = tl.zeros([64, 64], tl.float32), tl.zeros([64, 64], tl.float32)
    for start in range(0, count, 64):
        right = tl.load(x + (start + row) * 64 + column)
        weights = tl.dot(left, tl.trans(right)).to(tl.bfloat16)
        part = tl.dot(weights, right, part * 0.5)
        if IS_SERIAL:
            if start % 256 == 192:
                total = total * 0.25 + part
                part = tl.zeros([64, 64], tl.float32)
    tl.store(out + row * 64 + column, total + part)

@triton.jit
def sums(x, out, count, STAGES: tl.constexpr):
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :]
    total = tl.zeros([16, 64], tl.float32)
    for start in tl.range(0, count, num_stages=STAGES):
        total = total * 0.5 + tl.load(x + start * 1024 + row * 64 + column)
    tl.store(out + row * 64 + column, total)

def form(config, kernel, dtype, constants, **more):
    signature = {"x": f"*{dtype}", "out": "*fp32", "count": "i32"}
    signature = {name: signature[name] for name in kernel.arg_names if name in signature}
    limits = {"multiples": ("count",), "min_sm": 90, "max_sm": 90}
    return Shipped("planted", config, kernel, signature, constants, **limits, **more)

def shipped():
    yield form("spilling", spilling, "fp32", {"BLOCK": 16384}, num_warps=1, is_matrix=True)
    for config, is_serial in (("products", False), ("serialized products", True)):
        yield form(config, products, "bf16", {"IS_SERIAL": is_serial}, num_warps=4, num_stages=3, is_matrix=True)
    for config, stages in (("sums", 4), ("sums without a pipeline", 1)):
        yield form(config, sums, "fp32", {"STAGES": stages}, num_warps=4, is_streaming=True)
    for config, waits, reads, leaves in (
        ("early", 1, 0, 0), ("early that reads", 1, 1, 0), ("early without a wait", 0, 0, 0), ("early end", 1, 0, 1)
    ):
        constants = {"WAITS": waits, "READS": reads, "LEAVES": leaves}
        yield form(config, early, "fp32", constants, num_warps=4, options={"launch_pdl": True})
"""
FAULTY = {
    "spilling": r"multiplies without HGMMA or QGMMA or IGMMA; spills: \d+ bytes of stack, \d+ accesses",
    "serialized products": r"C75\d\d: .*serialized.*; a loop waits \d+ times for \d+ instructions of warp groups",
    "early that reads": r"starts early and has LDG\S* before it waits",
    "early without a wait": r"starts early and never waits for the kernel before it",
    "early end": r"starts early and may pass its wait, by EXIT",
    "sums without a pipeline": r"a loop reads \d+ bytes at a time, fewer than 24576, without asynchronous copies",
}


def planted(folder: Path) -> Path:
    """An import root whose only kernels are the planted ones."""
    package = folder / "inferd" / "kernels"
    (package / "ops" / "planted").mkdir(parents=True)
    for made in (folder / "inferd", package, package / "ops", package / "ops" / "planted"):
        (made / "__init__.py").touch()
    for name in ("compile", "gpu"):
        (package / name).symlink_to(ROOT / "kernels" / name, target_is_directory=True)
    for name in ("device.py", "registry.py"):
        (package / name).symlink_to(ROOT / "kernels" / name)
    (package / "ops" / "planted" / "triton.py").write_text(PLANTED)
    return folder


def test_the_dry_run_fails_on_each_planted_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names each fault, and nothing of the sound versions. A second run says the same: it finds the kernels in the
    compiler's cache."""
    tree = planted(tmp_path / "tree")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(CACHE_HOME / "triton"))
    monkeypatch.setattr(dry, "make_tree", lambda: tree)
    monkeypatch.setattr(dry, "DRY_FILE", ROOT / "build" / "gpu" / f"{tmp_path.name}.json")
    monkeypatch.setattr(dry, "TABLE", tmp_path / "table.json")
    monkeypatch.setattr(dry, "_numerics", lambda *_: {"planted": {"max_err": 0.0, "tol": 0.0, "reason": ""}})
    monkeypatch.setattr(dry, "_listed", lambda *_: {})
    for _ in range(2):
        said: list[str] = []
        assert dry.run(Options(work_dir=tmp_path), said.append, lambda row: False) == 1
        forms = json.loads(dry.DRY_FILE.read_text())["rows"]
        dry.DRY_FILE.unlink()
        assert {form["config"] for form in forms if form["loop"]} == {
            "products", "serialized products", "sums", "sums without a pipeline",
        }  # fmt: skip
        wrong = dict(re.findall(r"^WRONG planted, ([\w ]+), sm_90: (.*)$", "\n".join(said), re.MULTILINE))
        assert set(wrong) == set(FAULTY), said
        assert all(re.fullmatch(FAULTY[config], found) for config, found in wrong.items()), wrong


LOOPS = """
        /*0000*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0010*/                   LDGSTS.E.BYPASS.128 [R35], desc[UR22][R6.64], P6 ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR4].tnspB, R24, gsb0 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR4], RZ, !UPT, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0060*/               @P1 BRA 0x10 ;
        /*0070*/                   LDG.E.64 R4, desc[UR4][R2.64] ;
        /*0080*/               @P2 BRA P3, 0x70 ;
        /*0090*/                   FADD R4, R4, R4 ;
        /*00a0*/               @P2 BRA 0x90 ;
        /*00b0*/               @P0 BRA 0x0 ;
        /*00c0*/                   EXIT ;
        /*00d0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P6, [UR18], R16 ;
        /*00e0*/                   BRA 0x10 ;
        /*00f0*/                   BRA 0xf0 ;
"""


def test_loops_that_work_are_found_and_measured() -> None:
    """The innermost ones alone: neither the loop around them, nor one that only computes, nor a jump back from code
    behind the end."""
    shift = "\n".join(f"        /*{16 * index:04x}*/                   NOP ;" for index in range(2))
    moved = re.sub(r"/\*(\w{4})\*/", lambda found: f"/*{int(found[1], 16) + 32:04x}*/", LOOPS)
    moved = re.sub(r"BRA (P3, )?0x(\w+)", lambda found: f"BRA {found[1] or ''}{int(found[2], 16) + 32:#x}", moved)
    nothing, code = map(sass.measure, sass.split(shift + moved, [32, 256]))
    assert nothing.loops == () and nothing.main_loop() is None
    first, second = code.loops
    assert (first.num_instructions, first.matrix, first.copies, first.loads) == (6, 2, 1, 0)
    assert (second.num_instructions, second.matrix, second.copies, second.loads) == (2, 0, 0, 1)
    assert first.starting("WARPGROUP.DEPBAR") == 1 and code.main_loop() == first
    assert (first.global_bytes, second.global_bytes, second.shared_bytes) == (512, 256, 0)
    # Written by the copy, and read: 128 rows of B; 64 rows of A and 64 of B; four matrices of 8 x 8.
    assert first.shared_bytes == 512 + 128 * 32 / 4 + 128 * 32 / 4 + 512


def test_a_known_fault_is_told_apart_with_its_reason() -> None:
    loop = sass.Loop(9, {"HGMMA.64x64x16.F32": 2, "WARPGROUP.DEPBAR.LE": 2}, 0, 0)
    code, binary = sass.Code(loop.names, (loop,)), sass.Binary("sm_90a", 40, 0, b"")
    log = "info : (C7510) serialized\ninfo : (C7510) serialized"
    waits = "a loop waits 2 times for 2 instructions of warp groups"
    known = (faults.Known("a", "^1", "waits", "cold"),)
    for one, expected in (
        (form("a", "1"), faults.Verdict(("C7510: serialized",), (f"{waits}: cold",))),
        (form("a", "2"), faults.Verdict(("C7510: serialized", waits), ())),
        (form("b", "1"), faults.Verdict(("C7510: serialized", waits), ())),
    ):
        assert faults.judge(one, 90, binary, 0, code, log, known) == expected


def test_early_kernels_are_judged_by_the_order_of_their_instructions() -> None:
    """A product must ask for its weights before it waits."""
    plain = form("a", "1").early()
    product = form("a", "1").early(is_prefetching=True)
    nothing, late = "asks for no weights before it waits", "starts early and has STG.E before it waits"
    taken = "takes tensor memory after it lets the next kernel start"
    for one, names, expected in (
        (plain, ("PREEXIT", "LDC", "ACQBULK", "LDG.E"), ()),
        (product, ("PREEXIT", "CCTL.E.PF2", "ACQBULK", "LDG.E"), ()),
        (product, ("PREEXIT", "ACQBULK", "CCTL.E.PF2", "LDG.E"), (nothing,)),
        (plain, ("STG.E", "ACQBULK", "LDG.E"), (late, "never lets the next kernel start")),
        (plain, ("UTCATOMSWS.FIND_AND_SET", "PREEXIT", "ACQBULK", "REDUX.SUM"), ()),
        (plain, ("PREEXIT", "UTCATOMSWS.FIND_AND_SET", "ACQBULK"), (taken,)),
    ):
        code, binary = sass.Code(dict.fromkeys(names, 1), ()), sass.Binary("sm_90a", 40, 0, b"")
        assert faults.judge(one, 90, binary, 0, code, "", ()) == faults.Verdict(expected, ()), names


@pytest.mark.parametrize(
    ("before", "wait", "expected"),
    [
        ("@P0 BRA 0x30 ;", "ACQBULK ;", ()),
        ("NOP ;", "@P0 ACQBULK ;", ("a condition of ACQBULK",)),
        ("@P0 EXIT ;", "ACQBULK ;", ("EXIT",)),
        ("@P0 BRA 0x50 ;", "ACQBULK ;", ("BRA",)),
        ("BRX R2 -0x90 ;", "ACQBULK ;", ("BRX",)),
    ],
)
def test_every_way_around_a_wait_is_found(before: str, wait: str, expected: tuple[str, ...]) -> None:
    """A jump to the wait is none, and neither is an end behind it."""
    lines = ("PREEXIT ;", before, "NOP ;", wait, "LDG.E R2, [R4] ;", "EXIT ;")
    listing = "\n".join(f"        /*{16 * index:04x}*/                   {line}" for index, line in enumerate(lines))
    (code,) = map(sass.measure, sass.split(listing, [16 * len(lines)]))
    assert code.passing_wait == expected


DISASSEMBLED = """
import re, tempfile
import triton
from inferd.kernels.compile import aot, gpu, sass
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
binaries = [aot._compile(forms[op], 90).binary for op in ("linear_few_rows", "linear_invariant", "linear_fp8")]
ours = sass.listings("sm_90a", [binary.code for binary in binaries])
for instructions, cubin in zip(ours, cubins, strict=True):
    names = [one.name for one in instructions]
    words = theirs(cubin)
    assert names == [line[1] if line[0].startswith("@") else line[0] for line in words], names[:20]
    assert any(map(sass.is_matrix, names))
print(len(ours), "alike")
"""


@pytest.mark.long
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
    first, second, third = ([one.name for one in part] for part in sass.split(LISTING, [32, 16, 32]))
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
    assert aot.chosen(forms, known, one_each=False, sms=[80, 90], ops=("a",)) == [(0, 90), (1, 80), (1, 90)]


def test_forms_of_the_table_are_compiled_for_some_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that the table does not have is compiled, however long it takes."""
    forms = [form("a", "1"), form("a", "2"), form("b", "1")]
    monkeypatch.setattr(aot, "_all", forms)
    row = compiled.CompiledForm("a", "1", 90, 1, 2, 3, 4, 5, 96, 3.5, {}, aot.digest(forms[0]), (), ())
    rows = {90: row, 100: replace(row, sm=100)}
    changed = replace(row, op="b", source="other")
    table = compiled.Table(compiled.triton_version(), (*rows.values(), changed))
    asked: list[tuple[set[aot.Task], bool]] = []

    def compile_some(tasks: list[aot.Task], _: int, until_s: float = math.inf) -> dict[aot.Task, compiled.CompiledForm]:
        asked.append((set(tasks), until_s < math.inf))
        return {task: replace(row, sm=task[1], registers=40) for task in tasks if task != (0, 100)}

    monkeypatch.setattr(aot, "compile_tasks", compile_some)
    tasks = [(0, 90), (0, 100), (1, 90), (2, 90)]
    found, num_compiled = aot.rows_of(tasks, table, 1, 5.0)
    assert asked == [({(1, 90), (2, 90)}, False), ({(0, 90), (0, 100)}, True)]
    assert ([one.registers for one in found], num_compiled) == ([40, 1, 40, 40], 3)
    assert found[1] == rows[100]
    aot.rows_of(tasks, replace(table, triton="0"), 1, 5.0)
    assert asked[2:] == [(set(tasks), False), (set(), True)]


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
from inferd.kernels.compile import aot
from inferd.kernels.ops.top_k_top_p import triton as ops
forms = {form.op: form for form in aot.all_shipped()}
first = {op: aot.digest(form) for op, form in forms.items()}
ops._WHOLE = constexpr(1.0)
print(*sorted(op for op, form in forms.items() if aot.digest(form) != first[op]))
"""


def test_a_constant_of_a_called_function_changes_a_digest(tmp_path: Path) -> None:
    path = tmp_path / "constants.py"
    path.write_text(CONSTANTS)
    code, output, errors = run(program=str(path))
    assert (code, output) == (0, "draw_sort top_k_top_p_select top_k_top_p_sort\n"), errors[-2000:]


def test_another_triton_compiles_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder comes first in the path. A folder without Triton is refused."""
    with pytest.raises(SystemExit, match=f"{tmp_path} has no Triton: pip install --no-deps --target {tmp_path} triton"):
        aot.main([f"--triton={tmp_path}"])
    package = tmp_path / "triton"
    package.mkdir()
    (package / "__init__.py").write_text("print('another')")
    asked: list[tuple[list[str], dict[str, str]]] = []

    def noted(command: list[str], *, env: dict[str, str], check: bool) -> subprocess.CompletedProcess[bytes]:
        asked.append((command, env))
        return subprocess.CompletedProcess(command, 3)

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", noted)
        assert aot.main(["--sm", "90", f"--triton={tmp_path}"]) == 3
    ((command, env),) = asked
    assert command[1:] == ["-P", "-m", "inferd.kernels.compile.aot", "--sm", "90"]
    program = "import triton, inferd.kernels.compile as made; print(made.__path__[0])"
    done = subprocess.run([command[0], "-P", "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["another", str(Path(aot.__file__).parent)]


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert compiled.read_table(tmp_path / "none.json") == compiled.Table("", ())
    matrix = {"HGMMA.64x64x16.F32.BF16": 4}
    row = compiled.CompiledForm("a", "1", 90, 1, 2, 3, 4, 5, 96, 3.5, matrix, "x", ("a fault",), ("cold: late",))
    path = tmp_path / "table.json"
    compiled.write_table(path, [row, replace(row, sm=100)])
    table = compiled.read_table(path)
    assert table == compiled.Table(compiled.triton_version(), (row, replace(row, sm=100)))
    assert table.sources() == {("a", "1"): "x"} and replace(table, triton="0").sources() == {}
    assert "96   3.50  4 HGMMA.64x64x16.F32.BF16  FAULT a fault  known: cold: late" in compiled.render([row])
    assert len(path.read_text().splitlines()) == 4


def test_rows_of_some_ops_replace_those_of_the_table() -> None:
    row = compiled.CompiledForm("a", "1", 90, 1, 2, 3, 4, 5, 96, 3.5, {}, "x", (), ())
    table = compiled.Table("3", (row, replace(row, op="b"), replace(row, op="b", config="gone"), replace(row, op="c")))
    names = [("a", "1"), ("b", "1"), ("b", "2"), ("c", "1")]
    fresh = [replace(row, op="b", sm=80, source="y"), replace(row, op="b", config="2")]
    expected = [row, *fresh, replace(row, op="c")]
    assert compiled.joined(fresh, table, ["b"], names) == expected
