"""Threads that ask for batches. The process can end while they wait for an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from inferd.server.commands.embed.lines import Line
from inferd.server.commands.embed.output import Row


class Workers:
    """Threads that call `rows`. The executors of Python are not used: the end of the process waits for their threads,
    and one of these may wait for an answer that never comes."""

    def __init__(self, rows: Callable[[Sequence[Line]], list[Row]], num_threads: int) -> None:
        self._rows = rows
        self._asked = SimpleQueue[tuple[Sequence[Line], Future[list[Row]]] | None]()
        self._num_threads = num_threads
        for index in range(num_threads):
            threading.Thread(target=self._work, name=f"embed_{index}", daemon=True).start()

    def submit(self, lines: Sequence[Line]) -> Future[list[Row]]:
        """The rows of a batch, once a thread has them."""
        future = Future[list[Row]]()
        self._asked.put((lines, future))
        return future

    def close(self) -> None:
        """Let the threads end after the batches that were submitted. Does not wait for them."""
        for _ in range(self._num_threads):
            self._asked.put(None)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            lines, future = asked
            try:
                future.set_result(self._rows(lines))
            except Exception as error:
                future.set_exception(error)
