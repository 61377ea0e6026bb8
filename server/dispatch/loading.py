"""Loads and unloads a model, and ends it: what becomes of its streams, its replicas and its state. Loads LoRA adapters.

One adapter is loaded at run time, and all of them into each engine before its first request. Requests may name an
adapter when every engine that takes requests has loaded it. The owner of the engines starts and stops the processes,
see `Hooks`. Knows no wire and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time

from inferd.engine.api.adapter import AdapterFiles
from inferd.engine.api.errors import ModelError, RequestError
from inferd.engine.api.process.logs import counted
from inferd.engine.api.wire.kv_events import CLEARED
from inferd.engine.api.wire.messages import AdapterLoaded, Failure, LoadAdapter, Ready
from inferd.engine.api.wire.params import Adapter
from inferd.server.dispatch.adapter_places import AdapterPlaces, ServedAdapter
from inferd.server.dispatch.live_streams import LiveStreams
from inferd.server.dispatch.model_lifecycle import Hooks, ModelLifecycle, State
from inferd.server.dispatch.replica import LoadBalancer, Replica, Replicas
from inferd.server.errors import messages as errors
from inferd.server.observability.metrics import Metrics

_ABORTED = Failure("engine_error", "The engine stopped while it was generating this answer. Please retry the request.")


class Loading:
    """Whether one model's engines run, or are to."""

    def __init__(
        self,
        lifecycle: ModelLifecycle,
        replicas: Replicas,
        streams: LiveStreams,
        balancer: LoadBalancer,
        adapters: AdapterPlaces,
        metrics: Metrics,
        hooks: Hooks,
    ) -> None:
        self._lifecycle, self._replicas, self._streams = lifecycle, replicas, streams
        self._balancer, self._adapters, self._metrics, self._hooks = balancer, adapters, metrics, hooks

    @property
    def idle_s(self) -> float:
        """Seconds since the last stream ended, or since the engines took requests; 0 if `unload` would refuse, or if
        there are no engines."""
        is_idle = self._replicas.is_up and not self._streams.num_active and not self._is_loading
        return time.monotonic() - self._streams.idle_since_s if is_idle else 0.0

    @property
    def _is_loading(self) -> bool:
        """Whether a replica or an adapter is not loaded yet."""
        return not self._lifecycle.loaded.is_set() or not all(served.settled.is_set() for served in self._adapters)

    async def load(self) -> None:
        """Have engines started if none run. Returns when they take requests. Raises `RequestError` if they cannot."""
        if self._lifecycle.is_draining:
            raise errors.leaving()
        if self._lifecycle.state is State.FAILED:
            self._begin_anew()
        self.want()
        await self.unless_draining(self._lifecycle.settled)
        self._lifecycle.check_alive()

    async def unload(self) -> None:
        """Have the engines stopped. Returns when their memory is free. Raises `RequestError` if there are requests, or
        engines that start."""
        if self._streams.num_active:
            raise errors.model_is_busy(f"This model has {counted(self._streams.num_active, 'unfinished answer')}")
        if self._lifecycle.has_ended:
            return
        if self._lifecycle.state is not State.UNLOADED:
            if self._is_loading:
                raise errors.model_is_busy("This model or an adapter of it is being loaded")
            self._begin_anew()
        if self._hooks.on_unload is not None:
            await self._hooks.on_unload()

    def want(self) -> None:
        """Have unloaded engines started, once."""
        if self._lifecycle.state is State.UNLOADED:
            self._lifecycle.change(State.LOADING)
            for replica in self._replicas:
                self._metrics.engine_down(replica.index)  # an alert sees a load that never ends
            if self._hooks.on_wanted is not None:
                self._hooks.on_wanted()

    async def unless_draining(self, settled: asyncio.Event) -> None:
        """Wait until something is loaded. Raises `RequestError` if the server stops first, because it waits for
        answers."""
        waits = [asyncio.create_task(event.wait()) for event in (settled, self._lifecycle.draining)]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if waits[0] not in done:
            raise errors.leaving()

    def fail_model(self, reason: str) -> None:
        """No engine can run, but the server goes on with other models: end every stream with the reason, and refuse
        others with it, until `load`."""
        self._lifecycle.change(State.FAILED, reason)
        self._end_all(Failure("model_not_loaded", errors.model_not_loaded(self._metrics.model_name, reason).message))

    def stop(self) -> None:
        """No engine will run any more, because the server ends: end every stream and take no more."""
        if not self._lifecycle.has_ended:
            self._lifecycle.change(State.STOPPED)
        self._end_all(_ABORTED)

    def _begin_anew(self) -> None:
        """No engine runs, as before the first."""
        self._lifecycle.change(State.UNLOADED)
        for replica in self._replicas:
            replica.lose(time.monotonic())
            replica.client, replica.ready, replica.failure = None, None, ""
            self._balancer.forget(replica)
            self._hooks.report_cache(replica.index, CLEARED)
            self._metrics.engine_unloaded(replica.index)
        self._streams.backlog.forget_pace()

    def _end_all(self, failure: Failure) -> None:
        """The engines are gone: end every stream with `failure`."""
        for replica in self._replicas:
            replica.lose(time.monotonic())
            self._metrics.engine_down(replica.index)
            self._hooks.report_cache(replica.index, CLEARED)
        self._streams.fail_all(failure)
        for served in tuple(self._adapters):
            if not served.settled.is_set() and not served.is_from_start:
                self._adapters.settle(served, "the engine stopped while it was loaded")


logger = logging.getLogger("inferd.server.dispatch.router")
"""The router's logger, whose name is in the log lines of operators."""


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
