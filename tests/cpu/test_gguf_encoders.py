"""Encoders in GGUF files that llama.cpp's own converter wrote: the tokens, and the hidden states or logits, are those
of transformers on the folders that they were converted from. `record_gguf_encoders` writes the files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.quality.gguf_blocks import as_f32
from benchmarks.quality.gguf_files import write
from inferd.engine.api.checkpoint import Checkpoint, Documents
from inferd.engine.api.encoder_model import EncoderFacts
from inferd.engine.api.errors import ModelError
from inferd.engine.api.gguf import read_gguf
from inferd.engine.api.sentence_folder import SentenceFolder
from inferd.engine.arch.encoder_registry import describe_encoder
from inferd.engine.models.encoder import Encoder
from inferd.engine.models.loader import load, recipe_of
from tests.cpu.record_gguf_encoders import CASES, FOLDER, PAIRS, TEXTS, GgufEncoderCase

UNREADABLE = ("bert-classifier",)
READ = [case for case in CASES if case.name not in UNREADABLE]
LARGEST = 1e-5
"""Largest difference of a component from transformers in fp32, of numbers near one. Measured: 6e-7 to 3e-6."""
LOSSES = {False: 5e-4, True: 1e-3}
"""Largest 1 - cosine of a token's state with that of the unquantized model, if blocks are dequantized or
kept. Measured: 1.8e-4 and 4.2e-4."""
POOLINGS = {"mean_tokens": "mean", "cls_token": "cls"}


@pytest.fixture(params=READ, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> GgufEncoderCase:
    found: GgufEncoderCase = request.param
    return found


def path_of(case: GgufEncoderCase) -> Path:
    return FOLDER / f"{case.name}.gguf"


def recorded(case: GgufEncoderCase) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{case.name}.json").read_text())
    return found


def encoder_of(path: Path, *, keeps_blocks: bool = False) -> Encoder:
    checkpoint = Checkpoint.read(path, keeps_blocks=keeps_blocks)
    facts = EncoderFacts.of(checkpoint)
    arch = facts.arch
    assert facts.blocks == ({True: "Q8_0 kept", False: "Q8_0 dequantized"}[keeps_blocks] if "q8_0" in path.name else "")
    encoder = Encoder(arch, torch.float32, "cpu", recipe=recipe_of(arch, "none", torch.float32))
    load(encoder, checkpoint.tensors_of(arch))
    return encoder


def outputs(encoder: Encoder, texts: list[list[int]]) -> list[Tensor]:
    """Hidden states, or logits of a classifier, of each text."""
    starts = torch.tensor([0, *map(len, texts)]).cumsum(0).to(torch.int32)
    hidden = encoder.forward(torch.tensor([token for own in texts for token in own]), starts)
    if encoder.arch.classifier is None:
        return list(hidden.split([len(own) for own in texts]))
    return list(encoder.logits(hidden, starts))


def test_tokens_are_those_of_the_original(case: GgufEncoderCase) -> None:
    made = Documents(path_of(case)).made_tokenizer()
    assert made is not None
    tokenizer, expected = Tokenizer.from_str(made.decode()), recorded(case)
    assert [tokenizer.encode(text).ids for text in TEXTS] == expected["texts"]
    pairs = [tokenizer.encode(*pair) for pair in PAIRS]
    assert [pair.ids for pair in pairs] == expected["pairs"]
    assert [pair.type_ids for pair in pairs] == expected["types"]
    assert len({len(own) for own in expected["texts"]}) > 3, "all texts are unknown words"


def test_outputs_are_those_of_transformers(case: GgufEncoderCase) -> None:
    if case.outtype != "f16":
        pytest.skip("its weights are rounded")
    theirs, texts = load_file(FOLDER / f"{case.name}.safetensors"), recorded(case)["texts"]
    ours = outputs(encoder_of(path_of(case)), texts)
    differences = [float((own - theirs[str(number)]).abs().max()) for number, own in enumerate(ours)]
    print(f"{case.name}: {max(differences):.1e}")
    assert max(differences) < LARGEST
    wrong = outputs(encoder_of(path_of(case)), [[own[0], *own[:0:-1]] for own in texts])
    assert max(float((own - theirs[str(number)]).abs().max()) for number, own in enumerate(wrong)) > 100 * LARGEST


@pytest.mark.parametrize("keeps_blocks", LOSSES)
def test_blocks_lose_little_and_keep_the_bits_of_a_text(keeps_blocks: bool) -> None:
    case = next(case for case in CASES if case.outtype == "q8_0")
    theirs, texts = load_file(FOLDER / f"{case.name}.safetensors"), recorded(case)["texts"]
    encoder = encoder_of(path_of(case), keeps_blocks=keeps_blocks)
    ours = outputs(encoder, texts)
    losses = [1 - torch.cosine_similarity(own, theirs[str(number)]) for number, own in enumerate(ours)]
    most = float(torch.cat(losses).max())
    print(f"{most:.1e}")
    assert 1e-6 < most < LOSSES[keeps_blocks]
    for text, own in zip(texts, ours, strict=True):
        assert torch.equal(outputs(encoder, [text])[0], own)


def test_the_pooling_is_that_of_the_folder(case: GgufEncoderCase) -> None:
    found = SentenceFolder.read(path_of(case), read_gguf(path_of(case)))
    if not case.pooling:
        assert found is None
    else:
        assert found == SentenceFolder(POOLINGS[case.pooling], normalizes=True)  # type: ignore[arg-type]


def test_a_classifier_without_its_pooler_is_refused() -> None:
    with pytest.raises(ModelError, match=r"has cls.output.weight without cls.weight: the converter left .* out"):
        read_gguf(FOLDER / "bert-classifier.gguf")


# -- metadata that is wrong, or that asks for something else ----------------------------------------------------------


def content_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors of a recorded file, to be written again. The tensors are zeros."""
    read, shapes = read_gguf(FOLDER / f"{name}.gguf"), dict[str, tuple[int, ...]]()
    for placed in read.tensors.values():
        own, (rows, *others) = placed.tensor.name, placed.tensor.shape
        shapes[own] = (rows + shapes.get(own, (0,))[0], *others)
    metadata = {key: list(value) if isinstance(value, tuple) else value for key, value in read.metadata.items()}
    return metadata, {own: as_f32(torch.zeros(shape)) for own, shape in shapes.items()}


def rewritten(tmp_path: Path, name: str = "bert", **changes: Any) -> Path:
    """The file with other metadata: `__` stands for a dot, and None for no such key."""
    metadata, tensors = content_of(name)
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    return write(tmp_path / "model.gguf", {key: value for key, value in metadata.items() if value is not None}, tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bert__attention__causal": True}, "bert.attention.causal must be false: the tokens of an encoder see all"),
        ({"bert__attention__layer_norm_epsilon": None}, "the metadata lacks bert.attention.layer_norm_epsilon"),
        ({"bert__expert_count": 4}, "bert.expert_count must be 0 in this family, but is 4"),
        ({"bert__embedding_length": 33}, "by config.json|hidden_size must be"),
        ({"general__architecture": "nomic-bert-moe"}, "nomic-bert-moe cannot be served: experts of an encoder"),
        ({"general__architecture": "jina-bert-v3"}, "jina-bert-v3 cannot be served: .* LoRA"),
    ],
)
def test_other_metadata_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ModelError, ValueError), match=message):
        describe_encoder(read_gguf(rewritten(tmp_path, **changes)).config)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bert-q8_0", {"bos_token_id": 170}, "tokenizer.ggml.bos_token_id must be an id from 0 to 169, but is 170"),
        ("bert", {"seperator_token_id": 10**6}, "tokenizer.ggml.seperator_token_id must be an id from 0 to"),
        ("xlm-roberta-classifier", {"bos_token_id": None, "cls_token_id": None}, "lacks tokenizer.ggml.bos_token_id"),
        ("xlm-roberta-classifier", {"scores": None}, "the metadata lacks tokenizer.ggml.scores"),
        ("xlm-roberta-classifier", {"precompiled_charsmap": [300]}, "precompiled_charsmap must be an array of bytes"),
        ("bert", {"model": "rwkv"}, "tokenizer.ggml.model must be one of .*bert, t5, but is 'rwkv'"),
    ],
)
def test_other_tokenizers_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = rewritten(tmp_path, name, **{f"tokenizer__ggml__{key}": value for key, value in changes.items()})
    with pytest.raises(ModelError, match=message):
        Documents(path).made_tokenizer()


def test_an_old_file_does_not_say_whether_texts_are_lowered(tmp_path: Path) -> None:
    """Its vocabulary tells."""
    for name in ("bert", "bert-cased-fused"):
        changes = {"tokenizer__ggml__normalizer__lowercase": None, "tokenizer__ggml__normalizer__strip_accents": None}
        made = Documents(rewritten(tmp_path, name, **changes)).made_tokenizer()
        assert made is not None
        tokenizer = Tokenizer.from_str(made.decode())
        case = next(case for case in CASES if case.name == name)
        assert [tokenizer.encode(text).ids for text in TEXTS] == recorded(case)["texts"]


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    metadata, tensors = content_of("bert-cased-fused")
    tensors["blk.0.attn_q.weight"] = as_f32(torch.zeros(32, 32))
    path = write(tmp_path / "model.gguf", metadata, tensors)
    with pytest.raises(ModelError, match=r"are both encoder.layer.0.attention.self.query.weight"):
        read_gguf(path)


@pytest.mark.parametrize(("kind", "message"), [(7, "from 0 to 4, but is 7"), ("mean", "but is 'mean'")])
def test_an_unknown_pooling_is_refused(kind: object, message: str, tmp_path: Path) -> None:
    path = rewritten(tmp_path, bert__pooling_type=kind)
    with pytest.raises(ModelError, match=message):
        SentenceFolder.read(path, read_gguf(path))


def test_a_rerankers_pooling_gives_no_vectors(tmp_path: Path) -> None:
    path = rewritten(tmp_path, bert__pooling_type=4)
    found = SentenceFolder.read(path, read_gguf(path))
    assert found is not None and found.unsupported.startswith("the file is a reranker")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = Path(shutil.copy(FOLDER / "bert.gguf", tmp_path))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(ModelError, match="truncated"):
        read_gguf(path)


def test_tensors_that_contradict_the_metadata_are_refused(tmp_path: Path) -> None:
    path = rewritten(tmp_path, bert__feed_forward_length=96)
    with pytest.raises(ModelError, match=r"the weights contradict the metadata: 6 of another shape: encoder\.layer\.0"):
        EncoderFacts.of(Checkpoint.read(path))
