"""Build a worker from settled settings: where a checkpoint meets a device. Reports each phase as it ends."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import EngineConfig, plan_of
from inferd.engine.api.errors import CapacityError, ModelError
from inferd.engine.api.messages import Phase, Ready
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.params import SamplingParams
from inferd.engine.api.planner import format_bytes
from inferd.engine.arch.description import Arch
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import CheckpointError, Progress, StoredTensor, load
from inferd.engine.models.stored import recipe_of
from inferd.engine.quant.scheme import QuantizationError
from inferd.engine.sample.sampler import Sampler
from inferd.engine.sched.plan import Admission, Row, StepPlan, TableUpdate
from inferd.engine.worker.cuda import CudaDevice
from inferd.engine.worker.device import CpuDevice, Device
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.peaks import measure
from inferd.engine.worker.runner import Runner
from inferd.engine.worker.slots import Slots
from inferd.kernels import native, registry

logger = logging.getLogger(__name__)

Report = Callable[[Phase], None]

_PROGRESS_INTERVAL_S = 5.0
_WARM_UP_TOKENS = 16


class _Laps:
    """Phases that follow one another without a gap, from `started_s` (monotonic) on."""

    def __init__(self, started_s: float, report: Report) -> None:
        self._last_s, self._report = started_s, report

    def done(self, name: str, detail: str) -> None:
        now = time.monotonic()
        self._report(Phase(name, now - self._last_s, detail))
        self._last_s = now


def load_worker(config: EngineConfig, started_s: float, report: Report) -> tuple[Runner, Ready]:
    """Load weights, allocate the KV pool, run once. Raises `ModelError` or `CapacityError`."""
    assert config.num_threads is not None and config.max_model_len is not None and config.block_size is not None
    assert config.num_blocks is not None and config.max_num_seqs is not None
    laps = _Laps(started_s, report)
    device = _open_device(config)
    laps.done("engine", f"torch {torch.__version__} on {device.name}")
    if config.device == "cpu":
        laps.done("kernels", _prepare_kernels())

    checkpoint = Checkpoint.read(Path(config.model_path))
    facts = ModelFacts.of(checkpoint)
    arch, dtype = facts.arch, getattr(torch, config.dtype)
    planned = plan_of(config, arch)
    decoder = _build_decoder(config, arch, dtype, device)
    before_bytes = device.memory_in_use()
    try:
        _load_weights(decoder, checkpoint)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the weights of {format_bytes(planned.weights_bytes)} do not fit beside what the GPU holds ({error}): "
            "free it, or give --quantization"
        ) from error
    device.give_back_freed()
    weights_bytes = device.memory_in_use() - before_bytes
    laps.done("weights", f"{format_bytes(weights_bytes)}, planned {format_bytes(planned.weights_bytes)}")

    # Before the KV pool takes what is left of a GPU's memory.
    peaks = measure(device, dtype, config.quantization)
    laps.done("peaks", str(peaks))

    kv = _allocate(planned.kv_bytes, facts, config.num_blocks, config.block_size, dtype, device)
    laps.done("kv cache", f"{format_bytes(kv.num_bytes)}, {config.num_blocks} blocks of {config.block_size} tokens")

    slots = Slots(config.max_num_seqs, config.max_model_len, config.block_size, device, len(arch.cache_groups))
    sampler = Sampler(config.max_num_seqs, arch.vocab_size, device.torch_device)
    runner = Runner(decoder, kv, slots, sampler, device)
    for plan in _warm_up_plans(config.max_model_len, config.block_size):
        runner.execute(plan)
    kernels = tuple(sorted({(choice.op, choice.chosen) for choice in registry.explain()}))
    laps.done("warm-up", f"{len(kernels)} kernels: {_tally(kernels)}")
    return runner, Ready(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        vocab_size=arch.vocab_size,
        weights_bytes=weights_bytes,
        kv_bytes=kv.num_bytes,
        planned_weights_bytes=planned.weights_bytes,
        planned_kv_bytes=planned.kv_bytes,
        device=device.name,
        dtype=config.dtype,
        peaks=peaks,
        quantization=config.quantization,
        kernels=kernels,
    )


def _open_device(config: EngineConfig) -> Device:
    assert config.num_threads is not None
    if config.device == "cpu":
        return CpuDevice(config.num_threads)
    if not torch.cuda.is_available():
        raise ModelError(
            f"device cuda was asked for, and torch {torch.__version__} finds no GPU to use: give --device cpu, "
            "or install the build of torch for this driver"
        )
    return CudaDevice()


def _prepare_kernels() -> str:
    """Build or load the C++ kernels; without them plain PyTorch serves, slower, and says so."""
    built = native.prepare(
        _cache_home() / "inferd" / "kernels",
        before_compiling=lambda: logger.info("compiling the C++ kernels, once: some ten seconds"),
    )
    if built.path is None:
        logger.warning("plain PyTorch kernels serve, several times slower: %s", built.reason)
        return "plain PyTorch"
    return f"C++ for {built.level}, " + (
        f"compiled in {built.compile_s:.1f} s" if built.compile_s else "from the cache"
    )


def _cache_home() -> Path:
    """As the XDG base directory specification has it; a user without a home caches beside other temporary files."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"inferd-{os.geteuid()}"


def _build_decoder(config: EngineConfig, arch: Arch, dtype: torch.dtype, device: Device) -> Decoder:
    try:
        return Decoder(
            arch,
            dtype,
            device.torch_device,
            config.max_model_len,
            config.rope_positions,
            recipe_of(arch, config.quantization, dtype),
        )
    except QuantizationError as error:
        raise ModelError(f"{config.model_path}: {error}") from error


def _load_weights(decoder: Decoder, checkpoint: Checkpoint) -> None:
    tensors = checkpoint.tensors.values()
    try:
        load(decoder, {info.name: StoredTensor(info.file, info.dtype, info.shape) for info in tensors}, _log_progress())
    except CheckpointError as error:
        raise ModelError(f"{checkpoint.path}: {error}") from error


def _log_progress() -> Progress:
    """A line every few seconds of a long load, none for a short one."""
    next_s = time.monotonic() + _PROGRESS_INTERVAL_S

    def progress(done: int, total: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _PROGRESS_INTERVAL_S
            logger.info("weights: %s of %s (%d%%)", format_bytes(done), format_bytes(total), 100 * done // total)

    return progress


def _allocate(
    planned_bytes: int, facts: ModelFacts, num_blocks: int, block_size: int, dtype: torch.dtype, device: Device
) -> KVPool:
    try:
        return KVPool.allocate(facts.arch, num_blocks, block_size, dtype, device)
    except RuntimeError as error:
        raise CapacityError(
            f"the KV cache of {format_bytes(planned_bytes)} could not be allocated ({error}): "
            "give a smaller --kv-memory"
        ) from error


def _tally(kernels: tuple[tuple[str, str], ...]) -> str:
    """How many ops run in which implementation."""
    counts = Counter(name for _, name in kernels)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _warm_up_plans(max_model_len: int, block_size: int) -> tuple[StepPlan, ...]:
    """A prompt and then a token in block 0, which nobody holds yet: what they leave there is overwritten."""
    num_tokens = min(_WARM_UP_TOKENS, block_size - 1, max_model_len - 1)
    params = SamplingParams(max_tokens=2, seed=0, temperature=1.0, top_p=0.9, top_k=2, logprobs=1)
    admission = Admission(0, "warm-up", (0,) * num_tokens, num_tokens, params)
    return (
        StepPlan(0, (admission,), (TableUpdate(0, 0, 0, (0,)),), (Row(0, 0, num_tokens, True),)),
        StepPlan(1, (), (), (Row(0, num_tokens, 1, True),)),
    )
