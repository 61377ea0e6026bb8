"""Reads what a server is to serve: each model's files, its automatic settings, and its part of the memory.

Loads no weights. Several models divide what is left beside all of their weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from inferd.engine.api.checkpoint import Checkpoint, Documents
from inferd.engine.api.config import EngineConfig
from inferd.engine.api.decisions import Decision
from inferd.engine.api.encoder_model import EncoderFacts, facts_of
from inferd.engine.api.errors import ModelError
from inferd.engine.api.gguf import is_gguf
from inferd.engine.api.held_files import HeldCheckpoint
from inferd.engine.api.kv_store.directory import KVDirectory
from inferd.engine.api.locate import locate
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.planner import format_bytes
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.pinned_files import digest_of_all
from inferd.engine.api.process.written_once import WrittenOnce
from inferd.server.auth.keys_file import read_keys
from inferd.server.config.models import (
    Asked,
    Settled,
    check_host_memory,
    demands_of,
    machine_shares,
    named,
    nice_of,
    settings_of_models,
)
from inferd.server.config.settings import Settings
from inferd.server.generate.answer_rules import LACKS_TOOLS
from inferd.server.lifecycle.ready_card import StartupReport
from inferd.server.text.model import ServedModel

logger = logging.getLogger("inferd")


@dataclass(frozen=True, slots=True)
class _Read:
    """One model whose headers were read from files that are held open."""

    asked: Asked
    checkpoint: Checkpoint
    held: HeldCheckpoint


def read_models(settings: Settings) -> tuple[StartupReport, ...]:
    """Find each checkpoint, check that its headers are consistent, and decide every automatic setting. Raises
    `StartError`."""
    if settings.keys_file is not None:
        read_keys(Path(settings.keys_file))
    machine, each = Machine.detect(), settings_of_models(settings)
    all_read = []
    for own in each:
        with named(own, each):
            all_read.append(_read(own))
    reports = []
    all_asked = [read.asked for read in all_read]
    demands = demands_of(machine, all_asked)
    for read, share in zip(all_read, machine_shares(machine, demands), strict=True):
        with named(read.asked.settings, each):
            label = "" if len(each) == 1 else f"{read.asked.settings.served_names[0]}: "
            reports.append(_report(read, read.asked.settled(share), nice_of(read.asked, all_asked), label))
    check_host_memory(machine, [report.config for report in reports])
    return tuple(reports)


def _read(settings: Settings) -> _Read:
    """Finds the checkpoint, opens its files, and reads their headers."""
    keeps_blocks = settings.quantization == "auto"
    path = locate(settings.model, settings.revision)
    held = HeldCheckpoint(path)
    checkpoint = Checkpoint.read(path, keeps_blocks=keeps_blocks)
    return _Read(Asked.of(settings, facts_of(checkpoint, settings.model_impl), checkpoint.gguf), checkpoint, held)


def _held(path: Path, *, keeps_blocks: bool) -> HeldCheckpoint:
    """The files of a checkpoint as they are now, held open. Raises `ModelError`."""
    held = HeldCheckpoint(path)
    held.pin(Checkpoint.read(path, keeps_blocks=keeps_blocks))
    return held


def _check_kv_dir(config: EngineConfig, label: str) -> None:
    """Raises `StartError` if the directory of KV blocks cannot be used."""
    if config.kv_dir:
        if not config.prefix_caching:
            logger.warning("%skv_dir is not used, because there is no prefix cache", label)
            return
        directory = KVDirectory(Path(config.kv_dir), config.kv_disk_bytes)
        used, quota = (format_bytes(number) for number in (directory.used_bytes, config.kv_disk_bytes))
        logger.info("%sKV segments are kept in %s: %s of at most %s", label, config.kv_dir, used, quota)
        directory.close()


def tell_decisions(
    decisions: Sequence[Decision], config: EngineConfig, facts: ModelFacts | EncoderFacts, label: str
) -> None:
    """Log what was decided. A length that the operator must know of is a warning. An encoder is cut to the longest text
    that its folder states, which is the normal case."""
    for decision in decisions:
        if decision.unused_flag:
            logger.warning("%s%s is not used: %s", label, decision.unused_flag, decision.why)
            continue
        is_cut = decision.field == "max_model_len" and config.max_model_len != facts.arch.max_positions
        is_changed = decision.asked not in (None, "auto") and decision.field in ("deterministic", "activations")
        level = logging.INFO if is_cut or is_changed else logging.DEBUG
        if is_cut and not config.is_encoder:
            level = logging.WARNING
        given = "auto" if decision.asked is None else decision.asked
        logger.log(level, "%s%s: %s -> %s (%s)", label, decision.field, given, decision.became, decision.why)
    if not facts.arch.is_native:
        logger.warning(
            "%s%s is compatible, not native: transformers' own code computes it with inferd's attention and linear "
            "layers, more slowly than a native family",
            label,
            facts.arch.architecture,
        )
    if isinstance(facts, ModelFacts) and facts.has_kv_scales:
        logger.info(
            "%sinferd does not use the checkpoint's scales for 8-bit K and V: with --kv-cache-dtype fp8 or int8, "
            "every 32 elements of a head have their own scale",
            label,
        )


def _report(read: _Read, settled: Settled, nice: int, label: str) -> StartupReport:
    """Says what was decided, and reads the model's texts. `nice`: the nice value of its engine. `label`: its name in
    log lines; empty if it is alone."""
    asked, (config, memory, decisions) = read.asked, settled
    settings, facts = asked.settings, asked.facts
    tell_decisions(decisions, config, facts, label)
    _check_kv_dir(config, label)
    model = ServedModel.load(
        facts.path,
        settings.served_names,
        max_model_len=config.max_model_len,
        vocab_size=facts.arch.vocab_size,
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
        trusts_special_tokens=settings.trust_special_tokens,
        documents=Documents(facts.path, read.checkpoint.gguf),
    )
    if model.template is not None and model.template.lacks_tools:
        logger.info("%s%s, and reads calls as %s", label, LACKS_TOOLS, model.format.tool_name)
    if config.is_encoder:
        # Its length is the folder's, or what the operator wants instead.
        model = replace(model, embeds=replace(model.embeds, max_tokens=None))
    read.held.pin(read.checkpoint)  # all that the server reads is read by now
    vocabulary = WrittenOnce()
    model = replace(model, digest=read.held.texts_digest, files=read.held.documents, vocabulary=vocabulary)
    config = msgspec.structs.replace(config, files=read.held.pinned, vocabulary=vocabulary.path, nice=nice)
    held, draft = [read.held], config.draft
    if draft is not None and draft.model_path != config.model_path:
        held.append(_held(Path(draft.model_path), keeps_blocks=draft.keeps_blocks))
        config = msgspec.structs.replace(config, draft=msgspec.structs.replace(draft, files=held[1].pinned))
    return StartupReport(settings, facts, model, config, memory, asked.adapters, tuple(held))


def opened_anew(report: StartupReport) -> StartupReport:
    """A model that could not be loaded, with the weights that its files have now. Nobody has had an answer of it.

    Raises `ModelError` if other files have changed: the server has read them.
    """
    path, held = report.facts.path, _held(report.facts.path, keeps_blocks=report.config.keeps_blocks)
    if digest_of_all(held.pinned) == digest_of_all(report.config.files):
        return report
    if held.texts_digest != report.model.digest:
        what = "it" if is_gguf(path) else "more than its weights"
        raise ModelError(f"{path} has changed, and the server has read {what}: restart the server to serve it")
    config = msgspec.structs.replace(report.config, files=held.pinned)
    return replace(report, config=config, held=(held, *report.held[1:]))
