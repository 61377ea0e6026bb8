"""Planted bugs of the core: aborts, ends, grammars, replays. See `tests.sim.planting`."""

from __future__ import annotations

from collections.abc import Iterable

from inferd.engine.api.wire.messages import Delta, WireLogprobs
from inferd.engine.core.live_request import LiveRequest, wire_logprobs
from inferd.engine.core.loop import EngineCore
from inferd.engine.request import Request
from inferd.engine.sched.fairness.queue import SuspectQueue
from inferd.engine.sched.latency.policy import Timing
from inferd.engine.sched.plan import StepPlan, StepResult, TokenMasks
from inferd.engine.sched.scheduler import AppliedRow, Scheduler
from tests.sim.grammar import SimulatedGrammars
from tests.sim.planting import Patch, Plants

plant = Plants()


@plant
def abort_is_forgotten(patch: Patch) -> None:
    """Lost abort: the request stops, and its caller never learns of it."""

    def silent(self: EngineCore, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            live = self._live.pop(request_id, None)
            if live is not None:
                self._scheduler.finish(live.request)

    patch.setattr(EngineCore, "abort", silent)


@plant
def abort_is_answered_twice(patch: Patch) -> None:
    """Two terminal events: a repeated abort is reported again."""
    abort = EngineCore.abort

    def twice(self: EngineCore, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            was_live = request_id in self._live
            abort(self, [request_id])
            if not was_live:
                self._outbox.append(Delta(request_id=request_id, finish_reason="abort"))

    patch.setattr(EngineCore, "abort", twice)


@plant
def row_behind_the_end_is_delivered(patch: Patch) -> None:
    """Overlap: a row was launched before the end was known, and its token reaches the caller."""
    apply = Scheduler.apply

    def all_rows(self: Scheduler, result: StepResult, timing: Timing) -> list[AppliedRow]:
        plan, entries = self._launched[0]
        applied = apply(self, result, timing)
        seen = {row.request for row in applied}
        rows = zip(entries, plan.rows, result.rows, strict=True)
        return applied + [AppliedRow(e.request, row, given) for e, row, given in rows if e.request not in seen]

    patch.setattr(Scheduler, "apply", all_rows)


@plant
def prompt_logprobs_sent_again_after_preemption(patch: Patch) -> None:
    """A resumed request computes its prompt again and reports it again."""

    def untrimmed(self: LiveRequest, applied: AppliedRow) -> tuple[WireLogprobs, ...]:
        return wire_logprobs(applied.result.prompt_logprobs)

    patch.setattr(LiveRequest, "new_prompt_logprobs", untrimmed)


@plant
def replayed_tokens_are_taken_for_prompt(patch: Patch) -> None:
    """After a crash the output's length is counted from 0 again."""
    create = Request.create

    def from_nought(*args: object, **kwargs: object) -> Request:
        request = create(*args, **kwargs)  # type: ignore[arg-type]
        request.max_total += len(request.ids) - request.num_prompt
        request.num_prompt = len(request.ids)
        request.num_needed = max(request.max_total - 1, request.num_prompt)
        return request

    patch.setattr(Request, "create", staticmethod(from_nought))


@plant
def minimum_length_is_ignored(patch: Patch) -> None:
    """An end-of-sequence token ends a generation before its minimum."""
    patch.setattr(LiveRequest, "ends_with", lambda self, token_id, num_output: token_id in self._ending_ids)


@plant
def masks_are_made_a_step_early(patch: Patch) -> None:
    """Overlap: a mask is computed before the tokens of the previous step are known."""
    launch = EngineCore._launch

    def hasty(self: EngineCore, plan: StepPlan) -> None:
        launch(self, plan)
        launched = self._launched[-1]
        if launched.awaits_masks:
            launched.handle.sample(self._masks_of(plan))
            launched.awaits_masks = False

    patch.setattr(EngineCore, "_launch", hasty)


@plant
def mask_goes_to_the_next_row(patch: Patch) -> None:
    """Off by one: a mask's index among masked draws is used as its index among all draws."""
    masks_of = EngineCore._masks_of

    def shifted(self: EngineCore, plan: StepPlan) -> TokenMasks:
        masks = masks_of(self, plan)
        return TokenMasks(tuple(range(len(masks.draws))), masks.words)

    patch.setattr(EngineCore, "_masks_of", shifted)


@plant
def mean_takes_prefix_hits(patch: Patch) -> None:
    """A mean of hidden states leaves out those that other requests computed."""
    patch.setattr(Request, "takes_prefix_hits", property(lambda self: self.params.prompt_logprobs is None))


@plant
def slot_remembers_its_last_grammar(patch: Patch) -> None:
    """A new request in a slot is bound by the grammar of the previous one."""
    launch = EngineCore._launch

    def stale(self: EngineCore, plan: StepPlan) -> None:
        known = dict(self._by_slot)
        launch(self, plan)
        self._by_slot = {**self._by_slot, **known}

    patch.setattr(EngineCore, "_launch", stale)


@plant
def replay_begins_its_grammar_again(patch: Patch) -> None:
    """After a crash the grammar starts again in the middle of a text."""
    opened = SimulatedGrammars.open

    def afresh(
        self: SimulatedGrammars, text: str, token_ids: object, ending_ids: tuple[int, ...], tenant: str = ""
    ) -> object:
        return opened(self, text, (), ending_ids)

    patch.setattr(SimulatedGrammars, "open", afresh)


@plant
def aborted_while_it_compiles_and_queued_all_the_same(patch: Patch) -> None:
    """Lost abort: a request that ended while its grammar was compiled comes back once that is done."""

    def forgetful(self: EngineCore, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            live = self._live.pop(request_id, None)
            if live is not None:
                if request_id not in self._compiling:
                    self._scheduler.finish(live.request)
                self._outbox.append(live.delta(finish_reason="abort"))

    patch.setattr(EngineCore, "abort", forgetful)


@plant
def complete_grammar_goes_on(patch: Patch) -> None:
    """The grammar is complete, and the next step still draws for it."""
    end_of = LiveRequest.end_of

    def on(self: LiveRequest, token_ids: tuple[int, ...]) -> tuple[str | None, int | None]:
        reason, stop_token_id = end_of(self, token_ids)
        return (None if reason == "stop" and stop_token_id is None else reason), stop_token_id

    patch.setattr(LiveRequest, "end_of", on)


@plant
def suspects_run_beside_others(patch: Patch) -> None:
    """The request that crashed the engine crashes it again, and no record tells which one it was."""
    patch.setattr(SuspectQueue, "current", lambda self: None)


@plant
def suspects_start_while_others_are_launched(patch: Patch) -> None:
    """Off by one step: under overlap the previous step is still on the device when a suspect starts."""
    schedule = Scheduler.schedule

    def hasty(self: Scheduler, now: float) -> StepPlan | None:
        launched = list(self._launched)
        if self._suspects.is_due and launched:
            self._launched.clear()
            plan = schedule(self, now)
            self._launched.extendleft(reversed(launched))
            return plan
        return schedule(self, now)

    patch.setattr(Scheduler, "schedule", hasty)


@plant
def replay_tells_its_prompt_again(patch: Patch) -> None:
    """Prompt logprobs delivered before the crash are delivered again."""
    created = LiveRequest.__init__
    patch.setattr(LiveRequest, "__init__", lambda self, request, num_prompt_logprobs=0: created(self, request))
