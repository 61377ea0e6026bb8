"""Draws the next token of each row, on the device, in the order of steps that `SamplingParams` documents.

The sampler holds the parameters of each admitted request and the state of its rules, by slot. Greedy rows without other
options cost one pass over their logits. Plain rows have a temperature at most: they need no data from the host, so a
recorded step can draw them. The sampler knows no text, no scheduling and no KV.

The filters come after the temperature and cut the tail of the distribution: top-k, top-p, min-p, in this order. Each
filter is a threshold on a row's own values. So tokens that tie at the threshold are kept or cut together, and a row's
bits do not depend on other rows. Rows without filters are not touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.sample.logprobs import Logprobs, logprobs_of
from inferd.engine.sample.rules import Admitted, Rule, rules_for
from inferd.kernels.argmax import argmax
from inferd.kernels.decode_draw import draw
from inferd.kernels.gpu import from_host
from inferd.kernels.mask_tokens import mask_tokens
from inferd.kernels.sample import sample
from inferd.kernels.top_k_top_p import MAX_VOCAB, Cuts, top_k_top_p

FAILED, EMPTY = -1, -2
"""Outcomes of rows without an id. FAILED: the logits held a NaN or +inf. EMPTY: the row's parameters left no token."""

_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""A temperature too small for fp32 would become 0, and 0 / 0 is NaN. The least fp32 number draws the greedy token."""


@dataclass(frozen=True, slots=True)
class Masks:
    """The tokens that rows under a grammar may draw, as bits: M of the rows that are drawn have a mask."""

    rows: Sequence[int]
    """[M] indices of those rows, ascending."""
    words: Tensor
    """[M, ceil(vocabulary / 32)] int32, on the rows' device."""

    def among(self, rows: Sequence[int]) -> Masks:
        """The same masks, with `self.rows` as indices into `rows`, which must hold every masked row."""
        places = {row: place for place, row in enumerate(rows)}
        return Masks([places[row] for row in self.rows], self.words)

    def apply(self, logits: Tensor) -> None:
        """Set the logits of forbidden tokens to -inf, in place. logits [R, V] fp32."""
        mask_tokens(logits, self.words, from_host(torch.tensor(self.rows, dtype=torch.int64), logits.device))


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The tokens that R rows drew, on the device."""

    token_ids: Tensor
    """[R] int64. Always an id below the vocabulary's size, but without meaning if the row failed."""
    is_failed: Tensor
    """[R] bool: the row's logits held a NaN or +inf."""
    is_empty: Tensor
    """[R] bool: the row's own parameters left no token to draw."""
    logprobs: Logprobs | None
    """Logprobs of the rows that asked for them, in order; None if no row did."""
    logprob_rows: tuple[int, ...]
    """The row that each entry of `logprobs` belongs to."""

    @property
    def outcomes(self) -> Tensor:
        """[R] int64: the row's id, `FAILED` or `EMPTY`. The host needs no more of most rows."""
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
        is_cut = self.params.temperature > 0.0 and _asks_for_cut(self.params)
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
        """Fill a slot. `token_ids` holds the prompt, and the output so far if the request resumes."""
        request = Admitted(params, token_ids, num_prompt, self._vocab_size, self._device)
        self._slots[slot] = _Slot(params, rules_for(request))
        # A temperature that fp32 rounds to 0 would mean greedy.
        self._temperatures[slot] = max(params.temperature, _LEAST_TEMPERATURE) if params.temperature else 0.0
        self._seeds[slot] = params.seed

    def is_plain(self, slot: int) -> bool:
        """Whether `draw` gives the same token as `sample`, with no logprobs to report and no rule to update."""
        return self._state(slot).is_plain

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(ids, outcomes) as in `SampleResult`, [R] int64 each. Treats every row as a plain one and reads tensors only.

        logits [R, V] fp32, left unchanged. slots [R] int64, negative for padding rows. positions [R] int64 of the
        tokens to be drawn.
        """
        token_ids, is_failed = draw(logits, slots, self._temperatures, self._seeds, positions)
        return token_ids, token_ids.masked_fill(is_failed, FAILED)

    def sample(
        self, logits: Tensor, slots: Sequence[int], positions: Sequence[int], masks: Masks | None = None
    ) -> SampleResult:
        """Draw one token per row and record it. logits [R, V] fp32, raw, left unchanged.

        `slots[r]` is row r's slot; slots differ. `positions[r]` is the absolute position of the token to be drawn.
        `masks` hold the tokens that rows under a grammar may draw.
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
        """(ids, whether no token was left to draw), for rows with rules or a temperature. Overwrites `logits`."""
        for row, (state, position) in enumerate(zip(states, positions, strict=True)):
            for rule in state.rules:
                rule.apply(logits[row], position)
        token_ids, is_empty = argmax(logits)
        sampled = [row for row, state in enumerate(states) if state.params.temperature > 0.0]
        if sampled:
            params = [states[row].params for row in sampled]
            rows = self._tensor(sampled, torch.int64)
            scores = apply_temperature(logits[rows], self._tensor([row.temperature for row in params], torch.float32))
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


def apply_temperature(logits: Tensor, temperatures: Tensor) -> Tensor:
    """(logits - the row's largest) / temperature, [R, V]. Subtracting first keeps small temperatures from overflow."""
    floored = temperatures.clamp_min(_LEAST_TEMPERATURE)
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(floored[:, None])


def cut(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set the tokens that each row's filters exclude to -inf, in place. scores [R, V], after temperature."""
    if any(_asks_for_cut(row_params) for row_params in params):
        top_k_top_p(scores, _cuts_of(params, scores.device))


def _asks_for_cut(params: SamplingParams) -> bool:
    """Whether `cut` could exclude a token."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _cuts_of(params: Sequence[SamplingParams], device: torch.device) -> Cuts:
    """The filters of each row on the device, moved there in one copy."""
    top_k = torch.tensor([min(row.top_k, MAX_VOCAB) for row in params])
    top_p = torch.tensor([row.top_p for row in params], dtype=torch.float64)
    log_min_p = [math.log(row.min_p) if row.min_p else -math.inf for row in params]
    floors = torch.tensor(log_min_p, dtype=torch.float64)
    rows = torch.stack([top_k, top_p.view(torch.int64), floors.view(torch.int64)])
    # Triton compiles a kernel anew if an address is no longer a multiple of 16 (two numbers): pad to an even count.
    packed = from_host(torch.nn.functional.pad(rows, (0, len(params) % 2)), device)[:, : len(params)]
    return Cuts(packed[0], packed[1].view(torch.float64), packed[2].view(torch.float64))
