"""Builds the worker of an encoder from resolved settings: loads the checkpoint, and reports each phase when it ends."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import EngineConfig, plan_of
from inferd.engine.api.encoder_model import EncoderFacts
from inferd.engine.api.errors import ModelError
from inferd.engine.api.sentence_folder import PLAIN, SentenceFolder
from inferd.engine.api.wire.messages import Ready
from inferd.engine.api.wire.params import Pooling, SamplingParams
from inferd.engine.arch.encoder import EncoderArch
from inferd.engine.layers.collectives import ALONE
from inferd.engine.models.encoder import Encoder
from inferd.engine.models.packed_decoder import PackedDecoder
from inferd.engine.models.pooled_heads import PooledHeads
from inferd.engine.quant.checkpoints.reader import CheckpointError
from inferd.engine.quant.scheme import QuantizationError
from inferd.engine.sched.plan import Admission, Row, StepPlan
from inferd.engine.worker.build import load_and_measure, open_device, prepare_kernels, recipe_for
from inferd.engine.worker.device import Device
from inferd.engine.worker.encoding import EncoderWorker
from inferd.engine.worker.kept_weights import KeptWeights
from inferd.engine.worker.recorded_encoder import RecordedEncoder
from inferd.engine.worker.start_phases import PhaseTimer, checked_kernels, choices_of, measured_peaks, weights_phase
from inferd.engine.worker.text_pooling import POOLINGS
from inferd.kernels.ops.linear import ANY, Choices
from inferd.kernels.registry import KernelError

_WARM_UP_TOKENS = 4


def load_encoder(config: EngineConfig, timer: PhaseTimer) -> tuple[EncoderWorker, Ready]:
    """Load the weights and run a warm-up step. Raises `StartError`."""
    device = open_device(config, 0)
    timer.done("engine", f"torch {torch.__version__} on {device.name}")
    timer.done("kernels", prepare_kernels(config.numerics))
    checkpoint = Checkpoint.read(Path(config.model_path), keeps_blocks=config.keeps_blocks)
    arch, dtype = EncoderFacts.of(checkpoint).arch, getattr(torch, config.dtype)
    planned = plan_of(config, arch)
    recipe = recipe_for(config, arch, choices_of(config, None))

    def build() -> Encoder | PackedDecoder:
        try:
            if isinstance(arch, EncoderArch):
                return Encoder(arch, dtype, device.torch_device, config.max_model_len, recipe)
            return PackedDecoder(arch, dtype, device.torch_device, config.max_model_len, recipe)
        except QuantizationError as error:
            raise ModelError(f"{config.model_path}: {error}") from error

    kept = KeptWeights.of(config, config.files, ALONE.own, "served")
    encoder, weights_bytes = load_and_measure(build, checkpoint, planned, device, kept)
    weights_phase(weights_bytes, planned, kept, timer)
    peaks = measured_peaks(config, device, dtype)
    timer.done("peaks", str(peaks))
    heads = heads_of(config, arch.hidden_size, device)
    recorded = RecordedEncoder(encoder, device) if isinstance(encoder, Encoder) else None
    worker = EncoderWorker(encoder, heads, recorded)
    try:
        worker.launch(_warm_up(config))
    except KernelError as error:
        raise ModelError(f"{config.model_path} cannot be computed: {error}") from error
    kernels, numerics = checked_kernels(config, "native", device, timer)
    if kept is not None:
        kept.write()
    return worker, Ready(
        num_blocks=0,  # those of its scheduler have no memory
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        vocab_size=arch.vocab_size,
        generates=False,
        hidden_size=heads.num_outputs or arch.hidden_size,
        poolings=POOLINGS,
        # The server counts components by what the heads give, and these read no states of tokens.
        gives_token_embeddings=heads.num_outputs is None,
        num_labels=arch.num_labels,
        weights_bytes=weights_bytes,
        kv_bytes=0,
        planned_weights_bytes=planned.weights_bytes,
        planned_kv_bytes=0,
        device=device.name,
        dtype=config.dtype,
        peaks=peaks,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        kernels=kernels,
        numerics=numerics,
        pid=os.getpid(),
        prefix_caching=False,
    )


def heads_of(config: EngineConfig, hidden_size: int, device: Device, choices: Choices = ANY) -> PooledHeads:
    """The heads behind the pooling of a model with such hidden states. Raises `ModelError`."""
    path = Path(config.model_path)
    try:
        return PooledHeads.of(path, SentenceFolder.read(path) or PLAIN, hidden_size, device.torch_device, choices)
    except CheckpointError as error:
        raise ModelError(str(error)) from error


def _warm_up(config: EngineConfig) -> StepPlan:
    """A text of a few tokens."""
    num_tokens = min(_WARM_UP_TOKENS, config.max_model_len)
    params = SamplingParams(max_tokens=0, seed=0, pooling=Pooling("mean"))
    admission = Admission(0, "warm-up", (0,) * num_tokens, num_tokens, params)
    return StepPlan(0, (admission,), (), (Row(0, 0, num_tokens, False),))
