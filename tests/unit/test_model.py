"""The served model: its author's recommended values are used if a request could set them, and refused if none could."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from inferd.engine.api.checkpoint import EMBEDDED_PATH
from inferd.engine.api.errors import ModelError
from inferd.server.text import model as model_module
from inferd.server.text.model import GenerationDefaults, ServedModel

VOCAB_SIZE = json.loads((EMBEDDED_PATH / "config.json").read_text())["vocab_size"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded checkpoint without its weights and without recommendations."""
    for file in EMBEDDED_PATH.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "generation_config.json":
            shutil.copy(file, tmp_path)
    return tmp_path


def load(folder: Path) -> ServedModel:
    return ServedModel.load(folder, ("m",), max_model_len=64, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize(
    ("template", "lacks_tools"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}", False),
    ],
)
def test_a_template_that_shows_no_tools_is_found_out_at_load(folder: Path, template: str, lacks_tools: bool) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    undeclared = {"chat_template": template, "response_template": None}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **undeclared}))
    model = load(folder)
    assert model.template is not None
    assert model.template.lacks_tools == lacks_tools
    assert model.format.tool_name == ("hermes" if lacks_tools else "none")


def test_a_template_that_never_ends_is_taken_to_show_tools(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "_PROBE_LIMIT_S", 0.05)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": endless}))
    template = load(folder).template
    assert template is not None
    assert not template.lacks_tools


def test_recommendations_are_the_defaults(folder: Path) -> None:
    assert load(folder).defaults == GenerationDefaults()
    recommended = {"temperature": 0.5, "top_k": 2**31 - 1, "max_new_tokens": None, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    assert load(folder).defaults == GenerationDefaults(temperature=0.5, top_k=2**31 - 1)


@pytest.mark.parametrize(
    ("recommended", "words"),
    [
        ({"temperature": float("nan")}, "temperature must be from 0 to 2, but is nan"),
        ({"top_p": float("inf")}, "top_p must be from 0 to 1, but is inf"),
        ({"min_p": "0.1"}, "min_p must be from 0 to 1, but is 0.1"),
        ({"repetition_penalty": True}, "repetition_penalty must be from 0.01 to 100, but is true"),
        ({"top_k": 10**30}, f"top_k must be from 0 to 2147483647 and whole, but is {10**30}"),
        ({"top_k": 1.5}, "top_k must be from 0 to 2147483647 and whole, but is 1.5"),
        ({"max_new_tokens": 10**400}, "from 1 to 2147483647 and whole, but is a number of more than 77 digits"),
        ({"eos_token_id": [0, 10**30]}, f"eos_token_id must be from 0 to {VOCAB_SIZE - 1}, but is {10**30}"),
    ],
)
def test_what_no_request_could_ask_for_is_refused(folder: Path, recommended: dict[str, object], words: str) -> None:
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    with pytest.raises(ModelError, match=words):
        load(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"top_k": ' + "9" * 5000 + "}"])
def test_recommendations_that_cannot_be_read_are_refused(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        load(folder)


def test_a_directory_in_their_place_is_not_passed_over(folder: Path) -> None:
    (folder / "generation_config.json").mkdir()
    with pytest.raises(ModelError, match=r"generation_config\.json must be a regular file"):
        load(folder)
