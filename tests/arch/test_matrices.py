"""Facts of matrices: ranks share every row and every input, and which parts of a model each step reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from inferd.engine.arch.description import Arch
from inferd.engine.arch.matrices import attention, expert, head, mlp, router, shared_expert
from inferd.engine.arch.matrix import Component, LinearWeight
from inferd.engine.arch.registry import weights
from inferd.engine.arch.sharding import Rank, counts_of, num_rows
from tests.arch.test_families import PUBLISHED, arch_of


def kinds(arch: Arch) -> Iterator[LinearWeight]:
    """One matrix of each kind, or one of each layer if layers differ."""
    for layer in arch.attention_layers if arch.layer_heads else arch.attention_layers[:1]:
        yield from (*attention(arch, layer), *mlp(arch, layer))
    if arch.experts is not None:
        yield from (router(arch, 0), *expert(arch, 0, 0))
        if arch.experts.shared_size:
            yield from shared_expert(arch, 0)
    yield head(arch)


@pytest.mark.parametrize("name", PUBLISHED)
def test_ranks_have_all_rows_and_all_inputs(name: str) -> None:
    arch = arch_of(name)
    for count in counts_of(arch)[:4]:
        ranks = [Rank(index, count, splits_inputs=True) for index in range(count)]
        for matrix in kinds(arch):
            split = () if matrix.split_inputs is None else (matrix.split_inputs,)
            for axis in (*matrix.rows, *split):
                shares = sorted({rank.share(axis) for rank in ranks})
                assert shares[0][0] == 0 and shares[-1][1] == axis.size
                assert all(end == start for (_, end), (start, _) in pairwise(shares)), "parts overlap, or leave a gap"
            rows = [num_rows(rank.rows(matrix)) for rank in ranks]
            is_whole = matrix.split_inputs is not None or matrix.component is Component.ROUTERS
            assert rows == [matrix.num_rows] * count if is_whole else sum(rows) >= matrix.num_rows
            columns = [rank.columns(matrix) for rank in ranks]
            assert columns == ([rank.share(split[0]) for rank in ranks] if split else [None] * count)


def test_what_a_token_reads() -> None:
    arch = arch_of("GLM-4.5-Air")
    whole = {source.of.component for source in weights(arch).sources if source.of.component.is_read_by_all}
    assert whole == {Component.ATTENTION, Component.MLP, Component.ROUTERS, Component.NORMS}
