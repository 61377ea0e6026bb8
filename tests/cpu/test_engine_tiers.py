"""The whole engine with tiers below a pool that is copied as a GPU's is: answers are those of an engine without, and
tokens are loaded instead of computed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.cost.roofline import Peaks
from inferd.engine.api.wire.messages import Ready, Submit
from inferd.engine.cache.below import Tier
from inferd.engine.cache.state_checkpoints import StateCheckpointRules
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.process import tiers as module
from inferd.engine.process.kv_host import HostTier
from inferd.engine.process.kv_tier import DirectoryTier
from inferd.engine.process.tiers import tier_of
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.worker.device_memory import DeviceMemory
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from tests.configs import engine_config
from tests.cpu.cases import HYBRIDS
from tests.cpu.checkpoints import Case
from tests.cpu.test_engine import Answer, Engine, request
from tests.cpu.test_hybrid import VOCAB, prompt

BLOCK, BUDGET = 16, 64
CASES = {
    "full": Case("llama", "llama", {"num_hidden_layers": 2}),
    "windowed": Case("gemma2", "gemma2", {"num_hidden_layers": 4, "head_dim": 32, "sliding_window": 40}),
    "hybrid": next(case for case in HYBRIDS if case.name == "qwen 3.5"),
}
NUM_BLOCKS = {"full": 30, "windowed": 44, "hybrid": 30}
"""Blocks of a pool that has room for about two of the prompts."""
TIERS = ("host", "directory", "both")


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory, case = tmp_path_factory.mktemp("tiers"), CASES[request.param]
    replace(case, config=case.config | {"vocab_size": VOCAB, "max_position_embeddings": 512}).save(directory)
    engine = Engine.load(directory, "float32", max_model_len=512)
    engine.config = msgspec.structs.replace(engine.config, num_blocks=NUM_BLOCKS[request.param])
    return engine


@dataclass
class Served:
    """A core, and the tiers below its pool."""

    core: EngineCore
    cache: KVCache
    tier: Tier | None
    is_running: bool = False

    @classmethod
    def of(cls, engine: Engine, kind: str = "", folder: Path | None = None) -> Served:
        config = engine.config
        rules = StateCheckpointRules(6, 1000 * BLOCK) if engine.runner.model.states is not None else None
        cache = KVCache(config.num_blocks, BLOCK, engine.runner.cache_windows, step_tokens=BUDGET, checkpoints=rules)
        asked = msgspec.structs.replace(
            config,
            kv_dir=str(folder) if kind in ("directory", "both") else "",
            kv_disk_bytes=2**30,
            kv_host_bytes=2**24 if kind in ("host", "both") else 0,
        )
        tier = tier_of(asked, ready(config), engine.runner, cache)
        limits = SchedulerConfig(max_num_seqs=40, max_num_batched_tokens=BUDGET, max_model_len=512)
        executor = ThreadExecutor(engine.runner, WorkerThread())
        core = EngineCore(Scheduler(limits, cache), executor, vocab_size=VOCAB, depth=1, tier=tier)
        if core._loads is not None:
            # The model is so small that nothing would be worth a load.
            core._loads._seconds_to_compute = lambda num_tokens: 1e3
        return cls(core, cache, tier)

    def run(self, *submits: Submit) -> dict[str, Answer]:
        for submit in submits:
            self.core.submit(submit, now=0.0)
        answers, until_s = {submit.request_id: Answer() for submit in submits}, time.monotonic() + 60
        self.is_running = True
        while self.core.has_work or self.core.is_awaiting:
            assert time.monotonic() < until_s
            output = self.core.step(0.0) if self.core.has_work else None
            for delta in output.deltas if output else ():
                answers[delta.request_id].add(delta)
        self.is_running = False
        self.core.check()
        return answers

    def settle(self) -> None:
        """Wait until all is kept that is going to be."""
        tier = self.tier
        each = [tier, tier._below] if isinstance(tier, HostTier) else [tier]
        for one in each:
            while isinstance(one, HostTier | DirectoryTier) and one.num_waiting:
                time.sleep(0.001)


def ready(config: EngineConfig) -> Ready:
    return Ready(
        num_blocks=config.num_blocks, block_size=BLOCK, max_model_len=512, vocab_size=VOCAB, weights_bytes=1,
        kv_bytes=1, planned_weights_bytes=1, planned_kv_bytes=1, device="cpu", dtype="float32", peaks=Peaks(1.0, 1.0),
    )  # fmt: skip


def submits(tag: str) -> list[Submit]:
    """Prompts of more than a piece, some of which begin alike."""
    stem = prompt(1, 140)
    prompts = [(*stem[: 140 * (number % 2)], *prompt(2 + number, 60 + 140 * (1 - number % 2))) for number in range(5)]
    return [request(f"{tag}{number}", ids, max_tokens=6) for number, ids in enumerate(prompts)]


def found(answers: dict[str, Answer], tag: str) -> list[Answer]:
    return [answers[f"{tag}{number}"] for number in range(5)]


@pytest.mark.parametrize("kind", TIERS)
def test_evicted_prefixes_are_loaded_and_answers_are_the_same(engine: Engine, kind: str, tmp_path: Path) -> None:
    assert engine.runner.ledger is None, "its pool is copied"
    plain = Served.of(engine)
    expected = found(plain.run(*submits("a")), "a")
    served = Served.of(engine, kind, tmp_path / "kv")
    for number, submit in enumerate(submits("a")):
        assert served.run(submit)[f"a{number}"] == expected[number]
        served.settle()
    assert served.core.stats().tier_written_bytes > 0
    for number, submit in enumerate(submits("b")):
        assert served.run(submit)[f"b{number}"] == expected[number]
    stats = served.core.stats()
    assert stats.tier_loaded_tokens >= 3 * 128 and stats.tier_failed == stats.tier_damaged == 0


@pytest.mark.parametrize("kind", TIERS)
def test_loaded_pieces_have_the_bits_of_computed_ones(engine: Engine, kind: str, tmp_path: Path) -> None:
    """An idle engine computes them again. If bits need not be the same, it does not."""
    own = replace(engine, config=msgspec.structs.replace(engine.config, num_blocks=300))
    served = Served.of(own, kind, tmp_path / "kv")
    expected = found(served.run(*submits("a")), "a")
    served.settle()
    served.core.reset_prefix_cache()
    assert found(served.run(*submits("b")), "b") == expected
    rechecks, until_s = served.core._rechecks, time.monotonic() + 60
    assert rechecks is not None
    while served.core.recheck() or rechecks.holds_blocks:
        assert time.monotonic() < until_s
    stats = served.core.stats()
    assert stats.tier_loaded_tokens > 0 and stats.tier_same_tokens > 0 and stats.tier_different == 0
    other = EngineCore(
        served.core._scheduler, served.core._executor, vocab_size=VOCAB, tier=served.tier, has_same_bits=False
    )
    assert other._loads is not None and other._loads.on_loaded is None


@pytest.mark.parametrize("kind", TIERS)
def test_copies_that_race_with_evictions_change_no_answer(
    engine: Engine, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once, in a pool that holds no more, again and again. Copies begin some steps late, and
    after the first turn nobody waits for them."""
    expected = found(Served.of(engine).run(*submits("a")), "a")
    served = Served.of(engine, kind, tmp_path / "kv")
    fetch = DeviceMemory.fetch

    def late(memory: DeviceMemory, *given: Any) -> bool:
        until = served.core._num_steps + 8
        while served.is_running and served.core._num_steps < until:
            time.sleep(0.0001)
        return fetch(memory, *given)

    monkeypatch.setattr(DeviceMemory, "fetch", late)
    for turn in range(4):
        asked = submits(f"{turn}-")
        for number in range(5):
            pair = number, (number + 2) % 5
            renamed = [msgspec.structs.replace(asked[each], request_id=f"{number}-{each}") for each in pair]
            answers = served.run(*renamed)
            assert [answers[submit.request_id] for submit in renamed] == [expected[each] for each in pair]
            if not turn:
                served.settle()
    stats = served.core.stats()
    assert stats.tier_loaded_tokens > 0 and stats.tier_damaged == 0


def test_another_engine_reads_the_directory_into_its_pool(engine: Engine, tmp_path: Path) -> None:
    first = Served.of(engine, "directory", tmp_path / "kv")
    expected = found(first.run(*submits("a")), "a")
    first.settle()
    second = Served.of(engine, "both", tmp_path / "kv")
    assert found(second.run(*submits("b")), "b") == expected
    assert second.core.stats().tier_loaded_tokens > 0


def test_a_fingerprint_differs_with_all_that_the_bytes_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    own = engine_config()
    gpu = msgspec.structs.replace(own, device="cuda")
    given = (
        own, gpu, msgspec.structs.replace(own, block_size=32), msgspec.structs.replace(own, rope_positions=7),
        msgspec.structs.replace(gpu, attention_libs=False),
    )  # fmt: skip
    prints = [module._fingerprint(config, ready(config), "layout") for config in given]
    assert len({*prints, module._fingerprint(own, ready(own), "other")}) == len(given) + 1
    monkeypatch.setattr(module, "distributions", lambda: [])
    assert module._fingerprint(gpu, ready(gpu), "layout") != prints[1], "another Triton computes other bytes"
    assert module._fingerprint(own, ready(own), "layout") == prints[0]
