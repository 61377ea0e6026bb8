"""Prefix hits of conversations on four replicas, with the real router and cores over simulated devices."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from inferd.engine.api.wire.params import SamplingParams
from inferd.server.dispatch.replica import LoadBalancer
from tests.sim.faults import Caller, FrontScenario
from tests.sim.front import run_front
from tests.sim.oracle import VOCAB_SIZE, Job, answer_of
from tests.sim.scenario import Limits, Scenario

NUM_REPLICAS, NUM_CONVERSATIONS, NUM_TURNS = 4, 32, 4
FIRST_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 48, 13, 3
TICKS_BETWEEN = 10
"""Ticks from one request to the next. The replicas are busy for about half of the time."""
SCARCE_BLOCKS, AMPLE_BLOCKS = 104, 500
"""KV blocks of each replica: for 8 conversations with all their turns, so that the four caches hold the 32 just so, or
for all 32."""
LIMITS = Limits(
    num_blocks=SCARCE_BLOCKS,
    block_size=8,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=128,
    ageing_s=1.0,
    watermark=0.0,
    hash_bits=None,
    windows=(None,),
)


@cache
def conversations(seed: int) -> FrontScenario:
    """Turns of all conversations in random order. Each begins with the turn before and its answer."""
    rng = Random(f"conversations {seed}")
    order = [number for number in range(NUM_CONVERSATIONS) for _ in range(NUM_TURNS)]
    rng.shuffle(order)
    texts, callers = [_ids(rng, FIRST_TOKENS) for _ in range(NUM_CONVERSATIONS)], list[Caller]()
    for place, number in enumerate(order):
        params = SamplingParams(max_tokens=ANSWER_TOKENS, seed=number)
        job = Job(f"r{place}", texts[number], params, arrival_tick=place * TICKS_BETWEEN)
        callers.append(Caller(job))
        texts[number] += answer_of(job, LIMITS.views).token_ids + _ids(rng, QUESTION_TOKENS)
    jobs = tuple(caller.job for caller in callers)
    nothing = frozenset[int]()
    core = Scenario(
        seed, LIMITS, jobs, aborts=(), resets=nothing, crashes=nothing, duplicates=nothing, is_lazy=False,
        is_flood=False,
    )  # fmt: skip
    return FrontScenario(seed, core, tuple(callers), num_replicas=NUM_REPLICAS)


def _ids(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))


def hit_rate(seed: int, num_blocks: int) -> float:
    """Share of all prompt tokens that the caches held."""
    scenario = conversations(seed)
    core = replace(scenario.core, limits=replace(LIMITS, num_blocks=num_blocks))
    stats = run_front(replace(scenario, core=core)).router.streams.stats
    return stats.prefix_hit_tokens / stats.prefix_query_tokens


@pytest.mark.parametrize(
    ("seed", "num_blocks"),
    [(0, SCARCE_BLOCKS), *(pytest.param(seed, AMPLE_BLOCKS, marks=pytest.mark.long) for seed in range(3))],
)
def test_load_balancer_hits_one_and_a_half_times_as_much_as_taking_turns(
    seed: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = hit_rate(seed, num_blocks)
    with monkeypatch.context() as patch:
        patch.setattr(LoadBalancer, "_cost", lambda self, replica, _: (0, 0, self._last_placed[replica.index]))
        in_turn = hit_rate(seed, num_blocks)
    print(f"seed {seed}, {num_blocks} blocks: {placed:.1%} of the prompt tokens are hits, in turn {in_turn:.1%}")
    assert placed >= 1.5 * in_turn
    monkeypatch.setattr(LoadBalancer, "_uncached", lambda self, replica, keys, num_tokens: num_tokens)
    assert hit_rate(seed, num_blocks) < 1.5 * in_turn, "balancing by load alone would pass too"
