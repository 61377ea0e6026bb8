"""Sliding windows in the whole engine. Layers with a window return blocks to the pool while a request runs. Ids are
those of transformers, bits are always the same, and requests hold no more blocks than their window needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inferd.engine.arch.paging import max_blocks, max_tokens
from inferd.engine.core.loop import EngineCore
from tests.cpu.cases import CASES
from tests.cpu.checkpoints import Case, load_transformers
from tests.cpu.test_engine import NUM_NEW, Engine, request, run
from tests.cpu.test_parity import continues

VOCAB = 211
BLOCK = 16
WINDOW = 20
WINDOWED = ("mistral, window", "qwen3, biases, late windows", "gemma 4, inputs of layers, shared k and v")
LONGEST = 300


def prompt(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())


@pytest.fixture(scope="module", params=[case for case in CASES if case.name in WINDOWED], ids=lambda case: case.name)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case: Case = request.param
    directory = tmp_path_factory.mktemp("windowed")
    case.save(directory)
    return directory


@pytest.fixture(scope="module")
def engine(path: Path) -> Engine:
    return Engine.load(path, "float32")


def most_blocks(engine: Engine, num_tokens: int, step_tokens: int) -> int:
    return sum(max_blocks(window, num_tokens, step_tokens, BLOCK) for window in engine.runner.cache_windows)


def test_the_cases_are_what_they_should_be(engine: Engine, path: Path) -> None:
    windows = engine.runner.cache_windows
    assert WINDOW in windows
    arch = engine.runner.model.decoder.arch
    assert sorted(layer for group in arch.cache_groups for layer in group.layers) == list(arch.kv_layers)
    assert engine.runner.model.kv.data.shape[0] * len(windows) == sum(group.num_planes for group in arch.cache_groups)


def test_ids_are_those_of_transformers(engine: Engine, path: Path) -> None:
    """Requests are chunked, continue prefix hits, and some are preempted."""
    stem = prompt(1, 130)
    prompts = {f"p{i}": (*stem[: 20 * (i % 7)], *prompt(2 + i, 5 + 7 * (i % 3))) for i in range(14)}
    model = load_transformers(path, torch.float32)
    submits = [request(name, ids) for name, ids in prompts.items()]

    roomy = engine.core(max_num_batched_tokens=40)
    tight = engine.core(max_num_batched_tokens=40, num_blocks=most_blocks(engine, LONGEST, 40))
    expected = {name: answer.token_ids for name, answer in run(roomy, *submits).items()}
    assert {name: answer.token_ids for name, answer in run(tight, *submits).items()} == expected
    assert all(len(ids) == NUM_NEW and continues(model, prompts[name], ids) for name, ids in expected.items())
    assert roomy.stats().prefix_hit_tokens > 0 and roomy.stats().num_preemptions == 0
    assert tight.stats().num_preemptions > 0


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_the_same_bits(path: Path, dtype: str, params: dict[str, object]) -> None:
    engine = Engine.load(path, dtype)
    ids = prompt(1, 120)
    submit = request("x", ids, **params)
    alone = run(engine.core(), submit)["x"]
    assert len(alone.token_ids) == len(alone.logprobs) == NUM_NEW
    for budget, depth in itertools.product((7, 16, 33), (0, 1)):
        core = engine.core(max_num_batched_tokens=budget, depth=depth)
        assert run(core, submit)["x"] == alone, f"in chunks of {budget}, depth {depth}"

    warm = engine.core()
    for num_shared, num_hit in ((119, 112), (70, 112)):
        run(warm, request("earlier", (*ids[:num_shared], 1, 2, 3)))
        before = warm.stats().prefix_hit_tokens
        assert run(warm, submit)["x"] == alone, "with a prefix hit"
        assert warm.stats().prefix_hit_tokens - before == num_hit

    tight = engine.core(num_blocks=most_blocks(engine, 200, 33), max_num_batched_tokens=33)
    rivals = [request(f"r{i}", prompt(200 + i, 15), **params) for i in range(12)]
    assert run(tight, *rivals, submit)["x"] == alone, "after preemption, its own or others'"
    assert tight.stats().num_preemptions > 0


def held_blocks(core: EngineCore) -> Iterator[int]:
    """Number of blocks held after each step, until the end."""
    while core.has_work:
        core.step(0.0)
        core.check()
        yield core.stats().num_blocks_used


@pytest.mark.parametrize("depth", [0, 1])
def test_a_window_holds_no_more_than_it_and_the_steps_reach(engine: Engine, depth: int) -> None:
    core = engine.core(max_num_batched_tokens=32, depth=depth)
    core.submit(request("x", prompt(3, LONGEST - NUM_NEW + 1)), now=0.0)
    held = list(held_blocks(core))
    assert max(held) <= most_blocks(engine, LONGEST, 32 * (depth + 1))
    assert max(held) < len(engine.runner.cache_windows) * LONGEST // BLOCK - 10
    num_full = engine.runner.cache_windows.count(None)
    num_windows = len(engine.runner.cache_windows) - num_full
    assert held[-2] <= num_full * -(-LONGEST // BLOCK) + num_windows * max_blocks(WINDOW, LONGEST, depth + 1, BLOCK)


def test_a_pool_of_just_one_sequence_serves_it_and_refuses_a_longer_one(engine: Engine) -> None:
    num_blocks, length = most_blocks(engine, LONGEST, 32), LONGEST - NUM_NEW + 1
    alone = run(engine.core(), request("x", prompt(3, length)))["x"]
    core = engine.core(num_blocks=num_blocks, max_num_batched_tokens=32)
    assert run(core, request("x", prompt(3, length)))["x"] == alone
    longest = max_tokens(engine.runner.cache_windows, num_blocks, 32, BLOCK)
    if None in engine.runner.cache_windows:
        assert LONGEST <= longest < LONGEST + BLOCK
        core.submit(request("y", prompt(3, longest + 1)), now=0.0)
        output = core.flush()
        assert output is not None
        (delta,) = output.deltas
        assert delta.failure is not None and f"at most {longest}" in delta.failure.message
    else:
        run(core, request("y", prompt(3, 512 - NUM_NEW)))
        assert core.stats().num_preemptions == 0
