"""The measuring instrument of a row: takes cases, gives points, and checks each before it is timed.

A case names its work before any device is used, so a row can be measured, rehearsed small on a CPU, or only listed.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.gpu.points import Case, Point, Trial
from benchmarks.gpu.tree import ROOT
from inferd.kernels import gpu

T = TypeVar("T")
Calls = Sequence[Callable[[], object]]

COLD_BYTES = 256 << 20
"""Total size of the inputs used in turn. It exceeds Hopper's L2 more than four times, so each use reads memory."""
_TRACEBACK_CHARS = 3000
_MIN_REPLAYS, _MAX_REPLAYS, _MIN_TIMED_S = 5, 50, 0.2


class CannotRunError(Exception):
    """Why the row does not apply to this machine. It is recorded as skipped. A package that is missing is no such
    reason: its row fails."""


class Bench:
    """One running row on one device."""

    def __init__(
        self, device: str, emit: Callable[[Point], None], *, is_rehearsal: bool = False, is_listing: bool = False
    ) -> None:
        self.device = torch.device(device)
        self.is_rehearsal, self.is_listing = is_rehearsal, is_listing
        self._emit = emit

    def emit(self, case: Case, trial: Trial) -> None:
        """Record what was found without `measure`."""
        self._emit(Point(case, trial))

    @property
    def is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def has_fp8(self) -> bool:
        """Whether the device converts and multiplies 8-bit floats. torch computes them on a CPU."""
        return not self.is_on_gpu or gpu.properties_of(self.device).converts_e4m3

    def require(self, *formats: str) -> None:
        """Raise `CannotRunError` if a format is fp8 and the device has no 8-bit floats."""
        if "fp8" in formats and not self.has_fp8:
            raise CannotRunError(f"compute capability {gpu.properties_of(self.device).capability} has no 8-bit floats")

    def pick(self, full: T, tiny: T) -> T:
        """The size for this run: `full`, or `tiny` for a rehearsal."""
        return tiny if self.is_rehearsal else full

    def measure(self, case: Case, run: Callable[[], Trial]) -> None:
        """Run a case and emit its point. If it does not fit the device, the point says so. If it raises an error, its
        point is wrong and has the traceback, and later cases run. Raises the error if the device can do no more."""
        if self.is_listing:
            self.emit(case, Trial())
            return
        has_raised = False
        try:
            trial = run()
        except torch.OutOfMemoryError:
            trial = Trial(note="does not fit the memory")
        except CannotRunError:
            raise
        except Exception:
            trial, has_raised = Trial.missing(_traceback()), True
        self.emit(case, trial)
        if has_raised and self.is_on_gpu:
            torch.cuda.synchronize()  # raises an error if wrong memory was accessed: CUDA refuses all further work then
        self.give_back()

    def give_back(self) -> None:
        """Free what nothing uses any more, and give a GPU's memory back to the driver."""
        gc.collect()
        if self.is_on_gpu:
            torch.cuda.empty_cache()

    def clock(self, make_calls: Callable[[], Calls]) -> Timing:
        """The median time of one of the calls that `make_calls` gives. Each set of calls owns what it allocates.

        `make_calls` is called twice: for a first run that compiles, and for the calls that a CUDA graph then replays,
        so that gaps between launches do not count. Calls that cannot be captured are timed as they are launched, and a
        note says so.
        """
        for call in make_calls():
            call()
        if self.device.type != "cuda":
            return _on_the_host(make_calls())
        torch.cuda.synchronize()
        calls = make_calls()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
        except RuntimeError as error:
            torch.cuda.synchronize()
            note = f"launched one by one: {str(error).splitlines()[0][:80]}"
            calls = make_calls()
            return Timing(_by_events(lambda: [call() for call in calls]) / len(calls), note)
        return Timing(_by_events(graph.replay) / len(calls))


def _traceback() -> str:
    """The end of the traceback of the error that is handled, without the folders of this machine."""
    text = traceback.format_exc()
    for folder, name in ((f"{ROOT}/", ""), (f"{sys.prefix}/", ""), (f"{sys.base_prefix}/", "")):
        text = text.replace(folder, name)
    return text[-_TRACEBACK_CHARS:]


@dataclass(frozen=True, slots=True)
class Timing:
    seconds: float
    note: str = ""


def _by_events(run: Callable[[], object]) -> float:
    run()
    run()
    taken_s: list[float] = []
    while len(taken_s) < _MIN_REPLAYS or (len(taken_s) < _MAX_REPLAYS and sum(taken_s) < _MIN_TIMED_S):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        taken_s.append(start.elapsed_time(end) / 1e3)
    return statistics.median(taken_s)


def _on_the_host(calls: Calls) -> Timing:
    taken_s = []
    for call in calls:
        started_s = time.perf_counter()
        call()
        taken_s.append(time.perf_counter() - started_s)
    return Timing(statistics.median(taken_s))


def distance(out: Tensor, reference: Tensor) -> float:
    """|out - reference| / |reference|; infinite if anything is not a number."""
    exact = reference.double()
    value = float((out.double() - exact).norm() / exact.norm().clamp(min=1e-30))
    return value if math.isfinite(value) else math.inf


def num_copies(num_bytes: float, most: int = 32) -> int:
    """Number of copies of an input that must be used in turn."""
    return min(most, max(1, math.ceil(COLD_BYTES / num_bytes)))
