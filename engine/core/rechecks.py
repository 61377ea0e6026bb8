"""Loaded pieces that are computed again while the engine is idle, and compared with what the tier has.

A checksum tells that a piece is what its writer wrote. Only this tells that the writer had computed it right. A sample
of the loaded prefixes is computed alone, in plans of one row that the scheduler does not know, into blocks that nobody
else finds. What is found wrong ends the trust in all that came from the same writer, and in the pool's content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from inferd.engine.cache.below import Comparison, Piece, Tier, blocks_before
from inferd.engine.cache.prefix import GONE
from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request
from inferd.engine.sched.plan import Admission, Row, StateCopy, StepPlan, TableUpdate

_FIRST = 2
"""Loaded prefixes that are computed again for certain: a wrong version or a machine at fault shows in them."""
_ONE_IN = 16
"""One in so many later prefixes is computed again."""
_MOST_SAMPLES = 4
"""Prefixes that wait to be computed again. Later ones replace the oldest."""
_MOST_TRIES = 4
"""Times that a prefix is begun, if requests come before its end."""
_LONGEST_S = 30.0
"""Most expected seconds for one prefix. Of a longer one a part is computed."""
_STEP_S = 0.1
"""Expected seconds of one plan: a request that comes meanwhile waits for it."""
_PART_OF_POOL = 8
"""Part of the pool that a prefix may take: that evicts what others may want."""


@dataclass(slots=True)
class RecheckCounts:
    """Sums since the engine began."""

    num_same_tokens: int = 0
    """Tokens of pieces that were the same when they were computed again."""
    num_different: int = 0
    """Pieces that were not."""


@dataclass(slots=True)
class Sample:
    """A loaded prefix."""

    request: Request
    ids: tuple[int, ...]
    """Up to the end of the last piece."""
    pieces: tuple[Piece, ...]
    """The loaded ones, without a gap."""
    num_tries: int = 0


@dataclass(slots=True)
class _Compared:
    """A piece that the tier compares."""

    piece: Piece
    comparison: Comparison


@dataclass(slots=True)
class Course:
    """A sample that is being computed. All positions count tokens of its prefix."""

    sample: Sample
    pieces: tuple[Piece, ...]
    """Those that are computed and compared."""
    end: int
    at: int
    """Tokens computed, or known from the pool."""
    blocks: list[list[int]]
    """The blocks of each cache group. Those before the first of `pieces` are the pool's, or `GONE` if not read."""
    checkpoint: int | None
    """Place for the state behind the last piece, of a model with states."""
    is_begun: bool = False
    compared: list[_Compared] = field(default_factory=list)


class Rechecks:
    """All of one engine."""

    def __init__(
        self,
        cache: KVCache,
        tier: Tier,
        seconds_to_compute: Callable[[int], float],
        step_tokens: int,
        rng: Random | None = None,
    ) -> None:
        """`seconds_to_compute`: expected for so many tokens of prompts. `step_tokens`: most tokens of a plan. `rng`
        chooses the samples."""
        self._cache, self._tier, self._seconds_to_compute = cache, tier, seconds_to_compute
        self._step_tokens = step_tokens
        self._rng = rng or Random(0)
        self._samples: deque[Sample] = deque(maxlen=_MOST_SAMPLES)
        self._course: Course | None = None
        self._num_loaded = 0
        self.counts = RecheckCounts()

    @property
    def holds_blocks(self) -> bool:
        return self._course is not None

    def note_loaded(self, request: Request, pieces: Sequence[Piece]) -> None:
        """These pieces of a request's prefix were loaded. Some prefixes become a sample."""
        self._num_loaded += 1
        if self._num_loaded <= _FIRST or not self._rng.randrange(_ONE_IN):
            end = (pieces[-1].first + pieces[-1].num_blocks) * self._cache.block_size
            self._samples.append(Sample(request, tuple(request.ids[:end]), tuple(pieces)))

    def next_plan(
        self, slot: int, number_step: Callable[[], int], is_known: Callable[[Request], bool]
    ) -> StepPlan | None:
        """A plan of one row in an unused slot; None if there is nothing to compute. `number_step` gives its id.
        `is_known`: whether the worker can compute a request, as its adapter is still there."""
        while self._course is None and self._samples:
            sample = self._samples.popleft()
            self._course = self._begin(sample) if is_known(sample.request) else None
        course = self._course
        if course is None or course.at >= course.end:
            return None
        if not is_known(course.sample.request):
            self._end()  # its adapter has been replaced
            return None
        start = course.at
        course.at = end = min(course.end, start + self._tokens_of_plan())
        saves: tuple[StateCopy, ...] = ()
        if end == course.end and course.checkpoint is not None:
            saves = (StateCopy(slot, course.checkpoint - self._cache.pool.num_blocks),)
        admissions: tuple[Admission, ...] = ()
        updates: tuple[TableUpdate, ...] = ()
        if not course.is_begun:
            course.is_begun = True
            admissions = (
                Admission(slot, "", course.sample.ids[: course.end], course.end, course.sample.request.params),
            )
            updates = tuple(self._updates(slot, course.blocks))
        row = Row(slot, start, end - start, False)
        return StepPlan(number_step(), admissions, updates, (row,), state_saves=saves)

    def computed(self) -> None:
        """The last plan was computed."""
        course = self._course
        assert course is not None
        if course.at < course.end:
            return
        for piece in course.pieces:
            rows = range(piece.first, piece.first + piece.num_blocks)
            places = [of_group[row] for row in rows for of_group in course.blocks]
            is_last = piece is course.pieces[-1]
            places.append(course.checkpoint if is_last and course.checkpoint is not None else GONE)
            course.compared.append(_Compared(piece, self._tier.compare(course.sample.request.salt, piece, places)))

    def settle(self) -> bool | None:
        """Whether the tier had what was computed; None while that is not known, and for a prefix that it has no
        longer."""
        course = self._course
        if course is None or not course.compared or not all(each.comparison.is_done for each in course.compared):
            return None
        results = [each.comparison.take() for each in course.compared]
        num_same = sum(each.piece.num_blocks for each, is_same in zip(course.compared, results, strict=True) if is_same)
        self.counts.num_same_tokens += num_same * self._cache.block_size
        self.counts.num_different += results.count(False)
        self._end()
        if False in results:
            self._samples.clear()
        return None if num_same == results.count(False) == 0 else False not in results

    def give_way(self) -> None:
        """Requests have come: give all blocks back, and begin this prefix anew some time later."""
        course = self._course
        if course is None or course.compared:
            return  # the tier reads the blocks, which takes some milliseconds
        self._end()
        course.sample.num_tries += 1
        if course.sample.num_tries < _MOST_TRIES:
            self._samples.appendleft(course.sample)

    # -- one prefix --------------------------------------------------------------------------------------------------

    def _tokens_of_plan(self) -> int:
        """As many whole blocks as a plan may take."""
        size = self._cache.block_size
        of_time = int(_STEP_S / max(self._seconds_to_compute(size), 1e-9))
        return max(1, min(of_time, self._step_tokens // size)) * size

    def _begin(self, sample: Sample) -> Course | None:
        """Take the blocks for a sample, or for a part of it that is not too large; None if there are none."""
        cache = self._cache
        size, num_groups = cache.block_size, len(cache.windows)
        of_time = int(_LONGEST_S / max(self._seconds_to_compute(size), 1e-9))
        most = min(of_time, cache.pool.num_blocks // _PART_OF_POOL // num_groups)
        first, pieces = 0, list(sample.pieces)
        known: list[list[int]] | None = None
        if pieces[-1].first + pieces[-1].num_blocks > most and cache.states is None:
            # A long prefix takes too long, so this computes a part of it, behind what the pool has.
            first = self._rng.choice(pieces).first
            known = blocks_before(cache, sample.request.salt, sample.ids, first)
        if known is None:
            first, known = 0, [[] for _ in range(num_groups)]
        pieces = [piece for piece in pieces if piece.first >= first and piece.first + piece.num_blocks <= first + most]
        if not pieces:
            return None
        end = pieces[-1].first + pieces[-1].num_blocks
        held = [block_id for of_group in known for block_id in of_group if block_id != GONE]
        cache.lend_known(held)
        taken = cache.lend((end - first) * num_groups)
        if taken is None:
            cache.take_back(held)
            return None
        checkpoint = cache.lend_checkpoint() if pieces[-1].has_state else None
        tables = [of_group + taken[group::num_groups] for group, of_group in enumerate(known)]
        return Course(sample, tuple(pieces), end * size, first * size, tables, checkpoint)

    def _updates(self, slot: int, blocks: Sequence[Sequence[int]]) -> list[TableUpdate]:
        updates: list[TableUpdate] = []
        for group, of_group in enumerate(blocks):
            num_dead = sum(block_id == GONE for block_id in of_group)
            updates.append(TableUpdate(slot, group, num_dead, tuple(of_group[num_dead:])))
        return updates

    def _end(self) -> None:
        """Give all places back."""
        course = self._course
        assert course is not None
        self._cache.take_back([block_id for of_group in course.blocks for block_id in of_group if block_id != GONE])
        if course.checkpoint is not None:
            self._cache.take_back([course.checkpoint])
        self._course = None
