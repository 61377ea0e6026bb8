"""Prints the report of `inferd plan` as tables or as JSON.

Sizes are in GB (10^9 bytes), as models and GPUs are sold, and in GiB (2^30 bytes), as operating systems count.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table

from inferd.engine.api.errors import StartError
from inferd.engine.api.machine.cards import Card
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.capacity import of_each_rank
from inferd.engine.api.memory.planner import format_bytes
from inferd.engine.api.memory.precision import KV_FORMATS
from inferd.server.commands.plan import Serving, Share, divide, report_of
from inferd.server.commands.plan_directory import described
from inferd.server.commands.plan_encoder import EncoderReport, encoder_to_json, show_encoder
from inferd.server.commands.plan_format import PartsTable, Unit, table_of
from inferd.server.commands.plan_report import BLOCKS, PlanReport, PlanRow, to_json
from inferd.server.config.models import Asked, named, settings_of_models
from inferd.server.config.settings import Settings


def run(
    settings: Settings, batch: int, context: int | None, overhead: str, elsewhere: Card | None = None, *, as_json: bool
) -> int:
    """Print the report of each model, and what the server would do with them, on a GPU that is `elsewhere` if there is
    one. Raises `StartError` before that if a report cannot be made, and after it if the server would refuse."""
    machine, each = Machine.detect(), settings_of_models(settings)
    if elsewhere is not None:
        machine = replace(machine, accelerator=elsewhere.accelerator)
        if not as_json:
            print(elsewhere)
    reports, all_asked = [], []
    for own in each:
        with named(own, each):
            reports.append(report_of(own, machine, batch, context, overhead))
            all_asked.append(Asked.of(own, reports[-1].facts))
    together: dict[str, Share] = {}
    served: list[Serving] = []
    refusal: StartError | None = None
    try:
        together, served = divide(all_asked, machine)
    except StartError as error:
        refusal = error
    if as_json:
        _print_json(reports, together, served or [{"refusal": str(refusal)}] * len(reports), elsewhere)
    else:
        _print_tables(reports, together, served, elsewhere)
    if refusal is not None:
        raise refusal
    return 0


def _print_json(
    reports: Sequence[PlanReport | EncoderReport],
    together: Mapping[str, Share],
    served: Sequence[Serving | dict[str, str]],
    elsewhere: Card | None,
) -> None:
    card = None if elsewhere is None else asdict(elsewhere)
    models = [{**_as_json(report), "card": card, "serve": one} for report, one in zip(reports, served, strict=True)]
    print(json.dumps({"models": models, "together": together} if len(models) > 1 else models[0], indent=2))


def _as_json(report: PlanReport | EncoderReport) -> dict[str, Any]:
    return encoder_to_json(report) if isinstance(report, EncoderReport) else to_json(report)


def _print_tables(
    reports: Sequence[PlanReport | EncoderReport],
    together: Mapping[str, Share],
    served: Sequence[Serving],
    elsewhere: Card | None,
) -> None:
    """Print the reports, and what the server does unless it refuses: `served` is then empty."""
    console = Console(highlight=False)
    for report, one in zip_longest(reports, served):
        if isinstance(report, EncoderReport):
            show_encoder(report, console)
            if one is not None:
                total = format_bytes(one["total_bytes"])
                console.print(f"With these settings inferd serve takes {total}.", markup=False)
            continue
        show(report, console)
        if elsewhere is not None:
            console.print(_least_time(report, elsewhere), markup=False)
        if one is not None:
            console.print(_served(one, report), markup=False)
            if one["kv_directory"] is not None:
                console.print(described(one["kv_directory"]), markup=False)
        if len(reports) > 1:
            console.print()
    if together:
        console.print(_together(list(together), reports, served), markup=False)


def _least_time(report: PlanReport, card: Card) -> str:
    """The least time of a decode step, by what each rank reads. `decode_reads` counts the weights of all ranks, and the
    plan has the KV cache of one."""
    count, num_ranks = report.work.num_seqs, report.work.num_ranks
    num_bytes = report.decode_reads[count] // num_ranks + report.plan.kv_bytes
    least_ms = 1e3 * num_bytes / card.read_bytes_per_s
    reader = "it" if num_ranks == 1 else "each rank"
    return (
        f"A decode step of {_requests(count)} takes at least {least_ms:.2g} ms there: {reader} reads "
        f"{format_bytes(num_bytes)} of weights and full KV cache."
    )


def _served(served: Serving, report: PlanReport) -> str:
    each = "each engine process of inferd serve" if report.num_processes > 1 else "inferd serve"
    return (
        f"With these settings {each} takes {format_bytes(served['total_bytes'])}. Its KV cache of "
        f"{format_bytes(served['kv_bytes'])} ({served['kv_reason']}) holds {served['kv_tokens']:,} tokens: up to "
        f"{served['max_model_len']:,} of a sequence, and {served['max_num_seqs']} sequences in one step."
        f"{_on_host(served)}"
    )


def _on_host(served: Serving) -> str:
    num_bytes = served["host_bytes"]
    return f" For KV it takes up to {format_bytes(num_bytes)} of the host's memory beside." if num_bytes else ""


def _together(names: Sequence[str], reports: Sequence[PlanReport | EncoderReport], served: Sequence[Serving]) -> str:
    """The memory of each model, and their sum if all are in the memory of the host."""
    lines, sum_bytes = ["Together, with these settings:"], 0
    for name, report, one in zip(names, reports, served, strict=True):
        count, each = report.num_processes, format_bytes(one["total_bytes"])
        takes = each if count == 1 else f"{count} engine processes of {each}, each"
        lines.append(f"  {name}: {takes} with {format_bytes(one['kv_bytes'])} of KV cache")
        sum_bytes += count * one["total_bytes"]
    if all(report.machine.device == "cpu" for report in reports):
        whole = reports[0].machine.memory_available_bytes * reports[0].num_processes
        lines.append(f"  sum: {format_bytes(sum_bytes)} of {format_bytes(whole)} available")
    return "\n".join(lines)


def show(report: PlanReport, console: Console) -> None:
    for line in _head(report):
        console.print(line, markup=False)
    for table in (_parts(report), _precisions(report)):
        console.print()
        console.print(table)
    if report.rows[0].name == BLOCKS:
        console.print("blocks: the matrices stay as the GGUF file has them. The other rows are for dequantized ones.")
    console.print()
    console.print(_machine(report), markup=False)


def _experts(report: PlanReport) -> str:
    """The experts, and what a token needs of them."""
    experts = report.facts.arch.experts
    assert experts is not None
    reads = " and ".join(
        f"{format_bytes(num_bytes)} for {_requests(count)}" for count, num_bytes in report.decode_reads.items()
    )
    shared = " and to a shared one" if experts.shared_size else " and to an MLP" if experts.beside_mlp else ""
    return (
        f"{_layers(len(experts.layers))} with {experts.num_experts} experts, of which a token goes to "
        f"{experts.num_chosen}{shared}: it uses {report.facts.num_active_params:,} parameters. A decode step reads "
        f"{reads} of weights."
    )


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _head(report: PlanReport) -> list[str]:
    arch, files = report.facts.arch, report.files
    compatible = "" if arch.is_native else " (compatible: computed by transformers' own code)"
    own = [arch.heads(layer) for layer in arch.attention_layers]
    texts = (f"{kind.num_heads} heads on {kind.num_kv_heads} KV heads of {kind.head_dim}" for kind in own)
    heads = " or ".join(dict.fromkeys(texts))
    windows = [
        f", {_layers(count)} with a window of {window:,}" for window, count in Counter(arch.windows).items() if window
    ]
    unlike = f", {len(arch.recurrent_layers)} of them recurrent" if arch.recurrent_layers else ""
    num_shared = len(arch.attention_layers) - len(arch.kv_layers)
    unlike += f", {num_shared} of them with the K and V of others" if num_shared else ""
    lines = [
        f"{report.model}: {arch.architecture}{compatible}, {report.facts.num_params:,} parameters",
        f"{_layers(arch.num_layers)}{unlike}, {heads}, {arch.max_positions:,} positions{''.join(windows)}",
    ]
    if arch.experts is not None:
        lines.append(_experts(report))
    if report.facts.scope:
        lines.append(f"It is {report.facts.scope}.")
    if files is None:
        lines.append("Read from config.json alone.")
    else:
        kinds = " and ".join(f"{num_bytes:,} B in {dtype}" for dtype, num_bytes in files.bytes_by_dtype.items())
        blocks = report.facts.blocks
        lines.append(f"The files hold {kinds}{f' ({blocks})' if blocks else ''}.")
    asked, served = report.precision.dtype, report.served.dtype
    if served != asked:
        lines.append(
            f"This machine computes {asked} in {served}: {report.served_why}. The first table is for {asked}; "
            f"the rows of quantized weights and what fits this machine are for {served}."
        )
    return lines


def _sequences(count: int) -> str:
    return f"{count} sequence{'s' if count > 1 else ''}"


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"


def _parts(report: PlanReport) -> Table:
    plan, work, unit = report.plan, report.work, Unit.of(report.plan.total_bytes)
    weights = "" if report.precision.quantization == "none" else f"{report.precision.quantization} weights, "
    kv = f", {report.precision.kv_cache} KV" if report.precision.kv_cache in KV_FORMATS else ""
    ranks = f",{of_each_rank(work)}" if work.num_ranks > 1 else ""
    sequences = f"{_sequences(work.num_seqs)} of {work.max_model_len:,} tokens{ranks}"
    table = table_of(f"{weights}{report.precision.dtype}{kv}, {sequences}")
    parts = PartsTable(table, unit)
    for part in plan.weights:
        parts.add_part(part)
    parts.add("weights", plan.weights_bytes, style="bold")
    parts.add_part(plan.kv)
    parts.add("weights + KV", report.held_bytes, style="bold")
    for share, num_bytes in dict(zip(report.overhead, report.overhead_bytes, strict=True)).items():
        parts.add(f"+ {100 * share:.4g}%", num_bytes, "as a rule of thumb for any server", style="dim")
    parts.add_rest(plan)
    return table


def _precisions(report: PlanReport) -> Table:
    unit = Unit.of(max(row.plan.total_bytes for row in report.rows if row.plan is not None))
    available = format_bytes(report.machine.memory_available_bytes)
    table = table_of(f"All precisions; {_each(report) or 'this machine'} has {available} available")
    table.add_column("precision", no_wrap=True)
    sized = [f"{name} {unit.decimal_name}" for name in ("weights", "KV", "total")]
    for name in (*sized, f"total {unit.binary_name}"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("on this machine")
    for row in report.rows:
        cells = ["-"] * 4
        if row.plan is not None:
            numbers = (row.plan.weights_bytes, row.plan.kv_bytes, row.plan.total_bytes)
            cells = [*(unit.sizes(num_bytes)[0] for num_bytes in numbers), unit.sizes(row.plan.total_bytes)[1]]
        style = "bold" if row.name == report.chosen else ""
        table.add_row(row.name, *cells, _here(row, report), style=style)
    return table


def _each(report: PlanReport) -> str:
    """The processes that share the machine; empty if there is one."""
    num_ranks, replicas = report.work.num_ranks, report.replicas
    each = ((f"each of {num_ranks} ranks", num_ranks), (f"each of {replicas} replicas", replicas))
    return " of ".join(what for what, count in each if count > 1)


def _here(row: PlanRow, report: PlanReport) -> str:
    if row.refusal is not None:
        return f"not possible: {row.refusal}"
    if not row.is_served:
        return "computed in float32"
    if not row.max_context:
        return "does not fit"
    is_whole = row.max_context >= report.work.max_model_len
    each = " each" if report.work.num_seqs > 1 else ""
    return f"{'fits' if is_whole else 'too long'}: up to {row.max_context:,} tokens{each}"


def _machine(report: PlanReport) -> str:
    machine, (is_deterministic, why) = report.machine, report.deterministic
    own_bytes, whole_bytes = machine.memory_available_bytes, machine.memory_total_bytes
    has, each = "This machine has", _each(report)
    if each:
        has = f"{each.capitalize()} has"
        whole_bytes = whole_bytes if machine.device == "cuda" else own_bytes * report.num_processes
    return (
        f"{has} {format_bytes(own_bytes)} of {format_bytes(whole_bytes)} available; {report.verdict}.\n"
        f"{'Deterministic' if is_deterministic else 'Not deterministic'}: {why}."
    )
