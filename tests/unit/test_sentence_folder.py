"""The files of sentence-transformers: what they say, in their old and new forms, and what is wrong with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.errors import ModelError
from inferd.engine.api.sentence_folder import SentenceFolder, sentence_files
from inferd.engine.api.sentence_heads import DenseActivation, DenseHead

NAMES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "2_Dense", "CNN": "2_CNN"}


def folder(path: Path, *kinds: str, pooling: dict[str, Any] | None = None, **files: dict[str, Any]) -> Path:
    """A folder with these modules. `files`: name without `.json` -> content."""
    modules = [
        {"idx": i, "name": str(i), "path": NAMES[kind], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    config = {"pooling_mode_mean_tokens": True} if pooling is None else pooling
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_folder_of_another_kind_is_none(tmp_path: Path) -> None:
    assert SentenceFolder.read(tmp_path) is None
    assert SentenceFolder.read(tmp_path / "model.gguf") is None


def test_qwen3_embedding(tmp_path: Path) -> None:
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    found = SentenceFolder.read(
        folder(
            tmp_path,
            "Transformer",
            "Pooling",
            "Normalize",
            pooling={"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True},
            config_sentence_transformers={
                "prompts": prompts,
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
        )
    )
    assert found == SentenceFolder(pooling="last", normalizes=True, prompts=prompts)


def test_minilm_and_e5(tmp_path: Path) -> None:
    found = SentenceFolder.read(
        folder(
            tmp_path,
            "Transformer",
            "Pooling",
            sentence_bert_config={"max_seq_length": 256, "do_lower_case": True},
            config_sentence_transformers={"prompts": {"passage": "passage: "}, "default_prompt_name": "passage"},
        )
    )
    assert found == SentenceFolder(
        pooling="mean",
        normalizes=False,
        prompts={"passage": "passage: "},
        default_prompt="passage",
        max_tokens=256,
        lowercases=True,
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("lasttoken", "lasttoken", "last"),
        ("mean_tokens", "mean", "mean"),
        ("cls_token", "cls", "cls"),
        ("max_tokens", "max", "max"),
        ("mean_sqrt_len_tokens", "mean_sqrt_len_tokens", "mean_sqrt_len"),
        ("weightedmean_tokens", "weightedmean", "weightedmean"),
    ],
)
def test_both_forms_of_a_pooling(tmp_path: Path, old: str, new: str, expected: str) -> None:
    for name, config in (("old", {f"pooling_mode_{old}": True}), ("new", {"pooling_mode": new})):
        (tmp_path / name).mkdir()
        found = SentenceFolder.read(folder(tmp_path / name, "Transformer", "Pooling", pooling=config))
        assert found is not None and found.pooling == expected and not found.unsupported


SIZES = {"in_features": 8, "out_features": 4}


def dense(path: Path, config: dict[str, Any], weights: str = "model.safetensors") -> SentenceFolder:
    folder(path, "Transformer", "Pooling", "Dense", pooling={"pooling_mode": "mean", "embedding_dimension": 8})
    (path / "2_Dense").mkdir()
    (path / "2_Dense" / "config.json").write_text(json.dumps(SIZES | config))
    tensors = {"linear.weight": ([4, 8], 128), "linear.bias": ([4], 16)}
    entries, begin = {}, 0
    for name, (shape, size) in tensors.items():
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    header = json.dumps(entries).encode()
    (path / "2_Dense" / weights).write_bytes(len(header).to_bytes(8, "little") + header + bytes(begin))
    found = SentenceFolder.read(path)
    assert found is not None
    return found


def test_a_dense_layer(tmp_path: Path) -> None:
    found = dense(tmp_path, {"module_input_name": "sentence_embedding"})
    assert found.heads == (DenseHead("2_Dense", 8, 4, True, DenseActivation.TANH),)
    assert found.num_outputs == 4 and not found.unsupported
    held = {path.relative_to(tmp_path).as_posix() for path in sentence_files(tmp_path) if path.exists()}
    assert held == {"modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}


@pytest.mark.parametrize(
    ("config", "weights", "reason"),
    [
        ({}, "pytorch_model.bin", "2_Dense has pytorch_model.bin, a pickle"),
        ({}, "other.safetensors", r"2_Dense has no model\.safetensors"),
        ({"activation_function": "torch.nn.modules.activation.Mish"}, "model.safetensors", "activation"),
        ({"activation_function": ["a"]}, "model.safetensors", "activation"),
        ({"module_input_name": "token_embeddings"}, "model.safetensors", "module_input_name"),
    ],
)
def test_dense_layers_that_cannot_be_computed_have_a_reason(
    tmp_path: Path, config: dict[str, Any], weights: str, reason: str
) -> None:
    found = dense(tmp_path, config, weights)
    assert re.search(reason, found.unsupported) and found.heads == ()


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"in_features": 0}, "in_features must be a whole number"),
        ({"in_features": 2**40}, "in_features must be a whole number"),
        ({"out_features": "4"}, "out_features must be a whole number"),
        ({"bias": False}, "the weights contradict"),
        ({"out_features": 5}, "the weights contradict"),
        ({"use_residual": True}, "the weights contradict"),
        ({"use_residual": 1}, "use_residual must be true or false, but is 1"),
    ],
)
def test_wrong_dense_layers_are_refused(tmp_path: Path, config: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        dense(tmp_path, config)


@pytest.mark.parametrize(
    ("kinds", "pooling", "reason"),
    [
        (("Transformer", "Pooling", "CNN"), None, "modules.json has CNN"),
        (("Transformer", "Dense", "Pooling"), None, "must begin with Transformer and Pooling"),
        (("Transformer", "Dense"), None, "it gives a vector for each token through a Dense, as ColBERT does"),
        (("Transformer",), None, "must begin with Transformer and Pooling"),
        (("Transformer", "Pooling"), {"pooling_mode": ["cls", "max"]}, "'cls', 'max'"),
        (("Transformer", "Pooling"), {"pooling_mode": "new"}, "new"),
        (("Transformer", "Pooling"), {}, "none"),
        (
            ("Transformer", "Pooling"),
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            "lasttoken and pooling_mode_mean_tokens",
        ),
        (
            ("Transformer", "Pooling"),
            {"pooling_mode_mean_tokens": True, "include_prompt": False},
            "leaves the prompt out",
        ),
    ],
)
def test_what_cannot_be_computed_has_a_reason(
    tmp_path: Path, kinds: tuple[str, ...], pooling: dict[str, Any] | None, reason: str
) -> None:
    found = SentenceFolder.read(folder(tmp_path, *kinds, pooling=pooling))
    assert found is not None and reason in found.unsupported


def test_texts_that_a_chat_template_writes_have_a_reason(tmp_path: Path) -> None:
    """As newer files are, if the tokenizer has a chat template. Older ones take the text itself."""
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    for name, modalities in (("plain", {"text": forward}), ("chat", {"text": forward, "message": forward})):
        (tmp_path / name).mkdir()
        lengths = {"sentence_bert_config": {"modality_config": modalities}}
        found = SentenceFolder.read(folder(tmp_path / name, "Transformer", "Pooling", **lengths))
        assert found is not None and ("chat template" in found.unsupported) == (name == "chat")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("modules.json", "{"),
        ("modules.json", "{}"),
        ("modules.json", "[]"),
        ("modules.json", '[{"type": "a.Transformer"}]'),
        ("modules.json", '[{"type": "a.Transformer", "path": "../other"}]'),
        ("modules.json", '[{"type": "a.Transformer", "path": "/etc"}]'),
        ("config_sentence_transformers.json", '{"prompts": ["a"]}'),
        ("config_sentence_transformers.json", '{"prompts": {"a": 1}}'),
        ("config_sentence_transformers.json", json.dumps({"prompts": {"a": "x" * 5000}})),
        ("config_sentence_transformers.json", '{"prompts": {"a": "x"}, "default_prompt_name": "b"}'),
        ("config_sentence_transformers.json", '{"prompts": {"a": "x"}, "default_prompt_name": [1]}'),
        ("config_sentence_transformers.json", '{"truncate_dim": 0}'),
        ("sentence_bert_config.json", '{"max_seq_length": "512"}'),
        ("1_Pooling/config.json", "[]"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, file: str, content: str) -> None:
    folder(tmp_path, "Transformer", "Pooling")
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError):
        SentenceFolder.read(tmp_path)
