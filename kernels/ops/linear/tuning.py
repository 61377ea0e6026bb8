"""The fastest product for a weight and a number of rows, measured once on a device and kept in a file.

This module holds a table of names, a JSON file, and a rule for cases without a measurement. It knows no kernel, clock
or environment: its callers provide the times and the directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

VERSION = 3
"""Version of the measurements. A changed kernel raises it, and the cases of old files are measured again."""
BUCKETS = (1, 2, 4, 8, 16)
"""Numbers of rows that are measured; any other takes the next larger one. More rows than the last have one choice."""
FEW_ROWS, LIBRARY = "few_rows", "library"
_DEFAULT_MAX_ROWS = 8
"""Most rows for which the kernel for few rows is taken without a measurement."""
_MAX_FILE_BYTES = 2**20

Measurements = Mapping[str, Callable[[], float]]
"""By choice: a function that runs it once and returns the seconds."""


@dataclass(frozen=True, slots=True)
class Case:
    """A weight's shape and a number of rows out of `BUCKETS`."""

    out_size: int
    in_size: int
    dtype: str
    num_rows: int

    @property
    def name(self) -> str:
        return f"{self.out_size}x{self.in_size} {self.dtype} {self.num_rows}"


@dataclass(slots=True)
class Table:
    """Choices by case, for one device and one version of the software, which `device` names."""

    device: str
    choices: dict[str, str] = field(default_factory=dict)
    _offers: dict[str, tuple[Case, Measurements]] = field(default_factory=dict, repr=False, compare=False)
    """Possible measurements, by the case's name."""

    def choice(self, case: Case) -> str:
        return self.choices.get(case.name, FEW_ROWS if case.num_rows <= _DEFAULT_MAX_ROWS else LIBRARY)

    def missing(self, cases: Iterable[Case]) -> list[Case]:
        """The cases without a measurement."""
        return [case for case in cases if case.name not in self.choices]

    def measure(self, case: Case, seconds: Measurements) -> None:
        """Measure each choice and keep the fastest; the first of equals."""
        taken = {name: measured() for name, measured in seconds.items()}
        self.choices[case.name] = min(taken, key=lambda name: taken[name])

    def offer(self, case: Case, seconds: Measurements) -> None:
        """Keep the measurements of `case` for `complete`, with the weight that they hold. Only a case's first offer
        counts."""
        self._offers.setdefault(case.name, (case, seconds))

    def complete(self) -> int:
        """Measure the offered cases that are not known, drop all offers, and return the number of measured cases."""
        offers = [(case, seconds) for case, seconds in self._offers.values() if case.name not in self.choices]
        self._offers.clear()
        for case, seconds in offers:
            self.measure(case, seconds)
        return len(offers)


def bucket(num_rows: int) -> int | None:
    """The measured number of rows that stands for these; None beyond all."""
    return next((size for size in BUCKETS if num_rows <= size), None)


def cases(out_size: int, in_size: int, dtype: str) -> list[Case]:
    return [Case(out_size, in_size, dtype, num_rows) for num_rows in BUCKETS]


def read(directory: Path, device: str) -> Table:
    """The table kept for `device`. A file that is missing, damaged, foreign or of another version counts as empty: it
    is a cache, and measuring again repairs it."""
    try:
        file = _file(directory, device)
        if file.stat().st_size > _MAX_FILE_BYTES:
            return Table(device)
        kept = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return Table(device)
    if not isinstance(kept, dict) or kept.get("version") != VERSION or kept.get("device") != device:
        return Table(device)
    choices = kept.get("choices")
    if not isinstance(choices, dict):
        return Table(device)
    return Table(device, {name: choice for name, choice in choices.items() if choice in (FEW_ROWS, LIBRARY)})


def write(directory: Path, table: Table) -> None:
    """Add `table` to the entries that others have written meanwhile. The file is replaced as a whole: if two processes
    write at once, one may lose its entries and measures them the next time. Raises `OSError` if nothing can be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    choices = read(directory, table.device).choices | table.choices
    text = json.dumps({"version": VERSION, "device": table.device, "choices": choices}, indent=1, sort_keys=True)
    handle, name = tempfile.mkstemp(dir=directory, prefix=".linear-")
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(text + "\n")
        Path(name).replace(_file(directory, table.device))
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _file(directory: Path, device: str) -> Path:
    return directory / f"linear-{hashlib.sha256(device.encode()).hexdigest()[:16]}.json"
