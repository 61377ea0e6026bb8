"""Compares the FLOPs of a step with torch's own count of the products in transformers' model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from inferd.engine.api.cost.step_cost import WorkModel
from inferd.engine.api.memory.precision import Precision
from inferd.engine.arch.registry import describe
from tests.cpu.cases import CASES
from tests.cpu.checkpoints import SMALL, Case

CONTEXT = 33
"""Length above every window."""


def counted(case: Case, context: int) -> int:
    """FLOPs of one token after `context` others, without the products of rotary frequencies with positions."""
    config = AutoConfig.for_model(case.model_type, **{**SMALL, **case.config})
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")  # type: ignore[no-untyped-call]
    cache = DynamicCache(config=config)
    if context:
        model(torch.zeros((1, context), dtype=torch.int64), past_key_values=cache)
    with FlopCounterMode(display=False, depth=None) as counter:
        model(torch.zeros((1, 1), dtype=torch.int64), past_key_values=cache)
    rotary = [sum(ops.values()) for name, ops in counter.flop_counts.items() if name.endswith("rotary_emb")]
    return counter.get_total_flops() - sum(rotary)


@pytest.mark.parametrize("context", [0, CONTEXT])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_token_takes_the_flops_that_torch_counts(case: Case, context: int) -> None:
    arch = describe(case.config_json())
    model = WorkModel.of(arch, Precision("float32"), arch.max_positions)
    assert model.step([context], [1], 1).flops == counted(case, context)


def test_the_count_sees_a_window() -> None:
    """A model that ignored its windows would give another count."""
    (case,) = [case for case in CASES if case.name == "mistral, window"]
    assert counted(case, 19) == counted(case, CONTEXT)
    assert counted(case, 18) < counted(case, 19)
