"""The Python code around Triton's kernels on a recorded GPU: no launch has a fault, in steps of every family and
precision, call by call and in captures. The kernels compute nothing here."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from inferd.engine.quant.recipe import recipes
from inferd.engine.sample.sampler import Sampler
from inferd.engine.worker.cuda import CudaDevice
from inferd.kernels.ops.linear import Choices
from tests.cpu import test_recorded_steps as steps
from tests.cpu.checkpoints import random_decoder
from tests.cpu.recorded_gpu.device import recorded_gpu
from tests.cpu.recorded_gpu.order import FaultError
from tests.cpu.test_recorded_cuda import FAMILIES, REFUSED, WHOLE_GROUPS
from tests.cpu.test_recorded_steps import PLAIN, SPECIAL, VOCAB, Engine, decoding

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the tests of kernels interpret Triton in this process"
)
IS_RECORDED = False

WITH_EXPERTS = tuple(name for name, case in FAMILIES.items() if any("expert" in field for field in case.config))
"""Experts in FP8 are called one after another, and such steps are not recorded."""
PRECISIONS = [name for name in recipes(Choices()) if name != "fp8"]
STEPS = sorted({*product(FAMILIES, PRECISIONS), *product(set(FAMILIES) - {*WITH_EXPERTS}, ["fp8"])} - {*REFUSED})


@pytest.fixture(autouse=True)
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "row_buckets", (2,))
    monkeypatch.setattr(CudaDevice, "token_buckets", (8,))


def run(name: str, quantization: str, monkeypatch: pytest.MonkeyPatch, *, is_deterministic: bool = False) -> set[str]:
    """Record steps, and run some that are recorded and some that are not. Returns the kernels that were launched."""
    from tests.cpu.recorded_gpu.launches import LaunchingGpu  # noqa: PLC0415  # needs Triton

    recipe = recipes(Choices(is_deterministic))[quantization]
    monkeypatch.setattr(steps, "random_decoder", partial(random_decoder, recipe=recipe))
    case = replace(FAMILIES[name], config=FAMILIES[name].config | WHOLE_GROUPS | {"vocab_size": VOCAB})
    with recorded_gpu(kind=LaunchingGpu) as gpu:
        assert isinstance(gpu, LaunchingGpu)
        engine = Engine(case, CudaDevice(), is_deterministic=is_deterministic)
        said = engine.runner.record_steps(lambda *_: None)
        gpu.check()
        assert said == "decodes in 1 sizes up to 2 rows, prompts in 1 sizes up to 8 tokens"
        with gpu.serving():
            for kinds in (PLAIN[:2], PLAIN[:3] + SPECIAL[:1]):
                plan = decoding(engine, kinds)
                engine.runner.execute(plan(1))
        return set(gpu.launches)


@pytest.mark.sampled(keep=12)
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(("name", "quantization"), STEPS)
def test_launches_have_no_fault(
    name: str, quantization: str, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = run(name, quantization, monkeypatch, is_deterministic=is_deterministic)
    assert {"_step_inputs", "_draw", "_write_drawn"} <= launched


def test_a_kernel_that_gets_memory_of_the_host_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would refuse it at the first launch on a GPU."""
    made = Sampler.__init__

    def planted(sampler: Sampler, *given: Any) -> None:
        made(sampler, *given)
        sampler._options.temperatures = sampler._options.temperatures.cpu()

    monkeypatch.setattr(Sampler, "__init__", planted)
    with pytest.raises(FaultError, match=r"the kernel _sort gets a tensor of the host \(float32 \[6\]\)"):
        run("granite", "none", monkeypatch)
