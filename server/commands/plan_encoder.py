"""The report of `inferd plan` about an encoder: its memory in each format, and the cost of a text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from inferd.engine.api.cost.step_cost import WorkModel
from inferd.engine.api.encoder_model import EncoderFacts
from inferd.engine.api.gguf import is_gguf
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.activations import PlanLine
from inferd.engine.api.memory.encoders import EncoderLoad, plan_encoder
from inferd.engine.api.memory.planner import MemoryPlan, format_bytes, refusal
from inferd.engine.api.memory.precision import Precision, Quantization
from inferd.engine.api.resolve_encoder import ENCODER_STEP_TOKENS, longest_text
from inferd.engine.api.sentence_folder import PLAIN, SentenceFolder
from inferd.engine.api.served import resolved_dtype, served_dtype, served_weights_dtype
from inferd.server.commands.plan_format import PartsTable, Unit, table_of
from inferd.server.commands.plan_report import Files
from inferd.server.config.settings import Settings

_TEXTS = (16, 128, 512, 8192)
"""Lengths whose cost is shown, in tokens."""
_QUANTIZED: tuple[Quantization, ...] = ("int8", "int4")


@dataclass(frozen=True, slots=True)
class EncoderRow:
    """The memory of the encoder in one format."""

    name: str
    plan: MemoryPlan | None
    """None if the model cannot have this format."""
    said: str
    """Whether it fits this machine, or why it cannot be."""


@dataclass(frozen=True, slots=True)
class EncoderReport:
    """All that `inferd plan` shows of an encoder."""

    model: str
    facts: EncoderFacts
    files: Files | None
    precision: Precision
    plan: MemoryPlan
    rows: tuple[EncoderRow, ...]
    machine: Machine
    replicas: int
    max_model_len: int

    @property
    def num_processes(self) -> int:
        """Number of engines that share the machine."""
        return self.replicas

    @property
    def text_flops(self) -> dict[int, int]:
        """FLOPs of a text, by its number of tokens."""
        work = WorkModel.of(self.facts.arch, self.precision, self.max_model_len)
        lengths = sorted({min(length, self.max_model_len) for length in _TEXTS})
        return {length: work.step([0], [length], 0).flops for length in lengths}


def build_encoder(asked: Settings, facts: EncoderFacts, files: Files | None, machine: Machine) -> EncoderReport:
    """Compute the report of an encoder with these settings."""
    machine = machine.shared_by(asked.replicas)
    length = asked.max_model_len or longest_text(facts)[0]
    load = EncoderLoad(
        step_tokens=asked.max_num_batched_tokens or ENCODER_STEP_TOKENS,
        max_model_len=length,
        has_standby=asked.standby,
        is_gguf=is_gguf(facts.path),
        head_bytes=(SentenceFolder.read(facts.path) or PLAIN).head_bytes,
    )
    dtype = resolved_dtype(asked.dtype, facts, machine)[0]
    plain = Precision(dtype, weights_dtype=served_weights_dtype(dtype, facts, machine)[0])
    quantization: Quantization = "none" if asked.quantization == "auto" else asked.quantization
    served = replace(plain, quantization=quantization)
    kinds = [Precision(name) for name in ("float32", "bfloat16")] + [replace(plain, quantization=q) for q in _QUANTIZED]
    rows = tuple(_row(facts, kind, load, machine) for kind in kinds)
    plan = plan_encoder(facts.arch, served, load)
    return EncoderReport(asked.model, facts, files, served, plan, rows, machine, asked.replicas, length)


def _row(facts: EncoderFacts, precision: Precision, load: EncoderLoad, machine: Machine) -> EncoderRow:
    reason = refusal(facts.arch, precision.quantization)
    if reason is not None:
        return EncoderRow(precision.name, None, f"not possible: {reason}")
    plan, (served, _) = plan_encoder(facts.arch, precision, load), served_dtype(precision.dtype, machine)
    fits = "fits" if plan.total_bytes <= machine.memory_available_bytes else "does not fit"
    return EncoderRow(precision.name, plan, fits if served == precision.dtype else f"computed in {served}")


def show_encoder(report: EncoderReport, console: Console) -> None:
    """Print the report."""
    arch = report.facts.arch
    labels = f", a classifier with {arch.num_labels} labels" if arch.num_labels else ""
    console.print(f"{report.model}: {arch.architecture}, an encoder of {report.facts.num_params:,} parameters")
    console.print(
        f"{arch.num_layers} layers, {arch.num_heads} heads of {arch.head_dim}, texts of up to {report.max_model_len:,} "
        f"tokens, {arch.hidden_size} components{labels}"
    )
    for table in (_parts(report), _formats(report)):
        console.print()
        console.print(table)
    costs = ", ".join(f"{flops / 1e9:,.3g} GFLOP for {length:,}" for length, flops in report.text_flops.items())
    console.print(f"\nA text takes, by its tokens: {costs}.", markup=False)


def _parts(report: EncoderReport) -> Table:
    plan, unit = report.plan, Unit.of(report.plan.total_bytes)
    table = table_of(f"{report.precision.name}, {report.precision.dtype} activations, no KV cache")
    parts = PartsTable(table, unit)
    for part in plan.weights:
        parts.add_part(part)
    parts.add("weights", plan.weights_bytes, style="bold")
    parts.add_rest(plan)
    return table


def _formats(report: EncoderReport) -> Table:
    unit = Unit.of(max(row.plan.total_bytes for row in report.rows if row.plan is not None))
    available = format_bytes(report.machine.memory_available_bytes)
    each = f"each of {report.replicas} replicas" if report.replicas > 1 else "this machine"
    table = table_of(f"All formats; {each} has {available} available")
    table.add_column("format", no_wrap=True)
    for name in (f"weights {unit.decimal_name}", f"total {unit.decimal_name}", f"total {unit.binary_name}"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("on this machine")
    for row in report.rows:
        cells = ["-"] * 3
        if row.plan is not None:
            cells = [unit.sizes(row.plan.weights_bytes)[0], *unit.sizes(row.plan.total_bytes)]
        table.add_row(row.name, *cells, row.said, style="bold" if row.name == report.precision.name else "")
    return table


def encoder_to_json(report: EncoderReport) -> dict[str, Any]:
    """The report as JSON, with every size in bytes. Its keys are stable."""
    plan, arch, files = report.plan, report.facts.arch, report.files
    return {
        "model": report.model,
        "architecture": arch.architecture,
        "is_encoder": True,
        "num_params": report.facts.num_params,
        "num_labels": arch.num_labels,
        "dtype": report.precision.dtype,
        "quantization": report.precision.quantization,
        "max_model_len": report.max_model_len,
        "replicas": report.replicas,
        "files": None if files is None else {"bytes": files.num_bytes, "bytes_by_dtype": files.bytes_by_dtype},
        "weights": [_as_json(part) for part in plan.weights],
        "working": [_as_json(part) for part in plan.working],
        "loading": _as_json(plan.loading),
        "weights_bytes": plan.weights_bytes,
        "working_bytes": plan.working_bytes,
        "total_bytes": plan.total_bytes,
        "text_flops": {str(length): flops for length, flops in report.text_flops.items()},
        "formats": [
            {
                "name": row.name,
                "weights_bytes": None if row.plan is None else row.plan.weights_bytes,
                "total_bytes": None if row.plan is None else row.plan.total_bytes,
                "said": row.said,
            }
            for row in report.rows
        ],
        "machine": {"memory_available_bytes": report.machine.memory_available_bytes},
    }


def _as_json(part: PlanLine) -> dict[str, Any]:
    return {"name": part.name, "bytes": part.num_bytes, "formula": part.formula.text}
