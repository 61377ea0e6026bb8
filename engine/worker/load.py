"""Builds a worker from resolved settings: loads the checkpoint onto the device. Reports each phase when it ends.

If an engine has several ranks, rank 0 calls `load_worker`, which starts the others. Each of those calls
`load_follower`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import torch

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import EngineConfig, plan_of
from inferd.engine.api.errors import ModelError
from inferd.engine.api.memory.planner import MemoryPlan, format_bytes
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.pinned_files import check_pinned, read_pinned
from inferd.engine.api.process.logs import DEFAULT_STYLE, LogStyle
from inferd.engine.api.wire.messages import Ready
from inferd.engine.api.wire.params import Pooling, PoolingKind, SamplingParams
from inferd.engine.arch.description import Arch
from inferd.engine.layers.collectives import ALONE
from inferd.engine.lora.adapters import Adapters
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.pooled_heads import PooledHeads
from inferd.engine.sample.sampler import Sampler
from inferd.engine.sched.plan import Admission, Row, StepPlan, TableUpdate
from inferd.engine.worker.build import (
    DraftParts,
    allocate_adapters,
    allocate_pool,
    allocate_states,
    build_decoder,
    check_rows,
    keep_pools,
    load_and_measure,
    log_progress,
    make_slots,
    open_device,
    open_ranks,
    out_of_memory,
    prepare_kernels,
    read_draft_parts,
    recipe_for,
    refusing_launches,
)
from inferd.engine.worker.determinism import refuse_varying, warn_of_uncut_keys
from inferd.engine.worker.device import Device
from inferd.engine.worker.encoding import EncoderWorker
from inferd.engine.worker.followers import Followers, RankLaunch, RankLoaded
from inferd.engine.worker.kept_weights import KeptWeights
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.load_encoder import heads_of, load_encoder
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.ranks import FollowingSampler, LeadingSampler, SharedRanks
from inferd.engine.worker.runner import Runner
from inferd.engine.worker.start_phases import (
    LoadReport,
    PhaseTimer,
    checked_kernels,
    choices_of,
    measured_peaks,
    weights_phase,
)
from inferd.engine.worker.tuning import Tuning
from inferd.kernels import registry
from inferd.kernels.device import DoesNotFitError, chosen_forms
from inferd.kernels.ops.paged_attention import LIBRARIES, PAGED_ATTENTION
from inferd.kernels.registry import KernelError

_WARM_UP_TOKENS = 4
"""Enough for every kernel. 16 tokens of a model of 1.5 billion parameters take a second (2 busy cores, AMD EPYC Zen 3,
2026-11-29)."""
_WARM_UP_BLOCK = 0
_WARM_UP_DRAFTS = 4
"""Most drafts of a row in warm-up. A CPU records their steps then. Otherwise the first measured steps would take
several times as long as later ones, and drafts would seem too slow."""


def load_any(
    config: EngineConfig,
    started_s: float,
    report: LoadReport,
    log_style: LogStyle = DEFAULT_STYLE,
    followers: Followers | None = None,
) -> tuple[Runner | EncoderWorker, Ready]:
    """Load a model of either kind, as `load_worker` does. Raises `StartError`."""
    if config.is_encoder:
        return load_encoder(config, PhaseTimer(started_s, report))
    return load_worker(config, started_s, report, log_style, followers)


def load_worker(
    config: EngineConfig,
    started_s: float,
    report: LoadReport,
    log_style: LogStyle = DEFAULT_STYLE,
    followers: Followers | None = None,
) -> tuple[Runner, Ready]:
    """Load the weights, allocate the KV pool, run warm-up steps, together with the other ranks. They are started here
    if there are no `followers` yet. Raises `StartError`."""
    followers = followers or Followers.start(config)
    try:
        followers.launch(config, log_style)
        with refusing_launches(config):
            return _load_first(config, PhaseTimer(started_s, report), followers)
    except BaseException:
        followers.close()
        raise


def _open_device(config: EngineConfig, rank: int) -> Device:
    PAGED_ATTENTION.exclude(() if config.attention_libs else LIBRARIES)
    return open_device(config, rank)


def load_follower(launch: RankLaunch, meet: Callable[[], None]) -> tuple[Runner, RankLoaded]:
    """Load the part of one of the other ranks. `meet` is called before it waits for the others. Raises `StartError`."""
    with refusing_launches(launch.config):
        return _load_follower(launch, meet)


def _load_follower(launch: RankLaunch, meet: Callable[[], None]) -> tuple[Runner, RankLoaded]:
    config = launch.config
    read_pinned(config.all_files)
    device = _open_device(config, launch.index)
    if config.device == "cpu":
        prepare_kernels(config.numerics)
    checkpoint = Checkpoint.read(Path(config.model_path), keeps_blocks=config.keeps_blocks)
    arch = ModelFacts.of(checkpoint, modelled=config.modelled).arch
    planned = plan_of(config, arch)
    tuning = _tuning(config)
    recipe = recipe_for(config, arch, choices_of(config, tuning))
    ranks = open_ranks(config, arch, recipe, device, launch.index, launch.exchange_fd, meet)
    kept = KeptWeights.of(config, config.files, ranks.own, "served")
    decoder, weights_bytes = load_and_measure(
        lambda: build_decoder(config, arch, device, recipe, ranks), checkpoint, planned, device, kept
    )
    check_pinned(config.all_files)
    if kept is not None:
        kept.write()
    if tuning is not None:
        tuning.complete()
    kv = allocate_pool(config, decoder, planned, device)
    sampler = FollowingSampler(arch.vocab_size, device.torch_device, ranks)
    model = LoadedModel(decoder, kv, make_slots(config, decoder, device), sampler, device, config.deterministic)
    runner = Runner(model, max_step_tokens=config.max_num_batched_tokens, max_draws=config.most_draws)
    return runner, RankLoaded(weights_bytes, kv.num_bytes)


def _load_first(config: EngineConfig, timer: PhaseTimer, followers: Followers) -> tuple[Runner, Ready]:
    """Load the part of rank 0, which is the whole if it is alone."""
    deterministic = config.deterministic
    device = _open_device(config, 0)
    properties = device.properties
    described = device.name if properties is None else f"{device.name}: {properties}"
    timer.done("engine", f"torch {torch.__version__} on {described}")
    if config.device == "cpu":
        timer.done("kernels", prepare_kernels(config.numerics))

    checkpoint = Checkpoint.read(Path(config.model_path), keeps_blocks=config.keeps_blocks)
    facts = ModelFacts.of(checkpoint, modelled=config.modelled)
    arch, dtype = facts.arch, getattr(torch, config.dtype)
    draft = read_draft_parts(config, arch)
    planned = plan_of(config, arch, None if draft is None else draft.arch)
    tuning = _tuning(config)
    choices = choices_of(config, tuning)
    recipe, shared = recipe_for(config, arch, choices), None
    if followers.exchange_fd is not None:
        shared = open_ranks(config, arch, recipe, device, 0, followers.exchange_fd, followers.wait_joining)
    layers_read = None if draft is None else draft.layers_read
    adapters = allocate_adapters(config, arch, device)
    kept = KeptWeights.of(config, config.files, (shared or ALONE).own, "served")
    decoder, weights_bytes = load_and_measure(
        lambda: build_decoder(config, arch, device, recipe, shared or ALONE, layers_read, adapters),
        checkpoint,
        planned,
        device,
        kept,
    )
    if draft is not None:
        weights_bytes += draft.load(decoder, planned, device, choices)
    each = "" if shared is None else f" on each of {config.tensor_parallel_size} ranks"
    weights_phase(weights_bytes, planned, kept, timer, each)

    # Before the KV pool, which takes the rest of a GPU's memory.
    if tuning is not None:
        timer.done("tuning", tuning.complete())
    others = followers.wait_loaded()
    if others:
        timer.done("ranks", "the others have loaded their parts")
    peaks = measured_peaks(config, device, dtype)
    timer.done("peaks", str(peaks))

    kv = allocate_pool(config, decoder, planned, device)
    kv_bytes = kv.num_bytes + (0 if draft is None else draft.allocate(planned, device))
    timer.done(
        "kv cache",
        f"{format_bytes(kv_bytes)}, {config.num_blocks} blocks of {config.block_size} tokens in "
        f"{config.kv_cache_dtype}{each}",
    )
    heads = heads_of(config, arch.hidden_size, device, choices)
    runner = _warmed_up(config, decoder, kv, planned, device, shared, followers, timer, draft, adapters, heads)
    if deterministic:
        refuse_varying(registry.explain())
        warn_of_uncut_keys(config, arch, properties)
    model_impl = "native" if arch.is_native else f"transformers {version('transformers')}, torch {torch.__version__}"
    kernels, numerics = checked_kernels(config, model_impl, device, timer)
    if properties is not None:
        timer.done("forms", chosen_forms())
    device_name = device.name if shared is None else f"{config.tensor_parallel_size} ranks, each {device.name}"
    for packed in (kept, None if draft is None else draft.kept):
        if packed is not None:
            packed.write()
    return runner, Ready(
        num_blocks=config.num_blocks,
        num_groups=len(arch.cache_groups),
        num_ranks=config.tensor_parallel_size,
        max_num_seqs=config.max_num_seqs or 1,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        vocab_size=arch.vocab_size,
        generates=arch.has_head,
        hidden_size=heads.num_outputs or arch.hidden_size,
        poolings=get_args(PoolingKind),
        num_labels=arch.num_labels,
        weights_bytes=max(weights_bytes, *(other.weights_bytes for other in others), 0),
        kv_bytes=max(kv_bytes, *(other.kv_bytes for other in others), 0),
        planned_weights_bytes=planned.weights_bytes,
        planned_kv_bytes=planned.kv_bytes,
        device=device_name,
        dtype=config.dtype,
        peaks=peaks,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        deterministic=deterministic,
        kernels=kernels,
        model_impl=model_impl,
        numerics=numerics,
        pid=os.getpid(),
        speculative=config.speculative if config.draft is None else config.draft.described,
        prefix_caching=config.prefix_caching,
        num_checkpoints=config.num_checkpoints,
        checkpoint_interval=config.checkpoint_interval,
    )


def _tuning(config: EngineConfig) -> Tuning | None:
    """The table of the fastest products on this GPU; None if nothing is chosen by it."""
    if config.deterministic or config.device == "cpu":
        return None
    return Tuning.of_user(getattr(torch, config.dtype))


def _warmed_up(
    config: EngineConfig,
    decoder: Decoder,
    kv: KVPool,
    planned: MemoryPlan,
    device: Device,
    shared: SharedRanks | None,
    followers: Followers,
    timer: PhaseTimer,
    draft: DraftParts | None,
    adapters: Adapters | None,
    heads: PooledHeads,
) -> Runner:
    """The runner, after warm-up steps of each kind, which the other ranks run too."""
    num_slots, vocab_size = config.max_num_seqs, decoder.arch.vocab_size
    try:
        sampler = (
            Sampler(num_slots, vocab_size, device.torch_device)
            if shared is None
            else LeadingSampler(num_slots, vocab_size, device.torch_device, shared)
        )
        slots, states = make_slots(config, decoder, device), allocate_states(config, decoder, device)
        memory = device.pool_memory
        if memory is not None:
            keep_pools(memory, kv, states, config, decoder.arch)
        model = LoadedModel(decoder, kv, slots, sampler, device, config.deterministic, states, adapters, heads)
        runner = Runner(
            model,
            max_step_tokens=config.max_num_batched_tokens,
            max_draws=config.most_draws,
            followers=followers,
            drafter=None if draft is None else draft.made(model),
        )
        # It writes to the pool. Later engines would get the answer of the first, and have blocks of earlier ones there.
        if config.numerics is None:
            check_rows(config, decoder, kv)
        recorded = runner.record_steps(log_progress(_recordings))
        if recorded is not None:
            timer.done("recorded steps", recorded)
        with contextlib.nullcontext() if memory is None else memory.preserved(_WARM_UP_BLOCK):
            for plan in _warm_up_plans(config, decoder.arch):
                runner.execute(plan)
    except torch.OutOfMemoryError as error:
        what = f"slots and the tensors of a step, planned as {format_bytes(planned.working_bytes)},"
        raise out_of_memory(
            what, error, config, decoder.arch, kv.num_bytes, None if draft is None else draft.arch
        ) from error
    except DoesNotFitError:
        raise
    except KernelError as error:
        raise ModelError(f"{config.model_path} cannot be computed: {error}") from error
    return runner


def _recordings(done: int, total: int) -> str:
    return f"recorded steps: {done} of {total} sizes"


def _warm_up_plans(config: EngineConfig, arch: Arch) -> Iterator[StepPlan]:
    """A prompt, a token, and tokens with drafts if there is a draft model. On a CPU all lie in one block, which no
    request has yet. A model without a head draws no token, and gives the vectors of the prompts.

    On a GPU also prompts of all lengths up to the longest step. A length may need variants of kernels of its own, which
    would otherwise be compiled while a request waits. The longest prompt shows that its tensors fit the memory.
    """
    num_tokens = min(_WARM_UP_TOKENS, config.block_size - 1, config.max_model_len - 1)
    yield _prompt(0, num_tokens, config.block_size, arch)
    if arch.has_head:
        yield StepPlan(1, (), (), (Row(0, num_tokens, 1, True),))
    if config.draft is not None and num_tokens > 1:
        most = min(config.block_size, config.max_model_len) - num_tokens
        for count in range(1, 1 + min(_WARM_UP_DRAFTS, most)):
            # The draft model has the prompt to compute, and in later steps one token.
            row = Row(0, num_tokens - 1, 1 + count, True, (), count, 0 if count == 1 else num_tokens - 2)
            yield StepPlan(1 + count, (), (), (row,))
    if config.device == "cuda":
        pool_tokens = config.num_blocks * config.block_size
        most = min(config.max_num_batched_tokens, config.max_model_len - 1, pool_tokens)
        for step_id, length in enumerate(
            [*(2**power for power in range((most - 1).bit_length())), most], start=2 + _WARM_UP_DRAFTS
        ):
            yield _prompt(step_id, length, config.block_size, arch)


def _prompt(step_id: int, num_tokens: int, block_size: int, arch: Arch) -> StepPlan:
    params = SamplingParams(max_tokens=2, seed=0, temperature=1.0, top_p=0.9, top_k=2, logprobs=1)
    if not arch.has_head:
        params = SamplingParams(max_tokens=0, seed=0, pooling=Pooling())
    admission = Admission(0, "warm-up", (0,) * num_tokens, num_tokens, params)
    blocks = tuple(range(-(-num_tokens // block_size)))
    updates = tuple(TableUpdate(0, group, 0, blocks) for group in range(len(arch.cache_groups)))
    return StepPlan(step_id, (admission,), updates, (Row(0, 0, num_tokens, arch.has_head),))
