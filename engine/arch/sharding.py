"""Tensor parallelism as arithmetic: which rows and columns of each matrix one of several ranks keeps.

Attention is split by heads, and its cache with it. Norms and the embedding are whole on every rank. Every matrix is
split by its outputs. So a rank computes some of the outputs, each by the same sum as one process. It gathers the
others' outputs before a matrix that reads all of them.

If results may differ from those of one process, `o` and `down` can be split by their inputs instead. The ranks then add
up their parts of the outputs, and exchange half as often. Knows no process and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from inferd.engine.arch.description import Arch, QKNorm
from inferd.engine.arch.heads import Heads
from inferd.engine.arch.matrices import attention, expert, kv_axis, mlp, shared_expert
from inferd.engine.arch.matrix import Axis, LinearWeight, Weight
from inferd.engine.arch.stored import BLOCK, Format, is_in_blocks

Span = tuple[int, int]
"""Rows from the first to before the second."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the `count` processes that compute one model together."""

    index: int = 0
    count: int = 1
    splits_inputs: bool = False
    """Whether `o` and `down` are split by their inputs."""

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the biases of matrices that are split by their inputs."""
        return self.index == 0

    def width(self, size: int) -> int:
        """Number of consecutive outputs of `size` that each rank has. The last rank may have fewer."""
        return -(-size // self.count)

    def span(self, size: int) -> Span:
        """The outputs that this rank has of `size`."""
        width = self.width(size)
        return min(self.index * width, size), min((self.index + 1) * width, size)

    def heads(self, arch: Arch) -> Span:
        """The heads that this rank computes."""
        return self.span(arch.num_heads)

    def kv_heads(self, heads: Heads) -> Span:
        """The heads of K and V that this rank computes and caches. If there are more ranks than such heads, several
        ranks have the same one."""
        return self._units(kv_axis(heads))

    def share(self, axis: Axis) -> Span:
        """The part of an axis that this rank keeps."""
        if not axis.num_units:
            return 0, axis.size
        (start, end), unit = self._units(axis), axis.size // axis.num_units
        return start * unit, end * unit

    def rows(self, weight: Weight) -> tuple[Span, ...]:
        """The rows that this rank keeps of a tensor, ascending."""
        if isinstance(weight, LinearWeight) and self.columns(weight) is not None:
            return ((0, weight.num_rows),)
        if not any(axis.num_units for axis in weight.rows):
            return ((0, weight.num_rows),)
        firsts = accumulate((axis.size for axis in weight.rows), initial=0)
        spans = (self.share(axis) for axis in weight.rows)
        return tuple((first + start, first + end) for first, (start, end) in zip(firsts, spans, strict=False))

    def columns(self, matrix: LinearWeight) -> Span | None:
        """The inputs of a matrix that this rank keeps; None: all."""
        if matrix.split_inputs is None or not self.splits_inputs:
            return None
        return self.share(matrix.split_inputs)

    def _units(self, axis: Axis) -> Span:
        if axis.repeats and self.count > axis.num_units:
            unit = self.index * axis.num_units // self.count
            return unit, unit + 1
        return self.span(axis.num_units)


ONE_RANK = Rank()


def num_rows(spans: tuple[Span, ...]) -> int:
    return sum(end - start for start, end in spans)


def within(rows: Iterable[Span], first: int, size: int) -> tuple[Span, ...]:
    """Those of `rows` that lie in first .. first + size, counted from `first`."""
    cut = ((max(start - first, 0), min(end - first, size)) for start, end in rows)
    return tuple((start, end) for start, end in cut if start < end)


def counts_of(arch: Arch) -> tuple[int, ...]:
    """The numbers of ranks that can compute this model."""
    return tuple(count for count in range(1, arch.num_heads + 1) if refuses(arch, count) is None)


def refuses(arch: Arch, count: int) -> str | None:
    """Why so many ranks cannot compute this model; None if they can."""
    if count == 1:
        return None
    if arch.recurrent is not None:
        return "its recurrent layers are computed by one process"
    if arch.num_heads % count:
        return f"{count} does not divide its {arch.num_heads} attention heads"
    if (reason := _refuses_kv(arch, count)) is not None:
        return reason
    mlp_size = min((arch.intermediate_size, *arch.mlp_sizes))
    sizes = {"hidden size": arch.hidden_size, "vocabulary": arch.vocab_size, "MLP": mlp_size}
    if arch.experts is not None:
        sizes["experts' MLP"] = arch.experts.intermediate_size
        sizes["shared expert's MLP"] = arch.experts.shared_size or arch.hidden_size
    for what, size in sizes.items():
        if Rank(count - 1, count).span(size) == (size, size):
            return f"its {what} of {size} leaves nothing to the last of {count} ranks"
    return _refuses_blocks(arch, count)


def _refuses_kv(arch: Arch, count: int) -> str | None:
    for heads in dict.fromkeys(arch.heads(layer) for layer in arch.attention_layers):
        num_kv_heads = heads.num_kv_heads
        if num_kv_heads % count and count % num_kv_heads:
            return f"{count} ranks cannot share its {num_kv_heads} heads of K and V evenly"
        if arch.qk_norm is QKNorm.PROJECTION and heads.kv_size % count:
            return f"its norm of k needs equal parts of {heads.kv_size} numbers from {count} ranks"
    plane = _own_kv_size(arch.widest_heads, count)
    if any(group.num_sharing * _own_kv_size(arch.heads(group.layers[0]), count) > plane for group in arch.cache_groups):
        return f"{count} ranks would have heads of K and V of some layers twice, and these fit no space of the others"
    return None


def _own_kv_size(heads: Heads, count: int) -> int:
    """Size of K of one of so many ranks."""
    start, end = Rank(0, count).kv_heads(heads)
    return (end - start) * heads.head_dim


def _refuses_blocks(arch: Arch, count: int) -> str | None:
    """Blocks of FP8 have one scale for `BLOCK` rows, so a rank must keep whole blocks."""
    if arch.stored is None or not any(form is not None and is_in_blocks(form) for form in _formats(arch)):
        return None
    rank = Rank(1, count)
    layers = arch.attention_layers if arch.layer_heads else arch.attention_layers[:1]
    qkvs, os = zip(*(attention(arch, layer) for layer in layers), strict=True)
    befores, downs = zip(*(mlp(arch, layer) for layer in layers), strict=True)
    experts: tuple[LinearWeight, ...] = ()
    if arch.experts is not None:
        experts = expert(arch, layers[0], 0)
        experts += shared_expert(arch, layers[0]) if arch.experts.shared_size else ()
    for matrix in (*qkvs, *befores, os[0], downs[0], *experts):
        if any(start % BLOCK or (end - start) % BLOCK for start, end in rank.rows(matrix)):
            return f"{count} ranks would cut its FP8 blocks of {BLOCK} rows in {matrix.kind}"
    return None


def _formats(arch: Arch) -> Iterator[Format | None]:
    assert arch.stored is not None
    yield from (arch.stored.layers, arch.stored.head, *(form for _, form in arch.stored.exceptions))
