"""/state: an overview of the server for operators, in one small JSON object.

Like /metrics it needs no key, because it shows nothing of a single request. Fields may be added, but never removed.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from math import ceil

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.cost.roofline import StepPhase
from inferd.engine.api.errors import EngineDeadError
from inferd.engine.api.wire.messages import EngineStats, Ready, StepCosts
from inferd.server.dispatch.model_lifecycle import ModelLifecycle, State
from inferd.server.dispatch.replica import Replica, Replicas
from inferd.server.endpoints.cached_answer import CachedAnswer, asks_for_fresh
from inferd.server.endpoints.service import Service, Services
from inferd.server.observability.efficiency import PHASES, MeasuredStep, PhaseSummary
from inferd.server.observability.instruments import LastMinute
from inferd.server.schema.answers.operation import (
    EngineState,
    LatencyState,
    LoadState,
    ModelState,
    PhaseState,
    RecentStep,
    ReplicaState,
    SpeculationState,
    Status,
    StepModelState,
    StepTimes,
    TargetsState,
    TenantState,
)

_STATUS: Mapping[State, Status] = {
    State.STARTING: "starting",
    State.SERVING: "ready",
    State.RECOVERING: "recovering",
    State.UNLOADED: "unloaded",
    State.LOADING: "loading",
    State.PAUSED: "paused",
    State.SLEEPING: "sleeping",
    State.FAILED: "failed",
    State.STOPPED: "unavailable",
}
_DIGITS = 4
"""Number of digits of ratios."""
_UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9), ("ps", 1e12))


class StateApi:
    """The route's handler."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._body = CachedAnswer(self._pieces)

    async def get(self, request: Request) -> Response:
        """Always 200. `status` says whether the server accepted requests, at most a second ago."""
        body = await self._body.get(is_fresh=asks_for_fresh(request))
        return Response(body, media_type="application/json")

    def _pieces(self) -> Generator[None, None, bytes]:
        models: list[ModelState] = []
        for service in self._services:
            models.append(_model(service))
            yield
        first, *others = models
        state: dict[str, object] = {"status": first["status"], "version": self._services.first.version, **first}
        if others:
            state["models"] = others
        if tenants := (yield from _tenants(self._services)):
            state["tenants"] = tenants
        return orjson.dumps(state)


def _model(service: Service) -> ModelState:
    router, summaries = service.router, service.metrics.last_minute()
    replicas, stats = router.replicas, router.streams.stats
    ready = _ready(replicas)
    return {
        "status": status_of(router.lifecycle),
        "model": {
            "id": service.model.names[0],
            "max_model_len": service.model.max_model_len,
            "tool_format": service.model.format.tool_name,
            "reasoning_format": service.model.format.reasoning_name,
            "weights_sha256": dict(service.weights),
        },
        "engine": None if ready is None else _engine(ready),
        "replicas": [_replica(replica, router.lifecycle.state) for replica in replicas],
        "restarts": service.metrics.num_restarts,
        **_load(stats, ready),
        "last_minute": {phase: _phase(summaries.get(phase)) for phase in PHASES},
        "newest_steps": [_step(step) for step in service.metrics.efficiency.newest()],
        "latencies": {"ttft": _latency(service.metrics.recent_ttft), "tpot": _latency(service.metrics.recent_tpot)},
        "speculation": _speculation(stats),
        "targets": _targets(service),
        "step_model": _step_model(stats, summaries),
        "error": router.lifecycle.failure or None,
    }


def _tenants(services: Services) -> Generator[None, None, list[TenantState]]:
    """The tenants that /metrics names, and all others together as there."""
    rows: dict[str, TenantState] = {
        label: {"tenant": label, "running": 0, "waiting": 0, "tokens_last_minute": 0, "refused_last_minute": 0}
        for label in services.first.metrics.tenant_labels
    }
    if not rows:
        return []
    for service in services:
        router, metrics = service.router, service.metrics
        for tenant, number in router.streams.num_running_by_tenant().items():
            rows[metrics.tenant_label(tenant)]["running"] += number
        for tenant, number in router.streams.num_waiting_by_tenant().items():
            rows[metrics.tenant_label(tenant)]["waiting"] += number
        for label, tokens in metrics.recent_tenant_tokens.items():
            rows[label]["tokens_last_minute"] += round(tokens.total())
        for label, refused in metrics.recent_tenant_refused.items():
            rows[label]["refused_last_minute"] += round(refused.total())
        yield
    return list(rows.values())


def _ready(replicas: Replicas) -> Ready | None:
    try:
        return replicas.ready
    except EngineDeadError:
        return None


def status_of(lifecycle: ModelLifecycle) -> Status:
    if lifecycle.is_leaving:
        return "leaving"
    if lifecycle.state is State.STOPPED and not lifecycle.has_served:
        return "starting"
    return _STATUS[lifecycle.state]


def _engine(ready: Ready) -> EngineState:
    return {
        "device": ready.device,
        "dtype": ready.dtype,
        "quantization": ready.quantization,
        "kv_cache_dtype": ready.kv_cache_dtype,
        "deterministic": ready.deterministic,
        "model_impl": ready.model_impl,
        "speculative": ready.speculative,
        "peaks": {
            "read_bytes_per_s": round(ready.peaks.read_bytes_per_s),
            "flops_per_s": round(ready.peaks.flops_per_s),
        },
    }


def _replica(replica: Replica, state: State) -> ReplicaState:
    stats, is_unloaded = replica.stats, state in (State.UNLOADED, State.SLEEPING)
    has_failed = bool(replica.failure) or state is State.FAILED
    return {
        "status": "up" if replica.is_up else "failed" if has_failed else "unloaded" if is_unloaded else "starting",
        "reason": replica.failure or None,
        "pid": replica.ready.pid if replica.is_up and replica.ready is not None else None,
        "requests": {"running": stats.num_running, "waiting": stats.num_waiting},
        "kv_cache_usage": _share(stats.num_blocks_used, stats.num_blocks),
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, _DIGITS) if whole else 0.0


def _load(stats: EngineStats, ready: Ready | None) -> LoadState:
    return {
        "requests": {"running": stats.num_running, "waiting": stats.num_waiting},
        "kv_cache": {
            "blocks": stats.num_blocks,
            "used": stats.num_blocks_used,
            "shared": stats.num_blocks_shared,
            "cached": stats.num_blocks_cached,
            "usage": _share(stats.num_blocks_used, stats.num_blocks),
        },
        "prefix_cache": {
            "query_tokens": stats.prefix_query_tokens,
            "hit_tokens": stats.prefix_hit_tokens,
            "stateless_tokens": stats.prefix_stateless_tokens,
            "states": 0 if ready is None else ready.num_checkpoints,
            "cached_states": stats.num_checkpoints_cached,
            "state_interval": 0 if ready is None else ready.checkpoint_interval,
        },
    }


def _speculation(stats: EngineStats) -> SpeculationState:
    num_accepted = sum(stats.accepted_drafts)
    return {
        "rows": stats.num_draft_rows,
        "draft_tokens": stats.num_drafts,
        "accepted_draft_tokens": num_accepted,
        "acceptance": round(num_accepted / stats.num_drafts, _DIGITS) if stats.num_drafts else None,
        "accepted_per_position": stats.accepted_drafts,
    }


def _targets(service: Service) -> TargetsState:
    targets = service.targets
    return {"ttft_ms": _ms(targets.ttft_s), "tpot_ms": _ms(targets.tpot_s), "e2e_ms": _ms(service.e2e_target_s)}


def _ms(target_s: float | None) -> float | None:
    return None if target_s is None else round(target_s * 1e3, 3)


def _step_model(stats: EngineStats, summaries: Mapping[StepPhase, PhaseSummary]) -> StepModelState:
    model = stats.step_model
    return {
        "steps_without_chunks": _costs(model.decode),
        "steps_with_chunks": _costs(model.chunked),
        "error_p50": round(model.error_p50, _DIGITS),
        "error_p95": round(model.error_p95, _DIGITS),
        "prefill_tokens_per_s": round(model.prefill_tokens_per_s),
        "waiting_prompt_tokens": stats.num_tokens_waiting,
        "refused_for_their_target": stats.num_shed,
        "last_minute": {phase: _times(summaries.get(phase)) for phase in PHASES},
    }


def _times(summary: PhaseSummary | None) -> StepTimes | None:
    if summary is None:
        return None
    return {
        "predicted_ms": round(summary.mean_predicted_s * 1e3, 3),
        "measured_ms": round(summary.seconds / summary.num_steps * 1e3, 3),
    }


def _costs(costs: StepCosts) -> str:
    """Costs as a text: "4.2 ms a step, 22 us a token". `pair_s` is the time of half a pair (see `StepCosts`)."""
    parts = [
        (costs.step_s, "a step"),
        (costs.token_s, "a token"),
        (costs.context_s, "a token of context behind a decode"),
        (2 * costs.pair_s, "a pair of a query and a key"),
    ]
    return ", ".join(f"{_time(seconds)} {what}" for seconds, what in parts if seconds > 0.0) or "not known"


def _time(seconds: float) -> str:
    unit, factor = next((pair for pair in _UNITS if seconds * pair[1] >= 1), _UNITS[-1])
    return f"{seconds * factor:.3g} {unit}"


def _phase(summary: PhaseSummary | None) -> PhaseState | None:
    if summary is None:
        return None
    return {
        "steps": summary.num_steps,
        "seconds": round(summary.seconds, 3),
        "median_step_ms": round(summary.median_step_s * 1e3, 3),
        "mfu": round(summary.mfu, _DIGITS),
        "mbu": round(summary.mbu, _DIGITS),
        "floor_ratio": round(summary.floor_ratio, _DIGITS),
        "bound_by": summary.bound_by,
    }


def _step(step: MeasuredStep) -> RecentStep:
    return {
        "phase": step.phase,
        "rows": step.num_rows,
        "tokens": step.num_tokens,
        "ms": round(step.own_s * 1e3, 3),
        "bound_by": step.bound,
    }


def _latency(recent: LastMinute) -> LatencyState | None:
    """Quantiles by nearest rank."""
    values_s = recent.ascending()
    if not values_s:
        return None
    p50_ms, p95_ms = (round(values_s[ceil(len(values_s) * share) - 1] * 1e3, 3) for share in (0.5, 0.95))
    return {"answers": len(values_s), "p50_ms": p50_ms, "p95_ms": p95_ms}
