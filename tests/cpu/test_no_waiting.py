"""Launching a step reads nothing back from the device: while a step is launched, every way to do so fails.

The device is the CPU here, so the tests catch operations that would wait on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.gpu.waiting import ReadBackError, nothing_is_read
from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.sample.sampler import Sampler
from inferd.engine.sched.plan import Admission, Row, StepPlan, TableUpdate
from inferd.engine.worker.device import CpuDevice
from inferd.engine.worker.draft_model import DraftModel
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.runner import Runner
from inferd.engine.worker.slots import Slots
from tests.cpu.capturing import CapturingDevice
from tests.cpu.checkpoints import Case, random_decoder

VOCAB, BLOCK, MAX_LEN = 97, 16, 64
CASE = Case("llama", "llama", {"vocab_size": VOCAB, "num_hidden_layers": 2})
ASKED = {
    "greedy": SamplingParams(max_tokens=9, seed=1, temperature=0.0),
    "sampled": SamplingParams(max_tokens=9, seed=1, temperature=0.8, top_k=5, min_p=0.01),
    "ruled": SamplingParams(
        max_tokens=9,
        seed=1,
        temperature=0.5,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        logit_bias=((3, 1.0),),
        bad_words=((4, 5),),
        min_tokens=3,
        eos_token_ids=(7,),
        logprobs=3,
        prompt_logprobs=2,
    ),
}


def runner(device: CpuDevice) -> Runner:
    decoder = random_decoder(CASE, torch.float32)
    kv, draft_kv = (KVPool.allocate(decoder.arch, 16, BLOCK, torch.float32, device) for _ in range(2))
    slots, sampler = Slots(4, MAX_LEN, BLOCK, device), Sampler(4, VOCAB, "cpu")
    draft = LoadedModel(decoder, draft_kv, slots.of_group(0), sampler, device)
    draft_model = DraftModel(draft, max_step_tokens=16, max_draws=7)
    return Runner(LoadedModel(decoder, kv, slots, sampler, device), drafter=draft_model)


def plans(params: SamplingParams) -> list[StepPlan]:
    """Two prompts, one of them in chunks, then decodes of both. One recording serves the first two of them. The others
    have drafts, the last two of a draft model, which has a prompt to compute, and then a token."""
    admissions = tuple(Admission(slot, f"r{slot}", tuple(range(1, 21)), 20, params) for slot in range(2))
    tables = tuple(TableUpdate(slot, 0, 0, (2 * slot, 2 * slot + 1)) for slot in range(2))
    return [
        StepPlan(0, admissions, tables, (Row(0, 0, 20, True), Row(1, 0, 8, False))),
        StepPlan(1, (), (), (Row(0, 20, 1, True), Row(1, 8, 12, True))),
        StepPlan(2, (), (), (Row(0, 21, 1, True), Row(1, 20, 1, True))),
        StepPlan(3, (), (), (Row(1, 21, 1, True), Row(0, 22, 1, True))),
        StepPlan(4, (), (), (Row(1, 22, 1, True), Row(0, 23, 4, True, (4, 5, 7)))),
        StepPlan(5, (), (), (Row(1, 23, 4, True, num_to_draft=3), Row(0, 24, 1, True))),
        StepPlan(6, (), (), (Row(1, 24, 3, True, num_to_draft=2, draft_start=23),)),
    ]


def check(watched: Runner, params: SamplingParams) -> None:
    plain = runner(CpuDevice(1))
    for plan in plans(params):
        with nothing_is_read(torch.device("cpu")):
            launched = watched.launch(plan)
        expected = plain.execute(plan)
        assert launched.wait().rows == expected.rows
        assert any(row.token_ids for row in expected.rows)


@pytest.mark.parametrize("name", ASKED)
def test_launching_waits_for_nothing(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels != "cpp" and name != "greedy":
        pytest.skip("plain PyTorch looks for the tokens that may win")
    # Recordings of C++ kernels, made once for each number of rows, use a dispatch mode of their own.
    monkeypatch.setattr(CpuDevice, "row_buckets", (0,))
    check(runner(CpuDevice(1)), ASKED[name])


@pytest.mark.parametrize("name", ASKED)
def test_recording_and_replaying_wait_for_nothing(name: str, kernels: str) -> None:
    if kernels != "cpp":
        pytest.skip("plain PyTorch is not recorded")
    device = CapturingDevice()
    check(runner(device), ASKED[name])
    assert (device.events.count("record"), device.events.count("replay")) == (6 + 4, 4 + 1 + 3 + 1 + 2)


@pytest.mark.parametrize(
    "way",
    [
        lambda logits: logits.max().item(),
        lambda logits: logits[logits > 0.0],
        lambda logits: logits.nonzero(),
        lambda logits: logits[0].repeat_interleave(torch.ones(VOCAB, dtype=torch.int64)),
    ],
    ids=["item", "mask", "nonzero", "repeat"],
)
def test_waiting_is_seen(way: Callable[[torch.Tensor], object], monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sampler.sample

    def waiting(self: Sampler, logits: torch.Tensor, *rest: Any) -> Any:
        way(logits)
        return sample(self, logits, *rest)

    monkeypatch.setattr(Sampler, "sample", waiting)
    with pytest.raises(ReadBackError), nothing_is_read(torch.device("cpu")):
        runner(CpuDevice(1)).launch(plans(ASKED["greedy"])[0])
