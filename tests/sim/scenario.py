"""Scenarios by seed: the requests, the engine's limits and the faults.

A seed means the same scenario on every machine. Limits are drawn small on purpose: a pool of two blocks of one token,
one request at a time, one token a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from msgspec import structs

from inferd.engine.api.wire.params import Pooling, SamplingParams
from inferd.engine.arch.paging import max_tokens
from inferd.engine.cache.state_checkpoints import StateCheckpointRules
from tests.sim.grammar import NEVER, Rule
from tests.sim.oracle import STATE, VOCAB_SIZE, Job, Windows, answer_of

_TTFT_TARGETS_S = (None, None, 0.001, 0.06, 0.3, 2.0, 60.0)
_TPOT_TARGETS_S = (None, 0.0001, 0.0025, 0.006, 0.015, 1.0)
"""From targets that no step meets to some that every step meets: a step takes 1 ms and `TOKEN_S` a token."""
TOKEN_S = 0.0005
CHUNK_SPLIT = 4

_POOLINGS = (None, Pooling("last"), Pooling("mean"), Pooling("mean"))
"""Poolings of requests that generate nothing, by their seed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's configuration."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    ageing_s: float
    watermark: float
    hash_bits: int | None
    """Bits of a shortened hash in the prefix index, so that contents collide; None for the product's hash."""
    windows: Windows
    """Windows of the model's cache groups."""
    checkpoints: StateCheckpointRules | None = None
    """Those of a model with recurrent state."""

    @property
    def views(self) -> Windows:
        """Windows of the cache groups, and the mark of a state if there is one."""
        return self.windows if self.checkpoints is None else (*self.windows, STATE)

    @property
    def max_tokens(self) -> int:
        """Most tokens, prompt and output, of a request that fits."""
        in_cache = max_tokens(self.windows, self.num_blocks, self.max_num_batched_tokens, self.block_size)
        return min(self.max_model_len, in_cache + 1)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are guessed, and how many of them a step verifies."""

    max_draws: int
    is_scripted: bool
    """Whether the simulation guesses, which knows the model. If not, the product does."""
    token_s: float
    """Seconds that a token adds to a step."""
    has_draft_model: bool


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    limits: Limits
    jobs: tuple[Job, ...]
    aborts: tuple[tuple[int, str], ...]
    """(tick, request id) of each abort. The request may be live, not yet submitted, or long ended."""
    resets: frozenset[int]
    """Ticks at which the prefix cache is dropped."""
    crashes: frozenset[int]
    """Ticks at which the engine is lost and every live request is submitted again."""
    duplicates: frozenset[int]
    """Ticks at which the id of a live request is submitted again."""
    is_lazy: bool
    is_flood: bool
    """The first job has a bad priority, and better ones keep coming until it ends."""
    speculation: Speculation | None = None
    """None: nothing is guessed."""


def make_scenario(seed: int) -> Scenario:
    """The scenario of `seed`."""
    rng = Random(seed)
    limits = _limits(rng)
    speculation = _speculation(seed, limits.windows)
    limits = replace(limits, checkpoints=_checkpoints(seed, limits.block_size))
    is_flood = rng.random() < 0.06
    jobs = (_flooded(limits),) if is_flood else _with_tenants(seed, _with_targets(seed, _jobs(rng, limits)))
    last_tick = max(job.arrival_tick for job in jobs) + 40
    aborts = [] if is_flood else _aborts(rng, jobs, last_tick)
    return Scenario(
        seed=seed,
        limits=limits,
        jobs=jobs,
        aborts=tuple(aborts),
        resets=_ticks(rng, last_tick, 0.2, 4),
        crashes=frozenset() if is_flood else _ticks(rng, last_tick, 0.15, 2),
        duplicates=_ticks(rng, last_tick, 0.2, 3),
        is_lazy=rng.random() < 0.5,
        is_flood=is_flood,
        speculation=speculation,
    )


def _checkpoints(seed: int, block_size: int) -> StateCheckpointRules | None:
    """Recurrent states in half of the scenarios, from a random source of their own."""
    rng = Random(f"states {seed}")
    if rng.random() < 0.5:
        return None
    return StateCheckpointRules(rng.choice((1, 2, 3, 5, 40)), block_size * rng.choice((1, 2, 3, 5, 1000)))


def _speculation(seed: int, windows: Windows) -> Speculation | None:
    """Guesses in half of the scenarios, from a random source of their own."""
    rng = Random(f"speculation {seed}")
    if rng.random() < 0.5:
        return None
    return Speculation(
        max_draws=rng.choice((2, 3, 5, 16, 32, 32)),
        is_scripted=rng.random() < 0.9,
        token_s=rng.choice((TOKEN_S, TOKEN_S / 20, TOKEN_S / 20)),
        # It uses the blocks of a group that sees everything.
        has_draft_model=rng.random() < 0.6 and windows[0] is None,
    )


def _with_targets(seed: int, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """Latency targets in half of the scenarios, from a random source of their own. The others do not change."""
    rng = Random(f"targets {seed}")
    if rng.random() < 0.5:
        return jobs
    ttft, tpot = (rng.sample(choices, 3) for choices in (_TTFT_TARGETS_S, _TPOT_TARGETS_S))
    return tuple(replace(job, ttft_target_s=rng.choice(ttft), tpot_target_s=rng.choice(tpot)) for job in jobs)


def _with_tenants(seed: int, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """Several tenants in a third of the scenarios, from a random source of their own. One of them may send all its
    requests at once."""
    rng = Random(f"tenants {seed}")
    if rng.random() >= 1 / 3:
        return jobs
    weights = {tenant: rng.choice((0.1, 1.0, 1.0, 1.0, 7.0)) for tenant in rng.choice(("ab", "abc", "abcdefgh"))}
    tenants = [rng.choice(sorted(weights)) for _ in jobs]
    burst = rng.choice(("", "a")), rng.choice(jobs).arrival_tick
    named = (replace(job, tenant=name, weight=weights[name]) for job, name in zip(jobs, tenants, strict=True))
    return tuple(replace(job, arrival_tick=burst[1]) if job.tenant == burst[0] else job for job in named)


def flood_job(limits: Limits, number: int, tick: int) -> Job:
    """A short request of the best priority. Every other one has a target that puts it first among those."""
    length = min(2, limits.max_tokens - 1)
    params, target_s = SamplingParams(max_tokens=1, seed=number), 0.5 if number % 2 else None
    return Job(f"flood-{number}", (number % 7,) * length, params, tick, ttft_target_s=target_s, tpot_target_s=target_s)


def _flooded(limits: Limits) -> Job:
    return Job("starved", (1,), SamplingParams(max_tokens=1, seed=1), arrival_tick=2, priority=3)


def _limits(rng: Random) -> Limits:
    windows = _windows(rng)
    return Limits(
        num_blocks=len(windows) * rng.choice((2, 2, 3, 4, 5, 6, 8, 12, 20, 60)),
        block_size=rng.choice((1, 1, 2, 2, 3, 4, 8, 16)),
        max_num_seqs=rng.choice((1, 2, 3, 4, 4, 8, 16)),
        max_num_batched_tokens=rng.choice((1, 2, 3, 5, 8, 16, 64)),
        max_model_len=rng.choice((12, 32, 64)),
        ageing_s=rng.choice((0.5, 1.0, 20.0)),
        watermark=rng.choice((0.0, 0.0, 0.01, 0.2)),
        hash_bits=rng.choice((None, None, None, 0, 2, 5)),
        windows=windows,
    )


def _windows(rng: Random) -> Windows:
    """One group that sees everything, or up to three of any kind, including windows of the same size."""
    if rng.random() < 0.4:
        return (None,)
    window = rng.choice((1, 2, 3, 4, 5, 8, 13, 17, 100))
    other = rng.choice((window, max(1, window // 2)))
    kinds: tuple[Windows, ...] = (
        (window,),
        (window, other),
        (None, window),
        (None, window),
        (None, None, window),
        (None, window, other),
    )
    return rng.choice(kinds)


def _ticks(rng: Random, last_tick: int, chance: float, most: int) -> frozenset[int]:
    if rng.random() >= chance:
        return frozenset()
    return frozenset(rng.randint(0, last_tick) for _ in range(rng.randint(1, most)))


def _aborts(rng: Random, jobs: tuple[Job, ...], last_tick: int) -> list[tuple[int, str]]:
    """Aborts at any time, or soon after the request came; some twice."""
    aborts: list[tuple[int, str]] = []
    for job in rng.choices(jobs, k=rng.choice((0, 0, 1, 3, len(jobs)))):
        tick = rng.randint(0, last_tick) if rng.random() < 0.3 else job.arrival_tick + rng.randint(0, 12)
        aborts += [(tick, job.request_id)] * rng.choice((1, 1, 2))
    return aborts


def _jobs(rng: Random, limits: Limits) -> tuple[Job, ...]:
    stems = _stems(rng, limits)
    lengths = rng.choice(((0, 1, 1, 2, 3, 6, 12, 30), (6, 12, 30, 60)))
    pace = rng.choice((0, 1, 4, 12))
    salts = rng.choice((("",), ("",), ("", "a"), ("", "a", "b")))
    priorities = rng.choice(((0,), (0,), (0, 1), (-3, 0, 2, 50)))
    jobs: list[Job] = []
    tick = 0
    for number in range(rng.randint(2, 24)):
        tick += rng.randint(0, pace)
        job = Job(
            request_id=f"r{number}",
            prompt_ids=_prompt(rng, limits, stems),
            params=SamplingParams(max_tokens=0, seed=rng.randint(0, 3)),
            arrival_tick=tick,
            priority=rng.choice(priorities),
            cache_salt=rng.choice(salts),
        )
        jobs.append(_with_params(rng, limits, job, lengths))
        if jobs[-1].nan_position is not None:
            jobs.append(replace(jobs[-1], request_id=f"r{number}-twin", arrival_tick=tick + 1, nan_position=None))
    return tuple(jobs)


def _stems(rng: Random, limits: Limits) -> list[tuple[int, ...]]:
    """A tree of prefixes, each longer than its parent."""
    alphabet = rng.choice((1, 2, VOCAB_SIZE))
    stems: list[tuple[int, ...]] = [()]
    for _ in range(rng.randint(1, 5)):
        tail = tuple(rng.randrange(alphabet) for _ in range(rng.randint(1, max(1, limits.max_tokens // 3))))
        stems.append(rng.choice(stems) + tail)
    return stems


def _prompt(rng: Random, limits: Limits, stems: list[tuple[int, ...]]) -> tuple[int, ...]:
    tail = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((0, 0, 1, 2, 7))))
    prompt = (rng.choice(stems) + tail)[: limits.max_tokens - 1]
    return prompt or (rng.randrange(VOCAB_SIZE),)


def _rule(rng: Random) -> Rule:
    """A grammar that ends, allows no token, or becomes too complex on the way; sometimes none."""
    return Rule(
        seed=rng.randrange(1_000),
        end=-1 if rng.random() < 0.05 else rng.choice((1, 2, 5, 13, NEVER)),
        dead=rng.choice((NEVER,) * 9 + (0, 3)),
        complex=rng.choice((NEVER,) * 6 + (1, 1, 2, 4, 4)),
        ticks=rng.choice((0, 0, 1, 5)),
    )


def _with_params(rng: Random, limits: Limits, job: Job, lengths: tuple[int, ...]) -> Job:
    """The job with parameters, and perhaps with emitted tokens or a fault."""
    room = limits.max_tokens - len(job.prompt_ids)
    max_tokens = min(room, rng.choice(lengths))
    ending = tuple(rng.sample(range(VOCAB_SIZE), rng.choice((0, 0, 1, 4, 12))))
    params = SamplingParams(
        max_tokens=max_tokens,
        seed=job.params.seed,
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.2 else 0,
        eos_token_ids=ending[::2],
        stop_token_ids=ending[1::2],
        logprobs=0 if rng.random() < 0.2 else None,
        prompt_logprobs=0 if rng.random() < 0.1 else None,
        pooling=None if max_tokens else _POOLINGS[job.params.seed],
    )
    nan_position = len(job.prompt_ids) + rng.choice((0, 0, 0, 1, 4)) if rng.random() < 0.06 else None
    if rng.random() < 0.25:
        params = structs.replace(params, grammar=_rule(rng).text)
    job = replace(job, params=params, nan_position=nan_position)
    num_emitted = rng.randint(0, len(answer_of(job, limits.views).token_ids)) if rng.random() < 0.15 else 0
    return replace(job, num_emitted=num_emitted)
