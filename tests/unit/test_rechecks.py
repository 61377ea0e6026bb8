"""Loaded prefixes that are computed again while idle: which parts, in which blocks, and what follows."""

from __future__ import annotations

from random import Random

import pytest

from inferd.engine.cache.below import PIECE_BLOCKS, Piece, pieces_of
from inferd.engine.cache.prefix import GONE, ChainKeys
from inferd.engine.cache.state_checkpoints import StateCheckpointRules
from inferd.engine.cache.table import KVCache
from inferd.engine.core.rechecks import Rechecks
from inferd.engine.request import Request
from inferd.engine.sched.plan import StepPlan
from tests.unit.test_left_content import computed, num_hit, request
from tests.unit.test_prefix_loads import Below

BLOCK = 2
PIECE_TOKENS = PIECE_BLOCKS * BLOCK
IDS = tuple(range(3 * PIECE_TOKENS + 1))
NUM_BLOCKS = 400


class World:
    def __init__(
        self,
        token_s: float = 0.01,
        num_blocks: int = NUM_BLOCKS,
        windows: tuple[int | None, ...] = (None,),
        rules: StateCheckpointRules | None = None,
        step_tokens: int = 1000,
    ) -> None:
        self.cache = KVCache(num_blocks, BLOCK, windows, step_tokens=64, checkpoints=rules)
        self.below, self.has_adapters = Below(), True
        self.has_states = rules is not None
        self.rechecks = Rechecks(self.cache, self.below, lambda tokens: tokens * token_s, step_tokens, Random(1))

    def note(self, ids: tuple[int, ...] = IDS, salt: str = "") -> tuple[Piece, ...]:
        """A request whose whole prefix was loaded."""
        asked = request(ids, salt)
        keys = ChainKeys(self.cache.index, salt, ids, BLOCK)
        end = len(ids) // BLOCK
        starts = range(0, end, PIECE_BLOCKS)
        loaded = tuple(next(pieces_of(keys, start, end, has_states=self.has_states)) for start in starts)
        self.rechecks.note_loaded(asked, loaded)
        return loaded

    def plan(self) -> StepPlan | None:
        def is_known(asked: Request) -> bool:
            return self.has_adapters

        plan = self.rechecks.next_plan(3, lambda: 0, is_known)
        self.cache.check()
        if plan is not None:
            self.rechecks.computed()
        return plan

    def plans(self) -> list[StepPlan]:
        return list(iter(self.plan, None))

    def settle(self, *results: bool | None) -> bool | None:
        for compared, result in zip(self.below.compared, results, strict=True):
            compared.is_done, compared.result = True, result
        settled = self.rechecks.settle()
        self.cache.check()
        return settled


def test_a_loaded_prefix_is_computed_alone_and_cold_and_compared() -> None:
    world = World()
    held = computed(world.cache, IDS)
    loaded = world.note(salt="tenant")
    plans = world.plans()
    rows = [row for plan in plans for row in plan.rows]
    assert [(row.start, row.start + row.num_tokens) for row in rows] == [
        (start, min(start + 10, 3 * PIECE_TOKENS)) for start in range(0, 3 * PIECE_TOKENS, 10)
    ], "a tenth of a second each"
    assert {(row.slot, row.samples) for row in rows} == {(3, False)}
    assert [len(plan.admissions) for plan in plans] == [1] + [0] * (len(plans) - 1)
    assert plans[0].admissions[0].token_ids == IDS[:-1]
    (update,) = plans[0].table_updates
    blocks = update.block_ids
    assert update.first == 0 and not set(blocks) & set(held.block_ids[0])
    assert [(each.salt, each.piece) for each in world.below.compared] == [("tenant", piece) for piece in loaded]
    places = [list(each.places) for each in world.below.compared]
    assert places == [[*blocks[piece.first : piece.first + PIECE_BLOCKS], GONE] for piece in loaded]
    assert world.rechecks.settle() is None and world.rechecks.holds_blocks
    assert world.settle(True, True, True) is True
    assert not world.rechecks.holds_blocks and world.rechecks.counts.num_same_tokens == 3 * PIECE_TOKENS
    held.release()
    assert world.cache.pool.num_held == 0


def test_a_difference_is_counted_and_ends_the_samples() -> None:
    world = World()
    world.note()
    world.note(salt="b")
    world.plans()
    assert world.settle(True, False, None) is False
    assert world.rechecks.counts.num_different == 1 and world.rechecks.counts.num_same_tokens == PIECE_TOKENS
    assert world.plans() == [], "the others came from the same tier"


def test_nothing_is_known_of_pieces_that_are_gone() -> None:
    world = World()
    world.note()
    world.plans()
    assert world.settle(None, None, None) is None
    assert world.rechecks.counts.num_different == 0


def test_requests_get_the_blocks_at_once_and_the_prefix_is_begun_anew() -> None:
    world = World()
    world.note()
    for _ in range(4):
        assert world.plan() is not None and world.cache.pool.num_held
        world.rechecks.give_way()
        assert world.cache.pool.num_held == 0
    assert world.plans() == [], "it was tried often enough"


def test_blocks_are_kept_while_they_are_compared() -> None:
    world = World()
    world.note()
    world.plans()
    world.rechecks.give_way()
    assert world.cache.pool.num_held == 3 * PIECE_BLOCKS
    world.settle(True, True, True)
    assert world.cache.pool.num_held == 0


def test_of_a_long_prefix_a_part_is_computed_behind_what_the_pool_has() -> None:
    world = World(token_s=1.0)
    held = computed(world.cache, IDS)
    firsts = set()
    for _ in range(60):
        world.note()
        plans = world.plans()
        if not plans:
            continue
        start = plans[0].rows[0].start
        firsts.add(start)
        (update,) = plans[0].table_updates
        assert update.block_ids[: start // BLOCK] == held.block_ids[0][: start // BLOCK]
        assert not set(update.block_ids[start // BLOCK :]) & set(held.block_ids[0])
        assert [row.num_tokens for plan in plans for row in plan.rows] == [BLOCK] * (PIECE_TOKENS // BLOCK)
        assert world.settle(True) is True
        world.below.compared.clear()
    assert firsts == {0, PIECE_TOKENS, 2 * PIECE_TOKENS}
    world.note()
    held.release()
    world.cache.reset()
    assert all(plan.rows[0].start < PIECE_TOKENS for plan in world.plans()), "the pool has lost what is before it"


def test_a_window_needs_only_the_blocks_that_it_sees() -> None:
    world = World(token_s=1.0, windows=(None, 4))
    computed(world.cache, IDS)
    for _ in range(40):
        world.note()
        plans = world.plans()
        if plans and plans[0].rows[0].start:
            full, windowed = plans[0].table_updates
            start = plans[0].rows[0].start // BLOCK
            assert full.first == 0 and 0 < windowed.first < start
            known = [world.cache.index.holds(block_id) for block_id in windowed.block_ids]
            assert known == [True] * (start - windowed.first) + [False] * PIECE_BLOCKS
            break
        world.settle(*[True] * len(world.below.compared))
        world.below.compared.clear()
    else:
        pytest.fail("no part behind the beginning was computed")


def test_a_state_is_saved_behind_the_last_piece() -> None:
    world = World(rules=StateCheckpointRules(4, PIECE_TOKENS))
    world.note()
    plans = world.plans()
    assert [len(plan.state_saves) for plan in plans] == [0] * (len(plans) - 1) + [1]
    (save,) = plans[-1].state_saves
    assert save.slot == 3
    assert [each.places[-1] for each in world.below.compared] == [GONE, GONE, NUM_BLOCKS + save.checkpoint_id]
    world.settle(True, True, True)


def test_a_sample_waits_for_its_adapter_no_longer_than_that_is_there() -> None:
    world = World()
    world.note()
    world.has_adapters = False
    assert world.plans() == []
    world.has_adapters = True
    assert world.plans() == [], "it may be another adapter by now"


def test_a_prefix_whose_adapter_is_replaced_is_computed_no_further() -> None:
    world = World()
    world.note()
    assert world.plan() is not None
    world.has_adapters = False
    assert world.plan() is None and world.cache.pool.num_held == 0 and world.below.compared == []


def test_few_prefixes_become_samples_and_few_wait() -> None:
    world = World()
    num_computed = 0
    for _ in range(320):
        world.note()
        if world.plans():
            num_computed += 1
            world.settle(True, True, True)
            world.below.compared.clear()
    assert 10 < num_computed < 40
    for _ in range(320):
        world.note()
    for _ in range(4):
        assert world.plans()
        world.settle(True, True, True)
        world.below.compared.clear()
    assert world.plans() == []


def test_no_more_than_a_part_of_the_pool_is_taken() -> None:
    world = World(num_blocks=8 * PIECE_BLOCKS)
    world.note()
    world.plans()
    assert [each.piece.first for each in world.below.compared] == [0]
    world = World(num_blocks=8 * PIECE_BLOCKS - 8)
    world.note()
    assert world.plans() == []


def test_nobody_finds_blocks_that_are_distrusted() -> None:
    world = World()
    held = computed(world.cache, IDS)
    computed(world.cache, IDS[:9], salt="b").release()
    world.cache.distrust()
    world.cache.check()
    assert num_hit(world.cache, IDS) == 0 == num_hit(world.cache, IDS[:9], salt="b")
    held.release()
    world.cache.check()
    assert world.cache.pool.num_empty == NUM_BLOCKS
