"""Every form that a predicate accepts on a GPU was compiled: each accepted mix of dtypes has a shipped form, and no
shipped form has a refused mix."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
import torch

from inferd.kernels import gpu, registry
from inferd.kernels.compile import aot
from inferd.kernels.device import DeviceProperties
from tests.conftest import ROOT

pytest.importorskip("triton")

HOPPER = DeviceProperties.of(90, 132)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
SIZES = {"head_dim": 128, "heads_per_kv_head": 4, "block_size": 32, "key_dim": 128, "value_dim": 128, "width": 4}
"""Numbers in a key, by field; any other is 4,096."""


class Case(NamedTuple):
    """A Triton implementation, the shipped op of its kernel, and the arguments that have the dtypes of its keys."""

    op: str
    kernel: str
    arguments: dict[str, str]
    implementation: str = "triton"


def rows(op: str, argument: str = "x", **more: str) -> Case:
    return Case(op, op, {"dtype": argument, **more})


CASES = (
    *(rows(op, weight_dtype="weight") for op in ("rms_norm", "add_rms_norm", "rms_norm_fp8", "add_rms_norm_fp8")),
    *(rows(op) for op in ("layer_norm", "add_layer_norm", "gelu", "scaled_add", "quantize_fp8")),
    *(rows(op, "gate") for op in ("sigmoid_gate", "norm_silu_gate", "silu_gate_norm")),
    *(rows(op, argument) for op, argument in (("short_conv", "x"), ("gated_delta", "qkv"), ("mamba2", "xbc"))),
    *(rows(op, "gate_up") for op in ("silu_mul", "gelu_mul", "limited_mul", "silu_mul_fp8", "gelu_mul_fp8")),
    rows("argmax", "logits"),
    rows("experts_route", "logits"),
    rows("experts_product"),
    rows("experts_add", "parts"),
    Case("experts_product", "experts_integers", {"dtype": "x"}, "triton_integers"),
    Case("lora", "lora_shrink", {"dtype": "x", "weight_dtype": "down"}),
    Case("lora", "lora_expand", {"dtype": "y", "weight_dtype": "up"}),
    *(rows(op, "q", kv_dtype="kv") for op in ("rope_and_cache", "paged_attention")),
    Case("attention_split", "attention_parts", {"dtype": "q", "kv_dtype": "kv"}, "triton_parts"),
    Case("attention_split", "attention_parts_fp8", {"dtype": "q", "kv_dtype": "kv"}, "triton_parts_fp8"),
    Case("linear", "linear_few_rows", {"dtype": "x", "out_dtype": "out"}, "triton_few_rows"),
    Case("linear", "linear_invariant", {"dtype": "x", "out_dtype": "out"}, "triton_invariant"),
    rows("linear_fp8", "out"),
    *(
        Case(op, op, {"dtype": "x"}, implementation)
        for op in ("linear_int8", "linear_int4")
        for implementation in ("triton", "triton_invariant")
    ),
    Case("linear_fp8_few_rows", "linear_fp8_few_rows", {"dtype": "x"}, "triton_few_rows"),
    *(rows(op, weight_dtype="weight") for op in ("norm_linear", "linear_residual")),
    *(Case("gate_up_act", kernel, {"dtype": "x", "weight_dtype": "weight"}) for kernel in ("gate_up", "norm_gate_up")),
)


def implementations() -> Iterator[tuple[registry.Op[Any, Any], registry.Implementation[Any, Any]]]:
    """Every Triton implementation of every op."""
    for path in (ROOT / "kernels" / "ops").glob("*/*.py"):
        if "Op(" in path.read_text() or path.name == "__init__.py":
            importlib.import_module(f"inferd.kernels.ops.{path.parent.name}.{path.stem}".removesuffix(".__init__"))
    for op in registry.ops().values():
        yield from ((op, one) for one in op._implementations if one.name.startswith("triton"))


def hints_of(predicate: Callable[[Any], str | None]) -> tuple[Any, dict[str, Any]]:
    """The class of an op's keys, and the types of its fields."""
    kind = importlib.import_module(predicate.__module__).Key
    return kind, get_type_hints(kind)


def test_every_implementation_that_has_a_choice_of_dtypes_has_a_case() -> None:
    found = {(op.name, one.name) for op, one in implementations() if torch.dtype in hints_of(one.predicate)[1].values()}
    assert found == {(case.op, case.implementation) for case in CASES}


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "properties_of", lambda *_: HOPPER)
    gpu.interpret(False)


def keys(predicate: Callable[[Any], str | None]) -> Iterator[Any]:
    """Every key of the op on a GPU, over all dtypes, booleans and words."""
    kind, hints = hints_of(predicate)
    values: dict[Any, tuple[Any, ...]] = {torch.dtype: DTYPES, bool: (False, True), DeviceProperties: (HOPPER,)}
    axes = [
        values.get(hint) or get_args(hint) or (SIZES.get(name, 4096),)
        for name, hint in hints.items()
        if name != "device_type"
    ]
    return (kind("cuda", *values) for values in itertools.product(*axes))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.kernel}")
def test_what_is_taken_is_what_is_shipped(case: Case) -> None:
    (taken_by,) = (
        one.predicate for op, one in implementations() if (op.name, one.name) == (case.op, case.implementation)
    )
    taken = {
        tuple(gpu.DTYPES[getattr(key, field)] for field in case.arguments)
        for key in keys(taken_by)
        if taken_by(key) is None
    }
    shipped = {
        tuple(form.signature[argument].removeprefix("*") for argument in case.arguments.values())
        for form in aot.all_shipped()
        if form.op == case.kernel
    }
    assert taken == shipped and taken
