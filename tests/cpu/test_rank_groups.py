"""Ranks that exchange through a process group, as GPUs do. If they gather, they compute the bits of one process. If
they split o and down by inputs and add up, they compute the same within rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from benchmarks.quality.checkpoint_formats import FORMATS, FP8_FORMATS, Format
from inferd.engine.api.wire.messages import WireLogprobs
from inferd.engine.arch.description import Arch
from inferd.engine.arch.registry import describe
from inferd.engine.arch.sharding import Rank, refuses
from inferd.engine.layers.collectives import ALONE, Ranks
from inferd.engine.models.loader import recipe_of
from inferd.engine.quant.recipe import RECIPES, Recipe, cut_groups
from inferd.engine.sched.plan import RowResult
from inferd.engine.worker.device import CpuDevice, Recording
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.ranks import FollowingSampler, LeadingSampler, SharedRanks
from inferd.engine.worker.runner import Runner
from inferd.engine.worker.slots import Slots
from tests.cpu.cases import CASES
from tests.cpu.checkpoints import Case, load_decoder, random_decoder, read_config
from tests.cpu.paging import prompt_logits
from tests.cpu.quantized_checkpoints import save
from tests.cpu.ranks import alone_in_a_group, group_exchanges, on_ranks
from tests.cpu.test_engine import Engine, prompt, request
from tests.cpu.test_engine import run as answers
from tests.cpu.test_engine import save as save_checkpoint
from tests.cpu.test_recorded_steps import (
    BLOCK,
    MAX_LEN,
    NUM_SLOTS,
    PLAIN,
    SPECIAL,
    VOCAB,
    WINDOWED,
    Company,
    by_calls,
)

IDS = [7 * i % 199 for i in range(40)]
CHUNKS = [33, 1, 5, 1]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 201, "num_hidden_layers": 2}
LLAMA = Case("llama", "llama", SIZES | {"attention_bias": True, "mlp_bias": True})
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
"""Most relative error of logits, as vectors. Partial sums are rounded to the dtype before they are added."""


def error(alone: Tensor, shared: Tensor) -> float:
    assert not alone.isnan().any()
    return float((shared - alone).norm() / alone.norm())


def logits_of(case: Case, dtype: torch.dtype, recipe: Recipe) -> Callable[[Ranks], Tensor]:
    return lambda ranks: prompt_logits(random_decoder(case, dtype, recipe, ranks), IDS, CHUNKS)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_gather_keeps_every_bit(num_ranks: int) -> None:
    """The last rank has fewer rows of the vocabulary than the others."""
    run = logits_of(LLAMA, torch.bfloat16, RECIPES["none"])
    assert torch.equal(on_ranks(num_ranks, run, group_exchanges)[0], run(ALONE))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ("none", torch.float32),
        ("none", torch.bfloat16),
        ("int8", torch.bfloat16),
        ("int4", torch.bfloat16),
        ("fp8", torch.bfloat16),
    ],
)
def test_sums_are_those_of_one_process(quantization: str, dtype: torch.dtype, num_ranks: int) -> None:
    split = Rank(0, num_ranks, splits_inputs=True)
    assert cut_groups(describe(LLAMA.config_json()), RECIPES[quantization], split) is None
    run = logits_of(LLAMA, dtype, RECIPES[quantization])
    summed = on_ranks(num_ranks, run, group_exchanges, splits_inputs=True)[0]
    assert 0.0 < error(run(ALONE), summed) < TOLERANCE[dtype]


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sums_in_every_family(case: Case) -> None:
    run = logits_of(case, torch.float32, RECIPES["none"])
    assert error(run(ALONE), on_ranks(2, run, group_exchanges, splits_inputs=True)[0]) < 1e-4


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize("form", [*FORMATS, *FP8_FORMATS], ids=lambda form: form.name)
def test_sums_in_every_stored_format(form: Format, tmp_path: Path) -> None:
    """From files: each rank keeps its columns of weights, scales and zero points, between groups of inputs."""
    save(form, tmp_path, hidden_size=256, intermediate_size=512, head_dim=128, num_key_value_heads=4)
    arch = describe(read_config(tmp_path))
    recipe = recipe_of(arch, "none", torch.bfloat16)
    splits_inputs = cut_groups(arch, recipe, Rank(0, 2, splits_inputs=True)) is None
    assert splits_inputs != has_order(arch)

    def run(ranks: Ranks) -> Tensor:
        return prompt_logits(load_decoder(tmp_path, torch.bfloat16, recipe=recipe, ranks=ranks), IDS, CHUNKS)

    found = error(run(ALONE), on_ranks(2, run, group_exchanges, splits_inputs=splits_inputs)[0])
    assert found < TOLERANCE[torch.bfloat16] if splits_inputs else found == 0.0


def has_order(arch: Arch) -> bool:
    assert arch.stored is not None and arch.stored.layers is not None
    return bool(getattr(arch.stored.layers.layout, "has_order", False))


class Forgetful(SharedRanks):
    """Leaves out the last rank's part of every sum."""

    def outputs(self, part: Tensor, size: int) -> Tensor:
        is_last = self.own.index == self.own.count - 1
        return super().outputs(part.zero_() if is_last else part, size)


class Doubling(SharedRanks):
    """Adds the biases of o and down on every rank."""

    @property  # type: ignore[override]
    def own(self) -> Rank:
        return EveryBias(self._own.index, self._own.count, splits_inputs=True)

    @own.setter
    def own(self, own: Rank) -> None:
        self._own = own


class EveryBias(Rank):
    adds_bias = True


@pytest.mark.parametrize("kind", [Forgetful, Doubling])
def test_the_tolerance_sees_a_wrong_sum(kind: type[SharedRanks]) -> None:
    run = logits_of(LLAMA, torch.bfloat16, RECIPES["none"])

    def run_wrongly(ranks: Ranks) -> Tensor:
        assert isinstance(ranks, SharedRanks)
        return run(kind(ranks.own, ranks._exchange))

    summed = on_ranks(2, run_wrongly, group_exchanges, splits_inputs=True)[0]
    assert error(run(ALONE), summed) > 3 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_family_has_inputs_that_ranks_cannot_split(case: Case) -> None:
    arch = describe(case.config_json())
    if refuses(arch, 2) is None:
        assert cut_groups(arch, RECIPES["none"], Rank(0, 2, splits_inputs=True)) is None


def test_an_mlp_beside_experts_has_groups_too() -> None:
    """Two ranks cut groups of 32 of the MLP's 160 inputs, and none of the experts' 64."""
    case = next(case for case in CASES if case.name == "gemma 4, experts beside an MLP")
    sizes = {"intermediate_size": 160, "moe_intermediate_size": 64}
    arch = describe(replace(case, config=case.config | sizes).config_json())
    reason = cut_groups(arch, RECIPES["int4"], Rank(0, 2, splits_inputs=True))
    assert reason == "2 ranks would cut groups of 32 inputs of layers.0.mlp.down in int4"


def test_groups_that_ranks_would_cut_keep_o_and_down_split_by_outputs() -> None:
    arch = describe(replace(LLAMA, config=LLAMA.config | {"intermediate_size": 320}).config_json())
    four = Rank(0, 4, splits_inputs=True)
    assert cut_groups(arch, RECIPES["none"], four) is None
    assert (
        cut_groups(arch, RECIPES["int4"], four) == "4 ranks would cut groups of 32 inputs of layers.0.mlp.down in int4"
    )
    assert cut_groups(arch, RECIPES["int4"], Rank(0, 2, splits_inputs=True)) is None


class CallingDevice(CpuDevice):
    """Replays a step by running it again. As in a GPU's graph, it begins with inputs on the device and ends with
    draws."""

    row_buckets = (1, 2, 4, 6)
    token_buckets = (16, 64)
    records_all = True

    def __init__(self) -> None:
        super().__init__(1)
        self.num_replays = 0

    def record(self, run: Callable[[], Tensor]) -> Recording:
        return Rerun(self, run)


class Rerun:
    def __init__(self, device: CallingDevice, run: Callable[[], Tensor]) -> None:
        self._device, self._run = device, run
        self.output = run()

    def replay(self) -> None:
        self._device.num_replays += 1
        self.output = self._run()


def test_ranks_record_whole_steps() -> None:
    """Rank 0 draws in a recorded step, and the others receive the ids in theirs. Rows that it draws again are known to
    all."""
    alone = by_calls(WINDOWED)
    plans = list(Company(alone.num_groups, PLAIN + SPECIAL, Random(3)).plans(60))
    expected = [alone.runner.execute(plan).rows for plan in plans]

    def run(ranks: Ranks) -> tuple[list[tuple[RowResult, ...]], Tensor, int]:
        assert isinstance(ranks, SharedRanks)
        device, decoder = CallingDevice(), random_decoder(WINDOWED, torch.bfloat16, ranks=ranks)
        kv = KVPool.allocate(decoder.arch, alone.num_blocks, BLOCK, torch.bfloat16, device, decoder.rank)
        kv.data.zero_()
        slots = Slots(NUM_SLOTS, MAX_LEN, BLOCK, device, alone.num_groups)
        sampler = (
            LeadingSampler(NUM_SLOTS, VOCAB, device.torch_device, ranks)
            if ranks.own.index == 0
            else FollowingSampler(VOCAB, device.torch_device, ranks)
        )
        runner = Runner(LoadedModel(decoder, kv, slots, sampler, device), max_step_tokens=64)
        runner.record_steps(lambda done, total: None)
        return [runner.execute(plan).rows for plan in plans], slots.token_ids, device.num_replays

    (first, ids, num_replays), (_, other_ids, _) = on_ranks(2, run, group_exchanges)
    assert first == expected
    assert torch.equal(ids, other_ids)
    assert num_replays > 30


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_processes_that_add_up_give_the_numbers_of_one(tmp_path: Path, count: int) -> None:
    """In float32 the logprobs differ by rounding, and greedy ids not at all."""
    save_checkpoint(tmp_path, "qwen3")
    asked = [request(f"r{i}", prompt(i, 30 + i), prompt_logprobs=0) for i in range(6)]
    expected = answers(Engine.load(tmp_path, "float32").core(), *asked)
    with alone_in_a_group():
        shared = Engine.load(
            tmp_path,
            "float32",
            num_threads=count,
            tensor_parallel_size=count,
            exchange="group",
            splits_inputs=True,
        )
        found = answers(shared.core(), *asked)
        shared.runner.close()
    assert [answer.token_ids for answer in found.values()] == [answer.token_ids for answer in expected.values()]
    differences = [
        abs(ours.logprob - theirs.logprob)
        for name in found
        for ours, theirs in zip(found[name].prompt_logprobs, expected[name].prompt_logprobs, strict=True)
        if isinstance(ours, WireLogprobs) and isinstance(theirs, WireLogprobs)
    ]
    assert 0.0 < max(differences) < 1e-3
