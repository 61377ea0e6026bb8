"""Stand-ins for the libraries of paged attention: each has the library's signature, keeps what it was given, and
computes the result later in fp64 from nothing else.

Keys and values are read through the given strides, page tables and lengths, as the library's documentation says.
`spoil` changes an argument on its way, to show that a test sees it.
"""

from __future__ import annotations

import enum
import itertools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Spoil = Mapping[str, Callable[[Any], Any]]
"""Changes of arguments, by their names."""


@dataclass
class Kept:
    """Calls of a library."""

    spoil: Spoil = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, arguments: Mapping[str, Any], queries: str = "q") -> Tensor:
        """The library's result: memory that nothing has written yet, with the shape of the argument `queries`."""
        unknown = set(self.spoil) - set(arguments)
        assert not unknown, f"no such arguments: {unknown}"
        self.calls.append({name: self.spoil.get(name, _same)(value) for name, value in arguments.items()})
        return torch.empty_like(arguments[queries])


def _same(value: Any) -> Any:
    return value


# -- FlashAttention-3 --------------------------------------------------------------------------------------------------


def flash_attention_3(kept: Kept) -> types.ModuleType:
    """The module `flash_attn_interface` of version 3.0.0."""

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        given = dict(locals())
        del given["kept"]
        return kept.keep(given)

    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    return module


def replay_flash_attention_3(given: Mapping[str, Any]) -> Tensor:
    used = (
        "q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "softmax_scale",
        "causal", "window_size", "softcap", "num_splits", "rotary_interleaved",
    )  # fmt: skip
    assert all(not value for name, value in given.items() if name not in used)
    assert 1 <= given["num_splits"] <= 256
    left, right = given["window_size"]
    return _flash(given, given["k_cache"], given["v_cache"], given["cache_seqlens"], left, right)


# -- FlashAttention-4 --------------------------------------------------------------------------------------------------


def flash_attention_4(kept: Kept) -> types.ModuleType:
    """The module `flash_attn.cute.interface` of version 4.0.0b36."""

    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None,
        causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
        deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None,
        aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None,
        disable_scheduler_metadata=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
    ):  # fmt: skip
        given = dict(locals())
        del given["kept"]
        return kept.keep(given), None

    module = types.ModuleType("flash_attn.cute.interface")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


def replay_flash_attention_4(given: Mapping[str, Any]) -> Tensor:
    used = (
        "q", "k", "v", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "page_table", "softmax_scale", "causal",
        "window_size", "softcap", "num_splits",
    )  # fmt: skip
    assert all(not value for name, value in given.items() if name not in used)
    assert given["num_splits"] == 1, "on compute capability 9.0 nothing is split"
    left, right = (-1 if bound is None else bound for bound in given["window_size"])
    return _flash(given, given["k"], given["v"], given["seqused_k"], left, right)


def _flash(given: Mapping[str, Any], k: Tensor, v: Tensor, kv_lens: Tensor, left: int, right: int) -> Tensor:
    q, starts, tables = given["q"], given["cu_seqlens_q"], given["page_table"]
    num_rows = starts.shape[0] - 1
    for numbers in (starts, kv_lens, tables):
        assert numbers.dtype == torch.int32 and numbers.stride(-1) == 1
    assert kv_lens.shape == (num_rows,) and tables.shape[0] == num_rows
    assert k.shape == v.shape and q.shape[2] == k.shape[3] and q.shape[2] % 8 == 0
    for tensor in (q, k, v):
        assert tensor.stride(-1) == 1 and all(stride % 8 == 0 for stride in tensor.stride()[:-1])
    assert given["max_seqlen_q"] >= starts.diff().max()
    out = torch.full_like(q, float("nan"))
    for row, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        keys, values = (_paged(pages, tables[row], int(kv_lens[row])) for pages in (k, v))
        band = Band(len(keys) - (last - first), left, 0 if given["causal"] else right)
        out[first:last] = attend(q[first:last], keys, values, given["softmax_scale"], band, given["softcap"])
    return out


def _paged(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """[length, G, D] from pages [blocks, block_size, G, D]. All of the table must be ids of pages: a library may load
    more than it needs."""
    assert length <= table.shape[0] * pages.shape[1]
    assert ((table >= 0) & (table < pages.shape[0])).all()
    return pages[table[: -(-length // pages.shape[1])].long()].flatten(0, 1)[:length]


# -- cuDNN -------------------------------------------------------------------------------------------------------------

Kind = enum.Enum("Kind", ("BFLOAT16", "HALF", "FLOAT", "INT32", "INT64"))
Alignment = enum.Enum("Alignment", ("TOP_LEFT", "BOTTOM_RIGHT"))
Heuristic = enum.Enum("Heuristic", ("A", "B", "FALLBACK"))
_KINDS = {torch.bfloat16: Kind.BFLOAT16, torch.float16: Kind.HALF, torch.int32: Kind.INT32, torch.int64: Kind.INT64}


@dataclass
class Described:
    """A tensor of a graph."""

    dim: tuple[int, ...]
    stride: tuple[int, ...]
    data_type: Kind
    uid: int
    ragged_offset: Described | None = None
    is_output: bool = False

    def set_ragged_offset(self, offset: Described) -> Described:
        self.ragged_offset = offset
        return self

    def set_uid(self, uid: int) -> Described:
        self.uid = uid
        return self

    def set_output(self, is_output: bool) -> Described:
        self.is_output = is_output
        return self

    def set_dim(self, dim: tuple[int, ...]) -> Described:
        self.dim = dim
        return self

    def set_stride(self, stride: tuple[int, ...]) -> Described:
        self.stride = stride
        return self

    def set_data_type(self, data_type: Kind) -> Described:
        self.data_type = data_type
        return self


class Graph:
    """`cudnn.pygraph`, for one attention."""

    def __init__(self, kept: Kept, io_data_type, intermediate_data_type, compute_data_type, handle=None) -> None:  # type: ignore[no-untyped-def]
        assert intermediate_data_type is compute_data_type is Kind.FLOAT
        self._kept, self._io, self._tensors, self.is_built = kept, io_data_type, {}, False
        self._attention: dict[str, Any] = {}

    def tensor(self, dim, stride=None, data_type=None, uid=None) -> Described:  # type: ignore[no-untyped-def]
        assert uid not in self._tensors
        self._tensors[uid] = Described(tuple(dim), tuple(stride), data_type, uid)
        return self._tensors[uid]

    def sdpa(
        self, q, k, v, name="", attn_scale=None, bias=None, use_alibi_mask=False, use_padding_mask=False,
        seq_len_q=None, seq_len_kv=None, dropout=None, rng_dump=None, paged_attention_k_table=None,
        paged_attention_v_table=None, paged_attention_max_seq_len_kv=None, generate_stats=None, implementation=None,
        diagonal_alignment=Alignment.TOP_LEFT, diagonal_band_left_bound=None, diagonal_band_right_bound=None,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        given = dict(locals())
        del given["self"]
        assert generate_stats is False and use_padding_mask and not self._attention
        assert not any((bias, use_alibi_mask, dropout, rng_dump, implementation))
        assert diagonal_band_left_bound is None or diagonal_band_right_bound is not None
        self._attention = {**given, "out": Described(q.dim, q.stride, self._io, -1)}
        return [self._attention["out"], None]

    def build(self, heuristics: list[Heuristic]) -> None:
        assert heuristics and not self.is_built
        self.is_built = True

    def get_workspace_size(self) -> int:
        assert self.is_built
        return 16

    def execute(self, tensors: Mapping[int, Tensor], workspace: Tensor, handle: Any = None) -> None:
        assert self.is_built and handle == _HANDLE and workspace.nbytes >= 16
        out = self._attention["out"]
        for uid, described in {**self._tensors, out.uid: out}.items():
            assert _KINDS[tensors[uid].dtype] is described.data_type
        named = {key: value for key, value in self._attention.items() if isinstance(value, Described)}
        memory = {key: tensors[described.uid] for key, described in named.items()}
        offsets = None if out.ragged_offset is None else tensors[out.ragged_offset.uid]
        self._kept.keep({**self._attention, "q": memory["q"], "described": named, "memory": memory, "offsets": offsets})


_HANDLE = "handle"


def cudnn(kept: Kept) -> types.ModuleType:
    """The module `cudnn` of nvidia-cudnn-frontend 1.32.0, as far as attention needs it."""
    module = types.ModuleType("cudnn")
    vars(module).update(
        data_type=Kind,
        diagonal_alignment=Alignment,
        heur_mode=Heuristic,
        create_handle=lambda: _HANDLE,
        set_stream=lambda handle, stream: None,
        pygraph=lambda **given: Graph(kept, **given),
        cudnnGraphNotSupportedError=type("cudnnGraphNotSupportedError", (Exception,), {}),
    )
    return module


def replay_cudnn(given: Mapping[str, Any]) -> Tensor:
    """Reads each tensor's memory by the dimensions and strides that the graph was given, not by the tensor's own."""
    described, memory = given["described"], given["memory"]
    num_rows, _, max_queries, _ = described["q"].dim
    assert described["out"].dim == described["q"].dim and described["out"].is_output
    query_lens, kv_lens = (_read(described[name], memory[name]).flatten() for name in ("seq_len_q", "seq_len_kv"))
    assert query_lens.shape == kv_lens.shape == (num_rows,) and query_lens.max() <= max_queries
    k, v = (_read(described[name], memory[name]).transpose(1, 2) for name in ("k", "v"))
    tables = [
        _read(described[f"paged_attention_{name}_table"], memory[f"paged_attention_{name}_table"]) for name in "kv"
    ]
    assert all(table.shape[:2] == (num_rows, 1) for table in tables)
    assert kv_lens.max() <= given["paged_attention_max_seq_len_kv"] <= tables[0].shape[2] * k.shape[1]
    out = torch.full_like(memory["out"], float("nan"))
    for row in range(num_rows):
        count, length = int(query_lens[row]), int(kv_lens[row])
        start = None if given["offsets"] is None else int(given["offsets"][row])
        q_row = _row(described["q"], memory["q"], row, start, count)
        keys, values = (_paged(pages, table[row, 0, :, 0], length) for pages, table in zip((k, v), tables, strict=True))
        attended = attend(q_row, keys, values, given["attn_scale"], _band(given, length - count), 0.0)
        _row(described["out"], out, row, start, count).copy_(attended)
    return out


def _read(described: Described, memory: Tensor) -> Tensor:
    return memory.as_strided(described.dim, described.stride)


def _row(described: Described, memory: Tensor, row: int, start: int | None, count: int) -> Tensor:
    """[count, heads, D] of one row: at its offset `start`, else at the stride of rows."""
    between_rows, *others = described.stride
    heads, size = described.dim[1], described.dim[3]
    offset = memory.storage_offset() + (row * between_rows if start is None else start)
    return memory.as_strided((count, heads, size), (others[1], others[0], others[2]), offset)


def _band(given: Mapping[str, Any], num_before: int) -> Band:
    left, right = given["diagonal_band_left_bound"], given["diagonal_band_right_bound"]
    is_at_end = given["diagonal_alignment"] is Alignment.BOTTOM_RIGHT
    return Band(num_before if is_at_end else 0, -1 if left is None else left - 1, -1 if right is None else right)


# -- FlashInfer --------------------------------------------------------------------------------------------------------

_COUNTERS_BYTES = 8 << 20
_PARTS = 192
"""More than any GPU has multiprocessors."""


def flashinfer(kept: Kept) -> types.ModuleType:
    """The modules `flashinfer.decode` and `flashinfer.prefill` of version 0.7.4, in one."""

    def trtllm_batch_decode_with_kv_cache(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
        window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout="HND",
        enable_pdl=None, backend="auto", q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None,
        skip_softmax_threshold_scale_factor=None, kv_cache_sf=None, uses_shared_paged_kv_idx=True, lse=None,
        return_lse=False, bmm1_scale_log2=None, multi_ctas_kv_counter_buffer=None, enable_block_sparse_attention=False,
        cp_world=1, cp_rank=0, causal_seqlens_kv_global=None, bf16q_fp8kv_transform_mode=None, request_order=None,
        request_order_plan=None, sparse_top_k=0, length_aware_schedule=False,
    ):  # fmt: skip
        given = dict(locals())
        del given["kept"]
        return kept.keep(given, "query")

    def trtllm_batch_context_with_kv_cache(
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale,
        batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None, o_sf_scale=None,
        o_sf_vec_size=None, kv_layout="HND", enable_pdl=None, sinks=None, kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None, uses_shared_paged_kv_idx=True, causal=True, lse=None,
        return_lse=False, multi_ctas_kv_counter_buffer=None, use_fp16_softmax=None, uses_spcompress=None,
        backend="trtllm-gen", window_right=-1, variable_window_token_starts=None, variable_window_token_ends=None,
    ):  # fmt: skip
        given = dict(locals())
        del given["kept"]
        return kept.keep(given, "query")

    module = types.ModuleType("flashinfer.decode")
    vars(module).update(
        trtllm_batch_decode_with_kv_cache=trtllm_batch_decode_with_kv_cache,
        trtllm_batch_context_with_kv_cache=trtllm_batch_context_with_kv_cache,
    )
    return module


def replay_flashinfer(given: Mapping[str, Any]) -> Tensor:
    is_context = "cum_seq_lens_kv" in given
    used = {
        "query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len", "max_kv_len", "bmm1_scale",
        "bmm2_scale", "window_left", "sinks", "kv_layout", "backend", "multi_ctas_kv_counter_buffer",
        "uses_shared_paged_kv_idx", "q_len_per_req", "o_scale", "cp_world", "window_right", "enable_pdl",
    }  # fmt: skip
    if is_context:
        used |= {"max_q_len", "batch_size", "cum_seq_lens_q", "cum_seq_lens_kv", "causal"}
    assert all(not value for name, value in given.items() if name not in used)
    assert isinstance(given["bmm1_scale"], float) and given["bmm2_scale"] == 1.0
    q, tables, kv_lens = given["query"], given["block_tables"], given["seq_lens"]
    for numbers in (tables, kv_lens):
        assert numbers.dtype == torch.int32 and numbers.is_contiguous(), "only the first address is handed on"
    assert kv_lens.min() >= 1 and kv_lens.max() <= given["max_kv_len" if is_context else "max_seq_len"]
    k, v = _pages_of_flashinfer(given)
    if given["backend"] == "xqa":
        _check_xqa(given, k)
    else:
        _check_trtllm_gen(given, k)
    starts = torch.arange(len(q) + 1, dtype=torch.int32)
    if is_context:
        starts = given["cum_seq_lens_q"]
        assert given["causal"] and given["batch_size"] == len(kv_lens) and starts.diff().min() >= 1
        assert given["max_q_len"] >= starts.diff().max()
        assert given["cum_seq_lens_kv"].tolist() == [0, *itertools.accumulate(kv_lens.tolist())]
    assert len(starts) - 1 == len(kv_lens) == len(tables) and starts[-1] == len(q)
    left, sinks, out = given["window_left"], given["sinks"], torch.full_like(q, float("nan"))
    for row, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        keys, values = (_paged(pages, tables[row], int(kv_lens[row])) for pages in (k, v))
        band = Band(len(keys) - (last - first), left, 0)
        out[first:last] = attend(q[first:last], keys, values, given["bmm1_scale"], band, 0.0, sinks)
    return out


def _pages_of_flashinfer(given: Mapping[str, Any]) -> list[Tensor]:
    """K and V as [blocks, block_size, G, D]. Both are read by the strides of K."""
    caches = given["kv_cache"]
    assert isinstance(caches, tuple) and len(caches) == 2 and given["kv_layout"] == "HND"
    k, v = caches
    assert k.shape == v.shape and k.stride() == v.stride() and k.dtype == v.dtype == given["query"].dtype
    assert k.stride(-1) == 1 and given["query"].shape[2] == k.shape[3]
    return [cache.transpose(1, 2) for cache in caches]


def _check_xqa(given: Mapping[str, Any], k: Tensor) -> None:
    q, workspace, (_, block_size, num_kv_heads, head_dim) = given["query"], given["workspace_buffer"], k.shape
    group = q.shape[1] // num_kv_heads
    assert block_size in (16, 32, 64, 128) and head_dim % 16 == 0 and head_dim <= 256 and group <= 16
    assert q.is_contiguous() and all(stride % head_dim == 0 for stride in k.stride()[:-1]), "it counts in heads"
    part_bytes = group * head_dim * q.element_size() + 2 * 32 * 4
    assert workspace.is_contiguous() and workspace.nbytes >= _COUNTERS_BYTES + _PARTS * part_bytes
    assert not workspace.view(torch.uint8)[:_COUNTERS_BYTES].any()
    assert given["multi_ctas_kv_counter_buffer"] is None


def _check_trtllm_gen(given: Mapping[str, Any], k: Tensor) -> None:
    counters, workspace = given["multi_ctas_kv_counter_buffer"], given["workspace_buffer"]
    assert given["backend"] == "trtllm-gen" and k.shape[1] in (16, 32, 64) and k.shape[3] in (64, 128, 256)
    assert counters.nbytes >= 4 * max(_PARTS, len(given["seq_lens"]) * given["query"].shape[1]) and not counters.any()
    assert counters.data_ptr() % 16 == workspace.data_ptr() % 16 == 0 and workspace.nbytes >= 128 << 20
    assert counters.data_ptr() + counters.nbytes <= workspace.data_ptr(), "they overlap"


# -- attention ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """Keys that query i sees: from i + shift - left to i + shift + right. A negative bound is none."""

    shift: int
    left: int
    right: int


def attend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, band: Band, softcap: float, sinks: Tensor | None = None
) -> Tensor:
    """[n, Hq, D] of queries [n, Hq, D] over keys and values [length, G, D], with sinks [Hq]."""
    repeat = q.shape[1] // keys.shape[1]
    k, v = (part.double().repeat_interleave(repeat, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    diagonal = torch.arange(q.shape[0])[:, None] + band.shift
    place = torch.arange(keys.shape[0])
    hidden = torch.zeros(q.shape[0], keys.shape[0], dtype=torch.bool)
    if band.right >= 0:
        hidden |= place > diagonal + band.right
    if band.left >= 0:
        hidden |= place < diagonal - band.left
    scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, q.shape[0], 1)], dim=2)
    weights = scores.softmax(-1)[:, :, : keys.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


MODULES: dict[
    str, tuple[tuple[str, ...], Callable[[Kept], types.ModuleType], Callable[[Mapping[str, Any]], Tensor]]
] = {
    "flash_attention_3": (("flash_attn_interface",), flash_attention_3, replay_flash_attention_3),
    "flashinfer": (("flashinfer.decode", "flashinfer.prefill"), flashinfer, replay_flashinfer),
    "cudnn": (("cudnn",), cudnn, replay_cudnn),
    "flash_attention_4": (("flash_attn.cute.interface",), flash_attention_4, replay_flash_attention_4),
}
"""(modules that are called, stand-in for all of them, replay) of each library, by implementation."""
