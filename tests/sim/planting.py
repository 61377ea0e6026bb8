"""Bugs that serving engines have shipped, planted one at a time. Each must be caught by the simulation.

A mutation patches one method of the product through pytest's `monkeypatch`; the class of bug is in its docstring. A new
promise of scheduler, cache, router or recovery deserves a new mutation, in the file of its room.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


class Plants(list[Mutation]):
    """The mutations of one file; decorates each."""

    def __call__(self, mutation: Mutation) -> Mutation:
        self.append(mutation)
        return mutation
