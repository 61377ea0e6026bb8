"""The number of blocks of a sequence, compared with counting position by position."""

from __future__ import annotations

import pytest

from inferd.engine.arch.paging import UNBOUNDED, max_blocks, max_tokens, num_dead_blocks

WINDOWS = (None, 1, 2, 3, 5, 8, 17)


def seen_blocks(window: int | None, position: int, end: int, block_size: int) -> set[int]:
    """Blocks that the queries `position` to `end - 1` see, counted one by one."""
    first = 0 if window is None else max(0, position - window + 1)
    return {seen // block_size for seen in range(first, end)}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8])
def test_dead_blocks_are_those_that_no_later_query_sees(window: int | None, block_size: int) -> None:
    for position in range(60):
        alive = seen_blocks(window, position, position + 30, block_size)
        assert num_dead_blocks(window, position, block_size) == min(alive)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("step_tokens", [1, 2, 3, 7, 16])
def test_no_step_needs_more_blocks_and_some_step_needs_as_many(
    window: int | None, block_size: int, step_tokens: int
) -> None:
    for num_tokens in (*range(1, 20), 200):
        needed = [
            len(seen_blocks(window, position, min(position + step_tokens, num_tokens), block_size))
            for position in range(num_tokens)
        ]
        most = max_blocks(window, num_tokens, step_tokens, block_size)
        assert max(needed) <= most
        if num_tokens == 200:
            assert max(needed) == most


@pytest.mark.parametrize("windows", [(None,), (3,), (None, 3), (None, None, 9), (5, 2), (None, 4, 17)])
@pytest.mark.parametrize("step_tokens", [1, 4])
def test_the_longest_sequence_fits_and_one_more_token_does_not(
    windows: tuple[int | None, ...], step_tokens: int
) -> None:
    for num_blocks in range(1, 40):
        longest = max_tokens(windows, num_blocks, step_tokens, 2)

        def needed(num_tokens: int) -> int:
            return sum(max_blocks(window, num_tokens, step_tokens, 2) for window in windows)

        assert needed(longest) <= num_blocks
        assert longest == UNBOUNDED or needed(longest + 1) > num_blocks
        assert None not in windows or longest < UNBOUNDED


def test_a_window_as_long_as_the_sequence_counts_as_none() -> None:
    for num_tokens in range(1, 50):
        assert max_blocks(50, num_tokens, 4, 8) == max_blocks(None, num_tokens, 4, 8)
