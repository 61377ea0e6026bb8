"""Checkpoints of recurrent states: which are free, which the prefix index can reach, and at which positions a sequence
leaves some.

A checkpoint is a copy of the state behind a block. Knows no tensors, no slots and no block tables.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from inferd.engine.cache.ledger import Entry, Ledger, LeftContent
from inferd.engine.cache.pool import BlockPool
from inferd.engine.cache.prefix import GONE, ChainKeys, Node, PrefixIndex
from inferd.engine.request import Request

_ANSWER_BLOCKS = 2
"""Blocks of an answer from one checkpoint to the next. With blocks of 32 tokens copies take a hundredth of the time of
decodes: a state of 18.6 MiB 1.5 ms, a step of 32 requests 80 (2 cores, Zen 4, 2026-11-26)."""


@dataclass(frozen=True, slots=True)
class StateCheckpointRules:
    """Bounds of the checkpoints of a cache."""

    num_checkpoints: int
    interval: int
    """Every sequence leaves a checkpoint at each multiple of so many tokens, which is a multiple of the block size."""


class StateCheckpoints:
    """The checkpoints of one cache. Its own references are to those that launched steps are about to write or read."""

    def __init__(self, rules: StateCheckpointRules, ledger: Ledger | None = None, first_place: int = 0) -> None:
        """`first_place`: the first checkpoint's place in the ledger."""
        self.interval = rules.interval
        self.ledger, self.first_place = ledger, first_place
        erase = None if ledger is None else lambda checkpoint_id: ledger.erase(first_place + checkpoint_id)
        self.pool = BlockPool(rules.num_checkpoints, erase)
        self.left: LeftContent | None = None
        """Content of an earlier engine, which has some of these checkpoints; None without a ledger."""
        self._kept: set[int] = set()
        """Checkpoints that `supersede` leaves in their place."""

    def take(self, index: PrefixIndex, drop_blocks: Callable[[list[int]], None]) -> int | None:
        """A checkpoint to write, for which the one that was used least recently may be evicted. None if all are about
        to be written or read."""
        if not self.pool.num_empty:
            if not self.pool.num_cached:
                return None
            self._evict_oldest(index, drop_blocks)
        (checkpoint_id,) = self.pool.take(1)
        self._kept.discard(checkpoint_id)
        return checkpoint_id

    def evict_all(self, index: PrefixIndex, drop_blocks: Callable[[list[int]], None]) -> None:
        """Drop every checkpoint that no launched step writes."""
        while self.pool.num_cached:
            self._evict_oldest(index, drop_blocks)

    def _evict_oldest(self, index: PrefixIndex, drop_blocks: Callable[[list[int]], None]) -> None:
        evicted = self.pool.oldest_cached()
        if self.left is not None and self.first_place + evicted in self.left:
            self.left.drop(self.first_place + evicted)
            return
        drop_blocks(index.evict_checkpoint(evicted))
        self.pool.clear_content(evicted)

    def keep(self, checkpoint_id: int) -> None:
        """Count a checkpoint as used now, or if it is about to be written, as one that will be."""
        self._kept.add(checkpoint_id)
        if self.pool.has_content(checkpoint_id):
            self.pool.hold(checkpoint_id)
            self.pool.release(checkpoint_id)

    def let_find(self, index: PrefixIndex, node: Node, checkpoint_id: int, depth: int, use: int) -> bool:
        """Let the index find a held checkpoint at its node, `depth` blocks deep. False if the node takes none."""
        if not index.add_checkpoint(node, checkpoint_id):
            return False
        self.pool.mark_content(checkpoint_id)
        if self.ledger is not None:
            self.ledger.write(Entry(self.first_place + checkpoint_id, len(node.block_ids), node.key, depth, use))
        return True

    def supersede(self, checkpoint_id: int) -> None:
        """Evict this checkpoint next, because the same sequence has a later one. One that is kept stays."""
        if checkpoint_id not in self._kept:
            self.pool.make_oldest(checkpoint_id)

    def check(self, indexed: frozenset[int], launched: Counter[int]) -> None:
        """Assert that every reference is a launched step's, and that exactly checkpoints with content are indexed."""
        self.pool.check()
        for checkpoint_id in range(self.pool.num_blocks):
            assert self.pool.num_refs(checkpoint_id) == launched[checkpoint_id], f"checkpoint {checkpoint_id} is lost"
        content = frozenset(filter(self.pool.has_content, range(self.pool.num_blocks)))
        assert content == indexed, "checkpoints of pool and index differ"


class SequenceCheckpoints:
    """The checkpoints that one sequence leaves: at which positions, those that launched steps write, and the newest."""

    __slots__ = ("_block_size", "_index", "_launched", "_newest", "_read_id", "_request", "_states", "_wanted")

    def __init__(self, states: StateCheckpoints, index: PrefixIndex, request: Request, block_size: int) -> None:
        self._states, self._index, self._request, self._block_size = states, index, request, block_size
        self._wanted: list[int] = []
        """Positions at which it leaves one beside the regular ones, ascending."""
        self._launched: deque[tuple[int, int]] = deque()
        """(position, checkpoint) of steps that were not applied, ascending."""
        self._newest: tuple[int, Node] | None = None
        """(position, node) of the last checkpoint that it let the index find."""
        self._read_id = GONE
        """The checkpoint behind its hit until its first step was applied, which reads it. A load from below could write
        to it meanwhile, if it were free."""

    @property
    def launched(self) -> tuple[int, ...]:
        """Checkpoints that launched steps write or read."""
        read = () if self._read_id == GONE else (self._read_id,)
        return (*read, *(checkpoint_id for _, checkpoint_id in self._launched))

    def begin(self, checkpoint_id: int, num_cached: int, num_known: int) -> None:
        """Start behind a hit of `num_cached` tokens and its checkpoint, if it has one. Leaves checkpoints at the end of
        the prompt, and at the end of what others have computed of it."""
        if checkpoint_id != GONE:
            self._states.keep(checkpoint_id)
            self._states.pool.hold(checkpoint_id)
            self._read_id = checkpoint_id
        size = self._block_size
        prompt_end = (self._request.num_prompt - 1) // size * size
        if prompt_end > num_cached:
            self.want(prompt_end)
        if num_known >= num_cached + _ANSWER_BLOCKS * size:
            self.want(num_known)

    def want(self, position: int) -> bool:
        """Leave a checkpoint at a multiple of the block size. If a row was launched that far, keep the last checkpoint
        before it instead. Returns whether there will be one at `position`."""
        if position > self._request.scheduled:
            if position not in self._wanted:
                self._wanted = sorted([*self._wanted, position])
            return True
        found = next((found for found in reversed(self._launched) if found[0] <= position), None)
        if found is None and self._newest is not None and self._newest[0] <= position:
            newest_id = self._newest_id()
            found = None if newest_id is None else (self._newest[0], newest_id)
        if found is None:
            return False
        self._states.keep(found[1])
        return found[0] == position

    def chunk(self, start: int, num_tokens: int) -> int:
        """Tokens of a row from `start` on that goes no further than the next checkpoint; at most `num_tokens`. If more
        are pending, it ends at a block's end, so that it can leave a checkpoint."""
        end = min(start + num_tokens, self._after(start))
        if end < start + self._request.num_pending:
            whole = end - end % self._block_size
            end = whole if whole > start else end
        return end - start

    def most_drafts(self, num_before: int) -> int:
        """Most drafts behind `num_before` tokens with which a row ends before the next checkpoint, so that the first
        token of a later row reaches it. Drafts may be rejected, and then no state stands at the row's end."""
        every = _ANSWER_BLOCKS * self._block_size
        return min(self._after(num_before), (num_before // every + 1) * every) - num_before - 1

    def _after(self, position: int) -> int:
        """The next position behind `position` at which it leaves a checkpoint."""
        interval = self._states.interval
        regular = (position // interval + 1) * interval
        return next((wanted for wanted in self._wanted if position < wanted < regular), regular)

    def leave(self, position: int, num_tokens: int, keys: ChainKeys, take: Callable[[], int | None]) -> int | None:
        """The checkpoint that a row of `num_tokens` up to `position` has to write; None if it writes none.

        Chunks of a prompt leave one, because a later request may turn out to share the prompt so far. Rows of one token
        of an answer leave one every few blocks, so that the next prompt of a chat begins near the end of the answer.
        Each supersedes the one before it, unless that was wanted or used.

        `take` gives a checkpoint to write, or None if there is none.
        """
        size = self._block_size
        is_wanted = position % self._states.interval == 0 or position in self._wanted
        is_answer = num_tokens == 1 and position > self._request.num_prompt
        if not is_wanted and position % (_ANSWER_BLOCKS * size if is_answer else size):
            return None
        if position <= len(self._request.ids) and self._index.has_checkpoint(keys.key(position // size - 1)):
            return None
        self._supersede_newest()
        checkpoint_id = take()
        if checkpoint_id is not None:
            self._launched.append((position, checkpoint_id))
            if is_wanted:
                self._states.keep(checkpoint_id)
        return checkpoint_id

    def is_due(self, num_computed: int) -> bool:
        """Called when a step was applied: whether it has written checkpoints."""
        if self._read_id != GONE:
            self._states.pool.release(self._read_id)
            self._read_id = GONE
        return bool(self._launched) and self._launched[0][0] <= num_computed

    def take_due(self) -> tuple[int, int]:
        """The first (position, checkpoint) that was launched."""
        return self._launched.popleft()

    def written(self, position: int, checkpoint_id: int, node: Node | None, use: int = 0) -> None:
        """Let the index find a checkpoint that an applied step has written. `node`: the one behind whose ids it
        stands; None if the index has none. `use`: number of the sequence's admission."""
        depth = position // self._block_size - 1
        if node is not None and self._states.let_find(self._index, node, checkpoint_id, depth, use):
            self._newest = position, node
        self._states.pool.release(checkpoint_id)
        if self._launched:
            self._supersede_newest()

    def _newest_id(self) -> int | None:
        """The newest checkpoint, if the index still finds it."""
        node = None if self._newest is None else self._newest[1]
        return node.checkpoint_id if node is not None and node.is_live and node.checkpoint_id != GONE else None

    def _supersede_newest(self) -> None:
        newest_id = self._newest_id()
        if newest_id is not None:
            self._states.supersede(newest_id)

    def release(self) -> None:
        """Give back those that launched steps would have written or read."""
        for checkpoint_id in self.launched:
            self._states.pool.release(checkpoint_id)
