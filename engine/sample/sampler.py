"""Draws the next token of each row, on the device, in the order of steps that `SamplingParams` documents.

The sampler holds the parameters of each admitted request and the state of its rules, by slot. Greedy rows without other
options cost one pass over their logits. Plain rows need no data from the host but their slot and position, and report
no logprobs, so a recorded step can draw them. The sampler knows no text, no scheduling and no KV.

The filters come after the temperature and cut the tail of the distribution: top-k, top-p, min-p, in this order. Each
filter is a threshold on a row's own values. So tokens that tie at the threshold are kept or cut together, and a row's
bits do not depend on other rows. Rows without filters are not touched.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.sample.logprobs import Logprobs, logprobs_of
from inferd.engine.sample.rules import SlotRequest, SlotRules, can_record
from inferd.kernels.gpu import from_host
from inferd.kernels.ops.argmax import argmax
from inferd.kernels.ops.decode_draw import draw
from inferd.kernels.ops.logit_rules import EMPTY, FAILED
from inferd.kernels.ops.mask_tokens import mask_tokens
from inferd.kernels.ops.top_k_top_p import MAX_VOCAB, Cuts

__all__ = ["EMPTY", "FAILED", "Masks", "SampleResult", "Sampler", "cuts_of", "is_plain"]

_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""A temperature too small for fp32 would become 0, which means greedy, and 0 / 0 is NaN. The least fp32 number draws
the greedy token."""


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


class _SlotOptions:
    """Temperature, seed and cuts of `num_slots` requests, in tensors that keep their addresses, so that a recorded step
    finds them."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        # Triton compiles a kernel anew if an address is no longer a multiple of 16 (two numbers): pad to an even count.
        width = num_slots + num_slots % 2
        self.temperatures = torch.zeros(width, dtype=torch.float32, device=device)
        """[slots] fp32: 0 or a normal number."""
        self._numbers = torch.zeros((4, width), dtype=torch.int64, device=device)
        self.seeds = self._numbers[0]
        """[slots] int64."""
        self.cuts = _cuts_in(self._numbers[1:])
        """By slot. A greedy slot has none."""

    def fill(self, slot: int, params: SamplingParams) -> None:
        """Fill a slot."""
        temperature = params.temperature
        self.temperatures[slot] = max(temperature, _LEAST_TEMPERATURE) if temperature else 0.0
        numbers = torch.tensor((params.seed, *_numbers_of(params)))
        self._numbers[:, slot] = from_host(numbers, self._numbers.device)


class Sampler:
    """Sampling state of `num_slots` requests over a vocabulary of `vocab_size`."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size, self._device = vocab_size, torch.device(device)
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._options = _SlotOptions(num_slots, self._device)
        self._rules = SlotRules(num_slots, vocab_size, self._device)

    def fill(self, slot: int, params: SamplingParams, token_ids: Sequence[int], num_prompt: int) -> None:
        """Fill a slot. `token_ids` holds the prompt, and the output so far if the request resumes."""
        self._params[slot] = params
        self._options.fill(slot, params)
        self._rules.fill(slot, SlotRequest(params, token_ids, num_prompt), is_recorded=is_plain(params))

    def has_rules(self, slot: int) -> bool:
        """Whether tokens before a draw change its logits, or options do."""
        return self._rules.has_rules(slot)

    def is_plain(self, slot: int) -> bool:
        """Whether `draw` does all that `sample` does for the slot's row."""
        return is_plain(self._params_of(slot))

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Draw and record as `sample` does, (ids, outcomes) as in `SampleResult`, [R] int64 each, from tensors alone.
        The result holds for plain rows, and the draws of others are not recorded.

        logits [R, V] fp32: those of plain rows with rules are overwritten. slots [R] int64, negative for padding rows.
        positions [R] int64 of the tokens to be drawn.
        """
        options, rules = self._options, self._rules
        status = rules.apply(logits, slots, positions)
        token_ids, is_none = draw(logits, slots, options.temperatures, options.seeds, positions, options.cuts)
        return token_ids, rules.record(token_ids, is_none, status, slots, positions)

    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        masks: Masks | None = None,
        drafts: Tensor | None = None,
    ) -> SampleResult:
        """Draw one token per row and record it. logits [R, V] fp32, raw, left unchanged.

        `slots[r]` is row r's slot. `positions[r]` is the absolute position of the token to be drawn. `masks` hold the
        tokens that rows under a grammar may draw.

        If a slot has several rows, they follow each other, and `drafts[r]`, [R] int64, is the token that row r must
        draw for the next one to hold. Rows behind one that draws another have no meaning, and are not recorded.
        """
        assert logits.dtype == torch.float32 and logits.shape == (len(slots), self._vocab_size)
        asked = [self._params_of(slot) for slot in slots]
        is_sampled = [params.temperature > 0.0 for params in asked]
        is_changed = [params.grammar or self._rules.has_rules(slot) for slot, params in zip(slots, asked, strict=True)]
        if not any(is_changed):
            token_ids, is_failed = self._choose(logits, is_sampled, slots, positions)
            is_empty = torch.zeros_like(is_failed)
        else:
            token_ids, is_failed = argmax(logits)
            is_empty = torch.zeros_like(is_failed)
            special = [row for row in range(len(slots)) if is_sampled[row] or is_changed[row]]
            rows = self._tensor(special)
            chosen = logits[rows]
            if masks is not None:
                masks.among(special).apply(chosen)
            sampled_of, slots_of, positions_of = _at(special, is_sampled, slots, positions)
            rounds = self._rounds(slots_of)
            if len(rounds) == 1:
                token_ids[rows], is_empty[rows] = self._draw(chosen, sampled_of, slots_of, positions_of)
            else:
                assert drafts is not None, "a slot has several rows"
                token_ids[rows], is_empty[rows] = self._draw_in_rounds(
                    chosen, sampled_of, slots_of, positions_of, drafts[rows], rounds
                )
        return SampleResult(token_ids, is_failed, is_empty, *self._logprobs(logits, token_ids, asked))

    def draft(self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        """The tokens [R] int64 that rows draw from a draft model's logits [R, V] fp32, with the noise, the temperature
        and the cuts of `sample`, and without rules. Nothing is recorded."""
        token_ids, _ = self._choose(
            logits, [self._params_of(slot).temperature > 0.0 for slot in slots], slots, positions
        )
        return token_ids

    def draft_recorded(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """As `draft`, from tensors alone, for a recorded step. slots [R] int64, negative for padding rows."""
        options = self._options
        token_ids, _ = draw(logits, slots, options.temperatures, options.seeds, positions, options.cuts)
        return token_ids

    def prompt_logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
        """Logprobs of the prompt's tokens `token_ids` [N], from logits [N, V] of the positions before them."""
        return logprobs_of(logits, token_ids, [num_top] * logits.shape[0])

    def _rounds(self, slots: Sequence[int]) -> list[list[int]]:
        """The rows in the order in which they may be drawn: those of a slot with rules one after the other, because a
        token changes the logits of the next."""
        rounds: list[list[int]] = [[]]
        num_before: dict[int, int] = {}
        for row, slot in enumerate(slots):
            number = num_before.get(slot, 0) if self._rules.has_rules(slot) else 0
            num_before[slot] = number + 1
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(row)
        return rounds

    def _draw_in_rounds(
        self,
        logits: Tensor,
        is_sampled: Sequence[bool],
        slots: Sequence[int],
        positions: Sequence[int],
        drafts: Tensor,
        rounds: Sequence[Sequence[int]],
    ) -> tuple[Tensor, Tensor]:
        """As `_draw`. In each round only rows count whose drafts were drawn in the rounds before."""
        token_ids = torch.zeros(len(slots), dtype=torch.int64, device=self._device)
        is_none = torch.zeros(len(slots), dtype=torch.bool, device=self._device)
        holds = torch.ones(len(slots), dtype=torch.bool, device=self._device)
        for number, round_rows in enumerate(rounds):
            rows = self._tensor(round_rows)
            if number:
                before = rows - 1
                holds[rows] = holds[before] & (token_ids[before] == drafts[before]) & ~is_none[before]
            sampled_of, slots_of, positions_of = _at(round_rows, is_sampled, slots, positions)
            drawn = self._draw(logits[rows], sampled_of, slots_of, positions_of, holds[rows])
            token_ids[rows], is_none[rows] = drawn
        return token_ids, is_none

    def _draw(
        self,
        logits: Tensor,
        is_sampled: Sequence[bool],
        slots: Sequence[int],
        positions: Sequence[int],
        holds: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(ids, whether there is none) of rows with rules or a temperature. Overwrites `logits`.

        Rules see and record only the rows that `holds`, [R] bool; None: all.
        """
        rules, slot_of, position_of = self._rules, self._tensor(slots), self._tensor(positions)
        if holds is not None:
            slot_of = slot_of.masked_fill(~holds, -1)
        status = rules.apply_all(logits, slots, slot_of, position_of)
        token_ids, is_none = self._choose(logits, is_sampled, slots, positions)
        rules.record_all(token_ids, is_none, status, slots, slot_of, position_of)
        return token_ids, is_none

    def _choose(
        self, logits: Tensor, is_sampled: Sequence[bool], slots: Sequence[int], positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """(ids, whether there is none) of rows whose rules and masks were applied. Leaves `logits` as they are."""
        sampled = [row for row, is_true in enumerate(is_sampled) if is_true]
        if not sampled:
            return argmax(logits)
        slot_of, position_of = map(self._tensor, _at(sampled, slots, positions))
        options = self._options
        asked = slot_of, options.temperatures, options.seeds, position_of, options.cuts
        if len(sampled) == len(slots):
            return draw(logits, *asked)
        token_ids, is_none = argmax(logits)
        rows = self._tensor(sampled)
        token_ids[rows], _ = draw(logits[rows], *asked)
        return token_ids, is_none

    def _params_of(self, slot: int) -> SamplingParams:
        params = self._params[slot]
        assert params is not None, f"slot {slot} was never filled"
        return params

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return from_host(torch.tensor(values, dtype=torch.int64), self._device)

    def _logprobs(
        self, logits: Tensor, token_ids: Tensor, params: Sequence[SamplingParams]
    ) -> tuple[Logprobs | None, tuple[int, ...]]:
        asked = {row: of_row.logprobs for row, of_row in enumerate(params) if of_row.logprobs is not None}
        if not asked:
            return None, ()
        rows = self._tensor(list(asked))
        return logprobs_of(logits[rows], token_ids[rows], list(asked.values())), tuple(asked)


def is_plain(params: SamplingParams) -> bool:
    """Whether `Sampler.draw` does all for a request's rows: they need no mask from the host, they report the draw
    alone, and a recorded step can apply their rules."""
    return not params.grammar and params.logprobs is None and can_record(params)


def _at(rows: Sequence[int], *of_rows: Sequence[Any]) -> Iterator[list[Any]]:
    """Those entries of each sequence."""
    return ([values[row] for row in rows] for values in of_rows)


def _asks_for_cut(params: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p could exclude a token. A greedy request asks for none: the likeliest stays."""
    return params.temperature > 0.0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def cuts_of(params: Sequence[SamplingParams]) -> Cuts:
    """The cuts of these requests, on the host."""
    return _cuts_in(torch.tensor([_numbers_of(one) for one in params]).T.contiguous())


def _numbers_of(params: SamplingParams) -> tuple[int, int, int]:
    """Top-k, and the bits of top-p and of log(min-p), which are fp64."""
    if not _asks_for_cut(params):
        return 0, _bits_of(1.0), _bits_of(-math.inf)
    floor = math.log(params.min_p) if params.min_p else -math.inf
    return min(params.top_k, MAX_VOCAB), _bits_of(params.top_p), _bits_of(floor)


def _bits_of(number: float) -> int:
    bits: int = struct.unpack("=q", struct.pack("=d", number))[0]
    return bits


def _cuts_in(numbers: Tensor) -> Cuts:
    """The cuts in [3, requests] int64."""
    top_k, top_p, log_min_p = numbers.unbind()
    return Cuts(top_k, top_p.view(torch.float64), log_min_p.view(torch.float64))
