"""The Triton implementation of routing and of the weighted sum: three launches a layer.

1. `_choose`: one program chooses the experts of a row and computes their weights. It is one warp for up to 512
   experts.
2. `_sort`: one program for each expert finds its pairs. It walks the choices of all rows twice: first to count the
   pairs of lower experts and its own, then to number its own by row. So no program waits for another, and nothing is
   added atomically. An expert without pairs skips the second walk.
3. `_add`: one program for each piece of a row adds up its results in the order of its choices, as the reference does.

The sum of a softmax has the order of Triton's reduction, which depends on the numbers of experts and groups alone. The
reference adds up the experts one by one, so the last bits of its weights may differ. All other sums have its order.

Bytes for T rows, E experts, K choices in S slots (8, or the next power of two) and results of `size` 16-bit numbers:

- `_choose` moves T (4 E + 4 K + 2 S): 4.6 MB for 8,192 rows, 128 experts and 8 choices.
- `_sort` reads 4 E T S from the L2 cache, 34 MB in the same case, and writes 8 T K.
- `_add` moves 2 T (K + 1) size: 302 MB with a size of 2,048.

Computed for an H100 in that case, with 3.35 TB/s of memory, 5.5 TB/s of L2 cache and 2 us for any launch:

- 1 row takes 2 + 2 + 2 us.
- 256 rows take 3 + 3 + 4 us.
- 8,192 rows take 10 + 10 + 92 us. Instructions bound `_choose`, and memory bounds `_add`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inferd.kernels.gpu import DTYPES, Shipped, dependent_options
from inferd.kernels.ops.experts.reference import Router, Routing

_LEAST_EXPERTS = 64
"""Least number of experts that a program of `_choose` has lanes for."""
_EXPERTS_A_WARP, _MOST_WARPS = 512, 32
_LEAST_SLOTS = 8
"""Least number of places for a row's experts: 16 bytes."""
_TILES = ((512, 1), (2048, 4), (8192, 8))
"""(choices that a program of `_sort` looks at together, its warps). The first that has all choices is taken, or the
last."""
_ADD_BLOCK, _ADD_WARPS = 1024, 4  # 8 elements a thread: 16 bytes of 16-bit numbers in one load
_UNFUSED = {"enable_fp_fusion": False}
_LOWEST = tl.constexpr(-(2**31))
"""The image of what cannot be chosen, below that of -inf."""
_INFINITELY_LOW, _NAN = tl.constexpr(-0x7F800001), tl.constexpr(0x7FC00000)
"""The images of -inf, and of NaN, which is above that of inf."""
_NONE = tl.constexpr(2**15 - 1)
"""The expert of a place behind a row's last choice."""


@triton.jit
def _image_of(x):
    """int32 with the order of x. NaN comes last, as in torch's sort, and both zeros have one image."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NAN)


@triton.jit
def _number_of(image):
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _first_of_largest(image, index):
    """The lowest index of those that have the largest image."""
    return tl.min(tl.where(image == tl.max(image), index, 2147483647))


@triton.jit
def _score(logit, largest, HAS_SIGMOID: tl.constexpr):
    if HAS_SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logit))
    return tl.exp(logit - largest)


@triton.jit
def _of_chosen_groups(image, is_expert, num_chosen_groups, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr):
    """The images [groups, members], those of other groups as if their numbers were -inf."""
    member = tl.arange(0, GROUP_BLOCK)[None, :]
    group = tl.arange(0, GROUPS)
    largest = tl.max(image, 1)
    first = tl.min(tl.where(image == largest[:, None], member, GROUP_BLOCK), 1)
    second = tl.max(tl.where(member == first[:, None], _LOWEST, image), 1)
    sums = _image_of(_number_of(largest) + _number_of(second))
    sums = tl.where(largest > _LOWEST, sums, _LOWEST)
    is_chosen = group < 0
    for _ in range(num_chosen_groups):
        best = _first_of_largest(sums, group)
        is_chosen |= group == best
        sums = tl.where(group == best, _LOWEST, sums)
    return tl.where(is_expert & ~is_chosen[:, None], _INFINITELY_LOW, image)


@triton.jit(do_not_specialize=["stride", "num_groups", "group_size", "num_chosen", "num_chosen_groups"])
def _choose(
    logits, bias, scales, weights, experts, stride, num_groups, group_size, num_chosen, num_chosen_groups, factor,
    added,
    HAS_SIGMOID: tl.constexpr, NORMALIZES: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    SLOTS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write a row's weights [num_chosen] and experts [SLOTS]. Experts lie on lanes as [groups, members]."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    group, member = tl.arange(0, GROUPS)[:, None], tl.arange(0, GROUP_BLOCK)[None, :]
    expert = group * group_size + member
    is_expert = (group < num_groups) & (member < group_size)
    logit = tl.load(logits + expert, mask=is_expert, other=float("-inf"))
    largest, total = tl.max(logit), tl.full([], 1.0, tl.float32)
    COMPARES_SCORES: tl.constexpr = bias is not None or GROUPS > 1
    if not HAS_SIGMOID and (COMPARES_SCORES or not NORMALIZES):
        total = tl.sum(tl.where(is_expert, _score(logit, largest, False), 0.0))
    compared = logit
    if COMPARES_SCORES:
        compared = _score(logit, largest, HAS_SIGMOID) / total
    if bias is not None:
        compared += tl.load(bias + expert, mask=is_expert, other=0.0)
    image = tl.where(is_expert, _image_of(compared), _LOWEST)
    if GROUPS > 1:
        image = _of_chosen_groups(image, is_expert, num_chosen_groups, GROUPS, GROUP_BLOCK)
    slot = tl.arange(0, SLOTS)
    own, chosen = tl.zeros([SLOTS], tl.float32), tl.full([SLOTS], _NONE, tl.int32)
    own_total = tl.full([], 0.0, tl.float32)
    for index in range(num_chosen):
        best = _first_of_largest(image, expert)
        image = tl.where(expert == best, _LOWEST, image)
        # Reading the logit again is cheaper than to find the score on another lane.
        score = _score(tl.load(logits + best), largest, HAS_SIGMOID) / total
        own_total += score
        own, chosen = tl.where(slot == index, score, own), tl.where(slot == index, best, chosen)
    is_slot = slot < num_chosen
    if NORMALIZES:
        own = own / (own_total + added)
    own *= factor
    if scales is not None:
        own *= tl.load(scales + chosen, mask=is_slot, other=0.0)
    tl.store(weights + row * num_chosen + slot, own, mask=is_slot)
    tl.store(experts + row * SLOTS + slot, chosen.to(tl.int16))


@triton.jit(do_not_specialize=["num_rows", "num_chosen"])
def _sort(
    experts, places, rows, offsets, loads, num_rows, num_chosen,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the places of one expert's pairs, their rows, and the expert's offset. A row has an expert at most once."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    expert, slot = tl.program_id(0), tl.arange(0, SLOTS)[None, :]
    lower, own = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.int32)
    for start in range(0, num_rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        found = tl.load(experts + row * SLOTS + slot, mask=row < num_rows, other=_NONE).to(tl.int32)
        lower += tl.sum((found < expert).to(tl.int32), 1)
        own += tl.sum((found == expert).to(tl.int32), 1)
    first, count = tl.sum(lower, 0), tl.sum(own, 0)
    tl.store(offsets + expert + 1, first + count)
    if expert == 0:
        tl.store(offsets, 0)
    tl.store(loads + expert, tl.load(loads + expert) + count)
    if count > 0:
        for start in range(0, num_rows, ROWS):
            row = start + tl.arange(0, ROWS)
            found = tl.load(experts + row[:, None] * SLOTS + slot, mask=row[:, None] < num_rows, other=_NONE)
            is_pair = found.to(tl.int32) == expert
            has_pair = tl.sum(is_pair.to(tl.int32), 1)
            place = first + tl.cumsum(has_pair, 0) - 1
            tl.store(rows + place, row, mask=has_pair > 0)
            places_of_row = places + row[:, None] * num_chosen + slot
            tl.store(places_of_row, tl.broadcast_to(place[:, None], [ROWS, SLOTS]), mask=is_pair)
            first += tl.sum(has_pair, 0)


@triton.jit
def _add(
    parts, weights, places, out, size,
    NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < size
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(NUM_CHOSEN):
        place = tl.load(places + row * NUM_CHOSEN + index).to(tl.int64)
        part = tl.load(parts + place * size + column, mask=is_inside, other=0.0).to(tl.float32)
        total += tl.load(weights + row * NUM_CHOSEN + index) * part
    tl.store(out + row * size + column, total.to(out.dtype.element_ty), mask=is_inside)


def route(logits: Tensor, router: Router, bias: Tensor | None, loads: Tensor, scales: Tensor | None) -> Routing:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (num_rows, num_experts), num_chosen, device = logits.shape, router.num_chosen, logits.device
    group_size, slots = num_experts // router.num_groups, max(_LEAST_SLOTS, triton.next_power_of_2(num_chosen))
    routing = Routing(
        torch.empty((num_rows, num_chosen), dtype=torch.float32, device=device),
        torch.empty((num_rows, num_chosen), dtype=torch.int32, device=device),
        torch.empty(num_rows * num_chosen, dtype=torch.int32, device=device),
        torch.empty(num_experts + 1, dtype=torch.int32, device=device),
    )
    experts = torch.empty((num_rows, slots), dtype=torch.int16, device=device)
    groups, group_block, num_warps = _lanes(router.num_groups, group_size)
    _choose[(num_rows,)](
        logits,
        bias,
        scales,
        routing.weights,
        experts,
        logits.stride(0),
        router.num_groups,
        group_size,
        num_chosen,
        router.num_chosen_groups,
        float(router.factor),
        float(router.added),
        HAS_SIGMOID=router.has_sigmoid,
        NORMALIZES=router.normalizes,
        GROUPS=groups,
        GROUP_BLOCK=group_block,
        SLOTS=slots,
        num_warps=num_warps,
        **dependent_options(),
        **_UNFUSED,
    )
    rows, num_warps = _tile(num_rows, slots)
    _sort[(num_experts,)](
        experts, routing.places, routing.rows, routing.offsets, loads, num_rows, num_chosen,
        SLOTS=slots, ROWS=rows, num_warps=num_warps, **dependent_options(),
    )  # fmt: skip
    return routing


def add_up(parts: Tensor, routing: Routing) -> Tensor:
    parts = parts.contiguous()
    (num_rows, num_chosen), size = routing.places.shape, parts.shape[1]
    out = torch.empty((num_rows, size), dtype=parts.dtype, device=parts.device)
    _add[(num_rows, triton.cdiv(size, _ADD_BLOCK))](
        parts, routing.weights, routing.places, out, size,
        NUM_CHOSEN=num_chosen, BLOCK=_ADD_BLOCK, num_warps=_ADD_WARPS, **dependent_options(), **_UNFUSED,
    )  # fmt: skip
    return out


def _lanes(num_groups: int, group_size: int) -> tuple[int, int, int]:
    """(groups, members of a group, warps) of a program of `_choose`."""
    groups = triton.next_power_of_2(num_groups)
    members = max(triton.next_power_of_2(group_size), _LEAST_EXPERTS // groups)
    return groups, members, max(1, min(_MOST_WARPS, groups * members // _EXPERTS_A_WARP))


def _tile(num_rows: int, slots: int) -> tuple[int, int]:
    """(rows that a program of `_sort` looks at together, its warps)."""
    choices, num_warps = next((tile for tile in _TILES if num_rows * slots <= tile[0]), _TILES[-1])
    return max(1, choices // slots), num_warps


_FORMS: tuple[tuple[str, bool, bool, str, tuple[tuple[int, int, int], ...]], ...] = (
    ("softmax", False, False, "", ((1, 64, 8), (1, 128, 8))),
    ("softmax", False, True, "", ((1, 64, 8), (1, 128, 8), (1, 256, 8), (1, 512, 16))),
    ("softmax", False, True, "bias", ((1, 64, 8),)),
    ("softmax", False, True, "scales", ((1, 128, 8),)),
    ("sigmoid", True, True, "bias", ((1, 64, 8), (1, 128, 8), (1, 256, 8), (8, 32, 8))),
)
"""(score, whether it is a sigmoid, whether weights are normalized, vector of the experts, shapes of (groups, members,
slots)) of the families with experts."""
_MANY_CHOSEN = (2, 4, 6, 8, 10)
"""Numbers of a row's experts in these families."""


def shipped() -> Iterator[Shipped]:
    for one in itertools.chain(_forms_of_choose(), _forms_of_sort(), _forms_of_add()):
        yield from (one, one.early())


def _forms_of_choose() -> Iterator[Shipped]:
    for score, has_sigmoid, normalizes, vector, shapes in _FORMS:
        for groups, members, slots in shapes:
            words = (score, "normalized" * normalizes, vector, f"{groups}x{members} experts", f"{slots} slots")
            pointers = ("logits", "weights", *filter(None, [vector]))
            yield Shipped(
                op="experts_route",
                config=" ".join(filter(None, words)),
                kernel=_choose,
                signature={
                    **dict.fromkeys(pointers, "*fp32"),
                    "experts": "*i16",
                    **dict.fromkeys(("stride", "num_groups", "group_size", "num_chosen", "num_chosen_groups"), "i32"),
                    **dict.fromkeys(("factor", "added"), "fp32"),
                },
                constants={
                    **{absent: None for absent in ("bias", "scales") if absent != vector},
                    "HAS_SIGMOID": has_sigmoid,
                    "NORMALIZES": normalizes,
                    "GROUPS": groups,
                    "GROUP_BLOCK": members,
                    "SLOTS": slots,
                    "IS_DEPENDENT": False,
                },
                num_warps=max(1, groups * members // _EXPERTS_A_WARP),
                options=_UNFUSED,
            )


def _forms_of_sort() -> Iterator[Shipped]:
    for slots, (choices, num_warps) in itertools.product((_LEAST_SLOTS, 2 * _LEAST_SLOTS), _TILES):
        yield Shipped(
            op="experts_sort",
            config=f"{slots} slots, {choices} choices",
            kernel=_sort,
            signature={
                "experts": "*i16",
                **dict.fromkeys(("places", "rows", "offsets"), "*i32"),
                "loads": "*i64",
                **dict.fromkeys(("num_rows", "num_chosen"), "i32"),
            },
            constants={"SLOTS": slots, "ROWS": choices // slots, "IS_DEPENDENT": False},
            num_warps=num_warps,
        )


def _forms_of_add() -> Iterator[Shipped]:
    for (dtype, name), num_chosen in itertools.product(DTYPES.items(), _MANY_CHOSEN):
        if dtype.itemsize == 1:
            continue
        yield Shipped(
            op="experts_add",
            config=f"{name} {num_chosen} chosen",
            kernel=_add,
            signature={
                **dict.fromkeys(("parts", "out"), f"*{name}"),
                "weights": "*fp32",
                "places": "*i32",
                "size": "i32",
            },
            constants={"NUM_CHOSEN": num_chosen, "BLOCK": _ADD_BLOCK, "IS_DEPENDENT": False},
            num_warps=_ADD_WARPS,
            is_streaming=True,
            multiples=("size",),
            options=_UNFUSED,
        )
