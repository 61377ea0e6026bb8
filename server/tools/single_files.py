"""Imports single files of a library, without the code of the packages that they lie in.

The code of transformers' packages imports most of the library, which takes 0.7 s of processor time (one core, AMD EPYC
Zen 3, transformers 5.23, 2026-11-29). A server needs a few of its files.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


def skip_code_of(*packages: str) -> list[str]:
    """Have Python import files of these packages without the packages' own code, from now on. A package comes after the
    one that it lies in.

    Returns those that this concerns: others were imported before.
    """
    skipped = []
    for name in packages:
        if name in sys.modules:
            continue
        found = importlib.util.find_spec(name)
        if found is None or found.submodule_search_locations is None:
            raise ModuleNotFoundError(f"no package {name}", name=name)
        package = ModuleType(name)
        package.__path__ = list(found.submodule_search_locations)
        sys.modules[name] = package
        skipped.append(name)
    return skipped


@contextmanager
def single_files(*packages: str) -> Iterator[None]:
    """`skip_code_of` for a few imports. The files stay imported. If a package is imported later, its code runs and uses
    the same files."""
    skipped = skip_code_of(*packages)
    try:
        yield
    finally:
        for name in skipped:
            del sys.modules[name]
