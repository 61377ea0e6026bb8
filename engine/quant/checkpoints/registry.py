"""The table of checkpoint formats that can be read, by the names that `engine/arch/stored` gives them.

To add a format, write one short file beside this one and one line in `READERS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from inferd.engine.quant.checkpoints import fp8
from inferd.engine.quant.checkpoints.reader import Read

READERS: Mapping[str, Read] = {
    "fp8": fp8.read,
}
