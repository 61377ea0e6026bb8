"""The table of the fastest matrix products on this GPU: measured once the weights are loaded, and kept in a file for
later starts.

The table exists before the layers, which add the cases that could be measured with their weights
(`kernels.ops.linear`). It is completed when all layers are loaded. Knows no model and no setting.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from inferd.kernels.cpu import library
from inferd.kernels.device import DoesNotFitError
from inferd.kernels.gpu import is_installed
from inferd.kernels.ops.linear import few_rows_refuse
from inferd.kernels.ops.linear.tuning import Table, read, write

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tuning:
    """A table, and the directory of its file."""

    directory: Path
    table: Table

    @classmethod
    def of_user(cls, dtype: torch.dtype) -> Tuning | None:
        """As `open`, in the user's cache."""
        return cls.open(library.cache_home() / "inferd" / "tuning", dtype)

    @classmethod
    def open(cls, directory: Path, dtype: torch.dtype) -> Tuning | None:
        """The table of the current GPU as far as it is known; None if `dtype` has one kernel only, so no choice."""
        if few_rows_refuse("cuda", dtype) is not None:
            return None
        return cls(directory, read(directory, _device_name()))

    @torch.inference_mode()
    def complete(self) -> str:
        """Measure the cases that the table lacks, in some 240 runs each, and write the file. Returns a text about it.

        If measuring or writing fails, the log gets a warning; it costs speed at most. Raises `DoesNotFitError`, because
        serving would need that kernel too.
        """
        try:
            num_measured = self.table.complete()
        except DoesNotFitError:
            raise
        except RuntimeError as error:
            lack = "too little memory" if isinstance(error, torch.OutOfMemoryError) else "the GPU failed"
            logger.warning("%s to measure the fastest matrix products (%s): a rule chooses them", lack, error)
            return "chosen by a rule"
        if not num_measured:
            return f"every choice is known from {self.directory}"
        try:
            write(self.directory, self.table)
        except OSError as error:
            logger.warning(
                "the measurements cannot be written to %s (%s), so every start measures again: set XDG_CACHE_HOME to a "
                "directory that can be written",
                self.directory,
                error,
            )
            return f"{num_measured} choices measured, not kept"
        return f"{num_measured} choices measured, kept in {self.directory}"


def _device_name() -> str:
    """Name of the GPU, with the versions that a measurement on it depends on."""
    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Triton {version('triton') if is_installed('triton') else 'none'}"
    )
