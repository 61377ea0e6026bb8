"""Draft heads of tests: their checkpoints, one that is always right, and EAGLE-3 and MTP layers in plain PyTorch.

The plain implementations are written without the engine's code: they are the oracles of the drafts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.modeling_layers import MtpModel

EPS = 1e-6
SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "bos_token_id": None,
    "eos_token_id": None,
}
NUM_LAYERS = 7
DEFAULT_READ = (2, 3, 4)
"""Layers that a head reads of a model of `NUM_LAYERS` if its config does not say."""


def save_served(path: Path) -> Path:
    """A random model whose hidden states differ much from layer to layer."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=NUM_LAYERS))
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)
    model.save_pretrained(path)
    return path


def _random(num_tokens: int, num_read: int) -> dict[str, Tensor]:
    """A head's tensors, without prefixes."""
    size, wide, kv = SHAPE["hidden_size"], SHAPE["intermediate_size"], 32
    shapes = {
        "fc.weight": (size, num_read * size),
        "norm.weight": (size,),
        "lm_head.weight": (num_tokens, size),
        "layer.hidden_norm.weight": (size,),
        "layer.input_layernorm.weight": (size,),
        "layer.post_attention_layernorm.weight": (size,),
        "layer.self_attn.q_proj.weight": (size, 2 * size),
        "layer.self_attn.k_proj.weight": (kv, 2 * size),
        "layer.self_attn.v_proj.weight": (kv, 2 * size),
        "layer.self_attn.o_proj.weight": (size, size),
        "layer.mlp.gate_proj.weight": (wide, size),
        "layer.mlp.up_proj.weight": (wide, size),
        "layer.mlp.down_proj.weight": (size, wide),
    }
    made = {}
    for name, shape in shapes.items():
        spread = torch.randn(shape) * (0.3 if len(shape) == 1 else 2.0 * shape[-1] ** -0.5)
        made[name] = spread + 1.0 if len(shape) == 1 else spread
    return made


def save_head(path: Path, tensors: dict[str, Tensor], config: dict[str, Any], layer: str = "midlayer.") -> Path:
    path.mkdir(exist_ok=True)
    named = {name.replace("layer.", layer, 1) if name.startswith("layer.") else name: t for name, t in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in named.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def original(path: Path, **changes: Any) -> Path:
    """A random head in the format of the paper's authors: fewer tokens than the served model, no embedding."""
    torch.manual_seed(9)
    tensors = _random(200, 3)
    chosen = torch.randperm(SHAPE["vocab_size"])[:200].sort().values
    tensors["d2t"] = chosen - torch.arange(200)
    tensors["t2d"] = torch.zeros(SHAPE["vocab_size"], dtype=torch.bool).index_fill_(0, chosen, True)
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 200, "torch_dtype": "float32"}
    return save_head(path, tensors, {**SHAPE, **config, "num_hidden_layers": 1, "hidden_act": "silu", **changes})


def speculators(path: Path, read: Sequence[int] = (0, 4, 6), **changes: Any) -> Path:
    """A random head in the format of speculators: layers by name, an embedding of its own, all tokens."""
    torch.manual_seed(10)
    tensors = _random(SHAPE["vocab_size"], len(read))
    tensors["embed_tokens.weight"] = torch.randn(SHAPE["vocab_size"], SHAPE["hidden_size"])
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": SHAPE["vocab_size"],
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": list(read),
        "torch_dtype": "float32",
        "transformer_layer_config": {**SHAPE, "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu"},
        **changes,
    }
    return save_head(path, tensors, config, "layers.0.")


@dataclass
class PlainHead:
    """EAGLE-3 in plain PyTorch: it computes everything anew for each draft."""

    tensors: dict[str, Tensor]
    served: LlamaForCausalLM
    read: Sequence[int]
    layer: str
    norms_residual: bool

    @classmethod
    def load(cls, path: Path, served_path: Path, read: Sequence[int]) -> PlainHead:
        config = json.loads((path / "config.json").read_text())
        layer = "layers.0." if "speculators_model_type" in config else "midlayer."
        served = LlamaForCausalLM.from_pretrained(served_path, dtype=torch.float32)
        tensors = load_file(path / "model.safetensors")
        return cls(tensors, served, read, layer, config.get("norm_before_residual", False))

    def drafts(self, ids: Sequence[int], count: int) -> list[int]:
        """The likeliest `count` tokens behind `ids`, whose last token the served model has not computed."""
        known = torch.tensor([list(ids)])
        hidden = self.served(known[:, :-1], output_hidden_states=True).hidden_states
        states = torch.cat([hidden[number][0] for number in self.read], 1) @ self.tensors["fc.weight"].T
        following = list(ids[1:])
        made = []
        for _ in range(count):
            last = self._layer(states, torch.tensor(following))[-1]
            logits = _norm(last, self.tensors["norm.weight"]) @ self.tensors["lm_head.weight"].T
            best = int(logits.argmax())
            made.append(best + int(self.tensors["d2t"][best]) if "d2t" in self.tensors else best)
            states = torch.cat([states, last[None]])
            following.append(made[-1])
        return made

    def _layer(self, states: Tensor, token_ids: Tensor) -> Tensor:
        """States [T, hidden] behind T positions."""

        def own(name: str) -> Tensor:
            return self.tensors[self.layer + name + ".weight"]

        table = self.tensors.get("embed_tokens.weight", self.served.model.embed_tokens.weight)
        normed = _norm(states, own("hidden_norm"))
        x = torch.cat([_norm(table[token_ids], own("input_layernorm")), normed], 1)
        stream = normed if self.norms_residual else states
        q, k, v = (x @ own(f"self_attn.{name}_proj").T for name in "qkv")
        stream = stream + _attend(q, k, v) @ own("self_attn.o_proj").T
        x = _norm(stream, own("post_attention_layernorm"))
        gate, up = (x @ own(f"mlp.{name}_proj").T for name in ("gate", "up"))
        return stream + (torch.nn.functional.silu(gate) * up) @ own("mlp.down_proj").T


MTP = "model.mtp_layers.0."


def save_mimo(path: Path) -> Path:
    """A random model of MiMo's family with an MTP layer."""
    torch.manual_seed(12)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_hidden_layers=2, use_sliding_window=False))
    for parameter in model.parameters():
        # Norms differ from one, so that a state before a norm differs from that behind it.
        parameter.data.mul_(4).add_(0.0 if parameter.dim() > 1 else 0.5 * torch.randn(parameter.shape))
    model.save_pretrained(path)
    size, tensors = SHAPE["hidden_size"], load_file(path / "model.safetensors")
    layer = {name.removeprefix("model.layers.0."): tensor for name, tensor in tensors.items() if ".layers.0." in name}
    tensors |= {MTP + name: torch.randn_like(tensor) * (0.3 if tensor.dim() == 1 else 0.25) + ("norm" in name)
                for name, tensor in layer.items()}  # fmt: skip
    tensors[f"{MTP}input_proj.weight"] = torch.randn(size, 2 * size) * 0.2
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{MTP}{name}.weight"] = 1.0 + 0.3 * torch.randn(size)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return path


@dataclass
class PlainMTPLayer:
    """MiMo's MTP layer in plain PyTorch: it computes everything anew for each draft."""

    tensors: dict[str, Tensor]
    served: Qwen2ForCausalLM

    @classmethod
    def load(cls, path: Path) -> PlainMTPLayer:
        """The served model itself is Qwen2's."""
        tensors = load_file(path / "model.safetensors")
        config = Qwen2Config(**SHAPE, num_hidden_layers=2, use_sliding_window=False)
        served = Qwen2ForCausalLM(config)
        served.load_state_dict({name: tensor for name, tensor in tensors.items() if not name.startswith(MTP)})
        return cls({name.removeprefix(MTP): t for name, t in tensors.items() if name.startswith(MTP)}, served.eval())

    def drafts(self, ids: Sequence[int], count: int) -> list[int]:
        """The likeliest `count` tokens behind `ids`, whose last token the served model has not computed."""
        states = self.served.model(torch.tensor([list(ids[:-1])])).last_hidden_state[0]
        following, made = list(ids[1:]), list[int]()
        for _ in range(count):
            last = self._layer(states, torch.tensor(following))[-1]
            made.append(int(self.served.lm_head(last).argmax()))
            states = torch.cat([states, last[None]])
            following.append(made[-1])
        return made

    def _layer(self, states: Tensor, token_ids: Tensor) -> Tensor:
        own = self.tensors
        embedded = _norm(self.served.model.embed_tokens.weight[token_ids], own["token_layernorm.weight"])
        joined = torch.cat([_norm(states, own["hidden_layernorm.weight"]), embedded], 1)
        stream = joined @ own["input_proj.weight"].T
        x = _norm(stream, own["input_layernorm.weight"])
        q, k, v = (x @ own[f"self_attn.{name}_proj.weight"].T + own[f"self_attn.{name}_proj.bias"] for name in "qkv")
        stream = stream + _attend(q, k, v) @ own["self_attn.o_proj.weight"].T
        x = _norm(stream, own["post_attention_layernorm.weight"])
        gate, up = (x @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        stream = stream + (torch.nn.functional.silu(gate) * up) @ own["mlp.down_proj.weight"].T
        return _norm(stream, own["final_layernorm.weight"])


GLM: dict[str, Any] = {
    **SHAPE,
    "num_hidden_layers": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "attention_bias": True,
    "pad_token_id": None,
}


def save_glm(path: Path) -> Path:
    """A random model of GLM-4.5's family with an MTP layer, which also has copies of embedding and head."""
    torch.manual_seed(12)
    served = Glm4MoeForCausalLM(Glm4MoeConfig(**GLM))
    layer = MtpModel(served, num_mtp_layers=1).layers[0]
    for parameter in (*served.parameters(), *layer.parameters()):
        is_matrix = parameter.dim() > 1
        parameter.data.normal_(0.0 if is_matrix else 1.0, 2.0 * parameter.shape[-1] ** -0.5 if is_matrix else 0.3)
    served.save_pretrained(path)
    own = Glm4MoeForCausalLM(Glm4MoeConfig(**GLM))
    own.model.layers[1] = layer.mtp_block
    own.save_pretrained(path / "layer")
    tensors, stored = load_file(path / "model.safetensors"), load_file(path / "layer" / "model.safetensors")
    behind = "model.layers.2."
    tensors |= {name.replace("model.layers.1.", behind): t for name, t in stored.items() if "model.layers.1." in name}
    for name in ("enorm", "hnorm", "eh_proj", "post_norm"):
        stored_name = "shared_head.norm" if name == "post_norm" else name
        tensors[f"{behind}{stored_name}.weight"] = getattr(layer, name).weight.data.clone()
    tensors[f"{behind}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{behind}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    return path


@dataclass
class PlainGlmLayer:
    """The MTP layer of GLM-4.5 in transformers: it computes everything anew for each draft."""

    served: Glm4MoeForCausalLM
    layer: MtpModel

    @classmethod
    def load(cls, path: Path) -> PlainGlmLayer:
        served = Glm4MoeForCausalLM.from_pretrained(path, attn_implementation="eager", experts_implementation="eager")
        served._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]
        return cls(served.eval(), MtpModel.from_pretrained(served).eval())

    def drafts(self, ids: Sequence[int], count: int) -> list[int]:
        """The likeliest `count` tokens behind `ids`, whose last token the served model has not computed."""
        states = self.served.model(torch.tensor([list(ids[:-1])])).last_hidden_state
        following, made = list(ids[1:]), list[int]()
        for _ in range(count):
            positions = torch.arange(len(following))[None]
            last = self.layer.forward_layer(0, states, positions, None, input_ids=torch.tensor([following]))[:, -1:]
            made.append(int(self.served.lm_head(last).argmax()))
            states = torch.cat([states, last], 1)
            following.append(made[-1])
        return made


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    dim, length = SHAPE["head_dim"], q.shape[0]
    q, k, v = (part.view(length, -1, dim).transpose(0, 1) for part in (q, k, v))
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos(), angles.sin()

    def rotated(part: Tensor) -> Tensor:
        first, second = part.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    k, v = (part.repeat_interleave(q.shape[0] // part.shape[0], 0) for part in (k, v))
    scores = rotated(q) @ rotated(k).transpose(1, 2) * dim**-0.5
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


RIGHT_VOCAB = 48


def save_counter(path: Path) -> tuple[Path, Path]:
    """(a model that answers each token by one that depends on it alone, a head that knows that).

    No layer of the model adds anything, and each token has a direction of its own. The head's attention sees its own
    position alone: all queries and keys are equal, so the nearest key fits best. It replaces the state there by the
    newest token.
    """
    size = SHAPE["hidden_size"]
    torch.manual_seed(3)
    following = torch.randperm(RIGHT_VOCAB)
    shape = {
        **SHAPE,
        "vocab_size": RIGHT_VOCAB,
        "num_attention_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
    }
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=NUM_LAYERS))
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
    table, head = torch.zeros(RIGHT_VOCAB, size), torch.zeros(RIGHT_VOCAB, size)
    table[torch.arange(RIGHT_VOCAB), torch.arange(RIGHT_VOCAB)] = 1.0
    head[following, torch.arange(RIGHT_VOCAB)] = 5.0
    table[:, -1] = 1.0  # the same in all tokens
    model.model.embed_tokens.weight.data.copy_(table)
    model.lm_head.weight.data.copy_(head)
    model.save_pretrained(path / "served")
    tensors = {name: torch.zeros_like(tensor) for name, tensor in _random(RIGHT_VOCAB, 3).items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] += 1.0
    for name, width in (("q", size), ("k", size), ("v", size)):
        tensors[f"layer.self_attn.{name}_proj.weight"] = torch.zeros(width, 2 * size)
    tensors["layer.self_attn.q_proj.weight"][:, size - 1] = 10.0
    tensors["layer.self_attn.k_proj.weight"][:, size - 1] = 10.0
    tensors["layer.self_attn.v_proj.weight"] = torch.cat([torch.eye(size), -torch.eye(size)], 1)
    tensors["layer.self_attn.o_proj.weight"] = torch.eye(size)
    tensors["lm_head.weight"] = head
    config = {"architectures": ["LlamaForCausalLMEagle3"], "torch_dtype": "float32", "hidden_act": "silu"}
    made = save_head(path / "head", tensors, {**shape, **config, "num_hidden_layers": 1})
    return path / "served", made
