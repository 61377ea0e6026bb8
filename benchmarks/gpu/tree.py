"""The import root if nothing is installed: links `inferd`, `benchmarks` and `tests` in the build folder.

The checkout itself must not be on the path of a measured process: transformers would take its folder `kernels` for a
package of that name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "gpu" / "tree"
_LINKS = {
    "inferd/server": "server",
    "inferd/engine": "engine",
    "inferd/kernels": "kernels",
    "benchmarks": "benchmarks",
    "examples": "examples",
    "tests": "tests",
}
SOURCES = frozenset(_LINKS.values())
"""Folders of the checkout that hold code."""


def make_tree(tree: Path = TREE) -> Path:
    """Make the missing links, and return the folder for the path."""
    for name, target in _LINKS.items():
        link = tree / name
        if not (link.is_symlink() and link.resolve() == ROOT / target):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(ROOT / target, target_is_directory=True)
    return tree


def environment(tree: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a row's process: the tree comes first on the path, and compiled kernels are kept in the build
    folder."""
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH", ""))))
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {
        **kept,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "OMP_WAIT_POLICY": "passive",
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR") or str(ROOT / "build" / "cache" / "triton"),
        "HF_HUB_OFFLINE": "1",
        **(more or {}),
    }
