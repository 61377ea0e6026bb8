"""A folder's words on how its model judges texts, and the folders that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.classifier_folder import NO_JUDGE, ClassifierFolder, TokenPair
from inferd.engine.api.errors import ModelError

TORCH = "torch.nn.modules"


def folder(path: Path, *kinds: str, score: dict[str, Any] | None = None, **files: dict[str, Any]) -> Path:
    """A folder with these modules, if any. `score`: the config of `LogitScore`; `files`: name -> content."""
    if kinds:
        modules = [
            {"path": "" if kind == "Transformer" else f"1_{kind}", "type": f"sentence_transformers.x.{kind}"}
            for kind in kinds
        ]
        (path / "modules.json").write_text(json.dumps(modules))
    if score is not None:
        (path / "1_LogitScore").mkdir()
        (path / "1_LogitScore" / "config.json").write_text(json.dumps(score))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    assert ClassifierFolder.read(tmp_path, {}) == ClassifierFolder.read(tmp_path / "a.gguf", {}) == NO_JUDGE
    assert NO_JUDGE.label(7) == "LABEL_7"


def test_labels(tmp_path: Path) -> None:
    config = {"id2label": {"0": "good", "2": "bad"}, "problem_type": "multi_label_classification"}
    found = ClassifierFolder.read(tmp_path, config)
    assert [found.label(i) for i in range(3)] == ["good", "LABEL_1", "bad"]
    assert found.problem == "multi_label_classification"


@pytest.mark.parametrize(
    ("config", "settings", "activation"),
    [
        ({"sentence_transformers": {"activation_fn": f"{TORCH}.linear.Identity"}}, {}, "identity"),
        ({"sentence_transformers": {"version": "5.0"}}, {"activation_fn": f"{TORCH}.activation.Sigmoid"}, "sigmoid"),
        ({"sbert_ce_default_activation_function": f"{TORCH}.linear.Identity"}, {}, "identity"),
        ({}, {"activation_fn": f"{TORCH}.linear.Identity"}, "identity"),
        ({}, {}, None),
    ],
)
def test_the_activation(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], activation: str | None
) -> None:
    found = ClassifierFolder.read(folder(tmp_path, "Transformer", config_sentence_transformers=settings), config)
    assert (found.activation, found.unsupported) == (activation, "")
    assert found.activation_for(1) == (activation or "sigmoid")
    assert [found.activation_for(1, wanted=wanted) for wanted in (True, False)] == ["sigmoid", "identity"]


def test_the_activation_of_several_labels() -> None:
    plain, multi = ClassifierFolder(), ClassifierFolder(problem="multi_label_classification")
    numbers = ClassifierFolder(problem="regression")
    assert [each.activation_for(3) for each in (plain, multi, numbers)] == ["softmax", "sigmoid", "identity"]
    assert [each.activation_for(3, wanted=True) for each in (plain, multi, numbers)] == [
        "softmax",
        "sigmoid",
        "softmax",
    ]
    assert [each.activation_for(3, wanted=False) for each in (plain, multi)] == ["identity"] * 2


def test_the_folders_activation_counts_for_several_labels_too() -> None:
    """Cross-encoders for inference, such as nli-deberta-v3-base, name Identity."""
    raw, own = ClassifierFolder(activation="identity"), ClassifierFolder(activation="sigmoid")
    assert [each.activation_for(3) for each in (raw, own)] == ["identity", "sigmoid"]
    assert [each.activation_for(3, wanted=True) for each in (raw, own)] == ["softmax", "sigmoid"]
    assert [each.activation_for(3, wanted=False) for each in (raw, own)] == ["identity"] * 2


def test_softmax_of_one_label_is_no_score() -> None:
    softmax = ClassifierFolder(activation="softmax")
    assert all("Softmax" in softmax.unsupported_for(1, wanted=wanted) for wanted in (None, True))
    assert softmax.unsupported_for(1, wanted=False) == softmax.unsupported_for(2) == ""
    other = ClassifierFolder(unsupported="its activation is Tanh")
    assert [other.unsupported_for(3, wanted=wanted) for wanted in (None, True, False)] == [other.unsupported, "", ""]


def test_an_activation_that_is_not_computed_here(tmp_path: Path) -> None:
    found = ClassifierFolder.read(tmp_path, {"sentence_transformers": {"activation_fn": f"{TORCH}.activation.Tanh"}})
    assert found.activation is None and "Tanh" in found.unsupported


def test_a_cross_encoder(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        "Transformer",
        config_sentence_transformers={"prompts": {"web": "Find: "}, "default_prompt_name": "web"},
        sentence_bert_config={"max_seq_length": 300, "do_lower_case": True},
    )
    found = ClassifierFolder.read(path, {})
    assert (found.prompt, found.max_tokens, found.lowercases) == ("Find: ", 300, True)


def test_a_model_that_embeds_keeps_its_prompt_and_length(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        "Transformer",
        "Pooling",
        config_sentence_transformers={"prompts": {"web": "Find: "}, "default_prompt_name": "web"},
        sentence_bert_config={"max_seq_length": 300},
    )
    assert ClassifierFolder.read(path, {}) == NO_JUDGE


def test_the_tokenizers_length_counts_if_no_other_is_given() -> None:
    assert [NO_JUDGE.bounded(longest).max_tokens for longest in (512, 10**30, None, "a", 0)] == [512, *[None] * 4]
    assert ClassifierFolder(max_tokens=300).bounded(512).max_tokens == 300


def test_a_generating_reranker(tmp_path: Path) -> None:
    score = {"true_token_id": 9693, "false_token_id": 2152, "module_input_name": "causal_logits"}
    found = ClassifierFolder.read(folder(tmp_path, "Transformer", "LogitScore", score=score), {})
    assert (found.tokens, found.unsupported) == (TokenPair(9693, 2152), "")


def test_a_score_of_one_token_is_not_computed_here(tmp_path: Path) -> None:
    found = ClassifierFolder.read(folder(tmp_path, "Transformer", "LogitScore", score={"true_token_id": 5}), {})
    assert found.tokens is None and "one token alone" in found.unsupported


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        ({"id2label": ["a"]}, {}, "names by number"),
        ({"id2label": {"-1": "a"}}, {}, "names by number"),
        ({"id2label": {"0": "a" * 5_000}}, {}, "names by number"),
        ({"id2label": {str(i): "a" for i in range(2**16 + 1)}}, {}, "at most 65536"),
        ({}, {"config_sentence_transformers": {"default_prompt_name": "x"}}, "must name a prompt"),
        ({}, {"config_sentence_transformers": {"default_prompt_name": "x", "prompts": {"x": 1}}}, "must name a prompt"),
        (
            {},
            {"config_sentence_transformers": {"default_prompt_name": [1], "prompts": {"x": "y"}}},
            "must name a prompt",
        ),
        ({}, {"sentence_bert_config": {"max_seq_length": 0}}, "max_seq_length"),
    ],
)
def test_what_is_wrong(tmp_path: Path, config: dict[str, Any], files: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ClassifierFolder.read(folder(tmp_path, "Transformer", **files), config)


@pytest.mark.parametrize("value", ["9693", -1, 1.5, 2**40])
def test_a_token_id_that_is_none(tmp_path: Path, value: object) -> None:
    path = folder(tmp_path, "Transformer", "LogitScore", score={"true_token_id": value, "false_token_id": 1})
    with pytest.raises(ModelError, match="true_token_id must be a token id"):
        ClassifierFolder.read(path, {})
