"""Writes rerankers to tests/cpu/gguf_encoders: tiny random models of Qwen3-Reranker's kind as llama.cpp's own converter
writes them, and the scores that transformers computes from the folders that they were converted from.

`python -m tests.cpu.record_gguf_rerankers LLAMA_CPP` takes a checkout of llama.cpp, and needs the package `gguf`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from inferd.engine.arch.gguf.splitters import SPLITTERS
from tests.cpu.record_gguf_encoders import FOLDER, convert, page

CASES = {"qwen3-reranker": True, "qwen3-reranker-untied": False}
"""Name of a file -> whether the head is the embedding."""
PAIRS = (("the cache", "What the scheduler does"), ("a", "b c"), ("na\u00efve\n", "  two spaces"), ("x" * 30, "a"))
PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The published prompt (Zhang et al. 2025, arXiv:2506.05176)."""
INSTRUCTIONS = ("Given a web search query, retrieve relevant passages that answer the query", "Find the other one")
_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


def tokenizer() -> TokenizersBackend:
    """Qwen's kind, in which "yes" and "no" are tokens."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLITTERS["qwen2"].patterns[0]), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*page(), *["yes\nno"] * 2000], trainer)
    backend.add_tokens([AddedToken(mark, special="think" not in mark, normalized=False) for mark in _MARKS])
    return TokenizersBackend(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def scores(model: Any, read: TokenizersBackend, instruction: str) -> list[float]:
    """The probability of "yes" beside that of "no"."""
    words, found = [read.convert_tokens_to_ids(word) for word in ("yes", "no")], []
    for query, document in PAIRS:
        ids = read(PROMPT.format(instruction=instruction, query=query, document=document), return_tensors="pt")
        with torch.inference_mode():
            found.append(float(model(ids["input_ids"]).logits[0, -1, words].softmax(-1)[0]))
    return found


def record(name: str, llama_cpp: Path) -> None:
    read = tokenizer()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = Qwen3Config(
            vocab_size=len(read), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=CASES[name],
            eos_token_id=read.eos_token_id, pad_token_id=read.pad_token_id,
        )  # fmt: skip
        torch.manual_seed(1)
        model: Any = Qwen3ForCausalLM(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
            parameter.data.copy_(parameter.half())
        model.save_pretrained(folder)
        read.save_pretrained(folder)
        (folder / "README.md").write_text("# Qwen3-Reranker")
        convert(llama_cpp, folder, FOLDER / f"{name}.gguf", "f16", "qwen2", ())
    found = {instruction: scores(model, read, instruction) for instruction in INSTRUCTIONS}
    (FOLDER / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for name in CASES:
        record(name, Path(sys.argv[1]))
