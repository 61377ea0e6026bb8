"""Says of a model that is not native whether transformers' own code can serve it, and what a checkpoint must hold.

`engine/api/modelling` runs it as `python -P -m inferd.engine.models.describe`, in a process that may fail. A JSON
object comes on standard input: `config`, and `shapes`, the shapes of the checkpoint's tensors by name, or null if they
are not known. The answer goes to standard output: `modelled`, or `refusal`. The code runs on the meta device, so it
needs no weights and no memory. Each layer's attention then shows its heads and its window.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from inferd.engine.arch.modelled import Modelled, ModelledTensor, ModellingError
from inferd.engine.models.modelling import (
    AttentionCall,
    body_of,
    is_tied,
    layers_of,
    make_model,
    our_tensors,
    set_attention,
)

_TRACED_TOKENS = 3
_MAX_LAYERS = 10_000
_MAX_REASON = 500
"""Most characters of a refusal: names in a config have any length."""


def describe(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None) -> Modelled:
    """Raises `ModellingError`, and whatever transformers raises for a config that it does not understand."""
    num_layers = config.get("num_hidden_layers", 0)
    if type(num_layers) is not int or num_layers > _MAX_LAYERS:
        raise ModellingError(f"num_hidden_layers must be at most {_MAX_LAYERS}, but it is {num_layers!r}")
    model = make_model(config, torch.float32, "meta")
    settled, calls = model.config.get_text_config(), _trace(model)
    max_positions = int(settled.max_position_embeddings)
    names, ties, unread = _tensors(model, shapes)
    wide = [m.out_features for path, m in model.named_modules() if isinstance(m, nn.Linear) and _in_layer(path)]
    embedding: Any = model.get_input_embeddings()
    return Modelled(
        architecture=type(model).__name__,
        vocab_size=embedding.num_embeddings,
        hidden_size=embedding.embedding_dim,
        widest=max(wide),
        num_heads=calls[0].num_heads,
        num_kv_heads=calls[0].num_kv_heads,
        head_dim=calls[0].head_dim,
        max_positions=max_positions,
        attention_scale=calls[0].scale,
        attention_softcap=calls[0].softcap,
        windows=tuple(None if call.window is None or call.window >= max_positions else call.window for call in calls),
        tie_embeddings=is_tied(model),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        tensors=names,
        ties=ties,
        unread=unread,
    )


def _in_layer(path: str) -> bool:
    return any(part.isdigit() for part in path.split("."))


def _trace(model: PreTrainedModel) -> tuple[AttentionCall, ...]:
    """The calls of attention in a step, one a layer, in order. Raises `ModellingError` if they are others."""
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(call)
        return torch.empty_like(q)

    set_attention(model, attend)
    with torch.device("meta"), torch.inference_mode():
        token_ids = torch.zeros(1, _TRACED_TOKENS, dtype=torch.int64)
        positions = torch.arange(_TRACED_TOKENS)[None]
        body = body_of(model)
        hidden = body(input_ids=token_ids, position_ids=positions, use_cache=False).last_hidden_state
    if [call.layer for call in calls] != list(range(layers_of(model))):
        raise ModellingError(
            f"each of its {layers_of(model)} layers must hand over attention once, but these did: "
            f"{', '.join(str(call.layer) for call in calls) or 'none'}"
        )
    kinds = {(call.num_heads, call.num_kv_heads, call.head_dim) for call in calls}
    if len(kinds) > 1:
        raise ModellingError(f"all layers must have the same heads, but (heads, KV heads, head size) are {kinds}")
    if calls[0].head_dim % 2:
        raise ModellingError(f"head_dim must be even, but it is {calls[0].head_dim}")
    embedding: Any = model.get_input_embeddings()
    assert tuple(hidden.shape) == (1, _TRACED_TOKENS, embedding.embedding_dim), hidden.shape
    _check_windows(model.config.get_text_config(), calls)
    return tuple(calls)


def _check_windows(config: Any, calls: Sequence[AttentionCall]) -> None:
    """A layer whose window is in a mask alone would see all positions here."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        if window is not None and all(call.window is None for call in calls):
            raise ModellingError(f"sliding_window is {window}, but no layer tells its attention so")
        return
    for kind, call in zip(kinds, calls, strict=True):
        if kind not in ("full_attention", "sliding_attention"):
            raise ModellingError(f"layer {call.layer} is {kind}; known are full_attention, sliding_attention")
        if (kind == "sliding_attention") != (call.window is not None):
            raise ModellingError(f"layer {call.layer} is {kind}, but tells its attention the window {call.window}")


def _tensors(
    model: PreTrainedModel, shapes: Mapping[str, Sequence[int]] | None
) -> tuple[tuple[ModelledTensor, ...], tuple[str, ...], tuple[str, ...]]:
    """(the tensors that the checkpoint must hold, those that must equal the embedding, those that are not read)."""
    ours, state = our_tensors(model), model.state_dict()
    if shapes is None:
        return tuple(ours.values()), (), ()
    theirs = _keys_of(model, shapes)
    found = {key: name for name, key in theirs.items() if key in ours}
    tensors = tuple(replace(tensor, name=found.get(key, key)) for key, tensor in ours.items())
    ties = tuple(name for name, key in theirs.items() if key in state and key not in ours)
    ignored = model._keys_to_ignore_on_load_unexpected or []
    patterns = [re.compile(pattern) for pattern in ignored]
    unread = tuple(
        name for name, key in theirs.items() if key not in state and any(pattern.search(key) for pattern in patterns)
    )
    return tensors, ties, unread


def _keys_of(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """The model's name of each tensor in the checkpoint, as transformers renames them."""
    mapping, state = get_model_conversion_mapping(model), dict(model.state_dict())
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    keys = {}
    for name in names:
        keys[name], converter = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if converter is not None:
            raise ModellingError(f"transformers makes {keys[name]} of several tensors of the checkpoint, as of {name}")
    return keys


def main() -> int:
    asked = json.load(sys.stdin)
    answer: dict[str, Any]
    try:
        answer = {"modelled": asdict(describe(asked["config"], asked["shapes"]))}
    except ModellingError as error:
        answer = {"refusal": _one_line(error)}
    except Exception as error:
        answer = {"refusal": f"transformers cannot make it: {type(error).__name__}: {_one_line(error)}"}
    sys.stdout.write(json.dumps(answer))
    return 0


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()).encode(errors="replace").decode()
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} ..."


if __name__ == "__main__":
    sys.exit(main())
