"""The KV cache under any sequence of operations: a hit gives the content that the request's own ids would have written.

The model keeps, for every block, the salted prefix that its content was computed from. It learns content only when a
table computes it, like a device. So a stale table, a false hit or a block with two owners shows as other content.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.cache.prefix import blake2b_block
from inferd.engine.cache.table import BlockTable, KVCache
from inferd.engine.core.kv_events import KVEventLog, hash_of
from inferd.engine.request import Request
from tests.kv_subscriber import Mirror

Content = tuple[int, str, tuple[int, ...]]
"""Cache group, salt and ids, from the first position to the block's last."""

_WINDOWS = ((None,), (3,), (1, 6), (None, 4), (None, 2, 2), (None, None, 5))
_MAX_STEP = 12

_STEMS = ((0,) * 12, (0, 1) * 6, (1, 0, 0, 0) * 3, (0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0))
_IDS = st.builds(lambda stem, length: stem[:length], st.sampled_from(_STEMS), st.integers(1, 12))


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.content: dict[int, Content] = {}
        self.admitted: list[tuple[Request, BlockTable]] = []
        self.waiting: list[tuple[Request, BlockTable]] = []

    @initialize(
        num_blocks=st.integers(1, 16),
        block_size=st.integers(1, 4),
        windows=st.sampled_from(_WINDOWS),
        hash_bits=st.sampled_from([0, 1, 3, None]),
    )
    def start(self, num_blocks: int, block_size: int, windows: tuple[int | None, ...], hash_bits: int | None) -> None:
        def weak(parent_key: bytes, payload: bytes) -> bytes:
            digest = blake2b_block(parent_key, payload)
            return digest if hash_bits is None else bytes([digest[0] & ((1 << hash_bits) - 1)])

        num_blocks *= len(windows)
        self.cache = KVCache(num_blocks, block_size, windows, step_tokens=_MAX_STEP, hash_block=weak)
        self.log, self.mirror = KVEventLog(self.cache, has_private=True), Mirror()

    def visible(self, request: Request, table: BlockTable, end: int) -> Iterator[tuple[int, Content]]:
        """The full blocks that the query at `end` sees, each with its expected content."""
        size = self.cache.block_size
        for group, (window, blocks) in enumerate(zip(self.cache.windows, table.block_ids, strict=True)):
            for i in range(end // size):
                if window is None or (i + 1) * size > end - window + 1:
                    yield blocks[i], (group, request.scheduling.cache_salt, tuple(request.ids[: (i + 1) * size]))

    @rule(ids=_IDS, salt=st.sampled_from(["", "", "a"]), num_tokens=st.integers(0, _MAX_STEP))
    def begin(self, ids: tuple[int, ...], salt: str, num_tokens: int) -> None:
        params = SamplingParams(max_tokens=50, seed=0)
        request = Request.create("r", ids, params, SchedulingParams(cache_salt=salt), max_model_len=999)
        table = self.cache.open(request)
        self.waiting.append((request, table))
        self.admit(request, table)
        if table.capacity:
            self.compute(request, table, num_tokens, 0)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.admit(*data.draw(st.sampled_from(self.waiting)))

    def admit(self, request: Request, table: BlockTable) -> None:
        match = table.match()
        size = self.cache.block_size
        assert match.num_tokens == len(match.nodes) * size < len(request.ids)
        needed = table.num_free_needed(match, request.total)
        num_free = self.cache.pool.num_free
        if not table.admit(match, request.total):
            assert needed > num_free
            return
        assert self.cache.pool.num_free == num_free - needed
        for block_id, expected in self.visible(request, table, match.num_tokens):
            assert self.content[block_id] == expected
        for blocks in table.block_ids:
            for block_id in blocks[len(match.nodes) :]:
                self.content.pop(block_id, None)
        request.admit(match.num_tokens, 0.0)
        self.waiting.remove((request, table))
        self.admitted.append((request, table))

    @precondition(lambda self: self.admitted)
    @rule(data=st.data(), num_tokens=st.integers(1, _MAX_STEP), token_id=st.integers(0, 1))
    def go_on(self, data: st.DataObject, num_tokens: int, token_id: int) -> None:
        self.compute(*data.draw(st.sampled_from(self.admitted)), num_tokens, token_id)

    def compute(self, request: Request, table: BlockTable, num_tokens: int, token_id: int) -> None:
        """Compute some of the known tokens, and sample at their end. A block that is filled has the content of its
        ids."""
        num_tokens = min(num_tokens, request.num_pending)
        if num_tokens == 0 or not table.extend(request.scheduled + num_tokens):
            return
        start = request.scheduled
        samples = request.launch(num_tokens)
        request.in_flight -= 1
        request.apply(start, num_tokens, (token_id,) * samples)
        size = self.cache.block_size
        for group, blocks in enumerate(table.block_ids):
            for i in range(start // size, request.computed // size):
                assert self.cache.pool.num_refs(blocks[i]) == 1, "a block is written that others read"
                self.content[blocks[i]] = (group, request.scheduling.cache_salt, tuple(request.ids[: (i + 1) * size]))
        table.commit(request.computed)

    @precondition(lambda self: self.admitted)
    @rule(data=st.data(), ends=st.booleans(), forgets=st.sampled_from([False, False, False, True]))
    def release(self, data: st.DataObject, ends: bool, forgets: bool) -> None:
        request, table = data.draw(st.sampled_from(self.admitted))
        if forgets:
            table.forget()
        table.release()
        self.admitted.remove((request, table))
        if ends:
            self.cache.close(table)
        else:
            request.rewind()
            self.waiting.append((request, table))

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        assert self.cache.pool.num_cached == 0

    @invariant()
    def subscribers_know_the_index(self) -> None:
        for events in self.log.take():
            self.mirror.read_events(events)
        indexed = {(change.group, hash_of(change.node.key)): change.node.ids for change in self.cache.index.contents()}
        assert self.mirror.held == indexed

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        assert len(self.cache.index) <= 2 * self.cache.pool.num_blocks
        for request, table in self.admitted:
            for block_id, expected in self.visible(request, table, request.computed):
                assert self.content[block_id] == expected, "somebody else wrote into a held block"


CacheMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
TestCache = CacheMachine.TestCase
