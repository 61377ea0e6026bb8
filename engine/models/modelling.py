"""Makes a model of transformers' own modelling code without weights, and hands its attention over.

Nothing of a checkpoint runs: the code is that of the installed transformers, found by the config's `model_type`. It
knows no KV pool and no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.initialization import no_init_weights, no_tie_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from inferd.engine.arch.matrix import Component
from inferd.engine.arch.modelled import ModelledTensor, ModellingError

_ATTENTION = "inferd"
"""Name of our attention among those of transformers. There is no mask of this name, so transformers makes none."""
_OTHER_CODE = (
    "auto_map", "attn_implementation", "experts_implementation", "quantization_config", "transformers_version",
)  # fmt: skip
"""Fields of a config that choose other code, or that mean nothing to a model without weights."""
_ROPES = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds of rope whose frequencies do not depend on the longest sequence of a step."""
_COMPONENTS = {
    "embed": Component.EMBEDDING, "norm": Component.NORMS, "attention": Component.ATTENTION, "mlp": Component.MLP
}  # fmt: skip
_NO_EFFECT = ("dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states")
"""Arguments of attention that change nothing while a model serves."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Request of one layer's code for attention."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    softcap: float | None
    scale: float


Attend = Callable[[AttentionCall, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: (call, q [T, heads, D], k and v [T, KV heads, D]) -> [T, heads, D]."""


def make_model(config: Mapping[str, Any], dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """The causal language model of a parsed config.json. Parameters are on the meta device, buffers on `device`.

    Raises `ModellingError`.
    """
    settled = _settled_config(config)
    model_class = _class_of(settled, config)
    AttentionInterface.register(_ATTENTION, _hand_over)
    with torch.device(device), _parameters_on_meta(), no_init_weights(), no_tie_weights():
        model: PreTrainedModel = model_class._from_config(settled, dtype=dtype, attn_implementation=_ATTENTION)
    _check_parameters(model)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The module that computes logits."""
    found: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return found


def body_of(model: PreTrainedModel) -> nn.Module:
    """The module of all layers, from ids to the last hidden states."""
    found: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    return found


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the head is the embedding."""
    return bool(model.config.get_text_config().tie_word_embeddings)


def set_attention(model: nn.Module, attend: Attend) -> None:
    """Let `attend` compute the attention of all layers."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.__dict__["inferd_attend"] = attend


def layers_of(model: PreTrainedModel) -> int:
    num_layers: int = model.config.get_text_config().num_hidden_layers
    return num_layers


def our_tensors(model: PreTrainedModel) -> dict[str, ModelledTensor]:
    """Each parameter and each stored buffer, by its name in the model. A tied head is left out."""
    embedding, head = model.get_input_embeddings(), head_of(model)
    found = {}
    for key, value in model.state_dict().items():
        path, _, leaf = key.rpartition(".")
        module = model.get_submodule(path)
        if module is head and leaf == "weight" and is_tied(model):
            continue
        shape = tuple(value.shape)
        if module is embedding or module is head:
            own, component = ("embed", Component.EMBEDDING) if module is embedding else ("lm_head", Component.HEAD)
            found[key] = ModelledTensor(key, shape, component, own, "", leaf)
            continue
        layer, rest = _layer_of(path)
        kind = "embed" if isinstance(module, nn.Embedding) else "norm"
        if isinstance(module, nn.Linear):
            kind = "attention" if "att" in rest else "mlp"
        found[key] = ModelledTensor(key, shape, _COMPONENTS[kind], f"{kind}.{rest}", layer, leaf)
        if value.dim() > 2 or not value.dtype.is_floating_point:
            raise ModellingError(f"{key} {list(value.shape)} in {value.dtype} has more than 2 axes, or no floats")
    return found


def _settled_config(config: Mapping[str, Any]) -> Any:
    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ModellingError(f"transformers {transformers.__version__} does not know the model_type {model_type!r}")
    if config.get("quantization_config") is not None:
        raise ModellingError("it is quantized, and only native families are served from quantized checkpoints")
    if config.get("is_encoder_decoder"):
        raise ModellingError("it has an encoder and a decoder, and only decoders are served")
    kept = {name: value for name, value in config.items() if name not in _OTHER_CODE and not name.startswith("_")}
    settled = CONFIG_MAPPING[model_type](**{name: value for name, value in kept.items() if name != "model_type"})
    _check_ropes(settled.get_text_config())
    return settled


def _check_ropes(config: Any) -> None:
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in ropes.values() if isinstance(value, Mapping)]
    for rope in nested or [ropes]:
        kind = rope.get("rope_type", "default")
        if kind not in _ROPES:
            raise ModellingError(
                f"rope_type is {kind!r}, whose angles depend on the longest sequence of a step; known are "
                f"{', '.join(_ROPES)}"
            )


def _class_of(settled: Any, config: Mapping[str, Any]) -> Any:
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    found = classes.get(type(settled), None)
    known = found if isinstance(found, tuple) else (found,)
    names = config.get("architectures")
    for model_class in known:
        if model_class is not None and names == [model_class.__name__]:
            if not model_class._supports_attention_backend:
                raise ModellingError(
                    "its code in transformers does not hand its attention over (_supports_attention_backend)"
                )
            return model_class
    listed = ", ".join(model_class.__name__ for model_class in known if model_class is not None) or "none"
    raise ModellingError(
        f"architectures is {names!r}; the causal language models of transformers {transformers.__version__} for "
        f"model_type {config.get('model_type')!r} are: {listed}"
    )


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that modules register become ones without memory. torch takes memory only as it is written, and
    nothing writes a parameter before it is dropped here. Buffers are computed."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _check_parameters(model: PreTrainedModel) -> None:
    """Only matrices of linear layers have kernels of ours. A product by another one would depend on other rows."""
    matrices = (nn.Linear, nn.Embedding)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_known = type(module) is nn.Linear or isinstance(module, nn.Embedding)
            if parameter.dim() > 1 and not is_known:
                raise ModellingError(
                    f"{path}.{name} {list(parameter.shape)} belongs to a {type(module).__name__}; weights with more "
                    f"than one axis must belong to one of {', '.join(kind.__name__ for kind in matrices)}"
                )
    if type(head_of(model)) is not nn.Linear:
        raise ModellingError("its head is no linear layer")


def _layer_of(path: str) -> tuple[str, str]:
    """("layers.3.", rest of the path) for a module of layer 3; ("", path) for one outside of layers."""
    found = re.match(r"(?:[^.]+\.)*?(\d+)\.(.+)$", path)
    return ("", path) if found is None else (f"layers.{found[1]}.", found[2])


def _hand_over(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: q [1, heads, T, D], k and v [1, KV heads, T, D] -> [1, T, heads,
    D]."""
    attend: Attend | None = getattr(module, "inferd_attend", None)
    if attend is None:
        raise ModellingError(f"attention of a {type(module).__name__}, which does not know its layer (layer_idx)")
    call = _read_call(module, query, key, value, attention_mask, given)
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return attend(call, q, k, v)[None], None


def _read_call(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, given: Mapping[str, Any]
) -> AttentionCall:
    """Raises `ModellingError` for a request that our attention cannot fulfil."""
    known = ("scaling", "sliding_window", "softcap", "is_causal", *_NO_EFFECT)
    others = [name for name, value in given.items() if name not in known and value is not None]
    if others:
        raise ModellingError(f"its attention has arguments that no kernel here takes: {', '.join(others)}")
    if mask is not None:
        raise ModellingError("its attention has a mask of its own")
    is_causal = given.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ModellingError("its attention is not causal")
    if q.shape[0] != 1 or k.shape != v.shape or q.shape[2:] != k.shape[2:] or q.shape[1] % k.shape[1]:
        shapes = ", ".join(f"{name} {list(heads.shape)}" for name, heads in (("q", q), ("k", k), ("v", v)))
        raise ModellingError(f"q, k and v must have heads of one size, and KV heads must divide heads: {shapes}")
    layer: Any = module.layer_idx
    scale = given.get("scaling")
    return AttentionCall(
        layer,
        q.shape[1],
        k.shape[1],
        q.shape[3],
        given.get("sliding_window"),
        given.get("softcap"),
        q.shape[3] ** -0.5 if scale is None else float(scale),
    )
