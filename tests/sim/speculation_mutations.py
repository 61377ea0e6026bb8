"""Planted bugs of speculation: what is accepted, what the counters say then, and grammars. See `tests.sim.planting`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from inferd.engine.core.live_request import LiveRequest
from inferd.engine.core.loop import EngineCore
from inferd.engine.request import Request
from inferd.engine.sched.plan import Row, RowResult, StepPlan, TokenMasks
from inferd.engine.sched.scheduler import Scheduler
from tests.sim.grammar import SimulatedGrammar
from tests.sim.planting import Patch, Plants

plant = Plants()


# -- what was accepted -------------------------------------------------------------------------------------------------


@plant
def token_behind_a_rejected_draft_is_accepted(patch: Patch) -> None:
    """Off by one: the token drawn behind the first wrong draft is taken too."""
    accepted = Row.accepted
    patch.setattr(Row, "accepted", lambda self, drawn: min(len(drawn), accepted(self, drawn) + 1))


@plant
def drafts_are_compared_with_the_next_draw(patch: Patch) -> None:
    """Off by one: a draft counts as right if it equals the token drawn behind it."""

    def shifted(self: Row, drawn: Sequence[int]) -> int:
        pairs = zip(self.draft_ids, drawn[1:], strict=False)
        return next((count for count, (draft, token) in enumerate(pairs, start=1) if draft != token), len(drawn))

    patch.setattr(Row, "accepted", shifted)


@plant
def accepted_tokens_but_the_last_are_lost(patch: Patch) -> None:
    """A row is taken to give one token, as without drafts."""
    until_end = LiveRequest.until_end

    def last(self: LiveRequest, result: RowResult) -> RowResult:
        result = until_end(self, result)
        return result._replace(token_ids=result.token_ids[-1:], logprobs=result.logprobs[-1:])

    patch.setattr(LiveRequest, "until_end", last)


@plant
def drafts_go_on_behind_a_stop_token(patch: Patch) -> None:
    """Accepted drafts are delivered behind the token that ends the generation."""
    patch.setattr(LiveRequest, "until_end", lambda self, result: result)


@plant
def logprobs_are_not_cut_with_their_tokens(patch: Patch) -> None:
    """Logprobs of tokens behind the end are delivered."""
    until_end = LiveRequest.until_end

    def uncut(self: LiveRequest, result: RowResult) -> RowResult:
        return until_end(self, result)._replace(logprobs=result.logprobs)

    patch.setattr(LiveRequest, "until_end", uncut)


# -- the counters ------------------------------------------------------------------------------------------------------


def _apply_otherwise(patch: Patch, *, is_computed: bool, is_total: bool) -> None:
    """Let rejected positions count as computed, or as tokens that exist."""
    apply = Request.apply

    def wrong(self: Request, start: int, num_tokens: int, token_ids: tuple[int, ...]) -> None:
        num_drafts, scheduled, total = self.num_drafts, self.scheduled, self.total
        apply(self, start, num_tokens, token_ids)
        if num_drafts and is_computed:
            self.computed = self.scheduled = min(scheduled, len(self.ids))
        if num_drafts and is_total:
            self.total = total

    patch.setattr(Request, "apply", wrong)


@plant
def rejected_positions_count_as_computed(patch: Patch) -> None:
    """The KV of the first rejected draft is kept for the token that was drawn instead."""
    _apply_otherwise(patch, is_computed=True, is_total=False)


@plant
def total_is_not_reset_after_a_rejection(patch: Patch) -> None:
    """The next row begins behind tokens that do not exist."""
    _apply_otherwise(patch, is_computed=False, is_total=True)


@plant
def drafts_reach_the_end_of_the_context(patch: Patch) -> None:
    """Off by one: a draft takes the last position, behind which nothing may be drawn."""
    most_drafts = Request.most_drafts.fget  # type: ignore[attr-defined]
    num_pending = Request.num_pending.fget  # type: ignore[attr-defined]
    patch.setattr(Request, "most_drafts", property(lambda self: most_drafts(self) + (num_pending(self) > 0)))


@plant
def rows_follow_drafts_in_flight(patch: Patch) -> None:
    """Overlap: a step is planned behind drafts that may be rejected."""

    def num_pending(self: Request) -> int:
        return min(self.total, self.num_needed) - self.scheduled

    patch.setattr(Request, "num_pending", property(num_pending))
    patch.setattr(Scheduler, "awaits_results", property(lambda self: False))


@plant
def drafts_follow_a_token_that_is_not_known(patch: Patch) -> None:
    """Overlap: a guess for the known ids is verified one position too late."""

    def most_drafts(self: Request) -> int:
        return max(0, self.num_needed - self.scheduled) if self.total == self.scheduled + 1 else 0

    patch.setattr(Request, "most_drafts", property(most_drafts))
    patch.setattr(Scheduler, "awaits_results", property(lambda self: False))


# -- grammars ----------------------------------------------------------------------------------------------------------


@plant
def masks_of_drafts_are_one_draw_late(patch: Patch) -> None:
    """Off by one: the first draw has no mask, and each other the mask of the draw before."""
    masks_of = EngineCore._masks_of

    def late(self: EngineCore, plan: StepPlan) -> TokenMasks:
        masks = masks_of(self, plan)
        num_draws = sum(row.num_draws for row in plan.rows)
        if not plan.has_drafts or len(masks.draws) < 2 or masks.draws[-1] + 1 >= num_draws:
            return masks
        return TokenMasks(tuple(draw + 1 for draw in masks.draws), masks.words)

    patch.setattr(EngineCore, "_masks_of", late)


@plant
def one_mask_serves_all_draws_of_a_row(patch: Patch) -> None:
    """The token behind a draft is drawn under the mask of the draft."""

    masks_of = EngineCore._masks_of

    def same(self: EngineCore, plan: StepPlan) -> TokenMasks:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SimulatedGrammar, "accept", lambda self, token_ids: None)
            inner.setattr(SimulatedGrammar, "rollback", lambda self, num_tokens: None)
            return masks_of(self, plan)

    patch.setattr(EngineCore, "_masks_of", same)


@plant
def grammar_is_not_taken_back(patch: Patch) -> None:
    """The grammar goes on behind drafts that were rejected, or follows accepted ones twice."""
    patch.setattr(SimulatedGrammar, "rollback", lambda self, num_tokens: None)


@plant
def grammar_stays_failed_after_a_draft(patch: Patch) -> None:
    """A request fails because a wrong guess led to where its grammar is too complex."""
    rollback = SimulatedGrammar.rollback

    def keep(self: SimulatedGrammar, num_tokens: int) -> None:
        failure = self.failure
        rollback(self, num_tokens)
        self.failure = failure

    patch.setattr(SimulatedGrammar, "rollback", keep)


@plant
def end_token_is_drawn_behind_a_complete_text(patch: Patch) -> None:
    """A draft completes the text, and the token drawn behind it is delivered."""
    masks_of = EngineCore._masks_of

    def open_ended(self: EngineCore, plan: StepPlan) -> TokenMasks:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SimulatedGrammar, "is_finished", False)
            return masks_of(self, plan)

    patch.setattr(EngineCore, "_masks_of", open_ended)
