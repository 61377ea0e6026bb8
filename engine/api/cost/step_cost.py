"""The work of a step: its FLOPs, and the bytes that must pass between memory and processor. It is counted from the
model's description and the step's rows.

A row starts at position s and has n tokens. A step has T tokens, and R of them need logits. FLOPs are the sum of:

- 2 T (weights of the layers' matrices; of experts those that a token goes to)
- 2 R hidden vocabulary
- 4 heads head_dim (pairs), over all layers
- 6 T (numbers in the recurrent state, over all layers)

Bytes are the sum of:

- weights of the layers, as stored                 (once a step, without experts)
- E (1 - (1 - k / E)^T) (an expert's weights)      (experts that T tokens choose)
- weights of the head, as stored                   (once a step with R > 0)
- T (hidden + inputs of layers) dtype              (embedding rows)
- T 2 KV heads head                                (KV written, over all layers with their own)
- 2 state                                          (recurrent state of each row, read and written)
- 2 KV heads head (keys, over all layers)          (KV read)
- 8 R vocabulary                                   (fp32 logits, written and read)

In these sums:

- dtype, hidden and vocabulary are sizes. A head of K or V has head_dim numbers in the dtype, or in 8 bits and a scale.
- A pair is a query and a key that it sees. A row has min(p + 1, w) pairs for each position p, with a window of w;
  without a window p + 1.
- Each token chooses k of E experts. How many T tokens choose together is the expectation if all are chosen alike.
- Keys are those that any query of a row sees: min(s + n, n - 1 + w). They are read once for each row, so a prefix that
  rows share counts for each of them.
- An addition and a multiplication are two operations.

The count is what a perfect implementation must do too. Left out are:

- biases, norms, rotations, activation functions, softmax and sampling: about a percent of the FLOPs of a large model,
  and not done by the units that multiply matrices;
- activations between kernels, which caches hold;
- LoRA adapters, of which the model's description knows nothing;
- rows that only pad a recorded step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol, Self

from inferd.engine.api.cost.roofline import Peaks, StepPhase
from inferd.engine.api.memory.planner import weight_lines
from inferd.engine.api.memory.precision import Precision
from inferd.engine.api.memory.states import num_state_numbers, state_bytes
from inferd.engine.arch.description import Arch
from inferd.engine.arch.encoder import EncoderArch
from inferd.engine.arch.encoder_registry import weights_of
from inferd.engine.arch.heads import Heads
from inferd.engine.arch.matrix import Component, LinearWeight
from inferd.engine.arch.registry import weights
from inferd.engine.arch.weights import WeightMap

_STATE_FLOPS = 6
"""Operations for each number of a recurrent state and each token: two to read it by the key, to change it, and to read
it by the query. Forgetting is left out, as activation functions are."""
_LOGIT_BYTES = 8
"""Bytes for each logit: fp32, written by the head and read by the sampler."""


class StepWork(NamedTuple):
    """The work of one step."""

    phase: StepPhase
    flops: int
    num_bytes: int

    def and_also(self, more: StepWork) -> StepWork:
        """The work of both, in this one's phase."""
        return StepWork(self.phase, self.flops + more.flops, self.num_bytes + more.num_bytes)


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """The attention of all layers that see the same keys."""

    window: int | None
    """Number of last positions that a query sees, its own included; None for all."""
    pair_flops: int
    """FLOPs for a query and a key, in all these layers."""
    key_bytes: int
    """Bytes of a position's K and V, in all these layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkModel:
    """Costs of a model's steps, for each token, row, pair and key. By default all costs are 0."""

    token_flops: int = 0
    token_bytes: int = 0
    """Bytes of the embedding row, and of the K and V that all layers write."""
    row_bytes: int = 0
    """Bytes of the recurrent state, which each row reads and writes."""
    logits_flops: int = 0
    logits_bytes: int = 0
    """Bytes of one token's logits, without the head's weights."""
    weight_bytes: int = 0
    """Bytes of layers and norms, biases included, which every step reads. Without experts."""
    num_experts: int = 0
    num_chosen: int = 0
    """Number of experts that a token goes to."""
    expert_bytes: int = 0
    """Bytes of one expert, in all layers that have experts."""
    head_bytes: int = 0
    """Bytes of the head, which steps with logits read."""
    attention: tuple[AttentionCost, ...] = ()
    draws_tokens: bool = True
    """Whether a row of one token may follow a prompt. Those of an encoder are texts, so that its steps are prefill."""

    @classmethod
    def of(cls, arch: Arch | EncoderArch, precision: Precision, max_model_len: int) -> Self:
        """Costs of a model. A window that is at least `max_model_len` long counts as none."""
        if isinstance(arch, EncoderArch) or arch.is_bidirectional:
            return cls._of_encoder(arch, precision, max_model_len)
        dtype_bytes = precision.dtype_bytes.value
        parts = {part.name: part.num_bytes for part in weight_lines(arch, precision)}
        layers, embedded = arch.attention_layers, arch.hidden_size + arch.num_layers * arch.layer_input_size
        kv_bytes = {layer: _kv_bytes(arch.heads(layer), precision) for layer in layers}
        return cls(
            token_flops=2 * _active_weights(arch) + _STATE_FLOPS * num_state_numbers(arch),
            token_bytes=embedded * dtype_bytes + sum(kv_bytes[layer] for layer in arch.kv_layers),
            row_bytes=2 * state_bytes(arch, precision).value,
            logits_flops=2 * arch.hidden_size * arch.num_logits,
            logits_bytes=_LOGIT_BYTES * arch.vocab_size,
            weight_bytes=sum(parts.get(part, 0) for part in Component if part.is_read_by_all),
            **_experts_of(arch, parts.get(Component.EXPERTS, 0)),
            head_bytes=parts.get(Component.HEAD, 0),
            draws_tokens=True,
            attention=tuple(
                AttentionCost(
                    window, sum(4 * arch.heads(layer).q_size for layer in own), sum(kv_bytes[layer] for layer in own)
                )
                for window, own in _by_window(arch, max_model_len).items()
            ),
        )

    @classmethod
    def _of_encoder(cls, arch: EncoderArch | Arch, precision: Precision, max_model_len: int) -> Self:
        """Costs of an encoder, whose tokens see those on both sides: twice the pairs with the keys up to a token."""
        parts = {part.name: part.num_bytes for part in weight_lines(arch, precision)}
        sizes = Counter[int | None]()
        for layer in range(arch.num_layers):
            own_size = arch.attention_size if isinstance(arch, EncoderArch) else arch.heads(layer).q_size
            sizes[arch.window(layer)] += own_size
        weight_map = weights_of(arch)
        num_weights = _matrix_weights(weight_map, without=(Component.HEAD,))
        if isinstance(arch, EncoderArch):  # layers may have the same weights
            outside = (Component.HEAD, Component.PROJECTION)
            num_weights += (arch.num_uses - 1) * _matrix_weights(weight_map, without=outside)
        else:
            num_weights -= arch.num_idle_weights
        return cls(
            token_flops=2 * num_weights,
            token_bytes=arch.hidden_size * precision.dtype_bytes.value,
            weight_bytes=sum(parts.get(part, 0) for part in Component if part.is_read_by_all),
            draws_tokens=False,
            attention=tuple(
                AttentionCost(
                    None if window is None or window + 1 >= max_model_len else window + 1,
                    2 * 4 * size,
                    0,
                )
                for window, size in sizes.items()
            ),
        )

    def step(
        self, starts: Sequence[int], counts: Sequence[int], num_logits: int, num_states: int | None = None
    ) -> StepWork:
        """Work of a step whose row i computes positions `starts[i] .. starts[i] + counts[i]`, with at least one row.

        `num_logits`: number of tokens with logits, for sampling or for prompt logprobs. `num_states`: how many times a
        recurrent state is read and written; None for once a row.
        """
        num_tokens = sum(counts)
        phase: StepPhase = "decode" if self.draws_tokens else "prefill"
        singles, chunks = starts, list[tuple[int, int]]()
        if num_tokens > len(counts):
            chunks = [(start, count) for start, count in zip(starts, counts, strict=True) if count > 1]
            singles = [start for start, count in zip(starts, counts, strict=True) if count == 1]
            phase = "mixed" if singles and self.draws_tokens else "prefill"
        flops = num_tokens * self.token_flops + num_logits * self.logits_flops
        num_bytes = num_tokens * self.token_bytes + (len(counts) if num_states is None else num_states) * self.row_bytes
        num_bytes += self.weight_bytes + self.experts_bytes(num_tokens)
        if num_logits:
            num_bytes += num_logits * self.logits_bytes + self.head_bytes
        for layers in self.attention:
            num_pairs, num_keys = _visible(singles, chunks, layers.window)
            flops += num_pairs * layers.pair_flops
            num_bytes += num_keys * layers.key_bytes
        return StepWork(phase, flops, num_bytes)

    def experts_bytes(self, num_tokens: int) -> int:
        """Bytes of the experts that so many tokens are expected to choose."""
        if not self.num_experts:
            return 0
        share = 1 - (1 - self.num_chosen / self.num_experts) ** num_tokens
        return round(self.num_experts * share * self.expert_bytes)

    def weights_read(self, num_tokens: int) -> int:
        """Bytes of weights that a step of so many tokens reads, each with its logits."""
        return self.weight_bytes + self.head_bytes + self.experts_bytes(num_tokens)

    def seconds(self, peaks: Peaks) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Coefficients of the step-time model at the roofline, as its first guess: (steps without chunks, with chunks).

        Steps without chunks are bound by reads: seconds a step, a token, a token of context. Steps with chunks are
        bound by arithmetic, and have a fourth coefficient for 2 L x + x^2. Windows count as full attention, and both
        bounds are added up. Steps without chunks read the experts of one token, steps with chunks read all.
        """
        read, flops = peaks.read_bytes_per_s, peaks.flops_per_s
        weight_s = (self.weight_bytes + self.head_bytes) / read
        step_s = weight_s + self.experts_bytes(1) / read
        chunk_s = weight_s + self.num_experts * self.expert_bytes / read
        context_s = sum(layers.key_bytes for layers in self.attention) / read
        pair_s = sum(layers.pair_flops for layers in self.attention) / 2 / flops
        decode_s = (self.token_bytes + self.row_bytes + self.logits_bytes) / read
        return (step_s, decode_s, context_s), (chunk_s, self.token_flops / flops, context_s, pair_s)


class PlannedRow(Protocol):
    """A row of a step plan, as its cost needs it. `engine/sched/plan` says what the numbers are."""

    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_draws(self) -> int: ...
    @property
    def num_drafts(self) -> int: ...
    @property
    def num_to_draft(self) -> int: ...
    @property
    def draft_start(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PlanWork:
    """The work of planned steps: the model's, and that of its draft model or draft head. By default they have none."""

    model: WorkModel = WorkModel()
    drafts: WorkModel = WorkModel()
    drafts_follow: bool = False
    """Whether the draft computes all positions of the model's steps, as a draft head does."""

    def of(self, rows: Sequence[PlannedRow], num_scored: int = 0) -> StepWork:
        """Work of a step that also computes the logits of `num_scored` prompt positions. Drafts are decodes, of the
        draft model too. What it computes before its first draft is a chunk."""
        starts, counts = [row.start for row in rows], [row.num_tokens for row in rows]
        num_logits = sum([row.num_draws for row in rows]) + num_scored
        # Accepted drafts advance the states once more.
        num_verified = sum([row.num_drafts > 0 for row in rows])
        if num_verified:
            spans = [
                (range(row.start, row.start + row.num_tokens), 1) if row.num_drafts else ((row.start,), row.num_tokens)
                for row in rows
            ]
            starts = [start for span, _ in spans for start in span]
            counts = [count for span, count in spans for _ in span]
        step = self.model.step(starts, counts, num_logits, len(rows) + num_verified)
        if self.drafts_follow:
            step = step.and_also(self.drafts.step(starts, counts, 0))
        for number in range(max([row.num_to_draft for row in rows])):
            at = [row.start + number for row in rows if row.num_to_draft > number]
            step = step.and_also(self.drafts.step(at, [1] * len(at), len(at)))
        behind = [row for row in rows if row.num_to_draft and row.start > row.draft_start]
        if behind:
            starts, counts = [row.draft_start for row in behind], [row.start - row.draft_start for row in behind]
            step = step.and_also(self.drafts.step(starts, counts, 0))
        return step


NO_WORK = PlanWork()
"""That of an engine without a model."""


def _kv_bytes(heads: Heads, precision: Precision) -> int:
    """Bytes of a position's K and V in one layer."""
    return 2 * heads.num_kv_heads * precision.head_bytes(heads.head_dim).value


def _by_window(arch: Arch, max_model_len: int) -> dict[int | None, list[int]]:
    """The layers with attention, by their windows. A window as long as the longest sequence counts as none."""
    found: dict[int | None, list[int]] = {}
    for layer in arch.attention_layers:
        window = arch.windows[layer]
        found.setdefault(None if window is None or window >= max_model_len else window, []).append(layer)
    return found


def _active_weights(arch: Arch) -> int:
    """Number of weights in the layers' matrices that one token is multiplied by."""
    return _matrix_weights(weights(arch), without=(Component.HEAD,)) - arch.num_idle_weights


def _matrix_weights(weight_map: WeightMap, without: Collection[Component]) -> int:
    """Number of weights in the matrices of all other parts."""
    owned = (source.of for source in weight_map.all_sources)
    matrices = {of.name: of for of in owned if isinstance(of, LinearWeight) and of.component not in without}
    return sum(prod(matrix.shape) for matrix in matrices.values())


def _experts_of(arch: Arch, num_bytes: int) -> dict[str, int]:
    """The fields about experts, of which all together have `num_bytes`."""
    if arch.experts is None:
        return {}
    num_experts, num_chosen = arch.experts.num_experts, arch.experts.num_chosen
    return {"num_experts": num_experts, "num_chosen": num_chosen, "expert_bytes": num_bytes // num_experts}


def _visible(singles: Sequence[int], chunks: Sequence[tuple[int, int]], window: int | None) -> tuple[int, int]:
    """(number of pairs, number of keys read) in one layer. `singles` are starts of rows of one token, `chunks` are
    (start, count) of longer rows."""
    if window is None:
        num_single = sum(singles) + len(singles)
        num_pairs = sum(count * start + count * (count + 1) // 2 for start, count in chunks)
        return num_single + num_pairs, num_single + sum(start + count for start, count in chunks)
    last = window - 1
    num_single = sum([start if start < last else last for start in singles]) + len(singles)
    num_pairs = sum(_pairs_to(start + count, window) - _pairs_to(start, window) for start, count in chunks)
    num_keys = sum(min(start, last) + count for start, count in chunks)
    return num_single + num_pairs, num_single + num_keys


def _pairs_to(end: int, window: int) -> int:
    """Number of pairs of the queries at positions below `end`, each with its last `window` keys."""
    seen = min(end, window)
    return seen * (seen + 1) // 2 + (end - seen) * window
