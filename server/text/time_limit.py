"""Python code that runs for a limited time: a chat template is a program, and may have no end.

The code has a thread of its own, which past its limit is ended by an exception raised in it from outside. That reaches
every loop of Python's, which is what templates are compiled to, and no single call into C. Nothing else ever runs on
that thread, so it does not matter where the exception finds it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_RETRY_S = 0.1
"""The exception is lost where it arrives in a destructor: it is sent until the thread has ended."""


class OvertimeError(Exception):
    """The code was ended: it took longer than it may."""


class _End(SystemExit):
    """What is raised in the thread. No handler for `Exception` keeps it, and a thread that it ends is silent."""


class TimeLimited(Generic[T]):
    """One piece of work, to be called once, on a thread that may wait for it: a call lasts as long as the work."""

    def __init__(self, work: Callable[[], T], limit_s: float) -> None:
        self._work, self._limit_s = work, limit_s
        self._result: list[T] = []
        self._error: BaseException | None = None

    def __call__(self) -> T:
        """What the work returns. Raises what it raises, and `OvertimeError` past its limit."""
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
                del error  # it names this frame, and would keep itself
        if not self._result:
            raise OvertimeError(f"it took longer than {self._limit_s:g} s")
        return self._result[0]

    def _run(self) -> None:
        """On the thread. The exception may arrive between any two of these lines: then there is no result, or there is
        one whole."""
        try:
            self._result.append(self._work())
        except _End:
            pass
        except BaseException as error:
            self._error = error
