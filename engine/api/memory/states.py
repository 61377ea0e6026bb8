"""Memory of recurrent states: bytes of one, how many checkpoints a KV pool gives room to, and how far apart they are.

Pure arithmetic, as in `planner`. A model without recurrent layers has no states.
"""

from __future__ import annotations

from math import prod

from inferd.engine.api.memory.formula import NOTHING, Formula, term
from inferd.engine.api.memory.precision import Precision
from inferd.engine.arch.description import Arch

_STATE_BYTES = 4
"""Bytes of a number in a state: fp32."""
_CHECKPOINT_SHARE = 0.5
"""Share of the memory for prefixes that checkpoints get. Then a checkpoint stands for as many tokens as have its bytes
of K and V."""
_SLOT_SHARE = 0.1
"""Share of the available memory that the working states of the default number of slots may take."""


def num_state_numbers(arch: Arch) -> int:
    """Numbers in the matrices of one state."""
    if arch.recurrent is None:
        return 0
    return len(arch.recurrent_layers) * prod(arch.recurrent.state_shape)


def state_bytes(arch: Arch, precision: Precision) -> Formula:
    """Bytes of one state: a matrix for each head, if there are any, and the last inputs of the convolution, in each
    layer."""
    if arch.recurrent is None:
        return NOTHING
    num_heads, rows, columns = arch.recurrent.state_shape
    matrices = term(num_heads, "heads") * term(rows) * term(columns) * term(_STATE_BYTES, "B")
    inputs = term(arch.recurrent.conv_width - 1, "inputs") * term(arch.recurrent.conv_size) * precision.dtype_bytes
    return term(len(arch.recurrent_layers), "layers") * (matrices + inputs if num_heads else inputs)


def most_slots(arch: Arch, precision: Precision, available_bytes: int) -> int | None:
    """Number of working states for which there is memory, at least 1; None if the model has no states."""
    size = state_bytes(arch, precision).value
    return max(1, int(available_bytes * _SLOT_SHARE) // size) if size else None


def num_checkpoints(arch: Arch, precision: Precision, num_blocks: int, num_needed: int, block_bytes: int) -> int:
    """Checkpoints that take the place of some of `num_blocks` KV blocks, of which one sequence needs `num_needed`. At
    most one for each block."""
    size = state_bytes(arch, precision).value
    if not size:
        return 0
    spare = min(int(num_blocks * _CHECKPOINT_SHARE), num_blocks - num_needed)
    return max(0, min(spare * block_bytes // size, num_blocks))


def checkpoint_interval(num_checkpoints: int, num_blocks: int, block_size: int, step_tokens: int) -> int:
    """Tokens from one checkpoint of a sequence to the next: as many as let checkpoints last as long as KV, and no fewer
    than a step has, because each ends a chunk. A multiple of the block size."""
    least = -(-step_tokens // block_size)
    return block_size * max(least, -(-num_blocks // max(num_checkpoints, 1)))
