"""Planted bugs that only a model with recurrent state can have. See `tests.sim.planting`."""

from __future__ import annotations

from collections.abc import Callable

from inferd.engine.cache import table as table_module
from inferd.engine.cache.group import PrefixMatch, num_usable
from inferd.engine.cache.prefix import GONE, Node, PrefixIndex
from inferd.engine.cache.state_checkpoints import SequenceCheckpoints, StateCheckpoints
from inferd.engine.cache.table import BlockTable, KVCache
from inferd.engine.sched.plan import StepPlan
from inferd.engine.sched.step_planner import PlanBuilder
from tests.sim.planting import Patch, Plants

plant = Plants()


def _believe_everything(patch: Patch) -> None:
    """Switch off the cache's own checks, so that only the device's states can reveal the bug."""
    for books in (BlockTable, PrefixIndex, KVCache):
        patch.setattr(books, "check", lambda self: None)


@plant
def hit_without_a_checkpoint(patch: Patch) -> None:
    """False hit: KV alone decides, and the request continues the state of an earlier one in its slot."""
    patch.setattr(table_module, "num_usable_states", num_usable)


@plant
def checkpoint_is_not_loaded(patch: Patch) -> None:
    """Stale state: the plan lacks the copy from the checkpoint."""

    def finish(self: PlanBuilder, step_id: int) -> StepPlan:
        self.state_loads.clear()
        return original(self, step_id)

    original = PlanBuilder.finish
    patch.setattr(PlanBuilder, "finish", finish)


@plant
def checkpoint_is_not_saved(patch: Patch) -> None:
    """Stale state: the index finds a checkpoint that no step has written."""

    def finish(self: PlanBuilder, step_id: int) -> StepPlan:
        self.state_saves.clear()
        return original(self, step_id)

    original = PlanBuilder.finish
    patch.setattr(PlanBuilder, "finish", finish)


@plant
def checkpoint_one_block_early(patch: Patch) -> None:
    """Wrong boundary: a checkpoint is found one block before the tokens that it holds."""
    add = PrefixIndex.add_checkpoint

    def early(self: PrefixIndex, node: Node | str, checkpoint_id: int) -> bool:
        before = node.parent if isinstance(node, Node) and isinstance(node.parent, Node) else node
        return add(self, before, checkpoint_id)

    patch.setattr(PrefixIndex, "add_checkpoint", early)


@plant
def chunk_runs_past_the_boundary(patch: Patch) -> None:
    """Wrong boundary: a chunk is not cut, and the state behind it counts as that of the boundary before."""
    patch.setattr(BlockTable, "chunk", lambda self, start, num_tokens: num_tokens)
    leave = BlockTable.leave_checkpoint

    def rounded(self: BlockTable, position: int, num_tokens: int) -> int | None:
        return leave(self, position // self._cache.block_size * self._cache.block_size, num_tokens)

    patch.setattr(BlockTable, "leave_checkpoint", rounded)


@plant
def evicted_checkpoint_stays_in_its_node(patch: Patch) -> None:
    """Shared state: a checkpoint was given to another prefix, and the node still names it."""

    def keep(self: PrefixIndex, checkpoint_id: int) -> list[int]:
        del self._by_checkpoint[checkpoint_id]
        return []

    patch.setattr(PrefixIndex, "evict_checkpoint", keep)
    _believe_everything(patch)


@plant
def superseded_checkpoint_stays_in_its_node(patch: Patch) -> None:
    """Shared state: a superseded checkpoint is given to another prefix, and the node still names it."""

    def free(self: StateCheckpoints, checkpoint_id: int) -> None:
        if checkpoint_id not in self._kept:
            self.pool.clear_content(checkpoint_id)

    patch.setattr(StateCheckpoints, "supersede", free)
    _believe_everything(patch)


@plant
def checkpoint_is_taken_while_it_is_written(patch: Patch) -> None:
    """Shared state: two launched steps write the states of two prefixes to one checkpoint."""

    def take(self: StateCheckpoints, index: PrefixIndex, drop_blocks: Callable[[list[int]], None]) -> int | None:
        checkpoint_id = original(self, index, drop_blocks)
        if checkpoint_id is not None:
            self.pool._empty.append(checkpoint_id)
        return checkpoint_id

    original = StateCheckpoints.take
    patch.setattr(StateCheckpoints, "take", take)
    patch.setattr("inferd.engine.cache.pool.BlockPool.check", lambda self: None)
    _believe_everything(patch)


@plant
def checkpoint_of_a_dropped_node_stays(patch: Patch) -> None:
    """Leak: a checkpoint is never free again after its blocks were evicted."""

    def made(self: KVCache, *args: object, **options: object) -> None:
        original(self, *args, **options)
        self.index._drop_checkpoint = lambda checkpoint_id: None

    original = KVCache.__init__
    patch.setattr(KVCache, "__init__", made)
    _believe_everything(patch)


@plant
def launched_checkpoints_are_not_given_back(patch: Patch) -> None:
    """Leak: a request that ends with a launched step keeps the checkpoint that the step writes."""
    patch.setattr(SequenceCheckpoints, "launched", ())
    _believe_everything(patch)


@plant
def match_names_the_first_checkpoint(patch: Patch) -> None:
    """Wrong boundary: of several checkpoints in a hit, the first is loaded."""
    match = BlockTable.match

    def first(self: BlockTable) -> PrefixMatch:
        found = match(self)
        ids = [node.checkpoint_id for node in found.nodes if node.checkpoint_id != GONE]
        return PrefixMatch(found.nodes, found.num_tokens, found.num_unheld, ids[0] if ids else GONE, found.num_known)

    patch.setattr(BlockTable, "match", first)
