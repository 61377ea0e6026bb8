"""Responses that are generated in the background. Clients can read and cancel them until they are stored."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from inferd.engine.api.errors import EngineDeadError, RequestError
from inferd.server.endpoints.responses.store import Stored
from inferd.server.errors import messages as errors
from inferd.server.generate.events import Event

logger = logging.getLogger("inferd.server")

MAX_RUNNING = 100
"""Maximum number of running jobs of one tenant."""
MAX_RUNNING_IN_ALL = 1_000
MAX_RUNNING_BYTES, MAX_RUNNING_BYTES_IN_ALL = 2**26, 2**28
"""Maximum bytes of requests and conversations that jobs hold. `BodyLimit` counts a body only until its answer. A job
that runs alone may hold any number of bytes."""


class RunningResponse(Protocol):
    """A response while it is made."""

    id: str

    def feed(self, event: Event) -> Iterable[object]:
        """Add an event. The result must be read to its end."""
        ...

    def finish(self) -> None:
        """Every event has come."""
        ...

    def fail(self, error: RequestError | EngineDeadError) -> None: ...

    def cancel(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One of them."""

    tenant: str
    response: RunningResponse
    events: AsyncGenerator[Event, None]
    close: Callable[[], None]
    """Ends the generation; idempotent."""
    snapshot: Callable[[], Stored]
    """The response as it is now."""
    keep: Callable[[], None]
    """Stores the response at its end, however it ended."""
    num_bytes: int
    """Bytes of its request and its conversation."""


class Background:
    """The running jobs. They belong to the event loop."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], tuple[Job, asyncio.Task[None]]] = {}
        self._num_of_tenant: Counter[str] = Counter()
        self._bytes_of_tenant: Counter[str] = Counter()

    def check_room(self, tenant: str, num_bytes: int) -> None:
        """Raises `RequestError` if the tenant may not start another job with so many bytes."""
        if self._num_of_tenant[tenant] >= MAX_RUNNING:
            message = f"At most {MAX_RUNNING} of your responses may run in the background. Wait for one, or cancel one."
            raise RequestError("slow_down", message, "background")
        if len(self._running) >= MAX_RUNNING_IN_ALL:
            message = (
                f"{MAX_RUNNING_IN_ALL} responses are running in the background, the maximum. Please try again later."
            )
            raise RequestError("server_is_overloaded", message, "background")
        own, in_all = self._bytes_of_tenant[tenant], self._bytes_of_tenant.total()
        if own and own + num_bytes > MAX_RUNNING_BYTES:
            message = (
                f"Your responses in the background hold {own} bytes, and this one needs {num_bytes} more. At most "
                f"{MAX_RUNNING_BYTES} are allowed. Please try again later."
            )
            raise RequestError("slow_down", message, "background")
        if in_all and in_all + num_bytes > MAX_RUNNING_BYTES_IN_ALL:
            message = (
                f"All responses in the background hold {in_all} bytes, and this one needs {num_bytes} more. At most "
                f"{MAX_RUNNING_BYTES_IN_ALL} are allowed. Please try again later."
            )
            raise RequestError("server_is_overloaded", message, "background")

    def start(self, job: Job) -> None:
        """Generate until the answer ends or is cancelled."""
        key = (job.tenant, job.response.id)
        task = asyncio.create_task(_feed(job))
        self._running[key] = job, task
        self._num_of_tenant[job.tenant] += 1
        self._bytes_of_tenant[job.tenant] += job.num_bytes
        # A callback, because a task that is cancelled before its first step never runs any code of its own.
        task.add_done_callback(lambda task: self._settle(key, task))

    def get(self, tenant: str, response_id: str) -> Stored | None:
        """The response as it is now; None if it is not running."""
        running = self._running.get((tenant, response_id))
        return None if running is None else running[0].snapshot()

    async def cancel(self, tenant: str, response_id: str) -> None:
        """Cancel a job and wait for its end."""
        running = self._running.get((tenant, response_id))
        if running is not None:
            running[1].cancel()
            await asyncio.wait([running[1]])

    async def close(self) -> None:
        """Cancel all jobs."""
        for key in list(self._running):
            await self.cancel(*key)

    def _settle(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        job, _ = self._running.pop(key)
        self._num_of_tenant[job.tenant] -= 1
        self._bytes_of_tenant[job.tenant] -= job.num_bytes
        if not self._num_of_tenant[job.tenant]:
            del self._num_of_tenant[job.tenant], self._bytes_of_tenant[job.tenant]
        try:
            job.close()
            _end(job, task)
        finally:
            job.keep()


def _end(job: Job, task: asyncio.Task[None]) -> None:
    """Set the response's status if it was cancelled or failed."""
    error = None if task.cancelled() else task.exception()
    if task.cancelled():
        job.response.cancel()
    elif isinstance(error, (RequestError, EngineDeadError)):
        job.response.fail(error)
    elif error is not None:
        logger.error("response %s failed in the background", job.response.id, exc_info=error)
        job.response.fail(errors.internal_error())


async def _feed(job: Job) -> None:
    try:
        async for event in job.events:
            for _ in job.response.feed(event):
                pass
    finally:
        await job.events.aclose()
    job.response.finish()  # in the task, so that an error here ends the response as failed
