"""Judges compiled kernels: which machine code is a fault, and which faults are known and accepted for a reason.

It knows no compiler. `aot.py` compiles the forms and asks it about each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from inferd.kernels.compile import sass
from inferd.kernels.device import DeviceProperties
from inferd.kernels.gpu import Shipped

BYTES_IN_FLIGHT = 24 << 10
"""Bytes that a multiprocessor must have on their way to read memory at full speed: 4.8 TB/s for 132 of them, and 700 ns
from a load to its data (H200, by calculation). Asynchronous copies of several stages reach that, and so do loops that
were unrolled."""
_WARP, _WARP_GROUP = ("HMMA", "QMMA", "IMMA"), ("HGMMA", "QGMMA", "IGMMA")
_TENSOR_MEMORY = ("UTCHMMA", "UTCQMMA", "UTCIMMA")
"""Matrix instructions of single warps, of warp groups, and of warp groups with results in tensor memory."""
MOST_UNUSED_BYTES = 18 << 10
"""Most bytes by which a form's computed need may exceed what the compiler takes, so that it costs no form a stage in
vain."""
_SERIALIZED = re.compile(r"\((C75\d\d)\)\s*(.*)")
"""A warning of the assembler: instructions of warp groups run one after another."""


@dataclass(frozen=True, slots=True)
class Known:
    """A fault that is accepted for some forms."""

    op: str
    config: str
    """Regular expression of the forms' names."""
    fault: str
    """Regular expression of the fault's text."""
    reason: str
    triton: str = ""
    """Beginning of the versions of Triton that have it."""

    def covers(self, form: Shipped, fault: str) -> bool:
        found = form.op == self.op and re.search(self.config, form.config) and re.search(self.fault, fault)
        return bool(found)


_UNPACKED = "16 inputs are unpacked at a time and take one instruction; the bound is reading the weight"
_BOUNDS = "unpacking bounds the loop, not the products"
KNOWN = (
    Known("experts_integers", r"4 bits groups of 32\b", "waits", _UNPACKED),
    Known("linear_int4", r"groups of (16|32)\b", "waits", _UNPACKED),
    Known("linear_int8", r"groups of 16\b", "waits", _UNPACKED),
    Known("experts_integers", r"8 bits rows\b", "waits", _BOUNDS, "3.6."),
    Known("linear_int8", r"rows|groups of 128\b", "waits", _BOUNDS, "3.6."),
    Known("linear_invariant", "fp32 tile 64", r"spills: 8 bytes", "two registers, on sm_120"),
    Known("top_k_top_p_select", "512 chunks", r"spills: (8|16) bytes", "its 512 threads have all registers, on sm_120"),
    Known("paged_attention", "kv fp8e4nv head 128 rows 64", r"spills: (40|56) bytes", "10 or 14 registers, on sm_120"),
    Known("paged_attention", "^(bf16|fp16) kv", r"spills: (8|16) bytes", "two or four registers", "3.6."),
    Known("short_conv", "fp32 width 4 silu bias, 1 tokens", r"spills: 8 bytes", "two registers, on sm_86", "3.6."),
)
"""Every accepted fault, by the op's name. A test fails for an entry that no row of the committed tables needs."""


def known_by(triton: str) -> tuple[Known, ...]:
    """The accepted faults of a version of Triton."""
    return tuple(one for one in KNOWN if triton.startswith(one.triton))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The faults of one compiled form."""

    faults: tuple[str, ...]
    accepted: tuple[str, ...]
    """Faults that `KNOWN` has, each with its reason."""


def judge(
    form: Shipped, sm: int, binary: sass.Binary, shared_bytes: int, code: sass.Code, log: str, known: tuple[Known, ...]
) -> Verdict:
    """Find the faults of a form. `log` is the assembler's."""
    faults, accepted = [], []
    for fault in _faults(form, sm, binary, shared_bytes, code, log):
        reason = next((one.reason for one in known if one.covers(form, fault)), None)
        if reason is None:
            faults.append(fault)
        else:
            accepted.append(f"{fault}: {reason}")
    return Verdict(tuple(faults), tuple(accepted))


def _faults(form: Shipped, sm: int, binary: sass.Binary, shared_bytes: int, code: sass.Code, log: str) -> Iterator[str]:
    yield from _matrix_faults(form, sm, code.names)
    num_spills = spills(code)
    if binary.stack_bytes or num_spills:
        yield f"spills: {binary.stack_bytes} bytes of stack, {num_spills} accesses"
    device = DeviceProperties.of(sm, 1)
    if shared_bytes > device.shared_bytes:
        yield f"needs {shared_bytes} bytes of shared memory; the device has {device.shared_bytes}"
    if form.shared is not None:
        need = form.shared.of(form.stages_on(sm), device)
        if not shared_bytes <= need <= shared_bytes + MOST_UNUSED_BYTES:
            yield f"needs {shared_bytes} bytes of shared memory, but {need} were computed"
    if form.options.get("launch_pdl"):
        yield from _early_faults(form, code)
    if form.is_streaming and not wide_loads(code):
        yield "reads memory in loads of less than 16 bytes a thread"
    for number, text in sorted(set(_SERIALIZED.findall(log))):
        yield f"{number}: {text}"
    yield from _loop_faults(form, code.loops)


def _loop_faults(form: Shipped, loops: Sequence[sass.Loop]) -> Iterator[str]:
    for loop in loops:
        matrix, waits = loop.starting(*_WARP_GROUP), loop.starting("WARPGROUP.DEPBAR")
        if matrix and waits >= matrix:
            yield f"a loop waits {waits} times for {matrix} instructions of warp groups"
    # A loop that was unrolled has another one behind it for the rest.
    at_a_time = max((loop.global_bytes * form.num_warps for loop in loops if loop.loads and not loop.copies), default=0)
    if form.is_streaming and 0 < at_a_time < BYTES_IN_FLIGHT:
        yield f"a loop reads {at_a_time} bytes at a time, fewer than {BYTES_IN_FLIGHT}, without asynchronous copies"


def _matrix_faults(form: Shipped, sm: int, names: Mapping[str, int]) -> Iterator[str]:
    device = DeviceProperties.of(sm, 1)
    wanted = _WARP_GROUP if device.has_warp_groups else _TENSOR_MEMORY if device.has_tensor_memory else _WARP
    wanted = _WARP if form.is_warp_matrix else wanted
    if (form.is_matrix or form.is_warp_matrix) and not any(name.startswith(wanted) for name in names):
        yield f"multiplies without {' or '.join(wanted)}"
    if form.is_warp_matrix and any(name.startswith((*_WARP_GROUP, *_TENSOR_MEMORY)) for name in names):
        yield "uses warp group instructions"


_MEMORY = ("LDG", "STG", "LD.", "ST.", "RED.", "REDG", "ATOM.", "ATOMG", "UTMA", "UBLK")
"""Beginnings of instructions that read or write global memory. Loads of arguments have other names."""


def _early_faults(form: Shipped, code: sass.Code) -> Iterator[str]:
    """Faults of a kernel that starts early. It must let the next one start, and wait before it reads or writes memory.
    Every thread must wait: the next kernel takes this one's end for the end of all kernels before it. A kernel must
    take its tensor memory before the next one starts, which could else keep it."""
    names = code.names  # in the order of their first instructions

    def first(*starts: str) -> int:
        return next((at for at, name in enumerate(names) if name.startswith(starts)), len(names))

    waits, lets_start = first(sass.WAIT), first("PREEXIT")
    before = [name for name in list(names)[:waits] if name.startswith(_MEMORY)]
    if waits == len(names):
        yield "starts early and never waits for the kernel before it"
    elif before:
        yield f"starts early and has {', '.join(before)} before it waits"
    if code.passing_wait:
        yield f"starts early and may pass its wait, by {', '.join(code.passing_wait)}"
    if lets_start == len(names):
        yield "never lets the next kernel start"
    elif lets_start < first("UTCATOMSWS") < len(names):
        yield "takes tensor memory after it lets the next kernel start"
    if form.is_prefetching and first("CCTL") > waits:
        yield "asks for no weights before it waits"


def spills(code: sass.Code) -> int:
    """Number of loads from and stores to local memory."""
    return sum(count for name, count in code.names.items() if name.startswith(("LDL", "STL")))


def wide_loads(code: sass.Code) -> int:
    """Number of loads of 16 bytes from global memory, asynchronous copies included."""
    return sum(
        count
        for name, count in code.names.items()
        if (name.startswith(("LDG", "LDGSTS")) and ".128" in name) or name.startswith("UTMALDG")
    )
