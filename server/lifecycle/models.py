"""Reads what a server is to serve: each model's files, its automatic settings, and its part of the memory.

Loads no weights. Several models divide what is left beside all of their weights.
"""

from __future__ import annotations

import logging
from pathlib import Path

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.locate import locate
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.model import ModelFacts
from inferd.server.auth.keys_file import read_keys
from inferd.server.config.models import Asked, Settled, demands_of, named, parts, settings_of_models
from inferd.server.config.settings import Settings
from inferd.server.lifecycle.ready_card import StartupReport
from inferd.server.text.model import ServedModel
from inferd.server.tools.answer_rules import LACKS_TOOLS

logger = logging.getLogger("inferd")


def read_models(settings: Settings) -> tuple[StartupReport, ...]:
    """Find each checkpoint, check that its headers are consistent, and decide every automatic setting. Raises
    `StartError`."""
    if settings.keys_file is not None:
        read_keys(Path(settings.keys_file))
    machine, each = Machine.detect(), settings_of_models(settings)
    asked = []
    for own in each:
        with named(own, each):
            asked.append(_ask(own))
    reports = []
    for one, part in zip(asked, parts(machine, demands_of(machine, asked)), strict=True):
        with named(one.settings, each):
            reports.append(_report(one, one.settled(part)))
    return tuple(reports)


def _ask(settings: Settings) -> Asked:
    """Finds the checkpoint, and reads its headers."""
    keeps_blocks = settings.quantization == "auto"
    checkpoint = Checkpoint.read(locate(settings.model, settings.revision), keeps_blocks=keeps_blocks)
    return Asked.of(settings, ModelFacts.of(checkpoint, settings.model_impl))


def _report(asked: Asked, settled: Settled) -> StartupReport:
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
        facts.path,
        settings.served_names,
        max_model_len=config.max_model_len,
        vocab_size=facts.arch.vocab_size,
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
    )
    if model.template is not None and model.template.lacks_tools:
        logger.info("%s, and reads calls as %s", LACKS_TOOLS, model.format.tool_name)
    return StartupReport(settings, facts, model, config, memory, asked.adapters)
