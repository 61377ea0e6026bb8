"""Every scaling's frequencies have the bits of transformers', and so have the tables made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from inferd.engine.arch.registry import describe
from inferd.engine.arch.rotary import Rope
from inferd.engine.layers.rotary import cos_sin_table, inverse_frequencies
from inferd.kernels.ops.rope import rope_and_cache

HEAD_DIM, ORIGINAL, STATED = 64, 512, 2048
SHORT = [1.0 + 0.02 * index for index in range(HEAD_DIM // 2)]
LONG = [1.0 + 0.9 * index for index in range(HEAD_DIM // 2)]
SIZES = {
    "hidden_size": 4 * HEAD_DIM,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 10,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": STATED,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}


def of_llama(parameters: dict[str, Any]) -> tuple[Rope, Any]:
    """(our rope, transformers' module) of a Llama with these `rope_parameters`."""
    rope_parameters = {"rope_theta": 20000.0, **parameters}
    ours = describe({**SIZES, "architectures": ["LlamaForCausalLM"], "rope_parameters": rope_parameters}).ropes[0]
    config = LlamaConfig(**SIZES, rope_parameters=dict(rope_parameters))  # type: ignore[arg-type]
    assert ours is not None
    return ours, LlamaRotaryEmbedding(config)


def of_phi3(parameters: dict[str, Any]) -> tuple[Rope, Any]:
    """The same of a Phi-3, which rotates a part of each head."""
    fields = {"rope_parameters": {"rope_theta": 20000.0, **parameters}, "original_max_position_embeddings": ORIGINAL}
    ours = describe({**SIZES, "architectures": ["Phi3ForCausalLM"], **fields}).ropes[0]
    config = Phi3Config(**SIZES, pad_token_id=0, **fields)  # type: ignore[arg-type]
    assert ours is not None
    return ours, Phi3RotaryEmbedding(config)


def tables(module: Any, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' (frequencies, cosines and sines) for a sequence of `num_positions`."""
    cos, sin = module(torch.zeros(1), torch.arange(num_positions)[None])
    half = cos.shape[-1] // 2
    return module.inv_freq, torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1)


@pytest.mark.parametrize("num_positions", [ORIGINAL, STATED, 4096])
@pytest.mark.parametrize(
    ("parameters", "make"),
    [
        ({"rope_type": "default"}, of_llama),
        ({"rope_type": "linear", "factor": 4.0}, of_llama),
        ({"rope_type": "dynamic", "factor": 2.0}, of_llama),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": ORIGINAL}, of_llama),
        (YARN, of_llama),
        (YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 0.7}, of_llama),
        (YARN | {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.4}, of_llama),
        (LONGROPE, of_phi3),
        (LONGROPE | {"attention_factor": 1.5}, of_phi3),
        (LONGROPE | {"partial_rotary_factor": 0.5, "short_factor": SHORT[:16], "long_factor": LONG[:16]}, of_phi3),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, of_phi3),
    ],
)  # fmt: skip
def test_scalings_are_those_of_transformers(parameters: dict[str, Any], make: Any, num_positions: int) -> None:
    rope, module = make(parameters)
    frequencies, table = tables(module, num_positions)
    assert torch.equal(inverse_frequencies(rope, num_positions), frequencies)
    ours = cos_sin_table(rope, num_positions, torch.device("cpu"))
    assert ours.shape == table.shape == (num_positions, rope.rotary_dim)
    assert torch.allclose(ours, table, rtol=0, atol=1e-6)


def test_lengths_matter_where_they_should() -> None:
    for parameters, make in (({"rope_type": "dynamic", "factor": 2.0}, of_llama), (LONGROPE, of_phi3)):
        rope, _ = make(parameters)
        assert not torch.equal(inverse_frequencies(rope, ORIGINAL), inverse_frequencies(rope, 4096))


class _Made(TorchDispatchMode):
    """The bytes of each tensor that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_bytes.append(result.untyped_storage().nbytes())
        return result


def test_a_long_table_is_made_without_long_tensors_beside_it() -> None:
    """The allocator would keep them, and the memory plan would miss them."""
    rope, _ = of_llama({"rope_type": "default"})
    num_positions = 9_000
    made = _Made()
    with made:
        table = cos_sin_table(rope, num_positions, torch.device("cpu"))
    beside = [num_bytes for num_bytes in made.num_bytes if num_bytes != table.nbytes]
    assert table.nbytes in made.num_bytes and max(beside) <= table.nbytes // 8
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, num_positions)
    assert torch.equal(table, torch.cat([angles.cos(), angles.sin()], dim=1))


def test_a_layer_without_rope_changes_nothing() -> None:
    q, k, v = (torch.randn(5, 2, 16) for _ in range(3))
    kv = torch.full((1, 2, 2, 8, 16), float("nan"))
    positions = torch.arange(3, 8)
    table = cos_sin_table(None, 8, torch.device("cpu"))
    assert torch.equal(rope_and_cache(q, k, v, table, positions, positions, kv), q)
    assert torch.equal(kv[0, 0, :, 3:], k.transpose(0, 1))
