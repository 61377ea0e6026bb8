"""/v1/loads, /server_info and /model_info, by which gateways place requests among servers.

The formats are those of SGLang's model gateway. What is not known is left out, because it would count 0 as a value.
"""

from __future__ import annotations

from datetime import UTC, datetime

import orjson
from starlette.requests import Request
from starlette.responses import Response

from inferd.engine.api.wire.messages import Ready
from inferd.server.dispatch.replica import Replica
from inferd.server.endpoints.service import Services
from inferd.server.schema.answers.operation import Load, Loads, ModelInfo, ServerInfo


class GatewaysApi:
    """The routes' handlers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def loads(self, request: Request) -> Response:
        """The load of each replica whose engine takes requests. `include` is ignored: there is one section, `core`.
        Raises `RequestError`."""
        service = self._services.of_query(request)
        replicas = service.router.replicas
        answer: Loads = {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": service.version,
            "dp_rank_count": len(replicas),
            "loads": [self._load(replica, replica.ready) for replica in replicas if replica.ready and replica.is_up],
        }
        return _json(answer)

    async def server_info(self, request: Request) -> Response:
        """Raises `RequestError`, and `EngineDeadError` before the first engine is ready."""
        service = self._services.of_query(request)
        answer: ServerInfo = {
            "version": service.version,
            "model_path": service.model.path.name,
            "served_model_name": service.model.names[0],
            "tp_size": service.router.replicas.ready.num_ranks,
            "dp_size": len(service.router.replicas),
        }
        return _json(answer)

    async def model_info(self, request: Request) -> Response:
        """Raises `RequestError`."""
        model = self._services.of_query(request).model
        answer: ModelInfo = {
            "model_path": model.path.name,
            "model_type": model.model_type,
            "architectures": list(model.architectures),
            "max_model_len": model.max_model_len,
        }
        return _json(answer)

    @staticmethod
    def _load(replica: Replica, ready: Ready) -> Load:
        stats = replica.stats
        # A token of a sequence takes a place of a block in each group of layers.
        most = ready.num_blocks * ready.block_size // ready.num_groups
        used = stats.num_blocks_used * ready.block_size // ready.num_groups
        load: Load = {
            "dp_rank": replica.index,
            "num_running_reqs": stats.num_running,
            "num_waiting_reqs": stats.num_waiting,
            "num_waiting_uncached_tokens": stats.num_tokens_waiting,
            "num_total_reqs": stats.num_running + stats.num_waiting,
            "num_used_tokens": used,
            "max_total_num_tokens": most,
            "token_usage": used / most if most else 0.0,
            "max_running_requests": ready.max_num_seqs,
            "utilization": stats.num_running / ready.max_num_seqs,
        }
        if stats.prefix_query_tokens:
            load["cache_hit_rate"] = stats.prefix_hit_tokens / stats.prefix_query_tokens
        return load


def _json(value: Loads | ServerInfo | ModelInfo) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
