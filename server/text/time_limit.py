"""Runs Python code for a limited time: a chat template is a program and may loop forever.

The code gets a thread of its own. Past the limit, an exception raised from outside ends this thread. The exception
interrupts every Python loop, and templates are compiled to such loops, but no single call into C. Nothing else runs on
the thread, so the exception may arrive anywhere in the code.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_RETRY_S = 0.1
"""Seconds between attempts: an exception that arrives in a destructor is lost, so it is sent until the thread ends."""


class OvertimeError(Exception):
    """The code was ended because it took longer than its limit."""


class _End(SystemExit):
    """Raised in the thread. No handler for `Exception` catches it, and the thread that it ends logs nothing."""


class TimeLimited(Generic[T]):
    """One piece of work. Call it once, on a thread that may block: the call lasts as long as the work."""

    def __init__(self, work: Callable[[], T], limit_s: float) -> None:
        self._work, self._limit_s = work, limit_s
        self._result: list[T] = []
        self._error: BaseException | None = None

    def __call__(self) -> T:
        """Run the work. Raises what the work raises, and `OvertimeError` past the limit."""
        thread = threading.Thread(target=self._run, name="inferd-limited", daemon=True)
        thread.start()
        thread.join(self._limit_s)
        while thread.is_alive():
            assert thread.ident is not None
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_End))
            thread.join(_RETRY_S)
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it refers to this frame, and would keep itself alive
        if not self._result:
            raise OvertimeError(f"it took longer than {self._limit_s:g} s")
        return self._result[0]

    def _run(self) -> None:
        """Runs on the thread. The exception may arrive between any two lines: the result is then absent or complete."""
        try:
            self._result.append(self._work())
        except _End:
            pass
        except BaseException as error:
            self._error = error
