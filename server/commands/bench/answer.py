"""Reads the answer to one request: when tokens came, how many, and whether the server's counts agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one request. Times are in seconds of the generator's clock; `error` is None if it succeeded."""

    start_s: float
    """When the request was due. In an open loop this may be earlier than it was sent."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    """Times between tokens. Tokens that came together share their gap equally."""
    num_input: int = 0
    num_output: int = 0
    """`num_input` and `num_output` are the server's usage."""
    num_cached: int = 0
    num_streamed: int | None = None
    """Number of token ids in the stream, or None if the server sends none."""
    num_chunks: int = 0
    """Number of events that carried tokens or text."""
    error: str | None = None
    """A status and a code, by which the report groups failures. It holds no text of the server's."""
    message: str | None = None
    """The server's message if it refused the request."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.start_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_token_s is None else self.last_token_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first."""
        if self.first_token_s is None or self.last_token_s is None or self.num_output < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.num_output - 1)


@dataclass(slots=True)
class StreamReader:
    """Reads the events of one stream. The client calls `on_event`."""

    start_s: float
    expected_output: int
    is_done: bool = False
    error: str | None = None
    message: str | None = None
    _first_s: float | None = None
    _last_s: float | None = None
    _gaps_s: list[float] = field(default_factory=list)
    _num_ids: int = 0
    _num_chunks: int = 0
    _usage: dict[str, Any] = field(default_factory=dict)

    def on_event(self, payload: bytes, now: float) -> None:
        if payload.rstrip() == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self.error = "an event that is not JSON"
            return
        if chunk.get("error"):
            self.error = f"in the stream: {chunk['error'].get('code') or chunk['error'].get('type')}"
            self.message = str(chunk["error"].get("message") or "") or None
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            self._count(choice, now)

    def _count(self, choice: dict[str, Any], now: float) -> None:
        num_ids = len(choice.get("token_ids") or ())
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if not num_ids and not text:
            return
        self._num_ids += num_ids
        self._num_chunks += 1
        num_tokens = num_ids or 1
        if self._last_s is None:
            self._first_s = now
            # No time passed between tokens that came in one event with the first.
            self._gaps_s += [0.0] * (num_tokens - 1)
        else:
            self._gaps_s += [(now - self._last_s) / num_tokens] * num_tokens
        self._last_s = now

    def outcome(self) -> Outcome:
        """The result. An answer that was cut short, or has another length than asked for or counted, is an error."""
        num_output = int(self._usage.get("completion_tokens") or 0)
        num_streamed = self._num_ids or None
        return Outcome(
            start_s=self.start_s,
            first_token_s=self._first_s,
            last_token_s=self._last_s,
            gaps_s=tuple(self._gaps_s),
            num_input=int(self._usage.get("prompt_tokens") or 0),
            num_output=num_output,
            num_cached=int((self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
            num_streamed=num_streamed,
            num_chunks=self._num_chunks,
            error=self.error or self._disagreement(num_output, num_streamed),
            message=self.message,
        )

    def _disagreement(self, num_output: int, num_streamed: int | None) -> str | None:
        if not self.is_done:
            return "stream ended without [DONE]"
        if not self._usage:
            return "no usage in the stream"
        if num_streamed is not None and num_streamed != num_output:
            return "usage and stream disagree"
        if num_output != self.expected_output:
            return "not the output length asked for"
        return None
