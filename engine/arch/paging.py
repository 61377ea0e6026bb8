"""How many KV blocks a sequence holds in each cache group: what the cache keeps to, and the planner counts by.

A group's window w is how many last positions its layers see, the query's own included; None for all. A block is dead
once every position in it lies behind the window of the next query: it goes back to the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

UNBOUNDED = 1 << 60
"""A length that no sequence has."""


def num_dead_blocks(window: int | None, position: int, block_size: int) -> int:
    """Leading blocks that no query at `position` or behind it sees."""
    return 0 if window is None or position < window else (position - window + 1) // block_size


def max_blocks(window: int | None, num_tokens: int, step_tokens: int, block_size: int) -> int:
    """Most blocks of one group that a sequence of `num_tokens` needs at once, `step_tokens` of them a step at most.

    A step's first query sees `window - 1` positions before it, so window - 1 + step_tokens positions are held; a run of
    n positions touches at most ceil((n - 1) / block_size) + 1 blocks.
    """
    whole = -(-num_tokens // block_size)
    if window is None:
        return whole
    return min(whole, -(-(window + step_tokens - 2) // block_size) + 1)


def max_tokens(windows: Sequence[int | None], num_blocks: int, step_tokens: int, block_size: int) -> int:
    """Positions of the longest sequence that alone needs no more than `num_blocks` in all its groups.

    `UNBOUNDED` where every group has a window and all of them fit: then a sequence of any length does.
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
