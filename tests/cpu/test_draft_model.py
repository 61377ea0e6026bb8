"""Drafts of a draft model change no bit, whether it is always right or never: alone, in a batch, with prefix hits, with
little memory, and beside guesses. A draft model that is the served model itself is always right."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import AskedConfig, AskedDraft
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.planner import format_bytes
from inferd.engine.api.model import ModelFacts, of_mtp_layer
from inferd.engine.api.resolve import resolve
from inferd.engine.api.wire.messages import Ready, Submit
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.grammar.ports import Grammar
from inferd.engine.request import Request
from inferd.engine.sched.latency.step_time import Coefficients, PriorCosts
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.speculation.ports import NO_GUESS, Guess
from inferd.engine.worker.draft_model import DraftModel
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from inferd.engine.worker.load import load_worker
from inferd.engine.worker.runner import Runner
from tests.cpu.test_engine import SHAPE, VOCAB, prompt, request, run, save
from tests.cpu.test_speculation import OPTIONS, KnownAnswers

CHEAP = Coefficients(10e-3, 1e-5, 0.0, 0.0, pass_s=1e-5, draft_s=1e-7)
"""Costs by which every draft is worth its time."""


class NoGuesses:
    """Guesses nothing, so that all drafts are the draft model's."""

    def open(self, request: Request, grammar: Grammar | None) -> None:
        del request, grammar

    def close(self, request: Request) -> None:
        del request

    def guess(self, request: Request) -> Guess:
        del request
        return NO_GUESS


class Drafted:
    """A worker with a draft model or a draft head."""

    def __init__(self, path: Path, draft_path: Path, *, is_mtp: bool = False, **settings: Any) -> None:
        facts = ModelFacts.of(Checkpoint.read(path))
        given = Checkpoint.read(draft_path)
        draft = ModelFacts.of(of_mtp_layer(given) if is_mtp else given, is_mtp=is_mtp)
        is_head = draft.arch.draft_head is not None
        asked = AskedConfig(
            model_path=str(path),
            kv_memory_bytes=16 * 2**20,
            max_num_seqs=40,
            block_size=16,
            max_num_batched_tokens=64,
            speculative="model",
            draft=AskedDraft(model_path=str(draft_path), name="small", is_head=is_head, is_mtp=is_mtp),
            **settings,
        )
        self.config, self.planned, _ = resolve(asked, facts, Machine.detect(), draft)
        self.runner: Runner
        self.ready: Ready
        self.runner, self.ready = load_worker(self.config, time.monotonic(), lambda phase: None)

    def core(self, *, drafts: bool, num_blocks: int = 0, guesses: NoGuesses | KnownAnswers | None = None) -> EngineCore:
        config = self.config
        assert config.num_blocks and config.block_size and config.max_model_len and config.draft
        limits = SchedulerConfig(
            max_num_seqs=40,
            max_num_batched_tokens=64,
            max_model_len=config.max_model_len,
            max_draws=64,
            drafts_follow=config.draft.is_head,
        )
        cache = KVCache(num_blocks or config.num_blocks, config.block_size, self.runner.cache_windows, step_tokens=64)
        guesses = (guesses or NoGuesses()) if drafts else None
        scheduler = Scheduler(limits, cache, PriorCosts(CHEAP, CHEAP, CHEAP), guesses)
        if scheduler._drafting is not None:
            scheduler._drafting.ignore_gains()
        return EngineCore(
            scheduler,
            ThreadExecutor(self.runner, WorkerThread()),
            vocab_size=VOCAB,
            # No time passes, so costs stay what they are.
            clock=lambda: 0.0,
            guesses=guesses,
        )


def another(path: Path) -> Path:
    """A random model of the same vocabulary and another shape, which is never right."""
    torch.manual_seed(8)
    shape = {**SHAPE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, head_dim=16))
    model.save_pretrained(path)
    return path


def submits() -> list[Submit]:
    """Requests of every option, with prompts of which some share a beginning."""
    shared, asked = prompt(99, 90), list[Submit]()
    for index in range(len(OPTIONS) + 4):
        own = prompt(index, 3 + 5 * index % 37)
        asked.append(request(f"r{index}", shared + own if index % 3 == 0 else own, **OPTIONS[index % len(OPTIONS)]))
    return asked


def accepted(core: EngineCore) -> tuple[int, int]:
    stats = core._scheduler.stats
    return sum(stats.accepted_drafts), stats.num_drafts


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
                                      {"dtype": "bfloat16", "quantization": "int8"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("is_right", [False, True], ids=["never right", "always right"])
def test_drafts_change_no_bit(is_right: bool, settings: dict[str, str], tmp_path: Path) -> None:
    path = save(tmp_path / "served", "qwen3")
    engine = Drafted(path, path if is_right else another(tmp_path / "draft"), **settings)
    asked = submits()
    plain = run(engine.core(drafts=False), *asked)
    core = engine.core(drafts=True)
    assert run(core, *asked) == plain
    assert accepted(core)[1] > 100
    again = {f"again {one.request_id}": plain[one.request_id] for one in asked}
    assert run(core, *(renamed(one, f"again {one.request_id}") for one in asked)) == again, "with prefix hits"
    assert core.stats().prefix_hit_tokens > 300
    tight = engine.core(drafts=True, num_blocks=24)
    assert run(tight, *asked) == plain
    assert tight.stats().num_preemptions > 0
    for one in asked[::3]:
        assert run(engine.core(drafts=True), one) == {one.request_id: plain[one.request_id]}
    mixed = engine.core(drafts=True, guesses=KnownAnswers(plain, random.Random(1), 0.2))
    assert run(mixed, *asked) == plain
    num_accepted, num_drafts = accepted(core)
    assert (num_accepted > 0.5 * num_drafts) == is_right


def test_the_served_model_itself_is_always_right_at_any_temperature(tmp_path: Path) -> None:
    """Also behind prefix hits, chunks, and rows of the neighbours. Without rules, which a draft does not know."""
    path = save(tmp_path, "qwen3")
    engine = Drafted(path, path, dtype="float32")
    options: tuple[dict[str, object], ...] = (
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.4, "seed": 6},
        {"temperature": 1.0, "seed": 6, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
    )
    shared = prompt(7, 130)
    asked = [request(f"r{i}", shared + prompt(i, 1 + i), **options[i % 4], max_tokens=60) for i in range(12)]
    core = engine.core(drafts=True)
    assert run(core, *asked) == run(engine.core(drafts=False), *asked)
    num_accepted, num_drafts = accepted(core)
    assert num_drafts == num_accepted > 300
    assert core.stats().prefix_hit_tokens > 128


@pytest.mark.parametrize("fault", ["a position too late", "of the first pass", "another noise"])
def test_a_draft_model_with_a_fault_is_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers stay right, and drafts of the served model itself do not."""
    path = save(tmp_path, "qwen3")
    engine = Drafted(path, path, dtype="float32")
    asked = [request(f"r{i}", prompt(i, 20 + i), temperature=1.0, seed=i, max_tokens=40) for i in range(6)]
    if fault == "a position too late":
        _patch_rows(monkeypatch, lambda row: row._replace(draft_start=min(row.draft_start + 1, row.start)))
    elif fault == "of the first pass":
        monkeypatch.setattr(DraftModel, "_compute", lambda self, spans: None)
    else:
        draft = engine.runner.model.sampler.draft
        monkeypatch.setattr(
            engine.runner.model.sampler, "draft", lambda logits, slots, at: draft(logits, slots, [p + 1 for p in at])
        )
    core = engine.core(drafts=True)
    assert run(core, *asked) == run(engine.core(drafts=False), *asked)
    num_accepted, num_drafts = accepted(core)
    assert num_accepted < 0.95 * num_drafts


def _patch_rows(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    draft = DraftModel.draft
    monkeypatch.setattr(
        DraftModel, "draft", lambda self, rows: draft(self, [change(row) if row.num_to_draft else row for row in rows])
    )


def test_memory_is_planned_with_the_draft_model(tmp_path: Path) -> None:
    path, draft_path = save(tmp_path / "served", "qwen3"), another(tmp_path / "draft")
    engine = Drafted(path, draft_path, dtype="float32")
    alone = AskedConfig(model_path=str(path), dtype="float32", kv_memory_bytes=16 * 2**20, max_num_seqs=40,
                         block_size=16, max_num_batched_tokens=64)  # fmt: skip
    settled, plan, _ = resolve(alone, ModelFacts.of(Checkpoint.read(path)), Machine.detect())
    assert settled.num_blocks is not None and engine.config.num_blocks is not None
    # K and V of 2 layers of 2 heads of 32, and of one layer of 2 heads of 16.
    assert engine.config.num_blocks == settled.num_blocks * 128 // (128 + 32)
    model = LlamaForCausalLM.from_pretrained(draft_path)
    draft_bytes = sum(part.num_bytes for part in engine.planned.weights if part.name.startswith("draft "))
    assert draft_bytes == 4 * sum(weight.numel() for weight in model.parameters())
    assert engine.planned.weights_bytes == plan.weights_bytes + draft_bytes
    assert engine.ready.kv_bytes == engine.planned.kv_bytes, format_bytes(engine.planned.kv_bytes)
    assert engine.ready.speculative == "draft model small"


def renamed(submit: Submit, name: str) -> Submit:
    return msgspec.structs.replace(submit, request_id=name)
