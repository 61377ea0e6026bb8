"""One encoder for every family, composed from the family's `EncoderArch`.

It turns the token ids of packed sequences into hidden states, and into the logits of a classifier. It knows no
requests, no pooling of embeddings and no files: `loader` fills the parameters that it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inferd.engine.arch.encoder import EncoderArch
from inferd.engine.layers.disentangled import DistanceTable
from inferd.engine.layers.encoder import (
    Alibi,
    Bias,
    BiasTable,
    ClassifierHead,
    EncoderEmbedding,
    EncoderInputs,
    EncoderLayer,
    encoder_norm,
)
from inferd.engine.layers.packed_batch import PackedBatch
from inferd.engine.layers.placement import Placement
from inferd.engine.layers.rotary import cos_sin_table
from inferd.engine.quant.recipe import UNQUANTIZED, Recipe

_TOKENS_TOGETHER = 1024
"""Most tokens of several sequences that a CPU computes through all layers at once. The states between layers then stay
in its caches, and their memory is used again. All-MiniLM-L6 takes 128 texts of 16 tokens 1.12 times as fast as all at
once, and 32 of 512 tokens 1.37 times; in int8 1.38 and 1.5 times (2 cores of an Intel Xeon, 2026-12-01)."""


def _spans(starts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of sequences with at most `_TOKENS_TOGETHER` tokens, or of one that has more: the first, and that after the
    last."""
    first = 0
    for end in range(1, len(starts)):
        if end == len(starts) - 1 or starts[end + 1] - starts[first] > _TOKENS_TOGETHER:
            yield first, end
            first = end


class Encoder:
    """Model of `arch` in `dtype` on `device`, for sequences of at most `max_positions` tokens (default: all that the
    model knows). `recipe` says how linear layers store their weights. Raises `QuantizationError` if it cannot store
    one.

    The result of a sequence depends on that sequence alone, bit for bit, whatever it is packed with.
    """

    def __init__(
        self,
        arch: EncoderArch,
        dtype: torch.dtype,
        device: torch.device | str,
        max_positions: int | None = None,
        recipe: Recipe = UNQUANTIZED,
    ) -> None:
        assert max_positions is None or max_positions <= arch.max_positions
        place = Placement(dtype, torch.device(device), recipe)
        self.arch, self.dtype, self.device = arch, dtype, place.device
        self.max_positions, self.num_token_types = max_positions or arch.max_positions, arch.num_token_types
        self.parameters = place.parameters
        """By their names in the weight map."""
        self._embedding = EncoderEmbedding(arch, place)
        bias: Bias | None = None
        if arch.relative_bias is not None:
            bias = BiasTable(arch, place)
        elif arch.disentangled is not None:
            bias = DistanceTable(arch, place)
        elif arch.has_alibi:
            bias = Alibi(arch.num_heads, self.max_positions, place.device)
        stored = [EncoderLayer(arch, layer, place, bias) for layer in range(arch.num_stored_layers)]
        self._layers = [stored[layer // arch.num_uses] for layer in range(arch.num_layers)]
        self._norm = encoder_norm(arch, place, "norm") if arch.has_pre_norms else None
        self._classifier = None if arch.classifier is None else ClassifierHead(arch, place)
        tables = {rope: cos_sin_table(rope, self.max_positions, place.device) for rope in set(arch.ropes)}
        ropes = (arch.rope(layer) for layer in range(arch.num_layers))
        self._cos_sin = [None if rope is None else tables[rope] for rope in ropes]
        alibi_bytes = bias.distances.nbytes if isinstance(bias, Alibi) else 0
        self.num_table_bytes = sum(table.nbytes for table in tables.values()) + alibi_bytes
        """Bytes of the tables that no checkpoint holds, which a plan counts apart from the weights."""

    def forward(self, token_ids: Tensor, starts: Tensor, token_types: Tensor | None = None) -> Tensor:
        """Final hidden states [T, hidden] in the model's dtype.

        token_ids [T] int64. starts [sequences + 1] int32: the first token of each sequence, and at the end T. A
        sequence has at most `max_positions` tokens. token_types [T] int64; None: all are of the first type. A model
        without types ignores them.
        """
        if self.device.type != "cpu" or len(token_ids) <= _TOKENS_TOGETHER:
            return self.compute(self.inputs_of(token_ids, starts, token_types))
        out, bounds = torch.empty((len(token_ids), self.arch.hidden_size), dtype=self.dtype), starts.tolist()
        for first, end in _spans(bounds):
            own = slice(bounds[first], bounds[end])
            types = None if token_types is None else token_types[own]
            out[own] = self.compute(self.inputs_of(token_ids[own], starts[first : end + 1] - starts[first], types))
        return out

    def inputs_of(self, token_ids: Tensor, starts: Tensor, token_types: Tensor | None = None) -> EncoderInputs:
        """The inputs of `compute`, from those of `forward`."""
        return self._embedding.inputs_of(token_ids, PackedBatch.of(starts), token_types)

    def compute(self, of: EncoderInputs) -> Tensor:
        """The result of `forward`, of all sequences at once."""
        x, residual = self._embedding(of), None
        for layer, cos_sin in zip(self._layers, self._cos_sin, strict=True):
            x, residual = layer(x, residual, of.batch, cos_sin)
        if self._norm is None:
            return x
        assert residual is not None
        return self._norm.add(x, residual)[0]

    def logits(self, hidden: Tensor, starts: Tensor) -> Tensor:
        """[sequences, labels] fp32 of the classifier, from the result of `forward`. Every sequence has a token."""
        assert self._classifier is not None, f"{self.arch.architecture} has no classifier"
        return self._classifier(hidden, starts)
