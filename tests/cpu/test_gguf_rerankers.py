"""Rerankers in GGUF files that llama.cpp's own converter wrote give the scores of transformers on the folders that they
were converted from. `record_gguf_rerankers` writes the files of decoders, and `record_gguf_encoders` the others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.quality.gguf_blocks import as_f32
from benchmarks.quality.gguf_files import write
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.encoder_model import facts_of
from inferd.engine.api.errors import ModelError
from inferd.engine.api.gguf import read_gguf
from inferd.server.text.model import ServedModel
from tests.cpu.record_gguf_encoders import FOLDER
from tests.cpu.record_gguf_encoders import PAIRS as ENCODER_PAIRS
from tests.cpu.record_gguf_rerankers import CASES, INSTRUCTIONS, PAIRS
from tests.e2e.conftest import Daemon, start

IS_RECORDED = False

__all__ = ["start"]

CLOSE = 1e-5
"""Largest difference of a score. Measured: 2e-7. The scores of other instructions, and of the other token, differ by
more."""


def asked(url: str, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_the_folder(name: str, start: Callable[..., Daemon]) -> None:
    url = start(str(FOLDER / f"{name}.gguf"), "--dtype", "float32").url
    assert [card["task"] for card in httpx.get(f"{url}/v1/models").json()["data"]] == ["rerank"]
    assert httpx.get(f"{url}/info").json()["model_type"].keys() == {"reranker"}
    expected = {key: torch.tensor(found) for key, found in json.loads((FOLDER / f"{name}.json").read_text()).items()}
    firsts, seconds = ([pair[i] for pair in PAIRS] for i in (0, 1))
    for instruction in (None, *INSTRUCTIONS):
        own = {} if instruction is None else {"instruction": instruction}
        data = asked(url, "/v1/score", text_1=firsts, text_2=seconds, **own)["data"]
        ours, theirs = torch.tensor([item["score"] for item in data]), expected[instruction or INSTRUCTIONS[0]]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=CLOSE)
    assert (expected[INSTRUCTIONS[0]] - expected[INSTRUCTIONS[1]]).abs().max() > 100 * CLOSE
    (results,) = (asked(url, "/v1/rerank", query=firsts[0], documents=[seconds[0]])["results"],)
    assert abs(results[0]["relevance_score"] - float(expected[INSTRUCTIONS[0]][0])) < CLOSE
    (classes,) = asked(url, "/predict", inputs=[list(PAIRS[0])])
    assert {each["label"] for each in classes} == {"yes", "no"}
    chat = {"model": name, "messages": [{"role": "user", "content": "a"}]}
    assert httpx.post(f"{url}/v1/chat/completions", json=chat).status_code == 400, "it has no head to draw from"


def rewritten(tmp_path: Path, **changes: Any) -> Path:
    """The file with other metadata and zeros as weights: `__` stands for a dot, and None for no such key."""
    read = read_gguf(FOLDER / "qwen3-reranker.gguf")
    metadata = {key: list(value) if isinstance(value, tuple) else value for key, value in read.metadata.items()}
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    tensors = {placed.tensor.name: as_f32(torch.zeros(placed.tensor.shape)) for placed in read.tensors.values()}
    return write(tmp_path / "model.gguf", {key: value for key, value in metadata.items() if value is not None}, tensors)


def served(path: Path) -> ServedModel:
    return ServedModel.load(path, ("m",), max_model_len=512, vocab_size=305)


TEMPLATE = "tokenizer__chat_template__rerank"


def test_a_reranker_of_three_labels_is_refused(tmp_path: Path) -> None:
    path = rewritten(tmp_path, qwen3__classifier__output_labels=["a", "b", "c"])
    with pytest.raises(ModelError, match=r"output_labels must be a list of 2 texts, one for each row of cls.output"):
        read_gguf(path)


def test_a_classifier_that_is_no_reranker_gives_classes(tmp_path: Path) -> None:
    path = rewritten(tmp_path, qwen3__pooling_type=3, qwen3__classifier__output_labels=["good", "bad"])
    facts, model = facts_of(Checkpoint.read(path)), served(path)
    assert facts.arch.num_labels == 2 and not model.judges.compares_labels and model.pair_templates is None
    assert [model.judges.label(i) for i in range(2)] == ["good", "bad"]


@pytest.mark.parametrize("text", ["{query} alone", "{query} {document} {query}", 3])
def test_a_prompt_without_a_place_for_each_text_is_refused(text: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"rerank must be a text with \{query\} and \{document\}, each once"):
        served(rewritten(tmp_path, **{TEMPLATE: text}))


def test_a_prompt_of_its_own_takes_no_instruction(tmp_path: Path) -> None:
    own = served(rewritten(tmp_path, **{TEMPLATE: "<|im_start|>Q: {query} D: {document}<|im_end|>"})).pair_templates
    assert own is not None and own.with_instruction is None and not own.plain.takes_instruction
    published = served(Path(shutil.copy(FOLDER / "qwen3-reranker.gguf", tmp_path / "a.gguf"))).pair_templates
    assert published is not None and published.with_instruction is not None
    assert served(rewritten(tmp_path, **{TEMPLATE: None})).pair_templates is not None, "the published one"


def test_a_prompt_that_cannot_be_filled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="its tokenizer cannot put two texts into its prompt"):
        served(rewritten(tmp_path, **{TEMPLATE: "<|im_start|>{document} answers {query}?<|im_end|>"}))


def test_a_cross_encoder_gives_the_scores_of_the_folder(start: Callable[..., Daemon]) -> None:
    """bge-reranker-v2-m3's kind."""
    path = FOLDER / "xlm-roberta-reranker.gguf"
    logits = load_file(path.with_suffix(".safetensors"))
    expected = torch.sigmoid(torch.cat([logits[f"pair {i}"] for i in range(len(ENCODER_PAIRS))]))
    assert float((expected[0] - expected[1]).abs()) > 10 * CLOSE
    url = start(str(path), "--dtype", "float32").url
    firsts, seconds = ([pair[i] for pair in ENCODER_PAIRS] for i in (0, 1))
    data = asked(url, "/v1/score", text_1=firsts, text_2=seconds)["data"]
    torch.testing.assert_close(torch.tensor([item["score"] for item in data]), expected, rtol=0, atol=CLOSE)
