"""The block pool against a model of plain sets and lists."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inferd.engine.cache.pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.refs: dict[int, int] = {}
        """Held block -> number of references."""
        self.with_content: set[int] = set()
        self.cached: list[int] = []
        """Free blocks, the oldest first."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)

    @rule(num_blocks=st.integers(0, 3))
    def take(self, num_blocks: int) -> None:
        if num_blocks <= self.pool.num_empty:
            taken = self.pool.take(num_blocks)
            assert len(set(taken)) == num_blocks
            assert not set(taken) & (self.refs.keys() | set(self.cached))
            self.refs |= dict.fromkeys(taken, 1)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.release(block_id)
        self.refs[block_id] -= 1
        if self.refs[block_id] == 0:
            del self.refs[block_id]
            if block_id in self.with_content:
                self.cached.append(block_id)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.mark_content(block_id)
        self.with_content.add(block_id)

    @precondition(lambda self: self.with_content)
    @rule(data=st.data(), clears=st.booleans())
    def hold_or_clear(self, data: st.DataObject, clears: bool) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.with_content)))
        if block_id in self.cached:
            self.cached.remove(block_id)
            self.refs |= {} if clears else {block_id: 1}
        elif not clears:
            self.refs[block_id] += 1
        if clears:
            self.pool.clear_content(block_id)
            self.with_content.remove(block_id)
        else:
            self.pool.hold(block_id)

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        pool.check()
        assert pool.cached_blocks() == tuple(self.cached)
        assert {
            block_id: pool.num_refs(block_id) for block_id in range(pool.num_blocks) if pool.is_held(block_id)
        } == self.refs
        assert pool.num_empty == pool.num_blocks - len(self.refs) - len(self.cached)


PoolMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestPool = PoolMachine.TestCase
