"""How `--deterministic` reaches layers, attention, the table of products and the log.

A GPU is simulated by the CPU. `tests/kernels/test_determinism.py` shows what a GPU would run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.engine.api.checkpoint import EMBEDDED_NAME, Checkpoint
from inferd.engine.api.config import AskedConfig, EngineConfig
from inferd.engine.api.errors import ModelError
from inferd.engine.api.locate import locate
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.resolve import resolve
from inferd.engine.api.wire.messages import Phase, Ready
from inferd.engine.worker import build, load
from inferd.engine.worker.device import CpuDevice
from inferd.engine.worker.tuning import Tuning
from inferd.kernels import registry
from inferd.kernels.ops.linear import Choices
from inferd.kernels.ops.linear.tuning import Table
from inferd.kernels.ops.paged_attention import LIBRARIES, PAGED_ATTENTION, AttentionBatch
from inferd.kernels.registry import KernelError, Selection


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    path = locate(EMBEDDED_NAME, None)
    asked = AskedConfig(model_path=str(path), device="cpu", kv_memory_bytes=2**22, max_num_seqs=2, num_threads=1)
    return resolve(asked, ModelFacts.of(Checkpoint.read(path)), Machine.detect())[0]


class Start:
    """A start that is recorded: its phases, its layers' choices of kernels, and its calls of attention."""

    def __init__(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, tuning: Tuning | None = None) -> None:
        self.phases: list[Phase] = []
        self.choices: list[Choices] = []
        self.attention: list[bool] = []
        self.config, recipe_of, build_batch = config, build.recipe_of, AttentionBatch.build

        def recipe(arch: Any, quantization: str, dtype: Any, choices: Choices, narrow: Any, **options: Any) -> Any:
            self.choices.append(choices)
            return recipe_of(arch, quantization, dtype, choices, narrow, **options)

        def built(*given: Any, **options: Any) -> AttentionBatch:
            batch = build_batch(*given, **options)
            self.attention.append(batch.is_deterministic)
            return batch

        monkeypatch.setattr(build, "recipe_of", recipe)
        monkeypatch.setattr(AttentionBatch, "build", built)
        monkeypatch.setattr(load, "open_device", lambda *_: CpuDevice(1))
        monkeypatch.setattr(Tuning, "open", lambda *_: tuning)

    def run(self) -> Ready:
        return load.load_worker(self.config, time.monotonic(), self.phases.append)[1]

    def names(self) -> Sequence[str]:
        return [phase.name for phase in self.phases]


def test_on_a_processor_it_is_on_and_nothing_is_tuned(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(config, monkeypatch, Tuning(Path("nowhere"), Table("none")))
    assert start.run().deterministic is True
    assert start.choices == [Choices(is_invariant=True)]
    assert "tuning" not in start.names()
    assert start.attention and all(start.attention)


@pytest.mark.parametrize("deterministic", [False, True])
def test_on_a_gpu_it_is_as_asked(
    config: EngineConfig, deterministic: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = msgspec.structs.replace(config, device="cuda", deterministic=deterministic)
    table = Table("made up")
    start = Start(asked, monkeypatch, Tuning(tmp_path, table))
    assert start.run().deterministic is deterministic
    assert start.choices == [Choices(deterministic, None if deterministic else table)]
    assert start.attention and set(start.attention) == {deterministic}
    names = start.names()
    assert ("tuning" in names) is not deterministic
    if not deterministic:
        assert names.index("weights") < names.index("tuning") < names.index("kv cache")
        assert next(phase.detail for phase in start.phases if phase.name == "tuning").endswith(str(tmp_path))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_kernel_that_varies_ends_the_start_only_where_it_matters(
    config: EngineConfig, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Key:
        device_type = "cuda"

    found = registry.explain()
    varying = Selection("rms_norm", Key(), "reference", (("triton", "Triton is not installed"),), "sums are shared out")
    monkeypatch.setattr(registry, "explain", lambda: (*found, varying))
    start = Start(msgspec.structs.replace(config, device="cuda", deterministic=deterministic), monkeypatch)
    if not deterministic:
        assert ("rms_norm", "reference") in start.run().kernels
        return
    words = (
        r"rms_norm runs in reference, where sums are shared out \(triton Triton is not installed\); "
        "give --no-deterministic, or --device cpu"
    )
    with pytest.raises(ModelError, match=words):
        start.run()


@pytest.mark.parametrize("attention_libs", [True, False])
def test_libraries_of_attention_can_be_switched_off(
    config: EngineConfig, attention_libs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    excluded: list[Sequence[str]] = []
    monkeypatch.setattr(PAGED_ATTENTION, "exclude", excluded.append)
    Start(msgspec.structs.replace(config, attention_libs=attention_libs), monkeypatch).run()
    assert excluded == [() if attention_libs else LIBRARIES]


def test_a_kernel_that_cannot_run_ends_the_start(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise KernelError("cuDNN has no plan")

    monkeypatch.setattr(load.Runner, "record_steps", refuse)
    with pytest.raises(ModelError, match=r"tiny.* cannot be computed: cuDNN has no plan"):
        Start(config, monkeypatch).run()
