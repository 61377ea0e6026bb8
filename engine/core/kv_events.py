"""Makes KV events of the prefix index's changes. Knows no sockets and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from inferd.engine.api.wire.kv_events import (
    MAX_EVENT_TOKENS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Encoded,
    GroupKind,
    KVEvent,
    encode_events,
)
from inferd.engine.api.wire.params import Adapter
from inferd.engine.cache.below import Tier
from inferd.engine.cache.prefix import Change, Node
from inferd.engine.cache.table import KVCache
from inferd.engine.core.tier_events import TierEvents
from inferd.engine.request import parts_of_salt

MEDIUM = "GPU"
"""Memory of the blocks, as in vLLM, on processors too: to gateways "CPU" means copies that were moved out."""
TIER_MEDIUM = "DISK"
"""Medium of the blocks in a directory. vLLM calls it STORAGE, which older routers take for the device's memory."""
_SALT_DIGITS = 16
_HASH_BYTES = 8


def hash_of(key: bytes) -> int:
    """A block's hash in events: the last 64 bits of its key, as in vLLM."""
    return int.from_bytes(key[-_HASH_BYTES:], "big")


class KVEventLog:
    """The changes of one cache since the last `take`."""

    def __init__(self, cache: KVCache, *, has_private: bool, tier: Tier | None = None) -> None:
        """`has_private`: whether prefixes that only some requests may hit have events too. `tier`: the one below the
        cache, if its blocks have events."""
        self._index, self._block_size = cache.index, cache.block_size
        self._has_private = has_private
        self._adapters: dict[int, tuple[str, str]] = {}
        """(digest, name) of the adapter at each index."""
        kinds: list[tuple[GroupKind, int | None]] = [
            ("full_attention", None) if window is None else ("sliding_window", window) for window in cache.windows
        ]
        self._kinds = (*kinds, ("mamba", None))
        """(kind, window) of each cache group. The last stands for recurrent states."""
        cache.index.changes = []
        self._below = None if tier is None else TierEvents(cache, tier, self._is_told)

    def name_adapter(self, adapter: Adapter, name: str) -> None:
        """An adapter takes the place of the one that had its index."""
        self._adapters[adapter.index] = adapter.digest, name

    def take(self) -> Iterator[Encoded]:
        """Encoded events of the changes since the last call."""
        has_below = self._below is not None and self._below.has_changes
        if self._index.changes or self._index.was_emptied or has_below:
            yield from encode_events(self._events())

    def _is_told(self, salt: str) -> bool:
        return self._has_private or not parts_of_salt(salt)[1]

    def _events(self) -> Iterator[KVEvent]:
        """Each group's changes in their order, one group after the other: groups do not depend on each other."""
        was_emptied, changes = self._index.take_changes()
        if was_emptied:
            yield AllBlocksCleared()
            if self._below is not None:
                self._below.clear()
        yield from self._events_by_group(changes, MEDIUM)
        if self._below is not None:
            yield from self._events_by_group(self._below.take(), TIER_MEDIUM)

    def _events_by_group(self, changes: Iterable[Change], medium: str) -> Iterator[KVEvent]:
        by_group: dict[int, list[Change]] = {}
        for change in changes:
            if self._is_told(change.node.salt):
                by_group.setdefault(change.group, []).append(change)
        for group, of_group in sorted(by_group.items()):
            yield from self._events_of(group, of_group, medium)

    def _events_of(self, group: int, changes: Iterable[Change], medium: str) -> Iterator[KVEvent]:
        """Blocks that follow one another share an event, and so do blocks that go."""
        event: BlockStored | BlockRemoved | None = None
        last: Node | None = None
        for node, _, is_stored in changes:
            if not is_stored and isinstance(event, BlockRemoved) and len(event.block_hashes) < MAX_EVENT_TOKENS:
                event.block_hashes.append(hash_of(node.key))
                continue
            if is_stored and isinstance(event, BlockStored) and node.parent is last and self._has_room(event):
                self._extend(event, node)
            else:
                if event is not None:
                    yield event
                event = (self._stored if is_stored else self._removed)(group, node, medium)
            last = node
        if event is not None:
            yield event

    def _has_room(self, event: BlockStored) -> bool:
        return len(event.token_ids) + self._block_size <= MAX_EVENT_TOKENS

    def _removed(self, group: int, node: Node, medium: str) -> BlockRemoved:
        return BlockRemoved([hash_of(node.key)], medium, group)

    def _stored(self, group: int, node: Node, medium: str) -> BlockStored:
        kind, window = self._kinds[group]
        event = BlockStored(
            block_hashes=[],
            parent_block_hash=hash_of(node.parent.key) if isinstance(node.parent, Node) else None,
            token_ids=[],
            block_size=self._block_size,
            lora_id=None,
            medium=medium,
            lora_name=self._adapter_of(node),
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )
        if node.salt:
            event.extra_keys = []
        self._extend(event, node)
        return event

    def _extend(self, event: BlockStored, node: Node) -> None:
        event.block_hashes.append(hash_of(node.key))
        event.token_ids += node.ids
        if event.extra_keys is not None:
            keys = (event.lora_name,) if event.lora_name is not None else ()
            if not isinstance(node.parent, Node) and parts_of_salt(node.salt)[1]:
                keys = (*keys, self._index.root_key(parts_of_salt(node.salt)[1]).hex()[:_SALT_DIGITS])
            event.extra_keys.append(keys or None)

    def _adapter_of(self, node: Node) -> str | None:
        digest = parts_of_salt(node.salt)[0]
        if not digest:
            return None
        return next((name for held, name in self._adapters.values() if held == digest), digest)
