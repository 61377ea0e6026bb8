"""What this machine has, as far as the standard library can tell: cores and memory that this process may use.

A container's limits count, not the host's sizes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores and memory available to this process."""

    num_cpus: int
    memory_total_bytes: int
    memory_available_bytes: int
    has_bf16_matmul: bool = True
    """Whether the processor's matrix library computes bfloat16 without going through float32 first."""

    @classmethod
    def detect(cls) -> Machine:
        total, available = _host_memory()
        limit = _cgroup_number("memory.max")
        if limit is not None and limit < total:
            used = _cgroup_number("memory.current") or 0
            total, available = limit, min(available, max(0, limit - used))
        return cls(_num_cpus(), total, available, _has_bf16_matmul())


def _num_cpus() -> int:
    """Cores this process may run on, rounded down under a container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return count
    if quota == "max":
        return count
    return max(1, min(count, int(quota) // int(period)))


_BF16_FLAGS = ({"avx512bw", "avx512vl", "avx512dq"}, {"bf16"})
"""Of x86-64 and of 64-bit Arm: what oneDNN asks for."""


def _has_bf16_matmul() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    line = next((line for line in text.splitlines() if line.lower().startswith(("flags", "features"))), "")
    flags = set(line.partition(":")[2].split())
    return any(needed <= flags for needed in _BF16_FLAGS)


def _host_memory() -> tuple[int, int]:
    """(total, available) bytes of the host."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
        return int(fields["MemTotal"].split()[0]) * 1024, int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total // 2


def _cgroup_number(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
