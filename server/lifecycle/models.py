"""Reads what a server is to serve: each model's files, its automatic settings, and its part of the memory.

Loads no weights. Several models divide what is left beside all of their weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from inferd.engine.api.adapter import MAX_RANK, AdapterFiles, check_adapters, read_adapter, space_for
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import Decision, EngineConfig, resolve
from inferd.engine.api.draft import read_draft, source_of
from inferd.engine.api.errors import StartError
from inferd.engine.api.locate import locate
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.division import Demand, Part, parts_of
from inferd.engine.api.memory.planner import MemoryPlan
from inferd.engine.api.model import ModelFacts
from inferd.server.auth.keys_file import read_keys
from inferd.server.config.models import settings_of_models
from inferd.server.config.settings import Settings
from inferd.server.lifecycle.ready_card import StartupReport
from inferd.server.text.model import ServedModel
from inferd.server.tools.answer_rules import LACKS_TOOLS

logger = logging.getLogger("inferd")


@dataclass(frozen=True, slots=True)
class _Asked:
    """One model as its settings and headers describe it, before the automatic settings are decided."""

    settings: Settings
    facts: ModelFacts
    checkpoint: Checkpoint
    config: EngineConfig
    draft: ModelFacts | None
    adapters: dict[str, AdapterFiles]


Settled = tuple[EngineConfig, MemoryPlan, tuple[Decision, ...]]


def read_models(settings: Settings) -> tuple[StartupReport, ...]:
    """Find each checkpoint, check that its headers are consistent, and decide every automatic setting. Raises
    `StartError`."""
    if settings.keys_file is not None:
        read_keys(Path(settings.keys_file))
    machine, each = Machine.detect(), settings_of_models(settings)
    asked = []
    for own in each:
        with _named(own, each):
            asked.append(_ask(own))
    reports = []
    for one, part in zip(asked, _parts(machine, asked, each), strict=True):
        config = msgspec.structs.replace(one.config, first_gpu=part.first_gpu)
        with _named(one.settings, each):
            reports.append(_report(one, resolve(config, one.facts, part.machine, one.draft)))
    return tuple(reports)


@contextmanager
def _named(settings: Settings, each: Sequence[Settings]) -> Iterator[None]:
    """Errors say which of several models they are about."""
    try:
        yield
    except StartError as error:
        if len(each) == 1:
            raise
        raise type(error)(f"{settings.served_names[0]}: {error}") from error


def _ask(settings: Settings) -> _Asked:
    keeps_blocks = settings.quantization == "auto"
    checkpoint = Checkpoint.read(locate(settings.model, settings.revision), keeps_blocks=keeps_blocks)
    facts = ModelFacts.of(checkpoint, settings.model_impl)
    draft = read_draft(settings.speculative, checkpoint.path, keeps_blocks=keeps_blocks)
    if settings.lora or settings.max_loras:
        check_adapters(facts.arch, settings.tensor_parallel_size)
    most = settings.max_lora_rank or MAX_RANK
    adapters = {name: read_adapter(path, facts.arch, most) for name, path in settings.loras.items()}
    max_loras, max_lora_rank = space_for(settings.max_loras, settings.max_lora_rank, tuple(adapters.values()))
    config = EngineConfig(
        model_path=str(checkpoint.path),
        dtype=settings.dtype,
        quantization="none" if settings.quantization == "auto" else settings.quantization,
        keeps_blocks=keeps_blocks,
        kv_cache_dtype=settings.kv_cache_dtype,
        device=settings.device,
        deterministic=settings.deterministic,
        attention_libs=settings.attention_libs,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        kv_memory_bytes=settings.kv_memory,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        prefix_caching=settings.prefix_caching,
        num_threads=settings.num_threads,
        tensor_parallel_size=settings.tensor_parallel_size,
        num_replicas=settings.replicas,
        standby=settings.standby,
        speculative=source_of(settings.speculative),
        draft=None if draft is None else draft[0],
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        kv_events="none" if settings.kv_events is None else "all" if settings.kv_events_private else "shared",
    )
    return _Asked(settings, facts, checkpoint, config, None if draft is None else draft[1], adapters)


def _report(asked: _Asked, settled: Settled) -> StartupReport:
    """Says what was decided, and reads the model's texts."""
    settings, facts, (config, memory, decisions) = asked.settings, asked.facts, settled
    for decision in decisions:
        is_cut = decision.field == "max_model_len" and config.max_model_len != facts.arch.max_positions
        is_changed = decision.field == "deterministic" and decision.asked is not None
        level = logging.WARNING if is_cut else logging.INFO if is_changed else logging.DEBUG
        given = "auto" if decision.asked is None else decision.asked
        logger.log(level, "%s: %s -> %s (%s)", decision.field, given, decision.became, decision.why)
    if not facts.arch.is_native:
        logger.warning(
            "%s is compatible, not native: transformers' own code computes it with inferd's attention and linear "
            "layers, more slowly than a native family",
            facts.arch.architecture,
        )
    if facts.has_kv_scales:
        logger.info(
            "inferd does not use the checkpoint's scales for 8-bit K and V: with --kv-cache-dtype fp8 or int8, "
            "every 32 elements of a head have their own scale"
        )
    assert config.max_model_len is not None
    model = ServedModel.load(
        asked.checkpoint.path,
        settings.served_names,
        max_model_len=config.max_model_len,
        vocab_size=facts.arch.vocab_size,
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
    )
    if model.template is not None and model.template.lacks_tools:
        logger.info("%s, and reads calls as %s", LACKS_TOOLS, model.format.tool_name)
    return StartupReport(settings, facts, model, config, memory, asked.adapters)


def _parts(machine: Machine, all_asked: Sequence[_Asked], each: Sequence[Settings]) -> list[Part]:
    """The part of each model. One model has the whole machine."""
    if len(all_asked) == 1:
        return [Part(machine, 0)]
    demands = []
    for asked in all_asked:
        with _named(asked.settings, each):
            config, plan, _ = resolve(asked.config, asked.facts, machine, asked.draft)
        num_engines = config.num_replicas * config.tensor_parallel_size
        name = asked.settings.served_names[0]
        demands.append(Demand(name, config.device == "cuda", num_engines, plan, asked.config.kv_memory_bytes))
    return parts_of(machine, demands)
