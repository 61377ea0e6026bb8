"""Log-probabilities of drawn or given tokens, from the model's own logits before any sampling parameter.

Ranks and alternatives break ties by the lowest id, so that the greedy token always has rank 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Logprobs of N positions, on the device. Position i has `num_top[i]` alternatives, at most K."""

    token_ids: Tensor
    """[N] int64."""
    logprobs: Tensor
    """[N] fp32, natural logarithm."""
    ranks: Tensor
    """[N] int64, 1 for the most likely."""
    top_ids: Tensor
    """[N, K] int64, most likely first."""
    top_logprobs: Tensor
    """[N, K] fp32."""
    num_top: tuple[int, ...]

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """The tensors, all on the device."""
        return self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs

    def with_columns(self, columns: Iterator[Tensor]) -> Logprobs:
        """A copy with the next tensors of `columns`, in the order of the property `columns`."""
        token_ids, logprobs, ranks, top_ids, top_logprobs = (next(columns) for _ in self.columns)
        return Logprobs(token_ids, logprobs, ranks, top_ids, top_logprobs, self.num_top)

    def to_host(self) -> tuple[tuple[int, float, int, tuple[tuple[int, float], ...]], ...]:
        """For each position (token id, logprob, rank, ((alternative, logprob), ...)), as plain numbers."""
        rows = zip(*(column.tolist() for column in self.columns), self.num_top, strict=True)
        return tuple(
            (token_id, logprob, rank, tuple(zip(ids[:num], logprobs[:num], strict=True)))
            for token_id, logprob, rank, ids, logprobs, num in rows
        )


def logprobs_of(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> Logprobs:
    """Logprobs of `token_ids` [N], and of the `num_top[i]` most likely ids at each position i. logits [N, V] fp32, raw.

    Works for drawn tokens and for prompts. For a prompt, row i holds the logits of the position before `token_ids[i]`.
    """
    chosen = token_ids[:, None]
    normalised = logits.log_softmax(dim=-1)
    own = logits.gather(1, chosen)
    is_lower_id = torch.arange(logits.shape[1], device=logits.device) < chosen
    is_ahead = (logits > own) | ((logits == own) & is_lower_id)
    top_ids = _largest(logits, min(max(num_top, default=0), logits.shape[1]))
    return Logprobs(
        token_ids=token_ids,
        logprobs=normalised.gather(1, chosen)[:, 0],
        ranks=is_ahead.sum(dim=-1) + 1,
        top_ids=top_ids,
        top_logprobs=normalised.gather(1, top_ids),
        num_top=tuple(min(num, logits.shape[1]) for num in num_top),
    )


def _largest(logits: Tensor, count: int) -> Tensor:
    """[N, count]: ids of the largest logits; ties go to the lowest id.

    The bits of fp32 numbers sort like the numbers once negative ones are mirrored. The id in the lower bits is a second
    key: no two entries tie, so topk has one answer.
    """
    bits = (logits + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = ordered * (1 << 32) - ids
    return keys.topk(count, dim=-1).indices
