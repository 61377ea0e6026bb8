"""Over HTTP, rerankers and classifiers with random weights give the scores of transformers, whole and cut.

Each is saved by transformers, with a tokenizer that is trained here. The scores are those that transformers computes of
its own tokens, in fp32.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import AddedToken
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from tests.e2e.conftest import Daemon, start
from tests.unit.test_pair_template import FLAT, MARKS
from tests.unit.test_pairs import WORDS, bert, byte_level, xlm_roberta

IS_RECORDED = False

__all__ = ["start"]

CLOSE = 1e-5
"""Largest difference of a score. Measured: 6e-7. If the texts of the pairs change places, the scores differ by more."""
LONGEST = 64
"""Most tokens of a pair."""
SHAPE: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
}  # fmt: skip
YES, NO = 260, 261


def texts() -> list[tuple[str, str]]:
    draw = random.Random(11)
    lengths = ((2, 4), (5, 12), (1, 1), (9, 90), (40, 60), (3, 0), (4, 30))
    return [(" ".join(draw.choices(WORDS, k=m)), " ".join(draw.choices(WORDS, k=n))) for m, n in lengths]


def saved(model: PreTrainedModel, tokenizer: TokenizersBackend, path: Path) -> PreTrainedModel:
    """`model` with weights large enough that pairs differ, as a checkpoint in `path`."""
    torch.manual_seed(5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model.eval()


def logits_of(model: PreTrainedModel, tokenizer: TokenizersBackend, pairs: Sequence[tuple[str, str]]) -> torch.Tensor:
    """[pairs, labels] of transformers, each pair alone."""
    found = []
    with torch.inference_mode():
        for first, second in pairs:
            read = tokenizer(
                [first], [second], truncation="longest_first", max_length=LONGEST, return_tensors="pt",
                return_token_type_ids=model.config.type_vocab_size > 1,
            )  # fmt: skip
            found.append(model(**read).logits[0])
    return torch.stack(found)


def asked(url: str, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{url}{path}", json={"truncate": True, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def scores_of(url: str, pairs: Sequence[tuple[str, str]]) -> torch.Tensor:
    data = asked(url, "/v1/score", text_1=[first for first, _ in pairs], text_2=[second for _, second in pairs])["data"]
    return torch.tensor([item["score"] for item in data])


def check(url: str, expected: Callable[[Sequence[tuple[str, str]]], torch.Tensor]) -> None:
    """Scores, and the order of documents, are those that are `expected` of pairs."""
    pairs = texts()
    torch.testing.assert_close(scores_of(url, pairs), expected(pairs), rtol=0, atol=CLOSE)
    turned = [(second, first) for first, second in pairs]
    assert (scores_of(url, turned) - expected(pairs)).abs().max() > 10 * CLOSE, "the tolerance sees the order"
    query, documents = pairs[0][0], [second for _, second in pairs]
    found = asked(url, "/v1/rerank", query=query, documents=documents)["results"]
    ours = torch.tensor([result["relevance_score"] for result in sorted(found, key=lambda result: result["index"])])
    torch.testing.assert_close(ours, expected([(query, each) for each in documents]), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("family", ["bert", "xlm_roberta"])
def test_a_cross_encoder(family: str, start: Callable[..., Daemon], tmp_path: Path) -> None:
    if family == "bert":
        tokenizer = TokenizersBackend(tokenizer_object=bert())
        model: PreTrainedModel = BertForSequenceClassification(BertConfig(**SHAPE, num_labels=1, pad_token_id=0))
    else:
        tokenizer = TokenizersBackend(tokenizer_object=xlm_roberta())
        # Positions begin behind that of padding.
        shape = {**SHAPE, "max_position_embeddings": LONGEST + 2, "type_vocab_size": 1, "pad_token_id": 1}
        model = XLMRobertaForSequenceClassification(XLMRobertaConfig(**shape, num_labels=1))
    model = saved(model, tokenizer, tmp_path)
    url = start(str(tmp_path), "--dtype", "float32").url
    check(url, lambda pairs: torch.sigmoid(logits_of(model, tokenizer, pairs)[:, 0]))


def test_a_classifier_of_pairs(start: Callable[..., Daemon], tmp_path: Path) -> None:
    names = {0: "contradicts", 1: "follows", 2: "neither"}
    tokenizer = TokenizersBackend(tokenizer_object=bert())
    config = BertConfig(**SHAPE, id2label=names, label2id={name: i for i, name in names.items()}, pad_token_id=0)
    model = saved(BertForSequenceClassification(config), tokenizer, tmp_path)
    url, pairs = start(str(tmp_path), "--dtype", "float32").url, texts()
    found = asked(url, "/predict", inputs=[list(pair) for pair in pairs])
    ours = torch.tensor(
        [[{one["label"]: one["score"] for one in each}[name] for name in names.values()] for each in found]
    )
    torch.testing.assert_close(ours, torch.softmax(logits_of(model, tokenizer, pairs), -1), rtol=0, atol=CLOSE)
    assert httpx.post(f"{url}/v1/rerank", json={"query": "a", "documents": ["b"]}).status_code == 400


def test_a_model_that_answers_yes_or_no(start: Callable[..., Daemon], tmp_path: Path) -> None:
    backend = byte_level([])
    backend.add_tokens([AddedToken(mark, special="im" in mark, normalized=False) for mark in MARKS])
    tokenizer = TokenizersBackend(tokenizer_object=backend, chat_template=FLAT)
    shape = {**SHAPE, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    model = saved(Qwen3ForCausalLM(Qwen3Config(**shape)), tokenizer, tmp_path)
    modules = [("", "transformer.Transformer"), ("1_LogitScore", "logit_score.LogitScore")]
    listed = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in modules]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_LogitScore").mkdir()
    score = {"true_token_id": YES, "false_token_id": NO}
    (tmp_path / "1_LogitScore" / "config.json").write_text(json.dumps(score))

    def expected(pairs: Sequence[tuple[str, str]]) -> torch.Tensor:
        found = []
        with torch.inference_mode():
            for query, document in pairs:
                messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
                ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
                found.append(model(torch.tensor([ids])).logits[0, -1, [YES, NO]])
        return torch.softmax(torch.stack(found), -1)[:, 0]

    check(start(str(tmp_path), "--dtype", "float32").url, expected)
