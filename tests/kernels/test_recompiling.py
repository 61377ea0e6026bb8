"""A step with another number of rows compiles nothing: apart from constants, the properties by which Triton compiles a
kernel are the same for all.

These are which addresses and numbers are multiples of 16, and which numbers are 1 (`JITFunction.run`). If a tensor
begins at the end of another, its address depends on the other's size. Launches are recorded and not made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from inferd.engine.api.wire.params import Adapter, SamplingParams
from inferd.engine.arch.registry import describe
from inferd.engine.layers.placement import NO_LORAS
from inferd.engine.lora.adapters import Adapters
from inferd.engine.quant.recipe import recipes
from inferd.engine.sample.sampler import Sampler, cuts_of
from inferd.engine.sched.plan import Admission, Row, StepPlan, TableUpdate
from inferd.engine.worker.device import CpuDevice, Recording
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.runner import Runner
from inferd.engine.worker.slots import Slots
from inferd.engine.worker.states import StatePool
from inferd.kernels import gpu
from inferd.kernels.ops.decode_draw import draw
from inferd.kernels.ops.linear import LINEAR, Choices
from inferd.kernels.ops.sample import sample
from tests.cpu.checkpoints import Case, random_decoder
from tests.kernels.conftest import forced, is_on_gpu
from tests.kernels.test_decoder_kernels import HYBRIDS

pytest.importorskip("triton")

VOCAB, BLOCK, WIDTH = 61, 16, 5
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HEADS = {"linear_num_value_heads": 16, "mamba_n_heads": 16}
"""As in published models, the width of a recurrent layer's projection is a multiple of 16."""
CASES = (
    (Case("llama", "llama", SMALL), "none", "triton_few_rows"),
    (Case("qwen3, deterministic, with adapters", "qwen3", SMALL), "none", "triton_invariant"),
    (Case("gemma2, its block tables two of an odd width", "gemma2", SMALL | {"sliding_window": 20}), "none", "torch"),
    (Case("llama, in fp8", "llama", SMALL), "fp8", "torch"),
    (Case("llama, in int8", "llama", SMALL), "int8", "torch"),
    (Case("llama, in int4", "llama", SMALL | {"intermediate_size": 64}), "int4", "torch"),
    (Case("qwen3 moe", "qwen3_moe", SMALL | EXPERTS), "none", "triton_few_rows"),
    *((Case(one.name, one.model_type, SMALL | one.config | HEADS), "none", "triton_few_rows") for one in HYBRIDS),
)
"""(case, quantization of its weights, implementation of its products)."""
CUT = SamplingParams(max_tokens=9, seed=1, temperature=0.8, top_k=5, top_p=0.9, min_p=0.01)

Forms = dict[tuple[str, object], set[tuple[tuple[str, object], ...]]]


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    if is_on_gpu(request.config):
        pytest.skip("launches are watched in the interpreter")
    gpu.interpret(True)
    yield from forced("", "triton")
    gpu.interpret(False)


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Forms:
    """The other properties of each launch, by kernel and constants. Results are zeros."""
    from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415

    found: Forms = defaultdict(set)

    def watched(self: Any, *args: Any, **options: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | options
        left_out = self.kwargs.get("do_not_specialize") or ()
        constants = tuple((name, given[name]) for name in self.arg_names if name.isupper())
        found[f"{self.fn.__module__}.{self.fn.__name__}", constants].add(
            tuple((name, _kind(given[name])) for name in self.arg_names if not name.isupper() and name not in left_out)
        )

    monkeypatch.setattr(InterpretedFunction, "run", watched)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    return found


def _kind(value: object) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return (value == 1, value % 16 == 0) if isinstance(value, int) else type(value)


def compiled_anew(forms: Forms, known: Forms) -> set[tuple[str, tuple[str, object]]]:
    """Properties that `known` does not have for a known kernel and constants: (kernel, (argument, its kind))."""
    return {
        (key[0], kind)
        for key, found in forms.items()
        for kinds in found - known.get(key, found)
        for kind in kinds
        if all(kind not in others for others in known[key])
    }


class RunningDevice(CpuDevice):
    """Pads steps, and records a step by keeping the function that runs it."""

    row_buckets: Sequence[int] = (1, 2, 4)
    records_all = True

    def record(self, run: Callable[[], Tensor]) -> Recording:
        return _Run(run)


class _Run:
    def __init__(self, run: Callable[[], Tensor]) -> None:
        self._run, self.output = run, run()

    def replay(self) -> None:
        self.output.copy_(self._run())


def runner_of(case: Case, quantization: str, num_slots: int) -> Runner:
    recipe = recipes(Choices(is_invariant="deterministic" in case.name))[quantization]
    device, adapters = RunningDevice(1), None
    if case.name.endswith("adapters"):
        adapters = Adapters.allocate(describe(case.config_json()), 2, 8, num_slots, torch.bfloat16)
    loras = NO_LORAS if adapters is None else adapters.matrices
    decoder = random_decoder(case, torch.bfloat16, recipe, loras=loras)
    num_groups = len(decoder.arch.cache_groups)
    kv_dtype = torch.float8_e4m3fn if quantization == "fp8" else torch.bfloat16
    kv = KVPool.allocate(decoder.arch, num_groups * num_slots * WIDTH, BLOCK, kv_dtype, device)
    slots = Slots(num_slots, WIDTH * BLOCK, BLOCK, device, num_groups)
    states = StatePool.allocate(decoder.arch, num_slots, 0, torch.bfloat16, device)
    sampler = Sampler(num_slots, VOCAB, "cpu")
    return Runner(LoadedModel(decoder, kv, slots, sampler, device, states=states, adapters=adapters))


def steps(num_rows: int, num_groups: int, *, has_adapters: bool) -> Iterator[StepPlan]:
    """A step of prompts with as many tokens as rows, then a step of one token each."""
    params = structs.replace(CUT, adapter=Adapter(1, "")) if has_adapters else CUT
    admissions = tuple(Admission(slot, f"r{slot}", (3,) * num_rows, num_rows, params) for slot in range(num_rows))
    updates = tuple(
        TableUpdate(slot, group, 0, (group * num_rows + slot,))
        for slot in range(num_rows)
        for group in range(num_groups)
    )
    yield StepPlan(0, admissions, updates, tuple(Row(slot, 0, num_rows, True) for slot in range(num_rows)))
    yield StepPlan(1, (), (), tuple(Row(slot, num_rows, 1, True) for slot in range(num_rows)))


@pytest.mark.parametrize(("case", "quantization", "multiply"), CASES, ids=[case.name for case, *_ in CASES])
def test_steps(case: Case, quantization: str, multiply: str, forms: Forms) -> None:
    """A start runs one row."""
    LINEAR.force(multiply)
    known: Forms = {}
    for num_rows in (1, 2, 3, 4):
        runner = runner_of(case, quantization, num_rows)
        for plan in steps(num_rows, len(runner.arch.cache_groups), has_adapters=runner.model.adapters is not None):
            runner.execute(plan)
        known = known or {key: set(found) for key, found in forms.items()}
    assert compiled_anew(forms, known) == set()
    assert len({kernel for kernel, _ in known}) >= 12
    routes = {f"inferd.kernels.ops.experts.triton_routing.{name}" for name in ("_choose", "_sort", "_add")}
    assert len(routes & {kernel for kernel, _ in known}) == 3 * case.name.endswith("moe")
    has_adapters = "inferd.kernels.ops.lora.triton._expand" in {kernel for kernel, _ in known}
    assert has_adapters == case.name.endswith("adapters")


def test_drawing(forms: Forms) -> None:
    """The vocabulary has several chunks."""
    known: Forms = {}
    for num_rows in (1, 2, 4):
        logits, slots = torch.randn(num_rows, 3000), torch.arange(num_rows)
        draw(logits, slots, torch.zeros(4), torch.arange(4), slots + 3, cuts_of([CUT] * 4))
        sample(logits, slots, slots + 3)
        known = known or {key: set(found) for key, found in forms.items()}
    assert compiled_anew(forms, known) == set()
    assert len(known) == 7


def test_what_is_compiled_anew_is_seen(forms: Forms) -> None:
    ends = torch.zeros(2, 3, dtype=torch.int64)
    for slots in ends:
        draw(torch.zeros(3, 70), slots, torch.zeros(1), torch.zeros(1, dtype=torch.int64), slots, cuts_of([CUT]))
    known = {key: set(list(found)[:1]) for key, found in forms.items()}
    assert {(kernel.rpartition(".")[2], argument) for kernel, (argument, _) in compiled_anew(forms, known)} == {
        ("_bound", "slots"), ("_bound", "positions"), ("_draw", "slots"), ("_draw", "positions"),
        ("_sort", "slots"), ("_select", "slots"),
    }  # fmt: skip
