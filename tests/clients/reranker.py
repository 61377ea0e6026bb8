"""Serves a small reranker with random weights until its standard input ends: `python -m tests.clients.reranker`.

Prints the server's URL. The embedded model cannot rerank, so the checks of clients that do start this.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from tests.clients.run import started

NAME = "reranker"
_SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        inferd = str(Path(sys.executable).parent / "inferd")
        with started([inferd, "serve", folder, "--served-model-name", NAME, "--dtype", "float32"]) as url:
            print(url, flush=True)
            sys.stdin.read()


def save(folder: Path) -> None:
    """Write the model, whose tokens are letters."""
    letters = [*_LETTERS, *(f"##{letter}" for letter in _LETTERS)]
    vocabulary = _SPECIAL | {token: i for i, token in enumerate(letters, len(_SPECIAL))}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    TokenizersBackend(tokenizer_object=backend).save_pretrained(folder)
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        num_labels=1,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
