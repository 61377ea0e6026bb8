"""A loaded prefix that is computed again in the whole engine: the same bits, in other blocks and chunks, whatever the
model keeps for a prefix."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import AskedConfig
from inferd.engine.api.kv_store.directory import KVDirectory
from inferd.engine.api.kv_store.segment import Blocks
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.process.memory_file import POOL_MEMORY, MemoryFile
from inferd.engine.api.resolve import resolve
from inferd.engine.api.wire.messages import EngineStats
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.process.kv_tier import DirectoryTier
from inferd.engine.process.main import checkpoint_rules
from inferd.engine.process.place_memory import Row
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from inferd.engine.worker.load import load_worker
from tests.cpu.cases import CASES, HYBRIDS
from tests.cpu.test_engine import request
from tests.cpu.test_kv_tier import wait

BLOCK, NUM_TOKENS = 16, 400


class Life:
    """One engine on memory and slots of its own, and the tier that it shares with others."""

    def __init__(self, path: Path, folder: Path, kv_cache_dtype: str) -> None:
        asked = AskedConfig(
            model_path=str(path), dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, kv_memory_bytes=16 * 2**20,
            max_num_seqs=4, block_size=BLOCK,
        )  # fmt: skip
        config, _, _ = resolve(asked, ModelFacts.of(Checkpoint.read(path)), Machine.detect())
        self.file = MemoryFile(POOL_MEMORY)
        config = msgspec.structs.replace(config, pool_memory=self.file.path)
        runner, _ = load_worker(config, time.monotonic(), lambda phase: None)
        limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256, max_model_len=config.max_model_len)
        self.vocab_size = runner.arch.vocab_size
        self.cache = KVCache(
            config.num_blocks, BLOCK, runner.cache_windows, step_tokens=256, checkpoints=checkpoint_rules(config),
            ledger=runner.ledger,
        )  # fmt: skip
        assert runner.ledger is not None
        opened = partial(KVDirectory, folder, 2**30)
        self.tier = DirectoryTier(opened, runner.ledger, self.cache.num_erased, len(self.cache.windows), b"m" * 32)
        executor = ThreadExecutor(runner, WorkerThread())
        self.core = EngineCore(Scheduler(limits, self.cache), executor, vocab_size=self.vocab_size, tier=self.tier)

    def answer(self, prompt_ids: tuple[int, ...]) -> list[object]:
        """Ids and log probabilities of an answer. Its prefix is written by the end."""
        ids = tuple(token_id % self.vocab_size for token_id in prompt_ids)
        self.core.submit(request("r", ids, max_tokens=5), now=0.0)
        given: list[object] = []
        while self.core.has_work or self.core.is_awaiting:
            output = self.core.step(0.0)
            given += [(delta.token_ids, delta.logprobs) for delta in output.deltas] if output else []
        wait(lambda: self.tier.num_waiting == 0)
        return given

    def recheck(self) -> EngineStats:
        """The counts after all samples were computed again."""
        while self.core.recheck():
            self.core.check()
        time.sleep(0.05)
        wait(lambda: not self.core.recheck() and self.core.stats().num_blocks_used == 0)
        return self.core.stats()


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    [
        ("mistral, window", "auto"),
        ("gemma 3, tied", "auto"),
        ("gemma 3, tied", "int8"),
        ("gpt-oss", "fp8"),
        ("qwen 3.5", "auto"),
        ("granite 4, experts", "int8"),
    ],
)
def test_the_bits_of_a_loaded_prefix_are_found_again(name: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    next(case for case in (*CASES, *HYBRIDS) if case.name == name).save(tmp_path / "model")
    ids = tuple(torch.randint(0, 10**6, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist())
    first = Life(tmp_path / "model", tmp_path / "kv", kv_cache_dtype)
    expected = first.answer(ids)
    second = Life(tmp_path / "model", tmp_path / "kv", kv_cache_dtype)
    assert second.answer(ids) == expected
    assert second.core.stats().tier_loaded_tokens >= NUM_TOKENS - 2 * BLOCK
    stats = second.recheck()
    assert stats.tier_different == 0 and stats.tier_same_tokens == second.core.stats().tier_loaded_tokens
    third = Life(tmp_path / "model", tmp_path / "kv", kv_cache_dtype)
    third.answer(ids)
    flip_a_bit_of_what_is_compared(third)
    assert third.recheck().tier_different > 0 and not list((tmp_path / "kv").glob("*/*/*.kv"))


def flip_a_bit_of_what_is_compared(life: Life) -> None:
    """As if the tier had another bit in each row."""
    memory = life.tier._memory
    buffers = memory.buffers

    def other(rows: Sequence[Row]) -> Blocks:
        found = buffers(rows)
        for row in found:
            if row:
                row[-1].cast("B")[0] ^= 1
        return found

    memory.buffers = other  # type: ignore[method-assign]
