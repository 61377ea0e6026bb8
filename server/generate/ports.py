"""What this room needs of the router, and no more: submit a choice, read its deltas, abort it."""

from __future__ import annotations

from typing import Protocol, Self

from inferd.engine.api.messages import Delta, EngineStats, FinishReason, Ready, Submit


class TokenStream(Protocol):
    """One choice's tokens. Deltas that pile up arrive merged; the last one has a finish reason."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Delta:
        """Raises `EngineDeadError` where the engine ended before the choice did."""
        ...

    def abort(self, reason: FinishReason = "abort") -> None:
        """Stop generating. Idempotent; `reason` is what the metrics count it as."""
        ...


class Router(Protocol):
    """Where choices are submitted."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def ready(self) -> Ready:
        """Raises `EngineDeadError` before an engine was ready."""
        ...

    @property
    def stats(self) -> EngineStats:
        """After the newest step."""
        ...

    def submit(self, submit: Submit) -> TokenStream:
        """Raises `RequestError` where the choice cannot be taken now."""
        ...
