"""The Triton implementation: a step's work lists, and a launch of the kernel that each takes.

The kernels are in `tiles.py`, and for steps that need not be deterministic in `parts.py` and `parts_fp8.py`. `split.py`
chooses among them, and `partial.py` combines cut units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.device import DEPENDENT_MIN_SM
from inferd.kernels.gpu import Shipped, dependent_options
from inferd.kernels.ops.paged_attention import partial, parts, parts_fp8, passes, tiles, work
from inferd.kernels.ops.paged_attention.batch import AttentionBatch
from inferd.kernels.ops.paged_attention.passes import STEADY_ROWS, Shape
from inferd.kernels.ops.paged_attention.split import ATTENTION_SPLIT_KERNEL, Key, Launch, refuses_fp8
from inferd.kernels.ops.paged_attention.work import Work

_LOG2_E = math.log2(math.e)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    kv_scales: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    assert kv_scales is None or kv_scales.numel() < 1 << 31
    q = q.contiguous()
    out = torch.empty_like(q)
    listed = _work(q, kv, batch, window, softcap)
    slots, device = _slots(listed, kv, q.device), gpu.properties_of(q.device)
    has_cap, is_invariant = softcap is not None, batch.is_deterministic
    for part in listed:
        is_chunk = part.part.max_queries == passes.MAX_QUERIES
        key = Key(q.device.type, q.dtype, kv.dtype, q.shape[2], has_cap, is_chunk, device, is_invariant)
        launch = ATTENTION_SPLIT_KERNEL.resolve(key)
        assert part.part.is_in_parts == (ATTENTION_SPLIT_KERNEL.choice(key).chosen != "tiles")
        _run(launch, part, q, kv, kv_scales, sinks, out, slots, batch, scale, window, softcap)
    return out


def _slots(listed: tuple[Work, ...], kv: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for the partial results of successive launches: (values, peaks and sums)."""
    num_rows = max(part.num_slots * part.slot_rows for part in (work.part for work in listed)) * kv.shape[2]
    values = torch.empty(num_rows, kv.shape[4], dtype=torch.float32, device=device)
    return values, torch.empty(num_rows, 2, dtype=torch.float32, device=device)


def _work(q: Tensor, kv: Tensor, batch: AttentionBatch, window: int | None, softcap: float | None) -> tuple[Work, ...]:
    """The step's work lists. The first layer of a kind makes them, the others reuse them."""
    num_kv_heads, head_dim = kv.shape[2], kv.shape[4]
    group = q.shape[1] // num_kv_heads
    is_fp8 = refuses_fp8(q.dtype, kv.dtype, head_dim, has_softcap=softcap is not None) is None
    shape = Shape(num_kv_heads, group, head_dim, kv.element_size(), window, gpu.properties_of(q.device), is_fp8)
    found: tuple[Work, ...] | None = batch.prepared.get(shape)
    if found is None:
        table_tokens = batch.block_tables.shape[1] * batch.block_size
        asked = passes.passes(
            shape,
            batch.query_lens,
            table_tokens,
            is_deterministic=batch.is_deterministic,
            knows_lens=batch.knows_query_lens,
        )
        found = batch.prepared[shape] = tuple(work.build(part, batch, group, window) for part in asked)
    return found


def _run(
    launch: Launch,
    listed: Work,
    q: Tensor,
    kv: Tensor,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    slots: tuple[Tensor, Tensor],
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    part, form = listed.part, listed.part.form
    num_heads, num_kv_heads, head_dim = q.shape[1], kv.shape[2], kv.shape[4]
    tables = batch.block_tables
    assert tables.stride(1) == 1
    arguments = (
        q,
        kv,
        slots[1] if kv_scales is None else kv_scales,
        sinks,
        out,
        *slots,
        listed.units,
        listed.segments,
        tables,
        tables.stride(0),
        num_heads,
        num_kv_heads,
        batch.block_size.bit_length() - 1,
        work.NO_WINDOW if window is None else window,
        part.slot_rows,
        scale * _LOG2_E if softcap is None else scale * _LOG2_E * 2 / softcap,
        0.0 if softcap is None else softcap * _LOG2_E,
    )
    options: dict[str, object] = {"num_warps": form.num_warps, "num_stages": form.num_stages, "enable_fp_fusion": False}
    if part.is_in_parts and kv_scales is not None:
        options |= parts_fp8.constants(form, head_dim, is_compiled=q.device.type == "cuda")
        options["maxnreg"] = form.max_registers
    elif part.is_in_parts:
        options |= parts.constants(form, head_dim, has_cap=softcap is not None, is_cut=part.is_cut)
        options["maxnreg"] = form.max_registers
    else:
        options |= tiles.constants(form, head_dim, has_cap=softcap is not None, is_cut=part.is_cut)
        options |= tiles.limits(form, has_sinks=sinks is not None)
    # Larger blocks are for prompts, whose launches are short beside their work.
    options |= dependent_options(is_allowed=form.block_m <= STEADY_ROWS)
    launch(part.num_segments * num_kv_heads, arguments, options)
    if part.num_slots:
        partial.combine(
            out, *slots, listed.units, listed.segments, num_kv_heads, part.slot_rows, in_parts=part.is_in_parts
        )


def shipped() -> Iterator[Shipped]:
    """Forms, those of few rows also for early starts."""
    yield from work.shipped()
    for form in (*partial.shipped(), *parts.shipped(), *parts_fp8.shipped(), *tiles.shipped()):
        yield form
        if not form.is_matrix and form.max_sm >= DEPENDENT_MIN_SM:
            yield form.early()
