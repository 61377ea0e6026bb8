"""Writes a response, as a stream of events with consecutive numbers or as a plain answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import orjson

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.api.responses.draft import Json, ResponseDraft
from inferd.server.api.responses.output import OutputEvent
from inferd.server.errors import table as errors
from inferd.server.generate.events import Event
from inferd.server.transport import sse


class ResponsesRendering:
    """Writes one response. It ends with `response.completed`, `.incomplete` or `.failed`, without [DONE]."""

    keep_alive = sse.KEEP_ALIVE

    def __init__(self, draft: ResponseDraft, keep: Callable[[ResponseDraft], None]) -> None:
        """`keep` stores the response after a successful end."""
        self._draft, self._keep = draft, keep
        self._num_events = 0

    def event(self, event: Event) -> bytes:
        return self._written(self._begun()) + self._written(self._draft.feed(event))

    def end(self, extra: Json) -> bytes:
        self._finish()
        return self._written([(f"response.{self._draft.status}", {"response": {**self._draft.shown(), **extra}})])

    def failure(self, error: RequestError | EngineDeadError) -> bytes:
        """Two events, because some clients read the one and some the other."""
        body = errors.body_of(error)["error"]
        assert isinstance(body, dict)
        begun = self._written(self._begun())
        self._draft.fail(error)
        flat = {key: body[key] for key in ("code", "message", "param")}
        failed = {"response": self._draft.shown()}
        return begun + self._written([("error", {**flat, "error": body}), ("response.failed", failed)])

    def add(self, event: Event) -> None:
        for _ in self._draft.feed(event):
            pass

    def plain(self, extra: Json) -> Json:
        self._finish()
        return {**self._draft.shown(), **extra}

    def _finish(self) -> None:
        self._draft.finish()
        self._keep(self._draft)

    def _begun(self) -> Iterator[OutputEvent]:
        if self._num_events == 0:
            for kind in ("response.created", "response.in_progress"):
                yield kind, {"response": self._draft.shown()}

    def _written(self, events: Iterable[OutputEvent]) -> bytes:
        return b"".join(self._one(kind, fields) for kind, fields in events)

    def _one(self, kind: str, fields: Json) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return sse.event(data, kind)
