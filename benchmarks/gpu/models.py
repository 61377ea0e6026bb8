"""The two measured models, by shape: random decoders on the device, checkpoints on disk, and an engine around a
decoder. Speed depends on shapes, not on training."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.checkpoints import DONE, SHAPES, TOKENIZER_DIR, TOKENIZER_FILES, Shape
from inferd.engine.api.wire.messages import StepOutput, Submit
from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.arch.registry import describe, weights
from inferd.engine.cache.below import Tier
from inferd.engine.cache.state_checkpoints import StateCheckpointRules
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.models.decoder import Decoder
from inferd.engine.quant.recipe import recipes
from inferd.engine.sample.sampler import Sampler
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.worker.device import CpuDevice, Device
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.runner import Runner
from inferd.engine.worker.slots import Slots
from inferd.engine.worker.states import StatePool
from inferd.kernels.ops.kv_format import head_bytes
from inferd.kernels.ops.linear import ANY, Choices

BLOCK_SIZE = 32
STEP_TOKENS = 4096
"""Most tokens of one step: an engine's choice on a GPU."""
QUANTIZATION = {"bf16": "none", "fp8": "fp8", "int8": "int8", "int4": "int4"}
"""Quantization recipe of each precision."""


@dataclass(frozen=True, slots=True)
class Model:
    """A shape and the rest of its config.json."""

    name: str
    shape: Shape
    family: Mapping[str, Any]

    def config(self) -> dict[str, Any]:
        """config.json for transformers and inferd. Has no end of sequence, because benchmarks set the lengths."""
        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        common = {"hidden_act": "silu", "dtype": "bfloat16", "model_type": self.shape.model_type}
        return {**self.shape.config(), **common, **ends, **self.family}


MODELS = {
    "8b": Model(
        "8b",
        Shape(
            model_type="llama",
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=131_072,
        ),
        {
            "architectures": ["LlamaForCausalLM"],
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "0.6b": Model(
        "0.6b",
        replace(SHAPES["0.6b"], max_position_embeddings=40_960),
        {
            "architectures": ["Qwen3ForCausalLM"],
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "smoke": Model(
        "smoke",
        SHAPES["smoke"],
        {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e4}},
    ),
}
"""Llama-3.1-8B and Qwen3-0.6B as published. `smoke` is for rehearsals."""


def random_decoder(
    model: Model,
    device: torch.device,
    precision: str = "bf16",
    max_positions: int | None = None,
    choices: Choices = ANY,
) -> Decoder:
    """Random weights of a usual size, drawn on the device; the same in any precision. `choices` is for its products."""
    recipe = recipes(choices)[QUANTIZATION[precision]]
    decoder = Decoder(describe(model.config()), torch.bfloat16, device, max_positions, None, recipe)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in decoder.parameters.values():
        parameter.write(0, _weight(parameter.shape, device, generator))
    return decoder


def _weight(shape: Sequence[int], device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Norms near 1, and matrices that preserve the size of their inputs."""
    if len(shape) == 1:
        return torch.ones(*shape, dtype=torch.bfloat16, device=device)
    weight = torch.empty(*shape, dtype=torch.bfloat16, device=device)
    return weight.normal_(0.0, shape[1] ** -0.5, generator=generator)


def open_device(device: torch.device) -> Device:
    """The worker's view of the device."""
    if device.type != "cuda":
        return CpuDevice(torch.get_num_threads())
    from inferd.engine.worker.cuda import CudaDevice  # noqa: PLC0415

    return CudaDevice()


@dataclass(frozen=True, slots=True)
class Engine:
    """A decoder with memory and slots for `num_seqs` sequences of `max_len`, or as many as fit."""

    runner: Runner
    num_seqs: int
    max_len: int
    num_blocks: int
    vocab_size: int

    @classmethod
    def around(
        cls,
        decoder: Decoder,
        num_seqs: int,
        max_len: int,
        *,
        share: float = 0.85,
        is_deterministic: bool = False,
        kv_dtype: torch.dtype = torch.bfloat16,
    ) -> Engine:
        """An engine whose KV takes at most `share` of the free memory. `is_deterministic` must match the decoder's
        products."""
        device = open_device(decoder.device)
        arch = decoder.arch
        block_bytes = 2 * arch.num_layers * arch.num_kv_heads * head_bytes(arch.head_dim, kv_dtype) * BLOCK_SIZE
        per_seq = -(-max_len // BLOCK_SIZE) + 1
        num_blocks = num_seqs * per_seq
        if decoder.device.type == "cuda":
            torch.cuda.empty_cache()
            num_blocks = min(num_blocks, int(torch.cuda.mem_get_info()[0] * share) // block_bytes)
        num_seqs = min(num_seqs, num_blocks // per_seq)
        kv = KVPool.allocate(arch, num_blocks, BLOCK_SIZE, kv_dtype, device)
        slots = Slots(num_seqs, max_len, BLOCK_SIZE, device, len(arch.cache_groups))
        sampler = Sampler(num_seqs, arch.vocab_size, device.torch_device)
        states = StatePool.allocate(arch, num_seqs, num_seqs, decoder.dtype, device)
        runner = Runner(LoadedModel(decoder, kv, slots, sampler, device, is_deterministic, states))
        return cls(runner, num_seqs, max_len, num_blocks, arch.vocab_size)

    @contextmanager
    def core(
        self, *, depth: int = 1, step_tokens: int = STEP_TOKENS, tier: Callable[[KVCache], Tier] | None = None
    ) -> Iterator[EngineCore]:
        """A core over an empty cache; only one may exist at a time. `tier` makes a tier below it."""
        limits = SchedulerConfig(
            max_num_seqs=self.num_seqs, max_num_batched_tokens=step_tokens, max_model_len=self.max_len
        )
        is_hybrid = self.runner.arch.recurrent is not None
        rules = StateCheckpointRules(self.num_seqs, step_tokens) if is_hybrid else None
        windows = self.runner.cache_windows
        cache = KVCache(self.num_blocks, BLOCK_SIZE, windows, step_tokens=step_tokens, checkpoints=rules)
        executor = ThreadExecutor(self.runner, WorkerThread())
        try:
            below = None if tier is None else tier(cache)
            yield EngineCore(Scheduler(limits, cache), executor, vocab_size=self.vocab_size, depth=depth, tier=below)
        finally:
            executor.close()


def random_ids(count: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab_size, (count,), generator=generator).tolist())


def greedy(name: str, ids: Sequence[int], max_tokens: int, **params: Any) -> Submit:
    """A request that ends only by its length."""
    asked = {"max_tokens": max_tokens, "seed": 0, "temperature": 0.0, **params}
    return Submit(request_id=name, prompt_ids=tuple(ids), params=SamplingParams(**asked))


def run(core: EngineCore, submits: Sequence[Submit]) -> dict[str, tuple[int, ...]]:
    """Run every request to its end and return its ids. Raises `RuntimeError` if one failed."""
    for submit in submits:
        core.submit(submit, 0.0)
    answers: dict[str, tuple[int, ...]] = {submit.request_id: () for submit in submits}
    while core.has_work or core.is_awaiting:
        for name, ids in new_ids(core.step(0.0) if core.has_work else None):
            answers[name] += ids
    return answers


def new_ids(output: StepOutput | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(request, its new ids). Raises `RuntimeError` if a request failed."""
    for delta in output.deltas if output else ():
        if delta.failure is not None:
            raise RuntimeError(f"{delta.request_id}: {delta.failure.message}")
        yield delta.request_id, delta.token_ids


def scratch() -> Path:
    """The folder for checkpoints: in memory if there is space, so that a start reads no disk."""
    given = os.environ.get("INFERD_BENCH_SCRATCH")
    if given:
        return Path(given)
    shared = Path("/dev/shm")
    has_room = shared.is_dir() and shutil.disk_usage(shared).free > 40 << 30
    return (shared if has_room else Path(tempfile.gettempdir())) / "inferd-benchmarks"


def checkpoint(model: Model, device: torch.device) -> Path:
    """A checkpoint with random weights, made if it is missing, in shards of about 4 GB like published ones."""
    path = scratch() / model.name
    if (path / DONE).exists():
        return path
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(model.config()))
    for file in TOKENIZER_FILES:
        shutil.copy(TOKENIZER_DIR / file, path / file)
    generator = torch.Generator(device).manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for source in weights(describe(model.config())).sources:
        if sum(tensor.nbytes for tensor in shards[-1].values()) > 4 << 30:
            shards.append({})
        shards[-1][source.tensor] = _weight(source.shape, device, generator).cpu()
    index = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, path / file, {"format": "pt"})
        index.update(dict.fromkeys(shard, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (path / DONE).touch()
    return path
