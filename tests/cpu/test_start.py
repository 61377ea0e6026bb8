"""A start: the steps it runs before the first request, and its errors if memory is short. The CPU plays a GPU, because
its kernels take any length."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from inferd.engine.api.checkpoint import EMBEDDED_NAME, Checkpoint
from inferd.engine.api.config import AskedConfig, EngineConfig, longest_beside_weights, plan_of
from inferd.engine.api.errors import CapacityError, LaunchError
from inferd.engine.api.locate import locate
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.planner import format_bytes
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.numerics import Numerics
from inferd.engine.api.resolve import resolve
from inferd.engine.worker import load, start_phases
from inferd.engine.worker.device import CpuDevice
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.runner import Runner
from inferd.engine.worker.tuning import Tuning
from inferd.kernels.device import Candidate, DeviceProperties, SharedNeed, fit
from inferd.kernels.gpu import refused_launch
from inferd.kernels.ops.paged_attention import AttentionBatch
from inferd.kernels.registry import Selection

FREE_BYTES = 300 * 2**20
PATH = locate(EMBEDDED_NAME, None)
FACTS = ModelFacts.of(Checkpoint.read(PATH))


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    asked = AskedConfig(
        model_path=str(PATH), device="cpu", kv_memory_bytes=2**22, max_num_seqs=2, num_threads=1, max_model_len=200
    )
    return resolve(asked, FACTS, Machine.detect())[0]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(position, tokens) of every row that was computed call by call."""
    found: list[tuple[int, int]] = []
    build = AttentionBatch.build

    def built(rows: Sequence[tuple[int, int]], *given: Any, **options: Any) -> AttentionBatch:
        found.extend(rows)
        return build(rows, *given, **options)

    monkeypatch.setattr(AttentionBatch, "build", built)
    monkeypatch.setattr(CpuDevice, "row_buckets", (0,))
    monkeypatch.setattr(load, "open_device", lambda *_: CpuDevice(1))
    monkeypatch.setattr(Tuning, "open", lambda *_: None)
    monkeypatch.setattr(Machine, "detect", lambda: Machine(1, 2**34, FREE_BYTES))
    monkeypatch.setattr(Machine, "on", lambda self, _: self)
    return found


def start(config: EngineConfig) -> None:
    load.load_worker(config, time.monotonic(), lambda _: None)


@pytest.mark.parametrize("where", ["build_decoder", "_warmed_up"])
def test_a_kernel_that_cannot_be_launched_is_one_line_with_the_way_out(
    config: EngineConfig, spans: list[tuple[int, int]], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's error may also be the cause of another one."""
    errors = pytest.importorskip("triton.runtime.errors")

    def refuse(*_: Any) -> None:
        try:
            raise errors.OutOfResources(114_688, 101_376, "shared memory")
        except errors.OutOfResources as error:
            raise ValueError("planted") from error

    monkeypatch.setattr(load, where, refuse)
    with pytest.raises(LaunchError) as refused:
        start(config)
    assert str(refused.value) == (
        "this GPU cannot run the model with these settings: a kernel needs 114,688 bytes of shared memory, and this "
        "GPU has 101,376; give --quantization int8 and --kv-cache-dtype int8, whose kernels need less, or --device cpu"
    )


@pytest.mark.parametrize(
    ("has", "advice"),
    [
        ({}, "give --quantization int8 and --kv-cache-dtype int8, whose kernels need less, or --device cpu"),
        ({"quantization": "int4"}, "give --kv-cache-dtype int8, whose kernels need less, or --device cpu"),
        ({"quantization": "int4", "kv_cache_dtype": "int8"}, "give --device cpu"),
    ],
)
@pytest.mark.parametrize("raised", ["in a step", "while a product is measured"])
def test_a_kernel_that_fits_no_device_like_this_is_the_same_line(
    config: EngineConfig, has: dict[str, Any], advice: str, raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advice that the settings follow already is left out."""

    def refuse(*_: Any) -> None:
        fit(DeviceProperties.of(86, 82), [Candidate("large", None, 4, SharedNeed(102 << 10))])

    def measure(*_: Any) -> None:
        table = SimpleNamespace(complete=refuse)
        Tuning(tmp_path, table).complete()  # type: ignore[arg-type]

    monkeypatch.setattr(load, "_load_first", refuse if raised == "in a step" else measure)
    with pytest.raises(LaunchError) as refused:
        start(msgspec.structs.replace(config, **has))
    assert str(refused.value) == (
        "this GPU cannot run the model with these settings: no form fits 101,376 bytes of shared memory, not even with "
        f"2 stages: large needs 104,448; {advice}"
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("threads", "a kernel needs 1,024 threads, and this GPU has 896"),
        ("tensor memory", "a kernel needs 1,024 columns of tensor memory, and this GPU has 896"),
    ],
)
def test_what_a_gpu_has_too_little_of_has_its_unit(name: str, says: str) -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    assert refused_launch(errors.OutOfResources(1024, 896, name)) == says


def test_an_error_that_another_one_replaced_on_purpose_is_not_looked_at() -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    suppressed, kept = ValueError("a smaller form failed too"), ValueError("planted")
    suppressed.__context__ = kept.__context__ = errors.OutOfResources(1024, 896, "threads")
    suppressed.__suppress_context__ = True
    assert refused_launch(suppressed) is None and refused_launch(kept) is not None


def test_a_refusal_in_one_line_stays_as_it_is(
    config: EngineConfig, spans: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = pytest.importorskip("triton.runtime.errors")

    def refuse(*_: Any) -> None:
        raise CapacityError("planted") from errors.OutOfResources(1024, 896, "threads")

    monkeypatch.setattr(load, "build_decoder", refuse)
    with pytest.raises(CapacityError, match=r"^planted$"):
        start(config)


def test_other_errors_of_a_start_stay(
    config: EngineConfig, spans: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(load, "build_decoder", refuse)
    with pytest.raises(ValueError, match="planted"):
        start(config)


def test_a_processor_runs_a_prompt_and_a_token(config: EngineConfig, spans: list[tuple[int, int]]) -> None:
    start(config)
    assert spans == [(0, 4), (4, 1)]


@pytest.mark.parametrize(
    ("changed", "longest"),
    [({}, 199), ({"max_num_batched_tokens": 100}, 100), ({"num_blocks": 1, "max_model_len": 32}, 31)],
    ids=["of a sequence", "of a step", "of the pool"],
)
def test_a_gpu_runs_prompts_of_all_lengths(
    config: EngineConfig, changed: dict[str, Any], longest: int, spans: list[tuple[int, int]]
) -> None:
    """No length is more than twice the one before it."""
    start(msgspec.structs.replace(config, device="cuda", **changed))
    assert spans[:2] == [(0, 4), (4, 1)]
    lengths = [num_tokens for position, num_tokens in spans[2:] if position == 0]
    assert len(lengths) == len(spans) - 2
    assert (lengths[0], lengths[-1]) == (1, longest)
    assert all(shorter < longer <= 2 * shorter + 1 for shorter, longer in pairwise(lengths))


def numerics_on(num_threads: int, config: EngineConfig) -> Numerics:
    """Facts that the answers of an engine with so many threads depend on."""
    asked = msgspec.structs.replace(config, num_threads=num_threads)
    found = load.load_worker(asked, time.monotonic(), lambda _: None)[1].numerics
    assert found is not None
    return found


def test_the_number_of_threads_is_told_where_bits_may_depend_on_it(
    config: EngineConfig, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`system_fingerprint` is made of these facts. `test_every_family` compares the bits of one thread and of three."""
    if kernels != "cpp":
        pytest.skip("C++ kernels are needed")
    assert numerics_on(1, config) == numerics_on(2, config)
    monkeypatch.setattr(start_phases.native, "library_name", lambda: "")  # as in plain PyTorch
    assert [numerics_on(count, config).device.split(", ")[1] for count in (1, 2)] == ["1 thread", "2 threads"]


def no_room(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("tried to allocate 7 GiB")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_room_is_told_with_what_is_free_and_what_would_fit(
    device: str, config: EngineConfig, spans: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = msgspec.structs.replace(config, device=device)
    planned = plan_of(asked, FACTS.arch)
    for owner, method, what, kv_bytes in (
        (
            Runner,
            "execute",
            f"slots and the tensors of a step, planned as {format_bytes(planned.working_bytes)},",
            2**22,
        ),
        (KVPool, "allocate", f"the KV cache of {format_bytes(planned.kv_bytes)}", 0),
    ):
        monkeypatch.setattr(owner, method, no_room)
        with pytest.raises(CapacityError) as told:
            start(asked)
        length = longest_beside_weights(asked, FACTS.arch, FREE_BYTES + kv_bytes)
        assert length > 1
        assert str(told.value) == (
            f"{what} could not be allocated (tried to allocate 7 GiB); 300.0 MiB of memory are free: "
            f"--max-model-len up to {length} would fit; free some memory, or give a smaller --kv-memory, or "
            "--kv-cache-dtype int8"
        )


def test_ops_in_plain_pytorch_are_named_with_the_reason() -> None:
    refused = (("triton", "runs on GPUs only"), ("cpp", "has no 7 bits"))
    choices = [
        Selection("embed", 1, "cpp", ()), Selection("norm", 1, "cpp", ()), Selection("norm", 2, "cpp", ()),
        Selection("draw", 1, "reference", refused[:1]), Selection("draw", 2, "reference", refused),
        Selection("norm", 3, "reference", refused), Selection("pool", 1, "reference", ()),
    ]  # fmt: skip
    assert start_phases.tally(choices) == (
        "2 cpp, 3 reference (draw: triton runs on GPUs only; norm: triton runs on GPUs only, cpp has no 7 bits; "
        "pool: it has no other implementation)"
    )
    assert start_phases.tally(choices[:3]) == "2 cpp"
    everything = [Selection(f"op{number}", 1, "reference", (("cpp", "x" * 900),)) for number in range(20)]
    line = start_phases.tally(everything)
    assert len(line) < 800 and line.endswith("; 17 more)"), "without a compiler, too, it is one short line"


def test_the_longest_context_beside_the_weights(config: EngineConfig) -> None:
    lengths = [longest_beside_weights(config, FACTS.arch, free_bytes) for free_bytes in (0, 2**28, 2**40)]
    assert lengths[0] == 0
    assert lengths == sorted(lengths)
    assert lengths[-1] == FACTS.arch.max_positions
