"""Bugs that serving engines have shipped, planted one at a time. The simulation must catch each of them.

A mutation patches one method of the product through pytest's `monkeypatch`; its docstring names the class of bug. A new
promise of scheduler, cache, router or recovery needs a new mutation, in the file of that package.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


class Plants(list[Mutation]):
    """The mutations of one file, collected by a decorator."""

    def __call__(self, mutation: Mutation) -> Mutation:
        self.append(mutation)
        return mutation
