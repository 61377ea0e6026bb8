"""A GPU as kernels see it, and the choice of a form that fits its shared memory.

An op states the shared memory that its forms need (`SharedNeed`), and `fit` chooses. This module needs no torch, so a
plan for a GPU that is elsewhere can ask it too. It knows no kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from inferd.kernels.registry import KernelError

SHARED_BYTES = {
    80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10, 121: 99 << 10,
}  # fmt: skip
"""Bytes of shared memory that one program may have, by the architectures that all kernels are compiled and judged for
(CUDA C++ Programming Guide, compute capabilities)."""
RESERVED_BYTES = 1 << 10
"""Bytes of shared memory that the system takes for each program (CUDA C++ Programming Guide). A program may have all
others of a multiprocessor."""
LEAST_SHARED_BYTES = min(SHARED_BYTES.values())
FP8_MIN_SM = 89
"""The first architecture that converts to and from 8-bit floats, and multiplies them."""
DEPENDENT_MIN_SM = 90
"""The first architecture with dependent launches."""
_FILLED = 128
LEAST_STAGES = 2
"""Fewest stages of a pipelined loop. With one, no copy is on its way while the loop multiplies."""


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Properties of a GPU that the choice of a form depends on."""

    sm: int
    """Compute capability: 10 * major + minor."""
    shared_bytes: int
    """Most shared memory of one program."""
    num_multiprocessors: int

    @classmethod
    def of(cls, sm: int, num_multiprocessors: int, shared_bytes: int | None = None) -> DeviceProperties:
        """`shared_bytes`: as the driver says. If kernels were not compiled for the architecture, at most
        `LEAST_SHARED_BYTES` count."""
        most = SHARED_BYTES.get(sm, LEAST_SHARED_BYTES)
        return cls(sm, most if shared_bytes is None else min(most, shared_bytes), num_multiprocessors)

    @property
    def is_known(self) -> bool:
        """Whether all kernels were compiled and judged for this architecture. If not, it gets the safest forms."""
        return self.sm in SHARED_BYTES

    @property
    def capability(self) -> str:
        return f"{self.sm // 10}.{self.sm % 10}"

    @property
    def has_warp_groups(self) -> bool:
        """Whether groups of four warps multiply together, with operands in shared memory (wgmma)."""
        return self.sm // 10 == 9

    @property
    def has_tensor_memory(self) -> bool:
        """Whether results of products have a memory of their own (tcgen05)."""
        return 100 <= self.sm < 120

    @property
    def multiplies_by_warps(self) -> bool:
        """Whether single warps multiply in every kernel, with operands in registers (mma.sync)."""
        return self.is_known and not self.has_warp_groups and not self.has_tensor_memory

    @property
    def multiprocessor_bytes(self) -> int | None:
        """Shared memory of a multiprocessor; None if it is not known."""
        return self.shared_bytes + RESERVED_BYTES if self.is_known else None

    @property
    def filled_multiprocessors(self) -> int:
        """Multiprocessors that the programs of a layer should fill. With a large shared memory they are 128, whatever
        the device has, so that an A100, an H100 and a B200 take the same tiles."""
        return self.num_multiprocessors if self.shared_bytes <= LEAST_SHARED_BYTES else _FILLED

    @property
    def converts_e4m3(self) -> bool:
        return self.sm >= FP8_MIN_SM

    @property
    def starts_early(self) -> bool:
        """Whether a kernel can start while the one before it ends."""
        return self.is_known and self.sm >= DEPENDENT_MIN_SM

    def __str__(self) -> str:
        products = "wgmma" if self.has_warp_groups else "tcgen05" if self.has_tensor_memory else "mma.sync"
        floats = "8-bit floats" if self.converts_e4m3 else "no 8-bit floats"
        return (
            f"compute capability {self.capability}, {self.num_multiprocessors} multiprocessors, "
            f"{self.shared_bytes >> 10} KiB of shared memory a program, {products}, {floats}"
        )


@dataclass(frozen=True, slots=True)
class SharedNeed:
    """Shared memory of one program with a pipelined loop."""

    step_bytes: int
    """Bytes that the loop copies for one step."""
    kept_bytes: int = 0
    """Bytes beside these: operands that stay, and numbers that threads exchange."""
    group_bytes: int = 0
    """Bytes more if groups of warps multiply. They read copies themselves, so those of one more step are kept."""

    def of(self, num_stages: int, device: DeviceProperties) -> int:
        """Most bytes that the compiler takes."""
        more_bytes = 0 if device.multiplies_by_warps else self.group_bytes
        return (num_stages - 1) * self.step_bytes + self.kept_bytes + more_bytes

    def stages_on(self, device: DeviceProperties, num_stages: int) -> int:
        """Most stages, up to `num_stages`, that fit the device; 0 if none from `LEAST_STAGES` on do."""
        counts = range(num_stages, LEAST_STAGES - 1, -1)
        return next((count for count in counts if self.of(count, device) <= device.shared_bytes), 0)


T = TypeVar("T")


class Candidate(NamedTuple, Generic[T]):
    """A form of a kernel that may be taken."""

    name: str
    """The op and the form, as users read them."""
    form: T
    num_stages: int
    """Stages on a device with memory for all."""
    need: SharedNeed


_chosen: dict[str, tuple[int, int]] = {}


class DoesNotFitError(KernelError):
    """No form of a kernel fits the device's shared memory, so none can ever be launched there."""


def fit(device: DeviceProperties, candidates: Iterable[Candidate[T]]) -> tuple[T, int]:
    """(the first candidate's form that fits the device, its stages: all, or fewer). The best candidate comes first.
    Raises `DoesNotFitError` if none fits."""
    needs = []
    for name, form, num_stages, need in candidates:
        stages = need.stages_on(device, num_stages)
        if stages:
            _chosen[name] = (stages, num_stages)
            return form, stages
        needs.append(f"{name} needs {need.of(LEAST_STAGES, device):,}")
    raise DoesNotFitError(
        f"no form fits {device.shared_bytes:,} bytes of shared memory, not even with {LEAST_STAGES} stages: "
        f"{', '.join(needs)}"
    )


def chosen_forms() -> str:
    """The pipelined forms that were chosen in this process, as users read them."""
    found = sorted(_chosen.items())
    fewer = [f"{name} with {stages} of {asked} stages" for name, (stages, asked) in found if stages < asked]
    num_whole = len(_chosen) - len(fewer)
    return ", ".join([*fewer, f"{num_whole}{' others' if fewer else ''} with all stages"])
