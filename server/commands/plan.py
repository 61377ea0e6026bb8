"""`inferd plan`: computes how much memory a model needs, before it is downloaded or hardware is bought.

It collects the model's facts, the parts with their formulas, every precision, and what fits this machine. `plan_report`
holds them, and `plan_table` shows them. A config.json is enough: this file knows no torch, no GPU and no process of an
engine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, get_args

from inferd.engine.api.adapter import AUTO_ADAPTERS, AUTO_RANK, adapter_space, check_adapters
from inferd.engine.api.checkpoint import CONFIG_FILES, EMBEDDED_NAME, Checkpoint, read_config, read_json
from inferd.engine.api.draft import read_draft
from inferd.engine.api.encoder_model import EncoderFacts, config_facts_of, facts_of
from inferd.engine.api.errors import ConfigError
from inferd.engine.api.gguf import is_gguf
from inferd.engine.api.hub import gguf_to_download
from inferd.engine.api.hub_header import without_weights
from inferd.engine.api.locate import local_path, locate
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory import division
from inferd.engine.api.memory.activations import AdapterSpace, Draft, Workload
from inferd.engine.api.memory.capacity import longest_context, of_each_rank, options, plan_sequences, shortage, ways_out
from inferd.engine.api.memory.planner import refusal
from inferd.engine.api.memory.precision import DTYPE_BYTES, SHORT_KV, Precision, Quantization
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.resolve import AUTO_BLOCK_SIZE, auto_step_tokens
from inferd.engine.api.served import (
    auto_dtype,
    check_quantization,
    check_ranks,
    check_replica_places,
    deterministic_on,
    draft_precision,
    kv_refusal,
    quantization_of,
    served_device,
    served_dtype,
    served_precisions,
    served_weights_dtype,
    weights_refusal,
)
from inferd.engine.api.speculation import check_draft, check_draft_length, check_served, speculative_on
from inferd.server.commands.plan_directory import DirectoryPlan, plan_directory
from inferd.server.commands.plan_encoder import EncoderReport, build_encoder
from inferd.server.commands.plan_report import BLOCKS, Files, PlanReport, PlanRow
from inferd.server.config.models import Asked, demands_of, machine_shares, named
from inferd.server.config.settings import Settings

_OVERHEAD = re.compile(r"(\d{1,3}(?:\.\d+)?)(?:-(\d{1,3}(?:\.\d+)?))?", re.ASCII)


def build(
    asked: Settings, machine: Machine, batch: int = 1, context: int | None = None, overhead: str = "10-20"
) -> PlanReport:
    """Compute the report of a model with these settings. It is about each of its engines and ranks.

    `batch`: number of sequences that run at the same time. `context`: number of tokens of each sequence; None takes
    `max_model_len`, or else the model's maximum. `overhead`: percentage of weights and KV, as one number or a range.
    Raises `ModelError` if the model cannot be read, and `ConfigError` for a wrong option.
    """
    found = _read(asked)
    assert isinstance(found, _Found), "an encoder has a report of its own"
    return _build(asked, found, machine, batch, context, overhead)


def report_of(
    asked: Settings, machine: Machine, batch: int, context: int | None, overhead: str
) -> PlanReport | EncoderReport:
    """The report of a model of either kind; the parameters and errors are those of `build`."""
    found = _read(asked)
    if isinstance(found, _Found):
        return _build(asked, found, machine, batch, context, overhead)
    return build_encoder(asked, *found, machine)


def _build(
    asked: Settings, found: _Found, machine: Machine, batch: int, context: int | None, overhead: str
) -> PlanReport:
    shares, facts = _overhead(overhead), found.facts
    check_served(facts.arch)
    check_ranks(asked.tensor_parallel_size, facts.arch)
    precision = _precision(asked, facts)
    device, _ = served_device(asked.device, precision.quantization, machine, facts.arch)
    check_replica_places(asked.replicas, asked.tensor_parallel_size, device, machine)
    machine = machine.on(device).shared_by(asked.tensor_parallel_size * asked.replicas)
    work = _workload(asked, batch, asked.max_model_len if context is None else context, facts, machine)
    dtype, why = served_dtype(precision.dtype, machine)
    served = replace(precision, dtype=dtype, weights_dtype=served_weights_dtype(dtype, facts, machine)[0])
    if dtype == precision.dtype:
        precision = served
    draft = _draft(asked, facts, replace(precision, dtype=dtype), work, machine)
    work = replace(work, draft=draft, adapters=_adapters(asked, facts, served, machine))
    plan = plan_sequences(facts.arch, precision, work, batch)
    fits, verdict = _verdict(facts, served, work, machine)
    limit = asked.max_model_len or facts.arch.max_positions
    rows = tuple(replace(row, max_context=min(row.max_context, limit)) for row in _rows(found, served, work, machine))
    return PlanReport(
        asked.model, facts, found.files, precision, work, plan, shares, rows, machine, served, why, fits, verdict,
        deterministic_on(None, machine.device), asked.replicas,
    )  # fmt: skip


class Share(TypedDict):
    """The memory of one of several models, in all processes on a CPU, or on each GPU."""

    needed_bytes: int
    """Bytes beside the KV cache."""
    kv_share_bytes: int
    """Bytes for the KV cache: those of --kv-memory, or else those of which the server takes a part."""


class Serving(TypedDict):
    """Memory that each engine process of `inferd serve` takes on this machine, with the same settings."""

    kv_bytes: int
    kv_reason: str
    """Why the KV cache has that size."""
    kv_tokens: int
    """Number of tokens of all sequences together that the KV cache has room for."""
    max_model_len: int
    max_num_seqs: int
    """Maximum number of sequences in one step."""
    host_bytes: int
    """Bytes of the host's memory for KV beside a GPU's."""
    total_bytes: int
    kv_directory: DirectoryPlan | None
    """The directory of `--kv-dir`; null without one."""


def divide(all_asked: Sequence[Asked], machine: Machine) -> tuple[dict[str, Share], list[Serving]]:
    """(how several models share this machine, what the server does with each). Raises `StartError` if the server would
    refuse them."""
    demands = demands_of(machine, all_asked)
    found = machine_shares(machine, demands)
    shares: dict[str, Share] = {}
    for demand, share in zip(demands, found, strict=False):
        beside_bytes = replace(demand, kv_bytes=None).needed_bytes
        is_given, own_bytes = demand.kv_bytes is not None, share.machine.memory_available_bytes
        kv_bytes = (demand.needed_bytes if is_given else own_bytes) - beside_bytes
        shares[demand.name] = {"needed_bytes": beside_bytes, "kv_share_bytes": kv_bytes}
    each, served = [asked.settings for asked in all_asked], []
    for asked, share in zip(all_asked, found, strict=True):
        with named(asked.settings, each):
            served.append(_serving(asked, share))
    return shares, served


def _serving(asked: Asked, share: division.MachineShare) -> Serving:
    config, plan, decisions = asked.settled(share)
    facts, kv_tokens = asked.facts, 0
    if isinstance(facts, ModelFacts):
        # A token of a sequence takes a place of a block in each group of layers.
        kv_tokens = config.num_blocks * config.block_size // len(facts.arch.cache_groups)
    return {
        "kv_bytes": plan.kv_bytes,
        "kv_reason": next(decision.why for decision in decisions if decision.field == "num_blocks"),
        "kv_tokens": kv_tokens,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "host_bytes": plan.host_bytes,
        "total_bytes": plan.total_bytes,
        "kv_directory": plan_directory(config, facts) if isinstance(facts, ModelFacts) else None,
    }


@dataclass(frozen=True, slots=True)
class _Found:
    facts: ModelFacts
    files: Files | None = None
    dequantized: ModelFacts | None = None
    """The facts of a GGUF file without its blocks, if `facts` keep them."""


_Encoder = tuple[EncoderFacts, Files | None]


def _read(asked: Settings) -> _Found | _Encoder:
    """Read the headers of the weights if they are on disk, otherwise config.json. A Hub model's is downloaded alone. Of
    a GGUF file of the Hub, the header is read."""
    found = None if asked.model == EMBEDDED_NAME else local_path(asked.model)
    if found is not None and found.is_file() and not is_gguf(found):
        return _of_config(found, read_json(found), asked)
    repo_id, files = ("", []) if found is not None else gguf_to_download(asked.model, asked.revision)
    if files:
        with without_weights(repo_id, files) as path:
            return _of_headers(path, asked)
    path = locate(asked.model, asked.revision, files=CONFIG_FILES)
    is_hub = asked.model != EMBEDDED_NAME and found is None
    if not is_gguf(path) and (is_hub or not any(path.glob("*.safetensors*"))):
        return _of_config(path, read_config(path), asked)
    return _of_headers(path, asked)


def _of_config(path: Path, config: Mapping[str, Any], asked: Settings) -> _Found | _Encoder:
    facts = config_facts_of(path, config, asked.model_impl)
    return _Found(facts) if isinstance(facts, ModelFacts) else (facts, None)


def _of_headers(path: Path, asked: Settings) -> _Found | _Encoder:
    checkpoint = Checkpoint.read(path, keeps_blocks=asked.quantization == "auto")
    by_dtype = Counter[str]()
    for info in checkpoint.tensors.values():
        by_dtype[info.dtype] += info.num_bytes
    facts, files = facts_of(checkpoint, asked.model_impl), Files(checkpoint.num_bytes, dict(by_dtype))
    if isinstance(facts, EncoderFacts):
        return facts, files
    dequantized = None
    if checkpoint.keeps_blocks and facts.arch.stored is not None:
        dequantized = ModelFacts.of(replace(checkpoint, keeps_blocks=False))
    return _Found(facts, files, dequantized)


def _overhead(text: str) -> tuple[float, float]:
    match = _OVERHEAD.fullmatch(text.strip().removesuffix("%"))
    low, high = (float(match[1]), float(match[2] or match[1])) if match else (1.0, 0.0)
    if not low <= high <= 100:
        raise ConfigError(f"--overhead must be a percentage from 0 to 100, or a range such as 10-20, but got {text!r}")
    return low / 100, high / 100


def _precision(asked: Settings, facts: ModelFacts) -> Precision:
    quantization: Quantization = "none" if asked.quantization == "auto" else asked.quantization
    check_quantization(quantization, facts.arch)
    dtype = auto_dtype(facts)[0] if asked.dtype == "auto" else asked.dtype
    return Precision(dtype, quantization_of(quantization, facts.arch), asked.kv_cache_dtype)


def _workload(asked: Settings, batch: int, context: int | None, facts: ModelFacts, machine: Machine) -> Workload:
    positions = facts.arch.max_positions
    context = positions if context is None else context
    length = "--context and --max-model-len"  # the second is the first's default
    for flag, value, limit in (("--batch", batch, 65536), (length, context, positions)):
        if not 1 <= value <= limit:
            raise ConfigError(f"{flag} must be from 1 to {limit} for this model, but got {value}")
    kind = speculative_on(machine.device)[0] if asked.speculative == "auto" else asked.speculative
    return Workload(
        num_seqs=batch,
        max_model_len=context,
        step_tokens=auto_step_tokens(machine.device),
        block_size=asked.block_size or AUTO_BLOCK_SIZE,
        device=machine.device,
        num_threads=max(machine.num_cpus // asked.tensor_parallel_size, 1),  # one replica may use the cores of all
        has_standby=asked.standby,
        num_ranks=asked.tensor_parallel_size,
        speculates=kind != "none",
        num_checkpoints=batch if facts.arch.recurrent is not None else 0,
        is_gguf=is_gguf(facts.path),
    )


def _draft(asked: Settings, facts: ModelFacts, served: Precision, work: Workload, machine: Machine) -> Draft | None:
    """The draft model or head beside a model in the precision `served`. Raises `ConfigError` if it does not suit."""
    found = read_draft(asked.speculative, facts.path, keeps_blocks=asked.quantization == "auto")
    if found is None:
        return None
    _, draft = found
    check_draft(facts.arch, draft.arch, asked.tensor_parallel_size)
    check_draft_length(facts.arch, draft.arch, work.max_model_len)
    return Draft(draft.arch, draft_precision(served, asked.quantization, draft, machine))


def _adapters(asked: Settings, facts: ModelFacts, served: Precision, machine: Machine) -> AdapterSpace | None:
    """Memory for adapters of a model in the precision `served`. Raises `ConfigError` if it cannot have any."""
    num_adapters = asked.max_loras
    if num_adapters is None:
        num_adapters = max(AUTO_ADAPTERS, len(asked.lora)) if asked.lora else 0
    if num_adapters:
        check_adapters(facts.arch, asked.tensor_parallel_size)
    return adapter_space(num_adapters, asked.max_lora_rank or AUTO_RANK, machine.device, served)


def _precisions(facts: ModelFacts, served: Precision, machine: Machine) -> tuple[Precision, ...]:
    """All precisions: float32, bfloat16, float16, and quantized with the dtype that `serve --quantization` would
    use."""
    kinds: tuple[Quantization, ...] = get_args(Quantization)
    plain = (
        Precision(dtype, "none", served.kv_cache, served_weights_dtype(dtype, facts, machine)[0])
        for dtype in DTYPE_BYTES
    )
    return (*plain, *(replace(served, quantization=kind) for kind in kinds if kind != "none"))


def _rows(found: _Found, served: Precision, work: Workload, machine: Machine) -> tuple[PlanRow, ...]:
    if found.dequantized is None:
        return tuple(_row(found.facts, row, work, machine) for row in _precisions(found.facts, served, machine))
    others = _rows(_Found(found.dequantized), replace(served, quantization="none"), work, machine)
    return (_row(found.facts, served, work, machine, BLOCKS), *others)


def _row(facts: ModelFacts, precision: Precision, work: Workload, machine: Machine, name: str = "") -> PlanRow:
    name = name or precision.name
    reason = refusal(facts.arch, precision.quantization) or kv_refusal(precision.kv_cache, machine)
    reason = reason or weights_refusal(precision.quantization, machine)
    if reason is not None:
        return PlanRow(name, precision, reason, None, is_served=False, max_context=0)
    plan = plan_sequences(facts.arch, precision, work, work.num_seqs)
    is_served = served_dtype(precision.dtype, machine)[0] == precision.dtype
    context = 0
    if is_served:
        context = longest_context(facts.arch, precision, work, work.num_seqs, machine.memory_available_bytes)
    return PlanRow(name, precision, None, plan, is_served, context)


def _verdict(facts: ModelFacts, served: Precision, work: Workload, machine: Machine) -> tuple[bool, str]:
    arch, available = facts.arch, machine.memory_available_bytes
    plan = plan_sequences(arch, served, work, work.num_seqs)
    many = work.num_seqs > 1
    what = f"{work.num_seqs if many else 'one'} sequence{'s' if many else ''} of {work.max_model_len} tokens"
    reason = kv_refusal(served.kv_cache, machine)
    if reason is not None:
        return False, f"not possible: {reason}; give --kv-cache-dtype {SHORT_KV} or auto"
    if plan.total_bytes <= available:
        return True, f"fits: {what} in {served.name}{of_each_rank(work)}"
    found = options(arch, served_precisions(arch, served, machine), work, work.num_seqs, available)
    return False, f"does not fit: {shortage(plan, served, what, available, work)}; {ways_out(served, found)}"
