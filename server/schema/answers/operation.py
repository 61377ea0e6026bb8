"""The answers of the routes for operators: models, probes, the state of the server, its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired

from inferd.engine.api.cost.roofline import Bound, StepPhase
from inferd.server.errors.answer import Answer

Status = Literal[
    "starting", "ready", "recovering", "unavailable", "leaving", "unloaded", "loading", "paused", "sleeping", "failed"
]
"""`unloaded`: the next request loads the model. `paused` and `sleeping`: somebody must wake it, and only an engine that
is `paused` still runs. `failed`: it could not be loaded."""


Task = Literal["generate", "embed", "rerank", "classify"]


class Model(Answer):
    """A name of the served model, or an adapter."""

    id: str
    object: Literal["model"]
    created: int
    """Unix time in seconds."""
    owned_by: Literal["inferd"]
    root: str
    """Name of the checkpoint, or of the adapter's directory."""
    parent: str | None
    """Name of the model that an adapter is for. Otherwise null."""
    max_model_len: int
    """Number of tokens of the context."""
    context_length: int
    """The same as `max_model_len`. Coding agents read this name."""
    task: Task
    """Task that the model is made for. It may do others for a request that names it."""
    status: NotRequired[Status]
    """Missing if the model is loaded."""
    error: NotRequired[str]
    """Why the model is not served."""


class ModelList(Answer):
    object: Literal["list"]
    data: Sequence[Model]


class Liveness(Answer):
    status: Literal["alive"]


class Readiness(Answer):
    status: Literal["ready", "recovering"]
    """`recovering`: requests are accepted, and wait for the next engine."""
    models: Mapping[str, Status]
    """Status of each model. One that is `unloaded` accepts requests: the next one loads it."""


class Version(Answer):
    version: str
    """Version of inferd."""


class Load(Answer):
    """The load of one replica, as SGLang's gateway reads it."""

    dp_rank: int
    """Index of the replica."""
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    """Prompt tokens in the queue."""
    num_total_reqs: int
    num_used_tokens: int
    """Places of tokens in the KV cache that requests hold."""
    max_total_num_tokens: int
    token_usage: float
    """Share of the places that requests hold."""
    max_running_requests: int
    """Most sequences in one step."""
    utilization: float
    """Running sequences as a share of that."""
    cache_hit_rate: NotRequired[float]
    """Share of looked up prompt tokens that the prefix cache had. Missing before the first lookup."""


class Loads(Answer):
    timestamp: str
    """UTC, as ISO 8601 has it. SGLang's gateway reads no load with a number here."""
    version: str
    """Version of inferd."""
    dp_rank_count: int
    """Number of replicas."""
    loads: list[Load]
    """One item for each replica that takes requests."""


class ServerInfo(Answer):
    version: str
    """Version of inferd."""
    model_path: str
    """Name of the checkpoint's directory or file, without its path."""
    served_model_name: str
    tp_size: int
    """Number of ranks that share the model."""
    dp_size: int
    """Number of replicas."""


class ModelInfo(Answer):
    model_path: str
    """Name of the checkpoint's directory or file, without its path."""
    model_type: str
    """`model_type` of the checkpoint's config.json."""
    architectures: list[str]
    """`architectures` of the checkpoint's config.json."""
    max_model_len: int
    """Number of tokens of the context."""


class Sleeping(Answer):
    is_sleeping: bool


class Done(Answer):
    """An empty object."""


class Setting(Answer):
    value: str
    """Value as text. Keys are counted, never shown."""
    source: str
    """Origin of the value, such as "flag --port"."""
    became: object
    """Value in use, if the start decided it. Otherwise null."""


Config = Mapping[str, Setting]
"""Setting -> its value."""


# --- /state ----------------------------------------------------------------------------------------------------------


class ServedModelState(Answer):
    id: str
    max_model_len: int
    """Number of tokens of the context."""
    tool_format: str
    """Format in which the model writes tool calls; `none` if it is not known."""
    reasoning_format: str
    weights_sha256: dict[str, str]
    """SHA-256 of each weight file by its name, as soon as it is known. Large models take some minutes."""


class Peaks(Answer):
    """Measured peaks of the device."""

    read_bytes_per_s: int
    flops_per_s: int


class EngineState(Answer):
    device: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    deterministic: bool
    model_impl: str
    """Code that computes the model: `native`; of a compatible model `transformers` and versions."""
    speculative: str
    """Source of the guessed tokens that steps verify; `none` if nothing is guessed."""
    peaks: Peaks


class RequestsState(Answer):
    """Number of requests after the newest step. Those of a model include requests that wait for its engine."""

    running: int
    waiting: int


class KvCacheState(Answer):
    """Number of KV cache blocks after the newest step."""

    blocks: int
    used: int
    shared: int
    """Used blocks that several requests hold, such as those of a common prompt."""
    cached: int
    """Blocks that no request uses, kept for later prompts."""
    usage: float
    """Share of used blocks."""


class PrefixCacheState(Answer):
    """Prompt tokens looked up in the prefix cache, since the engine began, and the recurrent states that it keeps."""

    query_tokens: int
    hit_tokens: int
    stateless_tokens: int
    """Tokens whose keys and values were there, and not the recurrent state behind them. 0 for a model without such
    states, as are all that follow."""
    states: int
    """Most recurrent states that it keeps."""
    cached_states: int
    state_interval: int
    """Tokens from one state of a sequence to the next. More are kept at the ends of prompts and at branches."""


class LoadState(Answer):
    """The load after the newest step."""

    requests: RequestsState
    kv_cache: KvCacheState
    prefix_cache: PrefixCacheState


class PhaseState(Answer):
    """Steps of one phase in the last minute."""

    steps: int
    seconds: float
    """Time of the steps, without counting overlaps twice."""
    median_step_ms: float
    mfu: float
    """Model FLOPs utilization: FLOPs over what the device's peak would do in the time of the steps."""
    mbu: float
    """Memory bandwidth utilization: bytes read over what the device's peak would read in the time of the steps."""
    floor_ratio: float
    """Time at the device's peaks over measured time. 1 is perfect."""
    bound_by: Bound
    """Bottleneck of most of the time."""


class RecentStep(Answer):
    """One step. Steps overlap, and `ms` counts the part after the end of the step before."""

    phase: StepPhase
    rows: int
    """Number of requests that it computed."""
    tokens: int
    ms: float
    bound_by: Bound


class LatencyState(Answer):
    """One latency in the last minute."""

    answers: int
    """Number of answers that it was measured of: the newest, if there were more than 1,000."""
    p50_ms: float
    p95_ms: float


class LatenciesState(Answer):
    """Latencies of the last minute, from the arrival at the server. Null if there was no answer."""

    ttft: LatencyState | None
    """Time to the first token, of the answers that had theirs."""
    tpot: LatencyState | None
    """Time per further token, of the answers that ended."""


class SpeculationState(Answer):
    """Guessed tokens that steps verified, since the engine began."""

    rows: int
    """Number of rows with draft tokens. A row is one request in one step."""
    draft_tokens: int
    accepted_draft_tokens: int
    acceptance: float | None
    """Share of the draft tokens that were accepted. Null if there were none."""
    accepted_per_position: Sequence[int]
    """Accepted tokens by place in the row. Empty if there are none."""


class TargetsState(Answer):
    """Latency targets of requests that set none. Null means none."""

    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None


class StepTimes(Answer):
    """Mean times of a step in the last minute."""

    predicted_ms: float
    measured_ms: float


class StepModelState(Answer):
    """The step-time model, and its errors."""

    steps_without_chunks: str
    """Costs of a step of single tokens, in words."""
    steps_with_chunks: str
    """Costs of a step with chunks of prompts, in words."""
    error_p50: float
    """Median of the relative errors."""
    error_p95: float
    prefill_tokens_per_s: int
    waiting_prompt_tokens: int
    refused_for_their_target: int
    """Number of requests that were refused because their first token would have come too late."""
    last_minute: dict[StepPhase, StepTimes | None]


class ReplicaState(Answer):
    """One replica of the engine."""

    status: Literal["up", "starting", "failed", "unloaded"]
    reason: str | None
    """Why it failed: its engines died one after another without a token. It is tried again every minute."""
    pid: int | None
    """Number of its engine's process on the server's machine; null if it has none that takes requests."""
    requests: RequestsState
    kv_cache_usage: float
    """Share of its KV blocks that requests hold."""


class ModelState(LoadState):
    """An overview of one model."""

    status: Status
    error: str | None
    """Why the model is not served; null if it is."""
    model: ServedModelState
    engine: EngineState | None
    """Null until the first engine is ready."""
    replicas: list[ReplicaState]
    restarts: int
    """Number of times that an engine was restarted."""
    last_minute: dict[StepPhase, PhaseState | None]
    """Summary of each phase. Null if it had no step."""
    newest_steps: Sequence[RecentStep]
    """The newest 60 steps of the last minute, the newest last."""
    latencies: LatenciesState
    speculation: SpeculationState
    targets: TargetsState
    step_model: StepModelState


class TenantState(Answer):
    """One tenant, in all models together."""

    tenant: str
    """Name in the keys file. `other` is all tenants that the metrics do not name."""
    running: int
    waiting: int
    tokens_last_minute: int
    """Tokens of prompts and answers, of its sequences that ended in the last minute."""
    refused_last_minute: int
    """Number of its requests that were answered with an error."""


class State(ModelState):
    """An overview of the server. Its fields are about the first model."""

    version: str
    """Version of inferd."""
    models: NotRequired[Sequence[ModelState]]
    """The other models, if the server has several."""
    tenants: NotRequired[Sequence[TenantState]]
    """The tenants, if there is a keys file."""
