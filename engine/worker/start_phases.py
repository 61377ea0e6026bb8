"""Parts of every start of an engine: the times of its phases, the machine's peaks, the facts that results depend on,
and the kernels that were chosen."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.metadata import version
from itertools import islice

import torch

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.cost.roofline import Peaks
from inferd.engine.api.memory.planner import MemoryPlan, format_bytes
from inferd.engine.api.numerics import Numerics, check_numerics
from inferd.engine.api.pinned_files import digest_of_all
from inferd.engine.api.wire.messages import Phase
from inferd.engine.worker.device import Device
from inferd.engine.worker.kept_weights import KeptWeights
from inferd.engine.worker.peaks import measure
from inferd.engine.worker.tuning import Tuning
from inferd.kernels import registry
from inferd.kernels.cpu import native
from inferd.kernels.ops.linear import Choices
from inferd.kernels.registry import Selection

LoadReport = Callable[[Phase], None]

_PLAIN = "reference"
"""Name of each op's implementation in plain PyTorch."""
_NAMED_OPS, _MOST_OF_A_REASON = 3, 200
"""How many of the ops that plain PyTorch computes the log names, and most characters of each reason. Without a compiler
it computes all of them."""


class PhaseTimer:
    """Times phases that follow one another without a gap, from `started_s` (monotonic) on."""

    def __init__(self, started_s: float, report: LoadReport) -> None:
        self._last_s, self._report = started_s, report

    def done(self, name: str, detail: str) -> None:
        now = time.monotonic()
        self._report(Phase(name, now - self._last_s, detail))
        self._last_s = now


def numerics_of(
    config: EngineConfig, model_impl: str, device: Device, kernels: tuple[tuple[str, str], ...]
) -> Numerics:
    # The number of threads changes no bit of the C++ kernels. It may change sums of torch and its libraries, which
    # compute in plain PyTorch, and between the kernels if transformers' code computes the model.
    is_of_kernels_alone = bool(native.library_name()) and config.modelled is None
    return Numerics(
        files=digest_of_all(config.files),
        inferd=version("inferd"),
        torch=str(torch.__version__),
        model_impl=model_impl,
        library=native.library_name(),
        dtype=config.dtype,
        weights_dtype=config.weights_dtype,
        quantization=config.quantization,
        activations=config.activations,
        kv_cache_dtype=config.kv_cache_dtype,
        device=device.processor if is_of_kernels_alone else device.name,
        num_ranks=config.tensor_parallel_size,
        deterministic=config.deterministic,
        kernels=kernels,
    )


def checked_kernels(
    config: EngineConfig, model_impl: str, device: Device, timer: PhaseTimer
) -> tuple[tuple[tuple[str, str], ...], Numerics]:
    """(op and chosen implementation of each, the facts that results depend on), after the warm-up, whose phase ends
    here. Raises `StartError` if an earlier engine of this server computed otherwise."""
    choices_made = registry.explain()
    kernels = tuple(sorted({(choice.op, choice.chosen) for choice in choices_made}))
    timer.done("warm-up", f"{len(kernels)} kernels: {tally(choices_made)}")
    numerics = numerics_of(config, model_impl, device, kernels)
    if config.numerics is not None:
        check_numerics(config.numerics, numerics)
    return kernels, numerics


def weights_phase(
    weights_bytes: int, planned: MemoryPlan, kept: KeptWeights | None, timer: PhaseTimer, each: str = ""
) -> None:
    """End the phase that loads the weights. `each`: which rank the bytes are of."""
    how = ", mapped from an earlier start" if kept is not None and kept.is_mapped else ""
    detail = f"{format_bytes(weights_bytes)}, planned {format_bytes(planned.weights_bytes)}{each}{how}"
    timer.done("weights", detail)


def choices_of(config: EngineConfig, tuning: Tuning | None) -> Choices:
    return Choices(config.deterministic, None if tuning is None else tuning.table)


def measured_peaks(config: EngineConfig, device: Device, dtype: torch.dtype) -> Peaks:
    """The peaks of all ranks together: of all threads, while the other ranks wait, or of as many GPUs as this one."""
    num_threads = torch.get_num_threads()
    if config.device == "cpu":
        torch.set_num_threads(config.num_threads)
    try:
        peaks = measure(device, dtype, config.quantization, Choices(config.deterministic))
        num_gpus = config.tensor_parallel_size if config.device == "cuda" else 1
        return Peaks(num_gpus * peaks.read_bytes_per_s, num_gpus * peaks.flops_per_s)
    finally:
        torch.set_num_threads(num_threads)


def tally(choices: Iterable[Selection]) -> str:
    """Number of ops by implementation, as text, with the first ops that plain PyTorch computes and why no kernel
    does."""
    used = dict[tuple[str, str], Selection]()
    for choice in choices:
        used.setdefault((choice.op, choice.chosen), choice)
    counts = Counter(name for _, name in used)
    plain = {op: _why_plain(choice) for (op, name), choice in sorted(used.items()) if name == _PLAIN}
    texts = [f"{op}: {reason[:_MOST_OF_A_REASON]}" for op, reason in islice(plain.items(), _NAMED_OPS)]
    more = f"; {len(plain) - _NAMED_OPS} more" if len(plain) > _NAMED_OPS else ""
    why = {_PLAIN: f" ({'; '.join(texts)}{more})"}
    return ", ".join(f"{count} {name}{why.get(name, '')}" for name, count in sorted(counts.items()))


def _why_plain(choice: Selection) -> str:
    return ", ".join(f"{name} {reason}" for name, reason in choice.refused) or "it has no other implementation"
