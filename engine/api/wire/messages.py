"""The wire between the server process and the engine process: frozen msgspec structs, MessagePack, one version.

Every message is sent in an envelope with the wire's version, the engine's epoch (it grows with each restart), a
sequence number and a checksum. So the receiver detects a lost, repeated, stale or damaged frame. No message can carry
code. Knows no sockets: `client` and `engine/process` carry the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Literal
from zlib import crc32

import msgspec

from inferd.engine.api.cost.roofline import Peaks, StepPhase
from inferd.engine.api.numerics import Numerics
from inferd.engine.api.pinned_files import PinnedFile
from inferd.engine.api.wire.params import NO_SCHEDULING, Adapter, PoolingKind, SamplingParams, SchedulingParams

WIRE_VERSION = 9

FinishReason = Literal["stop", "length", "abort", "error"]


class Submit(msgspec.Struct, frozen=True, tag="submit", kw_only=True):
    """Generate one choice. `emitted_ids` is not empty if a request is replayed after a restart."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    scheduling: SchedulingParams = NO_SCHEDULING
    emitted_ids: tuple[int, ...] = ()
    num_prompt_logprobs: int = 0
    """Number of prompt positions, without the first, whose logprobs were delivered before a replay."""


class SubmitChoices(msgspec.Struct, frozen=True, tag="submit_choices", kw_only=True):
    """Generate several choices of one prompt, which is therefore sent once."""

    first: Submit
    others: tuple[tuple[str, int], ...]
    """(request id, seed) of each further choice. All other fields are those of `first`."""

    def each(self) -> Iterator[Submit]:
        """Each choice as a `Submit` of its own. All share the objects of prompt and lists."""
        replace = msgspec.structs.replace
        yield self.first
        for request_id, seed in self.others:
            yield replace(self.first, request_id=request_id, params=replace(self.first.params, seed=seed))


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests; each that is still alive ends with one `Delta` of finish reason "abort"."""

    request_ids: tuple[str, ...]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Drop every cached block that no request holds. The fields add to that."""

    with_running: bool = False
    """Let nobody find the blocks that requests hold, either."""
    with_tiers: bool = False
    """Remove what the tiers below have of this model."""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Load a LoRA adapter in place of the one with this index, which no request uses any more."""

    adapter: Adapter
    path: str
    name: str
    """Name by which requests ask for it."""
    files: tuple[PinnedFile, ...] = ()
    """Its files, as the server holds them open."""


class UseThreads(msgspec.Struct, frozen=True, tag="use_threads"):
    """Compute on so many threads of the processor: more while the cores of another replica are free."""

    num_threads: int


ToEngine = Submit | SubmitChoices | Abort | ResetPrefixCache | LoadAdapter | UseThreads


class WireLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The scheduler's `TokenLogprobs`, as it is sent."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a request ended with finish reason "error"; `code` is a code of the error table."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    """Seconds after which the same request may be accepted; None if that is unknown."""


class Delta(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One request's results of one step. The last delta has a `finish_reason`; each request gets exactly one such."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """New tokens. If a token ended the generation (end-of-sequence or stop id), it is the last one."""
    logprobs: tuple[WireLogprobs, ...] = ()
    prompt_logprobs: tuple[WireLogprobs, ...] = ()
    """Logprobs of prompt tokens, sent with the deltas of the prompt's chunks in order of position. The prompt's first
    token has none."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The id that ended the generation; None if no id did."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV came from the prefix cache; final with the first token."""
    scheduled_s: float | None = None
    """Monotonic time at which the request first ran; with the first delta."""
    failure: Failure | None = None
    embedding: bytes = b""
    """The embedding, the vectors of all tokens or the logits, fp32 in little-endian bytes; with the last delta of a
    request that asked for them."""
    num_drafts: int = 0
    """Number of guessed tokens that the step verified. If any, `token_ids` has one more than were accepted."""
    num_known_tokens: int = 0
    """Number of prompt tokens whose KV was cached; at least `num_cached_tokens`. Those behind the cached ones had no
    recurrent state behind them."""
    num_loaded_tokens: int = 0
    """Number of the cached prompt tokens whose KV was loaded for this request from below the pool."""


class StepCosts(msgspec.Struct, frozen=True, array_like=True):
    """Fitted costs of one kind of step, in seconds."""

    step_s: float = 0.0
    """Seconds for each step."""
    token_s: float = 0.0
    """Seconds for each token."""
    context_s: float = 0.0
    """Seconds for each earlier token that a decode sees."""
    pair_s: float = 0.0
    """Seconds for each unit of 2 L x + x^2, for a chunk of x tokens after L earlier ones."""


class StepModel(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The step-time model, at most some steps old."""

    decode: StepCosts = StepCosts()
    """Costs of steps without chunks."""
    chunked: StepCosts = StepCosts()
    error_p50: float = 0.0
    """Median of |predicted - measured|, as a share of the larger one, over the newest steps."""
    error_p95: float = 0.0
    prefill_tokens_per_s: float = 0.0
    """Prompt tokens a second, beside the present decodes and within their targets."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The engine's gauges and counters after a step. Counters count from the engine's start."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0
    """Number of blocks that requests hold. Cached blocks that no request holds are free."""
    num_blocks_cached: int = 0
    """Number of free blocks that still hold a reusable prefix."""
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Number of prompt tokens computed, without prefix hits."""
    num_generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    num_shed: int = 0
    """Number of requests refused because their first token would have come too late."""
    num_tokens_waiting: int = 0
    """Number of prompt tokens in the queue."""
    step_model: StepModel = StepModel()
    num_draft_rows: int = 0
    """Number of rows that verified drafts. One row is one request in one step."""
    num_drafts: int = 0
    """Number of guessed tokens that these rows verified."""
    accepted_drafts: tuple[int, ...] = ()
    """Number of accepted drafts, by place in the row. Empty until there is one."""
    expert_peaks: tuple[tuple[int, float], ...] = ()
    """(layer, tokens of its busiest expert / mean of its experts). Empty without experts, and on a GPU."""
    prefix_stateless_tokens: int = 0
    """Number of prompt tokens whose KV was cached, with no recurrent state behind them."""
    num_checkpoints_cached: int = 0
    """Number of recurrent states that the prefix cache keeps."""
    num_blocks_shared: int = 0
    """Number of used blocks that several requests hold."""
    num_left_taken: int = 0
    """Number of blocks and recurrent states of an earlier engine that this one uses."""
    num_left_damaged: int = 0
    """Number of those that it dropped, because they were not what was written down."""
    tier_loaded_tokens: int = 0
    """Number of tokens of prefixes that were loaded from the tier below the pool."""
    tier_slow: int = 0
    """Number of prefixes there that were computed, because that was expected to be faster or loading took too long."""
    tier_failed: int = 0
    """Number of pieces of prefixes that could not be loaded."""
    tier_damaged: int = 0
    """Number of pieces that were not what was written."""
    tier_different: int = 0
    """Pieces from below that were not what their tokens gave when they were computed again."""
    tier_distrusted: int = 0
    """Pieces that were removed because of that."""
    tier_same_tokens: int = 0
    """Tokens of pieces that were the same."""
    tier_unwritten: int = 0
    """Number of pieces that were not written."""
    tier_read_bytes: int = 0
    tier_written_bytes: int = 0
    tier_wait_s: float = 0.0
    """Seconds that requests waited for the tier, until they could be queued."""
    tier_compute_s: float = 0.0
    """Seconds that computing what was loaded for them would have taken, by the step-time model."""
    tier_held_bytes: int = 0
    """Bytes of everything in the tier, as this engine last counted it. Engines may share it."""
    host_bytes: int = 0
    """Bytes of KV in host memory beside a GPU's."""
    host_read_bytes: int = 0
    """Those of `tier_read_bytes` that came from there."""

    @classmethod
    def total(cls, stats: Sequence[EngineStats]) -> EngineStats:
        """The sums over several engines. Of the step-time models it has the first with the sum of the paces, of the
        experts the busiest, and of the tiers' sizes the largest: they share one."""
        if len(stats) == 1:
            return stats[0]
        sums = {name: sum(getattr(each, name) for each in stats) for name in _SUMMED}
        models = [each.step_model for each in stats if each.step_model.prefill_tokens_per_s] or [StepModel()]
        pace = sum(model.prefill_tokens_per_s for model in models)
        accepted = zip_longest(*(each.accepted_drafts for each in stats), fillvalue=0)
        peaks: dict[int, float] = {}
        for layer, peak in (pair for each in stats for pair in each.expert_peaks):
            peaks[layer] = max(peak, peaks.get(layer, 0.0))
        return cls(
            **sums,
            step_model=msgspec.structs.replace(models[0], prefill_tokens_per_s=pace),
            accepted_drafts=tuple(map(sum, accepted)),
            expert_peaks=tuple(peaks.items()),
            tier_held_bytes=max((each.tier_held_bytes for each in stats), default=0),
        )


_SUMMED = tuple(
    field.name
    for field in msgspec.structs.fields(EngineStats)
    if field.type in (int, float) and field.name != "tier_held_bytes"
)


class StepOutput(msgspec.Struct, frozen=True, tag="step", kw_only=True):
    """The results of one step, in one frame."""

    deltas: tuple[Delta, ...]
    stats: EngineStats
    step_ended_s: float | None = None
    """Monotonic time at which the engine knew the step's tokens: the time of every token in `deltas`. None if no step
    ended."""
    step_duration_s: float = 0.0
    step_num_tokens: int = 0
    step_num_rows: int = 0
    step_phase: StepPhase | None = None
    """None if no step ended."""
    step_own_s: float = 0.0
    """Part of the step's duration after the end of the step before. Steps overlap, their own times do not."""
    step_flops: int = 0
    step_bytes: int = 0
    """Least bytes that the step must read and write."""
    step_predicted_s: float = 0.0
    """Prediction of `step_own_s` by the step-time model, made before the step was measured."""
    schedule_duration_s: float = 0.0


STANDBY = "standby"
"""Name of the phase after which a standby waits to be promoted."""


class Phase(msgspec.Struct, frozen=True, tag="phase"):
    """A phase of the start has ended. `detail` is a text for the log."""

    name: str
    duration_s: float
    detail: str


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The engine accepts requests. Has the measured sizes, beside those of the memory plan."""

    num_blocks: int
    """Number of KV blocks; 0 for an encoder, which keeps no K and V."""
    num_groups: int = 1
    """Number of groups of layers with tables of their own. A token takes a place in a block of each."""
    num_ranks: int = 1
    max_num_seqs: int = 1
    """Most sequences in one step."""
    block_size: int
    max_model_len: int
    vocab_size: int
    """Number of rows of the embedding: every token id is below it."""
    generates: bool = True
    """Whether it draws tokens."""
    hidden_size: int = 0
    """Number of components of an embedding; 0: the engine cannot pool."""
    poolings: tuple[PoolingKind, ...] = ("last", "mean")
    """The ways to pool that it knows."""
    gives_token_embeddings: bool = False
    """Whether it gives a vector for each token."""
    num_labels: int = 0
    """Number of logits of the model's classifier; 0: it has none."""
    weights_bytes: int
    kv_bytes: int
    planned_weights_bytes: int
    planned_kv_bytes: int
    """Bytes of weights and of the KV cache, of each rank if several share the model."""
    device: str
    dtype: str
    peaks: Peaks
    quantization: str = "none"
    """Format of the linear layers' weights."""
    kv_cache_dtype: str = "auto"
    """Format of K and V."""
    deterministic: bool = True
    """Whether tokens depend on the request alone."""
    kernels: tuple[tuple[str, str], ...] = ()
    """(op, chosen implementation)."""
    speculative: str = "none"
    """Source of the guessed tokens that steps verify."""
    prefix_caching: bool = True
    """Whether prompts that begin alike share what was computed."""
    num_checkpoints: int = 0
    """Most recurrent states that the prefix cache keeps; 0 for a model without such states."""
    checkpoint_interval: int = 0
    """Tokens from one of them to the next in a sequence; 0 for such a model."""
    model_impl: str = "native"
    """Code that computes the model: "native", or "transformers 5.23.0, torch 2.13.0"."""
    numerics: Numerics | None = None
    """Facts that results depend on; None for an engine that computes nothing."""
    pid: int = 0
    """Number of the engine's process."""

    def refuses(self, params: SamplingParams) -> str | None:
        """Why this engine cannot answer a request with these parameters; None if it can."""
        pooling = params.pooling
        if pooling is None:
            return None if self.generates else "this model draws no tokens: ask it for embeddings"
        if pooling.gives == "logits":
            return None if self.num_labels else "this model has no classifier"
        if pooling.gives == "token_embeddings":
            return None if self.gives_token_embeddings else "this model gives no vector for each token"
        known = ", ".join(self.poolings)
        return None if pooling.how in self.poolings else f"pooling must be one of {known}, but got {pooling.how!r}"


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start. `kind` names the error class; `message` has the rule, the value and what would work."""

    kind: str
    message: str


class AdapterLoaded(msgspec.Struct, frozen=True, tag="adapter_loaded"):
    """Requests may use the adapter, or `error` says why it could not be loaded."""

    adapter: Adapter
    error: str = ""


class CacheEvents(msgspec.Struct, frozen=True, tag="cache_events"):
    """Changes of the prefix index, as `kv_events` encodes them for subscribers. The server passes them on unread."""

    events: msgspec.Raw


FromEngine = StepOutput | Phase | Ready | Failed | AdapterLoaded | CacheEvents


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message as it is sent. The body stays encoded until version, epoch and sequence are checked."""

    version: int
    epoch: int
    sequence: int
    checksum: int
    """CRC-32 of the body."""
    body: msgspec.Raw


_ENCODER = msgspec.msgpack.Encoder()
_ENVELOPE_DECODER = msgspec.msgpack.Decoder(Envelope)
_TO_ENGINE_DECODER: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE_DECODER: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class WireError(Exception):
    """A frame that cannot be accepted: another version or epoch, a gap in the sequence, or bytes that are no
    message."""


def encode(message: ToEngine | FromEngine, epoch: int, sequence: int) -> bytes:
    body = _ENCODER.encode(message)
    return _ENCODER.encode(Envelope(WIRE_VERSION, epoch, sequence, crc32(body), msgspec.Raw(body)))


def _open(frame: bytes, epoch: int, sequence: int) -> msgspec.Raw:
    try:
        envelope = _ENVELOPE_DECODER.decode(frame)
    except msgspec.MsgspecError as error:
        raise WireError(f"a frame of {len(frame)} bytes is not an envelope: {error}") from error
    if envelope.version != WIRE_VERSION:
        raise WireError(f"a frame has wire version {envelope.version}, but this side has {WIRE_VERSION}")
    if envelope.epoch != epoch:
        raise WireError(f"a frame is of engine epoch {envelope.epoch}, but the epoch is {epoch}")
    if envelope.sequence != sequence:
        raise WireError(f"frame {envelope.sequence} came, but frame {sequence} was expected")
    if crc32(envelope.body) != envelope.checksum:
        raise WireError(f"frame {sequence} was damaged on the way: its checksum is wrong")
    return envelope.body


def decode_to_engine(frame: bytes, epoch: int, sequence: int) -> ToEngine:
    """Open a frame sent to the engine. Raises `WireError`."""
    body = _open(frame, epoch, sequence)
    try:
        return _TO_ENGINE_DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"frame {sequence} is not a message to the engine: {error}") from error


def decode_from_engine(frame: bytes, epoch: int, sequence: int) -> FromEngine:
    """Open a frame sent by the engine. Raises `WireError`."""
    body = _open(frame, epoch, sequence)
    try:
        return _FROM_ENGINE_DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"frame {sequence} is not a message from the engine: {error}") from error
