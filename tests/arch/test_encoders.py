"""The `EncoderArch` of each family's published config, without fields that have their default, and the tensors that it
asks for."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.engine.arch.description import Activation, ArchError
from inferd.engine.arch.encoder import Classifier, EncoderArch, PositionTable
from inferd.engine.arch.encoder_registry import (
    describe_encoder,
    encoder_tensors_of,
    encoder_weights,
    is_encoder,
    known_encoders,
)
from inferd.engine.arch.registry import known_architectures

MINILM: dict[str, Any] = {
    "architectures": ["BertModel"], "hidden_act": "gelu", "hidden_size": 384, "intermediate_size": 1536,
    "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "num_attention_heads": 12, "num_hidden_layers": 6,
    "position_embedding_type": "absolute", "type_vocab_size": 2, "vocab_size": 30522,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "all-MiniLM-L6-v2": (MINILM, 22_565_376),  # without its pooler
    "bge-reranker-v2-m3": (
        {"architectures": ["XLMRobertaForSequenceClassification"], "bos_token_id": 0, "eos_token_id": 2,
         "hidden_act": "gelu", "hidden_size": 1024, "id2label": {"0": "LABEL_0"}, "intermediate_size": 4096,
         "label2id": {"LABEL_0": 0}, "layer_norm_eps": 1e-05, "max_position_embeddings": 8194,
         "num_attention_heads": 16, "num_hidden_layers": 24, "pad_token_id": 1,
         "position_embedding_type": "absolute", "torch_dtype": "float32", "type_vocab_size": 1, "vocab_size": 250002},
        567_755_777,
    ),
}  # fmt: skip


def described(name: str, **changes: Any) -> EncoderArch:
    return describe_encoder(PUBLISHED[name][0] | changes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_weights_is_the_published_one(name: str) -> None:
    config, num_weights = PUBLISHED[name]
    assert is_encoder(config)
    assert encoder_weights(describe_encoder(config)).num_elements == num_weights


def test_bert() -> None:
    arch = described("all-MiniLM-L6-v2")
    assert (arch.hidden_size, arch.num_layers, arch.num_heads, arch.head_dim) == (384, 6, 12, 32)
    assert (arch.positions, arch.max_positions, arch.num_token_types) == (PositionTable(512), 512, 2)
    assert (arch.activation, arch.norm_eps, arch.dtype) == (Activation.GELU_ERF, 1e-12, "float32")
    assert arch.classifier is None and not arch.has_gate and not arch.has_pre_norms and not arch.ropes


def test_xlm_roberta() -> None:
    arch = described("bge-reranker-v2-m3")
    assert (arch.positions, arch.max_positions) == (PositionTable(8194, first_row=2), 8192)
    assert arch.classifier == Classifier(num_labels=1) and arch.num_token_types == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_decoder": True}, "is_decoder must be false"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be one of absolute"),
        ({"hidden_act": "relu"}, "hidden_act must be one of gelu"),
        ({"num_attention_heads": 7}, "must be a multiple of num_attention_heads"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized checkpoint of an encoder is not supported"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures must be that of an encoder"),
        ({"architectures": []}, "architectures must be that of an encoder"),
        ({"num_hidden_layers": 20_000}, "num_hidden_layers must be at most"),
        ({"architectures": ["RobertaModel"], "pad_token_id": 512}, "max_position_embeddings must be a whole number"),
    ],
)
def test_other_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchError, match=message):
        described("all-MiniLM-L6-v2", **changes)


@pytest.mark.parametrize(
    ("changes", "num_labels"),
    [({}, 2), ({"num_labels": 5}, 5), ({"id2label": {"0": "a", "1": "b", "2": "c"}, "num_labels": 5}, 3)],
)
def test_labels_are_counted(changes: dict[str, Any], num_labels: int) -> None:
    arch = described("all-MiniLM-L6-v2", architectures=["BertForSequenceClassification"], **changes)
    assert arch.classifier is not None and arch.classifier.num_labels == num_labels
    shapes = {source.tensor: source.shape for source in encoder_weights(arch).sources}
    assert shapes["classifier.weight"] == (num_labels, 384) and shapes["pooler.dense.weight"] == (384, 384)


def stored(end: str, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a checkpoint."""
    config = MINILM | {"architectures": [f"Bert{end}"]}
    sources = encoder_weights(describe_encoder(config)).sources
    return {("" if name.startswith("classifier") else prefix) + name: shape
            for name, shape in ((source.tensor, source.shape) for source in sources)}  # fmt: skip


@pytest.mark.parametrize("end", ["Model", "ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("prefix", ["", "bert."])
def test_names_may_have_the_prefix_and_more_than_is_read(end: str, prefix: str) -> None:
    config = MINILM | {"architectures": [f"Bert{end}"]}
    others = {"embeddings.position_ids": (1, 512), "cls.predictions.bias": (30522,)}
    if end != "ForSequenceClassification":
        others[f"{prefix}pooler.dense.weight"] = (384, 384)
    weights = encoder_weights(describe_encoder(config))
    assert not weights.compare(encoder_tensors_of(config, stored(end, prefix) | others))
    missing = stored(end, prefix)
    del missing[f"{prefix}encoder.layer.3.attention.self.key.bias"]
    assert "1 missing: encoder.layer.3.attention.self.key.bias" in str(
        weights.compare(encoder_tensors_of(config, missing))
    )
    odd = weights.compare(encoder_tensors_of(config, stored(end, prefix) | {"encoder.layer.9.output.dense.bias": (1,)}))
    assert odd.unexpected == ("encoder.layer.9.output.dense.bias",)


def test_old_names_of_norms_are_known() -> None:
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): shape
           for name, shape in stored("Model").items()}  # fmt: skip
    assert old.keys() != stored("Model").keys() and encoder_tensors_of(MINILM, old) == stored("Model")


def test_a_tensor_that_is_stored_twice_is_refused() -> None:
    with pytest.raises(ArchError, match=r"stores embeddings\.LayerNorm\.bias twice"):
        encoder_tensors_of(MINILM, stored("Model") | {"bert.embeddings.LayerNorm.bias": (384,)})


def test_no_architecture_is_both() -> None:
    assert not set(known_encoders()) & set(known_architectures())
    assert not is_encoder({"architectures": ["LlamaForCausalLM"]}) and not is_encoder({})
