"""Planted bugs of the scheduler: running, waiting, preemption and the time of steps. See `tests.sim.planting`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from math import inf

from inferd.engine.api.wire.params import SchedulingParams
from inferd.engine.core.loop import EngineCore
from inferd.engine.request import Request
from inferd.engine.sched import entry as entry_module
from inferd.engine.sched import scheduler as scheduler_module
from inferd.engine.sched.entry import NO_SLOT, Entry, OrderKey, RunningSet, State
from inferd.engine.sched.fairness.heap import LazyHeap
from inferd.engine.sched.latency import policy as latency_module
from inferd.engine.sched.latency.budget import StepBudget, TimedBudget
from inferd.engine.sched.latency.policy import LatencyPolicy
from inferd.engine.sched.latency.step_time import StepLoad
from inferd.engine.sched.latency.ttft_estimate import too_late
from inferd.engine.sched.limits import Refusal
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.sched.shared_prefix import PrefixSharing
from inferd.engine.sched.slot_table import SlotTable
from tests.sim.planting import Patch, Plants

plant = Plants()


@plant
def slot_reused_too_early(patch: Patch) -> None:
    """The next request gets a finished request's slot while a launched row still uses it."""
    finish = Scheduler.finish

    def early(self: Scheduler, request: Request, *, forget_blocks: bool = False) -> None:
        entry = self._entries[request]
        finish(self, request, forget_blocks=forget_blocks)
        if entry.slot != NO_SLOT:
            self._slots.free_slots.append(entry.slot)
            entry.slot = NO_SLOT

    patch.setattr(Scheduler, "finish", early)


@plant
def preempted_request_loses_the_token_in_flight(patch: Patch) -> None:
    """The result of a row that was launched before its request was preempted is discarded."""
    apply_row = Scheduler._apply_row

    def lossy(self: Scheduler, entry: Entry, row: object, result: object) -> None:
        if entry.state is State.PREEMPTED:
            entry.request.total = len(entry.request.ids)
            self._slots.drain(entry)
        else:
            apply_row(self, entry, row, result)  # type: ignore[arg-type]

    patch.setattr(Scheduler, "_apply_row", lossy)


@plant
def preempted_request_resumes_while_in_flight(patch: Patch) -> None:
    """A preempted request waits at once, and may run again before its launched row is applied."""

    def preempt(self: SlotTable, entry: Entry) -> None:
        self.num_preemptions += 1
        self.stop_running(entry)
        self.give_back(entry)
        entry.request.cached = entry.request.computed = entry.request.scheduled = 0
        entry.state = State.WAITING
        self._waiting.push(entry)

    patch.setattr(SlotTable, "preempt", preempt)


@plant
def victim_is_the_first_in_order(patch: Patch) -> None:
    """Endless preemption: the request that should go on is the victim."""

    def first(self: RunningSet, requester: Entry) -> Entry | None:
        others = [entry for entry in self if entry is not requester]
        return others[0] if others else None

    patch.setattr(RunningSet, "victim", first)


@plant
def no_request_is_preempted(patch: Patch) -> None:
    """Deadlock: all requests wait for blocks that they hold."""
    patch.setattr(RunningSet, "victim", lambda self, requester: None)


@plant
def waiting_does_not_age(patch: Patch) -> None:
    """Starvation: a stream of requests with better priorities always goes first."""

    def order_key_of(scheduling: SchedulingParams, sequence: int, ageing_s: float) -> OrderKey:
        return (float(scheduling.priority), scheduling.arrival_s, sequence)

    patch.setattr(scheduler_module, "order_key_of", order_key_of)


@plant
def waiters_are_left_when_their_leader_ends(patch: Patch) -> None:
    """A request waits for ever for a prefix that no request computes any more."""

    def leave(self: PrefixSharing, entry: Entry) -> list[Entry]:
        for key in list(entry.leading):
            self._end(entry, key)
        return []

    patch.setattr(PrefixSharing, "leave", leave)


@plant
def aborted_waiter_comes_back(patch: Patch) -> None:
    """Lost abort: a request that ended while it was set aside is woken and runs."""

    def stop_waiting(self: PrefixSharing, entry: Entry) -> None:
        pass

    patch.setattr(PrefixSharing, "stop_waiting", stop_waiting)


@plant
def every_chunk_samples(patch: Patch) -> None:
    """A chunk that does not reach the prompt's end draws a token."""
    launch = Request.launch
    patch.setattr(Request, "launch", lambda self, num_tokens: launch(self, num_tokens) or self.total < self.max_total)


@plant
def launched_beyond_the_length(patch: Patch) -> None:
    """Overlap launches a row behind the one that draws the last token."""
    patch.setattr(Request, "num_pending", property(lambda self: self.total - self.scheduled))


@plant
def chunks_do_not_spend_the_budget(patch: Patch) -> None:
    """Each prompt of a step gets the whole time of the step, and decodes wait for all of them."""

    def spend(self: TimedBudget, start: int, num_tokens: int) -> None:
        self.num_tokens -= num_tokens

    patch.setattr(TimedBudget, "spend", spend)


@plant
def time_of_decodes_is_given_away(patch: Patch) -> None:
    """A budget that leaves out the step's time without any chunk."""
    for_step = LatencyPolicy.for_step

    def generous(self: LatencyPolicy, decodes: list[Entry], now: float) -> StepBudget:
        budget = for_step(self, decodes, now)
        if isinstance(budget, TimedBudget):
            budget.left_s += self.model.chunked.predict(StepLoad(len(decodes), 0, 0))
        return budget

    patch.setattr(LatencyPolicy, "for_step", generous)


@plant
def largest_target_counts(patch: Patch) -> None:
    """A step's time is set by the request with the most time."""
    patch.setattr(LatencyPolicy, "_allowance", lambda self, decodes, start_s: 1000.0)


@plant
def prompts_starve_beside_a_tight_target(patch: Patch) -> None:
    """Starvation: if there is never time for a chunk, none is ever computed."""
    patch.setattr(latency_module, "STARVED_STEPS", 10**9)


@plant
def replayed_requests_wait_for_each_other_without_bound(patch: Patch) -> None:
    """A stream that went on after a crash waits as long as prompts of others that were replayed are computed."""
    patch.setattr(entry_module, "LONGEST_HOLD_S", inf)


@plant
def served_tenant_keeps_its_turn(patch: Patch) -> None:
    """A flood stays first in the queue: tokens given to its tenant since it began to wait are ignored."""

    def first(self: LazyHeap[Hashable]) -> Hashable | None:
        live = [node for node in self._heap if self._nodes.get(node[2]) is node]
        return min(live)[2] if live else None

    patch.setattr(LazyHeap, "first", first)


@plant
def begun_requests_are_shed(patch: Patch) -> None:
    """Wasted work: a request whose target has passed is refused after its prompt was computed."""

    def shed(self: Scheduler, now: float) -> Iterator[tuple[Request, Refusal]]:
        for entry in list(self._entries.values()):
            target_s = entry.request.scheduling.ttft_target_s
            if target_s is not None and entry.request.scheduling.arrival_s + target_s < now:
                self.finish(entry.request)
                yield entry.request, too_late(target_s)

    patch.setattr(Scheduler, "shed", shed)


@plant
def shed_requests_get_no_delta(patch: Patch) -> None:
    """Lost request: it is refused in the queue, and its caller never learns of it."""

    def silent(self: EngineCore, now: float) -> None:
        for request, _ in self._scheduler.shed(now):
            del self._live[request.request_id]

    patch.setattr(EngineCore, "_shed", silent)
