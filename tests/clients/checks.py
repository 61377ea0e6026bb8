"""Shared by the checks of Python clients: the server's address, and how a check reports.

It imports only the standard library, because it runs in each client's own environment.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

URL = os.environ["INFERD_URL"]
BASE_URL = f"{URL}/v1"
KEY = os.environ["INFERD_KEY"]
MODEL = "tiny"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
WEATHER_QUESTION = "What is the weather in Paris?"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

_CHECKS: list[Callable[[], Any]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Decorator of a check. A check fails by raising. Its report shows its docstring's first line, else its name."""
    _CHECKS.append(function)
    return function


def check_each(cases: Iterable[str]) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Decorator of a check that is made of each case. Its report shows the case, and the docstring's first line."""

    def checked(function: Callable[[str], Any]) -> Callable[[str], Any]:
        for case in cases:
            one: Any = partial(function, case)
            one.__doc__ = f"{case.replace('_', ' ')}: {function.__doc__}"
            check(one)
        return function

    return checked


def raised(kind: type[Exception], call: Callable[[], object]) -> Any:
    """The error of this kind that `call` raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def run() -> None:
    """Run every check of the script in order, or as many as `NUM_CHECKS` says. Exits with 1 if a check failed."""
    failed = 0
    for function in _CHECKS[: int(os.environ.get("NUM_CHECKS", len(_CHECKS)))]:
        what = (function.__doc__ or function.__name__.replace("_", " ")).strip().splitlines()[0]
        try:
            result = function()
            if inspect.isawaitable(result):
                asyncio.run(_wait(result))
        except Exception:
            failed += 1
            print(f"FAILED {what}", flush=True)
            traceback.print_exc(file=sys.stdout)
        else:
            print(f"ok {what}", flush=True)
    sys.exit(1 if failed else 0)


async def _wait(result: Any) -> None:
    await result
