"""KV events: which blocks the prefix index holds, for gateways that send a prompt to where its prefix is cached.

The types and their encoding are those of vLLM (`vllm/distributed/kv_events.py`). An event is a map whose "type" names
it. Each replica publishes at an endpoint of its own. Knows no sockets and no index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

GroupKind = Literal["full_attention", "sliding_window", "mamba"]
"""Kinds of cache groups. The recurrent states of any family are "mamba"."""

Encoded = msgspec.Raw
"""Encoded events."""

_BATCH_BYTES = 32 * 1024
"""Bytes of events after which another batch begins. An event has at most `MAX_EVENT_TOKENS`, some 24 KiB."""
MAX_EVENT_TOKENS = 4096


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """A chain of blocks can be found from now on. The first follows `parent_block_hash`."""

    block_hashes: list[int]
    """Last 64 bits of each block's key."""
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    """Always None: `lora_name` takes its place."""
    medium: str
    """Memory of the blocks."""
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """For each block what the hash depends on beside the ids: the adapter's name, and in the first block of a sequence
    a digest of the salt."""
    group_idx: int | None = None
    kv_cache_spec_kind: GroupKind | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """These blocks of a group can no longer be found."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared

_ENCODER = msgspec.msgpack.Encoder()


def encode_events(events: Iterable[KVEvent]) -> Iterator[msgspec.Raw]:
    """The events as arrays of at most some 64 KiB."""
    parts: list[msgspec.Raw] = []
    num_bytes = 0
    for event in events:
        parts.append(msgspec.Raw(_ENCODER.encode(event)))
        num_bytes += len(parts[-1])
        if num_bytes >= _BATCH_BYTES:
            yield msgspec.Raw(_ENCODER.encode(parts))
            parts, num_bytes = [], 0
    if parts:
        yield msgspec.Raw(_ENCODER.encode(parts))


CLEARED = next(encode_events([AllBlocksCleared()]))
"""The batch that says that a cache is empty."""


def with_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a replica: its index is added to the port, or to the name of a socket file."""
    if not rank:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}" if endpoint.startswith("tcp://") else f"{endpoint}_dp{rank}"


class Batch(msgspec.Struct, array_like=True, gc=False):
    """One message to subscribers."""

    ts: float
    """Unix seconds."""
    events: msgspec.Raw
    data_parallel_rank: int
    """Index of the replica."""


def encode_batch(ts: float, events: msgspec.Raw, rank: int) -> bytes:
    return _ENCODER.encode(Batch(ts, events, rank))
