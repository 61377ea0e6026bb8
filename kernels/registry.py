"""Chooses the implementation of an op: ordered candidates, each able to say why it cannot run, and a record of the
choices.

An op has a *key*: a small hashable tuple of everything that its implementations may decide by (device type, dtypes,
head size). The choice is made once per key and is a dict lookup afterwards. The registry knows no config and no
environment; a caller that wants one particular implementation calls `force`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

ROWS_SHARE_SUMS = "torch splits the sum over a row by the number of rows"
"""Why a plain reference that sums over rows varies on a GPU (`Implementation.varies`)."""

Key = TypeVar("Key", bound=Hashable)
Run = TypeVar("Run", bound=Callable[..., Any])


class KernelError(RuntimeError):
    """No implementation can run, or not the forced one. Says why for each that was tried."""


def always(_: Hashable) -> str | None:
    """The predicate of an implementation that runs everywhere."""
    return None


@dataclass(frozen=True, slots=True)
class Deferred:
    """A function by its module and name, imported when it is chosen. Triton exists on Linux alone, and importing it
    takes a fifth of a second that a CPU start need not spend."""

    module: str
    name: str

    def load(self) -> Any:
        """Raises `KernelError` if the module or a library that it needs cannot be imported."""
        try:
            return getattr(importlib.import_module(self.module), self.name)
        except ImportError as error:
            raise KernelError(f"{self.module} cannot be imported: {error}; repair or uninstall that library") from error


@dataclass(frozen=True, slots=True)
class Implementation(Generic[Key, Run]):
    """One way to compute an op. `predicate(key)` is None if it can run, else the reason why not."""

    name: str
    run: Run | Deferred
    predicate: Callable[[Key], str | None]
    varies: str | None = None
    """Why a row's bits may depend on the other rows on a GPU; None if they do not."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The implementation chosen for one key of an op, and why earlier candidates were refused."""

    op: str
    key: Hashable
    chosen: str
    refused: tuple[tuple[str, str], ...]
    """(implementation, reason), in order of preference."""
    varies: str | None = None
    """`Implementation.varies` of the chosen one."""


class Op(Generic[Key, Run]):
    """An op's implementations, best first. Creating an op registers it for `explain`."""

    def __init__(self, name: str, implementations: Sequence[Implementation[Key, Run]]) -> None:
        assert implementations, f"op {name} has no implementation"
        assert name not in _OPS, f"op {name} is defined twice"
        self.name = name
        self._implementations = tuple(implementations)
        self._forced: str | None = None
        self._excluded: frozenset[str] = frozenset()
        self._resolved: dict[Key, tuple[Run, Selection]] = {}
        _OPS[name] = self

    @property
    def implementation_names(self) -> tuple[str, ...]:
        """Every implementation, best first."""
        return tuple(implementation.name for implementation in self._implementations)

    def force(self, name: str | None) -> None:
        """Run `name` and nothing else; None lifts this again. Raises `KernelError` if the op has no such
        implementation."""
        if name is not None and name not in self.implementation_names:
            known = ", ".join(self.implementation_names)
            raise KernelError(f"{self.name}: no implementation is called {name!r}; known are: {known}")
        self._forced = name
        self._resolved.clear()

    def exclude(self, names: Collection[str]) -> None:
        """Run none of `names`, until the next call."""
        assert set(names) <= set(self.implementation_names)
        self._excluded = frozenset(names)
        self._resolved.clear()

    def resolve(self, key: Key) -> Run:
        """The callable for `key`. Raises `KernelError` if none can run."""
        found = self._resolved.get(key)
        if found is None:
            found = self._resolved[key] = self._choose(key)
        return found[0]

    def choice(self, key: Key) -> Selection:
        """The implementation that `resolve` takes, with reasons. Raises `KernelError` if none can run."""
        self.resolve(key)
        return self._resolved[key][1]

    def choices(self) -> tuple[Selection, ...]:
        """The choice for each key seen so far."""
        return tuple(choice for _, choice in self._resolved.values())

    def _choose(self, key: Key) -> tuple[Run, Selection]:
        refused: list[tuple[str, str]] = []
        for implementation in self._implementations:
            if self._forced not in (None, implementation.name):
                refused.append((implementation.name, f"{self._forced} is forced"))
                continue
            is_excluded = implementation.name in self._excluded
            reason = "is switched off" if is_excluded else implementation.predicate(key)
            if reason is None:
                run = implementation.run
                run = run.load() if isinstance(run, Deferred) else run
                return run, Selection(self.name, key, implementation.name, tuple(refused), implementation.varies)
            refused.append((implementation.name, reason))
        tried = "; ".join(f"{name}: {reason}" for name, reason in refused)
        raise KernelError(f"{self.name}: no implementation can run for {key} ({tried})")


_OPS: dict[str, Op[Any, Any]] = {}


def ops() -> dict[str, Op[Any, Any]]:
    """Every op imported so far, by name."""
    return dict(_OPS)


def explain() -> tuple[Selection, ...]:
    """Every choice made in this process so far, by op and then in order of occurrence."""
    return tuple(choice for name in sorted(_OPS) for choice in _OPS[name].choices())
