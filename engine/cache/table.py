"""The KV cache for its users: a `BlockTable` per request, which they extend, commit and release without seeing block
lists.

Keeps pool and index in agreement: evicts blocks, and makes a block findable only after its ids were applied. Layers
form cache groups by the positions that they see, all or a window. A table has blocks for each group, all from one pool;
its users see no groups. Of a model with recurrent state it also keeps checkpoints (`engine/cache/state_checkpoints`).
Knows no steps, no queue and no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from inferd.engine.arch.paging import max_blocks, max_tokens, num_dead_blocks
from inferd.engine.cache.group import Appended, Groups, PrefixMatch, num_usable, num_usable_states
from inferd.engine.cache.ledger import Entry, Ledger, LeftContent
from inferd.engine.cache.pool import BlockPool
from inferd.engine.cache.prefix import GONE, ChainKeys, HashBlock, Node, PrefixIndex, blake2b_block
from inferd.engine.cache.state_checkpoints import SequenceCheckpoints, StateCheckpointRules, StateCheckpoints
from inferd.engine.request import Request

_NEVER = 1 << 62


class KVCache:
    """The pool, the index, and the tables open on them."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        *,
        step_tokens: int = 1,
        shares_prefixes: bool = True,
        hash_block: HashBlock = blake2b_block,
        checkpoints: StateCheckpointRules | None = None,
        ledger: Ledger | None = None,
        has_memory: bool = True,
    ) -> None:
        """`windows`: number of last positions that the layers of each cache group see; None for all.

        `step_tokens`: most positions of one request that a step computes; needed only if a group has a window. Without
        `shares_prefixes` the index stays empty. `checkpoints`: bounds for a model with recurrent state.
        `ledger`: read for what an earlier engine left, and written for the next one; not without `shares_prefixes`.
        `has_memory`: whether K and V lie in the blocks. Those of an encoder only count the tokens of its requests.
        """
        if block_size < 1:
            raise ValueError(f"a block holds at least one token, not {block_size}")
        if not windows or any(window is not None and window < 1 for window in windows):
            raise ValueError(f"a cache has at least one group, and a window at least one position, not {windows}")
        self.block_size = block_size
        self.has_memory = has_memory
        self.windows = tuple(windows)
        self.step_tokens = step_tokens
        self.shares_prefixes = shares_prefixes
        self.ledger = ledger if shares_prefixes else None
        self.pool = BlockPool(num_blocks, None if self.ledger is None else self.ledger.erase)
        self.states = None
        if checkpoints is not None and shares_prefixes:
            self.states = StateCheckpoints(checkpoints, self.ledger, num_blocks)
        drop_checkpoint = None if self.states is None else self.states.pool.clear_content
        self.index = PrefixIndex(block_size, self.windows, num_blocks, hash_block, drop_checkpoint)
        self.left: LeftContent | None = None
        """Content of an earlier engine that no request has asked for; None without a ledger."""
        if self.ledger is not None:
            pools = [self.pool] if self.states is None else [self.pool, self.states.pool]
            is_full = [window is None for window in self.windows]
            self.left = LeftContent(self.ledger, self.index, is_full, pools)
            if self.states is not None:
                self.states.left = self.left
        self.num_uses = 0 if self.left is None else self.left.last_use
        """Admissions so far, also those of earlier engines that left something."""
        self._open: set[BlockTable] = set()
        self.offer: Callable[[Node, int], None] | None = None
        """Called with (node, blocks before it) at every `offer_every` blocks of a chain, computed or hit, at the end of
        its prompt and at its own: a tier below may keep what is there. None without one."""
        self.offer_every = 1
        self.forgotten: Callable[[str, Sequence[bytes]], None] | None = None
        """Called with the salt and the keys of a chain that cannot be trusted. None without a tier below."""
        self.found_below: Callable[[Sequence[Node], bool, Sequence[int]], None] | None = None
        """Called with each piece that a request finds in the tier below: nodes of its content, which are made for this
        alone, whether a state is a part, and the sizes of its rows. None if nobody wants them."""
        self.lent: Counter[int] = Counter()
        """References to places by what is no table, such as loads (`engine/cache/below`)."""

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window in self.windows)

    @property
    def max_tokens(self) -> int:
        """Positions that one request alone can hold."""
        return max_tokens(self.windows, self.pool.num_blocks, self.step_tokens, self.block_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def open(self, request: Request) -> BlockTable:
        """A table without blocks. Call `close` when the request has ended."""
        table = BlockTable(self, request)
        self._open.add(table)
        return table

    def close(self, table: BlockTable) -> None:
        assert table.capacity == 0, "a table was closed with blocks"
        self._open.remove(table)

    def take(self, num_blocks: int) -> list[int] | None:
        """Blocks for a table, evicting cached ones if necessary; None if too few are free."""
        pool = self.pool
        if pool.num_empty < num_blocks:
            if pool.num_free < num_blocks:
                return None
            while pool.num_empty < num_blocks:
                self.forget(pool.oldest_cached())
        return pool.take(num_blocks)

    def forget(self, block_id: int) -> None:
        """Drop a block from the index, with all that cannot be hit without it, or from what an earlier engine left."""
        if self.left is not None and block_id in self.left:
            self.left.drop(block_id)
        else:
            self._clear(self.index.drop(block_id))

    def forget_chain(self, node: Node) -> None:
        """Drop a node from the index, with all behind it."""
        self._clear(self.index.drop_node(node))

    def _clear(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.pool.clear_content(block_id)

    def take_checkpoint(self) -> int | None:
        """A checkpoint for a step to write, evicting another one if necessary; None if there is none."""
        return None if self.states is None else self.states.take(self.index, self._clear)

    def lend(self, num_blocks: int) -> list[int] | None:
        """Blocks for content that no table computes, evicting cached ones if necessary; None if too few are free."""
        taken = self.take(num_blocks)
        self.lent.update(taken or ())
        return taken

    def lend_known(self, block_ids: Sequence[int]) -> None:
        """Keep blocks that the index finds, as if a request held them."""
        for block_id in block_ids:
            self.pool.hold(block_id)
        self.lent.update(block_ids)

    def lend_checkpoint(self) -> int | None:
        """The place of a checkpoint, evicting another one if necessary; None if there is none."""
        checkpoint_id = self.take_checkpoint()
        if checkpoint_id is None:
            return None
        self.lent[self.pool.num_blocks + checkpoint_id] += 1
        return self.pool.num_blocks + checkpoint_id

    def take_back(self, places: Sequence[int]) -> None:
        """These were lent. Those that the index finds by now stay cached, and the first of them is evicted last."""
        for place in reversed(places):
            self.lent[place] -= 1
            if not self.lent[place]:
                del self.lent[place]
            if place < self.pool.num_blocks:
                self.pool.release(place)
            else:
                assert self.states is not None
                self.states.pool.release(place - self.pool.num_blocks)

    def reset(self) -> None:
        """Drop every cached block that no request holds, and every checkpoint."""
        while self.pool.num_cached:
            self.forget(self.pool.oldest_cached())
        if self.states is not None:
            self.states.evict_all(self.index, self._clear)
        self.index.note_empty()

    def distrust(self) -> None:
        """Drop everything from the index, also what requests hold: they go on, and nobody finds their blocks."""
        self.reset()
        for node in self.index.chains():
            self.forget_chain(node)
        self.index.note_empty()

    def num_erased(self, places: Iterable[int]) -> int:
        """Times that any of these places got ready for other content; `GONE` is none. A thread beside the loop may ask.
        If it is the same later, they hold what they held, and no step was launched that writes there."""
        return sum(self._num_cleared(place) for place in places if place != GONE)

    def _num_cleared(self, place: int) -> int:
        if place < self.pool.num_blocks:
            return self.pool.num_cleared(place)
        assert self.states is not None
        return self.states.pool.num_cleared(place - self.pool.num_blocks)

    def check(self) -> None:
        """Assert that every reference is a table's and every block with content is indexed."""
        self.pool.check()
        self.index.check()
        refs: Counter[int] = Counter()
        for table in self._open:
            table.check()
            refs.update(block_id for blocks in table.block_ids for block_id in blocks)
        del refs[GONE]
        refs.update({place: count for place, count in self.lent.items() if place < self.pool.num_blocks})
        launched = Counter(checkpoint_id for table in self._open for checkpoint_id in table.launched_checkpoints)
        first = self.pool.num_blocks
        launched.update({place - first: count for place, count in self.lent.items() if place >= first})
        if self.states is None:
            assert not launched and not self.index.checkpoints()
        else:
            left = frozenset() if self.left is None else self.left.checkpoints()
            self.states.check(self.index.checkpoints() | left, launched)
        for block_id in range(self.pool.num_blocks):
            assert self.pool.num_refs(block_id) == refs[block_id], f"block {block_id}: a reference without an owner"
            is_left = self.left is not None and block_id in self.left
            assert not is_left or not self.index.holds(block_id), f"block {block_id} is left, and indexed"
            is_known = is_left or self.index.holds(block_id)
            assert self.pool.has_content(block_id) == is_known, f"block {block_id}: index and pool"


class BlockTable:
    """One request's blocks by cache group, in order of position. Empty until admitted and after `release`."""

    __slots__ = (
        "_cache", "_checkpoints", "_due", "_first_node", "_groups", "_is_sealed", "_keys", "_num_indexed", "_request",
        "_tail", "_use", "capacity", "has_unsent",
    )  # fmt: skip

    def __init__(self, cache: KVCache, request: Request) -> None:
        self._cache = cache
        self._request = request
        self._keys = ChainKeys(cache.index, request.salt, request.ids, cache.block_size)
        self._clear()

    def _clear(self) -> None:
        cache = self._cache
        self._groups = Groups(cache.windows)
        self._tail: Node | str = self._request.salt
        self._first_node: Node | None = None
        """First node of the index that holds a block which this table hit or computed."""
        self._checkpoints = None
        """None for a model without recurrent states."""
        if cache.states is not None:
            self._checkpoints = SequenceCheckpoints(cache.states, cache.index, self._request, cache.block_size)
        self._num_indexed = 0
        self._use = 0
        """Number of its admission."""
        self._is_sealed = not cache.shares_prefixes
        self._due = 0
        """Applied positions at which `commit` next has something to do."""
        self.capacity = 0
        """Positions for which there are blocks."""
        self.has_unsent = False
        """Whether `take_appended` has blocks to return."""

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        """Block ids by cache group, `GONE` if dead. Only for checks: the scheduler must not read it."""
        return tuple(tuple(group.blocks) for group in self._groups)

    @property
    def num_hittable(self) -> int:
        """Leading full blocks that a prefix hit may cover: at least one known token is left to compute."""
        return (len(self._request.ids) - 1) // self._cache.block_size if self.takes_hits else 0

    @property
    def takes_hits(self) -> bool:
        """Whether this request may use blocks that others computed."""
        return self._cache.shares_prefixes and self._request.takes_prefix_hits

    @property
    def num_full(self) -> int:
        """Leading blocks that the known ids fill."""
        return len(self._request.ids) // self._cache.block_size

    def key(self, index: int) -> bytes:
        """The chain key of block `index`, which known ids must fill."""
        return self._keys.key(index)

    def keys(self, first: int, end: int) -> Iterator[bytes]:
        """The chain keys of blocks `first` to `end - 1`."""
        return map(self._keys.key, range(first, end))

    # -- admission ---------------------------------------------------------------------------------------------------

    def match(self) -> PrefixMatch:
        """The longest cached prefix of the known ids that can be used, up to `num_hittable` blocks."""
        cache = self._cache
        nodes: list[Node] = []
        parent: Node | str = self._request.salt
        for i in range(self.num_hittable):
            key, ids = self._keys.content(i)
            node = cache.index.find(parent, key, ids)
            if node is None and cache.left:
                node = cache.left.recall(parent, key, ids)
            if node is None:
                break
            nodes.append(node)
            parent = node
        usable, num_known, checkpoint_id = num_usable, 0, GONE
        if cache.states is not None:
            usable, num_known = num_usable_states, len(nodes) * cache.block_size
        del nodes[usable(nodes, cache.windows, cache.block_size) :]
        num_tokens = len(nodes) * cache.block_size
        if cache.states is not None and nodes:
            checkpoint_id = nodes[-1].checkpoint_id
        num_unheld = 0
        for group, window in enumerate(cache.windows):
            seen = nodes[num_dead_blocks(window, num_tokens, cache.block_size) :]
            num_unheld += sum(not cache.pool.is_held(node.block_ids[group]) for node in seen)
        return PrefixMatch(tuple(nodes), num_tokens, num_unheld, checkpoint_id, num_known)

    def num_free_needed(self, match: PrefixMatch, num_tokens: int) -> int:
        """Free blocks that `admit` would take."""
        return sum(self._entries_at_start(match, num_tokens)) - len(match.nodes) * len(self._groups) + match.num_unheld

    def num_free_to_end(self, match: PrefixMatch, num_tokens: int) -> int:
        """Free blocks with which the request can compute `num_tokens` positions while no other gives one back.

        More than `admit` takes, if a window moves past matched blocks that another request holds: they do not return.
        """
        cache = self._cache
        whole = cache.num_blocks_for(num_tokens)
        most_new = whole - len(match.nodes) + match.num_unheld
        return sum(
            min(most_new, max_blocks(window, num_tokens, cache.step_tokens, cache.block_size))
            for window in cache.windows
        )

    def admit(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Hold the matched blocks, and take the blocks that the request starts with. False, with nothing done, if too
        few are free.

        `num_tokens` are the positions that it will need. A group without a window takes blocks for all of them, one
        with a window for a window and a step.
        """
        assert self.capacity == 0, "admitted twice"
        if self.num_free_needed(match, num_tokens) > self._cache.pool.num_free:
            return False
        self._cache.num_uses += 1
        self._use, ledger = self._cache.num_uses, self._cache.ledger
        for group in self._groups:
            for block_id in group.hit(match.nodes, self._cache.block_size):
                self._cache.pool.hold(block_id)
                if ledger is not None:
                    ledger.touch(block_id, self._use)
        if match.nodes:
            self._first_node, self._tail, self._num_indexed = match.nodes[0], match.nodes[-1], len(match.nodes)
            self._offer_hit(match.nodes)
        for group, num_entries in zip(self._groups, self._entries_at_start(match, num_tokens), strict=True):
            taken = self._cache.take(num_entries - len(group.blocks))
            assert taken is not None, "the room counted was not there"
            group.blocks += taken
        self.capacity = self._groups.num_whole * self._cache.block_size
        self.has_unsent = True
        self._set_due()
        if self._checkpoints is not None:
            self._checkpoints.begin(match.checkpoint_id, match.num_tokens, match.num_known)
        return True

    def _entries_at_start(self, match: PrefixMatch, num_tokens: int) -> list[int]:
        """Number of entries of each group with which a request is admitted."""
        cache, whole = self._cache, self._cache.num_blocks_for(num_tokens)
        sizes = match.num_tokens, num_tokens, cache.step_tokens, cache.block_size
        return [min(whole, group.most_entries(*sizes)) for group in self._groups]

    # -- while it runs -----------------------------------------------------------------------------------------------

    def extend(self, num_tokens: int) -> bool:
        """Take blocks for `num_tokens` positions in all. False, with nothing done, if too few are free."""
        size = self._cache.block_size
        num_entries = -(-num_tokens // size)
        taken = self._cache.take(self._groups.num_missing(num_entries))
        if taken is None:
            return False
        self._groups.extend_to(num_entries, taken)
        if self.capacity < num_entries * size:
            self.capacity = num_entries * size
        self.has_unsent = True
        return True

    def can_extend_after(self, num_computed: int, num_tokens: int) -> bool:
        """Whether blocks that die once `num_computed` positions are applied would be enough for `extend`."""
        num_missing = self._groups.num_missing(self._cache.num_blocks_for(num_tokens))
        num_dying = self._groups.num_dying(num_computed, self._cache.block_size)
        return num_missing <= self._cache.pool.num_free + num_dying

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def has_states(self) -> bool:
        return self._checkpoints is not None

    @property
    def launched_checkpoints(self) -> tuple[int, ...]:
        """Checkpoints that launched steps write. Only for checks."""
        return () if self._checkpoints is None else self._checkpoints.launched

    def want_checkpoint(self, position: int) -> bool:
        """Leave a checkpoint at a multiple of the block size, if there are any. Returns whether there will be one."""
        return self._checkpoints is not None and self._checkpoints.want(position)

    def chunk(self, start: int, num_tokens: int) -> int:
        """Tokens of a row from `start` on, which goes no further than the next checkpoint; at most `num_tokens`."""
        return num_tokens if self._checkpoints is None else self._checkpoints.chunk(start, num_tokens)

    def most_drafts(self, num_before: int) -> int:
        """Most drafts behind `num_before` tokens with which a row ends before the next checkpoint."""
        if self._checkpoints is None or self._is_sealed:
            return _NEVER
        return self._checkpoints.most_drafts(num_before)

    def leave_checkpoint(self, position: int, num_tokens: int) -> int | None:
        """The checkpoint that a row of `num_tokens` up to `position` has to write; None if it writes none."""
        if self._checkpoints is None or self._is_sealed:
            return None
        return self._checkpoints.leave(position, num_tokens, self._keys, self._cache.take_checkpoint)

    def _index_checkpoints(self, checkpoints: SequenceCheckpoints, num_computed: int) -> None:
        """Let the index find the checkpoints that applied steps have written."""
        while checkpoints.is_due(num_computed):
            position, checkpoint_id = checkpoints.take_due()
            # Accepted drafts may have filled blocks behind it.
            self._index(position)
            is_tail = not self._is_sealed and self._num_indexed * self._cache.block_size == position
            tail = self._tail if is_tail and isinstance(self._tail, Node) else None
            checkpoints.written(position, checkpoint_id, tail, self._use)
            if tail is not None:
                self._offer_tail()

    # -- blocks ------------------------------------------------------------------------------------------------------

    def take_appended(self) -> list[Appended]:
        """Blocks added since the last call, one entry per cache group that got any."""
        self.has_unsent = False
        return self._groups.take_appended()

    def commit(self, num_computed: int) -> None:
        """Index the blocks that `num_computed` applied positions fill, and free those that no later query sees.

        A launched row starts at `num_computed` or later, so it does not need them either.
        """
        if self._checkpoints is not None and self._checkpoints.is_due(num_computed):
            self._index_checkpoints(self._checkpoints, num_computed)
        if num_computed < self._due:
            return
        self._index(num_computed)
        for group in self._groups.windowed:
            for block_id in group.take_dead(num_computed, self._cache.block_size):
                self._cache.pool.release(block_id)
        self._set_due()

    def _index(self, num_computed: int) -> None:
        cache, groups = self._cache, self._groups
        num_full = num_computed // cache.block_size
        while self._num_indexed < num_full and not self._is_sealed:
            i = self._num_indexed
            key, ids = self._keys.content(i)
            own = [group.blocks[i] for group in groups]
            node = cache.index.insert(self._tail, key, ids, own)
            if node is None:
                self._is_sealed = True
                return
            for group, (block_id, indexed) in enumerate(zip(own, node.block_ids, strict=True)):
                if block_id == indexed:
                    cache.pool.mark_content(block_id)
                    if cache.ledger is not None:
                        cache.ledger.write(Entry(block_id, group, key, i, self._use))
                    if self._first_node is None:
                        self._first_node = node
            self._tail = node
            self._num_indexed = i + 1
            is_prompt_end = self._num_indexed == (self._request.num_prompt - 1) // cache.block_size
            if cache.offer is not None and (is_prompt_end or not self._num_indexed % cache.offer_every):
                cache.offer(node, i)

    def _set_due(self) -> None:
        size = self._cache.block_size
        self._due = _NEVER if self._is_sealed else (self._num_indexed + 1) * size
        for group in self._groups.windowed:
            self._due = min(self._due, group.next_death(size))

    # -- the end -----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop all that this table hit or computed from the index, because its content cannot be trusted."""
        if self._first_node is not None and self._first_node.is_live:
            self._cache.forget_chain(self._first_node)
        if self._cache.forgotten is not None:
            self._cache.forgotten(self._request.salt, list(self.keys(0, self.num_full)))
        self._is_sealed = True

    def _offer_hit(self, nodes: Sequence[Node]) -> None:
        """Offer a tier below what was hit, so that it counts as used there, and is there if it was lost. What lacks a
        window's block is not offered: the tier may have it whole."""
        cache = self._cache
        if cache.offer is None:
            return
        every = cache.offer_every
        for end in range(every, len(nodes) + 1, every):
            if all(GONE not in node.block_ids for node in nodes[end - every : end]):
                cache.offer(nodes[end - 1], end - 1)

    def _offer_tail(self) -> None:
        if self._cache.offer is not None and isinstance(self._tail, Node) and self._tail.is_live:
            self._cache.offer(self._tail, self._num_indexed - 1)

    def release(self) -> None:
        """Give all blocks back, the last first, so that a chain is evicted from its end."""
        self._offer_tail()
        for block_id in self._groups.held_from_the_last():
            self._cache.pool.release(block_id)
        if self._checkpoints is not None:
            self._checkpoints.release()
        self._clear()

    def check(self) -> None:
        size = self._cache.block_size
        self._groups.check(self._request.computed, size)
        assert self._num_indexed <= self._groups.num_whole and self.capacity == self._groups.num_whole * size
        assert len(self._keys) <= self.num_full
        is_held = any(group.held for group in self._groups)
        assert not is_held or self._request.scheduled <= self.capacity, "positions without a block"
