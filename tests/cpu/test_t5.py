"""T5's encoder, which has no classifier: hidden states are as near to fp64 as those of transformers, and a text's bits
are its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from inferd.engine.quant.recipe import RECIPES
from tests.cpu.encoder_cases import VOCAB, load_encoder, load_transformers
from tests.cpu.test_encoders import LARGEST, LENGTHS, LOSSES, RATIO, STARTS, hidden_by_transformers, rms

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 3, "num_heads": 4,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "relu": {"feed_forward_proj": "relu", "layer_norm_epsilon": 1e-3},
    "gated, wide heads": {"feed_forward_proj": "gated-gelu", "d_kv": 32, "relative_attention_num_buckets": 16,
                          "relative_attention_max_distance": 50},
}  # fmt: skip
BROKEN = {"relu": {"layer_norm_epsilon": 1e-1}, "gated, wide heads": {"relative_attention_max_distance": 60}}


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def save(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """A checkpoint with random weights, and ids of texts."""
    torch.manual_seed(1)
    model = transformers.T5EncoderModel(transformers.T5Config(**SMALL | CASES[name]))
    for parameter_name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1
        # Scores are not scaled, so that large weights of queries would let each token see one other.
        deviation = {"relative_attention_bias": 0.5, "q": 0.02}.get(parameter_name.split(".")[-2], 0.1)
        torch.nn.init.normal_(parameter, 1.0 if is_norm else 0.0, 0.2 if is_norm else deviation)
    model.to(dtype).save_pretrained(directory)
    return torch.randint(4, VOCAB, (sum(LENGTHS),))


@pytest.mark.parametrize("dtype", RATIO)
def test_hidden_states_are_as_near_to_fp64_as_transformers_own(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    ids = save(name, tmp_path, dtype)
    ours = load_encoder(tmp_path, dtype).forward(ids, STARTS)
    theirs, exact = (
        hidden_by_transformers(load_transformers(tmp_path, one), ids, None) for one in (dtype, torch.float64)
    )
    allowed = RATIO[dtype] * rms(theirs - exact)
    assert rms(ours - exact) < allowed
    if dtype is torch.float32:
        assert float((ours - theirs).abs().max()) < LARGEST
        assert rms(load_encoder(tmp_path, dtype, BROKEN[name]).forward(ids, STARTS) - exact) > 100 * allowed


@pytest.mark.parametrize("quantization", ["none", *LOSSES])
def test_a_sequence_has_the_same_bits_whatever_it_is_packed_with(name: str, quantization: str, tmp_path: Path) -> None:
    ids = save(name, tmp_path)
    encoder = load_encoder(tmp_path, torch.float32, recipe=RECIPES[quantization])
    hidden = encoder.forward(ids, STARTS)
    for first, length in zip(STARTS.tolist(), LENGTHS, strict=False):
        starts = torch.tensor([0, length], dtype=torch.int32)
        alone = encoder.forward(ids[first : first + length], starts)
        assert torch.equal(alone, hidden[first : first + length])
    if quantization != "none":
        exact = load_encoder(tmp_path, torch.float32).forward(ids, STARTS)
        assert LOSSES[quantization] < float(torch.cosine_similarity(exact, hidden).mean()) < 1 - 1e-6
