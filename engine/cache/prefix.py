"""The prefix index: which block holds the KV of which ids behind which prefix.

A tree of nodes, found through a chain of strong hashes (parent's key and the block's ids, the root salted), one node
per content. A hash only finds a candidate: salt, parent and ids are compared as well, so a collision is a miss and
never a wrong answer. A node lives no longer than its parent: dropping one drops all that lies behind it. Holds no
references; the pool counts those.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

HashBlock = Callable[[bytes, bytes], bytes]
"""(parent's key, payload) -> key."""

_KEY_BYTES = 16


def blake2b_block(parent_key: bytes, payload: bytes) -> bytes:
    """The product's hash: BLAKE2b (RFC 7693) with a 128-bit digest."""
    return hashlib.blake2b(parent_key + payload, digest_size=_KEY_BYTES).digest()


@dataclass(slots=True, eq=False)
class Node:
    """One indexed block. `parent` is the node before it, or the salt where it is the first of its chain."""

    key: bytes
    parent: Node | str
    ids: tuple[int, ...]
    block_id: int
    children: set[Node] = field(default_factory=set)
    is_live: bool = True


class PrefixIndex:
    """Nodes by key and by block. `hash_block` is replaced only to force collisions."""

    def __init__(self, hash_block: HashBlock = blake2b_block) -> None:
        self._hash = hash_block
        self._by_key: dict[bytes, Node] = {}
        self._by_block: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def root_key(self, salt: str) -> bytes:
        """The key in front of a chain's first block."""
        return self._hash(b"", salt.encode("utf-8", "surrogatepass"))

    def block_key(self, parent_key: bytes, ids: tuple[int, ...]) -> bytes:
        """The key of a block of `ids` behind `parent_key`."""
        return self._hash(parent_key, array("q", ids).tobytes())

    def find(self, parent: Node | str, key: bytes, ids: tuple[int, ...]) -> Node | None:
        """The node of exactly this salt, prefix and ids, or None."""
        node = self._by_key.get(key)
        if node is None or node.parent != parent or node.ids != ids:
            return None
        return node

    def insert(self, parent: Node | str, key: bytes, ids: tuple[int, ...], block_id: int) -> Node | None:
        """Index a block, or return the node that has this content already.

        None where it cannot be indexed: its parent was dropped, or its key belongs to other content.
        """
        if isinstance(parent, Node) and not parent.is_live:
            return None
        if key in self._by_key:
            return self.find(parent, key, ids)
        node = Node(key, parent, ids, block_id)
        self._by_key[key] = self._by_block[block_id] = node
        if isinstance(parent, Node):
            parent.children.add(node)
        return node

    def drop(self, block_id: int) -> list[int]:
        """Forget a block and all that lies behind it; returns the block ids forgotten, parents first."""
        node = self._by_block[block_id]
        if isinstance(node.parent, Node):
            node.parent.children.discard(node)
        dropped, stack = [], [node]
        while stack:
            node = stack.pop()
            node.is_live = False
            del self._by_key[node.key], self._by_block[node.block_id]
            dropped.append(node.block_id)
            stack.extend(node.children)
            node.children.clear()
        return dropped

    def holds(self, block_id: int) -> bool:
        return block_id in self._by_block

    def check(self) -> None:
        """Both maps agree, every parent is live and knows its child, and every key is the hash of its chain."""
        assert len(self._by_key) == len(self._by_block)
        for block_id, node in self._by_block.items():
            assert node.is_live, "a dropped node is indexed"
            assert node.block_id == block_id
            assert self._by_key[node.key] is node
            assert all(child.parent is node and child.is_live for child in node.children)
            parent = node.parent
            if isinstance(parent, Node):
                assert node in parent.children
                assert self._by_block[parent.block_id] is parent
            parent_key = parent.key if isinstance(parent, Node) else self.root_key(parent)
            assert node.key == self.block_key(parent_key, node.ids)
