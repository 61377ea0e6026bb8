"""Every format of quantized checkpoints: matrices that other programs packed give exactly the weights that those
programs read from them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from inferd.engine.arch import matrix
from inferd.engine.arch.registry import describe
from inferd.engine.arch.stored import Format
from inferd.engine.arch.weights import MatrixPart, QuantizedSource
from inferd.engine.layers.parameter import Parameter
from inferd.engine.quant.checkpoints.registry import READERS
from inferd.engine.quant.scheme import DENSE
from inferd.engine.quant.stored_schemes import StoredIntegers, scheme_of
from inferd.kernels.ops.quantized import Matrix
from tests.cpu.golden.files import COLUMNS, FILE

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 256, "intermediate_size": 256,
    "max_position_embeddings": 512, "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5, "vocab_size": 100,
}  # fmt: skip
MODULE = "model.layers.0.mlp.down_proj"
DTYPES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip


def cases() -> list[str]:
    with safe_open(FILE, "pt") as file:
        return sorted(file.metadata())


def case_of(name: str) -> tuple[Format, dict[str, Tensor], Tensor]:
    """(format by the config, the tensors by their suffixes, some columns of the weights as their writer reads them)."""
    with safe_open(FILE, "pt") as file:
        config = json.loads(file.metadata()[name])
        keys = [key for key in file.keys() if key.startswith(f"{name}/")]  # noqa: SIM118 (a file is no mapping)
        tensors = {key.split("/")[1]: file.get_tensor(key) for key in keys}
    stored = describe(MODEL | {"quantization_config": config}).stored
    assert stored is not None and stored.layers is not None and stored.exceptions == () and stored.head is None
    columns = tensors.pop("dequantized")
    return stored.layers.found({suffix: DTYPES[tensor.dtype] for suffix, tensor in tensors.items()}), tensors, columns


def taken(source: QuantizedSource, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that the scheme gets."""
    scheme = scheme_of([MatrixPart((source.shape[0],), source.format.layout)], torch.float32, DENSE, is_invariant=False)
    assert isinstance(scheme, StoredIntegers)
    found: dict[str, Tensor] = {}
    parameters = {
        name: Parameter(
            spec.shape, spec.dtype, torch.device("cpu"), lambda tensor, name=name: found.update({name: tensor})
        )
        for name, spec in scheme.takes(*source.shape, torch.float32).items()
    }
    for name, row, values in READERS[source.format.name].read(source, tensors):
        assert not values.dtype.is_floating_point or values.dtype == parameters[name].dtype, "a scale would be rounded"
        parameters[name].write(row, values)
    assert found.keys() == parameters.keys()
    return found


def dequantized(source: QuantizedSource, tensors: dict[str, Tensor]) -> Tensor:
    given = taken(source, tensors)
    order = given.pop("order", None)
    table = source.format.layout.table
    packed = Matrix(given["q"], given["scales"], None, given.get("zeros"), given.get("minimums"), None, table)
    weights = packed.dequantized()
    if order is None:
        return weights
    found = torch.empty_like(weights)
    found[:, order[0].long()] = weights
    return found


@pytest.mark.parametrize("name", cases())
def test_weights_are_those_that_the_writer_reads(name: str) -> None:
    form, tensors, columns = case_of(name)
    shape = len(columns), 256
    source = QuantizedSource(MODULE, form, shape, matrix.LinearWeight.whole("down", matrix.Component.MLP, shape))
    stored = {tensor.suffix: tensor for tensor in source.tensors.values()}
    assert {suffix for suffix, tensor in stored.items() if not tensor.is_optional} <= tensors.keys() <= stored.keys()
    for suffix, tensor in tensors.items():
        assert stored[suffix].accepts(tuple(tensor.shape)) and DTYPES[tensor.dtype] in stored[suffix].dtypes, suffix
    READERS[form.name].check(source, tensors)
    assert torch.equal(dequantized(source, tensors)[:, ::COLUMNS].float(), columns)
