"""What the scheduler tells the worker to do in one step, and what the worker tells it back.

Plain ints and tuples: no tensors, no references to requests. Batch order is the order of `StepPlan.rows`; every tensor
of the step is built from it. Index spaces: a *row* is a place in this step's batch; a *slot* is a place in the worker's
per-request state, kept from admission until the request's last launched step has been applied; a *block id* is a place
in the KV pool.

What a step has one of for each row is a named tuple: made 256 times a step, in 0.22 us each where a frozen dataclass
takes 0.52 (2 cores of an AMD EPYC Zen 4, Python 3.11, 2026-11-21).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from inferd.engine.api.wire.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """Fill a slot: everything the worker must know of a request that starts, or resumes after preemption or a crash."""

    slot: int
    request_id: str
    token_ids: tuple[int, ...]
    """Prompt and emitted ids so far; a resumed request is one whose tail was emitted before."""
    num_prompt: int
    params: SamplingParams


class TableUpdate(NamedTuple):
    """Blocks appended to a slot's block table: `block_ids[i]` becomes entry `first + i` of cache group `group`."""

    slot: int
    group: int
    first: int
    block_ids: tuple[int, ...]


class Row(NamedTuple):
    """One request's share of a step: compute the KV of positions `start .. start + num_tokens`.

    Where `samples` holds, the row ends at the last token that exists, and a token is drawn for position
    `start + num_tokens`. The id at `start` may be one that the previous step sampled and the host has not seen: the
    worker takes it from its slot.
    """

    slot: int
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: first fill `admissions`, then apply `table_updates`, then run `rows` in this order."""

    step_id: int
    admissions: tuple[Admission, ...]
    table_updates: tuple[TableUpdate, ...]
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens some rows of a step may draw; the others may draw any."""

    rows: tuple[int, ...]
    """Places in `StepPlan.rows`, ascending."""
    words: array[int]
    """Unsigned 32 bits each, as many for each of `rows`, in their order: bit i of word w allows token 32 w + i."""


NO_MASKS = TokenMasks((), array("I"))


class RowStatus(IntEnum):
    OK = 0
    NUMERICAL_ERROR = 1
    """The row's logits, or the states that it pools, held a NaN: it gave nothing."""
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
    """(token id, logprob), most likely first, ties to the lowest id; as many as were asked for."""


class RowResult(NamedTuple):
    """What one row gave. `token_ids` is empty where the row did not sample."""

    token_ids: tuple[int, ...] = ()
    status: RowStatus = RowStatus.OK
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, where asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of prompt positions `start + 1 .. start + num_tokens` (cut at the prompt's end), where asked for."""
    embedding: bytes = b""
    """The pooled state, fp32 in little-endian bytes, of a row that ends a prompt, where asked for."""


NO_RESULT = RowResult()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a plan's rows, in the plan's order."""

    step_id: int
    rows: tuple[RowResult, ...]
    duration_s: float
    """From launch to ids on the host, by the worker's monotonic clock."""
