"""The description that nearly every encoder starts from, read from config.json fields that nearly all of them share."""

from __future__ import annotations

from collections.abc import Mapping

from inferd.engine.arch.base import num_layers_of
from inferd.engine.arch.description import Activation
from inferd.engine.arch.encoder import EncoderArch, PositionTable
from inferd.engine.arch.fields import Fields

ACTIVATIONS = {
    "gelu": Activation.GELU_ERF,
    "gelu_python": Activation.GELU_ERF,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
"""Activations of an MLP without a gate."""

MAX_LABELS = 2**16
"""Most labels of a classifier."""


def bert_like(
    architecture: str,
    fields: Fields,
    *,
    positions: PositionTable | None = None,
    num_token_types: int = 0,
    max_positions: int | None = None,
    activation: str = "hidden_act",
    activations: Mapping[str, Activation] = ACTIVATIONS,
    norm_eps: str = "layer_norm_eps",
) -> EncoderArch:
    """A plain BERT, with norms after the adds and biases everywhere. `activation` and `norm_eps` are names of fields.

    `max_positions`: most tokens of a text (default: all that have a row in `positions`). Raises `ArchError` as `Fields`
    does.
    """
    defaults = {norm_eps: 1e-12, activation: "gelu", "position_embedding_type": "absolute"}
    fields = fields.with_defaults(**defaults)
    if fields.boolean("is_decoder", default=False):
        raise fields.refuse("is_decoder", "must be false: a decoder's tokens see no later ones")
    if positions is not None:
        fields.choice("position_embedding_type", {"absolute": None})
        max_positions = positions.num_rows - positions.first_row
    assert max_positions is not None
    num_heads = fields.integer("num_attention_heads")
    return EncoderArch(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers_of(fields),
        num_heads=num_heads,
        head_dim=fields.head_dim(num_heads),
        max_positions=max_positions,
        norm_eps=fields.positive(norm_eps),
        activation=fields.choice(activation, activations),
        dtype=fields.dtype(),
        positions=positions,
        num_token_types=num_token_types,
    )


def learned_positions(fields: Fields, padding_id: int | None = None) -> PositionTable:
    """The table of `max_position_embeddings` rows. `padding_id`: as of `PositionTable`, and the number of its row.
    Raises `ArchError` if no row is left for a token."""
    first_row = 0 if padding_id is None else padding_id + 1
    fields = fields.with_defaults(max_position_embeddings=512)
    return PositionTable(fields.integer("max_position_embeddings", minimum=first_row + 1), first_row, padding_id)


def num_labels(fields: Fields) -> int:
    """Number of labels of a classifier: those that `id2label` names, else `num_labels`, else two.

    Raises `ArchError` for too many.
    """
    named = fields.section("id2label")
    if named is not None and named.names():
        if len(named.names()) > MAX_LABELS:
            raise fields.refuse("id2label", f"must have at most {MAX_LABELS} names")
        return len(named.names())
    return fields.integer("num_labels", default=2, maximum=MAX_LABELS)
