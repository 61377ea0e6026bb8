"""Planted bugs of the code that unloads and loads a model while requests come. See `tests.sim.planting`."""

from __future__ import annotations

import asyncio

from inferd.server.dispatch import loading as loading_module
from inferd.server.dispatch.loading import Loading
from inferd.server.dispatch.model_lifecycle import ModelLifecycle, State
from inferd.server.dispatch.replica import Replica
from inferd.server.lifecycle.engines import Engines
from tests.sim.planting import Patch, Plants

plant = Plants()


@plant
def model_with_requests_is_unloaded(patch: Patch) -> None:
    """Streams of a model are left behind when its engine is stopped."""
    unload = Loading.unload

    async def careless(self: Loading) -> None:
        by_id, self._streams.by_id = self._streams.by_id, {}
        try:
            await unload(self)
        finally:
            self._streams.by_id.update(by_id)

    patch.setattr(Loading, "unload", careless)


@plant
def request_does_not_load_its_model(patch: Patch) -> None:
    """A request to an unloaded model waits until somebody else loads it."""
    patch.setattr(Loading, "want", lambda self: None)


@plant
def request_during_an_unload_is_forgotten(patch: Patch) -> None:
    """The wish for an engine is cleared after the last one has stopped, and not before."""
    stop = Engines._end_serving

    async def late(self: Engines) -> None:
        await stop(self)
        self._wanted.clear()

    patch.setattr(Engines, "_end_serving", late)


@plant
def failed_load_leaves_its_requests_waiting(patch: Patch) -> None:
    """A model that cannot be loaded refuses new requests, and forgets those that wait for it."""

    def silent(self: Loading, reason: str) -> None:
        self._lifecycle.change(State.FAILED, reason)

    patch.setattr(Loading, "fail_model", silent)


@plant
def failed_model_is_never_tried_again(patch: Patch) -> None:
    """Loading a model that failed resets its state, and starts no engine."""
    clear = Loading.leave_engines

    def unwanted(self: Loading, to: State) -> None:
        had_failed = self._lifecycle.state is State.FAILED
        clear(self, to)
        if had_failed:
            self._lifecycle.change(State.LOADING)

    patch.setattr(Loading, "leave_engines", unwanted)


@plant
def engine_outlives_its_unloading(patch: Patch) -> None:
    """The router forgets the engine, and its process goes on."""

    async def lazy(self: Engines) -> None:
        self._wanted.clear()

    stop = Engines._end_serving

    async def only_at_the_end(self: Engines) -> None:
        is_ending = self.router.lifecycle.is_draining
        await (stop(self) if is_ending else lazy(self))

    patch.setattr(Engines, "_end_serving", only_at_the_end)


@plant
def unloaded_replica_still_takes_requests(patch: Patch) -> None:
    """A request to an unloaded model is sent to the engine that was stopped."""
    lose = Replica.lose

    def up(self: Replica, now: float) -> object:
        lost = lose(self, now)
        self.is_up = True
        return lost

    patch.setattr(Replica, "lose", up)


@plant
def model_that_loads_is_unloaded(patch: Patch) -> None:
    """An unload that comes while the model is loaded drops the engines that start. The lifecycle has no such change."""
    patch.setattr(Loading, "is_loading", False)


@plant
def failed_load_is_an_unload(patch: Patch) -> None:
    """A model that cannot be loaded counts as unloaded: each request tries it again, and nobody learns why."""
    fail_model = Loading.fail_model

    def mild(self: Loading, reason: str) -> None:
        fail_model(self, reason)
        self._lifecycle.change(State.UNLOADED)

    patch.setattr(Loading, "fail_model", mild)


@plant
def load_counts_as_a_crash(patch: Patch) -> None:
    """The engine that comes after an unload replaces one, as after a death."""
    patch.setattr("inferd.server.observability.metrics.Metrics.engine_unloaded", lambda self, replica=0: None)


@plant
def reload_is_over_with_its_first_replica(patch: Patch) -> None:
    """A model counts as loaded by the replicas that it had before."""
    clear = Loading.leave_engines

    def kept(self: Loading, to: State) -> None:
        before = [replica.ready for replica in self._replicas]
        clear(self, to)
        self._lifecycle.loaded.set()
        for replica, ready in zip(self._replicas, before, strict=True):
            replica.ready = ready

    patch.setattr(Loading, "leave_engines", kept)


@plant
def idle_time_is_counted_from_the_load_on(patch: Patch) -> None:
    """A busy model is unloaded, because it was loaded long ago."""

    def since_load(self: Loading) -> float:
        return loading_module.time.monotonic() - self._streams.idle_since_s if self._replicas.is_up else 0.0

    patch.setattr(Loading, "idle_s", property(since_load))


@plant
def unload_does_not_wait_for_the_process(patch: Patch) -> None:
    """The answer of an unload comes while the memory is still held."""
    stop = Engines._end_serving

    async def soon(self: Engines) -> None:
        self._stopping = asyncio.create_task(stop(self))  # type: ignore[attr-defined]

    patch.setattr(Engines, "_end_serving", soon)


@plant
def engine_outlives_a_sleep(patch: Patch) -> None:
    """A model that is put to sleep refuses requests, and its engines go on."""
    leave = Loading.leave_engines

    def lazy(self: Loading, to: State) -> None:
        if to is not State.SLEEPING:
            leave(self, to)

    patch.setattr(Loading, "leave_engines", lazy)
    patch.setattr(Engines, "_stop", _goes_on)


async def _goes_on(self: Engines, keeps_pools: bool) -> None:
    if self.router.lifecycle.is_asleep:
        return
    await self._end_serving()


@plant
def request_wakes_a_model(patch: Patch) -> None:
    """A request to a model that sleeps is taken, and has it loaded."""
    want = Loading.want

    def eager(self: Loading) -> None:
        if self._lifecycle.state is State.SLEEPING:
            self._start()
        want(self)

    patch.setattr(Loading, "want", eager)
    patch.setattr(ModelLifecycle, "is_asleep", property(lambda self: self._state is State.PAUSED))
    ready = ModelLifecycle.is_ready.fget
    assert ready is not None
    patch.setattr(ModelLifecycle, "is_ready", property(lambda self: self._state is State.SLEEPING or ready(self)))
