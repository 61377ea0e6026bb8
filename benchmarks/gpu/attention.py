"""Attention alone, with groups of 4 and 8 query heads: decodes by batch and context, prompts compared with torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.bench import Bench, Calls, distance, num_copies
from benchmarks.gpu.points import Case, Phase, Trial
from inferd.kernels.ops.kv_format import KV_SCALE_DTYPE, dequantize_heads, head_bytes, num_kv_groups, quantize_heads
from inferd.kernels.ops.paged_attention import LIBRARIES, PAGED_ATTENTION, AttentionBatch, paged_attention
from inferd.kernels.registry import KernelError

KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 32
BATCHES = (1, 8, 32, 64, 256)
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
TOLERANCE = 1e-2
"""Largest error, by norm, for bf16 operands and results."""
_LAYERS = 8
"""Fewest calls of one graph: layers share the work that a step prepares once."""
_CHECKED_QUERIES = 64
_STEPS = ((1, 1024), (1, 32_768), (64, 1024), (256, 1024), (64, 16_384))
"""(decodes, context) of steps with which libraries are compared."""
_DETERMINISTIC = "inferd, deterministic"
_BY = ("inferd", _DETERMINISTIC)
"""The kernel of a plain start, and that of one with `--deterministic`."""


@dataclass(frozen=True, slots=True)
class Paged:
    """Random KV of rows (start, tokens), in blocks at random places, in `layers` pools that are used in turn."""

    rows: tuple[tuple[int, int], ...]
    layers: Tensor
    """[layers, blocks, 2, KV heads, block size, head size]."""
    scales: Tensor | None
    """[layers, blocks, 2, KV heads, block size, groups] for KV in 8 bits."""
    tables: Tensor
    q: Tensor

    @classmethod
    def make(cls, rows: Sequence[tuple[int, int]], group: int, device: torch.device, kv: str = "bf16") -> Paged:
        width = max(-(-(start + count) // BLOCK_SIZE) for start, count in rows)
        num_blocks = len(rows) * width
        pool = (num_blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        copies = num_copies(num_blocks * BLOCK_SIZE * 2 * KV_HEADS * HEAD_DIM * KV_DTYPES[kv].itemsize)
        layers = torch.empty((copies, *pool), dtype=KV_DTYPES[kv], device=device)
        scales = None
        if kv != "bf16":
            shape = (copies, *pool[:-1], num_kv_groups(HEAD_DIM))
            scales = torch.empty(shape, dtype=KV_SCALE_DTYPE, device=device)
        for index, layer in enumerate(layers):
            if scales is None:
                layer.normal_()
            else:
                numbers, scales[index] = quantize_heads(torch.randn(pool, device=device), layer.dtype)
                layer.copy_(numbers)
        tables = torch.randperm(num_blocks, device=device).reshape(len(rows), width).to(torch.int32)
        num_tokens = sum(count for _, count in rows)
        q = torch.randn(num_tokens, KV_HEADS * group, HEAD_DIM, device=device).to(torch.bfloat16)
        return cls(tuple(rows), layers, scales, tables, q)

    def batch(self, is_deterministic: bool, *, is_recorded: bool = False) -> AttentionBatch:
        """A new batch: a graph needs one that no other call used. A recorded step has lengths on the device alone."""
        batch = AttentionBatch.build(self.rows, self.tables, BLOCK_SIZE, self.tables.device)
        lens = None if is_recorded else batch.host_seq_lens
        return replace(batch, is_deterministic=is_deterministic, host_seq_lens=lens)

    def attend(self, batch: AttentionBatch, layer: int) -> Tensor:
        index = layer % len(self.layers)
        scales = None if self.scales is None else self.scales[index]
        return paged_attention(self.q, self.layers[index], batch, HEAD_DIM**-0.5, kv_scales=scales)

    def keys_values(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V of layer 0: [KV heads, length, D] in float32."""
        blocks = self.tables[row].long()
        pages = self.layers[0][blocks]
        pages = pages.float() if self.scales is None else dequantize_heads(pages, self.scales[0][blocks])
        k, v = (pages[:, plane].transpose(0, 1).flatten(1, 2)[:, :length] for plane in range(2))
        return k, v

    def error(self, out: Tensor) -> float:
        """Distance from dense attention in float32, over some queries of the first, the middle and the last row."""
        first_tokens = [0, *itertools.accumulate(count for _, count in self.rows)]
        worst = 0.0
        for row in {0, len(self.rows) // 2, len(self.rows) - 1}:
            start, count = self.rows[row]
            picked = torch.randperm(count, device=out.device)[:_CHECKED_QUERIES]
            tokens = first_tokens[row] + picked
            expected = dense(self.q[tokens].float(), *self.keys_values(row, start + count), start + picked)
            worst = max(worst, distance(out[tokens], expected))
        return worst


def dense(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """[n, Hq, D]: q [n, Hq, D] at `positions` [n] over k and v [G, length, D], all in float32."""
    grouped = torch.unflatten(q, 1, (k.shape[0], -1))
    scores = torch.einsum("nghd,gkd->nghk", grouped, k) * q.shape[2] ** -0.5
    is_hidden = torch.arange(k.shape[1], device=q.device) > positions[:, None]
    weights = scores.masked_fill(is_hidden[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("nghk,gkd->nghd", weights, v).flatten(1, 2)


def phase(rows: Sequence[tuple[int, int]], group: int, kv: str = "bf16") -> Phase:
    """Bytes: each K and V that is seen, their scales, q and the result, once each. Operations: 4 for each element of a
    head, head, query and key."""
    heads = KV_HEADS * group
    kv_bytes = 2.0 * sum(start + count for start, count in rows) * KV_HEADS * head_bytes(HEAD_DIM, KV_DTYPES[kv])
    pairs = sum(count * start + count * (count + 1) / 2 for start, count in rows)
    queries = 2.0 * sum(count for _, count in rows) * heads * HEAD_DIM
    return Phase(kv_bytes + queries * 2, 4.0 * pairs * heads * HEAD_DIM)


def decode(
    bench: Bench,
    contexts: Sequence[int],
    kv: str = "bf16",
    batches: Sequence[int] = BATCHES,
    groups: Sequence[int] = (4, 8),
) -> None:
    """One token for each row, whose KV exceeds any cache. The deterministic kernel is measured for the first group."""
    bench.require(kv)
    contexts, batches, groups = bench.pick((contexts, batches, groups), ((100,), (1, 3), (4,)))
    for context, batch, group, name in itertools.product(contexts, batches, groups, _BY):
        is_deterministic = name == _DETERMINISTIC
        if is_deterministic and group != groups[0]:
            continue
        rows = [(context - 1, 1)] * batch
        labels = {"KV": kv, "context": str(context), "batch": str(batch), "group": str(group), "by": name}
        case = Case(table="decode attention", labels=labels, phases=(phase(rows, group, kv),))
        bench.measure(case, partial(_trial, bench, rows, group, kv, is_deterministic=is_deterministic))


def mixed_lengths(bench: Bench) -> None:
    """Decodes of very different lengths and one prompt's chunk, like a step of a busy server."""
    contexts = bench.pick([512, 1024, 2048, 16_384] * 16, [40, 300])
    chunk = bench.pick(512, 20)
    for name, rows in (
        ("64 decodes of 512 to 16k", [(context - 1, 1) for context in contexts]),
        ("the same and a chunk", [*((context - 1, 1) for context in contexts), (0, chunk)]),
    ):
        for by in _BY:
            case = Case(table="mixed attention", labels={"rows": name, "by": by}, phases=(phase(rows, 4),))
            bench.measure(case, partial(_trial, bench, rows, 4, is_deterministic=by == _DETERMINISTIC))


def prefill(bench: Bench, lengths: Sequence[int]) -> None:
    """Whole prompts, compared with torch's dense attention over the same tokens without pages."""
    for length in bench.pick(lengths, (70,)):
        prompts = max(1, bench.pick(8192, 140) // length)
        rows = [(0, length)] * prompts
        for name in (*_BY, "torch SDPA"):
            labels = {"prompts": f"{prompts} x {length}", "by": name}
            case = Case(table="prefill attention", labels=labels, phases=(phase(rows, 4),))
            if name == "torch SDPA":
                bench.measure(case, partial(_sdpa, bench, prompts, length))
            else:
                bench.measure(case, partial(_trial, bench, rows, 4, is_deterministic=name == _DETERMINISTIC))


def _trial(
    bench: Bench,
    rows: Sequence[tuple[int, int]],
    group: int,
    kv: str = "bf16",
    *,
    is_deterministic: bool,
    is_recorded: bool = False,
) -> Trial:
    paged = Paged.make(rows, group, bench.device, kv)
    error = paged.error(paged.attend(paged.batch(is_deterministic, is_recorded=is_recorded), 0))
    if not error <= TOLERANCE:
        return Trial(error=error, tolerance=TOLERANCE)

    def calls() -> Calls:
        batch = paged.batch(is_deterministic, is_recorded=is_recorded)
        return [partial(paged.attend, batch, layer) for layer in range(max(_LAYERS, len(paged.layers)))]

    timing = bench.clock(calls)
    return Trial(seconds=timing.seconds, error=error, tolerance=TOLERANCE, note=timing.note)


def libraries(bench: Bench) -> None:
    """Each installed library beside our own kernel, over the same recorded steps: which should come first?"""
    contexts = bench.pick([512, 1024, 2048, 16_384] * 16, [40, 300])
    chunk = bench.pick(512, 20)
    steps = {f"{batch} x {context}": [(context - 1, 1)] * batch for batch, context in bench.pick(_STEPS, ((2, 100),))}
    steps["64 decodes of 512 to 16k and a chunk"] = [*((context - 1, 1) for context in contexts), (1024, chunk)]
    for (name, rows), by in itertools.product(steps.items(), (*LIBRARIES, "triton")):
        case = Case(table="attention by library", labels={"rows": name, "by": by}, phases=(phase(rows, 4),))
        bench.measure(case, partial(_library_trial, bench, rows, by))


def _library_trial(bench: Bench, rows: Sequence[tuple[int, int]], name: str) -> Trial:
    """The trial with one implementation, or why it did not run."""
    PAGED_ATTENTION.force(name)
    try:
        return _trial(bench, rows, 4, is_deterministic=False, is_recorded=True)
    except KernelError as error:
        why = str(error).rpartition(f"{name}: ")[2].partition(";")[0].removesuffix(")")
        return Trial(note=why) if name in LIBRARIES else Trial.missing(why)
    finally:
        PAGED_ATTENTION.force(None)


def _sdpa(bench: Bench, prompts: int, length: int) -> Trial:
    def heads(count: int) -> Tensor:
        return torch.randn(prompts, count, length, HEAD_DIM, device=bench.device).to(torch.bfloat16)

    q, k, v = heads(KV_HEADS * 4), heads(KV_HEADS), heads(KV_HEADS)
    call = partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    picked = torch.randperm(length, device=bench.device)[:_CHECKED_QUERIES]
    expected = dense(q[0, :, picked].transpose(0, 1).float(), k[0].float(), v[0].float(), picked)
    error = distance(call()[0, :, picked].transpose(0, 1), expected)
    timing = bench.clock(lambda: [call] * _LAYERS)
    return Trial(seconds=timing.seconds, error=error, tolerance=TOLERANCE, note=timing.note)
