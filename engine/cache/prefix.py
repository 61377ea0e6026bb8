"""The prefix index: which blocks hold the KV of which ids, behind which prefix.

A tree of nodes, one per content, each with a block for each cache group. Nodes are found through a chain of strong
hashes: of the parent's key and the block's ids, with a salted root. A hash only finds a candidate; salt, parent and ids
are compared as well. So a collision is a miss and never a wrong answer. A node lives no longer than its parent. Holds
no references; the pool counts those.

The loss of one block has an effect that depends on its group. Behind a lost block of full attention nothing can be hit,
so the node is dropped with all behind it. A lost block of a window only stops hits that end within the window behind
it, so the node and its other groups stay. So if every group has a window, a node may become a tombstone: it has no
blocks, and is kept because nodes behind it have some. The number of tombstones is bounded. Beyond the bound the oldest
is dropped with all behind it.

A node may have a checkpoint: the recurrent state behind its last id. It goes with the node, or alone.

If asked to, the index lists its changes for others to publish. It knows nothing of them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import NamedTuple

HashBlock = Callable[[bytes, bytes], bytes]
"""(parent's key, payload) -> key."""

GONE = -1
"""Stands for the id of a block or a checkpoint: there is none here, or not any more."""

_KEY_BYTES = 32
"""Keys name content beyond this index too, and nobody compares its ids (`engine/cache/ledger`)."""


def blake2b_block(parent_key: bytes, payload: bytes) -> bytes:
    """The default hash: BLAKE2b (RFC 7693) with a 256-bit digest."""
    return hashlib.blake2b(parent_key + payload, digest_size=_KEY_BYTES).digest()


@dataclass(slots=True, eq=False)
class Node:
    """One indexed content. `parent` is the node before it; for the first of its chain it is the salt."""

    key: bytes
    parent: Node | str
    ids: tuple[int, ...]
    block_ids: list[int]
    """Block ids by cache group; `GONE` if a window's block was evicted."""
    salt: str
    """Salt of its chain."""
    checkpoint_id: int = GONE
    children: set[Node] = field(default_factory=set)
    is_live: bool = True

    @property
    def is_tombstone(self) -> bool:
        return self.checkpoint_id == GONE and all(block_id == GONE for block_id in self.block_ids)


class Change(NamedTuple):
    """A node got or lost its block of one cache group. Its checkpoint counts as the block of one more group, the
    last."""

    node: Node
    group: int
    is_stored: bool


class PrefixIndex:
    """Nodes by key and by block. `hash_block` is replaced only by tests, to force collisions."""

    def __init__(
        self,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        max_tombstones: int = 0,
        hash_block: HashBlock = blake2b_block,
        drop_checkpoint: Callable[[int], None] | None = None,
    ) -> None:
        """`drop_checkpoint` is called with each checkpoint that goes with its node."""
        self._drop_checkpoint = drop_checkpoint
        self._pack = Struct(f"={block_size}q").pack
        self._is_full = tuple(window is None for window in windows)
        self._max_tombstones = max_tombstones
        self._hash = hash_block
        self._by_key: dict[bytes, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._by_checkpoint: dict[int, Node] = {}
        self._tombstones: OrderedDict[Node, None] = OrderedDict()
        """Oldest first."""
        self.changes: list[Change] | None = None
        """Changes in their order, until somebody takes them. None: nobody wants them."""
        self.was_emptied = False
        """Whether the index lost everything before the first of `changes`."""

    def __len__(self) -> int:
        return len(self._by_key)

    def root_key(self, salt: str) -> bytes:
        """Key of the root of a chain with this salt."""
        return self._hash(b"", salt.encode("utf-8", "surrogatepass"))

    def block_key(self, parent_key: bytes, ids: tuple[int, ...]) -> bytes:
        """Key of a block of `ids` behind `parent_key`."""
        return self._hash(parent_key, self._pack(*ids))

    def find(self, parent: Node | str, key: bytes, ids: tuple[int, ...]) -> Node | None:
        """The node of exactly this salt, prefix and ids, or None."""
        node = self._by_key.get(key)
        if node is None or node.parent != parent or node.ids != ids:
            return None
        return node

    def insert(self, parent: Node | str, key: bytes, ids: tuple[int, ...], block_ids: list[int]) -> Node | None:
        """Index one block per group; `GONE` for a window's block that is not there. A node that has this content takes
        only the blocks that it lacks.

        None if it cannot be indexed: its parent was dropped, or its key belongs to other content.
        """
        if isinstance(parent, Node) and not parent.is_live:
            return None
        if key in self._by_key:
            node = self.find(parent, key, ids)
            if node is not None and GONE in node.block_ids:
                self._fill(node, block_ids)
            return node
        salt = parent.salt if isinstance(parent, Node) else parent
        self._by_key[key] = node = Node(key, parent, ids, block_ids, salt)
        for group, block_id in enumerate(block_ids):
            if block_id != GONE:
                self._by_block[block_id] = node
                if self.changes is not None:
                    self.changes.append(Change(node, group, True))
        if isinstance(parent, Node):
            parent.children.add(node)
        return node

    def drop(self, block_id: int) -> list[int]:
        """Drop a block and all that cannot be hit without it; returns the block ids dropped."""
        node = self._by_block[block_id]
        group = node.block_ids.index(block_id)
        if self._is_full[group]:
            return self.drop_node(node)
        del self._by_block[block_id]
        node.block_ids[group] = GONE
        if self.changes is not None:
            self.changes.append(Change(node, group, False))
        return [block_id, *self._make_tombstone(node)] if node.is_tombstone else [block_id]

    def drop_node(self, node: Node) -> list[int]:
        """Drop a node and all behind it; returns the block ids dropped."""
        dropped: list[int] = []
        parent, stack = node.parent, [node]
        self._detach(node)
        while stack:
            node = stack.pop()
            node.is_live = False
            del self._by_key[node.key]
            self._tombstones.pop(node, None)
            if self.changes is not None:
                held = [*node.block_ids, node.checkpoint_id]
                self.changes += [Change(node, group, False) for group, item in enumerate(held) if item != GONE]
            if node.checkpoint_id != GONE:
                assert self._drop_checkpoint is not None
                del self._by_checkpoint[node.checkpoint_id]
                self._drop_checkpoint(node.checkpoint_id)
            for block_id in node.block_ids:
                if block_id != GONE:
                    del self._by_block[block_id]
                    dropped.append(block_id)
            stack.extend(node.children)
            node.children.clear()
        self._prune(parent)
        return dropped

    def chains(self) -> list[Node]:
        """The first node of every chain."""
        return [node for node in self._by_key.values() if not isinstance(node.parent, Node)]

    def holds(self, block_id: int) -> bool:
        return block_id in self._by_block

    def holds_checkpoint(self, checkpoint_id: int) -> bool:
        return checkpoint_id in self._by_checkpoint

    def contents(self) -> Iterator[Change]:
        """Every block and checkpoint that can be found now, as the changes that stored them."""
        for node in self._by_key.values():
            held = [*node.block_ids, node.checkpoint_id]
            yield from (Change(node, group, True) for group, item in enumerate(held) if item != GONE)

    def take_changes(self) -> tuple[bool, list[Change]]:
        """(whether everything was lost first, changes since the last call). Only if `changes` is not None."""
        assert self.changes is not None
        taken = self.was_emptied, self.changes
        self.was_emptied, self.changes = False, []
        return taken

    def note_empty(self) -> None:
        """If nothing is left, stand for all changes so far by one: everything was lost."""
        if self.changes and not self._by_key:
            self.was_emptied, self.changes = True, []

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def has_checkpoint(self, key: bytes) -> bool:
        """Whether the content with this key has a checkpoint. A collision of keys may answer for another content."""
        node = self._by_key.get(key)
        return node is not None and node.checkpoint_id != GONE

    def add_checkpoint(self, node: Node | str, checkpoint_id: int) -> bool:
        """Let a node have this checkpoint. False if the node was dropped, or has one."""
        if not isinstance(node, Node) or not node.is_live or node.checkpoint_id != GONE:
            return False
        node.checkpoint_id = checkpoint_id
        self._by_checkpoint[checkpoint_id] = node
        self._tombstones.pop(node, None)
        if self.changes is not None:
            self.changes.append(Change(node, len(self._is_full), True))
        return True

    def evict_checkpoint(self, checkpoint_id: int) -> list[int]:
        """Drop a checkpoint alone; returns the block ids dropped because they lead to nothing any more."""
        node = self._by_checkpoint.pop(checkpoint_id)
        node.checkpoint_id = GONE
        if self.changes is not None:
            self.changes.append(Change(node, len(self._is_full), False))
        return self._make_tombstone(node) if node.is_tombstone else []

    def checkpoints(self) -> frozenset[int]:
        """Checkpoints that some node has."""
        return frozenset(self._by_checkpoint)

    # -- tombstones ------------------------------------------------------------------------------------------------

    def _fill(self, node: Node, block_ids: list[int]) -> None:
        """Give the node the blocks of the groups that it lacks."""
        for group, block_id in enumerate(block_ids):
            if node.block_ids[group] == GONE != block_id:
                node.block_ids[group] = block_id
                self._by_block[block_id] = node
                if self.changes is not None:
                    self.changes.append(Change(node, group, True))
        self._tombstones.pop(node, None)

    def _make_tombstone(self, node: Node) -> list[int]:
        """Make a node that lost its last block a tombstone. Returns the block ids dropped to stay within the bound."""
        self._tombstones[node] = None
        self._prune(node)
        return self.drop_node(next(iter(self._tombstones))) if len(self._tombstones) > self._max_tombstones else []

    def _prune(self, node: Node | str) -> None:
        """Drop tombstones from the end of a chain."""
        while isinstance(node, Node) and node in self._tombstones and not node.children:
            self._detach(node)
            node.is_live = False
            del self._by_key[node.key], self._tombstones[node]
            node = node.parent

    def _detach(self, node: Node) -> None:
        if isinstance(node.parent, Node):
            node.parent.children.discard(node)

    def check(self) -> None:
        """Assert that the maps agree, every parent is live and knows its child, and every key hashes its chain."""
        blocks = {block_id: node for node in self._by_key.values() for block_id in node.block_ids if block_id != GONE}
        assert blocks == self._by_block
        assert sum(block_id != GONE for node in self._by_key.values() for block_id in node.block_ids) == len(blocks)
        assert len(self._tombstones) <= self._max_tombstones
        held = {node.checkpoint_id: node for node in self._by_key.values() if node.checkpoint_id != GONE}
        assert held == self._by_checkpoint, "a checkpoint without its node"
        for key, node in self._by_key.items():
            assert node.is_live, "a dropped node is indexed"
            assert node.key == key
            assert node.is_tombstone == (node in self._tombstones), "a node without blocks that is not counted"
            assert node.children or not node.is_tombstone, "a tombstone with nothing behind it"
            full = (block_id for block_id, is_full in zip(node.block_ids, self._is_full, strict=True) if is_full)
            assert GONE not in full, "a chain with a hole"
            assert all(child.parent is node and child.is_live for child in node.children)
            parent = node.parent
            if isinstance(parent, Node):
                assert node in parent.children
                assert self._by_key[parent.key] is parent
            parent_key = parent.key if isinstance(parent, Node) else self.root_key(parent)
            assert key == self.block_key(parent_key, node.ids)


class ChainKeys:
    """The chain keys of one sequence's blocks. Each is computed once, because ids never change."""

    __slots__ = ("_block_size", "_ids", "_index", "_keys")

    def __init__(self, index: PrefixIndex, salt: str, ids: Sequence[int], block_size: int) -> None:
        """`ids`: the sequence's, which grow."""
        self._index, self._ids, self._block_size = index, ids, block_size
        self._keys = [index.root_key(salt)]

    def __len__(self) -> int:
        """Number of keys computed so far."""
        return len(self._keys) - 1

    def key(self, index: int) -> bytes:
        """The key of block `index`, which known ids must fill."""
        while len(self._keys) <= index + 1:
            self.content(len(self._keys) - 1)
        return self._keys[index + 1]

    def content(self, index: int) -> tuple[bytes, tuple[int, ...]]:
        """(key, ids) of block `index`; the keys of those before it are known."""
        size, keys = self._block_size, self._keys
        ids = tuple(self._ids[index * size : (index + 1) * size])
        assert len(ids) == size, f"block {index} is not full of known ids"
        if len(keys) == index + 1:
            keys.append(self._index.block_key(keys[index], ids))
        return keys[index + 1], ids
