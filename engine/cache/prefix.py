"""The prefix index: which blocks hold the KV of which ids behind which prefix.

A tree of nodes, found through a chain of strong hashes (parent's key and the block's ids, the root salted), one node
per content, with a block for each cache group. A hash only finds a candidate: salt, parent and ids are compared as
well, so a collision is a miss and never a wrong answer. A node lives no longer than its parent. Holds no references;
the pool counts those.

What one lost block means depends on its group. Behind a lost block of full attention nothing can be hit: the node goes,
with all behind it. A lost block of a window leaves the node and its other groups alone: it only stops hits that end
within the window behind it. So where every group has a window, a node may be hollow: without blocks, and kept because
nodes behind it hold some. Hollow nodes are bounded; beyond the bound the oldest goes, with all behind it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import Struct

HashBlock = Callable[[bytes, bytes], bytes]
"""(parent's key, payload) -> key."""

GONE = -1
"""In place of a block id: this group's block is not there (any more)."""

_KEY_BYTES = 16


def blake2b_block(parent_key: bytes, payload: bytes) -> bytes:
    """The product's hash: BLAKE2b (RFC 7693) with a 128-bit digest."""
    return hashlib.blake2b(parent_key + payload, digest_size=_KEY_BYTES).digest()


@dataclass(slots=True, eq=False)
class Node:
    """One indexed content. `parent` is the node before it, or the salt where it is the first of its chain."""

    key: bytes
    parent: Node | str
    ids: tuple[int, ...]
    block_ids: list[int]
    """By cache group; `GONE` where a window's block was evicted."""
    children: set[Node] = field(default_factory=set)
    is_live: bool = True

    @property
    def is_hollow(self) -> bool:
        return all(block_id == GONE for block_id in self.block_ids)


class PrefixIndex:
    """Nodes by key and by block. `hash_block` is replaced only to force collisions."""

    def __init__(
        self,
        block_size: int,
        windows: Sequence[int | None] = (None,),
        max_hollow: int = 0,
        hash_block: HashBlock = blake2b_block,
    ) -> None:
        self._pack = Struct(f"={block_size}q").pack
        self._is_full = tuple(window is None for window in windows)
        self._max_hollow = max_hollow
        self._hash = hash_block
        self._by_key: dict[bytes, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._hollow: OrderedDict[Node, None] = OrderedDict()
        """Oldest first."""

    def __len__(self) -> int:
        return len(self._by_key)

    def root_key(self, salt: str) -> bytes:
        """The key in front of a chain's first block."""
        return self._hash(b"", salt.encode("utf-8", "surrogatepass"))

    def block_key(self, parent_key: bytes, ids: tuple[int, ...]) -> bytes:
        """The key of a block of `ids` behind `parent_key`."""
        return self._hash(parent_key, self._pack(*ids))

    def find(self, parent: Node | str, key: bytes, ids: tuple[int, ...]) -> Node | None:
        """The node of exactly this salt, prefix and ids, or None."""
        node = self._by_key.get(key)
        if node is None or node.parent != parent or node.ids != ids:
            return None
        return node

    def insert(self, parent: Node | str, key: bytes, ids: tuple[int, ...], block_ids: list[int]) -> Node | None:
        """Index a block of each group; a node that has this content already takes those that it lacks.

        None where it cannot be indexed: its parent was dropped, or its key belongs to other content.
        """
        if isinstance(parent, Node) and not parent.is_live:
            return None
        if key in self._by_key:
            node = self.find(parent, key, ids)
            if node is not None and GONE in node.block_ids:
                self._fill(node, block_ids)
            return node
        self._by_key[key] = node = Node(key, parent, ids, block_ids)
        for block_id in block_ids:
            self._by_block[block_id] = node
        if isinstance(parent, Node):
            parent.children.add(node)
        return node

    def drop(self, block_id: int) -> list[int]:
        """Forget a block and what cannot be hit without it; returns the block ids forgotten."""
        node = self._by_block[block_id]
        group = node.block_ids.index(block_id)
        if self._is_full[group]:
            return self.drop_node(node)
        del self._by_block[block_id]
        node.block_ids[group] = GONE
        return [block_id, *self._settle(node)] if node.is_hollow else [block_id]

    def drop_node(self, node: Node) -> list[int]:
        """Forget a node and all that lies behind it; returns the block ids forgotten."""
        dropped: list[int] = []
        parent, stack = node.parent, [node]
        self._detach(node)
        while stack:
            node = stack.pop()
            node.is_live = False
            del self._by_key[node.key]
            self._hollow.pop(node, None)
            for block_id in node.block_ids:
                if block_id != GONE:
                    del self._by_block[block_id]
                    dropped.append(block_id)
            stack.extend(node.children)
            node.children.clear()
        self._prune(parent)
        return dropped

    def holds(self, block_id: int) -> bool:
        return block_id in self._by_block

    # -- hollow nodes ------------------------------------------------------------------------------------------------

    def _fill(self, node: Node, block_ids: list[int]) -> None:
        """Give the node the blocks of the groups that it lacks."""
        for group, block_id in enumerate(block_ids):
            if node.block_ids[group] == GONE:
                node.block_ids[group] = block_id
                self._by_block[block_id] = node
        self._hollow.pop(node, None)

    def _settle(self, node: Node) -> list[int]:
        """The node has lost its last block: keep it for those behind it. Returns what goes to stay within the bound."""
        self._hollow[node] = None
        self._prune(node)
        return self.drop_node(next(iter(self._hollow))) if len(self._hollow) > self._max_hollow else []

    def _prune(self, node: Node | str) -> None:
        """Drop hollow nodes from the end of a chain."""
        while isinstance(node, Node) and node in self._hollow and not node.children:
            self._detach(node)
            node.is_live = False
            del self._by_key[node.key], self._hollow[node]
            node = node.parent

    def _detach(self, node: Node) -> None:
        if isinstance(node.parent, Node):
            node.parent.children.discard(node)

    def check(self) -> None:
        """The maps agree, every parent is live and knows its child, and every key is the hash of its chain."""
        blocks = {block_id: node for node in self._by_key.values() for block_id in node.block_ids if block_id != GONE}
        assert blocks == self._by_block
        assert sum(block_id != GONE for node in self._by_key.values() for block_id in node.block_ids) == len(blocks)
        assert len(self._hollow) <= self._max_hollow
        for key, node in self._by_key.items():
            assert node.is_live, "a dropped node is indexed"
            assert node.key == key
            assert node.is_hollow == (node in self._hollow), "a node without blocks that nobody counts"
            assert node.children or not node.is_hollow, "a hollow node that leads nowhere"
            full = (block_id for block_id, is_full in zip(node.block_ids, self._is_full, strict=True) if is_full)
            assert GONE not in full, "a chain with a hole"
            assert all(child.parent is node and child.is_live for child in node.children)
            parent = node.parent
            if isinstance(parent, Node):
                assert node in parent.children
                assert self._by_key[parent.key] is parent
            parent_key = parent.key if isinstance(parent, Node) else self.root_key(parent)
            assert key == self.block_key(parent_key, node.ids)
