"""Protocols of what this package calls: the router, its token streams, and the check of grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from inferd.engine.api.wire.messages import Delta, EngineStats, FinishReason, Ready, Submit


class TokenStream(Protocol):
    """One choice's tokens. Deltas that pile up arrive merged; the last one has a finish reason."""

    @property
    def scheduled_s(self) -> float | None:
        """When its first step began (`time.monotonic`, as all times here); None before."""
        ...

    @property
    def first_token_s(self) -> float | None: ...

    @property
    def last_token_s(self) -> float | None: ...

    @property
    def num_generated(self) -> int:
        """Tokens that have come so far, read or not."""
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Delta:
        """Raises `EngineDeadError` if the engine ended before the choice did."""
        ...

    def abort(self, reason: FinishReason = "abort") -> None:
        """Stop generating. Idempotent; the metrics count it under `reason`."""
        ...


class Grammars(Protocol):
    """Checks a grammar before a choice carries it."""

    async def check(self, text: str, param: str, tenant: str) -> str:
        """The grammar in the form that the engine takes. Raises `RequestError`, which names `param`.

        If grammars wait, tenants take turns. A request that would wait long is refused with a Retry-After.
        """
        ...


class Router(Protocol):
    """Takes choices and generates them."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_leaving(self) -> bool:
        """Whether the server is about to stop: then it is not ready, and may still take requests."""
        ...

    @property
    def is_recovering(self) -> bool:
        """Whether an engine was lost, and requests wait for the next one."""
        ...

    @property
    def ready(self) -> Ready:
        """The engine's measurements at start. Raises `EngineDeadError` before the first engine is ready."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The engine's counters after its newest step."""
        ...

    def check_queue(self, tenant: str, num_tokens: int, left_s: float | None = None, num_choices: int = 1) -> None:
        """Raises `RequestError` if the queue has no place now for so many choices with at least so many prompt tokens.

        `left_s`: seconds left until the first token is due; None: no target.
        """
        ...

    def submit_choices(
        self,
        submits: Sequence[Submit],
        *,
        goes_on: bool = False,
        num_choices: int | None = None,
        num_tokens: int | None = None,
    ) -> Sequence[TokenStream]:
        """Submit the choices of one prompt, which differ in id and seed alone. If one cannot be taken now, raises
        `RequestError` and takes none.

        `goes_on`: as in `submit`. `num_choices`, `num_tokens`: choices and prompt tokens of the whole request, which is
        admitted with its first piece; by default this piece is all of it.
        """
        ...

    def submit(self, submit: Submit, *, goes_on: bool = False) -> TokenStream:
        """Raises `RequestError` if the choice cannot be taken now.

        `goes_on`: it is a later piece of an admitted request.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request holds."""
        ...
