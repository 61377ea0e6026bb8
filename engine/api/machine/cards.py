"""GPUs that people own, for plans on machines that have none: what `inferd plan --device rtx3090` counts with.

Memory is what the driver shows. Bandwidth and multiprocessors are those that NVIDIA publishes.
"""

from __future__ import annotations

from dataclasses import dataclass

from inferd.engine.api.errors import ConfigError
from inferd.engine.api.machine.gpu import Accelerator
from inferd.kernels.device import DeviceProperties

_MIB = 2**20
_MOST_GPUS = 16
"""GPUs of a kind that a plan may share a model among."""


@dataclass(frozen=True, slots=True)
class Card:
    """A kind of GPU."""

    name: str
    memory_bytes: int
    read_bytes_per_s: float
    """Published bandwidth of its memory."""
    properties: DeviceProperties

    @property
    def accelerator(self) -> Accelerator:
        """The card with nothing else on it, and others like it beside it."""
        capability, num_bytes = divmod(self.properties.sm, 10), self.memory_bytes
        return Accelerator(self.name, capability, num_bytes, num_bytes, (num_bytes,) * (_MOST_GPUS - 1))

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.memory_bytes / 2**30:.1f} GiB, reads {self.read_bytes_per_s / 1e9:,.0f} GB/s, "
            f"{self.properties}"
        )


def _card(name: str, memory_mib: int, gb_per_s: int, sm: int, num_multiprocessors: int) -> Card:
    return Card(name, memory_mib * _MIB, gb_per_s * 1e9, DeviceProperties.of(sm, num_multiprocessors))


CARDS = {
    "rtx3060": _card("GeForce RTX 3060", 12288, 360, 86, 28),
    "rtx3090": _card("GeForce RTX 3090", 24576, 936, 86, 82),
    "a10": _card("A10", 23028, 600, 86, 72),
    "a6000": _card("RTX A6000", 49140, 768, 86, 84),
    "rtx4090": _card("GeForce RTX 4090", 24564, 1008, 89, 128),
    "l4": _card("L4", 23034, 300, 89, 58),
    "l40s": _card("L40S", 46068, 864, 89, 142),
    "rtx5090": _card("GeForce RTX 5090", 32607, 1792, 120, 170),
    "a100-40gb": _card("A100 40GB", 40960, 1555, 80, 108),
    "a100": _card("A100 80GB SXM", 81920, 2039, 80, 108),
    "h100": _card("H100 SXM", 81559, 3350, 90, 132),
    "h200": _card("H200", 143771, 4800, 90, 132),
    "b200": _card("B200", 183359, 8000, 100, 148),
}
"""By the name that `--device` takes."""


def card(name: str) -> Card:
    """Raises `ConfigError` for a card that is not listed."""
    found = CARDS.get(name.lower().replace("_", "-"))
    if found is None:
        raise ConfigError(f"--device must be auto, cpu, cuda or one of {', '.join(CARDS)}, but got {name!r}")
    return found
