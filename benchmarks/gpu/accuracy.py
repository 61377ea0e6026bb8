"""The cost of FP8 weights in accuracy: the distance between next-token distributions of FP8 and bf16, for each layer
alone and for all.

It is measured on the embedded model over held-out text, and on random weights of a published shape. The flat
distribution of random weights says little about a reader's loss; it shows which layers carry it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import BLOCK_SIZE, MODELS, QUANTIZATION, random_decoder, random_ids
from benchmarks.gpu.points import Case, Trial
from inferd.engine.arch.registry import describe
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import load
from inferd.engine.quant.recipe import RECIPES
from inferd.kernels.ops.paged_attention import AttentionBatch

_ROWS = 256
"""Positions whose logits exist at one time."""


@dataclass(frozen=True, slots=True)
class Text:
    """Ids of one sequence, and the positions whose next token counts."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]


def embedded(bench: Bench) -> None:
    """The embedded model on held-out conversations."""
    from inferd.engine.api.checkpoint import EMBEDDED_PATH, Checkpoint  # noqa: PLC0415
    from tests.cpu.divergence import held_out_texts  # noqa: PLC0415

    def decoder(precision: str) -> Decoder:
        checkpoint = Checkpoint.read(EMBEDDED_PATH)
        recipe = RECIPES[QUANTIZATION[precision]]
        made = Decoder(describe(checkpoint.config), torch.bfloat16, bench.device, recipe=recipe)
        load(made, checkpoint.tensors)
        return made

    def texts() -> list[Text]:
        return [Text(tuple(t.token_ids), tuple(t.positions)) for t in held_out_texts(bench.pick(100, 3))]

    arch = describe(Checkpoint.read(EMBEDDED_PATH).config)
    _compare(bench, "embedded, held-out text", arch.num_layers, decoder, texts)


def random_weights(bench: Bench, model: str) -> None:
    """A published shape with random weights on random ids."""
    chosen = MODELS[bench.pick(model, "smoke")]
    length = bench.pick(1024, 24)
    ids = random_ids(length, chosen.shape.vocab_size, 3)

    def decoder(precision: str) -> Decoder:
        return random_decoder(chosen, bench.device, precision, length)

    layers = chosen.shape.num_hidden_layers
    _compare(bench, f"{model}, random weights", layers, decoder, lambda: [Text(ids, tuple(range(length)))])


def _compare(
    bench: Bench, name: str, num_layers: int, make: Callable[[str], Decoder], texts: Callable[[], list[Text]]
) -> None:
    bench.require("fp8")
    kept: list[tuple[Decoder, Decoder, list[Text], list[Tensor]]] = []
    variants = [("all and the head", None), *((f"layer {layer}", layer) for layer in range(num_layers))]
    for label, layer in variants:

        def trial(layer: int | None = layer) -> Trial:
            if not kept:
                exact, quantized, read = make("bf16"), make("fp8"), texts()
                kept.append((exact, quantized, read, list(_log_probs(exact, read))))
            exact, quantized, read, expected = kept[0]
            return _divergence(expected, _log_probs(_mixed(exact, quantized, layer), read))

        bench.measure(Case(table="FP8 accuracy", labels={"model": name, "in FP8": label}), trial)


def _mixed(exact: Decoder, quantized: Decoder, layer: int | None) -> Decoder:
    """`exact` with one layer of `quantized`; all layers if `layer` is None."""
    if layer is None:
        return quantized
    mixed = object.__new__(Decoder)
    mixed.__dict__.update(exact.__dict__)
    mixed._layers = [*exact._layers[:layer], quantized._layers[layer], *exact._layers[layer + 1 :]]
    return mixed


def _log_probs(decoder: Decoder, texts: Sequence[Text]) -> Iterator[Tensor]:
    """[positions, vocab] float32 of each text, in parts."""
    for text in texts:
        hidden = _hidden(decoder, text.ids)[torch.tensor(text.positions, device=decoder.device)]
        for part in torch.split(hidden, _ROWS):
            yield decoder.logits(part).log_softmax(-1)


def _hidden(decoder: Decoder, ids: Sequence[int]) -> Tensor:
    arch = decoder.arch
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    kv = torch.zeros(
        (arch.num_layers, num_blocks, 2, arch.num_kv_heads, BLOCK_SIZE, arch.head_dim),
        dtype=torch.bfloat16,
        device=decoder.device,
    )
    tables = torch.arange(num_blocks, dtype=torch.int32, device=decoder.device)[None]
    batch = AttentionBatch.build([(0, len(ids))], tables, BLOCK_SIZE, decoder.device)
    token_ids = torch.tensor(ids, device=decoder.device)
    return decoder.forward(token_ids, [batch] * len(arch.cache_groups), kv)


def _divergence(expected: Sequence[Tensor], others: Iterator[Tensor]) -> Trial:
    """KL in nats a token, and how often both agree on the most likely token."""
    total_kl, num_same, num_tokens = 0.0, 0, 0
    for exact, other in zip(expected, others, strict=True):
        total_kl += float((exact.exp() * (exact - other)).sum(dtype=torch.float64))
        num_same += int((exact.argmax(1) == other.argmax(1)).sum())
        num_tokens += exact.shape[0]
    return Trial(figures={"KL, nats a token": total_kl / num_tokens, "same first choice": num_same / num_tokens})
