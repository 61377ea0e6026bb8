"""A decoder whose tokens see those behind them too, with the calls of an `Encoder`.

It has the layers of every family of decoders, and keeps no K and V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.layers.packed_batch import PackedBatch, sequence_means
from inferd.engine.models.decoder import Decoder
from inferd.engine.quant.recipe import UNQUANTIZED, Recipe
from inferd.kernels.ops.embed import embed


class PackedDecoder:
    """Model of a bidirectional `arch`; the arguments are those of `Encoder`, and so is what it promises of bits."""

    num_token_types = 0

    def __init__(
        self,
        arch: Arch,
        dtype: torch.dtype,
        device: torch.device | str,
        max_positions: int | None = None,
        recipe: Recipe = UNQUANTIZED,
    ) -> None:
        assert arch.is_bidirectional and (max_positions is None or max_positions <= arch.max_positions)
        self._decoder = Decoder(arch, dtype, device, max_positions, recipe=recipe)
        self.arch, self.dtype, self.device = arch, dtype, self._decoder.device
        self.max_positions = max_positions or arch.max_positions
        self.parameters = self._decoder.parameters
        """By their names in the weight map."""
        self.num_table_bytes = self._decoder.num_table_bytes
        """Bytes of the rotary tables, which a plan counts apart from the weights."""

    def forward(self, token_ids: Tensor, starts: Tensor, token_types: Tensor | None = None) -> Tensor:
        """As of `Encoder`. There are no token types."""
        del token_types
        return self._decoder.encode(token_ids, PackedBatch.of(starts))

    def logits(self, hidden: Tensor, starts: Tensor) -> Tensor:
        """[sequences, labels] fp32 of the classifier, from the result of `forward`. Every sequence has a token."""
        if not self.arch.labels_mean:
            return self._decoder.labels(embed(starts[1:].to(torch.int64) - 1, hidden))
        return self._decoder.labels(sequence_means(hidden, starts))
