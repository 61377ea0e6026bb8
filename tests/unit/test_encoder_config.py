"""Tests what a start decides for an encoder, and what it refuses, by config.json alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.config import AskedConfig, plan_of
from inferd.engine.api.cost.step_cost import WorkModel
from inferd.engine.api.encoder_model import EncoderFacts
from inferd.engine.api.errors import CapacityError, ConfigError
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.precision import Precision
from inferd.engine.api.resolve_encoder import ENCODER_STEP_TOKENS, resolve_encoder
from inferd.engine.arch.description import ArchError
from inferd.engine.arch.encoder_base import num_labels
from inferd.engine.arch.encoder_registry import is_encoder
from inferd.engine.arch.fields import Fields
from inferd.server.lifecycle.models import tell_decisions

GIB = 2**30
MINILM: dict[str, Any] = {
    "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 30522, "hidden_size": 384,
    "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12, "max_position_embeddings": 512,
    "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "dtype": "float32",
}  # fmt: skip
"""all-MiniLM-L6-v2, which has 22,713,216 weights with its pooler of 147,840, which is not read."""
MODERN: dict[str, Any] = {
    "architectures": ["ModernBertModel"], "model_type": "modernbert", "vocab_size": 50368, "hidden_size": 768,
    "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12, "max_position_embeddings": 8192,
    "local_attention": 128, "global_attn_every_n_layers": 3, "dtype": "float32",
}  # fmt: skip
EMBEDDING_GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3TextModel"], "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 768,
    "intermediate_size": 1152, "num_hidden_layers": 24, "num_attention_heads": 3, "num_key_value_heads": 1,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0, "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4, "query_pre_attn_scalar": 256,
    "use_bidirectional_attention": True, "torch_dtype": "float32",
}  # fmt: skip
"""embeddinggemma-300m, of which 302,863,104 weights are in the model itself."""
MACHINE = Machine(num_cpus=2, memory_total_bytes=4 * GIB, memory_available_bytes=2 * GIB)


def facts(config: dict[str, Any] = MINILM) -> EncoderFacts:
    return EncoderFacts.of_config(Path("model"), config)


def test_an_encoder_has_whole_texts_and_no_kv() -> None:
    config, plan, decisions = resolve_encoder(AskedConfig(model_path="model"), facts(), MACHINE)
    assert (config.is_encoder, config.device, config.prefix_caching, config.speculative) == (True, "cpu", False, "none")
    assert (config.max_model_len, config.max_num_batched_tokens) == (512, ENCODER_STEP_TOKENS)
    assert plan.kv_bytes == config.kv_memory_bytes == 0
    assert config.num_blocks * config.block_size > config.max_num_seqs * config.max_model_len
    assert not any(decision.unused_flag for decision in decisions)
    assert plan == plan_of(config, facts().arch)


@pytest.mark.parametrize("counts", [[1], [1, 1], [1, 30]])
def test_texts_of_one_token_are_prefill(counts: list[int]) -> None:
    work = WorkModel.of(facts().arch, Precision("float32"), 512)
    assert work.step([0] * len(counts), counts, 0).phase == "prefill"


def test_the_weights_are_those_of_the_published_model() -> None:
    plan = resolve_encoder(AskedConfig(model_path="model"), facts(), MACHINE)[1]
    assert facts().num_params == 22_713_216 - 147_840
    assert plan.weights_bytes == 4 * facts().num_params
    int8 = resolve_encoder(AskedConfig(model_path="model", quantization="int8"), facts(), MACHINE)[1]
    matrices = 6 * 12 * 384 * 384
    assert plan.weights_bytes - int8.weights_bytes == pytest.approx(3 * matrices, rel=0.05)


def test_what_follows_the_pooling_is_planned() -> None:
    plain, more = (
        resolve_encoder(AskedConfig(model_path="model", head_bytes=count), facts(), MACHINE)[1] for count in (0, 10**7)
    )
    assert more.total_bytes - plain.total_bytes == 10**7
    with pytest.raises(CapacityError):
        resolve_encoder(AskedConfig(model_path="model", head_bytes=2 * GIB), facts(), MACHINE)


def test_a_folder_says_how_long_texts_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The operator may allow as many tokens as the model has positions. The folder's length is no warning."""
    (tmp_path / "modules.json").write_text(
        '[{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]'
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    own = EncoderFacts.of_config(tmp_path, MINILM)
    for asked, length in ((None, 256), (512, 512)):
        settings = AskedConfig(model_path=str(tmp_path), max_model_len=asked)
        config, _, decisions = resolve_encoder(settings, own, MACHINE)
        assert config.max_model_len == length
        with caplog.at_level(logging.DEBUG):
            tell_decisions(decisions, config, own, "minilm: ")
    lines = [record for record in caplog.records if record.levelno > logging.DEBUG]
    assert [(line.levelname, line.getMessage()) for line in lines] == [
        (
            "INFO",
            "minilm: max_model_len: auto -> 256 (the folder's max_seq_length, and --max-model-len may give more)",
        )
    ]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"device": "cuda"}, "--device cpu"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 1"),
        ({"speculative": "ngram"}, "--speculative"),
        ({"max_loras": 1}, "--max-loras"),
        ({"max_model_len": 513}, "from 1 to 512"),
        ({"kv_cache_dtype": "int8"}, "no KV cache"),
        ({"quantization": "fp8"}, "int8 or int4"),
        ({"max_num_seqs": 0}, "at least 1"),
    ],
)
def test_a_setting_that_an_encoder_cannot_follow_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_encoder(AskedConfig(model_path="model", **asked), facts(), MACHINE)


def test_settings_of_a_kv_cache_are_named_and_left_out() -> None:
    asked = AskedConfig(model_path="model", kv_memory_bytes=GIB, kv_dir="kept", kv_host_bytes=GIB, block_size=16)
    config, _, decisions = resolve_encoder(asked, facts(), MACHINE)
    assert {one.unused_flag for one in decisions} == {"", "--kv-memory", "--kv-dir", "--kv-host", "--block-size"}
    assert (config.kv_dir, config.kv_host_bytes, config.kv_memory_bytes) == ("", 0, 0)


def test_a_model_that_does_not_fit_is_refused_with_what_would() -> None:
    small = Machine(num_cpus=2, memory_total_bytes=GIB, memory_available_bytes=GIB // 4)
    with pytest.raises(CapacityError, match="--quantization int8"):
        resolve_encoder(AskedConfig(model_path="model"), facts(), small)


@pytest.mark.parametrize("labels", [{"id2label": {str(i): "a" for i in range(2**16 + 1)}}, {"num_labels": 2**16 + 1}])
def test_the_number_of_labels_is_bounded(labels: dict[str, Any]) -> None:
    with pytest.raises(ArchError, match="at most 65536"):
        num_labels(Fields(MINILM | labels, "config.json"))


def test_the_work_of_a_step_is_that_of_matrices_and_of_all_pairs() -> None:
    work = WorkModel.of(facts().arch, Precision("float32"), 512)
    matrices = 6 * 12 * 384 * 384
    one, packed = work.step([0], [100], 0), work.step([0, 0], [100, 100], 0)
    assert packed.flops == 2 * one.flops
    assert one.flops == 2 * 100 * matrices + 6 * 4 * 384 * 100 * 101


def test_layers_that_share_their_weights_are_computed_one_by_one() -> None:
    """ALBERT's: a plan has the weights of one layer, and the work of six."""
    shared = facts(MINILM | {"architectures": ["AlbertModel"], "embedding_size": 128})
    layer, outside = 12 * 384 * 384, 128 * 384
    work = WorkModel.of(shared.arch, Precision("float32"), 512)
    assert work.token_flops == 2 * (6 * layer + outside) and work.weight_bytes < 4 * 1.01 * (layer + outside)
    _, plan, _ = resolve_encoder(AskedConfig(model_path="model"), shared, MACHINE)
    assert plan.weights_bytes == 4 * shared.num_params


@pytest.mark.parametrize("num_tokens", [50, 1000])
def test_a_window_bounds_the_pairs(num_tokens: int) -> None:
    """Every third layer sees all, and the others 64 tokens on each side."""
    arch = facts(MODERN).arch
    work = WorkModel.of(arch, Precision("float32"), 8192)
    sees = [[sum(abs(p - q) <= w for q in range(num_tokens)) for p in range(num_tokens)] for w in (64, num_tokens)]
    near, whole = map(sum, sees)
    pairs = sum(near if arch.window(layer) else whole for layer in range(22))
    matrices = work.token_flops * num_tokens
    # The count takes each token twice with itself.
    assert work.step([0], [num_tokens], 0).flops - matrices == 4 * 768 * (pairs + 22 * num_tokens)


def test_a_decoder_whose_tokens_see_those_behind_them_is_an_encoder() -> None:
    gemma = facts(EMBEDDING_GEMMA)
    assert is_encoder(EMBEDDING_GEMMA) and not is_encoder({**EMBEDDING_GEMMA, "use_bidirectional_attention": False})
    assert gemma.num_params == 302_863_104
    machine = Machine(num_cpus=2, memory_total_bytes=8 * GIB, memory_available_bytes=8 * GIB)
    config, plan, _ = resolve_encoder(AskedConfig(model_path="model"), gemma, machine)
    assert config.is_encoder and config.max_model_len == 2048 and plan.kv_bytes == 0
    assert plan.weights_bytes == 4 * gemma.num_params
    work, num_tokens = WorkModel.of(gemma.arch, Precision("float32"), 2048), 1000
    matrices = 24 * (768 * 5 * 256 + 768 * 768 + 3 * 768 * 1152)
    assert work.token_flops == 2 * matrices
    sees = [[sum(abs(p - q) <= w for q in range(num_tokens)) for p in range(num_tokens)] for w in (256, num_tokens)]
    near, whole = map(sum, sees)
    pairs = 20 * near + 4 * whole + 24 * num_tokens
    assert work.step([0], [num_tokens], 0).flops - work.token_flops * num_tokens == 4 * 768 * pairs
