"""The engine's settings, as asked and as resolved for this machine, with each decision and its reason.

Only `resolve` turns an "auto" into a value. It needs the checkpoint's headers and the machine's memory, but neither a
device nor torch. So a model that cannot fit is refused before an engine exists.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from inferd.engine.api.adapter import adapter_space, check_adapters, lora_dtype
from inferd.engine.api.errors import CapacityError, ConfigError
from inferd.engine.api.machine.cpu import Machine, cpu_groups
from inferd.engine.api.memory.activations import Draft, Workload, most_draws
from inferd.engine.api.memory.capacity import (
    MIN_MODEL_LEN,
    longest_context,
    longest_in_pool,
    of_each_rank,
    options,
    plan_sequences,
    pool_shortage,
    shortage,
    ways_out,
)
from inferd.engine.api.memory.planner import (
    MemoryPlan,
    block_bytes,
    blocks_per_seq,
    format_bytes,
    plan_memory,
    pool_of,
)
from inferd.engine.api.memory.precision import KV_FORMATS, KVCache, Precision, Quantization
from inferd.engine.api.memory.states import checkpoint_interval, most_slots, num_checkpoints, state_bytes
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.numerics import Numerics
from inferd.engine.api.pinned_files import PinnedFile, documents_among
from inferd.engine.api.served import (
    DeviceKind,
    Dtype,
    KVCacheDtype,
    check_modelled,
    check_quantization,
    check_rank_places,
    check_ranks,
    check_replica_places,
    deterministic_on,
    draft_precision,
    quantization_of,
    resolved_dtype,
    served_device,
    served_kv_cache,
    served_precisions,
    served_weights_dtype,
)
from inferd.engine.api.speculation import (
    Speculative,
    check_draft,
    check_draft_length,
    check_served,
    check_speculative,
    speculative_on,
)
from inferd.engine.arch.description import Arch
from inferd.engine.arch.modelled import Modelled

BLOCK_SIZES = (16, 32, 64, 128)
AUTO_BLOCK_SIZE = 32
AUTO_MAX_NUM_BATCHED_TOKENS = 256
"""Products of 256 rows use a CPU fully; a longer chunk would only delay decodes longer."""


@dataclass(frozen=True, slots=True)
class _Auto:
    """Values of "auto" on a kind of device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes: int | None
    """Most bytes for the KV cache, unless one sequence of full length needs more; None: no such limit."""
    memory_share: float
    """Share of the memory left beside the weights that the KV cache gets."""


_AUTO = {
    "cpu": _Auto(128, AUTO_MAX_NUM_BATCHED_TOKENS, 4 * 2**30, 0.6),
    "cuda": _Auto(256, 4096, None, 0.95),
}
"""Other programs need a CPU's memory too, while a GPU is there to serve. The chunk of 4,096 tokens is calculated from
the rates of an H200 and 8 billion weights: reading the weights takes a twentieth of the time of multiplying by them,
and the chunk delays decodes by less than 0.1 s."""


def auto_step_tokens(device: Literal["cpu", "cuda"]) -> int:
    """Most tokens of a step by default."""
    return _AUTO[device].max_num_batched_tokens


class DraftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a draft model or draft head that differ from those of the served model. `resolve` settles the last
    two."""

    model_path: str
    files: tuple[PinnedFile, ...] = ()
    """Its files, unless they are the served model's. They change no token, and are no part of the fingerprint."""
    keeps_blocks: bool = False
    name: str = ""
    """Name of the model on the command line."""
    is_head: bool = False
    """Whether it is a draft head."""
    is_mtp: bool = False
    """Whether it is the MTP layer of the served model's checkpoint."""
    quantization: Quantization = "none"
    weights_dtype: Dtype = "auto"

    @property
    def described(self) -> str:
        """The source of drafts, as users read it."""
        return "MTP layer" if self.is_mtp else f"draft {'head' if self.is_head else 'model'} {self.name}"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the engine. `resolve` replaces None and "auto"; the engine process gets resolved settings."""

    model_path: str
    files: tuple[PinnedFile, ...] = ()
    """The model's files, as the server holds them open. Every engine reads these."""
    vocabulary: str = ""
    """Path of the server's file for the vocabulary of grammars (`process.written_once`); empty if there is none."""
    numerics: Numerics | None = None
    """Facts of the first engine that this one must share; None if it is the first."""
    dtype: Dtype = "auto"
    """Dtype of activations, norms and biases."""
    weights_dtype: Dtype = "auto"
    """Dtype of the embedding and of matrices that are not quantized: `dtype`, or 16 bits that products widen."""
    quantization: Quantization = "none"
    """Format of the linear layers' weights."""
    keeps_blocks: bool = False
    """Whether the matrices of a GGUF file are served from their blocks. Otherwise they are dequantized."""
    modelled: Modelled | None = None
    """The model as transformers' own code computes it; None for a native family. `resolve` takes it from the facts."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Format of K and V: the dtype, or 8 bits."""
    device: DeviceKind = "auto"
    deterministic: bool | None = None
    """Whether a request's tokens must depend on the request alone."""
    attention_libs: bool = True
    """Whether a GPU may compute attention by a library that is installed."""
    max_model_len: int | None = None
    """Most tokens of one sequence, prompt and output together; at least 2."""
    rope_positions: int | None = None
    """Sequence length for rope scalings that depend on one. It does not depend on the free memory."""
    block_size: int | None = None
    """Number of tokens in a KV block."""
    kv_memory_bytes: int | None = None
    num_blocks: int | None = None
    """Number of KV blocks, computed from `kv_memory_bytes`."""
    num_checkpoints: int = 0
    """Number of copies of recurrent states for the prefix cache, computed from the memory."""
    checkpoint_interval: int = 0
    """Tokens from one of them to the next in a sequence."""
    max_num_seqs: int | None = None
    """Most sequences in one step."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one step, prefill and decode together."""
    prefix_caching: bool = True
    num_threads: int | None = None
    """Number of threads of an engine on a CPU, of all its ranks together."""
    tensor_parallel_size: int = 1
    """Number of ranks: processes that share the model, each with a part of every matrix and of the KV cache."""
    exchange: Literal["memory", "group"] = "memory"
    """How ranks exchange: CPUs through memory that they share, GPUs through a process group of torch. Tests let CPUs do
    so too."""
    splits_inputs: bool = False
    """Whether the projections `o` and `down` are split among ranks by their inputs, if their format allows it. Then
    results differ from those of one process."""
    standby: bool = False
    """Whether a standby process waits to take the engine's place."""
    num_replicas: int = 1
    """Number of engines that share the machine, each with a model of its own."""
    first_gpu: int = 0
    """Index of the first rank's GPU among the visible ones; those of the other ranks follow."""
    cpus: tuple[int, ...] = ()
    """Cores that the engine is bound to; none: all."""
    speculative: Speculative = "none"
    """Source of the guessed tokens that steps verify."""
    draft: DraftConfig | None = None
    """The draft model, if `speculative` is "model"."""
    max_loras: int = 0
    """Number of LoRA adapters that there is memory for."""
    max_lora_rank: int = 0
    """Largest rank of an adapter."""
    kv_events: Literal["none", "shared", "all"] = "none"
    """Changes of the prefix index that the engine reports: those of prefixes that every request may hit, or all."""

    @property
    def documents(self) -> tuple[PinnedFile, ...]:
        """Those of the model's files that are no safetensors: its tokenizer is made from these."""
        return documents_among(self.files)

    @property
    def all_files(self) -> tuple[PinnedFile, ...]:
        """The files of the model and its draft model."""
        return self.files if self.draft is None else (*self.files, *self.draft.files)

    @property
    def of_draft(self) -> EngineConfig | None:
        """The settings of the draft model as a model of its own; None if there is none."""
        if self.draft is None:
            return None
        return msgspec.structs.replace(
            self,
            model_path=self.draft.model_path,
            keeps_blocks=self.draft.keeps_blocks,
            modelled=None,
            quantization=self.draft.quantization,
            weights_dtype=self.draft.weights_dtype,
            rope_positions=None,
            draft=None,
            max_loras=0,
        )

    @property
    def lora_dtype(self) -> str:
        """Dtype of the adapters' weights."""
        return lora_dtype(self.device, precision_of(self))

    @property
    def most_draws(self) -> int:
        """Most tokens that a step draws."""
        assert self.max_num_seqs is not None
        return most_draws(self.max_num_seqs, speculates=self.speculative != "none")


@dataclass(frozen=True, slots=True)
class Decision:
    """One setting that `resolve` chose or changed."""

    field: str
    asked: object
    became: object
    why: str


def resolve(
    config: EngineConfig, facts: ModelFacts, machine: Machine, draft: ModelFacts | None = None
) -> tuple[EngineConfig, MemoryPlan, tuple[Decision, ...]]:
    """Replace every "auto". `draft`: the draft model of `config.draft`. Raises `ConfigError` or `CapacityError` with
    what was asked and what would work."""
    check_served(facts.arch)
    _check_bounds(config, facts.arch)
    check_ranks(config.tensor_parallel_size, facts.arch)
    check_quantization(config.quantization, facts.arch)
    config = msgspec.structs.replace(config, modelled=facts.arch.modelled)
    chosen: dict[str, tuple[object, str]] = {}
    quantization = quantization_of(config.quantization, facts.arch)
    if quantization != config.quantization:
        chosen["quantization"] = (quantization, "the format of the checkpoint's matrices")
    device, why = served_device(config.device, quantization, machine, facts.arch)
    if device != config.device:
        chosen["device"] = (device, why)
    check_replica_places(config.num_replicas, config.tensor_parallel_size, device, machine)
    check_rank_places(config.tensor_parallel_size, device, config.num_threads, machine)
    machine, auto = machine.on(device).shared_by(config.num_replicas * config.tensor_parallel_size), _AUTO[device]
    dtype = resolved_dtype(config.dtype, facts, machine)
    if dtype[0] != config.dtype:
        chosen["dtype"] = dtype[:2]
    weights_dtype, why = served_weights_dtype(dtype[0], facts, machine)
    if weights_dtype != config.weights_dtype:
        chosen["weights_dtype"] = (weights_dtype, why)
    deterministic, why = deterministic_on(config.deterministic, device)
    if deterministic != config.deterministic:
        chosen["deterministic"] = (deterministic, why)
    check_modelled(facts.arch, device, deterministic=deterministic)
    if config.speculative == "auto":
        chosen["speculative"] = speculative_on(device)
    elif config.speculative != "none":
        check_speculative(config.speculative, device, facts.arch)
    if config.tensor_parallel_size > 1:
        chosen |= _exchange(config, device, deterministic=deterministic)
    if deterministic and device == "cuda" and dtype[0] == "float32":
        raise ConfigError(
            "on a GPU deterministic results are computed in bfloat16 or float16, but the dtype is float32: "
            f"{dtype[1]}; give --dtype bfloat16, or --no-deterministic, or --device cpu, where they always are"
        )
    kv_cache, why = served_kv_cache(config.kv_cache_dtype, dtype[0], machine)
    if kv_cache != config.kv_cache_dtype:
        chosen["kv_cache_dtype"] = (kv_cache, why)
    if config.num_threads is None:
        share = f"a part of {config.num_replicas} of " if config.num_replicas > 1 else ""
        chosen["num_threads"] = (machine.num_cpus // config.num_replicas or 1, f"{share}the cores this process may use")
    if config.max_num_seqs is None:
        chosen["max_num_seqs"] = _max_num_seqs(auto, facts.arch, Precision(dtype[0]), machine)
    if config.max_num_batched_tokens is None:
        chosen["max_num_batched_tokens"] = (auto.max_num_batched_tokens, f"default on {device}")
    if config.block_size is None:
        chosen["block_size"] = (AUTO_BLOCK_SIZE, "default")
    if config.rope_positions is None:
        chosen["rope_positions"] = (
            config.max_model_len or facts.arch.max_positions,
            "max_model_len if it was asked for, else the model's positions",
        )
    if config.max_loras:
        check_adapters(facts.arch, config.tensor_parallel_size)
    if draft is not None:
        chosen["draft"] = _draft_beside(config, dtype[0], facts.arch, draft, machine)
    settled = msgspec.structs.replace(config, **{field: value for field, (value, _) in chosen.items()})
    draft_arch = None if draft is None else draft.arch
    try:
        memory = _fit(settled, facts.arch, machine, dtype[1] if dtype[0] != dtype[2] else "", draft_arch)
    except CapacityError as error:
        if config.num_replicas == 1:
            raise
        reason = f"each of {config.num_replicas} replicas has a model and a KV cache of its own"
        raise CapacityError(f"{error}; {reason}: give fewer --replicas") from None
    chosen |= memory
    settled = msgspec.structs.replace(settled, **{field: value for field, (value, _) in memory.items()})
    decisions = tuple(Decision(field, getattr(config, field), value, why) for field, (value, why) in chosen.items())
    if draft is not None:
        assert settled.max_model_len is not None
        check_draft_length(facts.arch, draft.arch, settled.max_model_len)
    return settled, plan_of(settled, facts.arch, draft_arch), decisions


def lendable_threads(config: EngineConfig) -> int:
    """Number of threads that other replicas may use while this one has no engine. There are none if each replica has
    GPUs or cores of its own, or if its threads belong to ranks. There are also none if transformers' code computes the
    model, because its bits might depend on the number of threads."""
    is_shared = config.device == "cpu" and not config.cpus and config.tensor_parallel_size == 1
    return config.num_threads or 0 if is_shared and config.modelled is None else 0


def replicas_of(config: EngineConfig) -> tuple[EngineConfig, ...]:
    """The settings of each replica: its own GPUs, or on a machine with several NUMA nodes its own cores."""
    groups = cpu_groups(config.num_replicas) if config.device == "cpu" else ((),) * config.num_replicas
    return tuple(
        msgspec.structs.replace(config, first_gpu=config.first_gpu + index * config.tensor_parallel_size, cpus=cpus)
        for index, cpus in enumerate(groups)
    )


def _exchange(config: EngineConfig, device: str, *, deterministic: bool) -> dict[str, tuple[object, str]]:
    """How the ranks exchange, and what."""
    chosen: dict[str, tuple[object, str]] = {}
    if device == "cuda":
        chosen["exchange"] = ("group", "ranks on GPUs")
    if not deterministic and not config.splits_inputs:
        chosen["splits_inputs"] = (True, "ranks exchange half as often, and results need not be those of one process")
    return chosen


def _draft_beside(
    config: EngineConfig, dtype: str, arch: Arch, draft: ModelFacts, machine: Machine
) -> tuple[DraftConfig, str]:
    """(settings of a draft model beside a served model in `dtype`, why)."""
    assert config.draft is not None
    check_draft(arch, draft.arch, config.tensor_parallel_size)
    settled = draft_precision(Precision(dtype), config.quantization, draft, machine)
    fields = {"quantization": settled.quantization, "weights_dtype": settled.weights_dtype}
    return msgspec.structs.replace(config.draft, **fields), "what was asked for, if the draft model can have it"


def plan_of(config: EngineConfig, arch: Arch, draft: Arch | None = None) -> MemoryPlan:
    """The memory plan of each rank of an engine with these resolved settings."""
    assert config.num_blocks is not None
    work = replace(_workload(config, config.max_model_len, draft), num_checkpoints=config.num_checkpoints)
    return plan_memory(arch, precision_of(config), work, pool_of(config.num_blocks, work))


def longest_beside_weights(config: EngineConfig, arch: Arch, free_bytes: int, draft: Arch | None = None) -> int:
    """Most tokens that one sequence could have in `free_bytes` beside the weights, with the other resolved settings."""
    available = plan_of(config, arch, draft).weights_bytes + free_bytes
    return longest_context(arch, precision_of(config), _workload(config, config.max_model_len, draft), 1, available)


def precision_of(config: EngineConfig) -> Precision:
    assert config.dtype != "auto" and config.weights_dtype != "auto"
    kv_cache: KVCache = next((name for name in KV_FORMATS if name == config.kv_cache_dtype), "auto")
    return Precision(config.dtype, config.quantization, kv_cache, config.weights_dtype)


def _workload(config: EngineConfig, max_model_len: int | None, draft: Arch | None) -> Workload:
    of_draft, num_ranks = config.of_draft, config.tensor_parallel_size
    assert (of_draft is None) == (draft is None)
    assert config.max_num_seqs is not None and config.max_num_batched_tokens is not None
    assert config.block_size is not None and max_model_len is not None
    return Workload(
        num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        step_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        device="cuda" if config.device == "cuda" else "cpu",
        # One replica may compute on the cores of all.
        num_threads=max((lendable_threads(config) * config.num_replicas or config.num_threads or 1) // num_ranks, 1),
        has_standby=config.standby,
        num_ranks=num_ranks,
        speculates=config.speculative != "none",
        draft=None if draft is None or of_draft is None else Draft(draft, precision_of(of_draft)),
        adapters=adapter_space(config.max_loras, config.max_lora_rank, config.device, precision_of(config)),
    )


def _max_num_seqs(auto: _Auto, arch: Arch, precision: Precision, machine: Machine) -> tuple[object, str]:
    """Number of slots by default: fewer if the recurrent states of so many would take much of the memory."""
    most = most_slots(arch, precision, machine.memory_available_bytes)
    if most is None or most >= auto.max_num_seqs:
        return auto.max_num_seqs, f"default on {machine.device}"
    return most, "as many recurrent states as a tenth of the memory holds"


def _check_bounds(config: EngineConfig, arch: Arch) -> None:
    if config.block_size is not None and config.block_size not in BLOCK_SIZES:
        raise ConfigError(f"block_size must be one of {BLOCK_SIZES}, but got {config.block_size}")
    for field in ("kv_memory_bytes", "max_num_seqs", "max_num_batched_tokens", "num_threads"):
        value = getattr(config, field)
        if value is not None and value < 1:
            raise ConfigError(f"{field} must be at least 1, but got {value}")
    if config.max_model_len is not None and config.max_model_len < MIN_MODEL_LEN:
        raise ConfigError(
            f"max_model_len must be at least {MIN_MODEL_LEN}, one token of prompt and one of output, "
            f"but got {config.max_model_len}"
        )
    if arch.max_positions < MIN_MODEL_LEN:
        raise ConfigError(
            f"the model must have at least {MIN_MODEL_LEN} positions, but its config.json states "
            f"{arch.max_positions}; give another model"
        )
    if config.max_model_len is not None and config.max_model_len > arch.max_positions:
        raise ConfigError(
            f"max_model_len must be at most {arch.max_positions}, the positions this model was trained for, "
            f"but got {config.max_model_len}"
        )


def _fit(
    config: EngineConfig, arch: Arch, machine: Machine, replaced: str, draft: Arch | None
) -> dict[str, tuple[object, str]]:
    """Size the KV pool. An explicit setting is honoured or refused; only an "auto" is adapted.

    `replaced`: why the dtype is not the one asked for, for error messages; empty if it is.
    """
    precision, available = precision_of(config), machine.memory_available_bytes
    length = _length(config, arch, machine, replaced, draft)
    work = _workload(config, length, draft)
    size = block_bytes(arch, precision, work.block_size, work.num_ranks, work.draft)
    num_needed = blocks_per_seq(arch, length, work)
    rest = plan_memory(arch, precision, work, pool_of(0, work))
    left = available - rest.weights_bytes - rest.kv_bytes - rest.working_bytes
    if config.kv_memory_bytes is not None:
        if config.kv_memory_bytes > left * work.num_ranks:
            raise CapacityError(
                f"kv_memory of {format_bytes(config.kv_memory_bytes)} was asked for, but "
                f"{format_bytes(left * work.num_ranks)} are left beside the weights "
                f"({format_bytes(rest.weights_bytes)} in {precision.weights_name}{of_each_rank(work)}) and "
                f"{format_bytes(rest.working_bytes)} to work in: ask for less, or leave kv_memory out"
            )
        num_blocks = config.kv_memory_bytes // work.num_ranks // size
        why = f"kv_memory of {format_bytes(config.kv_memory_bytes)}"
    else:
        auto = _AUTO[machine.device]
        share = int(left * auto.memory_share)
        most = work.num_seqs * num_needed
        bound = most if auto.kv_bytes is None else auto.kv_bytes // work.num_ranks // size
        wanted = max(min(bound, most), num_needed)
        num_blocks = min(share // size, wanted)
        why = f"within {format_bytes(share)}, {auto.memory_share:.0%} of the memory left"
        least = num_needed if config.max_model_len is not None else blocks_per_seq(arch, MIN_MODEL_LEN, work)
        if num_blocks < least:
            num_blocks, why = least, "the least that one sequence needs"
    return _settle_length(config, arch, replace(work, max_model_len=length), num_blocks, why)


def _length(config: EngineConfig, arch: Arch, machine: Machine, replaced: str, draft: Arch | None) -> int:
    """Most tokens of one sequence: as asked, or as many as fit. Raises `CapacityError` with what would fit."""
    precision, available = precision_of(config), machine.memory_available_bytes
    asked = _workload(config, config.max_model_len or arch.max_positions, draft)
    longest = longest_context(arch, precision, asked, 1, available)
    if longest >= (config.max_model_len or MIN_MODEL_LEN):
        return config.max_model_len or longest
    work = asked if config.max_model_len else replace(asked, max_model_len=MIN_MODEL_LEN)
    plan = plan_sequences(arch, precision, work, 1)
    what = f"one sequence of {work.max_model_len} tokens"
    found = options(arch, served_precisions(arch, precision, machine), asked, 1, available)
    because = f"; it is computed in {config.dtype}: {replaced}" if replaced else ""
    raise CapacityError(f"{shortage(plan, precision, what, available, work)}{because}; {ways_out(precision, found)}")


def _settle_length(
    config: EngineConfig, arch: Arch, work: Workload, num_blocks: int, why: str
) -> dict[str, tuple[object, str]]:
    precision, least = precision_of(config), blocks_per_seq(arch, config.max_model_len or MIN_MODEL_LEN, work)
    size = block_bytes(arch, precision, work.block_size, work.num_ranks, work.draft)
    checkpoints = num_checkpoints(arch, precision, num_blocks, least, size) if config.prefix_caching else 0
    num_blocks -= -(-checkpoints * state_bytes(arch, precision).value // size)
    longest = longest_in_pool(arch, work, num_blocks)
    if longest < (config.max_model_len or MIN_MODEL_LEN):
        raise CapacityError(pool_shortage(arch, precision, work, num_blocks, why))
    kv_bytes = num_blocks * size * work.num_ranks
    chosen: dict[str, tuple[object, str]] = {"num_blocks": (num_blocks, why), "kv_memory_bytes": (kv_bytes, why)}
    if arch.recurrent is not None:
        chosen |= _checkpoints(config, checkpoints, num_blocks, work)
    if config.max_model_len is None:
        length = min(longest, work.max_model_len)
        is_whole = length == arch.max_positions
        chosen["max_model_len"] = (length, "the model's positions" if is_whole else "the longest that fits the memory")
    return chosen


def _checkpoints(config: EngineConfig, count: int, num_blocks: int, work: Workload) -> dict[str, tuple[object, str]]:
    """The checkpoints of recurrent states. Without any, no prefix can be used again."""
    interval = checkpoint_interval(count, num_blocks, work.block_size, work.step_tokens)
    chosen: dict[str, tuple[object, str]] = {
        "num_checkpoints": (count, "half of the memory for prefixes"),
        "checkpoint_interval": (interval, "tokens with as many bytes of K and V, or those of a step"),
    }
    if config.prefix_caching and not count:
        chosen["prefix_caching"] = (False, "no recurrent state fits beside the KV blocks of one sequence")
    return chosen
