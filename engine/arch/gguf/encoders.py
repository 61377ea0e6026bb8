"""The encoders that are read from GGUF files: config.json made from their metadata, and the original names of their
tensors.

llama.cpp calls every BERT, RoBERTa, XLM-RoBERTa and DistilBERT `bert`. Its converter has cut off the positions before
the first token's, so all of them but DistilBERT are read as BERT.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from inferd.engine.arch.encoder_registry import encoder_names
from inferd.engine.arch.encoder_tensors import SPLIT_GATE, EncoderNames
from inferd.engine.arch.gguf.header import GgufError, GgufTensor
from inferd.engine.arch.gguf.metadata import (
    CLASSES,
    Config,
    Metadata,
    dtype_of,
    labels_of,
    neutral,
    num_layers,
    vocab_size_of,
)
from inferd.engine.arch.gguf.ropes import rope_scaling
from inferd.engine.arch.gguf.tensors import PLAIN, PlacedTensor
from inferd.engine.arch.shown import shown

_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
_CLASSIFIER = ("cls.weight", CLASSES)
_CONVERTED = "give the folder with safetensors files that it was converted from"


@dataclass(frozen=True, slots=True)
class GgufEncoder:
    """How the files of one architecture are read."""

    family: Callable[[Metadata], str]
    """Beginning of the name in config.json's `architectures`."""
    fields: Callable[[Metadata], Config]
    """Fields of config.json beside the common ones."""
    norms: tuple[str, str] = ("attn_output_norm", "layer_output_norm")
    """Names of the norms of attention and MLP."""
    eps: str = "attention.layer_norm_epsilon"
    has_cls: bool = True
    """Whether CLS and SEP stand around a text, whatever the file says. Otherwise it says what does, as a decoder's."""


def _bert_family(of: Metadata) -> str:
    return "Bert" if "token_types.weight" in of.tensors else "DistilBert"


def _bert(of: Metadata) -> Config:
    positions = of.tensors.get("position_embd.weight")
    return {
        "max_position_embeddings": of.required("context_length") if positions is None else positions.shape[0],
        "hidden_act": "gelu",
    }


def _nomic_bert(of: Metadata) -> Config:
    return {
        "hidden_act": "silu",
        "rope_theta": of.get("rope.freq_base", 1e4),
        "rope_scaling": rope_scaling(of),
    }


def _jina_bert(of: Metadata) -> Config:
    if of.get("attention.max_alibi_bias", 8.0) != 8.0:
        raise of.refuse("attention.max_alibi_bias", "must be 8.0")
    return {
        "hidden_act": "gelu",
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "splits_matrices": "blk.0.ffn_gate.weight" in of.tensors,
    }


def _modern_bert(of: Metadata) -> Config:
    base = of.get("rope.freq_base", 1e4)
    return {
        "norm_eps": of.required("attention.layer_norm_epsilon"),
        "hidden_activation": of.get("hidden_act", "gelu"),
        "local_attention": of.required("attention.sliding_window"),
        "global_attn_every_n_layers": of.get("attention.sliding_window_pattern", 3),
        "global_rope_theta": base,
        "local_rope_theta": of.get("rope.freq_base_swa", base),
        "classifier_pooling": {1: "mean", 2: "cls"}.get(of.get("classifier.pooling_type", 1), "other"),
        "classifier_bias": "cls.bias" in of.tensors,
    }


def _eurobert(of: Metadata) -> Config:
    return {
        "rms_norm_eps": of.required(_RMS_EPS),
        "num_key_value_heads": of.get("attention.head_count_kv"),
        "head_dim": of.get("attention.key_length"),
        "rope_theta": of.get("rope.freq_base", 1e4),
        "rope_scaling": rope_scaling(of),
        "attention_bias": "blk.0.attn_q.bias" in of.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in of.tensors,
    }


_RMS_EPS, _BEFORE = "attention.layer_norm_rms_epsilon", ("attn_norm", "ffn_norm")
ENCODERS: Mapping[str, GgufEncoder] = {
    "bert": GgufEncoder(_bert_family, _bert),
    "eurobert": GgufEncoder(lambda _: "EuroBert", _eurobert, _BEFORE, _RMS_EPS, has_cls=False),
    "jina-bert-v2": GgufEncoder(lambda _: "JinaBert", _jina_bert),
    "modern-bert": GgufEncoder(lambda _: "ModernBert", _modern_bert, _BEFORE),
    "nomic-bert": GgufEncoder(lambda _: "NomicBert", _nomic_bert),
}
"""Encoders by their names in `general.architecture`."""

_REFUSED = {
    "jina-bert-v3": "the file lacks the LoRA adapters of its tasks, which its vectors need",
    "neo-bert": "its layers are not computed here",
    "nomic-bert-moe": "experts of an encoder are not computed here",
}


def encoder_of(of: Metadata) -> GgufEncoder | None:
    """None if the file is of a decoder. Raises `GgufError` for an encoder that is known and cannot be served."""
    if of.architecture in _REFUSED:
        raise GgufError(f"{of.architecture} cannot be served: {_REFUSED[of.architecture]}")
    return ENCODERS.get(of.architecture)


def encoder_config_of(of: Metadata, encoder: GgufEncoder) -> Config:
    """config.json of the encoder. Its family checks the values. Raises `GgufError` for a key that is missing, and for
    one whose value asks for something that the family does not compute."""
    neutral(of, {"attention.causal", "attention.sliding_window", "attention.max_alibi_bias"})
    if of.get("attention.causal", False) is not False:
        raise of.refuse("attention.causal", "must be false: the tokens of an encoder see all others")
    types = of.tensors.get("token_types.weight")
    classifies = _classifies(of)
    config = {
        "architectures": [encoder.family(of) + ("ForSequenceClassification" if classifies else "Model")],
        "model_type": of.architecture,
        "vocab_size": vocab_size_of(of),
        "hidden_size": of.required("embedding_length"),
        "intermediate_size": of.required("feed_forward_length"),
        "num_hidden_layers": num_layers(of),
        "num_attention_heads": of.required("attention.head_count"),
        "max_position_embeddings": of.required("context_length"),
        "layer_norm_eps": of.required(encoder.eps),
        "type_vocab_size": 0 if types is None else types.shape[0],
        "dtype": dtype_of(of),
        **({"id2label": labels_of(of)} if classifies else {}),
        **encoder.fields(of),
    }
    return {name: value for name, value in config.items() if value is not None}


def _classifies(of: Metadata) -> bool:
    """Whether the file has a classifier. The converter leaves the pooler of BERT's classifiers out."""
    found = [name for name in _CLASSIFIER if name in of.tensors]
    if len(found) == 1:
        (missing,) = set(_CLASSIFIER) - set(found)
        raise GgufError(
            f"the file has {found[0]} without {missing}: the converter left a part of the classifier out, without "
            f"which its scores are wrong; {_CONVERTED}"
        )
    return bool(found)


def encoder_tensors(
    config: Config, encoder: GgufEncoder, found: Mapping[str, tuple[GgufTensor, Path]]
) -> dict[str, PlacedTensor]:
    """The tensors by their names in the checkpoint that the file was converted from. Names that are not known stay.

    A tensor that holds several of the original ones becomes those: its rows are theirs, one after another. Raises
    `GgufError` if two tensors get one name.
    """
    names = encoder_names(config["architectures"][0])
    names = replace(names, up=SPLIT_GATE) if config.get("splits_matrices") else names
    outside, in_layer = dict(_outside(names)), _in_layer(names, encoder, has_gate=_has_gates(found))
    tensors: dict[str, PlacedTensor] = {}
    for name, (tensor, file) in found.items():
        module, _, kind = name.rpartition(".")
        layer = _LAYER.fullmatch(module)
        known = outside.get(module) if layer is None else in_layer.get(layer[2])
        theirs = "" if layer is None else f"{names.layer}{layer[1]}."
        originals = [name] if known is None else [f"{theirs}{original}.{kind}" for original in known]
        for original, part in zip(originals, _parts(tensor, len(originals)), strict=True):
            if original in tensors:
                raise GgufError(f"{name} and {tensors[original].tensor.name} are both {original}")
            tensors[original] = PlacedTensor(part, file, PLAIN)
    return tensors


def _has_gates(found: Mapping[str, object]) -> bool:
    return any(name.endswith(".ffn_gate.weight") for name in found)


def _outside(names: EncoderNames) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name in the file, original names) of the modules outside of layers."""
    yield "token_embd", (names.embed,)
    yield "position_embd", (names.positions,)
    yield "token_types", (names.token_types,)
    if names.embedding_norm:
        yield "token_embd_norm", (names.embedding_norm,)
    if names.final_norm:
        yield "output_norm", (names.final_norm,)
    yield from zip(("cls", "cls.output"), ((name,) for name in names.classifier), strict=True)
    if names.classifier_norm:
        yield "cls.norm", (names.classifier_norm,)


def _in_layer(names: EncoderNames, encoder: GgufEncoder, *, has_gate: bool) -> dict[str, tuple[str, ...]]:
    """The same of the modules of a layer."""
    found = {
        "attn_qkv": names.qkv,
        "attn_output": (names.o,),
        encoder.norms[0]: (names.attention_norm,),
        "ffn_up": names.up,
        "ffn_down": (names.down,),
        encoder.norms[1]: (names.mlp_norm,),
    }
    if len(names.qkv) > 1:
        found |= {f"attn_{part}": (name,) for part, name in zip("qkv", names.qkv, strict=True)}
    if has_gate and len(names.up) > 1:
        found |= {part: (name,) for part, name in zip(("ffn_gate", "ffn_up"), names.up, strict=True)}
    return found


def _parts(tensor: GgufTensor, count: int) -> list[GgufTensor]:
    """As many tensors as `count`, with equal numbers of the tensor's rows."""
    num_rows = tensor.shape[0]
    if num_rows % count:
        raise GgufError(f"{tensor.name} has the shape {shown(list(tensor.shape))}, but must have {count} equal parts")
    if count == 1:
        return [tensor]
    shape, num_bytes = (num_rows // count, *tensor.shape[1:]), tensor.num_bytes // count
    if len(shape) == 1 and tensor.type.block_size > 1:
        raise GgufError(f"{tensor.name} must not be in {tensor.type.name}: it has several parts in one row")
    return [replace(tensor, shape=shape, begin=tensor.begin + number * num_bytes) for number in range(count)]
