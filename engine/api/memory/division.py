"""Divides a machine among several models: the memory, and the GPUs if there are enough.

Each model gets what it needs beside its KV cache. The rest is divided equally among those whose KV cache has no size of
its own. Knows no checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from inferd.engine.api.errors import CapacityError
from inferd.engine.api.machine.cpu import DRIVER_BYTES, Machine
from inferd.engine.api.memory.planner import MemoryPlan, format_bytes


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """The need of one of several models."""

    name: str
    is_on_gpu: bool
    num_engines: int
    """Processes with weights: ranks of all replicas."""
    plan: MemoryPlan
    """Memory plan of each process, if the model had the machine to itself."""
    kv_bytes: int | None
    """Bytes that the settings give the KV cache of each replica; None: a share of what is left."""

    @property
    def needed_bytes(self) -> int:
        """Bytes of the host, or of each GPU, without a KV cache that the settings give no size."""
        plan = self.plan
        kv_bytes = 0 if self.kv_bytes is None else max(self.kv_bytes, plan.kv_bytes)
        each = plan.weights_bytes + max(kv_bytes + plan.working_bytes, plan.loading_bytes)
        return each if self.is_on_gpu else each * self.num_engines


@dataclass(frozen=True, slots=True)
class MachineShare:
    """The share of a machine that one model has."""

    machine: Machine
    """The machine with the memory that this model may use."""
    first_gpu: int


def shares_of(machine: Machine, demands: Sequence[MemoryDemand]) -> list[MachineShare]:
    """The share of each model. Raises `CapacityError` if they do not fit together."""
    firsts = _first_gpus(machine, demands)
    places = [(demand.is_on_gpu, first) for demand, first in zip(demands, firsts, strict=True)]
    num_sharing = Counter(place for place, demand in zip(places, demands, strict=True) if demand.kv_bytes is None)
    shares = []
    for demand, place in zip(demands, places, strict=True):
        beside = [other for other, its_place in zip(demands, places, strict=True) if its_place == place]
        own = _from_gpu(machine, place[1]) if demand.is_on_gpu else machine
        share = _left(own, beside) // max(num_sharing[place], 1)
        shares.append(MachineShare(_with_memory(own, demand.needed_bytes + share), place[1]))
    return shares


def _first_gpus(machine: Machine, demands: Sequence[MemoryDemand]) -> list[int]:
    """Each model has GPUs of its own if there are enough. Otherwise all begin at the first."""
    nums = [demand.num_engines if demand.is_on_gpu else 0 for demand in demands]
    gpu = machine.accelerator
    if gpu is None or sum(nums) > 1 + len(gpu.others_free_bytes):
        return [0] * len(nums)
    return [before - num if num else 0 for before, num in zip(accumulate(nums), nums, strict=True)]


def _left(machine: Machine, demands: Sequence[MemoryDemand]) -> int:
    """Bytes left beside what models in one place need. Raises `CapacityError` if they need more than there is."""
    available = machine.memory_available_bytes
    left = available - sum(demand.needed_bytes for demand in demands)
    if left < 0:
        needs = ", ".join(f"{demand.name} {format_bytes(demand.needed_bytes)}" for demand in demands)
        raise CapacityError(
            f"the models do not fit together: {needs}, but {format_bytes(available)} are available; serve fewer, or "
            "give --quantization, or a smaller --kv-memory or --max-num-seqs"
        )
    return left


def _from_gpu(machine: Machine, first: int) -> Machine:
    """The machine as a model finds it whose first GPU is that one."""
    gpu = machine.accelerator
    assert gpu is not None
    free_bytes, *others = (gpu.memory_free_bytes, *gpu.others_free_bytes)[first:]
    gpu = replace(gpu, memory_free_bytes=free_bytes, others_free_bytes=tuple(others))
    return replace(machine, accelerator=gpu).on("cuda")


def _with_memory(machine: Machine, num_bytes: int) -> Machine:
    if machine.device == "cuda":
        assert machine.accelerator is not None
        others = tuple(min(free, num_bytes + DRIVER_BYTES) for free in machine.accelerator.others_free_bytes)
        machine = replace(machine, accelerator=replace(machine.accelerator, others_free_bytes=others))
    return replace(machine, memory_available_bytes=num_bytes)
