"""The real core, scheduler and cache on a simulated device, with the limits of a scenario."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from inferd.engine.api.process.flight_recorder import NO_RECORDER, FlightRecorder
from inferd.engine.cache.prefix import blake2b_block
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.sched.latency.step_time import UNKNOWN, Coefficients
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import StepPlan
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.speculation.guesses import Guesses
from tests.sim.device import SimulatedDevice
from tests.sim.grammar import SimulatedGrammars
from tests.sim.guesses import ScriptedGuesses
from tests.sim.left_memory import LeftMemory
from tests.sim.oracle import VOCAB_SIZE
from tests.sim.scenario import CHUNK_SPLIT, TOKEN_S, Limits, Scenario
from tests.sim.tier import SimulatedTier

_DRAFTED = Coefficients(1e-3, 1e-5, 1e-8, 1e-10, 1e-5, 1e-6)
"""First costs of steps with drafts of the draft model."""


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """All that one engine computes with, from its start to its end."""

    core: EngineCore
    scheduler: Scheduler
    cache: KVCache
    device: SimulatedDevice
    guesses: ScriptedGuesses | Guesses | None

    def poison_free(self) -> None:
        """Poison what no request holds: the host must not let a launched step touch it."""
        states = self.cache.states
        empty = () if states is None else states.pool.empty_blocks()
        self.device.poison(self.cache.pool.empty_blocks(), self.scheduler.free_slots, empty)

    def check_idle(self) -> None:
        """Assert that everything is free again after the last request."""
        self.core.check()
        rechecks = self.core._rechecks
        while rechecks is not None and rechecks.holds_blocks:
            rechecks.give_way()
            rechecks.settle()
        self.core.reset_prefix_cache()
        assert self.cache.pool.num_empty == self.cache.pool.num_blocks, "blocks were lost"
        states = self.cache.states
        assert states is None or states.pool.num_empty == states.pool.num_blocks, "checkpoints were lost"
        assert len(self.cache.index) == 0, "content is indexed that no block holds"
        assert len(self.scheduler.free_slots) == self.scheduler.config.max_num_seqs, "slots were lost"
        if isinstance(self.guesses, ScriptedGuesses):
            self.guesses.check_idle()


def make_engine(
    scenario: Scenario,
    *,
    depth: int,
    clock: Callable[[], float],
    tick: Callable[[], int],
    watch: Callable[[StepPlan], None],
    recorder: FlightRecorder = NO_RECORDER,
    memory: LeftMemory | None = None,
    tier: SimulatedTier | None = None,
) -> SimulatedEngine:
    """A new engine. `clock`: seconds. `tick`: time of grammar compilation. `watch` gets each plan launched.
    `memory`, `tier`: what the engines before left, for a cache with a strong hash."""
    limits = scenario.limits
    if limits.hash_bits is not None:
        memory = tier = None
    if memory is not None:
        memory.damage()
    config = SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        ageing_s=limits.ageing_s,
        watermark=limits.watermark,
        chunk_split=CHUNK_SPLIT,
        max_draws=scenario.speculation.max_draws if scenario.speculation else 0,
    )
    cache = KVCache(
        limits.num_blocks,
        limits.block_size,
        limits.windows,
        step_tokens=limits.max_num_batched_tokens,
        hash_block=_hash_of(limits),
        checkpoints=limits.checkpoints,
        ledger=memory,
    )
    if tier is not None:
        tier.begin(cache.num_erased)
    guesses = _guesses_of(scenario)
    has_draft_model = scenario.speculation is not None and scenario.speculation.has_draft_model
    seed = replace(UNKNOWN, drafted=_DRAFTED) if has_draft_model else UNKNOWN
    scheduler = Scheduler(config, cache, seed, guesses)
    if scheduler._drafting is not None:
        # Steps have drafts although they do not pay: the simulation looks for what is wrong, not for what is slow.
        scheduler._drafting.ignore_gains()
    device = SimulatedDevice(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        windows=limits.windows,
        num_slots=limits.max_num_seqs,
        max_step_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        max_draws=config.max_draws,
        token_s=scenario.speculation.token_s if scenario.speculation else TOKEN_S,
        is_lazy=scenario.is_lazy,
        nan_positions={job.request_id: job.nan_position for job in scenario.jobs if job.nan_position is not None},
        watch=watch,
        num_checkpoints=None if limits.checkpoints is None else limits.checkpoints.num_checkpoints,
        memory=memory,
    )
    core = EngineCore(
        scheduler,
        device,
        vocab_size=VOCAB_SIZE,
        depth=depth,
        clock=clock,
        grammars=SimulatedGrammars(tick),
        recorder=recorder,
        guesses=guesses,
        tier=tier,
    )
    return SimulatedEngine(core, scheduler, cache, device, guesses)


def _guesses_of(scenario: Scenario) -> ScriptedGuesses | Guesses | None:
    if scenario.speculation is None:
        return None
    if scenario.speculation.is_scripted:
        is_rare = scenario.speculation.has_draft_model
        return ScriptedGuesses(scenario.seed, scenario.limits.views, is_rare=is_rare)
    return Guesses(looks_at_answers=True)


def _hash_of(limits: Limits) -> Callable[[bytes, bytes], bytes]:
    """The product's hash, or one cut to so few bits."""
    bits = limits.hash_bits
    if bits is None:
        return blake2b_block
    return lambda parent_key, payload: bytes([blake2b_block(parent_key, payload)[0] & ((1 << bits) - 1)])
