"""Tensor parallelism as arithmetic: which rows and columns of each matrix one of several ranks keeps.

Attention is split by heads, and its cache with it. Norms and the embedding are whole on every rank. Every matrix is
split by its outputs. So a rank computes some of the outputs, each by the same sum as one process. It gathers the
others' outputs before a matrix that reads all of them.

If results may differ from those of one process, `o` and `down` can be split by their inputs instead. The ranks then add
up their parts of the outputs, and exchange half as often. Knows no process and no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from inferd.engine.arch.description import Arch, QKNorm
from inferd.engine.arch.heads import Heads
from inferd.engine.arch.stored import BLOCK, Format, is_in_blocks

_LAYER = re.compile(r"layers\.(\d+)\.")
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
        """Whether this rank adds the biases of `o` and `down` to its part of their outputs."""
        return self.index == 0 or not self.splits_inputs

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
        if self.count <= heads.num_kv_heads:
            return self.span(heads.num_kv_heads)
        head = self.index * heads.num_kv_heads // self.count
        return head, head + 1

    def rows(self, arch: Arch, matrix: str) -> tuple[Span, ...]:
        """The rows that this rank keeps of a matrix, ascending. `matrix` is our name of it. It may lack its layer if
        all layers are alike."""
        match matrix.rpartition(".")[2]:
            case "qkv":
                return tuple(self._qkv_rows(arch, _layer_of(arch, matrix)))
            case "gate_up":
                size = _mlp_size(arch, matrix)
                start, end = self.span(size)
                return (start, end), (size + start, size + end)
            case "up":
                return (self.span(arch.intermediate_size),)
            case "gate" | "projection" | "layer_projection":
                return ((0, _layer_input_size(arch, matrix)),)
            case "router" | "expert_scales":
                assert arch.experts is not None
                return ((0, arch.experts.num_experts),)
            case "shared_gate":
                return ((0, 1),)
            case "sinks":
                return (self.heads(arch),)
            case "o" | "down":
                return ((0, arch.hidden_size),) if self.splits_inputs else (self.span(arch.hidden_size),)
            case "lm_head":
                return (self.span(arch.vocab_size),)
        raise AssertionError(f"{matrix} is no matrix that ranks split")

    def columns(self, arch: Arch, matrix: str) -> Span | None:
        """The inputs of `o` or `down` that this rank keeps; None: all. `matrix` is as in `rows`."""
        if not self.splits_inputs:
            return None
        kind = matrix.rpartition(".")[2]
        if kind == "down":
            return self.span(_mlp_size(arch, matrix))
        assert kind == "o"
        first, last = self.heads(arch)
        head_dim = arch.heads(_layer_of(arch, matrix)).head_dim
        return first * head_dim, last * head_dim

    def _qkv_rows(self, arch: Arch, layer: int) -> Iterator[Span]:
        heads, first = arch.heads(layer), 0
        counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        spans = (self.heads(arch), self.kv_heads(heads), self.kv_heads(heads))
        for (start, end), size, count in zip(spans, arch.qkv_sizes(layer), counts, strict=False):
            yield first + start * size // count, first + end * size // count
            first += size


ONE_RANK = Rank()


def _mlp_size(arch: Arch, matrix: str) -> int:
    """The intermediate size of an expert or of the shared one, if the matrix is one of its, or of the MLP."""
    if arch.experts is not None and "experts." in matrix:
        return arch.experts.intermediate_size
    if arch.experts is not None and "shared." in matrix:
        return arch.experts.shared_size
    return arch.mlp_size(_layer_of(arch, matrix))


def _layer_input_size(arch: Arch, matrix: str) -> int:
    """Number of rows of a matrix that computes or uses the inputs of layers, which every rank has whole."""
    if matrix == "layer_projection":
        return arch.num_layers * arch.layer_input_size
    return arch.layer_input_size if matrix.endswith(".gate") else arch.hidden_size


def _layer_of(arch: Arch, matrix: str) -> int:
    """The layer of a matrix, or one like it."""
    found = _LAYER.match(matrix)
    assert found is not None or not arch.layer_heads, f"the rows of {matrix} depend on its layer"
    return arch.attention_layers[0] if found is None else int(found[1])


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
    experts: tuple[str, ...] = ()
    if arch.experts is not None:
        experts = ("experts.gate_up", "experts.down")
        experts += ("shared.gate_up", "shared.down") if arch.experts.shared_size else ()
    layers = arch.attention_layers if arch.layer_heads else arch.attention_layers[:1]
    qkv = (f"layers.{layer}.attention.qkv" for layer in layers)
    mlp = (f"layers.{layer}.mlp.{'gate_up' if arch.has_gate else 'up'}" for layer in layers)
    for matrix in (*qkv, *mlp, "o", "down", *experts):
        kept = rank.rows(arch, matrix)
        if any(start % BLOCK or (end - start) % BLOCK for start, end in kept):
            return f"{count} ranks would cut its FP8 blocks of {BLOCK} rows in {matrix.rpartition('.')[2]}"
    return None


def _formats(arch: Arch) -> Iterator[Format | None]:
    assert arch.stored is not None
    yield from (arch.stored.layers, arch.stored.head, *(form for _, form in arch.stored.exceptions))
