"""A decoder whose layers transformers' own modelling code computes. Its linear layers and its attention are ours.

It has the interface of `Decoder`, so that the runner drives it as any other. A step's sequences lie one behind the
other as one sequence of transformers', and our attention keeps them apart by the step's block tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from inferd.engine.arch.description import Arch
from inferd.engine.arch.matrix import Component, LinearWeight
from inferd.engine.arch.modelled import ModelledTensor
from inferd.engine.arch.sharding import ONE_RANK
from inferd.engine.layers.linear import Linear
from inferd.engine.layers.placement import Placement
from inferd.engine.layers.recurrent import States
from inferd.engine.models.decoder import Decoder, DecoderLayer, kv_places
from inferd.engine.models.modelling import (
    AttentionCall,
    body_of,
    head_of,
    make_model,
    our_tensors,
    set_attention,
)
from inferd.engine.quant.recipe import UNQUANTIZED, Recipe
from inferd.kernels.ops.paged_attention import AttentionBatch, paged_attention
from inferd.kernels.ops.rope import rope_and_cache

_VECTOR = 64
"""Multiple of the numbers that any CPU kernel of torch takes at once: two vectors of 512 bits in 16-bit numbers."""
_GRAIN = 32768
"""Most numbers that torch gives to a thread of an elementwise operation before it uses another."""
_ROUNDED = frozenset(
    (
        "cos", "sin", "exp", "exp2", "expm1", "log", "log1p", "erf", "rsqrt", "tanh", "sigmoid", "silu", "gelu",
        "softplus", "elu", "selu", "celu", "mish",
    )
)  # fmt: skip
"""Functions that torch rounds in one way in whole vectors, and in another way behind the last of them."""
_TOLERANCE = 0.05
"""Most difference between a prompt at once and in parts, as a share of the largest number: 6 steps of bfloat16.
Another result of more than that was computed from other tokens."""
_CHECKED_SINGLES, _CHECKED_TOGETHER = 8, 64
"""Tokens of the checked prompt that its second run computes one by one, and those behind them, at once. The whole
prompt ends behind a whole vector of one number a token, and those at once with one."""


class TransformersDecoder(Decoder):
    """Model of `arch` from `config`, the parsed config.json, in `dtype` on `device`. Raises `ModellingError`, and
    `QuantizationError` if `recipe` cannot store a matrix."""

    unrecordable = "transformers' own modelling code is not recorded"

    def __init__(
        self,
        arch: Arch,
        config: Mapping[str, Any],
        dtype: torch.dtype,
        device: torch.device | str,
        recipe: Recipe = UNQUANTIZED,
    ) -> None:
        assert arch.modelled is not None
        self.arch, self.dtype, self.device, self.rank = arch, dtype, torch.device(device), ONE_RANK
        self._model = make_model(config, dtype, str(device))
        self._body = body_of(self._model)
        self._place = Placement(dtype, self.device, recipe)
        self._head: Linear | None = None
        self.parameters = self._place.parameters
        self._take_over(our_tensors(self._model))
        self._layers: list[DecoderLayer] = []
        self._layers_read, self._is_read = (), False
        self._given = _Given()
        _replace(self._model, self._body, self._given)
        set_attention(self._body, self._attend)
        self._kv_places = kv_places(arch)
        self._no_angles = torch.tensor([[1.0, 0.0]], device=self.device)
        self._whole_vectors = _WholeVectors()
        self._batches: Sequence[AttentionBatch] = ()
        self._at_first: Tensor | None = None
        self._kv: tuple[Tensor, Tensor | None] | None = None

    def embed(self, token_ids: Tensor) -> Tensor:
        """The ids themselves: the code of transformers embeds them, in ways of its own."""
        return token_ids

    def run_layers(
        self,
        x: Tensor,
        batches: Sequence[AttentionBatch],
        kv: Tensor,
        kv_scales: Tensor | None = None,
        states: States | None = None,
        inputs: Sequence[Tensor] | None = None,
    ) -> Tensor:
        assert states is None, "no layer has a recurrent state"
        self._batches, self._kv = batches, (kv, kv_scales)
        positions = batches[0].positions
        self._at_first = torch.zeros_like(positions)
        with self._whole_vectors:
            output = self._body(input_ids=x[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The head of transformers, with what its code does to logits, on hidden states that are given."""
        self._given.hidden = hidden[None]
        ids = torch.zeros((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device)
        with self._whole_vectors:
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        return logits if out is None else out.copy_(logits)

    @torch.inference_mode()
    def refuses_rows(self, kv: Tensor, kv_scales: Tensor | None, *, is_exact: bool) -> str | None:
        """Compares a prompt that is computed at once with the same in parts, in the first blocks of the pool. A
        difference beyond rounding shows code that computes a token from others without attention."""
        num_places = kv.shape[1] // len(self.arch.cache_groups) * kv.shape[4]
        num_tokens = min(_CHECKED_SINGLES + _CHECKED_TOGETHER, self.arch.max_positions, num_places)
        ids = torch.arange(num_tokens, device=self.device) * 7919 % self.arch.vocab_size
        num_singles = min(_CHECKED_SINGLES, num_tokens)
        rest = [num_tokens - num_singles] * (num_tokens > num_singles)
        whole = self._computed(ids, (num_tokens,), kv, kv_scales)
        parted = self._computed(ids, (*[1] * num_singles, *rest), kv, kv_scales)
        difference = float((whole - parted).abs().max() / whole.abs().max())
        measured = f"logits of a prompt at once and in parts differ by {difference:.1e} of the largest"
        if not difference <= _TOLERANCE:
            return f"it computes a token from others outside of attention: {measured}"
        if is_exact and not torch.equal(whole, parted):
            return f"the bits of a row depend on the other rows of a step: {measured}"
        return None

    def smooth_keys(self) -> None:
        """Nothing: its code rotates q and k, and does not say which channels rotate against each other."""

    def _computed(self, ids: Tensor, counts: Sequence[int], kv: Tensor, kv_scales: Tensor | None) -> Tensor:
        """Logits of a prompt in steps of `counts` tokens. Cache groups have the first blocks, one behind the other."""
        parts, start, block_size = [], 0, kv.shape[4]
        num_groups, num_blocks = len(self.arch.cache_groups), -(-sum(counts) // block_size)
        tables = torch.arange(num_groups * num_blocks, device=self.device).view(num_groups, 1, num_blocks)
        for count in counts:
            batches = [AttentionBatch.build([(start, count)], table, block_size, self.device) for table in tables]
            parts.append(self.logits(self.forward(ids[start : start + count], batches, kv, kv_scales)))
            start += count
        return torch.cat(parts)

    def _attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self._kv is not None and self._at_first is not None
        place, (kv, kv_scales) = self._kv_places[call.layer], self._kv
        batch, window = self._batches[place.group], self.arch.windows[call.layer]
        pages, scales = place.of(kv), None if kv_scales is None else place.of(kv_scales)
        # Its code has rotated q and k: position 0 has no angle.
        q = rope_and_cache(q, k, v, self._no_angles, self._at_first, batch.write_slots, pages, kv_scales=scales)
        return paged_attention(q, pages, batch, call.scale, window, call.softcap, scales)

    def _take_over(self, tensors: Mapping[str, ModelledTensor]) -> None:
        """Replace the linear layers, and take the parameters of the other modules."""
        model, head = self._model, head_of(self._model)
        owned: dict[str, dict[str, ModelledTensor]] = {}
        for key, tensor in tensors.items():
            owned.setdefault(key.rpartition(".")[0], {})[tensor.leaf] = tensor
        in_float32 = (*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ()))
        for path, module in dict(model.named_modules()).items():
            leaves = owned.get(path, {})
            if type(module) is nn.Linear:
                _set(model, path, _Projection(self._linear(module, leaves.get("weight"), is_head=module is head)))
                continue
            for leaf, tensor in leaves.items():
                dtype = torch.float32 if any(part in path for part in in_float32) else self.dtype
                use = partial(self._use, module, leaf, tensor.shape, module is model.get_input_embeddings())
                self._place.take(tensor.of, use, dtype)

    def _linear(self, module: nn.Linear, tensor: ModelledTensor | None, *, is_head: bool) -> Linear:
        """One of our linear layers. `tensor`: that of its weight; None: it is the embedding."""
        shape, place = (module.out_features, module.in_features), self._place
        matrix = LinearWeight.whole("lm_head", Component.HEAD, shape)
        if tensor is None:
            place = replace(place, parameters={})
        else:
            assert isinstance(tensor.of, LinearWeight)
            matrix = tensor.of
        matrix = replace(matrix, has_bias=module.bias is not None)
        linear = Linear(matrix, place, torch.float32 if is_head else None)
        if is_head:
            self._head = linear
        return linear

    def _use(self, module: nn.Module, leaf: str, shape: tuple[int, ...], is_embedding: bool, tensor: Tensor) -> None:
        """Take a parameter or a buffer that is loaded."""
        stored: Any = module._parameters if leaf in module._parameters else module._buffers
        value = tensor.view(shape)
        stored[leaf] = nn.Parameter(value, requires_grad=False) if stored is module._parameters else value
        if is_embedding and self.arch.tie_embeddings:
            assert self._head is not None
            self._head.take_weight(tensor)


class _Projection(nn.Module):
    """One of our linear layers in the place of one of torch's."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return self._linear(x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], -1)


class _Given(nn.Module):
    """Stands for the layers while the head runs: gives hidden states that are known."""

    hidden: Tensor

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.hidden)


class _WholeVectors(TorchFunctionMode):
    """Lets torch compute functions in whole vectors on a CPU.

    torch rounds the last numbers of a tensor, or of a thread's part of it, in another way than the others. So the bits
    of a row would depend on the number of rows. Here the tensor is filled up until no number is behind a whole vector,
    in any thread.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "") not in _ROUNDED or not args or not _is_on_cpu(args[0]):
            return func(*args, **given)
        return _in_whole_vectors(partial(func, **given), args[0], args[1:])


def _is_on_cpu(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cpu" and x.numel() > 0


def _in_whole_vectors(function: Callable[..., Tensor], x: Tensor, others: Sequence[Any]) -> Tensor:
    count = x.numel()
    filled = _filled(count, torch.get_num_threads())
    if filled == count and x.is_contiguous():
        return function(x, *others)
    whole = x.new_zeros(filled)
    whole[:count].copy_(x.reshape(-1))
    return function(whole, *others)[:count].view(x.shape)


@lru_cache(maxsize=4096)
def _filled(count: int, num_threads: int) -> int:
    """The least number of elements, from `count` on, of which every thread gets whole vectors. torch cuts most
    functions into parts of `_GRAIN` or more elements, and gelu into one for each thread."""
    num_parts = 0
    while num_parts != (wanted := min(num_threads, -(-count // _GRAIN))):
        num_parts = wanted
        multiple = _VECTOR * lcm(num_parts, num_threads)
        count = -(-count // multiple) * multiple
    return count


def _set(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    (path,) = (path for path, module in model.named_modules() if module is old)
    _set(model, path, new)
