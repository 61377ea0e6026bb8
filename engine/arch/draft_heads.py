"""Draft heads: one layer that drafts from hidden states of the model that it was trained for. Their configs, and the
names of their tensors.

An EAGLE-3 head (Li et al. 2025, arXiv:2503.01840) has a checkpoint of its own, in one of two formats: that of the
paper's authors, or that of the library speculators. An MTP layer is part of the served model's checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from inferd.engine.arch.description import Arch, ArchError, DraftHeadKind, DraftHeadParts
from inferd.engine.arch.families import llama
from inferd.engine.arch.fields import Fields
from inferd.engine.arch.matrices import norm, of_layer, state_projection, token_offsets
from inferd.engine.arch.matrix import Component
from inferd.engine.arch.tensors import TensorNames, weight_map
from inferd.engine.arch.weights import Source, WeightMap

EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
_NAMES = TensorNames(attention_norm=None)
_LAYER = "model.layers.0."
_LAYERS = ("midlayer.", "layers.0.")
_MOST_READ = 64
"""Most hidden states that a head may read."""


@dataclass(frozen=True, slots=True)
class MTPNames:
    """A family's names of the first MTP layer's tensors."""

    layer: str
    """Beginning of all of them. `{}` stands for the number of the model's layers."""
    projection: str
    embedding_norm: str
    state_norm: str
    norm: str
    reads_embedding_first: bool = False
    """Whether the inputs of the projection are the embedding, and then the hidden state."""
    copies: tuple[str, ...] = ()
    """Tensors that are copies of the model's. They are not read."""

    @property
    def is_behind(self) -> bool:
        """Whether the layer has the number behind the last layer's."""
        return "{}" in self.layer


MTP_LAYERS = "model.mtp_layers."
"""Beginning of the names of the tensors of all MTP layers of MiMo."""
MIMO = MTPNames(f"{MTP_LAYERS}0.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
DEEPSEEK = MTPNames(
    "model.layers.{}.",
    "eh_proj",
    "enorm",
    "hnorm",
    "shared_head.norm",
    reads_embedding_first=True,
    copies=("embed_tokens.", "shared_head.head."),
)
"""Names of DeepSeek V3, which GLM-4.5 has too."""


def is_draft_head(config: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json says that its checkpoint is a draft head."""
    names = config.get("architectures")
    is_named = isinstance(names, list) and any(name in EAGLE3_ARCHITECTURES for name in names)
    return is_named or "speculators_model_type" in config


def describe_draft_head(config: Mapping[str, Any]) -> Arch:
    """The draft head that a parsed config.json describes. Raises `ArchError`."""
    fields = Fields(config, EAGLE3_ARCHITECTURES[0])
    if fields.has("speculators_model_type") and fields.value("speculators_model_type") != "eagle3":
        raise fields.refuse("speculators_model_type", "must be eagle3")
    if fields.has("quantization_config"):
        raise fields.refuse("quantization_config", "must be absent from a draft head")
    layer = fields.section("transformer_layer_config")
    if layer is None:
        layer = fields
    elif not (layer.has("dtype") or layer.has("torch_dtype")):
        layer = layer.with_defaults(dtype=fields.dtype())
    if layer.integer("num_hidden_layers", default=1) != 1:
        raise layer.refuse("num_hidden_layers", "must be 1 for a draft head")
    arch = llama.describe(EAGLE3_ARCHITECTURES[0], layer.with_defaults(num_hidden_layers=1, hidden_act="silu"))
    num_tokens = fields.integer("draft_vocab_size", default=arch.vocab_size, maximum=arch.vocab_size)
    draft_head = DraftHeadParts(
        DraftHeadKind.EAGLE3,
        state_size=fields.integer("target_hidden_size", default=arch.hidden_size),
        layers_read=_layers_read(fields),
        num_tokens=num_tokens,
        maps_tokens=num_tokens < arch.vocab_size,
        norms_residual=fields.boolean("norm_before_residual", default=False),
    )
    return replace(arch, tie_embeddings=False, draft_head=draft_head)


def mtp_layer(arch: Arch, names: MTPNames) -> Arch:
    """The first MTP layer of a served model of `arch`."""
    draft_head = DraftHeadParts(
        DraftHeadKind.MTP,
        arch.hidden_size,
        layers_read=(),
        num_tokens=arch.vocab_size,
        reads_embedding_first=names.reads_embedding_first,
        layer=names.layer.format(arch.num_layers),
    )
    return replace(
        arch,
        num_layers=1,
        ropes=arch.ropes[-1:],
        windows=(None,),
        tie_embeddings=False,
        experts=None if arch.experts is None else replace(arch.experts, layers=(0,)),
        draft_head=draft_head,
    )


def _layers_read(fields: Fields) -> tuple[int, ...] | None:
    """Number of layers before each hidden state that is read; None if the config does not say. At the top level, and
    in vLLM, number i is the input of layer i. In `eagle_config`, and in SGLang, it is the output of layer i."""
    name, section = "eagle_aux_hidden_state_layer_ids", fields.section("eagle_config")
    holder, shift = (fields, 0) if fields.has(name) or section is None else (section, 1)
    if not holder.has(name):
        return None
    found = holder.value(name)
    if not isinstance(found, list) or not 1 <= len(found) <= _MOST_READ or any(type(one) is not int for one in found):
        raise holder.refuse(name, f"must be a list of 1 to {_MOST_READ} whole numbers")
    return tuple(number + shift for number in found)


def layers_read_by(draft_head: DraftHeadParts, num_layers: int) -> tuple[int, ...]:
    """Number of layers of the served model before each hidden state that the head reads. Raises `ArchError` if the
    served model has too few layers."""
    read = draft_head.layers_read
    if read is None:
        read = (2, num_layers // 2, num_layers - 3)
    wrong = [number for number in read if not 0 <= number <= num_layers]
    if wrong:
        raise ArchError(
            f"the draft head reads the hidden state behind {wrong[0]} layers, but the served model has {num_layers}"
        )
    return read


def num_read(head: DraftHeadParts) -> int:
    """Number of hidden states that a head reads at each position."""
    return max(num_joined(head), 1)


def num_joined(head: DraftHeadParts) -> int:
    """Number of these that stand beside the final ones. A head that reads the final ones has none."""
    return 3 if head.layers_read is None else len(head.layers_read)


def as_stored(arch: Arch, tensors: Mapping[str, Any]) -> Arch:
    """`arch` with what config.json does not say of a draft head: how its tensors are named, and which it leaves out."""
    head = arch.draft_head
    assert head is not None
    if head.kind is DraftHeadKind.MTP:
        return arch
    body = "model." if any(name.startswith("model.") for name in tensors) else ""
    layer = next((own for own in _LAYERS if any(name.startswith(body + own) for name in tensors)), _LAYERS[0])
    found = replace(
        head,
        has_embedding=f"{body}embed_tokens.weight" in tensors,
        maps_tokens=head.maps_tokens or f"{body}d2t" in tensors,
        body=body,
        layer=body + layer,
    )
    return replace(arch, draft_head=found)


def mtp_weights(arch: Arch, names: MTPNames, of_layer: TensorNames) -> WeightMap:
    """Every tensor of an MTP layer. `of_layer`: the names of the family's layers."""
    assert arch.draft_head is not None
    size, layer = arch.hidden_size, arch.draft_head.layer
    sources = [
        replace(source, tensor=source.tensor.replace(_LAYER, layer).replace("model.norm", f"{layer}{names.norm}"))
        for source in weight_map(arch, of_layer).sources
        if source.of.component not in (Component.HEAD, Component.EMBEDDING)
    ]
    sources += [
        Source.whole(f"{layer}{names.projection}.weight", state_projection(arch, 2 * size)),
        _norm(f"{layer}{names.embedding_norm}.weight", "embedding_norm", size),
        _norm(f"{layer}{names.state_norm}.weight", "state_norm", size),
    ]
    return WeightMap(tuple(sources), unread=tuple(layer + name for name in names.copies))


def eagle3_weights(arch: Arch) -> WeightMap:
    """Every tensor of an EAGLE-3 head."""
    assert arch.draft_head is not None
    head, size = arch.draft_head, arch.hidden_size
    sources = [
        replace(source, tensor=source.tensor.replace(_LAYER, head.layer).replace("model.", head.body))
        for source in weight_map(arch, _NAMES).sources
        if source.of.component is not Component.EMBEDDING or head.has_embedding
    ]
    sources += [
        Source.whole(f"{head.body}fc.weight", state_projection(arch, num_read(head) * head.state_size)),
        _norm(f"{head.layer}input_layernorm.weight", "embedding_norm", size),
        _norm(f"{head.layer}hidden_norm.weight", "state_norm", size),
    ]
    if head.maps_tokens:
        offsets = Source.whole(f"{head.body}d2t", token_offsets(head.num_tokens))
        sources.append(replace(offsets, dtypes=("I64", "I32")))
    return WeightMap(tuple(sources), unread=(f"{head.body}t2d",))


def _norm(tensor: str, own: str, size: int) -> Source:
    return Source.whole(tensor, norm(own, size, of_layer(0)))
