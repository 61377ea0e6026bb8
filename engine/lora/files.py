"""Reads the weights of an adapter whose files `engine/api/adapter` checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from inferd.engine.api.adapter import WEIGHTS, read_adapter
from inferd.engine.api.errors import ModelError
from inferd.engine.api.pinned_files import source_of
from inferd.engine.arch.description import Arch
from inferd.engine.arch.registry import weights


@dataclass(frozen=True, slots=True)
class Update:
    """Weights that an adapter adds to one module: scale * B A."""

    matrix: str
    """Our matrix that holds the module: `layers.0.attention.qkv`."""
    part: int
    """Number of the matrix's modules before this one."""
    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank]"""
    scale: float


def read_updates(path: Path, digest: str, arch: Arch, max_rank: int) -> list[Update]:
    """Raises `ModelError` if the files are not those that `digest` was made from, or hold NaN or infinities."""
    files, updates = read_adapter(path, arch, max_rank), list[Update]()
    modules = weights(arch).modules()
    if files.digest != digest:
        raise ModelError(f"the adapter in {path} has changed since it was loaded: unload it, and load it again")
    try:
        with safe_open(source_of(path / WEIGHTS), framework="pt") as tensors:
            for low in files.updates:
                a, b = (tensors.get_tensor(name) for name in (low.a, low.b))
                for name, tensor in ((low.a, a), (low.b, b)):
                    if not tensor.isfinite().all():
                        raise ModelError(
                            f"{path / WEIGHTS}: {name} must hold finite numbers, but holds NaN or infinity"
                        )
                row_order = modules[low.matrix][low.part].row_order
                b = b if row_order is None else b[row_order.order(len(b))]
                updates.append(Update(low.matrix, low.part, a, b, low.scale))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path / WEIGHTS} cannot be read: {error}") from error
    return updates
