"""Writes `quantized.safetensors`: small matrices as others' programs quantize, pack and dequantize them.

It runs in a virtual environment of its own, because its writers are no dependencies of inferd:

    pip install torch==2.13.0 compressed-tensors==0.20.0 auto-round==0.16.1
    python tests/cpu/golden/write.py
"""

from __future__ import annotations

import json
from typing import Any

import torch
from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from files import COLUMNS, FILE
from safetensors.torch import save_file
from torch import Tensor

OUT_SIZE, IN_SIZE = 32, 256
Tensors = dict[str, Tensor]


def weight(seed: int) -> Tensor:
    """Rows and groups differ in size, so that a scale in the wrong place shows."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn((OUT_SIZE, IN_SIZE), generator=generator) * IN_SIZE**-0.5
    rows = torch.rand((OUT_SIZE, 1), generator=generator) * 4 + 0.3
    groups = (torch.rand((1, IN_SIZE // 16), generator=generator) * 2 + 0.5).repeat_interleave(16, 1)
    return normal * rows * groups + 0.01


# -- compressed-tensors ------------------------------------------------------------------------------------------------


def compressed(
    seed: int, scheme: QuantizationScheme, kind: str, dtype: torch.dtype, global_scale: float | None = None
) -> tuple[Tensors, dict[str, Any]]:
    args, w = scheme.weights, weight(seed)
    assert args is not None
    size = args.group_size if args.strategy in ("group", "tensor_group") else IN_SIZE
    grouped = w.reshape(1, -1) if args.strategy == "tensor" else w.reshape(OUT_SIZE, -1, size)
    least, most = grouped.amin(-1), grouped.amax(-1)
    state: Tensors = {"weight": w.to(dtype)}
    whole_scale = None
    if args.strategy == "tensor_group":
        whole_scale = torch.tensor([global_scale or 448 * 6 / w.abs().max()], dtype=torch.float32)
        state["weight_global_scale"] = whole_scale
    scales, zeros = calculate_qparams(least, most, args, global_scale=whole_scale)
    if args.scale_dtype is None:
        scales = scales.to(dtype)
    state |= {"weight_scale": scales, "weight_zero_point": zeros}
    compressor = BaseCompressor.get_value_from_registry(kind)
    packed = compressor.compress(state, scheme)
    whole = in_fp32(packed, scheme, compressor)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=kind, quantization_status="compressed", ignore=["lm_head"]
    )
    return {**packed, "dequantized": whole}, json.loads(config.model_dump_json())


def in_fp32(packed: Tensors, scheme: QuantizationScheme, compressor: Any) -> Tensor:
    """The weights as compressed-tensors reads them, without the rounding to the scales' dtype that it ends with."""
    scales = packed["weight_scale"]
    if "weight_global_scale" in packed:
        numbers = unpack_fp4_from_uint8(packed["weight_packed"], OUT_SIZE, IN_SIZE, dtype=torch.float32)
        return dequantize(
            numbers,
            scales.float(),
            args=scheme.weights,
            dtype=torch.float32,
            global_scale=packed["weight_global_scale"],
        )
    exact = packed | ({"weight_scale": scales.float()} if scales.is_floating_point() else {})
    return compressor.decompress(exact, scheme)["weight"].float()


def scheme_of(**weights: Any) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def compressed_cases() -> dict[str, tuple[Tensors, dict[str, Any]]]:
    integers = {
        "W4A16": preset_name_to_scheme("W4A16", ["Linear"]),
        "W4A16_ASYM": preset_name_to_scheme("W4A16_ASYM", ["Linear"]),
        "W4A16, groups of 32, asymmetric": scheme_of(num_bits=4, strategy="group", group_size=32, symmetric=False),
        "W4A16, channel, actorder static": scheme_of(num_bits=4, strategy="channel", actorder="static"),
        "W4A16, channel, asymmetric": scheme_of(num_bits=4, strategy="channel", symmetric=False),
        "W8A16": preset_name_to_scheme("W8A16", ["Linear"]),
        "W8A16, channel": scheme_of(num_bits=8, strategy="channel"),
        "W8A16, asymmetric": scheme_of(num_bits=8, strategy="group", group_size=64, symmetric=False),
    }
    found = {
        name: compressed(seed, scheme, "pack-quantized", torch.float16 if seed % 2 else torch.bfloat16)
        for seed, (name, scheme) in enumerate(integers.items())
    }
    int8 = preset_name_to_scheme("INT8", ["Linear"])
    found["W8A8"] = compressed(20, int8, "int-quantized", torch.bfloat16)
    static = int8.model_copy(deep=True)
    static.weights = QuantizationArgs(num_bits=8, strategy="channel", symmetric=False)
    found["W8A8, asymmetric"] = compressed(21, static, "int-quantized", torch.float16)
    found["W4A8"] = compressed(22, preset_name_to_scheme("W4A8", ["Linear"]), "int-quantized", torch.bfloat16)
    found["W8A8, one scale"] = compressed(23, scheme_of(num_bits=8, strategy="tensor"), "int-quantized", torch.float32)
    found["NVFP4A16"] = compressed(
        24, preset_name_to_scheme("NVFP4A16", ["Linear"]), "nvfp4-pack-quantized", torch.bfloat16
    )
    found["MXFP4A16"] = compressed(
        25, preset_name_to_scheme("MXFP4A16", ["Linear"]), "mxfp4-pack-quantized", torch.bfloat16
    )
    return found


# -- GPTQ, AWQ and AutoRound -------------------------------------------------------------------------------------------


def grid(seed: int, bits: int, size: int, is_symmetric: bool) -> tuple[Tensor, Tensor]:
    """(scales, zero points) [out, groups] of rounding to the nearest. No zero point is 0, which version 1 of GPTQ's
    format cannot hold."""
    grouped, most = weight(seed).reshape(OUT_SIZE, -1, size), 2**bits - 1
    if is_symmetric:
        scales = (grouped.abs().amax(2) * 2 / most).half().float()
        return scales, torch.full_like(scales, 2 ** (bits - 1))
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scales = ((high - low) / most).half().float()
    return scales, (-low / scales).round().clamp(1, most)


def linear(seed: int) -> torch.nn.Linear:
    made = torch.nn.Linear(IN_SIZE, OUT_SIZE, bias=False)
    made.weight.data = weight(seed)
    return made


def gptq(
    seed: int, bits: int, group_size: int, *, is_symmetric: bool, is_v2: bool, desc_act: bool = False
) -> tuple[Tensors, dict[str, Any]]:
    """Packed by AutoRound's writers of both versions, and dequantized by their readers."""
    module, size = (qlinear_torch if is_v2 else qlinear_torch_zp), IN_SIZE if group_size == -1 else group_size
    layer = module.QuantLinear(bits, group_size, IN_SIZE, OUT_SIZE, bias=False, g_idx=True)
    scales, zeros = grid(seed, bits, size, is_symmetric)
    layer.device = torch.device("cpu")
    layer.pack(linear(seed), scales, zeros, None, device="cpu")
    if desc_act:
        order = torch.randperm(IN_SIZE, generator=torch.Generator().manual_seed(seed))
        layer.g_idx = (order // size).to(torch.int32)
    packed = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
    layer.scales = layer.scales.float()
    whole = layer(torch.eye(IN_SIZE)).T
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": is_symmetric, "desc_act": desc_act,
        "checkpoint_format": "gptq_v2" if is_v2 else "gptq", "lm_head": False,
    }  # fmt: skip
    return {**packed, "dequantized": whole.float()}, config


def awq(seed: int, group_size: int) -> tuple[Tensors, dict[str, Any]]:
    size = IN_SIZE if group_size == -1 else group_size
    scales, zeros = grid(seed, 4, size, is_symmetric=False)
    layer = WQLinear_GEMM.from_linear(linear(seed), 4, size, scales=scales.T, zeros=zeros.T, device="cpu")
    packed = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales")}
    whole = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, size).T
    config = {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    return {**packed, "dequantized": whole.float()}, config


def other_cases() -> dict[str, tuple[Tensors, dict[str, Any]]]:
    found = {
        "GPTQ": gptq(40, 4, 128, is_symmetric=True, is_v2=False),
        "GPTQ, asymmetric": gptq(41, 4, 64, is_symmetric=False, is_v2=False),
        "GPTQ, act-order": gptq(42, 4, 32, is_symmetric=False, is_v2=False, desc_act=True),
        "GPTQ, symmetric, act-order": gptq(43, 4, 128, is_symmetric=True, is_v2=False, desc_act=True),
        "GPTQ, a column": gptq(44, 4, -1, is_symmetric=False, is_v2=False),
        "GPTQ v2": gptq(45, 4, 128, is_symmetric=False, is_v2=True),
        "GPTQ, 8 bits": gptq(46, 8, 128, is_symmetric=True, is_v2=False),
        "GPTQ, 8 bits, asymmetric": gptq(47, 8, 32, is_symmetric=False, is_v2=False),
        "GPTQ v2, 8 bits, act-order": gptq(48, 8, 64, is_symmetric=False, is_v2=True, desc_act=True),
        "AWQ": awq(50, 128),
        "AWQ, groups of 32": awq(51, 32),
        "AWQ, a column": awq(52, -1),
    }
    rounded = {
        "AutoRound": ("auto_round:auto_gptq", gptq(60, 4, 128, is_symmetric=True, is_v2=False)[0], 128, True),
        "AutoRound, asymmetric": ("auto_round", gptq(61, 4, 32, is_symmetric=False, is_v2=True)[0], 32, False),
        "AutoRound in AWQ's packing": ("auto_round:auto_awq", awq(62, 128)[0], 128, False),
    }
    for name, (packing, tensors, size, is_symmetric) in rounded.items():
        config = {
            "quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": size,
            "sym": is_symmetric, "data_type": "int", "block_name_to_quantize": "model.layers",
        }  # fmt: skip
        found[name] = tensors, config
    found["NVFP4 of ModelOpt"] = modelopt()
    return found


def modelopt() -> tuple[Tensors, dict[str, Any]]:
    """The multipliers of ModelOpt are the reciprocals of the divisors of compressed-tensors, whose converter checks
    the names. The divisor is a power of two, so that its reciprocal is exact."""
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    made = compressed(70, scheme, "nvfp4-pack-quantized", torch.bfloat16, global_scale=1024.0)[0]
    packed = {
        "weight": made["weight_packed"],
        "weight_scale": made["weight_scale"],
        "weight_scale_2": (1 / made["weight_global_scale"]).reshape(()),
        "input_scale": torch.ones(()),
    }
    converter = ModelOptNvfp4Converter(targets=["re:.*"])
    back = converter.process({f"m.{name}": tensor for name, tensor in packed.items()})
    assert torch.equal(back["m.weight_packed"], made["weight_packed"])
    assert torch.equal(back["m.weight_global_scale"].reshape(1), made["weight_global_scale"])
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "group_size": 16}
    return {**packed, "dequantized": made["dequantized"]}, config


if __name__ == "__main__":
    cases = compressed_cases() | other_cases()
    for tensors, _ in cases.values():
        tensors["dequantized"] = tensors["dequantized"][:, ::COLUMNS]
    flat = {f"{case}/{name}": t.contiguous() for case, (tensors, _) in cases.items() for name, t in tensors.items()}
    save_file(flat, FILE, {case: json.dumps(config) for case, (_, config) in cases.items()})
    print(len(cases), "cases,", FILE.stat().st_size, "bytes")
