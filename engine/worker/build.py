"""Builds the objects of a worker: its device, the kernels, the other ranks, the decoder with its weights, the KV pool
and slots, and those of a draft model.

Each is made from resolved settings. If one cannot be made, the error says what would work. `load` puts them together.
Parts of steps are elsewhere: each `StepPart` stands beside its feature.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import EngineConfig, longest_beside_weights, precision_of
from inferd.engine.api.errors import CapacityError, ConfigError, LaunchError, ModelError, StartError
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.capacity import MIN_MODEL_LEN
from inferd.engine.api.memory.planner import MemoryPlan, format_bytes
from inferd.engine.api.memory.precision import KV_FORMATS, SHORT_KV
from inferd.engine.api.model import ModelFacts, of_mtp_layer
from inferd.engine.api.numerics import Numerics, other_numerics
from inferd.engine.api.pinned_files import PinnedFile
from inferd.engine.arch.description import Arch
from inferd.engine.arch.draft_heads import layers_read_by
from inferd.engine.arch.encoder import EncoderArch
from inferd.engine.arch.modelled import ModellingError
from inferd.engine.arch.sharding import ONE_RANK, Rank
from inferd.engine.layers.collectives import ALONE, Ranks
from inferd.engine.layers.placement import NO_LORAS
from inferd.engine.lora.adapters import Adapters
from inferd.engine.models import meta_tensors
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.draft_head import DraftHead, EagleHead, MTPLayer, draft_head_of
from inferd.engine.models.loader import AnyModel, Progress, load, recipe_of
from inferd.engine.quant.checkpoints.reader import CheckpointError
from inferd.engine.quant.recipe import Recipe, cut_groups
from inferd.engine.quant.scheme import QuantizationError
from inferd.engine.worker.cuda import CudaDevice
from inferd.engine.worker.device import CpuDevice, Device
from inferd.engine.worker.device_memory import hold_places
from inferd.engine.worker.draft_heads import HeadDrafts
from inferd.engine.worker.draft_model import DraftModel
from inferd.engine.worker.drafter import Drafter
from inferd.engine.worker.kept_weights import AnyDecoder, KeptWeights
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.pool_memory import PoolMemory
from inferd.engine.worker.ranks import SharedRanks
from inferd.engine.worker.slots import Slots
from inferd.engine.worker.states import StatePool
from inferd.kernels.cpu import library, native
from inferd.kernels.device import DoesNotFitError
from inferd.kernels.gpu import refused_launch
from inferd.kernels.ops.gather import MemoryExchange
from inferd.kernels.ops.kv_format import is_smoothed
from inferd.kernels.ops.linear import Choices, cpu
from inferd.kernels.registry import Deferred, KernelError

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 5.0


def open_device(config: EngineConfig, index: int) -> Device:
    """The device of rank `index`, for this thread."""
    if config.device == "cpu":
        return CpuDevice(config.num_threads // config.tensor_parallel_size, _pool_memory(config))
    meta_tensors.bring_in()
    if not torch.cuda.is_available():
        raise ModelError(
            f"device cuda was asked for, but torch {torch.__version__} finds no GPU: give --device cpu, or install "
            "the build of torch for this driver"
        )
    return CudaDevice(config.first_gpu + index)


def _pool_memory(config: EngineConfig) -> PoolMemory | None:
    """Memory in which the pools outlive this engine; None if they end with it. The meaning of its bytes depends on the
    whole configuration, without the parts that differ from engine to engine."""
    if not config.pool_memory or _reserves_all():
        return None
    layout = msgspec.json.encode(msgspec.structs.replace(config, pool_memory="", vocabulary="", numerics=None))
    return PoolMemory.open(config.pool_memory, config.num_blocks + config.num_checkpoints, layout)


def _reserves_all() -> bool:
    """Whether the system promises no memory that it lacks. It cannot promise what such a file may grow to. A write that
    finds no memory would end the process."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False


def keep_pools(memory: PoolMemory, kv: KVPool, states: StatePool | None, config: EngineConfig, arch: Arch) -> None:
    """Keep the KV pool and the checkpoints for the next engine, and find what the one before left in them."""
    hold_places(memory, kv, states, config.num_blocks, config.num_checkpoints, arch)
    memory.begin()


def prepare_kernels(first: Numerics | None) -> str:
    """Build or load the C++ kernels. If that fails, plain PyTorch computes more slowly, and a warning says so.

    `first`: the numerics of the server's first engine, if this is a later one. Raises `ChangedError` if its kernels
    cannot be had.
    """
    if first is not None and not first.library:
        native.leave_out("the first engine of this server computes in plain PyTorch, and each later one must do so too")
        return "plain PyTorch, as in the first engine of this server"
    built = native.prepare(
        library.default_cache_dir(),
        before_compiling=lambda: logger.info(
            "compiling the C++ kernels, once: half a minute, or minutes on a busy machine"
        ),
    )
    if first is not None and native.library_name() != first.library:
        raise other_numerics("library", first.library, native.library_name(), built.reason)
    if built.path is None:
        logger.warning("kernels in plain PyTorch are used, several times slower: %s", built.reason)
        return f"plain PyTorch, several times slower: {built.reason}"
    for reason in built.rejected:
        logger.warning("some C++ kernels are not used: %s", reason)
    return f"C++ for {built.level}, " + (
        f"compiled in {built.compile_s:.1f} s" if built.compile_s else "from the cache"
    )


def open_ranks(
    config: EngineConfig,
    arch: Arch,
    recipe: Recipe,
    device: Device,
    index: int,
    exchange_fd: int,
    meet: Callable[[], None],
) -> SharedRanks:
    """The ranks, seen from rank `index`. It calls `meet` before it joins a process group, in which it waits for the
    others. Raises `ConfigError` if their outputs could not be exchanged, or would not have the bits of one process."""
    rank = Rank(index, config.tensor_parallel_size, splits_inputs=config.splits_inputs)
    reason = cut_groups(arch, recipe, rank) if rank.splits_inputs else None
    if reason is not None:
        rank = Rank(index, rank.count)
        if index == 0:
            logger.info("o and down are split among ranks by their outputs, as the other matrices: %s", reason)
    if config.exchange == "memory":
        return SharedRanks(rank, _shared_memory(config, rank, exchange_fd))
    # It imports parts of torch that no other start needs.
    open_exchange = Deferred("inferd.kernels.ops.gather.group", "open_exchange").load()
    meet()
    try:
        exchange = open_exchange(exchange_fd, rank.index, rank.count, getattr(torch, config.dtype), device.torch_device)
    except RuntimeError as error:
        raise ConfigError(f"the {rank.count} ranks cannot exchange: {error}; give --tensor-parallel-size 1") from error
    return SharedRanks(rank, exchange)


def _shared_memory(config: EngineConfig, rank: Rank, exchange_fd: int) -> MemoryExchange:
    dtype, weights_dtype = getattr(torch, config.dtype), getattr(torch, config.weights_dtype)
    reason = cpu.refuses("cpu", dtype, weights_dtype, dtype)
    if reason is not None:
        raise ConfigError(
            f"tensor_parallel_size {config.tensor_parallel_size} needs the C++ kernels on a CPU, and their product "
            f"cannot run: {reason}; give --tensor-parallel-size 1"
        )
    return MemoryExchange(exchange_fd, rank.index, rank.count)


def recipe_for(config: EngineConfig, arch: Arch | EncoderArch, choices: Choices) -> Recipe:
    narrow = None if config.weights_dtype == config.dtype else getattr(torch, config.weights_dtype)
    as_declared = config.activations == "declared"
    return recipe_of(arch, config.quantization, getattr(torch, config.dtype), choices, narrow, as_declared=as_declared)


def allocate_adapters(config: EngineConfig, arch: Arch, device: Device) -> Adapters | None:
    """Space for adapters; None if there may be none."""
    if not config.max_loras:
        return None
    try:
        return Adapters.allocate(
            arch,
            config.max_loras,
            config.max_lora_rank,
            config.max_num_seqs,
            getattr(torch, config.lora_dtype),
            device.torch_device,
            device.empty_pool,
        )
    except RuntimeError as error:
        what = f"space for {config.max_loras} adapters of rank {config.max_lora_rank}"
        raise CapacityError(f"{what} could not be allocated ({error}); give a smaller --max-loras") from error


def build_decoder(
    config: EngineConfig,
    arch: Arch,
    device: Device,
    recipe: Recipe,
    ranks: Ranks,
    layers_read: Sequence[int] | None = None,
    adapters: Adapters | None = None,
) -> Decoder:
    """`layers_read`: number of layers before each hidden state that a draft head reads."""
    try:
        if not arch.is_native:
            return _transformers_decoder(config, arch, device, recipe)
        return Decoder(
            arch,
            getattr(torch, config.dtype),
            device.torch_device,
            config.max_model_len,
            config.rope_positions,
            recipe,
            ranks,
            layers_read,
            NO_LORAS if adapters is None else adapters.matrices,
        )
    except (QuantizationError, ModellingError) as error:
        raise ModelError(f"{config.model_path}: {error}") from error


def _transformers_decoder(config: EngineConfig, arch: Arch, device: Device, recipe: Recipe) -> Decoder:
    """A decoder of transformers' own code, whose imports no native model needs."""
    meta_tensors.bring_in()
    made = Deferred("inferd.engine.models.transformers_decoder", "TransformersDecoder").load()
    fields = Checkpoint.read(Path(config.model_path)).config
    decoder: Decoder = made(arch, fields, getattr(torch, config.dtype), device.torch_device, recipe)
    return decoder


def check_rows(config: EngineConfig, decoder: Decoder, kv: KVPool) -> None:
    """Raises `ModelError` if transformers' code computes other results for a row beside other rows."""
    try:
        reason = decoder.refuses_rows(kv.data, kv.scales, is_exact=config.deterministic)
    except ModellingError as error:
        reason = str(error)
    if reason is not None:
        raise ModelError(f"{config.model_path} cannot be served through transformers' own code: {reason}")


def load_and_measure(
    build: Callable[[], AnyDecoder],
    checkpoint: Checkpoint,
    planned: MemoryPlan,
    device: Device,
    kept: KeptWeights | None = None,
) -> tuple[AnyDecoder, int]:
    """A decoder that `build` makes, with its weights, and the bytes that these take. Raises `ModelError` or
    `CapacityError`."""
    device.give_back_freed()  # otherwise what was freed before the weights would be taken off them
    before_bytes, mapped_bytes = device.memory_in_use(), 0
    try:
        if kept is None:
            decoder = build()
            _load_weights(decoder, checkpoint, device)
        else:
            decoder, mapped_bytes = kept.load(
                build, lambda decoder: _load_weights(decoder, checkpoint, device), planned.weights_bytes
            )
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the weights of {format_bytes(planned.weights_bytes)} do not fit into the GPU's free memory ({error}): "
            "end other programs on the GPU, or give --quantization"
        ) from error
    device.give_back_freed()
    own_bytes = device.memory_in_use() - before_bytes - decoder.num_table_bytes
    return decoder, max(own_bytes, 0) + mapped_bytes


def _load_weights(decoder: AnyModel, checkpoint: Checkpoint, device: Device) -> None:
    try:
        load(decoder, checkpoint.tensors_of(decoder.arch), log_progress(_read), device.upload)
    except CheckpointError as error:
        raise ModelError(f"{checkpoint.path}: {error}") from error
    except DoesNotFitError:
        raise
    except KernelError as error:
        raise ModelError(f"{checkpoint.path} cannot be computed as asked: {error}; give --no-deterministic") from error


def _read(done: int, total: int) -> str:
    return f"weights: {format_bytes(done)} of {format_bytes(total)}"


def log_progress(text_of: Callable[[int, int], str]) -> Progress:
    """A callback that logs a line every few seconds of a long phase, and none for a short one."""
    next_s = time.monotonic() + _PROGRESS_INTERVAL_S

    def progress(done: int, total: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _PROGRESS_INTERVAL_S
            logger.info("%s (%d%%)", text_of(done, total), 100 * done // total)

    return progress


def allocate_pool(config: EngineConfig, decoder: Decoder | DraftHead, planned: MemoryPlan, device: Device) -> KVPool:
    """The KV pool of a decoder, which is made ready for it. Raises `CapacityError`."""
    arch, form = decoder.arch, KV_FORMATS.get(precision_of(config).kv_cache)
    dtype = getattr(torch, config.dtype if form is None else form.dtype)
    if is_smoothed(dtype):
        decoder.smooth_keys()
    try:
        return KVPool.allocate(arch, config.num_blocks, config.block_size, dtype, device, decoder.rank)
    except RuntimeError as error:
        raise out_of_memory(f"the KV cache of {format_bytes(planned.kv_bytes)}", error, config, arch, 0) from error


def allocate_states(config: EngineConfig, decoder: Decoder, device: Device) -> StatePool | None:
    """The recurrent states; None for a model without them."""
    arch, num_checkpoints = decoder.arch, config.num_checkpoints
    try:
        max_drafted = 0 if config.speculative == "none" else config.most_draws
        return StatePool.allocate(arch, config.max_num_seqs, num_checkpoints, decoder.dtype, device, max_drafted)
    except RuntimeError as error:
        what = f"{config.max_num_seqs} recurrent states of slots and {num_checkpoints} of prefixes"
        raise out_of_memory(what, error, config, arch, 0) from error


def make_slots(config: EngineConfig, decoder: Decoder, device: Device) -> Slots:
    num_groups = len(decoder.arch.cache_groups)
    return Slots(config.max_num_seqs, config.max_model_len, config.block_size, device, num_groups)


@dataclass(slots=True)
class DraftParts:
    """A draft model or a draft head while it is loaded."""

    config: EngineConfig
    """Its settings, as if it were served."""
    files: tuple[PinnedFile, ...]
    """Those of both models: a draft head may share the served model's weights."""
    checkpoint: Checkpoint
    arch: Arch
    layers_read: tuple[int, ...] | None = None
    """Number of layers of the served model before each hidden state that a draft head reads."""
    kept: KeptWeights | None = None
    decoder: Decoder | DraftHead | None = None
    kv: KVPool | None = None

    def load(self, served: Decoder, planned: MemoryPlan, device: Device, choices: Choices) -> int:
        """Load the weights. Returns their bytes."""
        recipe = recipe_for(self.config, self.arch, choices)

        def build() -> Decoder | DraftHead:
            if self.layers_read is not None:
                return draft_head_of(self.arch, served, self.layers_read, self.config.max_model_len, recipe)
            return build_decoder(self.config, self.arch, device, recipe, ALONE)

        self.kept = KeptWeights.of(self.config, self.files, ONE_RANK, "draft")
        self.decoder, num_bytes = load_and_measure(build, self.checkpoint, planned, device, self.kept)
        return num_bytes

    def allocate(self, planned: MemoryPlan, device: Device) -> int:
        """Allocate the KV pool. Returns its bytes."""
        assert self.decoder is not None
        self.kv = allocate_pool(self.config, self.decoder, planned, device)
        return self.kv.num_bytes

    def made(self, served: LoadedModel) -> Drafter:
        """The draft model or draft head. Its KV lies at the places of the served model's first cache group, which sees
        most."""
        config, decoder, slots = self.config, self.decoder, served.slots.of_group(0)
        assert decoder is not None and self.kv is not None
        if isinstance(decoder, EagleHead | MTPLayer):
            return HeadDrafts(decoder, self.kv, slots, served.sampler, is_deterministic=config.deterministic)
        model = LoadedModel(decoder, self.kv, slots, served.sampler, served.device, config.deterministic)
        return DraftModel(model, max_step_tokens=config.max_num_batched_tokens, max_draws=config.most_draws)


def read_draft_parts(config: EngineConfig, served: Arch) -> DraftParts | None:
    """The draft model or draft head of these settings, with nothing loaded; None if there is none."""
    draft = config.of_draft
    if draft is None:
        return None
    checkpoint = Checkpoint.read(Path(draft.model_path), keeps_blocks=draft.keeps_blocks)
    assert config.draft is not None
    if config.draft.is_mtp:
        checkpoint = of_mtp_layer(checkpoint)
    arch = ModelFacts.of(checkpoint, is_mtp=config.draft.is_mtp).arch
    head = arch.draft_head
    return DraftParts(
        draft, config.all_files, checkpoint, arch, None if head is None else layers_read_by(head, served.num_layers)
    )


@contextmanager
def refusing_launches(config: EngineConfig) -> Iterator[None]:
    """Within it, a kernel that the GPU can never launch raises a `LaunchError`."""
    try:
        yield
    except StartError:
        raise
    except Exception as error:
        refused = refused_launch(error)
        if refused is None:
            raise
        raise LaunchError(
            f"this GPU cannot run the model with these settings: {refused}; give {_needing_less(config)}--device cpu"
        ) from error


def _needing_less(config: EngineConfig) -> str:
    """Settings whose kernels need less, but for those that `config` has."""
    settings = ["--quantization int8"] if config.quantization == "none" else []
    settings += ["--kv-cache-dtype int8"] if config.kv_cache_dtype not in KV_FORMATS else []
    return f"{' and '.join(settings)}, whose kernels need less, or " if settings else ""


def out_of_memory(
    what: str, error: RuntimeError, config: EngineConfig, arch: Arch, kv_bytes: int, draft: Arch | None = None
) -> CapacityError:
    """The error for an allocation that failed. `kv_bytes`: bytes that the KV cache already has."""
    free_bytes = Machine.detect().on("cuda" if config.device == "cuda" else "cpu").memory_available_bytes
    length = longest_beside_weights(config, arch, free_bytes + kv_bytes, draft)
    return CapacityError(
        f"{what} could not be allocated ({error}); {format_bytes(free_bytes)} of memory are free: "
        + (f"--max-model-len up to {length} would fit; " if length >= MIN_MODEL_LEN else "")
        + f"free some memory, or give a smaller --kv-memory, or --kv-cache-dtype {SHORT_KV}"
    )
