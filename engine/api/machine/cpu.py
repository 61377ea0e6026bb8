"""Detects this machine: the cores and the memory that this process may use, and a GPU.

In a container its limits count, not the host's sizes.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

from inferd.engine.api.machine import gpu as accelerator
from inferd.engine.api.machine.gpu import Accelerator, NoAcceleratorError

_CGROUP = Path("/sys/fs/cgroup")


DRIVER_BYTES = 3 * 2**29
"""Part of a GPU's free memory that the memory plan leaves to the driver's context, libraries' workspaces and captured
graphs, and to the buffers of NCCL. It is an allowance: their size has not been measured on a GPU."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores and memory available to this process. The memory is the host's, or the GPU's after `on("cuda")`."""

    num_cpus: int
    memory_total_bytes: int
    memory_available_bytes: int
    has_bf16_matmul: bool = True
    """Whether the processor's matrix library computes bfloat16 without going through float32 first."""
    accelerator: Accelerator | None = None
    no_accelerator: str = "none was looked for"
    """Why there is no accelerator."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device whose memory is counted."""
    widens_weights: bool = False
    """Whether the processor's products widen weights of 16 bits to float32 as they read them."""

    @classmethod
    def detect(cls) -> Machine:
        """This machine, with the host's memory."""
        host = cls._detect_host()
        try:
            return replace(host, accelerator=accelerator.detect())
        except NoAcceleratorError as error:
            return replace(host, no_accelerator=str(error))

    def on(self, device: Literal["cpu", "cuda"]) -> Machine:
        """The same machine, with the memory of `device`."""
        if device == self.device:
            return self
        assert device == "cuda" and self.accelerator is not None
        free = max(0, self.accelerator.memory_free_bytes - DRIVER_BYTES)
        total = self.accelerator.memory_total_bytes
        return replace(self, memory_total_bytes=total, memory_available_bytes=free, device="cuda")

    def shared_by(self, num_ranks: int) -> Machine:
        """The same machine, with the memory that each of so many ranks has: its part of the host's, or that of the GPU
        with the least. There are as many GPUs."""
        if self.device == "cuda":
            assert self.accelerator is not None
            others = self.accelerator.others_free_bytes[: num_ranks - 1]
            least = min((self.memory_available_bytes, *(max(0, free - DRIVER_BYTES) for free in others)))
            return replace(self, memory_available_bytes=least)
        return replace(self, memory_available_bytes=self.memory_available_bytes // num_ranks)

    @classmethod
    def _detect_host(cls) -> Machine:
        total, available = _host_memory()
        limit = _cgroup_number("memory.max")
        if limit is not None and limit < total:
            used = (_cgroup_number("memory.current") or 0) - _reclaimable()
            total, available = limit, min(available, max(0, limit - max(0, used)))
        return cls(num_cpus(), total, available, _has_bf16_matmul(), widens_weights=_widens_weights())


def num_cpus() -> int:
    """Number of cores this process may run on. A container's quota is rounded down."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return count
    if quota == "max":
        return count
    return max(1, min(count, int(quota) // int(period)))


_NODES = Path("/sys/devices/system/node")


def cpu_groups(count: int) -> tuple[tuple[int, ...], ...]:
    """The cores of this process in so many groups, which do not cross NUMA nodes if that can be. Empty groups if there
    is one node, or one group: the system then places threads better."""
    nodes = _nodes()
    if count == 1 or len(nodes) < 2:
        return ((),) * count
    cpus = [cpu for node in nodes for cpu in node]
    bounds = [index * len(cpus) // count for index in range(count + 1)]
    return tuple(tuple(cpus[start:end]) for start, end in pairwise(bounds))


def _nodes() -> list[list[int]]:
    """The cores of each NUMA node that this process may use, without nodes that have none."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed, nodes = os.sched_getaffinity(0), []
    for folder in sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        own = [cpu for cpu in _cpu_list((folder / "cpulist").read_text()) if cpu in allowed]
        nodes += [own] if own else []
    return nodes


def _cpu_list(text: str) -> list[int]:
    """Linux's list format: "0-3,8"."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


_BF16_FLAGS = ({"avx512bw", "avx512vl", "avx512dq"}, {"bf16"})
"""CPU flags that oneDNN needs for bfloat16: on x86-64, or on 64-bit Arm."""


COMPILERS = ("g++", "c++")
"""Names of C++ compilers, for the CPU kernels."""
_WIDENING_FLAGS = {"avx2", "fma", "f16c"}
_BUNDLED_KERNELS = Path(__file__).parents[3] / "kernels" / "cpu" / "built"


def _has_bf16_matmul() -> bool:
    flags = _cpu_flags()
    return any(needed <= flags for needed in _BF16_FLAGS)


def _widens_weights() -> bool:
    """Our C++ kernels do, if an image holds them or a compiler can build them."""
    has_kernels = _BUNDLED_KERNELS.exists() or any(shutil.which(name) for name in COMPILERS)
    return has_kernels and _cpu_flags() >= _WIDENING_FLAGS


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    line = next((line for line in text.splitlines() if line.lower().startswith(("flags", "features"))), "")
    return set(line.partition(":")[2].split())


def _host_memory() -> tuple[int, int]:
    """(total, available) bytes of the host."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
        return int(fields["MemTotal"].split()[0]) * 1024, int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total // 2


def _reclaimable() -> int:
    """Bytes of the container's page cache that the kernel frees on demand, such as a checkpoint that was just read."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = next((line.split()[1] for line in lines if line.startswith("inactive_file ")), "0")
    return int(found) if found.isdigit() else 0


def _cgroup_number(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
