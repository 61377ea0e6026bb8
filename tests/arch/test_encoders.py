"""The `EncoderArch` of each family's published config, without fields that have their default, and the tensors that it
asks for."""

from __future__ import annotations

from typing import Any

import pytest

from inferd.engine.arch.description import Activation, ArchError
from inferd.engine.arch.encoder import (
    Classifier,
    Disentangled,
    EncoderArch,
    HeadActivation,
    Pooling,
    PositionTable,
    RelativeBias,
)
from inferd.engine.arch.encoder_registry import (
    describe_encoder,
    encoder_tensors_of,
    encoder_weights,
    is_encoder,
    known_encoders,
)
from inferd.engine.arch.registry import known_architectures
from inferd.engine.arch.rotary import LinearScaling, Rope

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
    "ModernBERT-base": (
        {"architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "bos_token_id": 50281,
         "classifier_activation": "gelu", "classifier_bias": False, "classifier_pooling": "mean",
         "decoder_bias": True, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
         "hidden_activation": "gelu", "hidden_size": 768, "intermediate_size": 1152, "layer_norm_eps": 1e-05,
         "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": False,
         "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12, "num_hidden_layers": 22,
         "pad_token_id": 50283, "position_embedding_type": "absolute", "torch_dtype": "float32",
         "vocab_size": 50368},
        149_014_272,  # without its head for masked tokens
    ),
    "nomic-embed-text-v1.5": (
        {"activation_function": "swiglu", "architectures": ["NomicBertModel"], "causal": False,
         "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
         "n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12, "n_positions": 8192,
         "parallel_block": False, "prenorm": False, "qkv_proj_bias": False, "rotary_emb_base": 1000,
         "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
         "rotary_scaling_factor": None, "type_vocab_size": 2, "use_rms_norm": False, "vocab_size": 30528},
        136_731_648,
    ),
    "all-mpnet-base-v2": (
        {"architectures": ["MPNetForMaskedLM"], "hidden_act": "gelu", "hidden_size": 768,
         "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 514,
         "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
         "relative_attention_num_buckets": 32, "vocab_size": 30527},
        108_895_872,  # without its pooler
    ),
    "distilbert-base-uncased": (
        {"activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "dim": 768, "hidden_dim": 3072,
         "max_position_embeddings": 512, "n_heads": 12, "n_layers": 6, "pad_token_id": 0,
         "sinusoidal_pos_embds": False, "vocab_size": 30522},
        66_362_880,  # without its head for masked tokens
    ),
    "gte-multilingual-base": (
        {"architectures": ["NewModel"], "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072,
         "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm", "logn_attention_clip1": False,
         "logn_attention_scale": False, "max_position_embeddings": 8192, "num_attention_heads": 12,
         "num_hidden_layers": 12, "pack_qkv": True, "pad_token_id": 1, "position_embedding_type": "rope",
         "rope_scaling": {"factor": 8.0, "type": "ntk"}, "rope_theta": 20000, "torch_dtype": "float16",
         "type_vocab_size": 1, "vocab_size": 250048},
        305_368_320,
    ),
    "mxbai-rerank-base-v1": (
        {"architectures": ["DebertaV2ForSequenceClassification"], "hidden_act": "gelu", "hidden_size": 768,
         "id2label": {"0": "LABEL_0"}, "intermediate_size": 3072, "layer_norm_eps": 1e-07,
         "max_position_embeddings": 512, "max_relative_positions": -1, "norm_rel_ebd": "layer_norm",
         "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "pooler_hidden_act": "gelu",
         "pooler_hidden_size": 768, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
         "position_buckets": 256, "relative_attention": True, "share_att_key": True, "type_vocab_size": 0,
         "vocab_size": 128100},
        184_422_913,
    ),
    "jina-embeddings-v2-base-en": (
        {"architectures": ["JinaBertForMaskedLM"], "emb_pooler": "mean", "feed_forward_type": "geglu",
         "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
         "max_position_embeddings": 8192, "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0,
         "position_embedding_type": "alibi", "torch_dtype": "float32", "type_vocab_size": 2, "vocab_size": 30528},
        136_777_728,  # without its head for masked tokens
    ),
    "paraphrase-albert-small-v2": (
        {"architectures": ["AlbertModel"], "embedding_size": 128, "hidden_act": "gelu", "hidden_size": 768,
         "inner_group_num": 1, "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
         "num_attention_heads": 12, "num_hidden_groups": 1, "num_hidden_layers": 6, "pad_token_id": 0,
         "position_embedding_type": "absolute", "type_vocab_size": 2, "vocab_size": 30000},
        11_092_992,  # without its pooler
    ),
    "electra-small-discriminator": (
        {"architectures": ["ElectraModel"], "embedding_size": 128, "hidden_act": "gelu", "hidden_size": 256,
         "intermediate_size": 1024, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
         "num_attention_heads": 4, "num_hidden_layers": 12, "pad_token_id": 0, "type_vocab_size": 2,
         "vocab_size": 30522},
        13_483_008,
    ),
    "sentence-t5-base": (
        {"architectures": ["T5EncoderModel"], "d_ff": 3072, "d_kv": 64, "d_model": 768, "feed_forward_proj": "relu",
         "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512,
         "num_decoder_layers": 12, "num_heads": 12, "num_layers": 12, "pad_token_id": 0,
         "relative_attention_num_buckets": 32, "torch_dtype": "float16", "vocab_size": 32128},
        109_628_544,
    ),
    "jina-embeddings-v3-hf": (
        {"architectures": ["JinaEmbeddingsV3Model"], "hidden_act": "gelu", "hidden_size": 1024,
         "intermediate_size": 4096, "layer_norm_eps": 1e-05, "max_position_embeddings": 8194,
         "model_type": "jina_embeddings_v3", "num_attention_heads": 16, "num_hidden_layers": 24, "pad_token_id": 1,
         "rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}, "type_vocab_size": 1,
         "vocab_size": 250002},
        558_314_496,  # without its pooler
    ),
    "jina-reranker-v2-base-multilingual": (
        {"architectures": ["XLMRobertaForSequenceClassification"], "hidden_act": "gelu", "hidden_size": 768,
         "id2label": {"0": "LABEL_0"}, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
         "max_position_embeddings": 1026, "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
         "position_embedding_type": "absolute", "torch_dtype": "bfloat16", "type_vocab_size": 1,
         "use_flash_attn": True, "vocab_size": 250002},
        278_437_633,
    ),
    "EuroBERT-210m": (
        {"architectures": ["EuroBertForMaskedLM"], "attention_bias": False, "clf_pooling": "late", "head_dim": 64,
         "hidden_act": "silu", "hidden_size": 768, "intermediate_size": 3072, "max_position_embeddings": 8192,
         "mlp_bias": False, "num_attention_heads": 12, "num_hidden_layers": 12, "num_key_value_heads": 12,
         "pad_token_id": 128001, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256},
        211_766_016,  # without its head for masked tokens
    ),
    "electra-base": (
        {"architectures": ["ElectraForSequenceClassification"], "embedding_size": 768, "hidden_act": "gelu",
         "hidden_size": 768, "id2label": {"0": "LABEL_0"}, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
         "max_position_embeddings": 512, "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0,
         "type_vocab_size": 2, "vocab_size": 30522},
        109_483_009,
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
    assert (arch.positions, arch.max_positions) == (PositionTable(8194, first_row=2, padding_id=1), 8192)
    assert arch.classifier == Classifier(num_labels=1) and arch.num_token_types == 1


def test_modernbert() -> None:
    arch = described("ModernBERT-base")
    assert arch.windows == (None, 64, 64) * 7 + (None,)
    assert [rope.theta for rope in arch.ropes[:3]] == [160_000.0, 10_000.0, 10_000.0]
    assert (arch.positions, arch.max_positions, arch.norm_eps) == (None, 8192, 1e-5)
    assert arch.has_pre_norms and arch.has_gate and not arch.has_norm_bias and not arch.has_qkv_bias
    ranked = described("ModernBERT-base", architectures=["ModernBertForSequenceClassification"])
    assert ranked.classifier == Classifier(
        2, HeadActivation.GELU_ERF, Pooling.MEAN, has_dense_bias=False, has_norm=True
    )


def test_the_fields_of_nomic_bert_may_have_either_name() -> None:
    arch = described("nomic-embed-text-v1.5")
    assert (arch.hidden_size, arch.intermediate_size, arch.max_positions) == (768, 3072, 8192)
    assert arch.ropes == (Rope(1000.0, 64),) * 12 and arch.activation is Activation.SILU
    other = {"architectures": ["NomicBertModel"], "hidden_act": "silu", "hidden_size": 768,
             "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 8192,
             "num_attention_heads": 12, "num_hidden_layers": 12, "type_vocab_size": 2, "vocab_size": 30528,
             "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"}}  # fmt: skip
    assert describe_encoder(other) == arch


def test_eurobert() -> None:
    arch = described("EuroBERT-210m")
    assert arch.ropes == (Rope(250_000.0, 64),) * 12 and arch.head_counts == (12, 12, 12) and arch.max_positions == 8192
    assert arch.has_rms_norms and arch.has_pre_norms and not arch.has_embedding_norm and arch.has_gate
    judges = described("EuroBERT-210m", architectures=["EuroBertForSequenceClassification"], clf_pooling="bos")
    assert judges.classifier == Classifier(2, HeadActivation.GELU_ERF, Pooling.FIRST)


def test_jinas_xlm_roberta() -> None:
    arch = described("jina-embeddings-v3-hf")
    assert arch.ropes == (Rope(20_000.0, 64),) * 24 and arch.positions is None and arch.max_positions == 8194
    old = described("jina-reranker-v2-base-multilingual", position_embedding_type="rotary", rotary_emb_base=1e4)
    assert old.ropes == (Rope(10_000.0, 64),) * 12 and old.positions is None
    ranks = described("jina-reranker-v2-base-multilingual")
    assert ranks.positions is not None and (ranks.positions.num_rows, ranks.positions.first_row) == (1026, 2)
    assert not ranks.ropes


def test_mpnet() -> None:
    arch = described("all-mpnet-base-v2")
    assert (arch.positions, arch.max_positions) == (PositionTable(514, first_row=2, padding_id=1), 512)
    assert arch.relative_bias == RelativeBias(32, 128) and not arch.num_token_types


def test_deberta() -> None:
    arch = described("mxbai-rerank-base-v1")
    assert arch.disentangled == Disentangled(256, 512, has_norm=True) and arch.max_positions == 512
    assert arch.positions is None and not arch.num_token_types and arch.norm_eps == 1e-7
    assert arch.classifier == Classifier(1, HeadActivation.GELU_ERF)
    old = described("mxbai-rerank-base-v1", pos_att_type="p2c|c2p", position_buckets=-1, max_relative_positions=200)
    assert old.disentangled == Disentangled(200, 0, has_norm=True)


def test_the_frequencies_of_gte_are_those_of_its_own_code() -> None:
    """1 / (20000 * 8)^(2 i / 64) / 8^(2 / 64)."""
    rope = described("gte-multilingual-base").ropes[0]
    assert rope.theta == 160_000.0 and isinstance(rope.scaling, LinearScaling)
    assert rope.scaling.factor == pytest.approx(8 ** (1 / 32)) and rope.rotary_dim == 64
    plain = described("gte-multilingual-base", rope_scaling=None).ropes[0]
    assert plain == Rope(20_000.0, 64)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nomic-embed-text-v1.5", {"prenorm": True}, "prenorm is not supported"),
        ("nomic-embed-text-v1.5", {"moe_every_n_layers": 2}, "moe_every_n_layers is not supported"),
        ("nomic-embed-text-v1.5", {"rotary_emb_fraction": 0.5}, "partial_rotary_factor must be 1"),
        ("nomic-embed-text-v1.5", {"activation_function": "geglu"}, "hidden_act must be one of silu, swiglu"),
        ("all-mpnet-base-v2", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets must be 32"),
        ("gte-multilingual-base", {"position_embedding_type": "absolute"}, "position_embedding_type must be one of"),
        ("gte-multilingual-base", {"logn_attention_scale": True}, "logn_attention_scale must be false"),
        ("gte-multilingual-base", {"layer_norm_type": "rms_norm"}, "layer_norm_type must be one of layer_norm"),
        (
            "gte-multilingual-base",
            {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}},
            "mixed_b must be absent",
        ),
        (
            "jina-reranker-v2-base-multilingual",
            {"lora_adaptations": ["retrieval.query"], "position_embedding_type": "rotary"},
            "lora_adaptations must be empty: vectors need the adapter of a task",
        ),
        ("sentence-t5-base", {"feed_forward_proj": "gated-relu"}, "feed_forward_proj must be one of relu, gated-gelu"),
        ("sentence-t5-base", {"relative_attention_num_buckets": 30}, "max_distance must be above a quarter"),
        ("sentence-t5-base", {"relative_attention_max_distance": 8}, "max_distance must be above a quarter"),
        ("paraphrase-albert-small-v2", {"inner_group_num": 2}, "inner_group_num must be 1"),
        ("paraphrase-albert-small-v2", {"num_hidden_groups": 4}, "num_hidden_groups must divide num_hidden_layers, 6"),
        (
            "jina-embeddings-v2-base-en",
            {"position_embedding_type": "absolute"},
            "position_embedding_type must be one of",
        ),
        ("jina-embeddings-v2-base-en", {"feed_forward_type": "original"}, "feed_forward_type must be one of geglu"),
        ("mxbai-rerank-base-v1", {"share_att_key": False}, "share_att_key must be true"),
        ("mxbai-rerank-base-v1", {"relative_attention": False}, "as must relative_attention"),
        ("mxbai-rerank-base-v1", {"pos_att_type": ["c2p"]}, "pos_att_type must be both of c2p, p2c"),
        ("mxbai-rerank-base-v1", {"conv_kernel_size": 3}, "conv_kernel_size must be 0"),
        ("mxbai-rerank-base-v1", {"embedding_size": 128}, "embedding_size must be hidden_size"),
        ("mxbai-rerank-base-v1", {"position_buckets": 2}, "position_buckets must be -1, or from 4 to"),
        ("mxbai-rerank-base-v1", {"norm_rel_ebd": None}, "norm_rel_ebd must be a text"),
        ("ModernBERT-base", {"layer_types": ["full_attention"]}, "layer_types must be a list of 22"),
        ("ModernBERT-base", {"local_attention": 1}, "local_attention must be a whole number of at least 2"),
    ],
)
def test_what_a_family_does_not_support_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchError, match=message):
        described(name, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_decoder": True}, "is_decoder must be false"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be one of absolute"),
        ({"hidden_act": "relu"}, "hidden_act must be one of gelu"),
        ({"num_attention_heads": 7}, "must be a multiple of num_attention_heads"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized checkpoint of an encoder is not supported"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures must be that of an encoder"),
        ({"architectures": ["NVEmbedModel"]}, "NVEmbedModel cannot be served: it pools by an attention to learned"),
        ({"architectures": ["HF_ColBERT"]}, "HF_ColBERT cannot be served: it gives a vector for each token"),
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
