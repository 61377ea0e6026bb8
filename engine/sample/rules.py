"""Rules that change rows of logits before the temperature: a request's options become state of its slot on the device.

The order in which rules apply is documented by `SamplingParams`, and the kernels (`logit_rules`) keep it. The state
follows the drawn ids on the device, because the host learns ids a step later. The tensors keep their addresses, so that
a recorded step finds them. Knows no temperature, no grammar and no other slot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inferd.engine.api.wire.params import SamplingParams
from inferd.kernels.gpu import from_host
from inferd.kernels.ops.logit_rules import (
    BIASED,
    ENDS,
    MARKED,
    MAX_PREFIX,
    MAX_WORDS,
    PROMPT,
    WORDED,
    RuleState,
    apply_rules,
    record_drawn,
)

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A request as it enters a slot: its parameters, and its ids so far (prompt and output)."""

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt: int


def can_record(params: SamplingParams) -> bool:
    """Whether a recorded step can apply all rules of a request: the state has space for its bad words."""
    words = _long_words(params)
    return len(words) <= MAX_WORDS and all(len(word) <= MAX_PREFIX + 1 for word in words)


def _long_words(params: SamplingParams) -> list[tuple[int, ...]]:
    """The bad words of several ids. Those of one id are a bias."""
    return [word for word in params.bad_words if len(word) > 1]


class SlotRules:
    """The rules of `num_slots` requests over a vocabulary of `vocab_size`."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        # Triton compiles a kernel anew if an address is no longer a multiple of 16, which is four numbers.
        self._kinds = torch.zeros((2, num_slots + -num_slots % 4), dtype=torch.int32, device=device)
        """Rules of each slot: all, and those of slots that a recorded step draws."""
        # A slot's part is written when a request asks for it. Until then the system need not give it memory.
        self.state = RuleState(
            penalties=torch.empty((num_slots, 3), dtype=torch.float32, device=device),
            first_free=torch.empty(num_slots, dtype=torch.int64, device=device),
            bias=torch.empty((num_slots, vocab_size), dtype=torch.float32, device=device),
            marks=torch.empty((num_slots, vocab_size), dtype=torch.int32, device=device),
            prefixes=torch.empty((num_slots, MAX_WORDS, MAX_PREFIX), dtype=torch.int32, device=device),
            last_ids=torch.empty((num_slots, MAX_WORDS), dtype=torch.int32, device=device),
            tails=torch.empty((num_slots, MAX_PREFIX), dtype=torch.int32, device=device),
        )
        self._device = device
        self._kinds_of = [(0, 0)] * num_slots
        """`_kinds` as the host knows them."""
        self._many_words: dict[int, ManyWords] = {}
        """Words that the state has no space for, by slot."""

    def fill(self, slot: int, request: SlotRequest, *, is_recorded: bool) -> None:
        """Fill a slot. A recorded step applies its rules if `is_recorded` and `can_record`. Else it leaves the row to
        the caller."""
        self._many_words.pop(slot, None)
        kind = BIASED * self._has_bias(slot, request.params) + MARKED * self._has_marks(slot, request)
        words = _long_words(request.params)
        if not can_record(request.params):
            self._many_words[slot] = ManyWords(words, request.token_ids, self._device)
        elif words:
            self._write_words(slot, words, request.token_ids)
            kind += WORDED
        kinds = kind, kind if is_recorded and slot not in self._many_words else 0
        if kinds != self._kinds_of[slot]:
            self._kinds[:, slot] = self._tensor(kinds, torch.int32)
            self._kinds_of[slot] = kinds

    def has_rules(self, slot: int) -> bool:
        return self._kinds_of[slot] != (0, 0) or slot in self._many_words

    def apply(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """`apply_rules` to rows of which a recorded step draws some, in place."""
        return apply_rules(logits, slots, positions, self._kinds[1], self.state)

    def record(self, drawn: Tensor, is_none: Tensor, status: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """`record_drawn` of rows of which a recorded step draws some."""
        return record_drawn(drawn, is_none, status, slots, positions, self._kinds[1], self.state)

    def apply_all(self, logits: Tensor, slots: Sequence[int], slot_of: Tensor, positions: Tensor) -> Tensor:
        """`apply_rules` to rows whose slots the host knows, in place. slots and slot_of are the same."""
        status = apply_rules(logits, slot_of, positions, self._kinds[0], self.state)
        for row, slot in enumerate(slots):
            if slot in self._many_words:
                self._many_words[slot].apply(logits[row])
        return status

    def record_all(
        self, drawn: Tensor, is_none: Tensor, status: Tensor, slots: Sequence[int], slot_of: Tensor, positions: Tensor
    ) -> None:
        """`record_drawn` of such rows."""
        record_drawn(drawn, is_none, status, slot_of, positions, self._kinds[0], self.state)
        for row, slot in enumerate(slots):
            if slot in self._many_words:
                self._many_words[slot].record(drawn[row : row + 1])

    def _has_bias(self, slot: int, params: SamplingParams) -> bool:
        """Write the row of biases, with -inf for ids that are never allowed. False if there are none."""
        forbidden = [word[0] for word in params.bad_words if len(word) == 1]
        if not (params.allowed_token_ids or params.logit_bias or forbidden):
            return False
        bias = self.state.bias[slot].fill_(_NEVER if params.allowed_token_ids else 0.0)
        if params.allowed_token_ids:
            bias.index_fill_(0, self._tensor(params.allowed_token_ids), 0.0)
        if params.logit_bias:
            sums: dict[int, float] = defaultdict(float)
            for token_id, value in params.logit_bias:
                sums[token_id] += value
            bias.index_add_(0, self._tensor(list(sums)), self._tensor(list(sums.values()), torch.float32))
        if forbidden:
            bias.index_fill_(0, self._tensor(forbidden), _NEVER)
        return True

    def _has_marks(self, slot: int, request: SlotRequest) -> bool:
        """Write penalties and the row of marks. False if there are neither penalties nor `min_tokens`."""
        params, num_prompt = request.params, request.num_prompt
        asked = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        end_ids = tuple(dict.fromkeys(params.eos_token_ids + params.stop_token_ids)) if params.min_tokens else ()
        if asked == (1.0, 0.0, 0.0) and not end_ids:
            return False
        self.state.penalties[slot] = self._tensor(asked, torch.float32)
        self.state.first_free[slot] = num_prompt + params.min_tokens
        marks = self.state.marks[slot].zero_()
        marks.index_fill_(0, self._tensor(request.token_ids[:num_prompt]), PROMPT)
        output = self._tensor(request.token_ids[num_prompt:])
        marks.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        ends = self._tensor(end_ids)
        marks.index_add_(0, ends, torch.full_like(ends, ENDS, dtype=torch.int32))
        return True

    def _write_words(self, slot: int, words: Sequence[Sequence[int]], token_ids: Sequence[int]) -> None:
        prefixes = [[-1] * (MAX_PREFIX - len(word) + 1) + list(word[:-1]) for word in words]
        self.state.prefixes[slot, : len(words)] = self._tensor(prefixes, torch.int32)
        last_ids = [word[-1] for word in words] + [-1] * (MAX_WORDS - len(words))
        self.state.last_ids[slot] = self._tensor(last_ids, torch.int32)
        tail = [-1] * MAX_PREFIX
        for position in range(max(0, len(token_ids) - MAX_PREFIX), len(token_ids)):
            tail[position % MAX_PREFIX] = token_ids[position]
        self.state.tails[slot] = self._tensor(tail, torch.int32)

    def _tensor(self, values: Sequence[float] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        return from_host(torch.tensor(values, dtype=dtype), self._device)


class ManyWords:
    """Bad words of one request that are too many or too long for the state of a slot: forbids the last id of a word if
    the newest ids, prompt included, are its earlier ones."""

    def __init__(self, words: Sequence[Sequence[int]], token_ids: Sequence[int], device: torch.device) -> None:
        width = max(len(word) for word in words) - 1
        # Prefixes are aligned to the right; -1 matches anything in a prefix and nothing in the tail.
        prefixes = [[-1] * (width - len(word) + 1) + list(word[:-1]) for word in words]
        self._prefixes = from_host(torch.tensor(prefixes), device)
        self._is_free = self._prefixes == -1
        self._last_ids = from_host(torch.tensor([word[-1] for word in words]), device)
        tail = list(token_ids[-width:])
        self._tail = from_host(torch.tensor([-1] * (width - len(tail)) + tail), device)

    def apply(self, logits: Tensor) -> None:
        """Change `logits` [V] in place."""
        is_due = ((self._prefixes == self._tail) | self._is_free).all(dim=1)
        logits.index_add_(0, self._last_ids, torch.where(is_due, _NEVER, 0.0))

    def record(self, token_id: Tensor) -> None:
        """Add the drawn id, [1] int64, to the newest ids."""
        self._tail = torch.cat([self._tail[1:], token_id])
