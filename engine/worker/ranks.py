"""How ranks compute one step together: they exchange outputs, rank 0 alone draws, and the others receive its ids.

Every rank has a `Runner` that runs the same plans, so all of them exchange in the same order. Knows no processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.arch.sharding import Rank
from inferd.engine.sample.logprobs import Logprobs
from inferd.engine.sample.sampler import Masks, Sampler, SampleResult, is_plain
from inferd.engine.sched.plan import StepPlan
from inferd.engine.worker.step import Step, StepPart
from inferd.kernels.ops.gather import Exchange


class SharedRanks:
    """The ranks on the processors or GPUs of one machine, seen from rank `own`."""

    def __init__(self, own: Rank, exchange: Exchange) -> None:
        self.own, self._exchange = own, exchange

    def gather(self, part: Tensor, size: int) -> Tensor:
        return self._exchange.gather(part, size)

    def gather_at_first(self, part: Tensor, size: int) -> Tensor:
        return self._exchange.gather(part, size, wants=self.own.index == 0)

    def inputs(self, part: Tensor, size: int) -> Tensor:
        return part if self.own.splits_inputs else self.gather(part, size)

    def outputs(self, part: Tensor, size: int) -> Tensor:
        return self._exchange.add(part) if self.own.splits_inputs else self.gather(part, size)

    def broadcast(self, values: Tensor) -> Tensor:
        """values [N] of rank 0. The other ranks give a tensor of that shape."""
        return self._exchange.broadcast(values)


class SentPlans(StepPart):
    """Rank 0 has the other ranks run each plan."""

    def __init__(self, send: Callable[[StepPlan], None]) -> None:
        self._send = send

    def before_layers(self, step: Step) -> None:
        self._send(step.plan)


class LeadingSampler(Sampler):
    """Rank 0's sampler: draws, and sends the ids to the other ranks."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, ranks: SharedRanks) -> None:
        super().__init__(num_slots, vocab_size, device)
        self._ranks = ranks

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        token_ids, outcomes = super().draw(logits, slots, positions)
        return self._ranks.broadcast(token_ids), outcomes

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        masks: Masks | None = None,
        drafts: Tensor | None = None,
    ) -> SampleResult:
        drawn = super().sample(logits, slots, positions, masks, drafts)
        self._ranks.broadcast(drawn.token_ids)
        return drawn


class FollowingSampler(Sampler):
    """Another rank's sampler: receives what rank 0 drew. It reads no logits, and of a request's parameters it knows
    only whether rank 0 draws its row again after a recorded step.

    A step's masks are rank 0's too, so it draws at once, and waits in `sample` for rank 0.
    """

    def __init__(self, vocab_size: int, device: torch.device, ranks: SharedRanks) -> None:
        super().__init__(0, vocab_size, device)
        self._ranks, self._plain_slots = ranks, set[int]()

    def fill(self, slot: int, params: SamplingParams, token_ids: Sequence[int], num_prompt: int) -> None:
        if is_plain(params):
            self._plain_slots.add(slot)
        else:
            self._plain_slots.discard(slot)

    def is_plain(self, slot: int) -> bool:
        return slot in self._plain_slots

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        token_ids = self._ranks.broadcast(torch.empty_like(slots))
        return token_ids, token_ids.clone()

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        masks: Masks | None = None,
        drafts: Tensor | None = None,
    ) -> SampleResult:
        token_ids = self._ranks.broadcast(torch.empty(len(slots), dtype=torch.int64, device=self._device))
        is_none = torch.zeros(len(slots), dtype=torch.bool, device=self._device)
        return SampleResult(token_ids, is_none, is_none, None, ())

    def prompt_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
        """Those of no position: rank 0 has the logits."""
        ids, values = torch.empty(0, dtype=torch.int64), torch.empty(0)
        return Logprobs(ids, values, ids, ids.view(0, 0), values.view(0, 0), ())
