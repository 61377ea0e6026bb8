"""Deterministic results on a GPU: every op computes a row from that row alone, or is refused by name. Choosing needs no
GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
import torch

from inferd.engine.api.errors import ModelError
from inferd.engine.arch.registry import describe
from inferd.engine.worker.determinism import refuse_varying, warn_of_uncut_keys
from inferd.kernels import gpu, registry
from inferd.kernels.device import DeviceProperties
from inferd.kernels.ops.paged_attention import passes
from inferd.kernels.registry import KernelError, Selection, always
from tests.configs import engine_config
from tests.conftest import ROOT

pytest.importorskip("triton")

HOPPER = DeviceProperties.of(90, 132)

NOT_CALLED = {
    "linear_16bit",  # runs on a CPU only
    *("norm_linear", "linear_residual", "gate_up_act"),  # belong to layers that are bound for few rows
}
"""Ops that a deterministic GPU never calls; `test_decoder_kernels` counts the calls of the last three."""
SIZES = {"head_dim": 128, "heads_per_kv_head": 4, "block_size": 32, "key_dim": 128, "value_dim": 128, "width": 4}
"""Numbers in a key, by field; any other is 4,096."""


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu, "properties_of", lambda *_: HOPPER)
    gpu.interpret(False)
    yield
    for op in registry.ops().values():
        op.force(None)  # also forgets the choices of the test


def ops() -> dict[str, registry.Op[Any, Any]]:
    """Every op of every kernel."""
    for path in (ROOT / "kernels" / "ops").glob("*/*.py"):
        if "Op(" in path.read_text():
            importlib.import_module(f"inferd.kernels.ops.{path.parent.name}.{path.stem}".removesuffix(".__init__"))
    return {name: op for name, op in registry.ops().items() if name not in NOT_CALLED}


def choose(name: str, **changed: object) -> Selection:
    """The choice on a GPU: deterministic, in bfloat16 and without further options, unless `changed`."""
    op = registry.ops()[name]
    predicate = next(one.predicate for one in op._implementations if one.predicate is not always)
    key_type = importlib.import_module(predicate.__module__).Key
    values: dict[str, object] = {"device_type": "cuda", "is_invariant": True, **changed}
    for field, kind in get_type_hints(key_type).items():
        values.setdefault(
            field,
            {torch.dtype: torch.bfloat16, int: SIZES.get(field, 4096), bool: False, DeviceProperties: HOPPER}.get(kind),
        )
    return op.choice(key_type(**{field: values[field] for field in key_type._fields}))


def test_every_op_runs_in_what_does_not_vary() -> None:
    found = {name: choose(name) for name in ops()}
    assert {choice.op for choice in found.values() if choice.varies is not None} == set()
    assert len(found) > 20
    assert {found[name].chosen for name in ("linear", "linear_fp8", "paged_attention", "rms_norm", "sample")} == {
        "triton_invariant", "triton",
    }  # fmt: skip
    assert choose("linear_fp8", has_groups=True).chosen == "triton"
    assert {choose(f"linear_int{bits}").chosen for bits in (4, 8)} == {"triton_invariant"}
    refuse_varying(found.values())


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("linear", {"is_invariant": False}, "linear runs in triton_few_rows, where more rows have other kernels"),
        ("linear", {"is_invariant": False, "dtype": torch.float32}, "linear runs in torch, where its library chooses"),
        ("linear_fp8", {"is_invariant": False}, "linear_fp8 runs in scaled_mm, where its library chooses"),
        ("linear_int4", {"is_invariant": False}, "linear_int4 runs in triton, where many rows are"),
        (
            "paged_attention", {"dtype": torch.float32, "kv_dtype": torch.float32},
            "paged_attention runs in reference, where rows of one length are multiplied together "
            r"\(flash_attention_3 cuts .*; triton multiplies 16-bit numbers, not torch.float32\)",
        ),
        ("rms_norm", {"size": 40000}, "rms_norm runs in reference, where torch splits the sum"),
        ("add_layer_norm", {"size": 40000}, "add_layer_norm runs in reference"),
        ("rope_and_cache", {"head_dim": 1024}, "rope_and_cache runs in reference"),
        ("norm_silu_gate", {"size": 40000}, "norm_silu_gate runs in reference, where torch splits the sum"),
    ],
)  # fmt: skip
def test_what_varies_is_refused_by_name(name: str, changed: dict[str, object], words: str) -> None:
    ops()
    with pytest.raises(ModelError, match=f"cannot give them on this GPU: {words}.*; give --no-deterministic"):
        refuse_varying([choose("sample"), choose(name, **changed)])


def test_the_same_on_a_processor_is_nobodys_concern() -> None:
    ops()
    refuse_varying([choose("rms_norm", device_type="cpu"), choose("linear", device_type="cpu", is_invariant=False)])


def test_an_invariant_product_is_never_the_librarys() -> None:
    """Neither cuBLAS in 16 bits nor `torch._scaled_mm` in 8 may run, even if no other kernel can."""
    ops()
    for name, library in (("linear", "torch"), ("linear", "triton_few_rows"), ("linear_fp8", "scaled_mm")):
        registry.ops()[name].force(library)
        with pytest.raises(KernelError, match=r"by the number of rows|more rows have other kernels"):
            choose(name)
    registry.ops()["linear"].force(None)
    with pytest.raises(KernelError, match=r"linear: no implementation can run for .*float64"):
        choose("linear", dtype=torch.float64)


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 128256,
    "max_position_embeddings": 2**20, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("max_model_len", "num_tokens"), [(8192, None), (32768, None), (65536, 56), (131072, 24), (2**20, 0)]
)
def test_a_start_warns_if_the_keys_of_long_contexts_may_stay_whole(
    max_model_len: int, num_tokens: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The number is that of a list of work: so many tokens are cut, and one block more is not."""
    config, arch = engine_config(max_model_len=max_model_len), describe(LLAMA_8B)
    warn_of_uncut_keys(config, arch, None)
    assert not caplog.messages
    warn_of_uncut_keys(config, arch, HOPPER)
    assert len(caplog.messages) == (num_tokens is not None)
    if num_tokens is not None:
        (message,) = caplog.messages
        assert f"with --max-model-len {max_model_len}, those of {num_tokens} tokens behind such a context" in message
        shape = passes.Shape(8, 4, 128, 2, None, HOPPER)
        for num_blocks, fits in ((num_tokens // 8, True), (num_tokens // 8 + 1, False)):
            if num_blocks:
                (part,) = passes.passes(shape, [8 * num_blocks], max_model_len, is_deterministic=True)
                assert (num_blocks * max_model_len // 256 <= part.num_slots) == fits
