"""Builds a worker from resolved settings: loads the checkpoint onto the device. Reports each phase when it ends."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import EngineConfig, longest_beside_weights, plan_of, precision_of
from inferd.engine.api.errors import CapacityError, ModelError
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.capacity import MIN_MODEL_LEN
from inferd.engine.api.memory.planner import MemoryPlan, format_bytes
from inferd.engine.api.memory.precision import KV_FORMATS, SHORT_KV
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.wire.messages import Phase, Ready
from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.arch.description import Arch
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import Progress, load, recipe_of
from inferd.engine.quant.checkpoints.reader import CheckpointError
from inferd.engine.quant.scheme import QuantizationError
from inferd.engine.sample.sampler import Sampler
from inferd.engine.sched.plan import Admission, Row, StepPlan, TableUpdate
from inferd.engine.worker.cuda import CudaDevice
from inferd.engine.worker.determinism import refuse_varying
from inferd.engine.worker.device import CpuDevice, Device
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.peaks import measure
from inferd.engine.worker.runner import Runner
from inferd.engine.worker.slots import Slots
from inferd.engine.worker.tuning import Tuning
from inferd.kernels import native, registry
from inferd.kernels.linear import Choices
from inferd.kernels.registry import KernelError

logger = logging.getLogger(__name__)

LoadReport = Callable[[Phase], None]

_PROGRESS_INTERVAL_S = 5.0
_WARM_UP_TOKENS = 16


class _PhaseTimer:
    """Times phases that follow one another without a gap, from `started_s` (monotonic) on."""

    def __init__(self, started_s: float, report: LoadReport) -> None:
        self._last_s, self._report = started_s, report

    def done(self, name: str, detail: str) -> None:
        now = time.monotonic()
        self._report(Phase(name, now - self._last_s, detail))
        self._last_s = now


def load_worker(config: EngineConfig, started_s: float, report: LoadReport) -> tuple[Runner, Ready]:
    """Load the weights, allocate the KV pool, run warm-up steps. Raises `ModelError` or `CapacityError`."""
    assert config.max_model_len is not None and config.block_size is not None
    assert config.num_blocks is not None and config.deterministic is not None
    deterministic = config.deterministic
    timer = _PhaseTimer(started_s, report)
    device = _open_device(config)
    timer.done("engine", f"torch {torch.__version__} on {device.name}")
    if config.device == "cpu":
        timer.done("kernels", _prepare_kernels())

    checkpoint = Checkpoint.read(Path(config.model_path), keeps_blocks=config.keeps_blocks)
    facts = ModelFacts.of(checkpoint)
    arch, dtype = facts.arch, getattr(torch, config.dtype)
    planned = plan_of(config, arch)
    tuning = None if deterministic or config.device == "cpu" else Tuning.of_user(dtype)
    choices = Choices(deterministic, None if tuning is None else tuning.table)
    decoder = _build_decoder(config, arch, dtype, device, choices)
    weights_bytes = _load_and_measure(decoder, checkpoint, planned, device)
    timer.done("weights", f"{format_bytes(weights_bytes)}, planned {format_bytes(planned.weights_bytes)}")

    # Before the KV pool, which takes the rest of a GPU's memory.
    if tuning is not None:
        timer.done("tuning", tuning.complete())
    peaks = measure(device, dtype, config.quantization, Choices(deterministic))
    timer.done("peaks", str(peaks))

    kv = _allocate_pool(config, arch, planned, device)
    timer.done(
        "kv cache",
        f"{format_bytes(kv.num_bytes)}, {config.num_blocks} blocks of {config.block_size} tokens in "
        f"{config.kv_cache_dtype}",
    )

    with _explained(planned, config, arch, kv):
        runner = _build_runner(config, decoder, kv, device)
        recorded = runner.record_steps(_log_progress(_recordings))
        if recorded is not None:
            timer.done("recorded steps", recorded)
        for plan in _warm_up_plans(config, len(arch.cache_groups)):
            runner.execute(plan)
    if deterministic:
        refuse_varying(registry.explain())
    kernels = tuple(sorted({(choice.op, choice.chosen) for choice in registry.explain()}))
    timer.done("warm-up", f"{len(kernels)} kernels: {_tally(kernels)}")
    return runner, Ready(
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        vocab_size=arch.vocab_size,
        hidden_size=arch.hidden_size,
        weights_bytes=weights_bytes,
        kv_bytes=kv.num_bytes,
        planned_weights_bytes=planned.weights_bytes,
        planned_kv_bytes=planned.kv_bytes,
        device=device.name,
        dtype=config.dtype,
        peaks=peaks,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        deterministic=deterministic,
        kernels=kernels,
    )


def _load_and_measure(decoder: Decoder, checkpoint: Checkpoint, planned: MemoryPlan, device: Device) -> int:
    """Load the weights and return the bytes that they took. Raises `ModelError` or `CapacityError`."""
    before_bytes = device.memory_in_use()
    try:
        _load_weights(decoder, checkpoint, device)
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the weights of {format_bytes(planned.weights_bytes)} do not fit into the GPU's free memory ({error}): "
            "end other programs on the GPU, or give --quantization"
        ) from error
    device.give_back_freed()
    return device.memory_in_use() - before_bytes


def _allocate_pool(config: EngineConfig, arch: Arch, planned: MemoryPlan, device: Device) -> KVPool:
    assert config.num_blocks is not None and config.block_size is not None
    form = KV_FORMATS.get(precision_of(config).kv_cache)
    dtype = getattr(torch, config.dtype if form is None else form.dtype)
    try:
        return KVPool.allocate(arch, config.num_blocks, config.block_size, dtype, device)
    except RuntimeError as error:
        raise _out_of_memory(f"the KV cache of {format_bytes(planned.kv_bytes)}", error, config, arch, 0) from error


def _build_runner(config: EngineConfig, decoder: Decoder, kv: KVPool, device: Device) -> Runner:
    assert config.max_num_seqs is not None and config.max_model_len is not None
    assert config.block_size is not None and config.deterministic is not None
    assert config.max_num_batched_tokens is not None
    num_groups = len(decoder.arch.cache_groups)
    slots = Slots(config.max_num_seqs, config.max_model_len, config.block_size, device, num_groups)
    sampler = Sampler(config.max_num_seqs, decoder.arch.vocab_size, device.torch_device)
    return Runner(
        decoder,
        kv,
        slots,
        sampler,
        device,
        is_deterministic=config.deterministic,
        max_step_tokens=config.max_num_batched_tokens,
    )


@contextmanager
def _explained(planned: MemoryPlan, config: EngineConfig, arch: Arch, kv: KVPool) -> Iterator[None]:
    """Raises a `CapacityError` if memory for the first steps runs out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = f"slots and the tensors of a step, planned as {format_bytes(planned.working_bytes)},"
        raise _out_of_memory(what, error, config, arch, kv.num_bytes) from error


def _open_device(config: EngineConfig) -> Device:
    assert config.num_threads is not None
    if config.device == "cpu":
        return CpuDevice(config.num_threads)
    if not torch.cuda.is_available():
        raise ModelError(
            f"device cuda was asked for, but torch {torch.__version__} finds no GPU: give --device cpu, or install "
            "the build of torch for this driver"
        )
    return CudaDevice()


def _prepare_kernels() -> str:
    """Build or load the C++ kernels. If that fails, plain PyTorch computes more slowly, and a warning says so."""
    built = native.prepare(
        native.default_cache_dir(),
        before_compiling=lambda: logger.info("compiling the C++ kernels, once: about half a minute on two cores"),
    )
    if built.path is None:
        logger.warning("kernels in plain PyTorch are used, several times slower: %s", built.reason)
        return f"plain PyTorch, several times slower: {built.reason}"
    for reason in built.rejected:
        logger.warning("some C++ kernels are not used: %s", reason)
    return f"C++ for {built.level}, " + (
        f"compiled in {built.compile_s:.1f} s" if built.compile_s else "from the cache"
    )


def _build_decoder(config: EngineConfig, arch: Arch, dtype: torch.dtype, device: Device, choices: Choices) -> Decoder:
    narrow = None if config.weights_dtype == config.dtype else getattr(torch, config.weights_dtype)
    try:
        return Decoder(
            arch,
            dtype,
            device.torch_device,
            config.max_model_len,
            config.rope_positions,
            recipe_of(arch, config.quantization, dtype, choices, narrow),
        )
    except QuantizationError as error:
        raise ModelError(f"{config.model_path}: {error}") from error


def _load_weights(decoder: Decoder, checkpoint: Checkpoint, device: Device) -> None:
    try:
        load(decoder, checkpoint.tensors_of(decoder.arch), _log_progress(_read), device.upload)
    except CheckpointError as error:
        raise ModelError(f"{checkpoint.path}: {error}") from error
    except KernelError as error:
        raise ModelError(f"{checkpoint.path} cannot be computed as asked: {error}; give --no-deterministic") from error


def _log_progress(text_of: Callable[[int, int], str]) -> Progress:
    """A callback that logs a line every few seconds of a long phase, and none for a short one."""
    next_s = time.monotonic() + _PROGRESS_INTERVAL_S

    def progress(done: int, total: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _PROGRESS_INTERVAL_S
            logger.info("%s (%d%%)", text_of(done, total), 100 * done // total)

    return progress


def _read(done: int, total: int) -> str:
    return f"weights: {format_bytes(done)} of {format_bytes(total)}"


def _recordings(done: int, total: int) -> str:
    return f"recorded steps: {done} of {total} sizes"


def _out_of_memory(what: str, error: RuntimeError, config: EngineConfig, arch: Arch, kv_bytes: int) -> CapacityError:
    """The error for an allocation that failed. `kv_bytes`: bytes that the KV cache already has."""
    free_bytes = Machine.detect().on("cuda" if config.device == "cuda" else "cpu").memory_available_bytes
    length = longest_beside_weights(config, arch, free_bytes + kv_bytes)
    return CapacityError(
        f"{what} could not be allocated ({error}); {format_bytes(free_bytes)} of memory are free: "
        + (f"--max-model-len up to {length} would fit; " if length >= MIN_MODEL_LEN else "")
        + f"free some memory, or give a smaller --kv-memory, or --kv-cache-dtype {SHORT_KV}"
    )


def _tally(kernels: tuple[tuple[str, str], ...]) -> str:
    """Number of ops by implementation, as text."""
    counts = Counter(name for _, name in kernels)
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _warm_up_plans(config: EngineConfig, num_groups: int) -> Iterator[StepPlan]:
    """A prompt and then a token, in block 0, which no request has yet: requests overwrite what is left there.

    On a GPU also prompts of all lengths up to the longest step. A length may need variants of kernels of its own, which
    would otherwise be compiled while a request waits. The longest prompt shows that its tensors fit the memory.
    """
    assert config.max_model_len is not None and config.block_size is not None
    assert config.max_num_batched_tokens is not None and config.num_blocks is not None
    num_tokens = min(_WARM_UP_TOKENS, config.block_size - 1, config.max_model_len - 1)
    yield _prompt(0, num_tokens, config.block_size, num_groups)
    yield StepPlan(1, (), (), (Row(0, num_tokens, 1, True),))
    if config.device == "cuda":
        pool_tokens = config.num_blocks * config.block_size
        most = min(config.max_num_batched_tokens, config.max_model_len - 1, pool_tokens)
        for step_id, length in enumerate([*(2**power for power in range((most - 1).bit_length())), most], start=2):
            yield _prompt(step_id, length, config.block_size, num_groups)


def _prompt(step_id: int, num_tokens: int, block_size: int, num_groups: int) -> StepPlan:
    params = SamplingParams(max_tokens=2, seed=0, temperature=1.0, top_p=0.9, top_k=2, logprobs=1)
    admission = Admission(0, "warm-up", (0,) * num_tokens, num_tokens, params)
    blocks = tuple(range(-(-num_tokens // block_size)))
    updates = tuple(TableUpdate(0, group, 0, blocks) for group in range(num_groups))
    return StepPlan(step_id, (admission,), updates, (Row(0, 0, num_tokens, True),))
