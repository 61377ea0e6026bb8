"""A subscriber to KV events, written from vLLM's definitions alone. It keeps what a gateway would believe is cached."""

from __future__ import annotations

from typing import Any

import msgspec


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True, forbid_unknown_fields=True):
    """vLLM's base class. It does not forbid unknown fields: a field that vLLM lacks is a mistake of ours."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


Held = dict[tuple[int | None, bytes | int], tuple[int, ...]]
"""(cache group, block hash) -> the block's token ids."""

_EVENTS = msgspec.msgpack.Decoder(list[BlockStored | BlockRemoved | AllBlocksCleared])
_BATCH = msgspec.msgpack.Decoder(KVEventBatch)


class Mirror:
    """The blocks that a cache has, as far as its events say. A block may not be stored twice, or removed if absent."""

    def __init__(self) -> None:
        self.held: Held = {}

    def read(self, batch: bytes) -> KVEventBatch:
        """Follow one message of a PUB socket."""
        read = _BATCH.decode(batch)
        for event in read.events:
            self._follow(event)
        return read

    def read_events(self, events: bytes) -> None:
        """Follow the events of a message alone."""
        for event in _EVENTS.decode(events):
            self._follow(event)

    def _follow(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self.held.clear()
            return
        for i, block_hash in enumerate(event.block_hashes):
            name = event.group_idx, block_hash
            if isinstance(event, BlockRemoved):
                assert name in self.held, f"{name} is removed, and was not there"
                del self.held[name]
            else:
                assert name not in self.held, f"{name} is stored twice"
                assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                self.held[name] = tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
