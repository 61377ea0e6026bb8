"""Kernels find what lies more than 2^31 elements behind the start of a tensor.

Tensors are as large as that, but only pages that are touched take memory. Results at large offsets equal those of the
same kernel over a small tensor.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from inferd.kernels import gpu
from inferd.kernels.device import DeviceProperties
from inferd.kernels.ops.argmax import ARGMAX, argmax
from inferd.kernels.ops.decode_draw import DRAW, draw
from inferd.kernels.ops.embed import EMBED, Key
from inferd.kernels.ops.gated_delta import GATED_DELTA, Gates, gated_delta
from inferd.kernels.ops.kv_format import KV_FORMATS, KV_SCALE_DTYPE
from inferd.kernels.ops.logit_rules import (
    APPLY,
    BIASED,
    MARKED,
    PROMPT,
    RECORD,
    WORDED,
    RuleState,
    apply_rules,
    record_drawn,
)
from inferd.kernels.ops.mamba2 import MAMBA2, Weights, mamba2
from inferd.kernels.ops.paged_attention import PAGED_ATTENTION, paged_attention
from inferd.kernels.ops.rope import ROPE_AND_CACHE, rope_and_cache
from inferd.kernels.ops.sample import SAMPLE, sample
from inferd.kernels.ops.short_conv import SHORT_CONV, short_conv
from inferd.kernels.ops.step_inputs import STEP_INPUTS, WRITE_DRAWN, step_inputs, write_drawn
from inferd.kernels.ops.top_k_top_p import Cuts
from tests.kernels import interpreter
from tests.kernels.recurrent import rows_of
from tests.kernels.test_paged_attention import FP8, INT8, Sequences

pytest.importorskip("triton")

from inferd.kernels.ops.experts import triton as experts
from inferd.kernels.ops.paged_attention.split import ATTENTION_SPLIT_KERNEL

LARGE = 2**31
NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE: the system promises no memory for all pages of a mapping. Python 3.12 does not name it."""
OPS = (
    ARGMAX, DRAW, GATED_DELTA, APPLY, RECORD, MAMBA2, PAGED_ATTENTION, ROPE_AND_CACHE, SAMPLE, SHORT_CONV, STEP_INPUTS,
    WRITE_DRAWN,
)  # fmt: skip


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    gpu.interpret(True)
    interpreter.repair()
    for op in OPS:
        op.force("triton")
    yield
    gpu.interpret(False)
    for op in OPS:
        op.force(None)


def vast(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory where they are touched; on a GPU all of them take memory."""
    device = torch.get_default_device()
    if device.type == "cuda":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def behind(*sizes: int) -> int:
    """The first index of rows of so many elements that lies at or behind `LARGE`."""
    return -(-LARGE // math.prod(sizes))


# -- KV ----------------------------------------------------------------------------------------------------------------

ROWS = ((300, 1), (10, 1), (0, 20))
FORMATS = [
    pytest.param(kv_dtype, is_deterministic, id=f"{str(kv_dtype)[6:]}{' in parts' * (not is_deterministic)}")
    for kv_dtype in (torch.bfloat16, FP8, INT8)
    for is_deterministic in (True, False)
]


def far(pool: Tensor, num_blocks: int) -> Tensor:
    """A pool of `num_blocks` that ends with the blocks of `pool`."""
    made = vast((num_blocks, *pool.shape[1:]), pool.dtype)
    made[num_blocks - len(pool) :] = pool
    return made


@pytest.mark.parametrize(("kv_dtype", "is_deterministic"), FORMATS)
def test_attention_over_a_large_pool(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype, is_deterministic: bool
) -> None:
    """Decodes, cut and whole, and a prompt; each kernel of attention computes some."""
    ATTENTION_SPLIT_KERNEL.force(None)
    monkeypatch.setattr(gpu, "properties_of", lambda *_: DeviceProperties.of(90, 3))
    sequences = Sequences(ROWS, 2, 64, 16, kv_dtype)
    batch = dataclasses.replace(sequences.batch(range(len(ROWS))), is_deterministic=is_deterministic)
    q = torch.randn(batch.num_tokens, 8, 64).to(torch.bfloat16)
    expected = paged_attention(q, sequences.kv, batch, 0.2, kv_scales=sequences.kv_scales)
    assert expected.isfinite().all()
    num_blocks = behind(*sequences.kv.shape[1:]) + len(sequences.kv)
    scales = None if sequences.kv_scales is None else far(sequences.kv_scales, num_blocks)
    moved = dataclasses.replace(batch, block_tables=batch.block_tables + (num_blocks - len(sequences.kv)))
    assert torch.equal(paged_attention(q, far(sequences.kv, num_blocks), moved, 0.2, kv_scales=scales), expected)


@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_attention_reads_scales_up_to_its_bound(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype, is_deterministic: bool
) -> None:
    """Scales are counted in 32 bits, so a layer may have fewer than 2^31 of them: 64 GiB of heads of 64 or more."""
    monkeypatch.setattr(gpu, "properties_of", lambda *_: DeviceProperties.of(90, 3))
    sequences = Sequences(((40, 1),), 1, 64, 16, kv_dtype)
    assert sequences.kv_scales is not None
    batch = dataclasses.replace(sequences.batch([0]), is_deterministic=is_deterministic)
    q = torch.randn(1, 4, 64).to(torch.bfloat16)
    expected = paged_attention(q, sequences.kv, batch, 0.2, kv_scales=sequences.kv_scales)
    num_blocks = behind(*sequences.kv_scales.shape[1:])
    for more, is_allowed in ((-1, True), (0, False)):
        kv, scales = far(sequences.kv, num_blocks + more), far(sequences.kv_scales, num_blocks + more)
        tables = batch.block_tables + (num_blocks + more - len(sequences.kv))
        moved = dataclasses.replace(batch, block_tables=tables)
        if is_allowed:
            assert torch.equal(paged_attention(q, kv, moved, 0.2, kv_scales=scales), expected)
        else:
            with pytest.raises(AssertionError):
                paged_attention(q, kv, moved, 0.2, kv_scales=scales)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, *KV_FORMATS])
def test_keys_and_values_are_written_to_a_large_pool(kv_dtype: torch.dtype) -> None:
    """The last slots lie behind 2^31 elements, and in 8 bits behind 2^31 scales too."""
    is_narrow = kv_dtype in KV_FORMATS
    heads, size, block_size = 2, 32 if is_narrow else 64, 16
    num_blocks = behind(2, heads, block_size, 1 if is_narrow else size) + 3
    q, k, v = (torch.randn(3, num, size).to(torch.bfloat16) for num in (4, heads, heads))
    cos_sin, positions = torch.rand(50, size), torch.tensor([7, 0, 49])
    found = []
    for first in (0, num_blocks - 3):
        kv = vast((first + 3, 2, heads, block_size, size), kv_dtype)
        scales = vast((first + 3, 2, heads, block_size, 1), KV_SCALE_DTYPE) if is_narrow else None
        slots = first * block_size + torch.tensor([20, 47, 0])
        out = rope_and_cache(q, k, v, cos_sin, positions, slots, kv, kv_scales=scales)
        found.append([out, kv[first:].float(), kv[:3].float(), *([] if scales is None else [scales[first:].float()])])
    (out, near, _, *near_scales), (far_out, written, start, *far_scales) = found
    assert near.any() and not start.any()
    assert torch.equal(out, far_out) and torch.equal(near, written)
    assert all(map(torch.equal, near_scales, far_scales))


# -- slots -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gated_delta", "mamba2", "short_conv"])
def test_states_of_a_large_pool(kind: str) -> None:
    """A row that continues, and one that begins."""
    sizes = (2, 8, 16) if kind != "short_conv" else (3, 48)
    dtype = torch.float32 if kind != "short_conv" else torch.bfloat16
    number = behind(*sizes)
    x, gates, kept = torch.randn(3, 64), torch.randn(3, 4), torch.randn(sizes).to(dtype)
    numbers = torch.rand(3, 2)
    results, states = [], []
    for first in (0, number):
        state = vast((first + 2, *sizes), dtype)
        state[first] = kept
        rows = rows_of([(first, 5, 2), (first + 1, 0, 1)])
        if kind == "gated_delta":
            b, a = gates.chunk(2, 1)
            results.append(gated_delta(x, Gates(b, a, numbers[0], numbers[1]), state, rows))
        elif kind == "mamba2":
            results.append(mamba2(x, gates[:, :2], Weights(*numbers), state, rows))
        else:
            weight = torch.linspace(-1, 1, 4 * 48).view(4, 48)
            results.append(short_conv(x[:, :48].to(dtype), weight, state, rows, has_silu=True))
        states.append(state[first:].clone())
    assert torch.equal(*results) and torch.equal(*states) and not torch.equal(states[0][0], kept)


def test_inputs_of_a_step_of_many_long_slots() -> None:
    """Ids lie behind 2^31 elements, and so do the tables of the last of three cache groups."""
    max_len, block_size, num_groups = 2**20, 2, 3
    num_slots = behind(max_len + 1) + 1
    token_ids = vast((num_slots, max_len + 1), torch.int64)
    tables = vast((num_groups, num_slots, max_len // block_size), torch.int32)
    slots, positions = torch.tensor([num_slots - 1, -1, 3]), torch.tensor([1500, 0, 2])
    token_ids[num_slots - 1, 1500], token_ids[3, 2] = 77, 88
    for group in range(num_groups):
        tables[group, num_slots - 1, :751] = torch.arange(751) + 10_000 * group
        tables[group, 3, :2] = torch.arange(2) + 5_000 * (group + 1)
    made = step_inputs(slots, positions, token_ids, tables, block_size, 999)
    assert made.token_ids.tolist() == [77, 0, 88]
    for group in range(num_groups):
        assert torch.equal(made.block_tables[group, 0, :751], tables[group, num_slots - 1, :751])
        own = [tables[group, num_slots - 1, 750], 999, tables[group, 3, 1]]
        assert made.write_slots[group].tolist() == [block_size * int(block) for block in own]
    write_drawn(torch.tensor([5, 6, 7]), slots, positions, token_ids)
    assert token_ids[num_slots - 1, 1501] == 5 and token_ids[3, 3] == 7 and not token_ids[0].any()


def test_rules_of_many_slots() -> None:
    """A bias, a mark and a bad word of a slot whose rows lie behind 2^31 elements."""
    vocab_size, words, length = 4096, 256, 16
    last = behind(vocab_size)
    logits = torch.randn(1, vocab_size)
    rows, outcomes = [], []
    for slot in (0, last):
        shape = (slot + 1, vocab_size)
        state = RuleState(
            penalties=vast((slot + 1, 3), torch.float32),
            first_free=vast((slot + 1,), torch.int64),
            bias=vast(shape, torch.float32),
            marks=vast(shape, torch.int32),
            prefixes=vast((slot + 1, words, length), torch.int32),
            last_ids=vast((slot + 1, words), torch.int32),
            tails=vast((slot + 1, length), torch.int32),
        )
        state.penalties[slot] = torch.tensor([1.5, 0.25, 0.5])
        state.bias[slot, 5:9], state.marks[slot, 7:20] = -math.inf, PROMPT + 2
        state.prefixes[slot], state.last_ids[slot], state.last_ids[slot, 3] = -1, -1, 4001
        kinds = vast((slot + 1,), torch.int32)
        kinds[slot] = BIASED | MARKED | WORDED
        changed, slots, positions = logits.clone(), torch.tensor([slot]), torch.tensor([9])
        status = apply_rules(changed, slots, positions, kinds, state)
        outcome = record_drawn(torch.tensor([30]), torch.tensor([False]), status, slots, positions, kinds, state)
        rows.append(changed)
        outcomes.append((status, outcome, state.marks[slot, 30].clone(), state.tails[slot].clone()))
    assert torch.equal(*rows) and rows[0][0, 4001] == -math.inf and not torch.equal(rows[0], logits)
    assert all(map(torch.equal, *outcomes)) and outcomes[0][2] == 1


# -- logits, embeddings and experts ------------------------------------------------------------------------------------


def test_rows_of_logits_far_apart() -> None:
    near = torch.randn(3, 2100)
    stride = behind(2)
    logits = vast((2 * stride + 2100,), torch.float32).as_strided((3, 2100), (stride, 1))
    logits.copy_(near)
    slots, seeds, positions = torch.arange(3), torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3])
    temperatures = torch.tensor([0.0, 1.0, 0.7])
    cuts = Cuts(
        torch.tensor([0, 0, 40]), torch.ones(3, dtype=torch.float64), torch.full((3,), -math.inf, dtype=torch.float64)
    )
    for first, second in zip(argmax(near), argmax(logits), strict=True):
        assert torch.equal(first, second)
    assert torch.equal(sample(near, seeds, positions), sample(logits, seeds, positions))
    drawn = [draw(each, slots, temperatures, seeds, positions, cuts)[0] for each in (near, logits)]
    assert torch.equal(*drawn)


def test_embeddings_of_a_large_vocabulary() -> None:
    """By torch, which looks up embeddings on GPUs."""
    size = 64
    last = behind(size) + 5
    weight = vast((last + 1, size), torch.bfloat16)
    weight[last], weight[3] = torch.randn(2, size).to(torch.bfloat16)
    EMBED.force("reference")
    found = EMBED.resolve(Key(weight.device.type))(torch.tensor([last, 3, 0]), weight, torch.bfloat16)
    EMBED.force(None)
    assert torch.equal(found, weight[torch.tensor([last, 3, 0])]) and found[0].any()


def test_a_stack_of_many_experts() -> None:
    """The last of them lies behind 2^31 weights."""
    out_size = in_size = 64
    num_experts = behind(out_size, in_size) + 1
    weights = vast((num_experts, out_size, in_size), torch.bfloat16)
    biases = vast((num_experts, out_size), torch.bfloat16)
    weights[-1], biases[-1] = torch.randn(out_size, in_size), torch.randn(out_size)
    x = torch.randn(1, in_size).to(torch.bfloat16)
    offsets = vast((num_experts + 1,), torch.int32)
    offsets[-1] = 1
    out = torch.empty(1, out_size, dtype=torch.bfloat16)
    experts._product[(1,)](
        x, weights, biases, torch.zeros(1, dtype=torch.int32), offsets, out, 1, num_experts, out_size, in_size,
        BY_ROW=True, SCANNED=2**20, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64,
    )  # fmt: skip
    expected = torch.nn.functional.linear(x.double(), weights[-1].double(), biases[-1].double())
    assert (out.double() - expected).abs().max() < 2**-8 * expected.abs().max()
