"""Content that lies below the pool, in a tier that keeps what the pool evicts or what earlier servers computed.

A tier keeps pieces: up to `PIECE_BLOCKS` blocks that follow each other in a chain, found by the chain key of the last.
A piece has a row for each block of each cache group, in this order, and one for the checkpoint behind it. A row without
content has no bytes. A request whose prefix lies below waits until its pieces are loaded into blocks of the pool, and
then hits them as any other request would. Knows no files, no threads and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from inferd.engine.arch.paging import num_dead_blocks
from inferd.engine.cache.ledger import Entry
from inferd.engine.cache.prefix import GONE, ChainKeys, Node
from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request

_MOST_OF_FREE = 0.75
"""Most of the free blocks that a load may take: requests that run need some."""
PIECE_BLOCKS = 8
"""Most blocks of a piece: it begins at a multiple of so many. Fewer make more files, more let the end of a prefix wait
for longer."""


class Piece(NamedTuple):
    """Identity of a piece."""

    key: bytes
    """Chain key of its last block."""
    first: int
    """Blocks before it in its chain."""
    num_blocks: int
    has_state: bool = False
    """Whether the recurrent state behind it is a part of it."""


class Found(NamedTuple):
    """A piece that lies below."""

    piece: Piece
    sizes: tuple[int, ...]
    """Number of bytes of each row."""


@dataclass(slots=True)
class TierUse:
    """Sums of one engine's tier since it began."""

    num_read_bytes: int = 0
    num_written_bytes: int = 0
    num_damaged: int = 0
    """Pieces that were not what was written."""
    num_distrusted: int = 0
    """Pieces that were removed because their writer had written a wrong one, or because they may follow from it."""
    num_unwritten: int = 0
    """Pieces that were not written: the disk or the queue was full, or there was an error."""
    num_held_bytes: int = 0
    """Bytes of everything in the tier, when they were last counted: others may share it."""
    num_host_bytes: int = 0
    """Bytes that pieces take in host memory now."""
    num_host_read_bytes: int = 0
    """Those of `num_read_bytes` that came from host memory."""


class Load(Protocol):
    """Pieces on their way into the pool, in order."""

    @property
    def has_ended(self) -> bool:
        """Whether `take_ended` has anything to say."""
        ...

    def take_ended(self) -> Sequence[bool]:
        """Whether each of the next pieces was loaded whole, as far as they have ended since the last call."""
        ...

    def stop(self) -> None:
        """Load no further pieces. All of them still end."""
        ...


class Seek(Protocol):
    """A search that runs beside the engine's loop."""

    @property
    def is_done(self) -> bool: ...

    def take(self) -> Sequence[Found]:
        """The pieces found, from the first wanted one on and without a gap."""
        ...


class Comparison(Protocol):
    """A comparison that runs beside the engine's loop."""

    @property
    def is_done(self) -> bool: ...

    def take(self) -> bool | None:
        """Whether both were the same; None if the tier has the piece no longer."""
        ...


class Tier(Protocol):
    """A store of pieces. None of its calls waits for it."""

    @property
    def use(self) -> TierUse: ...

    news: deque[tuple[Piece | None, bool]] | None
    """Takes each piece that the tier has written, or has looked for, and whether it is there. (None, False): any piece
    may be gone. None: nobody wants the news."""

    def seek(self, salt: str, wanted: Sequence[Sequence[Piece]]) -> Seek:
        """Look for pieces of one chain. Of each item the first piece that is there counts, the longest one."""
        ...

    def load(self, salt: str, found: Sequence[Found], places: Sequence[Sequence[int]]) -> Load:
        """Read pieces into places of the pool, a place for each row; `GONE` for a row without bytes."""
        ...

    def offer(self, salt: str, piece: Piece, places: Sequence[int]) -> None:
        """Write a piece, unless it is there, if its places still hold it then."""
        ...

    def forget(self, salt: str, keys: Sequence[bytes]) -> None:
        """Remove all pieces that end at one of these keys: their content cannot be trusted."""
        ...

    def clear(self) -> None:
        """Remove all pieces of this model, also those that others wrote and those that were offered before."""
        ...

    def compare(self, salt: str, piece: Piece, places: Sequence[int]) -> Comparison:
        """Compare a piece with what these places hold. The caller keeps them until that is done. If they differ, the
        tier removes all that the piece's writer wrote, and all that this engine did: that may follow from it."""
        ...

    def distrust(self) -> None:
        """Remove all that this engine wrote: some of it may follow from what was wrong."""
        ...

    def seconds_to_load(self, salt: str, found: Sequence[Found]) -> float:
        """Expected seconds until these pieces are loaded, behind what waits already."""
        ...


def pieces_of(keys: ChainKeys, first: int, end: int, *, has_states: bool) -> Iterator[Piece]:
    """The pieces that begin at block `first`, a multiple of `PIECE_BLOCKS`, and end at or before block `end`. The best
    comes first: the longest, and of a model with states the one with a state. A short one without a state would end
    the prefix at a place that cannot be hit."""
    for last in range(min(first + PIECE_BLOCKS, end), first, -1):
        piece = Piece(keys.key(last - 1), first, last - first, has_states)
        yield piece
        if has_states and piece.num_blocks == PIECE_BLOCKS:
            yield piece._replace(has_state=False)


def piece_at(node: Node, depth: int, num_groups: int) -> tuple[Piece, list[int], int] | None:
    """(piece that ends at `node`, its blocks by row, checkpoint or `GONE` behind it). `depth`: blocks before `node`."""
    first = depth - depth % PIECE_BLOCKS
    nodes: list[Node] = []
    at: Node | str = node
    while len(nodes) <= depth - first:
        if not isinstance(at, Node):
            return None
        nodes.append(at)
        at = at.parent
    nodes.reverse()
    assert all(len(each.block_ids) == num_groups for each in nodes)
    blocks = [block_id for each in nodes for block_id in each.block_ids]
    return Piece(node.key, first, len(nodes), node.checkpoint_id != GONE), blocks, node.checkpoint_id


def blocks_before(cache: KVCache, salt: str, ids: Sequence[int], num_blocks: int) -> list[list[int]] | None:
    """The blocks of each cache group that a query behind `num_blocks` blocks sees, after `GONE` for each that it does
    not. None if the pool lacks one."""
    keys, nodes = ChainKeys(cache.index, salt, ids, cache.block_size), list[Node]()
    for number in range(num_blocks):
        node = cache.index.find(nodes[-1] if nodes else salt, *keys.content(number))
        if node is None:
            return None
        nodes.append(node)
    found: list[list[int]] = []
    for group, window in enumerate(cache.windows):
        num_dead = num_dead_blocks(window, num_blocks * cache.block_size, cache.block_size)
        of_group = [node.block_ids[group] for node in nodes[num_dead:]]
        if GONE in of_group:
            return None
        found.append([GONE] * num_dead + of_group)
    return found


def nodes_of_piece(last: Node, num_blocks: int) -> list[Node]:
    """The nodes of a piece that ends at `last`."""
    nodes = [last]
    while len(nodes) < num_blocks:
        parent = nodes[-1].parent
        assert isinstance(parent, Node)
        nodes.append(parent)
    return nodes[::-1]


def offer_to(tier: Tier, cache: KVCache) -> None:
    """Offer a tier whatever the cache indexes from now on."""
    num_groups, first_checkpoint = len(cache.windows), cache.pool.num_blocks

    def offer(node: Node, depth: int) -> None:
        found = piece_at(node, depth, num_groups)
        if found is not None:
            piece, blocks, checkpoint_id = found
            checkpoint = GONE if checkpoint_id == GONE else first_checkpoint + checkpoint_id
            tier.offer(node.salt, piece, [*blocks, checkpoint])

    cache.offer, cache.offer_every, cache.forgotten = offer, PIECE_BLOCKS, tier.forget


@dataclass(slots=True, eq=False)
class _Reserved:
    """A piece, and the places that it is loaded into."""

    found: Found
    places: list[int]


class PrefixLoad:
    """The pieces that one request may have loaded, and the places that they are loaded into."""

    def __init__(self, cache: KVCache, request: Request) -> None:
        self._cache, self._request = cache, request
        self._keys = ChainKeys(cache.index, request.salt, request.ids, cache.block_size)
        table = cache.open(request)
        self._end = table.num_hittable
        self._num_known = table.match().num_tokens // cache.block_size if table.takes_hits else 0
        cache.close(table)
        self._reserved: list[_Reserved] = []
        self._num_settled = 0
        self._known: list[int] = []
        """Blocks of the known prefix, held while more is loaded behind it."""
        self.loaded: list[Piece] = []
        """Pieces whose content the index finds by now."""
        self._last: tuple[int, Node] | None = None
        """The node behind which the next piece follows, and the number of blocks up to it."""

    def wanted(self) -> list[list[Piece]]:
        """The pieces that the pool lacks, for `Tier.seek`; none if it lacks less than a block."""
        first = self._num_known - self._num_known % PIECE_BLOCKS
        has_states = self._cache.states is not None
        starts = range(first, self._end, PIECE_BLOCKS)
        wanted = [list(pieces_of(self._keys, start, self._end, has_states=has_states)) for start in starts]
        return wanted if self._num_known < self._end else []

    @property
    def keys(self) -> set[bytes]:
        """Those of the reserved pieces."""
        return {reserved.found.piece.key for reserved in self._reserved}

    def usable(self, found: Sequence[Found]) -> list[Found]:
        """The pieces that can be hit: of a model with states those up to the last one with a state."""
        if self._cache.states is None:
            return list(found)
        end = max((number for number, each in enumerate(found, 1) if each.piece.has_state), default=0)
        return list(found[:end])

    def num_tokens(self, found: Sequence[Found]) -> int:
        """Tokens that the request need not compute once these are loaded."""
        end = max((each.piece.first + each.piece.num_blocks for each in found), default=0)
        return max(end - self._num_known, 0) * self._cache.block_size

    def tell(self, found: Sequence[Found]) -> None:
        """Report what was found, pieces that follow each other, to the cache's listener if it has one."""
        if self._cache.found_below is None:
            return
        salt, first = self._request.salt, found[0].piece.first if found else 0
        before: Node | str = Node(self._keys.key(first - 1), salt, (), [], salt) if first else salt
        for each in found:
            nodes = list[Node]()
            for depth in range(each.piece.first, each.piece.first + each.piece.num_blocks):
                key, ids = self._keys.content(depth)
                before = Node(key, before, ids, [], salt)
                nodes.append(before)
            self._cache.found_below(nodes, each.piece.has_state, each.sizes)

    def reserve(self, found: Sequence[Found]) -> tuple[list[Found], list[list[int]]]:
        """Take places for as many pieces as there is room for. Returns them with their places by row."""
        cache = self._cache
        num_groups = len(cache.windows)
        self._hold_known()
        left = int(cache.pool.num_free * _MOST_OF_FREE)
        for each in found:
            *of_blocks, of_state = each.sizes
            needed = sum(size > 0 for size in of_blocks)
            left -= needed
            if len(of_blocks) != each.piece.num_blocks * num_groups or left < 0:
                break
            taken = cache.lend(needed)
            if taken is None:
                break
            places = [taken.pop() if size else GONE for size in of_blocks]
            checkpoint = cache.lend_checkpoint() if of_state else None
            places.append(GONE if checkpoint is None else checkpoint)
            if of_state and checkpoint is None:
                self._give_back(places)
                break
            self._reserved.append(_Reserved(each, places))
        return [each.found for each in self._reserved], [each.places for each in self._reserved]

    def _hold_known(self) -> None:
        """Keep the prefix that the pool has: what is loaded can be hit only behind it."""
        cache = self._cache
        table = cache.open(self._request)
        nodes = table.match().nodes
        cache.close(table)
        self._known = [block_id for node in nodes for block_id in node.block_ids if block_id != GONE]
        cache.lend_known(self._known)

    def settle(self, is_loaded: bool) -> int:
        """The next piece has ended: let the index find its content if it is whole. Returns the number of its tokens if
        they are in the pool now."""
        cache, reserved = self._cache, self._reserved[self._num_settled]
        self._num_settled += 1
        piece, num_groups = reserved.found.piece, len(cache.windows)
        node = self._before(piece.first) if is_loaded else None
        for number in range(piece.num_blocks if node is not None else 0):
            depth = piece.first + number
            key, ids = self._keys.content(depth)
            blocks = reserved.places[number * num_groups : (number + 1) * num_groups]
            assert node is not None
            node = cache.index.insert(node, key, ids, blocks) if any(b != GONE for b in blocks) else None
            if node is None:
                break
            for group, block_id in enumerate(blocks):
                if block_id != GONE and node.block_ids[group] == block_id:
                    self._keep(block_id, group, key, depth)
        checkpoint = reserved.places[-1]
        states = cache.states
        if isinstance(node, Node) and checkpoint != GONE and states is not None:
            depth = piece.first + piece.num_blocks - 1
            states.let_find(cache.index, node, checkpoint - states.first_place, depth, cache.num_uses)
        if not isinstance(node, Node):
            self._last = None
            return 0
        end, size, request = piece.first + piece.num_blocks, cache.block_size, self._request
        self._last = (end, node)
        self.loaded.append(piece)
        # The first piece may begin before the end of what the pool had.
        request.loaded = range(self._num_known * size, end * size)
        return (end - max(piece.first, self._num_known)) * size

    @property
    def is_settled(self) -> bool:
        """Whether all reserved pieces have ended."""
        return self._num_settled == len(self._reserved)

    def close(self) -> None:
        """Give all places back, the last first. Those with content stay cached, to be evicted from the chain's end."""
        for reserved in reversed(self._reserved):
            self._give_back(reserved.places)
        self._give_back(self._known)
        self._reserved, self._num_settled, self._known = [], 0, []

    def _before(self, depth: int) -> Node | str | None:
        """The parent of a block at `depth`; None if the index has lost it."""
        if self._last is not None and self._last[0] == depth and self._last[1].is_live:
            return self._last[1]
        at: Node | str = self._request.salt
        for index in range(depth):
            node = self._cache.index.find(at, *self._keys.content(index))
            if node is None:
                return None
            at = node
        return at

    def _keep(self, block_id: int, group: int, key: bytes, depth: int) -> None:
        cache = self._cache
        if not cache.pool.has_content(block_id):
            cache.pool.mark_content(block_id)
            if cache.ledger is not None:
                cache.ledger.write(Entry(block_id, group, key, depth, cache.num_uses))

    def _give_back(self, places: Sequence[int]) -> None:
        self._cache.take_back([place for place in places if place != GONE])
