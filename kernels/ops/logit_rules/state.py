"""State of the rules of S slots, on the device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

BIASED, MARKED, WORDED = 1, 2, 4
"""Kinds of rules: the slot has a row of `bias`, of `marks`, of `prefixes`. Other rows may hold anything."""
PROMPT, ENDS = 1 << 30, -(1 << 31)
"""Bits of a mark: the token occurs in the prompt; it ends the generation. The lower bits are the number of times that
it was drawn."""
SOUND, UNSOUND = 1, 2
"""Kinds of rows before their rules."""
FAILED, EMPTY = -1, -2
"""Outcomes of rows without an id. FAILED: the logits held NaN or +inf, or nothing above -inf. EMPTY: the row's rules
left no token."""
MAX_WORDS, MAX_PREFIX = 256, 16
"""W and T of the tensors that are made for a device. Both are powers of two."""


class RuleState(NamedTuple):
    penalties: Tensor
    """[S, 3] fp32: repetition, presence, frequency."""
    first_free: Tensor
    """[S] int64: the first position where a token may end the generation."""
    bias: Tensor
    """[S, V] fp32, added to the logits; -inf for tokens that may not be drawn."""
    marks: Tensor
    """[S, V] int32: a count, with `PROMPT` and `ENDS`."""
    prefixes: Tensor
    """[S, W, T] int32: all tokens of a word but its last, aligned to the right behind -1, which matches any token."""
    last_ids: Tensor
    """[S, W] int32: the last token of each word, which may not follow its prefix; -1: no word."""
    tails: Tensor
    """[S, T] int32: the last T tokens, each at its position modulo T; -1 before the first token."""
