"""A loaded model: its decoder, and all that its steps read and write on the device."""

from __future__ import annotations

from dataclasses import dataclass

from inferd.engine.lora.adapters import Adapters
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.pooled_heads import NO_HEADS, PooledHeads
from inferd.engine.sample.sampler import Sampler
from inferd.engine.worker.device import Device
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.slots import Slots
from inferd.engine.worker.states import StatePool


@dataclass(frozen=True, slots=True)
class LoadedModel:
    decoder: Decoder
    kv: KVPool
    slots: Slots
    """The running requests. Those of a draft model have the block tables of one group."""
    sampler: Sampler
    device: Device
    is_deterministic: bool = True
    """Otherwise a GPU may use other kernels for long chunks of a prompt than for short ones, and compute attention by a
    library. It may also add up a row's keys in an order that depends on the other rows."""
    states: StatePool | None = None
    """Those of a model with recurrent layers."""
    adapters: Adapters | None = None
    """Those that rows may have."""
    heads: PooledHeads = NO_HEADS
    """Those that change pooled vectors."""
