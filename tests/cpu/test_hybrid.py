"""Models with recurrent layers in the whole engine: ids are those of transformers, and bits are always the same, over
checkpoints of states too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from inferd.engine.api.wire.messages import Submit
from inferd.engine.cache.state_checkpoints import StateCheckpointRules
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from inferd.engine.worker.states import StatePool
from tests.cpu import test_engine
from tests.cpu.cases import HYBRIDS
from tests.cpu.checkpoints import load_transformers
from tests.cpu.test_engine import NUM_NEW, Engine, request, run
from tests.cpu.test_parity import continues

VOCAB = 211
BLOCK = 16
NEVER = 1000 * BLOCK
IN_WHOLE_GROUPS = {"intermediate_size": 96, "moe_intermediate_size": 64, "shared_intermediate_size": 96}
"""Sizes that int4 can store."""


def prompt(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())


def neighbours(count: int) -> list[Submit]:
    """Those of other models' tests, in this vocabulary."""
    return [
        msgspec.structs.replace(one, prompt_ids=tuple(i % VOCAB for i in one.prompt_ids))
        for one in test_engine.neighbours(count)
    ]


@pytest.fixture(scope="module", params=["qwen 3.5", "granite 4, experts", "lfm2 moe"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    case = next(case for case in HYBRIDS if case.name == request.param)
    replace(case, config=case.config | IN_WHOLE_GROUPS).save(directory)
    return directory


@pytest.fixture(scope="module", params=[("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int4")], ids="-".join)
def engine(request: pytest.FixtureRequest, path: Path) -> Engine:
    dtype, quantization = request.param
    return Engine.load(path, dtype, quantization=quantization)


def core_of(
    engine: Engine,
    *,
    num_blocks: int = 0,
    budget: int = 256,
    depth: int = 1,
    checkpoints: int = 30,
    interval: int = NEVER,
) -> EngineCore:
    assert engine.config.num_blocks and engine.config.max_model_len and engine.config.num_checkpoints
    assert checkpoints <= engine.config.num_checkpoints
    limits = SchedulerConfig(max_num_seqs=40, max_num_batched_tokens=budget, max_model_len=engine.config.max_model_len)
    rules = StateCheckpointRules(checkpoints, interval)
    cache = KVCache(num_blocks or engine.config.num_blocks, BLOCK, engine.runner.cache_windows, checkpoints=rules)
    executor = ThreadExecutor(engine.runner, WorkerThread())
    return EngineCore(Scheduler(limits, cache), executor, vocab_size=VOCAB, depth=depth)


def test_ids_are_those_of_transformers(path: Path) -> None:
    """Alone, 32 at once, chunked, behind hits, and preempted."""
    engine, model = Engine.load(path, "float32"), load_transformers(path, torch.float32)
    stem = prompt(1, 130)
    prompts = {f"p{i}": (*stem[: 40 * (i % 4)], *prompt(2 + i, 5 + 7 * (i % 3))) for i in range(5)}
    submits = [request(name, ids) for name, ids in prompts.items()]
    cores = {
        "among 32": core_of(engine),
        "chunked": core_of(engine, budget=40, interval=3 * BLOCK),
        "tight": core_of(engine, budget=40, num_blocks=14, checkpoints=3),
    }
    expected: dict[str, Sequence[int]] = {}
    for name, core in cores.items():
        answers = run(core, *(neighbours(27) if name == "among 32" else ()), *submits)
        found = {own: answers[own].token_ids for own in prompts}
        expected = expected or found
        assert found == expected, name
    assert all(len(ids) == NUM_NEW and continues(model, prompts[name], ids) for name, ids in expected.items())
    assert cores["chunked"].stats().prefix_hit_tokens > 0
    assert cores["tight"].stats().num_preemptions > 0
    alone = run(core_of(engine), submits[3])
    assert alone["p3"].token_ids == expected["p3"]


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_the_same_bits(engine: Engine, params: dict[str, object]) -> None:
    ids = prompt(1, 120)
    submit = request("x", ids, **params)
    alone = run(core_of(engine), submit)["x"]
    assert len(alone.token_ids) == len(alone.logprobs) == NUM_NEW
    for budget, depth in ((7, 0), (33, 1)):
        core = core_of(engine, budget=budget, depth=depth, interval=2 * BLOCK)
        assert run(core, submit)["x"] == alone, f"in chunks of {budget}, depth {depth}"
    crowd = neighbours(31)
    assert run(core_of(engine), *crowd[:17], submit, *crowd[17:])["x"] == alone, "among 32"

    warm = core_of(engine)
    for num_shared, num_hit in ((119, 0), (119, 112), (70, 112)):
        run(warm, request("earlier", (*ids[:num_shared], 1, 2, 3)))
        before = warm.stats().prefix_hit_tokens
        assert run(warm, submit)["x"] == alone, "with a prefix hit"
        assert warm.stats().prefix_hit_tokens - before == (num_hit or 112)

    for emitted in (1, NUM_NEW - 1):
        replay = msgspec.structs.replace(submit, emitted_ids=alone.token_ids[:emitted])
        rest = run(warm, replay)["x"]
        assert rest.token_ids == alone.token_ids[emitted:] and rest.logprobs == alone.logprobs[emitted:]

    tight = core_of(engine, num_blocks=14, budget=33)
    rivals = [request(f"r{i}", prompt(200 + i, 40), **params) for i in range(4)]
    assert run(tight, *rivals, submit)["x"] == alone, "after preemption, its own or others'"
    assert tight.stats().num_preemptions > 0


def test_a_state_of_another_prefix_changes_the_answer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the comparisons above depend on the states that are loaded."""
    engine = Engine.load(path, "float32")
    submit = request("x", prompt(1, 120))
    warm = core_of(engine)
    alone = run(warm, submit)["x"]
    assert engine.runner.model.states is not None
    monkeypatch.setattr(StatePool, "load", lambda self, copies: None)
    run(warm, request("other", prompt(9, 50)))
    assert run(warm, submit)["x"].logprobs != alone.logprobs


def test_steps_are_recorded(path: Path, kernels: str) -> None:
    if kernels != "cpp":
        pytest.skip("plain PyTorch is not recorded")
    engine = Engine.load(path, "bfloat16")
    run(core_of(engine), request("x", prompt(1, 20)))
    assert engine.runner._graphs.recorded_rows == (1,)


def test_a_failed_recording_leaves_states_as_they_were(
    path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that cannot be recorded runs again, from the same states."""
    if kernels != "cpp":
        pytest.skip("plain PyTorch is not recorded")
    engine = Engine.load(path, "float32")
    submits = [request(name, prompt(1, 20), seed=seed) for seed, name in enumerate("xy")]
    expected = run(core_of(engine), *submits)
    assert engine.runner._graphs.recorded_rows == (1, 2)
    again = Engine.load(path, "float32")
    decoder = again.runner.model.decoder
    norm = decoder._norm

    class Unrecordable:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return norm(x + 0.0)

        def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return norm.add(x + 0.0, residual)

    monkeypatch.setattr(decoder, "_norm", Unrecordable())
    assert run(core_of(again), *submits) == expected
    assert again.runner._graphs.recorded_rows == (1,)
