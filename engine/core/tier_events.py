"""The blocks that the tier below the pool has, for KV events: as far as this engine wrote them or looked for them.

The tier tells on its threads which pieces are there and which are not. Their blocks are known here from before: of
those that were offered, and of those that a request was found to begin with. Other servers may remove a piece at any
time. It counts as there until a request looks for it. Knows no encoding.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

from inferd.engine.cache.below import Piece, Tier, nodes_of_piece, piece_at
from inferd.engine.cache.prefix import GONE, Change, Node
from inferd.engine.cache.table import KVCache

_MOST_OFFERED = 2048
"""Offered pieces that the tier has told nothing of yet. It writes some of them never."""
_MOST_HELD = 16384
"""Pieces that count as there. When there are more, the oldest ones count as gone."""

_Name = tuple[bytes, bool]
"""(key, whether a state is a part) of a piece."""


class TierEvents:
    """The changes of one tier since the last `take`."""

    def __init__(self, cache: KVCache, tier: Tier, is_told: Callable[[str], bool]) -> None:
        """Follow the tier of a cache, after `offer_to`. `is_told`: whether chains with this salt have events."""
        assert cache.offer is not None and cache.forgotten is not None
        self._num_groups, self._is_told = len(cache.windows), is_told
        self._news: deque[tuple[Piece | None, bool]] = deque()
        self._offered: OrderedDict[_Name, list[Change]] = OrderedDict()
        self._held: OrderedDict[_Name, tuple[str, list[tuple[int, bytes]]]] = OrderedDict()
        """Salt, and (group, key) of each block. A block may be a part of several pieces."""
        self._num_holding: Counter[tuple[int, bytes]] = Counter()
        """Pieces that have a block."""
        self._changes: list[Change] = []
        self._offer, self._forget = cache.offer, cache.forgotten
        cache.offer, cache.forgotten, cache.found_below = self._note_offer, self._note_forgotten, self._note_found
        tier.news = self._news

    @property
    def has_changes(self) -> bool:
        return bool(self._news or self._changes)

    def take(self) -> Sequence[Change]:
        """The changes in their order."""
        while self._news:
            piece, is_there = self._news.popleft()
            if piece is None:
                for name in list(self._held):
                    self._drop(name)
            elif is_there:
                self._hold(_name(piece), self._offered.pop(_name(piece), []))
            else:
                self._drop(_name(piece))
        taken, self._changes = self._changes, []
        return taken

    def clear(self) -> None:
        """Begin anew: a subscriber has forgotten all events."""
        self._held.clear()
        self._num_holding.clear()
        self._changes.clear()

    # -- what is there -------------------------------------------------------------------------------------------------

    def _note_offer(self, node: Node, depth: int) -> None:
        found = piece_at(node, depth, self._num_groups) if self._is_told(node.salt) else None
        if found is not None and _name(found[0]) not in self._held:
            nodes = nodes_of_piece(node, found[0].num_blocks)
            self._offered[_name(found[0])] = list(self._blocks_of(nodes, found[1], found[2]))
            if len(self._offered) > _MOST_OFFERED:
                self._offered.popitem(last=False)
        self._offer(node, depth)

    def _note_found(self, nodes: Sequence[Node], has_state: bool, sizes: Sequence[int]) -> None:
        """A search found a piece."""
        if self._is_told(nodes[0].salt):
            *of_blocks, of_state = (0 if size else GONE for size in sizes)
            self._hold((nodes[-1].key, has_state), list(self._blocks_of(nodes, of_blocks, of_state)))

    def _blocks_of(self, nodes: Sequence[Node], of_blocks: Sequence[int], of_state: int) -> Iterator[Change]:
        """A change for each block and state that has a place."""
        for number, node in enumerate(nodes):
            for group, place in enumerate(of_blocks[number * self._num_groups : (number + 1) * self._num_groups]):
                if place != GONE:
                    yield Change(node, group, True)
        if of_state != GONE:
            yield Change(nodes[-1], self._num_groups, True)

    def _hold(self, name: _Name, changes: list[Change]) -> None:
        if not changes or name in self._held:
            return
        for change in changes:
            block = change.group, change.node.key
            self._num_holding[block] += 1
            if self._num_holding[block] == 1:
                self._changes.append(change)
        self._held[name] = changes[0].node.salt, [(change.group, change.node.key) for change in changes]
        if len(self._held) > _MOST_HELD:
            self._drop(next(iter(self._held)))

    # -- what is gone --------------------------------------------------------------------------------------------------

    def _note_forgotten(self, salt: str, keys: Sequence[bytes]) -> None:
        for key in keys:
            for has_state in (False, True):
                self._offered.pop((key, has_state), None)
                self._drop((key, has_state))
        self._forget(salt, keys)

    def _drop(self, name: _Name) -> None:
        salt, blocks = self._held.pop(name, ("", []))
        for group, key in blocks:
            self._num_holding[group, key] -= 1
            if not self._num_holding[group, key]:
                del self._num_holding[group, key]
                self._changes.append(Change(Node(key, salt, (), [], salt), group, False))


def _name(piece: Piece) -> _Name:
    return piece.key, piece.has_state
