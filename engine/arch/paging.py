"""How many KV blocks a sequence holds in each cache group. The cache and the memory planner both use these numbers.

A group's window is the number of last positions that its layers see, the query's own included; None for all. A block is
dead when the next query's window has moved past all its positions: it goes back to the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

UNBOUNDED = 1 << 60
"""A length above that of any sequence."""


def num_dead_blocks(window: int | None, position: int, block_size: int) -> int:
    """Number of leading blocks that a query at `position` or later cannot see."""
    return 0 if window is None or position < window else (position - window + 1) // block_size


def max_blocks(window: int | None, num_tokens: int, step_tokens: int, block_size: int) -> int:
    """Most blocks of one group that a sequence of `num_tokens` needs at once, at up to `step_tokens` a step.

    A step's first query sees `window - 1` positions before it, so window - 1 + step_tokens positions are held. A run of
    n positions touches at most ceil((n - 1) / block_size) + 1 blocks.
    """
    whole = -(-num_tokens // block_size)
    if window is None:
        return whole
    return min(whole, -(-(window + step_tokens - 2) // block_size) + 1)


def max_tokens(windows: Sequence[int | None], num_blocks: int, step_tokens: int, block_size: int) -> int:
    """Length of the longest sequence that alone needs at most `num_blocks` in all its groups.

    `UNBOUNDED` if every group has a window and all of them fit, because then a sequence of any length fits.
    """

    def needed(num_tokens: int) -> int:
        return sum(max_blocks(window, num_tokens, step_tokens, block_size) for window in windows)

    if needed(UNBOUNDED) <= num_blocks:
        return UNBOUNDED
    fits, too_long = 0, num_blocks + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if needed(middle * block_size) <= num_blocks else (fits, middle)
    return fits * block_size
