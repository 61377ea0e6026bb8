"""The tiers that an engine has below its KV pool: host memory if the pool lies on a GPU, and behind it a directory.

It puts them together from the engine's settings, and says which bytes of another engine mean the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.kv_store.directory import KVDirectory
from inferd.engine.api.wire.messages import Ready
from inferd.engine.cache.table import KVCache
from inferd.engine.process.host_store import HostStore
from inferd.engine.process.kv_host import HostTier
from inferd.engine.process.kv_tier import DirectoryTier

if TYPE_CHECKING:
    from inferd.engine.worker.runner import Runner

_COMPUTE_ON_GPUS = ("torch", "triton", "nvidia-", "flash", "cuda-")
"""Beginnings of the names of packages whose code computes on a GPU."""


def tier_of(config: EngineConfig, ready: Ready, worker: Runner, cache: KVCache) -> HostTier | DirectoryTier | None:
    """The first tier below the pool; None if the settings ask for none, or nothing is found by its prefix."""
    if not (config.kv_dir or config.kv_host_bytes) or not cache.shares_prefixes:
        return None
    directory: DirectoryTier | None = None
    num_groups, num_checkpoints = len(cache.windows), 0 if cache.states is None else cache.states.pool.num_blocks
    copied = worker.copied(cache.pool.num_blocks, num_checkpoints)
    if config.kv_dir:
        memory = worker.ledger or copied
        opened = partial(KVDirectory, Path(config.kv_dir), config.kv_disk_bytes)
        fingerprint = _fingerprint(config, ready, memory.row_layout)
        directory = DirectoryTier(opened, memory, cache.num_erased, num_groups, fingerprint)
    if not config.kv_host_bytes:
        return directory
    store = HostStore(config.kv_host_bytes, copied.block_bytes, copied.allocate)
    return HostTier(store, copied, cache.num_erased, num_groups, directory)


def _fingerprint(config: EngineConfig, ready: Ready, row_layout: str) -> bytes:
    """A hash of all that the bytes of a KV block depend on, without its tokens and its salt."""
    # The digest of a large file covers a part of it. Times and inode show that the rest was written to.
    files = [(file.digest, file.num_bytes, file.mtime_ns, file.inode, file.ctime_ns) for file in config.files]
    layout = config.block_size, config.rope_positions, config.modelled, row_layout
    facts = ready.numerics, files, layout
    # On a CPU the numerics name the library of kernels by its sources. A GPU's kernels are compiled by what is
    # installed, and libraries compute as well.
    software = () if config.device == "cpu" else (sorted(set(_installed())), config.attention_libs)
    return hashlib.blake2b(msgspec.json.encode((*facts, *software)), digest_size=32).digest()


def _installed() -> Iterator[tuple[str, str]]:
    """(name, version) of the packages whose code computes on a GPU."""
    for found in distributions():
        name = (found.metadata["Name"] or "").lower()
        if name.startswith(_COMPUTE_ON_GPUS):
            yield name, found.version
