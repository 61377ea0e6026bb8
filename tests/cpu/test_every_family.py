"""Each native family in the whole engine. Greedy ids are those of transformers in fp32. In fp32 and bf16 a request's
bits are the same alone, among 32, in chunks, behind a prefix hit, after preemption, when it is replayed and on more
threads."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from inferd.engine.arch.paging import max_blocks
from inferd.engine.cache.state_checkpoints import StateCheckpointRules
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from tests.cpu.cases import CASES, HYBRIDS
from tests.cpu.checkpoints import Case, load_transformers
from tests.cpu.test_engine import NUM_NEW, Engine, request, run
from tests.cpu.test_hybrid import BLOCK, VOCAB, neighbours, prompt
from tests.cpu.test_parity import continues

PROMPT = 75


def core_of(engine: Engine, *, num_blocks: int = 0, budget: int = 256) -> EngineCore:
    config, windows = engine.config, engine.runner.cache_windows
    assert config.num_blocks and config.max_model_len
    limits = SchedulerConfig(max_num_seqs=40, max_num_batched_tokens=budget, max_model_len=config.max_model_len)
    rules = StateCheckpointRules(config.num_checkpoints, 2 * BLOCK) if config.num_checkpoints else None
    cache = KVCache(num_blocks or config.num_blocks, BLOCK, windows, step_tokens=budget, checkpoints=rules)
    executor = ThreadExecutor(engine.runner, WorkerThread())
    return EngineCore(Scheduler(limits, cache), executor, vocab_size=VOCAB)


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [*CASES, *HYBRIDS], ids=lambda case: case.name)
def test_a_request_is_the_same_whatever_happens(case: Case, dtype: str, tmp_path: Path) -> None:
    case.save(tmp_path)
    engine, ids = Engine.load(tmp_path, dtype, max_model_len=case.max_positions), prompt(1, PROMPT)
    submit = request("x", ids)
    alone = run(core_of(engine), submit)["x"]
    assert len(alone.token_ids) == NUM_NEW
    if dtype == "float32":
        assert continues(load_transformers(tmp_path, torch.float32), ids, alone.token_ids)

    crowd = neighbours(31)
    assert run(core_of(engine), *crowd[:17], submit, *crowd[17:])["x"] == alone, "among 32"
    assert run(core_of(engine, budget=33), submit)["x"] == alone, "in chunks"

    warm = core_of(engine)
    run(warm, request("earlier", ids))
    assert run(warm, submit)["x"] == alone, "with a prefix hit"
    assert warm.stats().prefix_hit_tokens > 0
    replay = msgspec.structs.replace(submit, emitted_ids=alone.token_ids[:10])
    rest = run(warm, replay)["x"]
    assert (rest.token_ids, rest.logprobs) == (alone.token_ids[10:], alone.logprobs[10:]), "replayed"

    engine.runner.use_threads(3)  # as beside a replica whose engine died
    on_three = run(core_of(engine, budget=33), *crowd[:3], submit)["x"]
    engine.runner.use_threads(1)
    assert on_three == alone, "on three threads"

    rivals = [request(f"r{i}", prompt(200 + i, 40)) for i in range(4)]
    least = sum(max_blocks(window, PROMPT + NUM_NEW, 33, BLOCK) for window in engine.runner.cache_windows)
    num_preemptions = 0
    for num_blocks in range(least, 2 * least):  # so few that all are there, and too few for all to end
        tight = core_of(engine, num_blocks=num_blocks, budget=33)
        assert run(tight, *rivals, submit)["x"] == alone, f"after preemption, its own or others', {num_blocks} blocks"
        num_preemptions = tight.stats().num_preemptions
        if num_preemptions:
            break
    assert num_preemptions
