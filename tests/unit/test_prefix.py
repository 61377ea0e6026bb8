"""The prefix index finds only equal ids, behind the same prefix, under the same salt."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import pytest

from inferd.engine.cache.prefix import HashBlock, Node, PrefixIndex, blake2b_block


def insert(index: PrefixIndex, salt: str, blocks: Sequence[tuple[int, ...]], first_block: int = 0) -> list[Node | None]:
    """Index a chain of blocks, with block ids from `first_block` on."""
    parent: Node | str = salt
    key = index.root_key(salt)
    nodes: list[Node | None] = []
    for i, ids in enumerate(blocks):
        key = index.block_key(key, ids)
        node = index.insert(parent, key, ids, [first_block + i])
        nodes.append(node)
        if node is None:
            return nodes
        parent = node
    return nodes


def find(index: PrefixIndex, salt: str, blocks: Sequence[tuple[int, ...]]) -> list[int]:
    """Block ids of the longest prefix found."""
    parent: Node | str = salt
    key = index.root_key(salt)
    found: list[int] = []
    for ids in blocks:
        key = index.block_key(key, ids)
        node = index.find(parent, key, ids)
        if node is None:
            break
        found.append(node.block_ids[0])
        parent = node
    return found


def test_the_key_is_blake2b_over_parent_and_ids() -> None:
    index = PrefixIndex(3)
    root = hashlib.blake2b(b"tenant", digest_size=32).digest()
    expected = hashlib.blake2b(root + struct.pack("=3q", 1, 2, 3), digest_size=32).digest()
    assert index.root_key("tenant") == root
    assert index.block_key(root, (1, 2, 3)) == expected


@pytest.mark.parametrize("hash_block", [blake2b_block, lambda parent_key, payload: b""])
def test_only_the_same_chain_is_found(hash_block: HashBlock) -> None:
    index = PrefixIndex(2, hash_block=hash_block)
    insert(index, "a", [(1, 2), (3, 4)], first_block=10)
    for salt, blocks in (("b", [(1, 2)]), ("a", [(1, 3)]), ("a", [(3, 4)]), ("", [(1, 2)]), ("a", [(5, 6), (3, 4)])):
        assert find(index, salt, blocks) == [], (salt, blocks)
    assert find(index, "a", [(1, 2), (9, 9)]) == [10]
    index.check()


def test_a_collision_up_the_chain_is_a_miss() -> None:
    """(1,) and (2,) share a key: a block indexed behind one of them is not found behind the other."""
    one, two = struct.pack("=q", 1), struct.pack("=q", 2)
    index = PrefixIndex(1, hash_block=lambda parent_key, payload: blake2b_block(parent_key, payload.replace(two, one)))
    insert(index, "", [(1,), (7,)])
    assert find(index, "", [(1,), (7,)]) == [0, 1]
    assert insert(index, "", [(2,), (7,)], first_block=5) == [None]
    assert find(index, "", [(2,), (7,)]) == []


def test_the_same_content_is_indexed_once() -> None:
    index = PrefixIndex(1)
    first = insert(index, "", [(1,), (2,)], first_block=0)
    assert insert(index, "", [(1,), (2,)], first_block=5) == first
    assert len(index) == 2
    assert not index.holds(5)
    index.check()


def test_dropping_a_block_drops_what_lies_behind_it() -> None:
    index = PrefixIndex(1)
    insert(index, "", [(1,), (2,), (3,)], first_block=0)
    insert(index, "", [(1,), (2,), (4,)], first_block=5)
    insert(index, "", [(9,)], first_block=9)
    assert sorted(index.drop(1)) == [1, 2, 7]
    index.check()
    assert find(index, "", [(1,), (2,), (3,)]) == [0]
    assert find(index, "", [(9,)]) == [9]


def test_nothing_is_indexed_behind_a_dropped_block() -> None:
    index = PrefixIndex(1)
    (node,) = insert(index, "", [(1,)])
    assert node is not None
    index.drop(0)
    assert index.insert(node, index.block_key(node.key, (2,)), (2,), [1]) is None
    assert len(index) == 0


def test_check_finds_a_chain_with_a_hole() -> None:
    index = PrefixIndex(1)
    insert(index, "", [(1,), (2,)])
    index.check()
    hole = index._by_block.pop(0)
    del index._by_key[hole.key]
    with pytest.raises((AssertionError, KeyError)):
        index.check()
