"""/state: what an operator asks first, in one small JSON object. Without a key, like /metrics: it tells of no request.

Fields are only ever added.
"""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.errors import EngineDeadError
from inferd.engine.api.messages import EngineStats, Ready
from inferd.server.api.service import Service
from inferd.server.efficiency import PHASES, PhaseSummary

_DIGITS = 4
"""Of ratios."""


class StateApi:
    """The route's handler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def get(self, request: Request) -> Response:
        """200 in every state; `status` says whether requests are taken."""
        del request
        service, router = self._service, self._service.router
        try:
            ready = router.ready
        except EngineDeadError:
            ready = None
        status = "ready" if router.is_ready else "starting" if ready is None else "unavailable"
        status = "recovering" if router.is_recovering else status
        summaries = service.metrics.last_minute()
        return Response(
            orjson.dumps(
                {
                    "status": status,
                    "version": service.version,
                    "model": {
                        "id": service.model.names[0],
                        "max_model_len": service.model.max_model_len,
                        "tool_format": service.model.format.tool_name,
                        "reasoning_format": service.model.format.reasoning_name,
                    },
                    "engine": None if ready is None else _engine(ready),
                    "restarts": service.metrics.num_restarts,
                    **_load(router.stats),
                    "last_minute": {phase: _phase(summaries.get(phase)) for phase in PHASES},
                }
            ),
            media_type="application/json",
        )


def _engine(ready: Ready) -> dict[str, object]:
    return {
        "device": ready.device,
        "dtype": ready.dtype,
        "quantization": ready.quantization,
        "kv_cache_dtype": ready.kv_cache_dtype,
        "deterministic": ready.deterministic,
        "peaks": {
            "read_bytes_per_s": round(ready.peaks.read_bytes_per_s),
            "flops_per_s": round(ready.peaks.flops_per_s),
        },
    }


def _load(stats: EngineStats) -> dict[str, object]:
    """As of the newest step."""
    return {
        "requests": {"running": stats.num_running, "waiting": stats.num_waiting},
        "kv_cache": {
            "blocks": stats.num_blocks,
            "used": stats.num_blocks_used,
            "cached": stats.num_blocks_cached,
            "usage": round(stats.num_blocks_used / stats.num_blocks, _DIGITS) if stats.num_blocks else 0.0,
        },
    }


def _phase(summary: PhaseSummary | None) -> dict[str, object] | None:
    """None: no such step in the last minute."""
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
