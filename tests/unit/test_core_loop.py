"""The core: its refusals, the messages to its caller, and the ends of generations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from inferd.engine.api.cost.step_cost import AttentionCost, PlanWork, WorkModel
from inferd.engine.api.wire.messages import Delta, StepOutput, Submit, SubmitChoices
from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.cache.below import PIECE_BLOCKS
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.grammar.ports import Grammar
from inferd.engine.request import Request
from inferd.engine.sched.latency.step_time import Coefficients, PriorCosts
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import RowResult, RowStatus, StepPlan, StepResult, TokenLogprobs
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.speculation.ports import Guess
from tests.unit.test_prefix_loads import Below

VOCAB = 100


@dataclass(frozen=True, slots=True)
class Ready:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


@dataclass(slots=True)
class Script:
    """An executor that draws the tokens of a script, per request, and then 50."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    nan_steps: frozenset[int] = frozenset()
    empty_steps: frozenset[int] = frozenset()
    names: dict[int, str] = field(default_factory=dict)
    num_launched: int = 0

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> Ready:
        assert not awaits_masks
        self.num_launched += 1
        self.names |= {admission.slot: admission.request_id for admission in plan.admissions}
        rows = []
        for row in plan.rows:
            if plan.step_id in self.nan_steps:
                rows.append(RowResult(status=RowStatus.NUMERICAL_ERROR))
                continue
            if plan.step_id in self.empty_steps:
                rows.append(RowResult(status=RowStatus.NOTHING_TO_DRAW))
                continue
            script = self.tokens.get(self.names[row.slot], [])
            drawn = tuple(script.pop(0) if script else 50 for _ in range(row.num_draws))
            rejected = drawn[row.accepted(drawn) :]
            script[:0] = rejected
            drawn = drawn[: len(drawn) - len(rejected)]
            logprobs = tuple(TokenLogprobs(token_id, -1.5, 2, ((3, -0.5),)) for token_id in drawn)
            prompt_logprobs = tuple(
                TokenLogprobs(p, -2.0, 1, ()) for p in range(row.start + 1, row.start + row.num_tokens)
            )
            rows.append(RowResult(drawn, RowStatus.OK, logprobs, prompt_logprobs))
        return Ready(StepResult(plan.step_id, tuple(rows), 0.25))

    def close(self) -> None:
        """Does nothing."""


class Always:
    """Guesses the same ids whatever came."""

    def __init__(self, *ids: int) -> None:
        self._guess = Guess(ids, (0.99,) * len(ids))
        self.opened: list[str] = []
        self.closed: list[str] = []

    def open(self, request: Request, grammar: Grammar | None) -> None:
        self.opened.append(request.request_id)

    def close(self, request: Request) -> None:
        self.closed.append(request.request_id)

    def guess(self, request: Request) -> Guess:
        return self._guess


def speculating(guesses: Always, script: Script) -> EngineCore:
    """A core in which steps cost almost nothing for each token, so that drafts are worth their time."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, max_draws=32)
    costs = Coefficients(step_s=1.0, token_s=1e-6, context_s=0.0)
    scheduler = Scheduler(config, KVCache(32, 4), PriorCosts(costs, costs), guesses)
    return EngineCore(scheduler, script, vocab_size=VOCAB, clock=lambda: 0.0, guesses=guesses)


def make(script: Script | None = None, depth: int = 1, **limits: int) -> EngineCore:
    config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, **limits})
    scheduler = Scheduler(config, KVCache(32, 4))
    return EngineCore(scheduler, script or Script(), vocab_size=VOCAB, depth=depth, clock=lambda: 0.0)


SCHEDULING = SchedulingParams(arrival_s=3.0)


def submit(
    name: str = "r",
    prompt: tuple[int, ...] = (1, 2, 3),
    emitted: tuple[int, ...] = (),
    scheduling: SchedulingParams = SCHEDULING,
    **params: Any,
) -> Submit:
    sampling = SamplingParams(**{"max_tokens": 4, "seed": 0, **params})
    return Submit(request_id=name, prompt_ids=prompt, params=sampling, scheduling=scheduling, emitted_ids=emitted)


def run(core: EngineCore, *submits: Submit, now: float = 5.0) -> list[Delta]:
    """Submit all requests, run to the end, return all deltas."""
    for message in submits:
        core.submit(message, now)
    deltas: list[Delta] = []
    while core.has_work:
        output = core.step(now)
        core.check()
        deltas += output.deltas if output is not None else ()
    return deltas


def end_of(deltas: list[Delta]) -> Delta:
    (end,) = [delta for delta in deltas if delta.finish_reason is not None]
    assert deltas[-1] is end
    return end


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


# -- choices of one prompt -----------------------------------------------------------------------------------------


def test_choices_of_one_prompt_are_requests_of_their_own() -> None:
    core = make(Script({"a": [8], "b": [9, 9], "c": [7, 7]}))
    core.submit_choices(SubmitChoices(first=submit("a", eos_token_ids=(8,)), others=(("b", 5), ("c", 6))), 5.0)
    requests = {request.request_id: request for request in core._scheduler._entries}
    assert {name: request.params.seed for name, request in requests.items()} == {"a": 0, "b": 5, "c": 6}
    assert len({id(request.ids) for request in requests.values()}) == 3, "each grows by itself"
    deltas = run(core)
    ends = {delta.request_id: delta.finish_reason for delta in deltas if delta.finish_reason is not None}
    assert ends == {"a": "stop", "b": "length", "c": "length"}


def test_what_is_wrong_with_a_prompt_is_said_to_every_choice_and_a_seed_to_its_own() -> None:
    core = make()
    core.submit_choices(SubmitChoices(first=submit("a", prompt=(VOCAB,)), others=(("b", 5),)), 5.0)
    core.submit_choices(SubmitChoices(first=submit("c"), others=(("d", -1), ("c", 1), ("e", 2**53))), 5.0)
    output = core.flush()
    assert output is not None
    failures = {delta.request_id: delta.failure.param for delta in output.deltas if delta.failure is not None}
    assert failures == {"a": "prompt", "b": "prompt", "d": "seed", "c": "request_id", "e": "seed"}
    assert core.stats().num_waiting == 1


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("params", "tokens", "ids", "reason", "stop_id"),
    [
        ({}, [], [50] * 4, "length", None),
        ({"eos_token_ids": (9,)}, [8, 9], [8, 9], "stop", 9),
        ({"stop_token_ids": (8,)}, [8, 9], [8], "stop", 8),
        ({"eos_token_ids": (9,), "max_tokens": 2}, [8, 9], [8, 9], "stop", 9),
        ({"eos_token_ids": (9,), "min_tokens": 2}, [9, 9, 9], [9, 9, 9], "stop", 9),
        ({"max_tokens": 0}, [], [], "length", None),
    ],
)
def test_how_a_generation_ends(
    depth: int, params: dict[str, Any], tokens: list[int], ids: list[int], reason: str, stop_id: int | None
) -> None:
    deltas = run(make(Script({"r": list(tokens)}), depth), submit(**params))
    assert ids_of(deltas) == ids
    assert (end_of(deltas).finish_reason, end_of(deltas).stop_token_id) == (reason, stop_id)


def test_overlap_launches_one_step_beyond_a_stop_and_none_beyond_a_length() -> None:
    script = Script({"r": [8, 9]})
    run(make(script), submit(eos_token_ids=(9,)))
    assert script.num_launched == 3
    script = Script()
    run(make(script), submit(max_tokens=3))
    assert script.num_launched == 3


def test_the_first_step_is_only_launched() -> None:
    core = make(depth=1)
    core.submit(submit(), 5.0)
    assert core.step(5.0) is None
    output = core.step(5.0)
    assert output is not None
    assert (output.step_num_tokens, output.step_num_rows, output.step_duration_s) == (3, 1, 0.25)
    core = make(depth=0)
    core.submit(submit(), 5.0)
    assert core.step(5.0) is not None


def test_a_replay_goes_on_where_it_stood() -> None:
    deltas = run(make(), submit(emitted=(7, 8), max_tokens=3))
    assert ids_of(deltas) == [50]
    assert end_of(deltas).finish_reason == "length"


@pytest.mark.parametrize(
    ("emitted", "params", "reason", "stop_id"),
    [((7, 8), {"max_tokens": 2}, "length", None), ((7, 9), {"eos_token_ids": (9,)}, "stop", 9)],
)
def test_a_replay_that_had_ended_is_told_so(
    emitted: tuple[int, ...], params: dict[str, Any], reason: str, stop_id: int | None
) -> None:
    script = Script()
    (delta,) = run(make(script), submit(emitted=emitted, **params))
    assert (delta.finish_reason, delta.stop_token_id, delta.token_ids) == (reason, stop_id, ())
    assert script.num_launched == 0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [0, 1])
def test_an_abort_is_answered_at_once_and_once(depth: int, num_steps: int) -> None:
    core = make(depth=depth)
    core.submit(submit(), 5.0)
    for _ in range(num_steps):
        core.step(5.0)
    core.abort(["r", "r", "unknown"])
    output = core.flush()
    assert output is not None
    assert [(delta.request_id, delta.finish_reason) for delta in output.deltas] == [("r", "abort")]
    assert core.flush() is None
    assert run(core) == []


def test_an_id_may_be_used_again_while_its_last_row_is_in_flight() -> None:
    core = make()
    core.submit(submit(), 5.0)
    core.step(5.0)
    core.abort(["r"])
    core.flush()
    deltas = run(core, submit(max_tokens=2))
    assert ids_of(deltas) == [50, 50]


def test_a_row_of_nan_fails_its_request_alone() -> None:
    core = make(Script(nan_steps=frozenset({0})), depth=0, max_num_batched_tokens=3)
    deltas = run(core, submit("bad"), submit("good", (4, 5, 6)))
    by_name = {name: [d for d in deltas if d.request_id == name] for name in ("bad", "good")}
    failure = end_of(by_name["bad"]).failure
    assert failure is not None
    assert (end_of(by_name["bad"]).finish_reason, failure.code) == ("error", "numerical_error")
    assert ids_of(by_name["good"]) == [50] * 4


def test_a_request_that_leaves_itself_nothing_to_draw_is_refused_and_its_prefix_kept() -> None:
    prompt = tuple(range(1, 13))
    core = make(Script(empty_steps=frozenset({1})), depth=0)
    failure = end_of(run(core, submit("own fault", prompt))).failure
    assert failure is not None
    assert failure.code == "invalid_value" and "allowed_token_ids" in failure.message
    run(core, submit("next", (*prompt, 13)))
    assert core.stats().prefix_hit_tokens == 12


def test_what_the_worker_raises_is_raised() -> None:
    class Broken(Script):
        def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> Ready:
            raise RuntimeError("out of memory")

    core = make(Broken())
    core.submit(submit(), 5.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        core.step(5.0)


# -- work --------------------------------------------------------------------------------------------------------------

UNITS = WorkModel(
    token_flops=1,
    logits_flops=1000,
    attention=(AttentionCost(None, pair_flops=10**6, key_bytes=1),),
    weight_bytes=10**6,
)


def outputs_of(core: EngineCore, *submits: Submit) -> list[StepOutput]:
    for message in submits:
        core.submit(message, 5.0)
    outputs = []
    while core.has_work:
        output = core.step(5.0)
        if output is not None and output.step_phase is not None:
            outputs.append(output)
    return outputs


@pytest.mark.parametrize("depth", [0, 1])
def test_every_step_says_what_it_had_to_do(depth: int) -> None:
    """Two prompts of 3 and 2 tokens, 4 of them in the first step; then the last one with a decode; then decodes.

    Logits are computed for draws and, in the first step, for the two prompt tokens that the script scores.
    """
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=4, max_model_len=64)
    core = EngineCore(Scheduler(limits, KVCache(32, 4)), Script(), vocab_size=VOCAB, depth=depth, work=PlanWork(UNITS))
    seen = outputs_of(core, submit("a", max_tokens=3), submit("b", (4, 5), max_tokens=2))
    assert [(output.step_phase, output.step_flops, output.step_bytes) for output in seen] == [
        ("mixed", 7 * 10**6 + (1 + 2) * 1000 + 4, 10**6 + 4),
        ("decode", 6 * 10**6 + 2 * 1000 + 2, 10**6 + 6),
        ("decode", 8 * 10**6 + 2 * 1000 + 2, 10**6 + 8),
    ]
    assert [output.step_num_tokens for output in seen] == [4, 2, 2]


def test_steps_that_overlap_do_not_count_their_time_twice() -> None:
    """Each takes 0.25 s by the worker's clock. The results come at 10.0, 10.1 and 11.0."""
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=4, max_model_len=64)
    clock = [0.0]
    core = EngineCore(
        Scheduler(limits, KVCache(32, 4)),
        Script(),
        vocab_size=VOCAB,
        depth=0,
        clock=lambda: clock[0],
        work=PlanWork(UNITS),
    )
    core.submit(submit(max_tokens=3), 5.0)
    own: list[float] = []
    for clock[0] in (10.0, 10.1, 11.0):
        output = core.step(5.0)
        assert output is not None
        own.append(output.step_own_s)
        assert output.step_ended_s == clock[0], "when its tokens were known"
    assert own == pytest.approx([0.25, 0.1, 0.25])


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        (submit(prompt=()), "invalid_value", "prompt"),
        (submit(prompt=(1, VOCAB)), "invalid_value", "prompt"),
        (submit(prompt=(-1,)), "invalid_value", "prompt"),
        (submit(temperature=float("nan")), "invalid_value", "temperature"),
        (submit(stop_token_ids=(VOCAB,)), "invalid_value", "stop_token_ids"),
        (submit(emitted=(VOCAB,)), "invalid_value", "emitted_ids"),
        (submit(emitted=(1, 2), max_tokens=1), "invalid_value", "emitted_ids"),
        (submit(max_tokens=62), "context_length_exceeded", "max_tokens"),
        (submit(prompt=(1,) * 70), "context_length_exceeded", "prompt"),
    ],
)
def test_a_bad_request_gets_one_terminal_delta(message: Submit, code: str, param: str) -> None:
    core = make()
    deltas = run(core, message, submit("good"))
    bad = [delta for delta in deltas if delta.request_id == "r"]
    failure = end_of(bad).failure
    assert failure is not None
    assert (len(bad), bad[0].finish_reason, failure.code, failure.param) == (1, "error", code, param)
    assert ids_of([delta for delta in deltas if delta.request_id == "good"]) == [50] * 4


def test_a_duplicate_is_refused_and_the_live_one_goes_on() -> None:
    core = make()
    core.submit(submit(), 5.0)
    core.step(5.0)
    deltas = run(core, submit(prompt=(9, 9)))
    refused = [delta for delta in deltas if delta.failure is not None]
    assert [delta.failure.param for delta in refused if delta.failure is not None] == ["request_id"]
    assert ids_of(deltas) == [50] * 4


@pytest.mark.parametrize("depth", [-1, 2])
def test_depth_is_0_or_1(depth: int) -> None:
    with pytest.raises(ValueError, match=str(depth)):
        make(depth=depth)


# -- what a delta says -------------------------------------------------------------------------------------------------


def test_logprobs_travel_with_their_tokens() -> None:
    deltas = run(make(), submit(max_tokens=2, logprobs=1))
    assert [(lp.token_id, lp.logprob, lp.rank, lp.top) for d in deltas for lp in d.logprobs] == [
        (50, -1.5, 2, ((3, -0.5),))
    ] * 2


def test_prompt_logprobs_come_with_the_chunks_once() -> None:
    core = make(max_num_batched_tokens=2)
    deltas = run(core, submit(prompt=(1, 2, 3, 4, 5), max_tokens=0, prompt_logprobs=0))
    # The script gives position p for token p, and none at a chunk's end.
    assert [lp.token_id for d in deltas for lp in d.prompt_logprobs] == [1, 3]
    assert end_of(deltas).finish_reason == "length"


def test_the_first_delta_says_when_it_ran_and_each_what_was_cached() -> None:
    core = make()
    run(core, submit("first", prompt=tuple(range(9)), max_tokens=1), now=5.0)
    deltas = run(core, submit("second", prompt=(*range(8), 50), max_tokens=3), now=6.0)
    assert [delta.scheduled_s for delta in deltas] == [6.0, None, None]
    assert [delta.num_cached_tokens for delta in deltas] == [8, 8, 8]


def test_arrival_is_the_servers_unless_it_is_absent_or_to_come() -> None:
    core = make()
    for name, arrival_s in (("stated", 3.0), ("absent", 0.0), ("to come", 9.0), ("nan", float("nan"))):
        core.submit(submit(name, scheduling=SchedulingParams(arrival_s=arrival_s)), 5.0)
    arrivals = {request.request_id: request.scheduling.arrival_s for request in core._scheduler._entries}
    assert arrivals == {"stated": 3.0, "absent": 5.0, "to come": 5.0, "nan": 5.0}


def test_statistics() -> None:
    core = make()
    run(core, submit("a", prompt=tuple(range(9)), max_tokens=2))
    run(core, submit("b", prompt=tuple(range(9)), max_tokens=2))
    stats = core.stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (9 + 1, 4)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (18, 8)
    assert (stats.num_blocks, stats.num_blocks_used, stats.num_blocks_cached) == (32, 0, 2)
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (0, 0, 0)
    core.reset_prefix_cache()
    assert core.stats().num_blocks_cached == 0


@pytest.mark.parametrize("with_running", [False, True])
def test_a_reset_may_also_hide_what_a_running_request_uses(with_running: bool) -> None:
    core, ids = make(depth=0), tuple(range(9))
    core.submit(submit("a", prompt=ids, max_tokens=9), 5.0)
    for now in (6.0, 7.0, 8.0):
        core.step(now)
    core.reset_prefix_cache(with_running=with_running)
    deltas = run(core, submit("b", prompt=ids, max_tokens=1))
    (last,) = (delta for delta in deltas if delta.request_id == "b" and delta.finish_reason)
    assert last.num_cached_tokens == (0 if with_running else 8)
    assert next(delta for delta in deltas if delta.request_id == "a" and delta.finish_reason).finish_reason == "length"
    core.check()


@pytest.mark.parametrize("with_tiers", [False, True])
def test_a_reset_clears_the_tier_below_only_if_it_is_asked_to(with_tiers: bool) -> None:
    """A load that runs then is not used either."""
    below, ids = Below(), tuple(range(4 * PIECE_BLOCKS + 1))
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64), KVCache(32, 4))
    core = EngineCore(scheduler, Script(), vocab_size=VOCAB, clock=lambda: 0.0, tier=below)
    core.submit(submit("a", prompt=ids, max_tokens=1), 5.0)
    below.searches[0].is_done = True
    run(core)
    assert below.pieces
    core.reset_prefix_cache()
    core.submit(submit("b", prompt=ids, max_tokens=1), 5.0)
    below.searches[1].is_done = True
    core.step(6.0)
    core.reset_prefix_cache(with_tiers=with_tiers)
    assert bool(below.pieces) != with_tiers
    below.loads[0].news = [True]
    (last,) = (delta for delta in run(core) if delta.finish_reason)
    assert last.num_loaded_tokens == (0 if with_tiers else 4 * PIECE_BLOCKS)


# -- targets -----------------------------------------------------------------------------------------------------------


def test_a_request_that_would_be_late_is_told_when_to_come_back() -> None:
    """The request is refused at once, while another's prompt is ahead. One with a far target goes on, and so does one
    without a target."""
    core = make(max_num_seqs=4, max_num_batched_tokens=4)
    core.submit(submit("ahead", tuple(range(20))), 3.0)
    core.step(3.0)
    core.submit(submit("late", scheduling=SchedulingParams(arrival_s=3.0, ttft_target_s=1e-6)), 3.0)
    output = core.flush()
    assert output is not None
    (delta,) = output.deltas
    assert delta.failure is not None
    assert (delta.request_id, delta.finish_reason, delta.failure.code) == ("late", "error", "rate_limit_exceeded")
    assert 0 < (delta.failure.retry_after_s or 0) < 1
    assert output.stats.num_shed == 1
    soon = SchedulingParams(arrival_s=3.0, ttft_target_s=60.0)
    deltas = run(core, submit("soon", scheduling=soon), submit("whenever"), now=3.0)
    ends = {delta.request_id: delta.finish_reason for delta in deltas if delta.finish_reason is not None}
    assert ends == dict.fromkeys(("ahead", "soon", "whenever"), "length")


def test_a_request_that_waits_in_vain_is_told_so() -> None:
    core = make(max_num_seqs=1)
    core.submit(submit("runs"), 3.0)
    core.step(3.0)
    core.submit(submit("waits", scheduling=SchedulingParams(arrival_s=3.0, ttft_target_s=5.0)), 3.0)
    deltas = run(core, now=30.0)
    failed = [delta for delta in deltas if delta.request_id == "waits"]
    assert [(delta.finish_reason, delta.failure and delta.failure.code) for delta in failed] == [
        ("error", "rate_limit_exceeded")
    ]
    assert ids_of(deltas) == [50] * 4, "the one that runs goes on"


def test_steps_teach_the_step_time_model() -> None:
    """Steps take 20 ms each, by a clock on which they end so. Soon the model predicts that time."""
    times = iter(0.02 * i for i in range(10_000))
    now = [0.0]

    def clock() -> float:
        return now[0]

    scheduler = Scheduler(SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64), KVCache(32, 4))
    core = EngineCore(scheduler, Script(), vocab_size=VOCAB, clock=clock)
    core.submit(submit("r", max_tokens=60), 0.0)
    outputs = []
    while core.has_work:
        now[0] = next(times)
        output = core.step(now[0])
        outputs += [output] if output is not None and output.step_phase is not None else []
    assert outputs[0].step_predicted_s < 0.01
    assert outputs[-1].step_predicted_s == pytest.approx(0.02, rel=0.02)
    assert outputs[-1].step_own_s == pytest.approx(0.02)
    assert outputs[0].stats.step_model.prefill_tokens_per_s > 0


# -- drafts --------------------------------------------------------------------------------------------------------


def test_a_delta_says_how_many_drafts_its_step_verified() -> None:
    """The answer is 7, 7, 7, 8, 7, 7, 7, 7. Every guess is three times 7, so each row's first wrong draft ends it."""
    answer, guesses = [7, 7, 7, 8, 7, 7, 7, 7], Always(7, 7, 7)
    core = speculating(guesses, Script({"r": list(answer)}))
    deltas = run(core, submit(max_tokens=8))
    assert ids_of(deltas) == answer == ids_of(run(make(Script({"r": list(answer)})), submit(max_tokens=8)))
    told = [(len(delta.token_ids), delta.num_drafts) for delta in deltas if delta.num_drafts]
    assert told and max(num_tokens for num_tokens, _ in told) > 1, "nothing was speculated"
    stats = core.stats()
    assert stats.num_draft_rows == len(told)
    assert stats.num_drafts == sum(num_drafts for _, num_drafts in told)
    assert sum(stats.accepted_drafts) == sum(num_tokens - 1 for num_tokens, _ in told)
    assert list(stats.accepted_drafts) == sorted(stats.accepted_drafts, reverse=True)
    assert guesses.opened == guesses.closed == ["r"]


@pytest.mark.parametrize(
    ("params", "kept", "reason", "stop_token_id"),
    [
        ({"eos_token_ids": (8,)}, [7, 7, 7, 8], "stop", 8),
        ({"stop_token_ids": (7,), "min_tokens": 2}, [7, 7, 7], "stop", 7),
        ({"max_tokens": 6}, [7, 7, 7, 8, 8, 8], "length", None),
    ],
)
def test_a_row_with_drafts_gives_nothing_behind_the_end(
    params: dict[str, Any], kept: list[int], reason: str, stop_token_id: int | None
) -> None:
    """The drafts behind it are right, so the step draws tokens that no request of one token a step would have."""
    script = Script({"r": [7, 7, 7, 8, 8, 8, 8, 8, 8, 8]})
    core = speculating(Always(7, 7, 8, 8, 8, 8, 8), script)
    deltas = run(core, submit(**{"max_tokens": 9, "logprobs": 1, **params}))
    end = end_of(deltas)
    assert (ids_of(deltas), end.finish_reason, end.stop_token_id) == (kept, reason, stop_token_id)
    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == kept
    assert core.stats().num_drafts > 0, "nothing was speculated"
    assert core.stats().num_generation_tokens == len(kept)
