"""Measures how far a quantized model's next-token distribution is from the exact one: `python -m tests.cpu.divergence`.

The text is the embedded model's part of conversations that were held out of its training. Each token is predicted after
the true earlier ones. KL(p || q) in nats is the extra cost of a token drawn from p for a model that predicts q.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples.tiny.batches import encode_conversation
from examples.tiny.mixture import Mixture
from inferd.engine.api.checkpoint import EMBEDDED_PATH, Checkpoint
from inferd.engine.arch.registry import describe
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import load
from inferd.engine.quant.recipe import RECIPES, Recipe
from inferd.kernels.ops.kv_format import KV_FORMATS
from tests.cpu.checkpoints import read_config
from tests.cpu.paging import prompt_logits

_SEED = 5


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids of one conversation, and the positions after which the model speaks."""

    token_ids: list[int]
    positions: list[int]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Divergence of one model from another, over all positions."""

    mean_kl: float
    """Mean KL divergence in nats a token."""
    top_1: float
    """Share of positions at which both models have the same most likely token."""
    num_tokens: int


def held_out_texts(count: int) -> list[Text]:
    mixture, tokenizer = Mixture(_SEED, held_out=True), Tokenizer.from_file(str(EMBEDDED_PATH / "tokenizer.json"))
    texts = []
    for _ in range(count):
        ids, targets = encode_conversation(mixture.draw(), tokenizer)
        texts.append(Text(ids, [position - 1 for position, target in enumerate(targets) if target >= 0]))
    return texts


def embedded_decoder(recipe: Recipe, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(describe(read_config(EMBEDDED_PATH)), dtype, "cpu", recipe=recipe)
    load(decoder, Checkpoint.read(EMBEDDED_PATH).tensors)
    return decoder


def log_probs(decoder: Decoder, texts: list[Text], kv_dtype: torch.dtype | None = None) -> Tensor:
    """[tokens of all texts, vocab] fp64. K and V are in `kv_dtype` if it is given."""
    parts = [prompt_logits(decoder, text.token_ids, [len(text.token_ids)], kv_dtype)[text.positions] for text in texts]
    return torch.cat(parts).double().log_softmax(1)


def divergence(exact: Tensor, other: Tensor) -> Divergence:
    """Divergence between two models' `log_probs` on the same texts."""
    kl = (exact.exp() * (exact - other)).sum(1)
    is_same = exact.argmax(1) == other.argmax(1)
    return Divergence(float(kl.mean()), float(is_same.double().mean()), len(kl))


def main() -> None:
    texts = held_out_texts(300)
    exact = log_probs(embedded_decoder(RECIPES["none"]), texts)
    models: Mapping[str, Decoder] = {
        "bfloat16": embedded_decoder(RECIPES["none"], torch.bfloat16),
        **{f"{name}, {dtype}": embedded_decoder(RECIPES[name], dtype)
           for name in ("fp8", "int8", "int4") for dtype in (torch.float32, torch.bfloat16)},
    }  # fmt: skip
    for name, model in models.items():
        for kv_dtype in (None, *KV_FORMATS):
            if kv_dtype is not None and name != "bfloat16":
                continue
            found = divergence(exact, log_probs(model, texts, kv_dtype))
            shown = name if kv_dtype is None else f"{name}, {kv_dtype} KV"
            print(f"{shown:24} KL {found.mean_kl:.6f}  top 1 {found.top_1:.4f}  of {found.num_tokens} tokens")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
