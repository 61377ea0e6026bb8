"""Which products are the fastest on this GPU: measured when a model's weights are there, and kept in a file for later
starts.

The table exists before layers are bound, which offer it what could be measured of their weights (`kernels.linear`), and
is completed behind them. Knows no model and no setting.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from inferd.kernels.linear import few_rows_refuse
from inferd.kernels.linear.tuning import Table, read, write

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tuning:
    """A table, and the directory where it is kept."""

    directory: Path
    table: Table

    @classmethod
    def open(cls, directory: Path, dtype: torch.dtype) -> Tuning | None:
        """What is known of the current GPU; None where there is one product alone in `dtype`, and nothing to choose."""
        if few_rows_refuse("cuda", dtype) is not None:
            return None
        return cls(directory, read(directory, _device_name()))

    @torch.inference_mode()
    def complete(self) -> str:
        """Measure what layers offered and the table lacks, some 50 runs a case, and keep it; in words. A failure to do
        either costs speed at most, and is a warning."""
        try:
            num_measured = self.table.complete()
        except torch.OutOfMemoryError as error:
            logger.warning("there is no memory to measure which products are the fastest (%s): a rule chooses", error)
            return "chosen by a rule"
        if not num_measured:
            return f"every choice is known from {self.directory}"
        try:
            write(self.directory, self.table)
        except OSError as error:
            logger.warning(
                "what was measured cannot be kept in %s (%s): every start measures it again; XDG_CACHE_HOME names "
                "another place",
                self.directory,
                error,
            )
            return f"{num_measured} choices measured, not kept"
        return f"{num_measured} choices measured, kept in {self.directory}"


def _device_name() -> str:
    """Of the GPU and of what a measurement on it depends on besides."""
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Triton {version('triton')}"
    )
