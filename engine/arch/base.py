"""The description that nearly every family starts from, read from config.json fields that nearly all of them share."""

from __future__ import annotations

from inferd.engine.arch.description import Arch
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.rope import max_positions, read_rope
from inferd.engine.arch.rotary import Rope

_MAX_LAYERS = 10_000
"""A description has an entry for each layer. The bound is far above any model, and far below what exhausts memory."""


def num_layers_of(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", maximum=_MAX_LAYERS)


def base(
    architecture: str,
    fields: Fields,
    *,
    activation: str = "hidden_act",
    norm_eps: str = "rms_norm_eps",
    rope: Rope | None = None,
) -> Arch:
    """A plain decoder: RMS norms, gated MLP, full attention, no biases, `rope` (default: the config's) in every layer.

    `activation` and `norm_eps` are names of fields. Raises `ArchError` as `Fields` does.
    """
    num_heads, num_kv_heads = fields.heads()
    head_dim = fields.head_dim(num_heads)
    num_layers = num_layers_of(fields)
    rope = rope or read_rope(fields, head_dim)
    return Arch(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions(fields, rope.scaling),
        norm_eps=fields.positive(norm_eps),
        activation=fields.activation(activation),
        ropes=(rope,) * num_layers,
        attention_scale=head_dim**-0.5,
        tie_embeddings=fields.boolean("tie_word_embeddings", default=False),
        dtype=fields.dtype(),
        windows=(None,) * num_layers,
    )
