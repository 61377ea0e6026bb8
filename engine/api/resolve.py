"""Makes the engine's settings of what was asked, and records each decision with its reason.

This needs the checkpoint's headers and the machine's memory, but neither a device nor torch. So a model that cannot fit
is refused before an engine exists.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from inferd.engine.api.adapter import check_adapters
from inferd.engine.api.config import (
    AskedConfig,
    AskedDraft,
    DraftConfig,
    EngineConfig,
    plan_of,
    precision_of,
    workload_of,
)
from inferd.engine.api.decisions import Decision, Settling
from inferd.engine.api.errors import CapacityError, ConfigError
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.activations import Workload
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
from inferd.engine.api.memory.planner import MemoryPlan, block_bytes, blocks_per_seq, format_bytes, plan_memory, pool_of
from inferd.engine.api.memory.precision import Precision
from inferd.engine.api.memory.states import checkpoint_interval, most_slots, num_checkpoints, state_bytes
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.process.logs import counted
from inferd.engine.api.served import (
    check_modelled,
    check_quantization,
    check_rank_places,
    check_ranks,
    check_replica_places,
    deterministic_on,
    draft_precision,
    quantization_of,
    resolved_dtype,
    served_activations,
    served_device,
    served_kv_cache,
    served_precisions,
    served_weights_dtype,
)
from inferd.engine.api.speculation import (
    check_draft,
    check_draft_length,
    check_served,
    check_speculative,
    speculative_on,
)
from inferd.engine.arch.description import Arch

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


_AUTO = {"cpu": _Auto(128, AUTO_MAX_NUM_BATCHED_TOKENS, 4 * 2**30, 0.6), "cuda": _Auto(256, 4096, None, 0.95)}
"""Other programs need a CPU's memory too, while a GPU is there to serve. The chunk of 4,096 tokens is calculated from
the rates of an H200 and 8 billion weights: reading the weights takes a twentieth of the time of multiplying by them,
and the chunk delays decodes by less than 0.1 s."""


def auto_step_tokens(device: Literal["cpu", "cuda"]) -> int:
    """Most tokens of a step by default."""
    return _AUTO[device].max_num_batched_tokens


def resolve(
    asked: AskedConfig, facts: ModelFacts, machine: Machine, draft: ModelFacts | None = None
) -> tuple[EngineConfig, MemoryPlan, tuple[Decision, ...]]:
    """Decide what was left to inferd. `draft`: the draft model of `asked.draft`. Raises `ConfigError` or
    `CapacityError` with what was asked and what would work."""
    arch, draft_arch = facts.arch, None if draft is None else draft.arch
    check_served(arch)
    _check_bounds(asked, arch)
    check_ranks(asked.tensor_parallel_size, arch)
    check_quantization(asked.quantization, arch)
    settings = Settling(asked, arch.modelled)
    machine = _settle_device(settings, facts, machine)
    dtype, replaced = _settle_dtype(settings, facts, machine)
    _settle_limits(settings, arch, Precision(dtype), machine)
    if asked.max_loras:
        check_adapters(arch, asked.tensor_parallel_size)
    if draft is not None:
        _settle_draft(settings, Precision(dtype), arch, draft, machine)
    try:
        _Pool(settings, arch, machine, replaced, draft_arch).settle()
    except CapacityError as error:
        if asked.num_replicas == 1:
            raise
        reason = f"each of {asked.num_replicas} replicas has a model and a KV cache of its own"
        raise CapacityError(f"{error}; {reason}: give fewer --replicas") from None
    config = settings.config()
    if draft_arch is not None:
        check_draft_length(arch, draft_arch, config.max_model_len)
    return config, plan_of(config, arch, draft_arch), tuple(settings.decisions)


def _settle_device(settings: Settling, facts: ModelFacts, machine: Machine) -> Machine:
    """Settle the device, and what follows from it alone. Returns the machine as one rank sees it."""
    asked, arch = settings.asked, facts.arch
    quantization = quantization_of(asked.quantization, arch)
    settings.settle("quantization", quantization, "the format of the checkpoint's matrices")
    device = settings.settle("device", *served_device(asked.device, quantization, machine, arch))
    settings.settle("activations", *served_activations(asked.activations, device, arch))
    if device == "cpu":
        why = "on a CPU the KV cache lies in the host's memory already, and --kv-memory makes it larger"
        settings.settle("kv_host_bytes", 0, why, "--kv-host")
    check_replica_places(asked.num_replicas, asked.tensor_parallel_size, device, machine)
    check_rank_places(asked.tensor_parallel_size, device, asked.num_threads, machine)
    return machine.on(device).shared_by(asked.num_replicas * asked.tensor_parallel_size)


def _settle_dtype(settings: Settling, facts: ModelFacts, machine: Machine) -> tuple[str, str]:
    """Settle formats, and what depends on them. Returns (dtype, why it is not the one asked for: empty if it is)."""
    asked, arch, device = settings.asked, facts.arch, machine.device
    dtype, why, wanted = resolved_dtype(asked.dtype, facts, machine)
    settings.settle("dtype", dtype, why)
    settings.settle("weights_dtype", *served_weights_dtype(dtype, facts, machine))
    deterministic = settings.settle("deterministic", *deterministic_on(asked.deterministic, device))
    check_modelled(arch, device, deterministic=deterministic)
    if asked.speculative == "auto":
        settings.settle("speculative", *speculative_on(device))
    elif asked.speculative != "none":
        check_speculative(asked.speculative, device, arch)
    if asked.tensor_parallel_size > 1 and device == "cuda":
        settings.settle("exchange", "group", "ranks on GPUs")
    if asked.tensor_parallel_size > 1 and not deterministic:
        because = "ranks exchange half as often, and results need not be those of one process"
        settings.settle("splits_inputs", value=True, why=because)
    if deterministic and device == "cuda" and dtype == "float32":
        raise ConfigError(
            "on a GPU deterministic results are computed in bfloat16 or float16, but the dtype is float32: "
            f"{why}; give --dtype bfloat16, or --no-deterministic, or --device cpu, where they always are"
        )
    settings.settle("kv_cache_dtype", *served_kv_cache(asked.kv_cache_dtype, dtype, machine))
    return dtype, why if dtype != wanted else ""


def _settle_limits(settings: Settling, arch: Arch, precision: Precision, machine: Machine) -> None:
    """Settle the numbers that do not depend on the memory left beside the weights."""
    asked, auto = settings.asked, _AUTO[machine.device]
    share = f"a part of {asked.num_replicas} of " if asked.num_replicas > 1 else ""
    num_threads = machine.num_cpus // asked.num_replicas or 1
    settings.unless_asked("num_threads", num_threads, f"{share}the cores this process may use")
    settings.unless_asked("max_num_seqs", *_max_num_seqs(auto, arch, precision, machine))
    settings.unless_asked("max_num_batched_tokens", auto.max_num_batched_tokens, f"default on {machine.device}")
    settings.unless_asked("block_size", AUTO_BLOCK_SIZE, "default")
    why = "max_model_len if it was asked for, else the model's positions"
    settings.settle("rope_positions", asked.max_model_len or arch.max_positions, why)


def _max_num_seqs(auto: _Auto, arch: Arch, precision: Precision, machine: Machine) -> tuple[int, str]:
    """Number of slots by default: fewer if the recurrent states of so many would take much of the memory."""
    most = most_slots(arch, precision, machine.memory_available_bytes)
    if most is None or most >= auto.max_num_seqs:
        return auto.max_num_seqs, f"default on {machine.device}"
    return most, "as many recurrent states as a tenth of the memory holds"


def _settle_draft(settings: Settling, served: Precision, arch: Arch, draft: ModelFacts, machine: Machine) -> None:
    """Settle the formats of a draft model beside a model in the precision `served`."""
    asked = settings.asked.draft
    assert asked is not None
    check_draft(arch, draft.arch, settings.asked.tensor_parallel_size)
    found = draft_precision(served, settings.asked.quantization, draft, machine)
    fields = {field: getattr(asked, field) for field in AskedDraft.__struct_fields__}
    settled = DraftConfig(**fields, quantization=found.quantization, weights_dtype=found.weights_dtype)
    settings.settle("draft", settled, "what was asked for, if the draft model can have it")


def _check_bounds(asked: AskedConfig, arch: Arch) -> None:
    if asked.block_size is not None and asked.block_size not in BLOCK_SIZES:
        raise ConfigError(f"block_size must be one of {BLOCK_SIZES}, but got {asked.block_size}")
    for field in ("kv_memory_bytes", "max_num_seqs", "max_num_batched_tokens", "num_threads"):
        value = getattr(asked, field)
        if value is not None and value < 1:
            raise ConfigError(f"{field} must be at least 1, but got {value}")
    if asked.max_model_len is not None and asked.max_model_len < MIN_MODEL_LEN:
        raise ConfigError(
            f"max_model_len must be at least {MIN_MODEL_LEN}, one token of prompt and one of output, "
            f"but got {asked.max_model_len}"
        )
    if arch.max_positions < MIN_MODEL_LEN:
        raise ConfigError(
            f"the model must have at least {MIN_MODEL_LEN} positions, but its config.json states "
            f"{arch.max_positions}; give another model"
        )
    if asked.max_model_len is not None and asked.max_model_len > arch.max_positions:
        raise ConfigError(
            f"max_model_len must be at most {arch.max_positions}, the positions this model was trained for, "
            f"but got {asked.max_model_len}"
        )


class _Pool:
    """The size of the KV pool, and the length of a sequence that follows from it. An explicit setting is honoured or
    refused; only an "auto" is adapted."""

    def __init__(self, settings: Settling, arch: Arch, machine: Machine, replaced: str, draft: Arch | None) -> None:
        """`replaced`: why the dtype is not the one asked for, for error messages; empty if it is."""
        self._settings, self._asked, self._arch, self._machine = settings, settings.asked, arch, machine
        self._replaced = replaced
        most = self._asked.max_model_len or arch.max_positions
        config = settings.config(max_model_len=most, kv_memory_bytes=0, num_blocks=0)
        self._precision, self._most = precision_of(config), workload_of(config, draft)
        """The formats, and the work with the longest sequence that the operator may get."""
        self._least = self._asked.max_model_len or MIN_MODEL_LEN
        """Tokens that a sequence must have room for."""

    def settle(self) -> None:
        """Settle the pool, the length and the number of checkpoints. Raises `CapacityError`."""
        asked, arch, precision = self._asked, self._arch, self._precision
        work = replace(self._most, max_model_len=self._length())
        size = block_bytes(arch, precision, work.block_size, work.num_ranks, work.draft)
        num_blocks, why = self._num_blocks(work, size)
        least = blocks_per_seq(arch, self._least, work)
        checkpoints = num_checkpoints(arch, precision, num_blocks, least, size) if asked.prefix_caching else 0
        num_blocks -= -(-checkpoints * state_bytes(arch, precision).value // size)
        longest = longest_in_pool(arch, work, num_blocks)
        if longest < self._least:
            raise CapacityError(pool_shortage(arch, precision, work, num_blocks, why))
        self._settings.settle("num_blocks", num_blocks, why)
        self._settings.settle("kv_memory_bytes", num_blocks * size * work.num_ranks, why)
        if arch.recurrent is not None:
            self._settle_checkpoints(checkpoints, num_blocks, work)
        if asked.max_model_len is None:
            length = min(longest, work.max_model_len)
            is_whole = length == arch.max_positions
            why = "the model's positions" if is_whole else "the longest that fits the memory"
            self._settings.settle("max_model_len", length, why)

    def _length(self) -> int:
        """Most tokens of one sequence: as asked, or as many as fit. Raises `CapacityError` with what would fit."""
        precision, available = self._precision, self._machine.memory_available_bytes
        longest = longest_context(self._arch, precision, self._most, 1, available)
        if longest >= self._least:
            return self._asked.max_model_len or longest
        work = replace(self._most, max_model_len=self._least)
        plan = plan_sequences(self._arch, precision, work, 1)
        what = f"one sequence of {work.max_model_len} tokens"
        served = served_precisions(self._arch, precision, self._machine)
        found = options(self._arch, served, self._most, 1, available)
        because = f"; it is computed in {precision.dtype}: {self._replaced}" if self._replaced else ""
        raise CapacityError(
            f"{shortage(plan, precision, what, available, work)}{because}; {ways_out(precision, found)}"
        )

    def _num_blocks(self, work: Workload, size: int) -> tuple[int, str]:
        """(number of blocks of `size` bytes on a rank, why so many). Raises `CapacityError`."""
        arch, precision, asked = self._arch, self._precision, self._asked
        rest = plan_memory(arch, precision, work, pool_of(0, work))
        left = self._machine.memory_available_bytes - rest.weights_bytes - rest.kv_bytes - rest.working_bytes
        if asked.kv_memory_bytes is not None:
            if asked.kv_memory_bytes > left * work.num_ranks:
                raise CapacityError(
                    f"kv_memory of {format_bytes(asked.kv_memory_bytes)} was asked for, but "
                    f"{format_bytes(left * work.num_ranks)} are left beside the weights "
                    f"({format_bytes(rest.weights_bytes)} in {precision.weights_name}{of_each_rank(work)}) and "
                    f"{format_bytes(rest.working_bytes)} to work in: ask for less, or leave kv_memory out"
                )
            num_blocks = asked.kv_memory_bytes // work.num_ranks // size
            return num_blocks, f"kv_memory of {format_bytes(asked.kv_memory_bytes)}"
        auto, num_needed = _AUTO[self._machine.device], blocks_per_seq(arch, work.max_model_len, work)
        share = int(left * auto.memory_share)
        most = work.num_seqs * num_needed
        bound = most if auto.kv_bytes is None else auto.kv_bytes // work.num_ranks // size
        wanted = max(min(bound, most), num_needed)
        num_blocks = min(share // size, wanted)
        least = num_needed if asked.max_model_len is not None else blocks_per_seq(arch, MIN_MODEL_LEN, work)
        if num_blocks < least:
            return least, "the least that one sequence needs"
        if num_blocks < wanted:
            return num_blocks, f"{auto.memory_share:.0%} of the {format_bytes(left)} left beside the other parts"
        if num_blocks == most:
            return num_blocks, f"what {counted(work.num_seqs, 'sequence')} of {work.max_model_len} tokens can fill"
        if num_blocks == num_needed:
            return num_blocks, f"what one sequence of {work.max_model_len} tokens needs"
        assert auto.kv_bytes is not None
        return num_blocks, f"at most {format_bytes(auto.kv_bytes)} by default, and --kv-memory may give more"

    def _settle_checkpoints(self, count: int, num_blocks: int, work: Workload) -> None:
        """Settle the checkpoints of recurrent states. Without any, no prefix can be used again."""
        self._settings.settle("num_checkpoints", count, "half of the memory for prefixes")
        interval = checkpoint_interval(count, num_blocks, work.block_size, work.step_tokens)
        why = "tokens with as many bytes of K and V, or those of a step"
        self._settings.settle("checkpoint_interval", interval, why)
        if self._asked.prefix_caching and not count:
            why = "no recurrent state fits beside the KV blocks of one sequence"
            self._settings.settle("prefix_caching", value=False, why=why)
