"""The exchange of ranks through a process group of torch: NCCL between GPUs, gloo between CPUs.

Every call is queued on the current stream, and a CUDA graph can hold it: all ranks capture the same calls in the same
order. NCCL adds up large sums. Small sums are added up in one shot: each GPU reads the others' parts from memory that
is mapped into all. NCCL would take longer to begin. If torch cannot map the memory, NCCL does all sums.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._symmetric_memory import empty as empty_symmetric
from torch.distributed._symmetric_memory import rendezvous

from inferd.kernels.ops.gather import Exchange

logger = logging.getLogger(__name__)

ONE_SHOT_BYTES = {2: 2**20, 4: 2**19, 8: 2**18}
"""Number of ranks, at most -> most bytes of a sum in one shot. With more bytes each GPU would read too much. For 4 and
8 ranks these are the bounds of vLLM's all-reduce. No GPU has measured them here. More ranks leave all sums to NCCL."""

_ONE_SHOT_DTYPES = torch.float32, torch.bfloat16

Add = Callable[[Tensor], Tensor]


class GroupExchange:
    """One rank's end of a process group."""

    def __init__(self, group: ProcessGroup, add_few: Add | None = None, max_few_bytes: int = 0) -> None:
        """`add_few` adds up at most `max_few_bytes` in place of the group's own all-reduce."""
        self._group, self._add_few, self._max_few_bytes = group, add_few, max_few_bytes
        self._gather_parts = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def gather(self, part: Tensor, size: int, *, wants: bool = True) -> Tensor:
        """All ranks get the result."""
        num_rows, num_ranks = part.shape[0], self._group.size()
        width = -(-size // num_ranks)
        if part.shape[1] < width:
            part = torch.nn.functional.pad(part, (0, width - part.shape[1]))
        parts = part.new_empty((num_ranks * num_rows, width))
        self._gather_parts(parts, part.contiguous(), group=self._group)
        whole = parts.view(num_ranks, num_rows, width).transpose(0, 1).reshape(num_rows, num_ranks * width)
        return whole if whole.shape[1] == size else whole[:, :size].contiguous()

    def add(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        if self._add_few is not None and part.nbytes <= self._max_few_bytes:
            return self._add_few(part)
        dist.all_reduce(part, group=self._group)
        return part

    def broadcast(self, values: Tensor) -> Tensor:
        values = values.contiguous()
        dist.broadcast(values, group=self._group, group_src=0)
        return values


def open_exchange(descriptor: int, rank: int, num_ranks: int, dtype: torch.dtype, device: torch.device) -> Exchange:
    """The exchange of tensors on `device`, of which sums have `dtype`. The ranks find each other through a file that
    was empty at first, on which `descriptor` is open. Raises `RuntimeError` if they cannot exchange."""
    is_gpu = device.type == "cuda"
    # The store opens the file by this name again, for the last time when it is destroyed. It would then read for ever
    # if another file had the number. So the copy stays open as long as the process.
    own = os.dup(descriptor)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        store=dist.FileStore(f"/proc/self/fd/{own}", num_ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=num_ranks,
        device_id=device if is_gpu else None,
    )
    group = dist.group.WORLD
    assert group is not None
    return _gpu_exchange(group, dtype, device) if is_gpu else GroupExchange(group)


def _gpu_exchange(group: ProcessGroup, dtype: torch.dtype, device: torch.device) -> GroupExchange:
    """With sums in one shot if torch can do them between these GPUs."""
    max_bytes = next((size for count, size in ONE_SHOT_BYTES.items() if group.size() <= count), 0)
    is_known = max_bytes > 0 and dtype in _ONE_SHOT_DTYPES
    add_few = _one_shot(group, max_bytes // dtype.itemsize, dtype, device) if is_known else None
    # All ranks must add up in the same way.
    can_all = torch.tensor([int(add_few is not None)], device=device)
    dist.all_reduce(can_all, op=dist.ReduceOp.MIN, group=group)
    if not can_all.item():
        logger.info("NCCL adds up small sums too: these GPUs cannot add them up in one shot")
        return GroupExchange(group)
    return GroupExchange(group, add_few, max_bytes)


def _one_shot(group: ProcessGroup, size: int, dtype: torch.dtype, device: torch.device) -> Add | None:
    """The sum of at most `size` numbers, through a buffer that keeps its address; None if torch cannot do it."""
    try:
        buffer = empty_symmetric(size, dtype=dtype, device=device)
        rendezvous(buffer, group)
    except RuntimeError as error:
        logger.info("sums in one shot are not used: %s", error)
        return None
    name, reduce = group.group_name, torch.ops.symm_mem.one_shot_all_reduce_copy

    def add(part: Tensor) -> Tensor:
        total: Tensor = reduce(buffer, part, "sum", name)
        return total

    return add
