"""The formats of GGUF matrices: in which layout a kernel multiplies by the blocks of each type.

All blocks keep their numbers and their scales, at least on CPUs: see `IntLayout.on_gpu`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from inferd.engine.arch.description import Arch
from inferd.engine.arch.encoder import EncoderArch
from inferd.engine.arch.gguf.orders import Order, TiledHeads
from inferd.engine.arch.gguf.tensors import PlacedTensor
from inferd.engine.arch.stored import IntLayout, Stored, StoredTensor
from inferd.engine.arch.tensors import EMBEDDING, HEAD
from inferd.engine.arch.weights import WeightMap

LAYOUTS: Mapping[str, IntLayout] = {
    "Q4_0": IntLayout(4, 32, "F16"),
    "Q4_1": IntLayout(4, 32, "F16", "minimums"),
    "Q4_K": IntLayout(4, 32, "F16", "minimums", block_size=256),
    "IQ4_NL": IntLayout(4, 32, "F16", table="iq4nl"),
    "IQ4_XS": IntLayout(4, 32, "F16", table="iq4nl", block_size=256),
    "MXFP4": IntLayout(4, 32, "BF16", table="e2m1"),
    "Q8_0": IntLayout(8, 32, "F16"),
    "Q2_K": IntLayout(2, 16, "F16", "minimums", block_size=256),
    "Q3_K": IntLayout(3, 16, "F16", block_size=256),
    "Q5_0": IntLayout(5, 32, "F16"),
    "Q5_1": IntLayout(5, 32, "F16", "minimums"),
    "Q5_K": IntLayout(5, 32, "F16", "minimums", block_size=256),
    "Q6_K": IntLayout(6, 16, "F16", block_size=256),
}
"""Layout of each type of blocks. The others hold numbers that are not quantized."""


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """Blocks of one type. Rows and columns may have another order than those of the original: see `Conversion`."""

    kind: str
    """Name of the type."""
    rows: Order | None = None
    columns: TiledHeads | None = None
    """None, or an order of whole groups, and of whole blocks that share a factor."""

    @property
    def name(self) -> str:
        return "gguf"

    @property
    def layout(self) -> IntLayout:
        return LAYOUTS[self.kind]

    def tensors(self, out_size: int, in_size: int) -> tuple[StoredTensor, ...]:
        return (StoredTensor("weight", (out_size, in_size), (self.kind,)),)

    def refuses(self, out_size: int, in_size: int) -> str | None:
        """The header was refused if a row is no whole number of blocks."""
        return None

    def found(self, dtypes: Mapping[str, str]) -> GgufBlocks:
        return self


def with_blocks(arch: Arch, matrices: WeightMap, tensors: Mapping[str, PlacedTensor]) -> Arch:
    """`arch` with matrices that keep their blocks. `matrices`: its weights, `tensors` by the original names.

    The head keeps the blocks of the embedding if it is tied, and the map has it as a matrix of its own.
    """
    modules = [source.tensor.removesuffix(".weight") for source in matrices.sources if source.may_be_quantized]
    head = _format(tensors.get(EMBEDDING if arch.tie_embeddings else HEAD))
    stored = Stored.of({module: _format(tensors.get(f"{module}.weight")) for module in modules}, head)
    if stored.layers is None and head is None:
        return arch
    stored = replace(stored, embedding=_format(tensors.get(EMBEDDING)), shares_head=arch.tie_embeddings)
    return replace(arch, stored=stored, tie_embeddings=arch.tie_embeddings and head is None)


def encoder_with_blocks(arch: EncoderArch, matrices: WeightMap, tensors: Mapping[str, PlacedTensor]) -> EncoderArch:
    """The same of an encoder. Its tables and its classifier are dequantized."""
    modules = [source.tensor.removesuffix(".weight") for source in matrices.sources if source.may_be_quantized]
    stored = Stored.of({module: _format(tensors.get(f"{module}.weight")) for module in modules}, head=None)
    return arch if stored.layers is None else replace(arch, stored=stored)


def in_words(arch: Arch | EncoderArch, tensors: Iterable[PlacedTensor]) -> str:
    """The types of blocks in a file, and whether they are kept or dequantized; "" if it has none."""
    stored = arch.stored
    forms = (
        ()
        if stored is None
        else (stored.layers, stored.head, stored.embedding, *(form for _, form in stored.exceptions))
    )
    served = {form.kind for form in forms if isinstance(form, GgufBlocks)}
    kinds = sorted({placed.tensor.type.name for placed in tensors} & LAYOUTS.keys())
    fates = {
        "kept": [kind for kind in kinds if kind in served],
        "dequantized": [kind for kind in kinds if kind not in served],
    }
    return "; ".join(f"{', '.join(own)} {fate}" for fate, own in fates.items() if own)


def _format(found: PlacedTensor | None) -> GgufBlocks | None:
    """The format of a matrix; None if it has no blocks, or its columns have an order that cuts a group. None too if it
    is missing, which the comparison of names reports."""
    if found is None or found.tensor.type.name not in LAYOUTS:
        return None
    kind, columns = found.tensor.type.name, found.conversion.columns
    group_size = LAYOUTS[kind].block_size or LAYOUTS[kind].group_size
    if columns is not None and (group_size is None or columns.of_groups(group_size) is None):
        return None
    return GgufBlocks(kind, found.conversion.rows, columns)
