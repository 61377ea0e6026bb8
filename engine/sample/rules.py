"""Rules that change a row of logits before temperature: one class per option, one instance per request.

A rule's state lives on the device and is updated with each drawn id, because the host learns ids a step later. `RULES`
is the order in which rules apply. The rules of a request know nothing of other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inferd.engine.api.wire.params import SamplingParams
from inferd.kernels.gpu import from_host

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request as it enters a slot: its parameters, and its ids so far (prompt and output)."""

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt: int
    vocab_size: int
    device: torch.device

    def tensor(self, values: Sequence[float] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        return from_host(torch.tensor(values, dtype=dtype), self.device)


class Rule(Protocol):
    """One option of one request."""

    def apply(self, logits: Tensor, position: int) -> None:
        """Change `logits` [V], fp32, in place, for a draw at absolute `position`."""
        ...

    def record(self, token_id: Tensor) -> None:
        """Update the state with the drawn id, [1] int64."""
        ...


class AllowedIds:
    """`allowed_token_ids`: forbids every other id."""

    def __init__(self, request: Admitted) -> None:
        self._forbidden = torch.ones(request.vocab_size, dtype=torch.bool, device=request.device)
        self._forbidden[request.tensor(request.params.allowed_token_ids)] = False

    @classmethod
    def of(cls, request: Admitted) -> AllowedIds | None:
        return cls(request) if request.params.allowed_token_ids else None

    def apply(self, logits: Tensor, position: int) -> None:
        logits.masked_fill_(self._forbidden, _NEVER)

    def record(self, token_id: Tensor) -> None:
        pass


class LogitBias:
    """`logit_bias`: adds to single logits. Biases add up if an id is given twice."""

    def __init__(self, request: Admitted) -> None:
        token_ids, biases = zip(*request.params.logit_bias, strict=True)
        self._bias = torch.zeros(request.vocab_size, dtype=torch.float32, device=request.device)
        self._bias.index_add_(0, request.tensor(token_ids), request.tensor(biases, torch.float32))

    @classmethod
    def of(cls, request: Admitted) -> LogitBias | None:
        return cls(request) if request.params.logit_bias else None

    def apply(self, logits: Tensor, position: int) -> None:
        logits.add_(self._bias)

    def record(self, token_id: Tensor) -> None:
        pass


class Penalties:
    """`repetition_penalty` over prompt and output: divides logits above 0, multiplies others. `presence_penalty` and
    `frequency_penalty` over the output."""

    def __init__(self, request: Admitted) -> None:
        params = request.params
        self._repetition, self._presence = params.repetition_penalty, params.presence_penalty
        self._frequency = params.frequency_penalty
        self._is_seen = torch.zeros(request.vocab_size, dtype=torch.bool, device=request.device)
        self._is_seen[request.tensor(request.token_ids)] = True
        self._counts = torch.zeros(request.vocab_size, dtype=torch.float32, device=request.device)
        self._one = torch.ones(1, dtype=torch.float32, device=request.device)
        output = request.tensor(request.token_ids[request.num_prompt :])
        self._counts.index_add_(0, output, torch.ones_like(output, dtype=torch.float32))

    @classmethod
    def of(cls, request: Admitted) -> Penalties | None:
        params = request.params
        is_off = params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0
        return None if is_off else cls(request)

    def apply(self, logits: Tensor, position: int) -> None:
        if self._repetition != 1.0:
            penalised = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
            logits.copy_(torch.where(self._is_seen, penalised, logits))
        logits.sub_(self._counts * self._frequency)
        logits.sub_((self._counts > 0).to(torch.float32) * self._presence)

    def record(self, token_id: Tensor) -> None:
        self._is_seen.index_fill_(0, token_id, True)
        self._counts.index_add_(0, token_id, self._one)


class MinTokens:
    """`min_tokens`: forbids ids that end the generation until so many tokens were drawn."""

    def __init__(self, request: Admitted) -> None:
        self._end_ids = request.tensor(request.params.eos_token_ids + request.params.stop_token_ids)
        self._first_free = request.num_prompt + request.params.min_tokens

    @classmethod
    def of(cls, request: Admitted) -> MinTokens | None:
        params = request.params
        return cls(request) if params.min_tokens and (params.eos_token_ids or params.stop_token_ids) else None

    def apply(self, logits: Tensor, position: int) -> None:
        if position < self._first_free:
            logits.index_fill_(0, self._end_ids, _NEVER)

    def record(self, token_id: Tensor) -> None:
        pass


class BadWords:
    """`bad_words`: forbids the last id of a sequence if the newest ids, prompt included, are its earlier ones."""

    def __init__(self, request: Admitted) -> None:
        words = request.params.bad_words
        width = max(len(word) for word in words) - 1
        # Prefixes are aligned to the right; -1 matches anything in a prefix and nothing in the tail.
        self._prefixes = request.tensor([[-1] * (width - len(word) + 1) + list(word[:-1]) for word in words])
        self._is_free = self._prefixes == -1
        self._last_ids = request.tensor([word[-1] for word in words])
        tail = list(request.token_ids[-width:]) if width else []
        self._tail = request.tensor([-1] * (width - len(tail)) + tail)

    @classmethod
    def of(cls, request: Admitted) -> BadWords | None:
        return cls(request) if request.params.bad_words else None

    def apply(self, logits: Tensor, position: int) -> None:
        is_due = ((self._prefixes == self._tail) | self._is_free).all(dim=1)
        logits.index_add_(0, self._last_ids, torch.where(is_due, _NEVER, 0.0))

    def record(self, token_id: Tensor) -> None:
        if self._tail.numel():
            self._tail = torch.cat([self._tail[1:], token_id])


RULES: tuple[Callable[[Admitted], Rule | None], ...] = (
    AllowedIds.of,
    LogitBias.of,
    Penalties.of,
    MinTokens.of,
    BadWords.of,
)
"""In the order of application. Each makes a request's rule, or returns None if the request does not ask for it."""


def rules_for(request: Admitted) -> tuple[Rule, ...]:
    """The rules that a request asks for, in the order of application."""
    return tuple(rule for make in RULES if (rule := make(request)) is not None)
