"""Draws the next token of each row, by slot: the documented order of `SamplingParams`, on the device, without the host.

Holds what each admitted request asks for and the state its rules need. Greedy rows that ask for nothing else cost one
pass over their logits. Plain rows, greedy or with a temperature and nothing more, can be drawn by what lies on the
device alone, and so by a recording. Knows no text, no scheduling and no KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.sample.filters import asks_for_cut, cut, temper
from inferd.engine.sample.logprobs import Logprobs, logprobs_of
from inferd.engine.sample.masks import Masks
from inferd.engine.sample.rules import Admitted, Rule, rules_for
from inferd.kernels.argmax import argmax
from inferd.kernels.decode_draw import draw
from inferd.kernels.gpu import from_host
from inferd.kernels.sample import sample

_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""What a slot keeps of a temperature that fp32 would make 0, which means greedy."""
FAILED, EMPTY = -1, -2
"""Outcomes of rows that gave no id: their logits held a NaN or +inf; their own parameters left no token."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What R rows drew, on the device."""

    token_ids: Tensor
    """[R] int64; of no meaning where the row failed, but always an id below the vocabulary's size."""
    is_failed: Tensor
    """[R] bool: the row's logits held a NaN or +inf."""
    is_empty: Tensor
    """[R] bool: the row's own parameters left no token that may be drawn."""
    logprobs: Logprobs | None
    """Of those rows that asked, in order; None where none did."""
    logprob_rows: tuple[int, ...]
    """The row that each entry of `logprobs` belongs to."""

    @property
    def outcomes(self) -> Tensor:
        """[R] int64: the row's id, or `FAILED` or `EMPTY`: all that the host has to know of most rows."""
        return self.token_ids.masked_fill(self.is_empty, EMPTY).masked_fill_(self.is_failed, FAILED)


@dataclass(frozen=True, slots=True)
class _Slot:
    params: SamplingParams
    rules: tuple[Rule, ...]

    @property
    def is_plain_greedy(self) -> bool:
        return self.params.temperature == 0.0 and not self.rules and not self.params.grammar

    @property
    def is_plain(self) -> bool:
        is_cut = self.params.temperature > 0.0 and asks_for_cut(self.params)
        is_free = not self.rules and not self.params.grammar
        return is_free and not is_cut and self.params.logprobs is None


class Sampler:
    """Sampling state of `num_slots` requests over a vocabulary of `vocab_size`."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size, self._device = vocab_size, torch.device(device)
        self._slots: list[_Slot | None] = [None] * num_slots
        self._temperatures = torch.zeros(num_slots, dtype=torch.float32, device=self._device)
        self._seeds = torch.zeros(num_slots, dtype=torch.int64, device=self._device)

    def admit(self, slot: int, params: SamplingParams, token_ids: Sequence[int], num_prompt: int) -> None:
        """Fill a slot. `token_ids` are all that exist so far: the prompt, and the output of a request that resumes."""
        request = Admitted(params, token_ids, num_prompt, self._vocab_size, self._device)
        self._slots[slot] = _Slot(params, rules_for(request))
        self._temperatures[slot] = max(params.temperature, _LEAST_TEMPERATURE) if params.temperature else 0.0
        self._seeds[slot] = params.seed

    def is_plain(self, slot: int) -> bool:
        """Whether `draw` draws for it what `sample` would, and there is nothing else to report or to keep."""
        return self._state(slot).is_plain

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(ids, outcomes), [R] int64 each: a token per row as for a plain one, from tensors alone. What the ids are and
        what the outcomes, `SampleResult` says.

        logits [R, V] fp32, left as they are; slots [R] int64, negative for rows of no meaning; positions [R] int64, of
        the tokens to be drawn.
        """
        token_ids, is_failed = draw(logits, slots, self._temperatures, self._seeds, positions)
        return token_ids, token_ids.masked_fill(is_failed, FAILED)

    def sample(
        self, logits: Tensor, slots: Sequence[int], positions: Sequence[int], masks: Masks | None = None
    ) -> SampleResult:
        """Draw one token per row and record it. logits [R, V] fp32, raw, left as they are.

        `slots[r]` is row r's slot, no two alike; `positions[r]` the absolute position of the token to be drawn;
        `masks` say what rows under a grammar may draw.
        """
        assert logits.dtype == torch.float32 and logits.shape == (len(slots), self._vocab_size)
        states = [self._state(slot) for slot in slots]
        token_ids, is_failed = argmax(logits)
        is_empty = torch.zeros_like(is_failed)
        special = [row for row, state in enumerate(states) if not state.is_plain_greedy]
        if special:
            rows = self._tensor(special, torch.int64)
            chosen = logits[rows]
            if masks is not None:
                masks.among(special).apply(chosen)
            token_ids[rows], is_empty[rows] = self._draw(
                chosen, [states[row] for row in special], [positions[row] for row in special]
            )
        for row, state in enumerate(states):
            for rule in state.rules:
                rule.record(token_ids[row : row + 1])
        return SampleResult(token_ids, is_failed, is_empty, *self._logprobs(logits, token_ids, states))

    def _draw(self, logits: Tensor, states: Sequence[_Slot], positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(ids, whether nothing was left to draw), for rows with rules or a temperature. Overwrites `logits`."""
        for row, (state, position) in enumerate(zip(states, positions, strict=True)):
            for rule in state.rules:
                rule.apply(logits[row], position)
        token_ids, is_empty = argmax(logits)
        sampled = [row for row, state in enumerate(states) if state.params.temperature > 0.0]
        if sampled:
            params = [states[row].params for row in sampled]
            rows = self._tensor(sampled, torch.int64)
            scores = temper(logits[rows], self._tensor([row.temperature for row in params], torch.float32))
            cut(scores, params)
            seeds = self._tensor([row.seed for row in params], torch.int64)
            token_ids[rows] = sample(scores, seeds, self._tensor([positions[row] for row in sampled], torch.int64))
        return token_ids, is_empty

    def _state(self, slot: int) -> _Slot:
        state = self._slots[slot]
        assert state is not None, f"slot {slot} was never filled"
        return state

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return from_host(torch.tensor(values, dtype=dtype), self._device)

    def _logprobs(
        self, logits: Tensor, token_ids: Tensor, states: Sequence[_Slot]
    ) -> tuple[Logprobs | None, tuple[int, ...]]:
        asked = {row: state.params.logprobs for row, state in enumerate(states) if state.params.logprobs is not None}
        if not asked:
            return None, ()
        rows = self._tensor(list(asked), torch.int64)
        return logprobs_of(logits[rows], token_ids[rows], list(asked.values())), tuple(asked)
