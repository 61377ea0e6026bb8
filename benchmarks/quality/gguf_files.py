"""Writes GGUF files: from the specification, and from checkpoints in the way of llama.cpp's converter.

The names of keys and tensors, and what the converter does to weights, are those of llama.cpp's convert_hf_to_gguf.py
(2026-11). `gguf_blocks` packs the matrices. This file shares no code with the reader.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.quality import gguf_families
from benchmarks.quality.gguf_blocks import Pack, Stored, as_f32

ALIGNMENT = 32

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


# -- the file ----------------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(found: Any) -> bytes:
    """A metadata value with its type: texts, numbers of 32 bits, and lists of one kind."""
    match found:
        case bool():
            return struct.pack("<I?", 7, found)
        case int():
            return struct.pack("<II", 4, found) if 0 <= found < 2**32 else struct.pack("<Iq", 11, found)
        case float():
            return struct.pack("<If", 6, found)
        case str():
            return struct.pack("<I", 8) + text(found)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(found)) + b"".join(map(text, found))
        case [bool(), *_]:
            return struct.pack(f"<IIQ{len(found)}?", 9, 7, len(found), *found)
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(found)}i", 9, 5, len(found), *found)
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(found)}f", 9, 6, len(found), *found)
    raise AssertionError(found)


def tensor_entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def padded(data: bytes, alignment: int = ALIGNMENT) -> bytes:
    return data + bytes(-len(data) % alignment)


def start(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], alignment: int = ALIGNMENT) -> Path:
    entries, data, offset = b"", [], 0
    for name, (shape, kind, content) in tensors.items():
        entries += tensor_entry(name, shape, kind, offset)
        data.append(padded(content, alignment))
        offset += len(data[-1])
    keys = b"".join(text(key) + value(found) for key, found in metadata.items())
    path.write_bytes(b"".join([padded(start(len(tensors), len(metadata)) + keys + entries, alignment), *data]))
    return path


# -- a checkpoint ------------------------------------------------------------------------------------------------------

_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    **gguf_families.ARCHITECTURES,
}
_WINDOWED = ("exaone4", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "mistral", "olmo3", "phi3", "starcoder2")
_WITH_HEAD_SIZE = ("llama", "mistral", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "seed_oss",
                   *gguf_families.WITH_HEAD_SIZE)  # fmt: skip
_PERMUTED = ("llama", "smollm3", "granite", *gguf_families.PERMUTED)
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias", "lm_head.weight": "output.weight",
    **gguf_families.OUTSIDE,
}  # fmt: skip
_IN_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    **gguf_families.IN_LAYER,
}  # fmt: skip
_NEVER_QUANTIZED = ("ffn_gate_inp", "ssm_a", "ssm_d", "ssm_norm", "ssm_conv1d", "shortconv.conv.", "exp_probs_b")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
_ALTERNATING = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?")
_EXPERT_PARTS = {
    "w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up",
}  # fmt: skip
_WITH_POST_NORMS = ("exaone4", "gemma2", "gemma3", "gpt-oss", "olmo2", "seed_oss", *gguf_families.WITH_POST_NORMS)
_POST_NORMS = {**_IN_LAYER, "post_attention_layernorm": "post_attention_norm"}


def architecture_of(config: Mapping[str, Any]) -> str:
    kind: str = config["model_type"]
    return _ARCHITECTURES.get(kind, kind)


def name_of(name: str, architecture: str) -> str:
    """The name in a GGUF file of a tensor of a checkpoint."""
    if name in _OUTSIDE or name.startswith("blk."):
        return _OUTSIDE.get(name, name)
    if name.endswith(".sinks"):
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    _, _, layer, *module, kind = name.split(".")
    names = _POST_NORMS if architecture in _WITH_POST_NORMS else _IN_LAYER
    if architecture == "glm4":
        names = _IN_LAYER
    whole = ".".join((*module, kind))
    return f"blk.{layer}.{names[whole] if whole in names else names['.'.join(module)] + '.' + kind}"


def convert(folder: Path, path: Path, pack: Callable[[str], Pack] = lambda _: as_f32) -> Path:
    """Write the checkpoint in `folder` as a GGUF file. `pack` gives the type of a matrix by its name in the file."""
    return write(path, *content_of(folder, pack))


def convert_in_parts(folder: Path, name: str, count: int) -> list[Path]:
    """Like `convert`, into `count` files. As llama.cpp's splitter does, only the first has the model's metadata."""
    metadata, tensors = content_of(folder, lambda _: as_f32)
    files = []
    for number in range(count):
        own = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        part = dict(list(tensors.items())[number::count])
        path = folder / f"{name}-{number + 1:05d}-of-{count:05d}.gguf"
        files.append(write(path, {**(metadata if number == 0 else {}), **own}, part))
    return files


def content_of(folder: Path, pack: Callable[[str], Pack]) -> tuple[dict[str, Any], dict[str, Stored]]:
    """(metadata, tensors) of a GGUF file of the checkpoint in `folder`."""
    config = json.loads((folder / "config.json").read_text())
    architecture = architecture_of(config)
    tensors: dict[str, Stored] = {}
    for name, values in with_stacked_experts(gguf_families.in_order(load_all(folder), config)).items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        named = name_of(name, architecture)
        converted = _converted(name, values.to(torch.float32), config, architecture)
        is_matrix = values.dim() > 1 and not any(part in named for part in _NEVER_QUANTIZED)
        _, kind, content = (pack(named) if is_matrix else as_f32)(converted.flatten(0, -2) if is_matrix else converted)
        tensors[named] = Stored(tuple(converted.shape), kind, content)
    metadata = {**metadata_of(config), **(tokenizer_metadata(folder) if (folder / "tokenizer.json").exists() else {})}
    return metadata, {**factors_of(config), **tensors}


def with_stacked_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, with each part of a layer's experts as one of three axes, by its name in a GGUF file."""
    found, parts = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    for name, values in tensors.items():
        match, alternating = _EXPERT.fullmatch(name), _ALTERNATING.fullmatch(name)
        if alternating is not None:
            # Weights are [experts, inputs, outputs], biases [experts, outputs]; outputs of gate and up alternate.
            kind, rows = ("bias", values) if alternating[3] else ("weight", values.transpose(1, 2))
            both = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if alternating[2] == "gate_up" else {"down": rows}
            found |= {f"blk.{alternating[1]}.ffn_{part}_exps.{kind}": own for part, own in both.items()}
        elif match is None:
            found[name] = values
        else:
            stacked = f"blk.{match[1]}.ffn_{_EXPERT_PARTS[match[3]]}_exps.weight"
            parts.setdefault(stacked, {})[int(match[2])] = values
    return found | {name: torch.stack([own[e] for e in sorted(own)]) for name, own in parts.items()}


def load_all(folder: Path) -> dict[str, Tensor]:
    return {name: values for file in sorted(folder.glob("*.safetensors")) for name, values in load_file(file).items()}


def _converted(name: str, values: Tensor, config: Mapping[str, Any], architecture: str) -> Tensor:
    values = gguf_families.converted(name, values, config, architecture)
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return values + 1
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if architecture not in _PERMUTED or heads is None:
        return values
    return values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of the model, without that of its tokenizer."""
    architecture, kind = architecture_of(config), config["model_type"]
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    found: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": float(full.get("rope_theta", 1e4)),
    }
    if "rms_norm_eps" in config:
        found["attention.layer_norm_rms_epsilon"] = config["rms_norm_eps"]
    if "norm_epsilon" in config:
        found["attention.layer_norm_epsilon"] = config["norm_epsilon"]
    if kind in ("llama", "mistral", "mixtral", "granite", "smollm3"):
        found |= {"vocab_size": config["vocab_size"], "rope.dimension_count": head_dim}
    if kind == "phi3":
        found["rope.dimension_count"] = int(full.get("partial_rotary_factor", 1.0) * head_dim)
    if kind in _WITH_HEAD_SIZE:
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if config.get("sliding_window") and kind in _WINDOWED:
        found["attention.sliding_window"] = config["sliding_window"]
    if kind == "olmo3":
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    if "num_experts_per_tok" in config:
        num_experts = config.get("num_local_experts", config.get("num_experts"))
        found |= {"expert_count": num_experts, "expert_used_count": config["num_experts_per_tok"]}
    if "moe_intermediate_size" in config:
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if kind == "gpt_oss":
        found["expert_feed_forward_length"] = config["intermediate_size"]
    found |= _caps_and_scales(config, kind) | _rope_scaling(config, full) | gguf_families.keys_of(config)
    stated = {f"{architecture}.{key}": item for key, item in found.items() if item is not None}
    return {"general.architecture": architecture, **stated}


def _caps_and_scales(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    names = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
    if kind in ("granite", "granitemoehybrid"):
        names = {
            "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
        }  # fmt: skip
    return {key: config[name] for name, key in names.items() if config.get(name) is not None}


def _rope_scaling(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    original = rope.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    match rope.get("rope_type"):
        case "linear":
            return {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
        case "yarn":
            return {
                "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
                "rope.scaling.original_context_length": original,
                "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]),
                "rope.scaling.yarn_beta_slow": float(rope["beta_slow"]),
            }  # fmt: skip
        case "longrope":
            scale = config["max_position_embeddings"] / original
            attention = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
            return {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": attention}
    return {}


def factors_of(config: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors of rope factors."""
    rope = config.get("rope_parameters") or {}
    if config["model_type"] == "gemma4_text":
        return {"rope_freqs.weight": as_f32(torch.tensor(gguf_families.gemma4_divisors(config)))}
    match rope.get("rope_type"):
        case "longrope":
            lists = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
            return {name: as_f32(torch.tensor(rope[key])) for name, key in lists.items()}
        case "llama3":
            head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            return {"rope_freqs.weight": as_f32(torch.tensor(_llama3_factors(rope, head_dim)))}
    return {}


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> list[float]:
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for frequency in 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)):
        length = 2 * math.pi / frequency
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(float(1 / ((1 - smooth) / rope["factor"] + smooth)))
    return factors


def tokenizer_metadata(folder: Path, pre: str = "smollm") -> dict[str, Any]:
    """The metadata of a byte-level tokenizer. `pre`: llama.cpp's name of the way in which it cuts texts into words."""
    state = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokens = [f"[PAD{index}]" for index in range(rows)]
    types = [_UNUSED] * rows
    for token, index in state["model"]["vocab"].items():
        tokens[index], types[index] = token, _NORMAL
    for token in state["added_tokens"]:
        kind = _CONTROL if token["special"] else _USER_DEFINED
        tokens[token["id"]], types[token["id"]] = token["content"], kind
    found: dict[str, Any] = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types,
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]],
        "add_bos_token": False,
    }  # fmt: skip
    for name, key in (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"), ("pad_token", "padding_token_id")):
        if config.get(name):
            found[key] = tokens.index(config[name])
    template = folder / "chat_template.jinja"
    chat = template.read_text() if template.exists() else config.get("chat_template")
    extra = {"tokenizer.chat_template": chat} if chat else {}
    return {**{f"tokenizer.ggml.{key}": item for key, item in found.items()}, **extra}
