"""Just enough of the requirement format to hold our own metadata against what is installed.

Only what pyproject.toml uses: `name>=minimum; marker`, with markers on the extra and the platform. Reads no metadata.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Self

_SHAPE = re.compile(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9][0-9A-Za-z.]*))?\s*(?:;\s*(.+))?")
_PLATFORM = re.compile(r"sys_platform\s*(==|!=)\s*[\"'](\w+)[\"']")


@dataclass(frozen=True, slots=True)
class Requirement:
    """One package that must be there."""

    name: str
    minimum: str
    marker: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ValueError` for a shape that our metadata does not use."""
        match = _SHAPE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"cannot read the requirement {text!r}")
        return cls(match[1], match[2] or "0", match[3] or "")

    @property
    def applies(self) -> bool:
        """Whether it is wanted here: no extra, and this platform."""
        if "extra" in self.marker:
            return False
        platform = _PLATFORM.search(self.marker)
        return platform is None or (sys.platform == platform[2]) == (platform[1] == "==")


def is_older(installed: str, minimum: str) -> bool:
    """Compare release numbers; "2.13.0+cpu" and "2.13rc1" count as 2.13."""
    ours, least = _release(installed), _release(minimum)
    width = max(len(ours), len(least))
    return ours + (0,) * (width - len(ours)) < least + (0,) * (width - len(least))


def _release(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
