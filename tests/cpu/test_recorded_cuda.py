"""The whole worker of a GPU on a recorded one: requests of all kinds find no fault, and have the tokens of the CPU.

Steps run as in an engine: on the worker's thread, while another thread waits for the step before (depth 1), or one at a
time (depth 0).
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from inferd.engine.api.checkpoint import EMBEDDED_PATH, Checkpoint
from inferd.engine.api.config import AskedConfig, EngineConfig
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.resolve import resolve
from inferd.engine.api.wire.params import Adapter
from inferd.engine.quant.recipe import RECIPES
from inferd.engine.sample.sampler import Sampler
from inferd.engine.sched.plan import RowResult, StepPlan, TokenMasks
from inferd.engine.worker import cuda, load, peaks
from inferd.engine.worker.cuda import CudaDevice
from inferd.engine.worker.device import CpuDevice, Device
from inferd.engine.worker.executor import Handle, ThreadExecutor, WorkerThread
from inferd.engine.worker.load import load_worker
from inferd.engine.worker.runner import Runner
from inferd.kernels.gpu import dependent_options
from inferd.kernels.ops.linear import Choices
from inferd.kernels.ops.linear.tuning import Table
from tests.cpu import cases
from tests.cpu import test_recorded_steps as steps
from tests.cpu.checkpoints import random_decoder
from tests.cpu.recorded_gpu.device import recorded_gpu
from tests.cpu.test_recorded_steps import (
    BLOCK,
    HYBRIDS,
    MAX_LEN,
    NUM_SLOTS,
    PLAIN,
    SPECIAL,
    VOCAB,
    WINDOWED,
    Company,
    Engine,
)

WHOLE_GROUPS = {
    "intermediate_size": 96, "moe_intermediate_size": 64, "shared_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
}  # fmt: skip
"""Sizes that int4 can store."""
GRAMMAR = {"grammar": "start: /any/"}
MASKED: tuple[dict[str, Any], ...] = (GRAMMAR, {**GRAMMAR, "temperature": 0.0, "logprobs": 1})
ROWS, TOKENS = (1, 2, 4, 7), (4, 9, 24)

Masks = dict[int, TokenMasks]
"""By the number of a plan."""
Rows = list[Sequence[RowResult]]

pytestmark = pytest.mark.usefixtures("_cpp", "_few_sizes")


@pytest.fixture
def _cpp(kernels: str) -> None:
    if kernels != "cpp":
        pytest.skip("plain PyTorch is not recorded")


@pytest.fixture
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "row_buckets", ROWS)
    monkeypatch.setattr(CudaDevice, "token_buckets", TOKENS)


def with_masks(plans: Sequence[StepPlan]) -> Masks:
    """Masks for the draws of all requests that have a grammar: each may draw half of the tokens."""
    bound, found, random = dict[int, bool](), Masks(), Random(7)
    for plan in plans:
        bound |= {admission.slot: bool(admission.params.grammar) for admission in plan.admissions}
        slots = [row.slot for row in plan.rows for _ in range(row.num_draws)]
        draws = tuple(index for index, slot in enumerate(slots) if bound.get(slot))
        if draws:
            words = array("I", (random.getrandbits(32) | 1 for _ in range(len(draws) * -(-VOCAB // 32))))
            found[plan.step_id] = TokenMasks(draws, words)
    return found


def launch(executor: ThreadExecutor, plan: StepPlan, masks: Masks) -> Handle:
    handle = executor.launch(plan, awaits_masks=plan.step_id in masks)
    if plan.step_id in masks:
        handle.sample(masks[plan.step_id])
    return handle


def results(runner: Runner, plans: Sequence[StepPlan], depth: int = 1) -> Rows:
    """The results of all plans. At depth 1 each is launched before the results of the one before are awaited."""
    executor, found, masks = ThreadExecutor(runner, WorkerThread()), Rows(), with_masks(plans)
    running: list[Handle] = []
    try:
        for plan in plans:
            running.append(launch(executor, plan, masks))
            if len(running) > depth:
                found.append(running.pop(0).wait().rows)
        return found + [handle.wait().rows for handle in running]
    finally:
        executor.close()


Make = Callable[[Device], Engine]


def plain(device: Device) -> Engine:
    return Engine(WINDOWED, device)


def with_adapters(device: Device) -> Engine:
    return Engine(WINDOWED, device, adapters=steps.two_adapters(WINDOWED, device.torch_device))


def with_draft_model(device: Device) -> Engine:
    return steps.with_draft_model(Engine(WINDOWED, device), device)[0]


def with_draft_head(device: Device) -> Engine:
    return steps.with_draft_head(Engine(WINDOWED, device), device)[0]


def hybrid(name: str) -> Make:
    """In float32, in which all processors have kernels for experts."""
    case = next(case for case in HYBRIDS if case.name == name)
    return lambda device: Engine(case, device, torch.float32)


def plans_of(
    kind: type[Company], kinds: Sequence[Mapping[str, Any]], count: int, num_groups: int = 2
) -> list[StepPlan]:
    company = kind(num_groups, kinds, Random(4))
    if isinstance(company, steps.DraftModelCompany):
        company.draft_starts = {}
    return [replace(plan, step_id=number) for number, plan in enumerate(company.plans(count))]


ADAPTED: tuple[dict[str, Any], ...] = ({}, *({"adapter": Adapter(index, "")} for index in (0, 1)), {"temperature": 0.0})
WORKERS: dict[str, tuple[Make, Callable[[], list[StepPlan]]]] = {
    "all kinds": (plain, lambda: plans_of(Company, PLAIN + SPECIAL + MASKED, 80)),
    "drafts": (plain, lambda: plans_of(steps.DraftingCompany, PLAIN + SPECIAL, 40)),
    "a draft model": (with_draft_model, lambda: plans_of(steps.DraftModelCompany, PLAIN + SPECIAL, 30)),
    "a draft head": (with_draft_head, lambda: plans_of(steps.DraftModelCompany, PLAIN + SPECIAL, 30)),
    "adapters": (with_adapters, lambda: plans_of(Company, ADAPTED, 30)),
    "qwen 3.5 moe": (hybrid("qwen 3.5 moe"), lambda: plans_of(steps.HybridCompany, PLAIN, 30, 1)),
    "lfm2": (hybrid("lfm2, biases"), lambda: plans_of(steps.HybridCompany, PLAIN, 30, 1)),
}


@pytest.mark.parametrize(("name", "depth"), [("all kinds", 0), *((name, 1) for name in WORKERS)])
def test_requests_find_no_fault_and_have_the_tokens_of_the_cpu(name: str, depth: int) -> None:
    make, plans = WORKERS[name][0], WORKERS[name][1]()
    expected = results(make(CpuDevice(1)).runner, plans, 0)
    with recorded_gpu() as gpu:
        runner = make(CudaDevice()).runner
        said = runner.record_steps(lambda *_: None)
        assert said == "decodes in 4 sizes up to 7 rows, prompts in 3 sizes up to 24 tokens"
        with gpu.serving():
            assert results(runner, plans, depth) == expected
        assert sum(graph.num_replays for graph in gpu.graphs) > len(plans) // 2
        gpu.check()


FAMILIES = {case.name: case for case in [*cases.CASES, *cases.HYBRIDS]}
REFUSED = (
    *((name, precision) for name in FAMILIES if name.startswith("gemma 4, ") for precision in RECIPES),
    ("lfm2, biases", "int4"),
)
"""Heads that differ in size from layer to layer, and a layer of 80 inputs."""


@pytest.mark.sampled(keep=10)
@pytest.mark.parametrize(("name", "quantization"), sorted({*product(FAMILIES, RECIPES)} - {*REFUSED}))
def test_every_family_finds_no_fault(name: str, quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights find none either, in any precision, while they are loaded."""
    case = replace(FAMILIES[name], config=FAMILIES[name].config | WHOLE_GROUPS | {"vocab_size": VOCAB})
    monkeypatch.setattr(steps, "random_decoder", partial(random_decoder, recipe=RECIPES[quantization]))
    engine = Engine(case, CpuDevice(1), torch.float32)
    kind = Company if engine.states is None else steps.HybridCompany
    plans = plans_of(kind, PLAIN[:4] + SPECIAL[:1], 8, engine.num_groups)
    expected = results(engine.runner, plans, 0)
    with recorded_gpu() as gpu:
        runner = Engine(case, CudaDevice(), torch.float32).runner
        runner.record_steps(lambda *_: None)
        with gpu.serving():
            assert results(runner, plans) == expected
        assert len(gpu.graphs) == len(ROWS) + len(TOKENS)


def test_an_adapter_is_loaded_without_waiting_for_the_device() -> None:
    """Between two steps, of which the first may still read the weights that its index had. None is recorded anew."""
    plans, updates = plans_of(Company, ADAPTED, 30), steps.random_updates(WINDOWED, 5, torch.Generator().manual_seed(1))

    def rows(runner: Runner) -> Rows:
        assert runner.model.adapters is not None
        steps = [runner.launch(plan) for plan in plans[:15]]
        runner.model.adapters.put(1, updates)
        steps += [runner.launch(plan) for plan in plans[15:]]
        return [step.wait().rows for step in steps]

    expected = rows(with_adapters(CpuDevice(1)).runner)
    with recorded_gpu() as gpu:
        runner = with_adapters(CudaDevice()).runner
        runner.record_steps(lambda *_: None)
        with gpu.serving(), torch.inference_mode():
            assert rows(runner) == expected
        assert any(graph.num_replays for graph in gpu.graphs)


def test_a_capture_that_fails_is_made_again_without_early_starts(caplog: pytest.LogCaptureFixture) -> None:
    """Every third one fails with kernels that start early. Tokens are the same."""
    plans, num_runs = plans_of(Company, PLAIN, 20), [0]
    expected = results(plain(CpuDevice(1)).runner, plans, 0)
    draw = Sampler.draw

    with recorded_gpu() as gpu, pytest.MonkeyPatch.context() as patch:

        def refused(sampler: Sampler, *given: Any) -> Any:
            num_runs[0] += 1
            if gpu.capture is not None and dependent_options()["launch_pdl"]:
                gpu.capture.is_invalid = True
                raise RuntimeError("operation not permitted when stream is capturing")
            return draw(sampler, *given)

        patch.setattr(Sampler, "draw", refused)
        runner = plain(CudaDevice()).runner
        assert str(runner.record_steps(lambda *_: None)).startswith("decodes in 4 sizes")
        with gpu.serving():
            assert results(runner, plans) == expected
    # The first decode is captured twice, after prompts, which draw nothing. The others are captured without.
    assert num_runs[0] == 2 * (1 + len(ROWS)), "each runs once before its capture"
    assert [record.levelname for record in caplog.records if "captured again" in record.message] == ["WARNING"]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> EngineConfig:
    """Settings of the embedded model on a CPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = peaks._Sizes(2**16, 16, 64)
    monkeypatch.setattr(peaks, "_SIZES", {"cpu": small, "cuda": small})
    asked = AskedConfig(
        model_path=str(EMBEDDED_PATH), device="cpu", dtype="float32", kv_memory_bytes=2**22, max_num_seqs=NUM_SLOTS,
        num_threads=1, max_model_len=MAX_LEN, block_size=BLOCK, weight_cache=False,
    )  # fmt: skip
    return resolve(asked, ModelFacts.of(Checkpoint.read(EMBEDDED_PATH)), Machine.detect())[0]


def start(config: EngineConfig) -> Runner:
    return load_worker(config, time.monotonic(), lambda _: None)[0]


def test_a_whole_start_finds_no_fault(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the upload of weights, in pieces that each fill a buffer, to the last warm-up step, and the steps behind."""
    monkeypatch.setattr(cuda, "BUFFER_BYTES", 2**16)
    plans = plans_of(Company, PLAIN + SPECIAL, 20, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "prepare_kernels", lambda _: "prepared")
        expected = results(start(config), plans, 0)
    with recorded_gpu() as gpu:
        runner = start(msgspec.structs.replace(config, device="cuda"))
        assert isinstance(runner.model.device, CudaDevice) and len(gpu.graphs) == len(ROWS) + len(TOKENS)
        with gpu.serving():
            assert results(runner, plans) == expected
        gpu.check()
        del runner
        gc.collect()
        assert not gpu.graphs and gpu.memories.num_bytes == 0


def test_measuring_products_finds_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case has graphs of its own, which are gone before workspaces are given back."""
    products = pytest.importorskip("inferd.kernels.ops.linear.cuda")
    monkeypatch.setattr(products, "few_rows", torch.nn.functional.linear)
    products._stream.cache_clear()
    table = Table("a GPU")
    with recorded_gpu():
        device = CudaDevice()
        weight = torch.randn(32, 32, device=device.torch_device, dtype=torch.bfloat16)
        products.Product(weight, None, Choices(table=table), torch.bfloat16)
        assert table.complete() == len(table.choices) == 5
        device.give_back_freed()
    products._stream.cache_clear()
