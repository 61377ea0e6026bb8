"""Loads and unloads a model, wakes it, and ends it: what becomes of its streams, its replicas and its state.

The owner of the engines starts and stops the processes, see `Hooks`. Knows no socket and no HTTP.
"""

from __future__ import annotations

import asyncio
import time

from inferd.engine.api.process.logs import counted
from inferd.engine.api.wire.kv_events import CLEARED
from inferd.engine.api.wire.messages import Failure
from inferd.server.dispatch.adapter_places import AdapterPlaces
from inferd.server.dispatch.live_streams import LiveStreams
from inferd.server.dispatch.model_lifecycle import Hooks, ModelLifecycle, State
from inferd.server.dispatch.replica import LoadBalancer, Replicas
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
        there are no engines, or the model is asleep."""
        is_idle = self._replicas.is_up and not self._streams.num_active and not self.is_loading
        is_counted = is_idle and not self._lifecycle.is_asleep
        return time.monotonic() - self._streams.idle_since_s if is_counted else 0.0

    @property
    def is_loading(self) -> bool:
        """Whether a replica or an adapter is not loaded yet."""
        if self._lifecycle.state in (State.UNLOADED, State.SLEEPING):
            return False
        return not self._lifecycle.loaded.is_set() or not all(served.settled.is_set() for served in self._adapters)

    async def load(self) -> None:
        """Wake the model, and have engines started if none run. Returns when they take requests. Raises `RequestError`
        if they cannot."""
        if self._lifecycle.is_draining:
            raise errors.leaving()
        if self._lifecycle.state is State.FAILED:
            self.leave_engines(State.UNLOADED)
        if self._lifecycle.state is State.PAUSED:
            self._streams.idle_since_s = time.monotonic()
            self._lifecycle.change(State.SERVING if self._replicas.is_up else State.RECOVERING)
        if self._lifecycle.state is State.SLEEPING:
            self._start()
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
            self.check_loaded()
            self.leave_engines(State.UNLOADED)
        if self._hooks.on_unload is not None:
            await self._hooks.on_unload(False)

    def check_loaded(self) -> None:
        """Raises `RequestError` while a replica or an adapter is being loaded: its engine is not stopped then."""
        if self.is_loading:
            raise errors.model_is_busy("This model or an adapter of it is being loaded")

    def want(self) -> None:
        """Have unloaded engines started, once."""
        if self._lifecycle.state is State.UNLOADED:
            self._start()

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

    def leave_engines(self, to: State) -> None:
        """No engine runs, as before the first. Streams that one had wait for the next. `to`: the model's state."""
        self._lifecycle.change(to)
        lost: set[str] = set()
        for replica in self._replicas:
            for name, stream in replica.lose(time.monotonic()).items():
                lost.add(name)
                if stream.abort_reason is not None and name in self._streams.by_id:
                    self._streams.end_aborted(stream)  # its engine would have ended it
            replica.client, replica.ready, replica.failure = None, None, ""
            self._balancer.forget(replica)
            self._hooks.report_cache(replica.index, CLEARED)
            self._metrics.engine_unloaded(replica.index)
        self._streams.hold(lost)
        self._streams.backlog.forget_pace()

    def _start(self) -> None:
        """Have stopped engines started."""
        self._lifecycle.change(State.LOADING)
        for replica in self._replicas:
            self._metrics.engine_down(replica.index)  # an alert sees a load that never ends
        if self._hooks.on_wanted is not None:
            self._hooks.on_wanted()

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
