"""Holds what `inferd plan` found out about a model, and writes it as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inferd.engine.api.cost.step_cost import WorkModel
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.activations import PlanLine, Workload
from inferd.engine.api.memory.planner import MemoryPlan
from inferd.engine.api.memory.precision import Precision
from inferd.engine.api.model import ModelFacts


@dataclass(frozen=True, slots=True)
class Files:
    """Sizes from the headers of the checkpoint's files."""

    num_bytes: int
    bytes_by_dtype: dict[str, int]
    """Bytes by dtype as the header writes it: "BF16", "F32"."""


BLOCKS = "blocks"
"""Name of the row for a GGUF file whose matrices keep their blocks. The other rows are for dequantized ones."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """The memory of the model in one precision."""

    name: str
    precision: Precision
    refusal: str | None
    """Why the model cannot have this precision; `plan` is then None."""
    plan: MemoryPlan | None
    is_served: bool
    """Whether this machine computes in this precision."""
    max_context: int
    """Number of tokens per sequence that fit this machine, at most `max_model_len`. 0 if the model does not fit or
    `is_served` is false."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Everything that `inferd plan` shows."""

    model: str
    facts: ModelFacts
    files: Files | None
    precision: Precision
    work: Workload
    plan: MemoryPlan
    overhead: tuple[float, float]
    """Lowest and highest overhead as shares of weights and KV, such as (0.1, 0.2)."""
    rows: tuple[PlanRow, ...]
    machine: Machine
    served: Precision
    served_why: str
    fits: bool
    verdict: str
    """Whether the model fits this machine, in one sentence."""
    deterministic: tuple[bool, str]
    """Whether results are deterministic by default, and why."""
    replicas: int
    """Number of engines that share the machine; all sizes are of each."""

    @property
    def num_processes(self) -> int:
        """Number of processes that share the machine: the ranks of all replicas."""
        return self.replicas * max(self.work.num_ranks, 1)

    @property
    def chosen(self) -> str:
        """Name of the row that `plan` is about."""
        return next((row.name for row in self.rows if row.name == BLOCKS), self.precision.name)

    @property
    def decode_reads(self) -> dict[int, int]:
        """Bytes of weights that a decode step reads, by its number of requests: one, and as many as run together."""
        model = WorkModel.of(self.facts.arch, self.precision, self.work.max_model_len)
        return {count: model.weights_read(count) for count in sorted({1, self.work.num_seqs})}

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and KV, to which the overhead is added."""
        return self.plan.weights_bytes + self.plan.kv_bytes

    @property
    def overhead_bytes(self) -> tuple[int, int]:
        """Bytes of weights and KV with the lowest and with the highest overhead."""
        low, high = self.overhead
        return round(self.held_bytes * (1 + low)), round(self.held_bytes * (1 + high))


def to_json(report: PlanReport) -> dict[str, Any]:
    """The report as JSON, with every size in bytes. Its keys are stable."""
    plan, work, machine, arch = report.plan, report.work, report.machine, report.facts.arch
    low_bytes, high_bytes = report.overhead_bytes
    files = report.files
    return {
        "model": report.model,
        "architecture": arch.architecture,
        "num_params": report.facts.num_params,
        "num_active_params": report.facts.num_active_params,
        "decode_reads": [
            {"num_requests": count, "weights_bytes": num_bytes} for count, num_bytes in report.decode_reads.items()
        ],
        "dtype": report.precision.dtype,
        "quantization": report.precision.quantization,
        "kv_cache_dtype": report.precision.kv_cache,
        "batch": work.num_seqs,
        "context": work.max_model_len,
        "block_size": work.block_size,
        "tensor_parallel_size": work.num_ranks,
        "replicas": report.replicas,
        "speculates": work.speculates,
        "files": None if files is None else {"bytes": files.num_bytes, "bytes_by_dtype": files.bytes_by_dtype},
        "weights": [_part(part) for part in plan.weights],
        "kv": _part(plan.kv),
        "working": [_part(part) for part in plan.working],
        "loading": _part(plan.loading),
        "weights_bytes": plan.weights_bytes,
        "kv_bytes": plan.kv_bytes,
        "working_bytes": plan.working_bytes,
        "total_bytes": plan.total_bytes,
        "overhead": {
            "low": report.overhead[0],
            "high": report.overhead[1],
            "low_bytes": low_bytes,
            "high_bytes": high_bytes,
        },
        "precisions": [_row_json(row) for row in report.rows],
        "machine": {
            "memory_total_bytes": machine.memory_total_bytes,
            "memory_available_bytes": machine.memory_available_bytes,
            "dtype": report.served.dtype,
            "deterministic": report.deterministic[0],
            "fits": report.fits,
            "verdict": report.verdict,
        },
        "wrapper": report.facts.wrapper or None,
        "left_out_bytes": dict(report.facts.left_out_bytes),
        "is_native": arch.is_native,
    }


def _part(part: PlanLine) -> dict[str, Any]:
    return {"name": part.name, "bytes": part.num_bytes, "formula": part.formula.text}


def _row_json(row: PlanRow) -> dict[str, Any]:
    plan = row.plan
    return {
        "name": row.name,
        "dtype": row.precision.dtype,
        "quantization": row.precision.quantization,
        "refusal": row.refusal,
        "weights_bytes": None if plan is None else plan.weights_bytes,
        "kv_bytes": None if plan is None else plan.kv_bytes,
        "total_bytes": None if plan is None else plan.total_bytes,
        "is_served": row.is_served,
        "max_context": row.max_context,
    }
