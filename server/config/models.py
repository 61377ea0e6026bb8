"""The models of one server: which they are, the settings of each, and its part of the machine.

A setting of the whole server applies to every model. An entry of the YAML file may have its own value of some settings.
`inferd serve` and `inferd plan` decide alike, because both do it here. Loads no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from inferd.engine.api.adapter import MAX_RANK, AdapterFiles, check_adapters, hold_adapter, space_for
from inferd.engine.api.config import AskedConfig, EngineConfig
from inferd.engine.api.decisions import Decision
from inferd.engine.api.draft import read_draft, source_of
from inferd.engine.api.encoder_model import EncoderFacts
from inferd.engine.api.errors import CapacityError, ConfigError, StartError
from inferd.engine.api.gguf import GgufFile
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.division import MachineShare, MemoryDemand, shares_of
from inferd.engine.api.memory.planner import MemoryPlan, format_bytes
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.resolve import resolve
from inferd.engine.api.resolve_encoder import resolve_encoder
from inferd.engine.api.sentence_folder import PLAIN, SentenceFolder
from inferd.server.config.names import is_reranker_by_name, split_name
from inferd.server.config.settings import SETTINGS, Settings
from inferd.server.config.sources import suggest

_OWN_PANELS = ("Model", "Engine", "Latency", "KV events")
OWN = {name for name, about in SETTINGS.items() if about.panel in _OWN_PANELS and name != "models"}
"""Settings that each model can have its own value of."""


def settings_of_models(settings: Settings) -> tuple[Settings, ...]:
    """The settings of each model, those of the whole server included. Raises `ConfigError`."""
    if not settings.models:
        return (settings,)
    if settings.served_model_name:
        raise ConfigError("served_model_name cannot name a model of a list: give each model its name by name=model")
    each = tuple(settings.of_model(_own(entry), f"models, entry {i}") for i, entry in enumerate(settings.models, 1))
    _check_names(each)
    endpoints = [endpoint for own in each for endpoint in own.kv_endpoints]
    for endpoint in endpoints:
        if endpoints.count(endpoint) > 1:
            raise ConfigError(f"models: two of them have KV events at {endpoint}; give each model its own endpoints")
    return each


def _own(entry: str | Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an entry. Raises `ConfigError`."""
    if isinstance(entry, str):
        name, model = split_name(entry)
        return {"model": model} if name is None else {"model": model, "served_model_name": (name,)}
    own = {str(key).replace("-", "_"): value for key, value in entry.items()}
    for name in own.keys() - OWN:
        if name in SETTINGS:
            raise ConfigError(f"models: {name} is a setting of the whole server: write it beside models, not in it")
        raise ConfigError(f"models: there is no setting {name!r}{suggest(name, OWN)}")
    if "model" not in own:
        raise ConfigError(f"models: an entry must name its model, such as `model: tiny`, but got {entry!r}")
    return own


def _check_names(each: tuple[Settings, ...]) -> None:
    """Raises `ConfigError` if two models, or adapters, have one name."""
    seen: set[str] = set()
    for settings in each:
        for name in (*settings.served_names, *settings.loras):
            if name in seen:
                raise ConfigError(
                    f"models: two models or adapters have the name {name!r}; name them differently by name=model"
                )
            seen.add(name)


Settled = tuple[EngineConfig, MemoryPlan, tuple[Decision, ...]]


@dataclass(frozen=True, slots=True)
class Asked:
    """One model as its settings and headers describe it, before the automatic settings are decided."""

    settings: Settings
    facts: ModelFacts | EncoderFacts
    config: AskedConfig
    draft: ModelFacts | None
    adapters: dict[str, AdapterFiles]
    streams: bool
    """Whether it was made to generate: an encoder was not, nor a decoder that was trained to embed or to judge."""

    @classmethod
    def of(cls, settings: Settings, facts: ModelFacts | EncoderFacts, gguf: GgufFile | None = None) -> Self:
        """Read the headers of its draft model and adapters too. `gguf`: its file, if it is one. Raises `StartError`."""
        keeps_blocks = settings.quantization == "auto"
        draft, adapters = None, dict[str, AdapterFiles]()
        if isinstance(facts, ModelFacts):
            draft = read_draft(settings.speculative, facts.path, keeps_blocks=keeps_blocks)
            if settings.lora or settings.max_loras:
                check_adapters(facts.arch, settings.tensor_parallel_size)
            most = settings.max_lora_rank or MAX_RANK
            adapters = {name: hold_adapter(path, facts.arch, most) for name, path in settings.loras.items()}
        elif settings.lora:
            raise ConfigError("an encoder takes no LoRA adapters: leave --lora out")
        sentences = SentenceFolder.read(facts.path, gguf)
        names = (facts.path.name, *settings.served_names)
        judges = is_reranker_by_name((facts.arch.architecture,), names)
        streams = isinstance(facts, ModelFacts) and facts.arch.has_head and sentences is None and not judges
        max_loras, max_lora_rank = space_for(settings.max_loras, settings.max_lora_rank, tuple(adapters.values()))
        config = AskedConfig(
            model_path=str(facts.path),
            dtype=settings.dtype,
            quantization="none" if settings.quantization == "auto" else settings.quantization,
            activations=settings.activations,
            keeps_blocks=keeps_blocks,
            kv_cache_dtype=settings.kv_cache_dtype,
            device=settings.device,
            deterministic=settings.deterministic,
            attention_libs=settings.attention_libs,
            max_model_len=settings.max_model_len,
            block_size=settings.block_size,
            kv_memory_bytes=settings.kv_memory,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            prefix_caching=settings.prefix_caching,
            weight_cache=settings.weight_cache,
            kv_dir="" if settings.kv_dir is None else str(Path(settings.kv_dir).expanduser().absolute()),
            kv_disk_bytes=settings.kv_disk,
            kv_host_bytes=settings.kv_host,
            num_threads=settings.num_threads,
            tensor_parallel_size=settings.tensor_parallel_size,
            num_replicas=settings.replicas,
            standby=settings.standby,
            speculative=source_of(settings.speculative),
            draft=None if draft is None else draft[0],
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            head_bytes=(sentences or PLAIN).head_bytes,
            kv_events_tiers=settings.kv_events_tiers,
            kv_events="none" if settings.kv_events is None else "all" if settings.kv_events_private else "shared",
        )
        return cls(settings, facts, config, None if draft is None else draft[1], adapters, streams)

    def settled(self, share: MachineShare) -> Settled:
        """Decide every automatic setting. Raises `StartError`."""
        config = msgspec.structs.replace(self.config, first_gpu=share.first_gpu)
        if isinstance(self.facts, EncoderFacts):
            return resolve_encoder(config, self.facts, share.machine)
        return resolve(config, self.facts, share.machine, self.draft)


_NICE_OF_TEXTS = 10
"""Nice value of an engine that embeds or judges texts beside models that generate. 8 streams of SmolLM2 (135M) took
9.6 ms a token alone. Beside 1,500 texts they took 26, 11 and 10 ms with nice 0, 10 and 19 (2 cores of an Intel Xeon,
2026-12-01). At 19 a text would get a hundredth of the cores that streams keep busy."""


def nice_of(asked: Asked, all_asked: Sequence[Asked]) -> int:
    """The nice value of a model's engine: streams are waited for token by token, and texts as a whole."""
    return _NICE_OF_TEXTS if not asked.streams and any(other.streams for other in all_asked) else 0


def check_host_memory(machine: Machine, configs: Sequence[EngineConfig]) -> None:
    """Raises `CapacityError` if the host lacks the memory that engines on GPUs may take for KV. The system would not
    refuse it, but end a process some time later."""
    wanted_bytes = sum(config.kv_host_bytes * config.num_replicas for config in configs)
    if wanted_bytes > machine.memory_available_bytes:
        raise CapacityError(
            f"kv_host may take {format_bytes(wanted_bytes)} of the host's memory in all engines together, but "
            f"{format_bytes(machine.memory_available_bytes)} are available: give a smaller --kv-host"
        )


def machine_shares(machine: Machine, demands: Sequence[MemoryDemand]) -> list[MachineShare]:
    """The share of each model. One model has the whole machine. Raises `CapacityError` if they do not fit together."""
    return shares_of(machine, demands) if demands else [MachineShare(machine, 0)]


def demands_of(machine: Machine, all_asked: Sequence[Asked]) -> list[MemoryDemand]:
    """The needs of several models; none of one alone. Raises `StartError`."""
    demands = []
    each = [asked.settings for asked in all_asked]
    for asked in all_asked if len(all_asked) > 1 else ():
        with named(asked.settings, each):
            config, plan, _ = asked.settled(MachineShare(machine, 0))
        num_engines = config.num_replicas * config.tensor_parallel_size
        name = asked.settings.served_names[0]
        demands.append(MemoryDemand(name, config.device == "cuda", num_engines, plan, asked.config.kv_memory_bytes))
    return demands


@contextmanager
def named(settings: Settings, each: Sequence[Settings]) -> Iterator[None]:
    """Errors say which of several models they are about."""
    try:
        yield
    except StartError as error:
        if len(each) == 1:
            raise
        raise type(error)(f"{settings.served_names[0]}: {error}") from error
