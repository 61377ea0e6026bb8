"""Loads LoRA adapters: one at run time, and all of them into each engine before its first request.

Requests may name an adapter when every engine that takes requests has loaded it. Knows no socket and no HTTP.
"""

from __future__ import annotations

import logging
import time

from inferd.engine.api.adapter import AdapterFiles
from inferd.engine.api.errors import ModelError, RequestError
from inferd.engine.api.wire.messages import AdapterLoaded, Failure, LoadAdapter, Ready
from inferd.engine.api.wire.params import Adapter
from inferd.server.dispatch.adapter_places import AdapterPlaces, ServedAdapter
from inferd.server.dispatch.live_streams import ROUTER_LOG, LiveStreams
from inferd.server.dispatch.loading import Loading
from inferd.server.dispatch.model_lifecycle import ModelLifecycle
from inferd.server.dispatch.replica import Replica, Replicas

logger = logging.getLogger(ROUTER_LOG)


class AdapterLoading:
    """The adapters of one model, on their way into its engines."""

    def __init__(
        self,
        adapters: AdapterPlaces,
        lifecycle: ModelLifecycle,
        replicas: Replicas,
        streams: LiveStreams,
        loading: Loading,
    ) -> None:
        self._adapters, self._lifecycle, self._replicas = adapters, lifecycle, replicas
        self._streams, self._loading = streams, loading

    async def load(self, name: str, files: AdapterFiles) -> None:
        """Have the engine load an adapter, also each later engine. Raises `RequestError` if it cannot be loaded."""
        self._lifecycle.check_alive()
        served = self._adapters.add(name, files)
        for replica in self._replicas:
            if replica.is_up or replica.starting is not None:
                replica.awaited.append(served.adapter)
                replica.try_send(_loading(served))
        self._loading.want()
        await self._loading.unless_draining(served.settled)
        self._streams.idle_since_s = time.monotonic()
        if served.error:
            raise RequestError("invalid_value", served.error, "lora_path")

    def load_all(self, replica: Replica, ready: Ready) -> None:
        """An engine can take requests: before those, it gets every adapter that one of them may use."""
        replica.starting, replica.awaited = ready, [served.adapter for served in self._adapters]
        for served in self._adapters:
            replica.send(_loading(served))

    def settle(self, replica: Replica, loaded: AdapterLoaded) -> None:
        """An engine has loaded an adapter, or cannot. Raises `ModelError` if one is missing at the start."""
        replica.awaited.remove(loaded.adapter)
        served = self._adapters.find(loaded.adapter)
        if served is None:
            return  # it was unloaded meanwhile
        if not loaded.error:
            self.settle_if_loaded(loaded.adapter)
            return
        if served.is_from_start and not self._lifecycle.has_served:
            raise ModelError(f"--lora {served.name}: {loaded.error}")
        logger.error("the adapter %s is no longer served: %s", served.name, loaded.error)
        self._adapters.settle(served, loaded.error)
        reason = loaded.error.replace(str(served.path), served.name)  # clients learn no path of this machine
        # Those that another replica computes go on.
        for stream in tuple(self._streams.unsent.values()):
            if stream.submit.params.adapter == loaded.adapter:
                self._streams.fail(stream, Failure("engine_error", f"The adapter could not be loaded again: {reason}"))

    def settle_if_loaded(self, adapter: Adapter) -> None:
        """Let requests name an adapter, if every engine that takes requests has loaded it."""
        served = self._adapters.find(adapter)
        if served is not None and not any(adapter in replica.awaited for replica in self._replicas):
            self._adapters.settle(served, "")


def _loading(served: ServedAdapter) -> LoadAdapter:
    return LoadAdapter(served.adapter, str(served.path), served.name, served.held.pinned)
