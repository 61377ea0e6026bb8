"""The trace that a request belongs to, if traces are on. Knows no library of traces: `tracing` is loaded on demand."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from inferd.server.observability.request_record import RequestRecord


class RequestTrace(Protocol):
    """Collects what became of a request's sequences."""

    def ended(self, record: RequestRecord, num_restarts: int, model: str) -> None:
        """A sequence of a model ended. `num_restarts`: engines that died while they had it."""
        ...


current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)
"""The trace of the HTTP request that the present task answers."""
