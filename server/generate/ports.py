"""What this room needs of the router, and no more: submit a choice, read its deltas, abort it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from inferd.engine.api.wire.messages import Delta, EngineStats, FinishReason, Ready, Submit


class TokenStream(Protocol):
    """One choice's tokens. Deltas that pile up arrive merged; the last one has a finish reason."""

    @property
    def scheduled_s(self) -> float | None:
        """When its first step began (`time.monotonic`, as all here); None before."""
        ...

    @property
    def first_token_s(self) -> float | None: ...

    @property
    def last_token_s(self) -> float | None: ...

    @property
    def num_generated(self) -> int:
        """Tokens that came so far, taken or not."""
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Delta:
        """Raises `EngineDeadError` where the engine ended before the choice did."""
        ...

    def abort(self, reason: FinishReason = "abort") -> None:
        """Stop generating. Idempotent; `reason` is what the metrics count it as."""
        ...


class Grammars(Protocol):
    """Tries a grammar out before a choice carries it."""

    async def check(self, text: str, param: str, tenant: str) -> str:
        """The grammar as the engine is to be given it. Raises `RequestError`, which names `param`.

        Tenants take turns where grammars wait, and no request waits long: it is told when to ask again.
        """
        ...


class Router(Protocol):
    """Where choices are submitted."""

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
        """Raises `EngineDeadError` before an engine was ready."""
        ...

    @property
    def stats(self) -> EngineStats:
        """After the newest step."""
        ...

    def check_queue(
        self, tenant: str, num_tokens: int, ttft_target_s: float | None = None, num_choices: int = 1
    ) -> None:
        """Raises `RequestError` where a request of so many choices, with prompts of at least so many tokens together,
        would be refused for all that waits.

        `ttft_target_s`: its own; None: any.
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
        """Submit the choices of one prompt, which differ in id and seed alone. Raises `RequestError` and takes none
        where one cannot be taken now.

        `goes_on`: as in `submit`. `num_choices`, `num_tokens`: choices and prompt tokens of the whole request, for
        which room is asked with its first piece; by default this piece is all of it.
        """
        ...

    def submit(self, submit: Submit, *, goes_on: bool = False) -> TokenStream:
        """Raises `RequestError` where the choice cannot be taken now.

        `goes_on`: it is a later piece of a request that was taken.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request holds."""
        ...
