"""The model whose formats are measured is the given one: in another order, and with zeros around its matrices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.quality.measure import Model
from benchmarks.quality.weights import EMBEDDING, Weights, shuffled, widened
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.arch.registry import describe, weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 48,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 101, "max_position_embeddings": 64, "rms_norm_eps": 1e-2, "tie_word_embeddings": True,
    "dtype": "float32",
}  # fmt: skip


def random_weights() -> Weights:
    torch.manual_seed(0)
    return Weights(
        CONFIG, {source.tensor: torch.randn(source.shape) / 4 for source in weights(describe(CONFIG)).sources}
    )


def logits(given: Weights, directory: Path) -> Tensor:
    model = Model.load(Checkpoint.read(given.save(directory)), torch.float32)
    return model.decoder.logits(model.hidden(range(5, 95, 6)))


@pytest.mark.parametrize(
    "change", [shuffled, lambda given: widened(given, 32), lambda given: widened(shuffled(given), 32)]
)
def test_another_order_and_more_zeros_are_the_same_model(change: Callable[[Weights], Weights], tmp_path: Path) -> None:
    given = random_weights()
    expected, changed = logits(given, tmp_path / "given"), change(given)
    assert torch.allclose(logits(changed, tmp_path / "changed"), expected, atol=1e-4)
    assert not torch.equal(changed.tensors[EMBEDDING][:, :48], given.tensors[EMBEDDING]) or change is not shuffled
    wrong = {name: tensor.flip(1) if "o_proj" in name else tensor for name, tensor in changed.tensors.items()}
    assert not torch.allclose(logits(Weights(changed.config, wrong), tmp_path / "wrong"), expected, atol=1e-2)


def test_every_matrix_gets_a_multiple_of_the_block_size() -> None:
    wide = widened(random_weights(), 32)
    assert {weight.shape[1] for weight in wide.matrices.values()} == {64, 96}
