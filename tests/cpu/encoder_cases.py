"""Writes tiny random encoders of any family with transformers. To add a family, add a row of `CASES`.

Numbers differ from the families' defaults, so whatever a family does differently shows in its `broken` row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.arch.encoder_registry import describe_encoder
from inferd.engine.models.encoder import Encoder
from inferd.engine.models.loader import load
from inferd.engine.quant.recipe import UNQUANTIZED, Recipe
from tests.cpu.checkpoints import read_config

VOCAB = 211
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "id2label": {"0": "no", "1": "yes", "2": "perhaps"},
}

DISTIL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "dim": 64,
    "hidden_dim": 128,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 160,
    "id2label": SMALL["id2label"],
}
MODERN: dict[str, Any] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
}

DEBERTA: dict[str, Any] = {
    "relative_attention": True,
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 24,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}

EURO: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}


@dataclass(frozen=True)
class EncoderCase:
    """One shape of one family. `broken` holds config fields; changing one must change the hidden states."""

    name: str
    family: str
    """Beginning of the names of transformers' classes."""
    config: dict[str, Any]
    broken: dict[str, Any]
    has_token_types: bool = True
    small: dict[str, Any] = field(default_factory=lambda: SMALL)

    def save(self, directory: Path, dtype: torch.dtype = torch.float32, end: str = "Model") -> None:
        """Write a checkpoint of the class with this end of its name. Its weights, norms and biases are random, so that
        every option matters."""
        config = getattr(transformers, f"{self.family}Config")(**{**self.small, **self.config})
        torch.manual_seed(1)
        model: Any = getattr(transformers, f"{self.family}{end}")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    is_factor = "norm" in name.lower() and name.endswith(".weight")
                    parameter.normal_(1.0 if is_factor else 0.0, 0.2)
                else:
                    parameter.normal_(0.0, 0.5 if "embeddings" in name or "bias" in name else 0.15)
        model.to(dtype).save_pretrained(directory)


CASES = (
    EncoderCase("bert", "Bert", {"layer_norm_eps": 1e-3}, {"hidden_act": "gelu_new"}),
    EncoderCase(
        "bert, tanh form, one type", "Bert", {"hidden_act": "gelu_new", "type_vocab_size": 1}, {"hidden_act": "gelu"}
    ),
    EncoderCase(
        "bert, wide",
        "Bert",
        {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1},
        {"num_attention_heads": 8},
    ),
    EncoderCase("roberta", "Roberta", {"pad_token_id": 1}, {"pad_token_id": 2}),
    EncoderCase("xlm-roberta", "XLMRoberta", {"pad_token_id": 3}, {"pad_token_id": 2}),
    EncoderCase("modernbert", "ModernBert", MODERN | {"local_attention": 40}, {"local_attention": 42}, False),
    EncoderCase(
        "modernbert, biases, mean",
        "ModernBert",
        MODERN
        | {
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
            "local_attention": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        False,
    ),
    EncoderCase(
        "modernbert, silu", "ModernBert", MODERN | {"hidden_activation": "silu"}, {"hidden_activation": "gelu"}, False
    ),
    EncoderCase("nomic bert", "NomicBert", {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    EncoderCase(
        "eurobert", "EuroBert", EURO | {"num_key_value_heads": 2, "rms_norm_eps": 1e-3}, {"rms_norm_eps": 1e-2}, False
    ),
    EncoderCase(
        "eurobert, biases, mean",
        "EuroBert",
        EURO | {"attention_bias": True, "mlp_bias": True, "classifier_pooling": "mean"},
        {"rope_theta": 5e3, "rope_parameters": None},
        False,
    ),
    EncoderCase(
        "jina v3",
        "JinaEmbeddingsV3",
        {"type_vocab_size": 2, "layer_norm_eps": 1e-5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    EncoderCase("mpnet", "MPNet", {"pad_token_id": 1}, {"layer_norm_eps": 1e-3}, False),
    EncoderCase("distilbert", "DistilBert", {}, {"activation": "gelu_new"}, False, DISTIL),
    EncoderCase("deberta", "DebertaV2", DEBERTA, {"position_buckets": 24, "max_relative_positions": 60}, False),
    EncoderCase(
        "deberta, types, positions, no buckets",
        "DebertaV2",
        DEBERTA
        | {
            "position_buckets": -1,
            "type_vocab_size": 2,
            "position_biased_input": True,
            "norm_rel_ebd": "none",
            "max_relative_positions": 50,
        },
        {"pos_att_type": ["c2p", "p2c"], "hidden_act": "gelu_new"},
    ),
    EncoderCase("electra", "Electra", {"embedding_size": 64}, {"hidden_act": "gelu_new"}),
    EncoderCase("electra, narrow embedding", "Electra", {"embedding_size": 32}, {"hidden_act": "gelu_new"}),
    EncoderCase(
        "albert",
        "Albert",
        {"embedding_size": 32, "hidden_act": "gelu_new", "num_hidden_layers": 3},
        {"hidden_act": "gelu"},
    ),
    EncoderCase(
        "albert, two groups",
        "Albert",
        {"embedding_size": 64, "num_hidden_layers": 4, "num_hidden_groups": 2},
        {"hidden_act": "gelu"},
    ),
    EncoderCase("gte", "Gte", {"type_vocab_size": 2}, {"rope_parameters": None, "rope_theta": 1e4}),
    EncoderCase("gte without types", "Gte", {"type_vocab_size": 0}, {"hidden_act": "gelu_new"}, False),
)


def load_transformers(directory: Path, dtype: torch.dtype) -> Any:
    """The checkpoint in the class of transformers that its config names. It is loaded and not cast."""
    (architecture,) = read_config(directory)["architectures"]
    model: Any = getattr(transformers, architecture).from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


def load_encoder(
    directory: Path, dtype: torch.dtype, changes: dict[str, Any] | None = None, recipe: Recipe = UNQUANTIZED
) -> Encoder:
    """The checkpoint in our encoder, with the fields of its config in `changes` replaced."""
    arch = describe_encoder(read_config(directory) | (changes or {}))
    encoder = Encoder(arch, dtype, "cpu", recipe=recipe)
    load(encoder, Checkpoint.read(directory).tensors_of(arch))
    return encoder
