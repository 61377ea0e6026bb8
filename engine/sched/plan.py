"""The messages of one step: the scheduler's plan for the worker, and the worker's results.

Plain ints and tuples: no tensors, no references to requests. Batch order is the order of `StepPlan.rows`; every tensor
of the step is built from it.

Index spaces: a *row* is a position in this step's batch. A *slot* is a position in the worker's per-request state. A
request keeps its slot from admission until its last launched step has been applied. A *block id* is a position in the
KV pool.

Types with one instance per row are named tuples. A step makes 256 of them, in 0.22 us each; a frozen dataclass takes
0.52 us (2 cores of an AMD EPYC Zen 4, Python 3.11, 2026-11-21).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from inferd.engine.api.wire.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """Fill a slot with all that the worker must know about a request. The request starts, or resumes after preemption
    or a crash."""

    slot: int
    request_id: str
    token_ids: tuple[int, ...]
    """Prompt and emitted ids so far. The tail of a resumed request was emitted before."""
    num_prompt: int
    params: SamplingParams


class TableUpdate(NamedTuple):
    """Blocks appended to a slot's block table: `block_ids[i]` becomes entry `first + i` of cache group `group`."""

    slot: int
    group: int
    first: int
    block_ids: tuple[int, ...]


class StateCopy(NamedTuple):
    """A copy between the working state of a slot and a checkpoint."""

    slot: int
    checkpoint_id: int


class Row(NamedTuple):
    """One request's share of a step: compute the KV of positions `start .. start + num_tokens`.

    If `samples` is true, the row ends at the last token that exists, and a token is drawn for position `start +
    num_tokens`. The previous step may have sampled the id at `start` without the host having seen it. The worker then
    takes the id from its slot.

    A row with k drafts computes one token that exists and then the drafts: `num_tokens` is 1 + k. A token is drawn
    behind each of them. A draft is accepted if it equals the token drawn at its position and those before it were.
    Either the host guessed the drafts, or the worker's draft model or draft head makes them before the row is computed.
    """

    slot: int
    start: int
    num_tokens: int
    samples: bool
    draft_ids: tuple[int, ...] = ()
    """Guessed ids of the positions from `start + 1` on; empty for drafts of the draft model."""
    num_to_draft: int = 0
    """Number of drafts that the draft model makes for these positions."""
    draft_start: int = 0
    """First position whose KV the draft model lacks. It computes all from there to the last draft but one. A draft head
    lacks none."""

    @property
    def num_drafts(self) -> int:
        return len(self.draft_ids) or self.num_to_draft

    @property
    def num_draws(self) -> int:
        """Tokens that the row draws, one behind the other, those behind rejected drafts included."""
        return 1 + self.num_drafts if self.samples else 0

    def accepted(self, drawn: Sequence[int]) -> int:
        """Number of leading tokens of `drawn` that hold: each follows drafts that equal the tokens before it. The
        `draft_ids` must be known."""
        for count, (draft, token_id) in enumerate(zip(self.draft_ids, drawn, strict=False), start=1):
            if draft != token_id:
                return count
        return len(drawn)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: first fill `admissions`, apply `table_updates` and `state_loads`, then run `rows` in this order, and at
    last `state_saves`."""

    step_id: int
    admissions: tuple[Admission, ...]
    table_updates: tuple[TableUpdate, ...]
    rows: tuple[Row, ...]
    state_loads: tuple[StateCopy, ...] = ()
    """From checkpoints. A step may load a checkpoint and save another state there."""
    state_saves: tuple[StateCopy, ...] = ()
    """To checkpoints, of the states behind the rows. Of a row with drafts, the state behind its first token."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def has_drafts(self) -> bool:
        return any(row.num_drafts for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that may be drawn at some draws of a step. Any may be drawn at the others."""

    draws: tuple[int, ...]
    """Indices of these draws, ascending. A step's draws are numbered over its rows, `Row.num_draws` for each."""
    words: array[int]
    """Unsigned 32-bit words, the same number for each of `draws`, in their order. Bit i of word w allows token
    32 w + i."""


NO_MASKS = TokenMasks((), array("I"))


class RowStatus(IntEnum):
    OK = 0
    NUMERICAL_ERROR = 1
    """The row's logits, or the states that it pools, held a NaN. The row has no result."""
    NOTHING_TO_DRAW = 2
    """The request's own parameters and its mask left no token."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, from the model's own logits, before any sampling parameter."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most likely first, ties to the lowest id; as many as requested."""


class RowResult(NamedTuple):
    """Result of one row. `token_ids` is empty if the row did not sample."""

    token_ids: tuple[int, ...] = ()
    """The drawn token. For a row with drafts: one token more than accepted drafts, or fewer if a draw behind them
    failed."""
    status: RowStatus = RowStatus.OK
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per entry of `token_ids`, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Prompt positions `start + 1 .. start + num_tokens` (cut at the prompt's end), if requested."""
    embedding: bytes = b""
    """Pooled state, fp32 in little-endian bytes, of a row that ends a prompt, if requested."""


NO_RESULT = RowResult()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a plan's rows, in the plan's order."""

    step_id: int
    rows: tuple[RowResult, ...]
    duration_s: float
    """Seconds from launch to ids on the host, by the worker's monotonic clock."""
    expert_peaks: tuple[tuple[int, float], ...] = ()
    """(layer, tokens of its busiest expert / mean of its experts), counted from the start. Empty in most steps."""
