"""The files of sentence-transformers: what they say, in their old and new forms, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.errors import ModelError
from inferd.engine.api.sentence_folder import SentenceFolder

NAMES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "2_Dense"}


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


def test_the_newer_form_of_a_pooling(tmp_path: Path) -> None:
    found = SentenceFolder.read(folder(tmp_path, "Transformer", "Pooling", pooling={"pooling_mode": "lasttoken"}))
    assert found is not None and found.pooling == "last" and not found.unsupported


@pytest.mark.parametrize(
    ("kinds", "pooling", "reason"),
    [
        (("Transformer", "Pooling", "Dense"), None, "Dense"),
        (("Transformer",), None, "must begin with Transformer and Pooling"),
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, "cls_token"),
        (("Transformer", "Pooling"), {"pooling_mode": "weightedmean"}, "weightedmean"),
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
