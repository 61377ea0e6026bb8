"""The engine's settings: as asked, and as they are resolved for this machine.

A setting that is left to inferd is None or "auto" in an `AskedConfig`. `resolve` makes an `EngineConfig` of it, which
the engine process gets.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from inferd.engine.api.adapter import adapter_space, lora_dtype
from inferd.engine.api.gguf import is_gguf
from inferd.engine.api.machine.cpu import cpu_groups
from inferd.engine.api.memory.activations import Draft, Workload, most_draws
from inferd.engine.api.memory.capacity import longest_context
from inferd.engine.api.memory.encoders import EncoderLoad, plan_encoder
from inferd.engine.api.memory.planner import MemoryPlan, plan_memory, pool_of
from inferd.engine.api.memory.precision import KV_FORMATS, KVPrecision, Precision, Quantization
from inferd.engine.api.numerics import Numerics
from inferd.engine.api.pinned_files import PinnedFile, documents_among
from inferd.engine.api.served import Activations, DeviceKind, Dtype, KVCacheDtype
from inferd.engine.api.speculation import Speculative
from inferd.engine.arch.description import Arch
from inferd.engine.arch.encoder import EncoderArch
from inferd.engine.arch.modelled import Modelled


class AskedDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A draft model or draft head."""

    model_path: str
    keeps_blocks: bool = False
    name: str = ""
    """Name of the model on the command line."""
    is_head: bool = False
    """Whether it is a draft head."""
    is_mtp: bool = False
    """Whether it is the MTP layer of the served model's checkpoint."""

    @property
    def described(self) -> str:
        """The source of drafts, as users read it."""
        return "MTP layer" if self.is_mtp else f"draft {'head' if self.is_head else 'model'} {self.name}"


class DraftConfig(AskedDraft, frozen=True, kw_only=True):
    """Those settings of a draft model or draft head that differ from those of the served model."""

    quantization: Quantization
    weights_dtype: str
    files: tuple[PinnedFile, ...] = ()
    """Its files, unless they are the served model's. They change no token, and are no part of the fingerprint."""


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that have one form, asked and resolved."""

    model_path: str
    quantization: Quantization = "none"
    """Format of the linear layers' weights. Asked: "none" keeps the checkpoint's format."""
    keeps_blocks: bool = False
    """Whether the matrices of a GGUF file are served from their blocks. Otherwise they are dequantized."""
    attention_libs: bool = True
    """Whether a GPU may compute attention by a library that is installed."""
    prefix_caching: bool = True
    kv_dir: str = ""
    """Directory that keeps KV blocks for later starts; empty if there is none."""
    kv_disk_bytes: int = 0
    """Most bytes of all files in it."""
    kv_host_bytes: int = 0
    """Bytes of host memory in which an engine on a GPU keeps KV blocks; 0 if there are none."""
    weight_cache: bool = False
    """Whether packed weights are kept for later starts, and mapped from earlier ones."""
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
    speculative: Speculative = "none"
    """Source of the guessed tokens that steps verify."""
    head_bytes: int = 0
    """Bytes of the dense layers and norms behind the pooling of embeddings."""
    max_loras: int = 0
    """Number of LoRA adapters that there is memory for."""
    max_lora_rank: int = 0
    """Largest rank of an adapter."""
    kv_events: Literal["none", "shared", "all"] = "none"
    """Changes of the prefix index that the engine reports: those of prefixes that every request may hit, or all."""
    kv_events_tiers: bool = False
    """Whether it reports what the tiers below have, too."""


class AskedConfig(_Config, frozen=True, kw_only=True):
    """The settings as asked."""

    dtype: Dtype = "auto"
    activations: Literal["auto"] | Activations = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    device: DeviceKind = "auto"
    deterministic: bool | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    kv_memory_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_threads: int | None = None
    draft: AskedDraft | None = None
    """The draft model, if `speculative` is "model"."""


class EngineConfig(_Config, frozen=True, kw_only=True):
    """The settings of the engine, all resolved. None means that there is no such thing."""

    files: tuple[PinnedFile, ...] = ()
    """The model's files, as the server holds them open. Every engine reads these."""
    vocabulary: str = ""
    """Path of the server's file for the vocabulary of grammars (`process.written_once`); empty if there is none."""
    pool_memory: str = ""
    """Path of the memory in which the server keeps the KV pool from engine to engine (`process.memory_file`); empty if
    the pool ends with its engine."""
    is_encoder: bool = False
    """Whether the model is an encoder: it embeds and classifies whole texts, and keeps no K and V."""
    numerics: Numerics | None = None
    """Facts of the first engine that this one must share; None if it is the first."""
    dtype: str
    """Dtype of activations, norms and biases."""
    weights_dtype: str
    """Dtype of the embedding and of matrices that are not quantized: `dtype`, or 16 bits that products widen."""
    modelled: Modelled | None = None
    """The model as transformers' own code computes it; None for a native family."""
    activations: Activations = "own"
    """How a CPU quantizes the activations of a checkpoint in 8 bits: in inferd's own way, or as it declares."""
    kv_cache_dtype: str
    """Format of K and V: the dtype, or 8 bits."""
    device: Literal["cpu", "cuda"]
    deterministic: bool
    """Whether a request's tokens must depend on the request alone."""
    max_model_len: int
    """Most tokens of one sequence, prompt and output together; at least 2."""
    rope_positions: int | None = None
    """Sequence length for rope scalings that depend on one; None: the model's. It does not depend on the free
    memory."""
    block_size: int
    """Number of tokens in a KV block."""
    kv_memory_bytes: int
    num_blocks: int
    """Number of KV blocks, computed from `kv_memory_bytes`."""
    num_checkpoints: int = 0
    """Number of copies of recurrent states for the prefix cache, computed from the memory."""
    checkpoint_interval: int = 0
    """Tokens from one of them to the next in a sequence."""
    max_num_seqs: int
    """Most sequences in one step."""
    max_num_batched_tokens: int
    """Most tokens of one step, prefill and decode together."""
    num_threads: int
    """Number of threads of an engine on a CPU, of all its ranks together."""
    cpus: tuple[int, ...] = ()
    """Cores that the engine is bound to; none: all."""
    nice: int = 0
    """Nice value of the engine: above 0, it leaves busy cores to the engines of other models."""
    draft: DraftConfig | None = None
    """The draft model, if `speculative` is "model"."""

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
            head_bytes=0,
            max_loras=0,
        )

    @property
    def lora_dtype(self) -> str:
        """Dtype of the adapters' weights."""
        return lora_dtype(self.device, precision_of(self))

    @property
    def most_draws(self) -> int:
        """Most tokens that a step draws."""
        return most_draws(self.max_num_seqs, speculates=self.speculative != "none")


def precision_of(config: EngineConfig) -> Precision:
    kv_cache: KVPrecision = next((name for name in KV_FORMATS if name == config.kv_cache_dtype), "auto")
    return Precision(config.dtype, config.quantization, kv_cache, config.weights_dtype)


def workload_of(config: EngineConfig, draft: Arch | None) -> Workload:
    """The most that the engine computes, for plans of its memory. `draft`: the model of `config.draft`."""
    of_draft, num_ranks = config.of_draft, config.tensor_parallel_size
    assert (of_draft is None) == (draft is None)
    return Workload(
        num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        step_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        device=config.device,
        # One replica may compute on the cores of all.
        num_threads=max((lendable_threads(config) * config.num_replicas or config.num_threads) // num_ranks, 1),
        has_standby=config.standby,
        num_ranks=num_ranks,
        speculates=config.speculative != "none",
        draft=None if draft is None or of_draft is None else Draft(draft, precision_of(of_draft)),
        adapters=adapter_space(config.max_loras, config.max_lora_rank, config.device, precision_of(config)),
        is_gguf=is_gguf(Path(config.model_path)),
        kv_host_bytes=config.kv_host_bytes,
        head_bytes=config.head_bytes,
    )


def plan_of(config: EngineConfig, arch: Arch | EncoderArch, draft: Arch | None = None) -> MemoryPlan:
    """The memory plan of each rank of an engine."""
    if isinstance(arch, EncoderArch) or arch.is_bidirectional:
        return plan_encoder(arch, precision_of(config), _encoder_load(config))
    work = replace(workload_of(config, draft), num_checkpoints=config.num_checkpoints)
    return plan_memory(arch, precision_of(config), work, pool_of(config.num_blocks, work))


def _encoder_load(config: EngineConfig) -> EncoderLoad:
    return EncoderLoad(
        step_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        has_standby=config.standby,
        is_gguf=is_gguf(Path(config.model_path)),
        head_bytes=config.head_bytes,
    )


def longest_beside_weights(config: EngineConfig, arch: Arch, free_bytes: int, draft: Arch | None = None) -> int:
    """Most tokens that one sequence could have in `free_bytes` beside the weights, with the other settings."""
    available = plan_of(config, arch, draft).weights_bytes + free_bytes
    return longest_context(arch, precision_of(config), workload_of(config, draft), 1, available)


def keeps_pool(config: EngineConfig) -> bool:
    """Whether the server keeps the KV pool from engine to engine. A GPU's memory ends with its process, and ranks have
    parts of the pool. Without a prefix index nobody would find a block there."""
    return config.device == "cpu" and config.tensor_parallel_size == 1 and config.prefix_caching


def lendable_threads(config: EngineConfig) -> int:
    """Number of threads that other replicas may use while this one has no engine. There are none if each replica has
    GPUs or cores of its own, or if its threads belong to ranks. There are also none if transformers' code computes the
    model, because its bits might depend on the number of threads."""
    is_shared = config.device == "cpu" and not config.cpus and config.tensor_parallel_size == 1
    return config.num_threads if is_shared and config.modelled is None else 0


def replicas_of(config: EngineConfig) -> tuple[EngineConfig, ...]:
    """The settings of each replica: its own GPUs, or on a machine with several NUMA nodes its own cores."""
    groups = cpu_groups(config.num_replicas) if config.device == "cpu" else ((),) * config.num_replicas
    return tuple(
        msgspec.structs.replace(config, first_gpu=config.first_gpu + index * config.tensor_parallel_size, cpus=cpus)
        for index, cpus in enumerate(groups)
    )
