"""Turns the metadata of a GGUF file into the fields of the config.json that the model was converted from.

So each family file reads both. It knows the keys that llama.cpp writes. `families` has what differs among families.
"""

from __future__ import annotations

from inferd.engine.arch.gguf.families import FAMILIES
from inferd.engine.arch.gguf.header import GgufError
from inferd.engine.arch.gguf.metadata import (
    CLASSES,
    KEY,
    RANKS,
    ROTATED,
    VALUE,
    Config,
    GgufFamily,
    Metadata,
    dtype_of,
    labels_of,
    layers_with,
    neutral,
    num_layers,
    vocab_size_of,
)
from inferd.engine.arch.gguf.ropes import rope_scaling
from inferd.engine.arch.shown import shown

VISION = "clip"
"""Architecture of a file that holds the other parts of a model than text, which is called mmproj."""


def family_of(of: Metadata) -> GgufFamily:
    family = FAMILIES.get(of.architecture)
    if of.architecture == VISION:
        raise GgufError("this file holds the parts of a model that see or hear; give the file of its text part")
    if family is None:
        raise GgufError(f"unknown architecture {shown(of.architecture)}; known are: {', '.join(FAMILIES)}")
    return family


def config_of(of: Metadata) -> Config:
    """config.json of the model. The family file checks the values. Raises `GgufError` for a key that is missing, and
    for one whose value asks for something that the family does not compute."""
    family = family_of(of)
    neutral(of, family.reads)
    heads = of.required("attention.head_count")
    config = {
        "architectures": [family.architecture],
        "model_type": of.architecture,
        "vocab_size": vocab_size_of(of),
        "hidden_size": of.required("embedding_length"),
        "intermediate_size": _mlp_size(of),
        "num_hidden_layers": num_layers(of),
        "num_attention_heads": heads,
        "num_key_value_heads": _one_of(of.get("attention.head_count_kv", heads)),
        "max_position_embeddings": of.required("context_length"),
        "rms_norm_eps": of.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": of.get("rope.freq_base", 1e4),
        "hidden_act": "silu",
        "attention_bias": bool(layers_with(of, "attn_q.bias")),
        "mlp_bias": bool(layers_with(of, "ffn_up.bias")),
        "tie_word_embeddings": "output.weight" not in of.tensors,
        "dtype": dtype_of(of),
        "head_dim": _head_dim(of),
        "partial_rotary_factor": _turned_part(of) if family.turns_part else None,
        "rope_scaling": rope_scaling(of),
    }
    found = {name: value for name, value in config.items() if value is not None} | family.fields(of)
    return found | (_classifier(of, found["architectures"][0]) if CLASSES in of.tensors else {})


def _classifier(of: Metadata, generating: str) -> Config:
    """Fields of a decoder's classifier. A reranker's file has the rows of the head for the tokens "yes" and "no"."""
    labels = labels_of(of)
    is_reranker = of.get("pooling_type") == RANKS
    if is_reranker and len(labels) != 2:
        raise of.refuse("classifier.output_labels", "must be those of two tokens, the first for texts that match")
    return {
        "architectures": [generating.removesuffix("ForCausalLM") + "ForSequenceClassification"],
        "id2label": labels,
        "compares_labels": is_reranker,
    }


def _one_of(value: object) -> object:
    """A list with the same value for each layer as one value."""
    return value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value


def _mlp_size(of: Metadata) -> object:
    """Size of the MLP. If each layer with one has experts, a file may state theirs alone."""
    size = of.get("feed_forward_length")
    return of.required("feed_forward_length") if size is None and not of.get("expert_count") else size


def _head_dim(of: Metadata) -> int | None:
    """Size of a head; None if the file leaves it to be computed."""
    stated = {name: of.whole(name) for name in (KEY, VALUE, ROTATED) if of.get(name) is not None}
    if stated.get(VALUE, stated.get(KEY)) != stated.get(KEY):
        raise of.refuse(VALUE, f"must be {KEY}, {shown(stated.get(KEY))}")
    if family_of(of).turns_part:
        return stated.get(KEY)
    found = stated.get(KEY, stated.get(ROTATED))
    if stated.get(ROTATED, found) != found:
        raise of.refuse(ROTATED, f"must be the size of a head, {shown(found)}")
    return found


def _turned_part(of: Metadata) -> float | None:
    """The part of a head that rope turns; None if the file does not say."""
    if of.get(ROTATED) is None:
        return None
    head_dim = _head_dim(of) or of.whole("embedding_length") // of.whole("attention.head_count")
    rotated = of.whole(ROTATED)
    # Half a number more, so that the product with head_dim is rounded down to the same number.
    return 1.0 if rotated == head_dim else (rotated + 0.5) / max(1, head_dim)
