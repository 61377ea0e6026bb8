"""A strict device: it does what a worker does with a plan, on token ids instead of tensors.

A block slot holds the (token id, position, cache group) that a forward pass wrote. Each row writes its own positions.
It then reads back, through the slot's block tables, what each group sees of the context, as attention would. Content
that was never written, was freed, or is about to be overwritten is poison, and reading it fails. Knows no scheduler and
no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from inferd.engine.sched.plan import (
    NO_MASKS,
    Admission,
    Row,
    RowResult,
    RowStatus,
    StepPlan,
    StepResult,
    TableUpdate,
    TokenLogprobs,
    TokenMasks,
)
from tests.sim.grammar import NUM_WORDS, allowed_by
from tests.sim.oracle import VOCAB_SIZE, Views, Windows, logprob_of, next_token, vector_of

Cell = tuple[int, int, int]
"""(token id, position, cache group)."""

_POISON: Cell = (-1, -1, -1)
_NAN: Cell = (-2, -2, -2)


class SimulationError(AssertionError):
    """The engine did something that a correct engine never does."""


@dataclass(slots=True)
class _Slot:
    admission: Admission | None = None
    ids: list[int] = field(default_factory=list)
    """The ids of the sequence that the worker knows: the admission's, and those sampled since."""
    tables: list[list[int]] = field(default_factory=list)
    """Block tables by group. Entries of earlier requests in the slot stay until they are overwritten, as on a real
    device."""
    num_entries: list[int] = field(default_factory=list)
    """Number of entries sent for this admission, by group."""
    num_written: int | None = None
    """Positions whose KV is written; None until the first row says at which one it starts."""
    states: list[Views] = field(default_factory=list)
    """Results of this admission's rows, if a mean of them was requested."""
    is_broken: bool = False
    """A row of this admission gave NaN, so all that it computes later is meaningless."""


class _Handle:
    def __init__(self, device: SimulatedDevice, step_id: int) -> None:
        self._device, self._step_id = device, step_id

    def sample(self, masks: TokenMasks) -> None:
        self._device.sample(self._step_id, masks)

    def wait(self) -> StepResult:
        return self._device.result_of(self._step_id)


class SimulatedDevice:
    """A simulated executor. If `is_lazy`, a step runs when the host waits for it; otherwise when it is launched."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        windows: Windows,
        num_slots: int,
        max_step_tokens: int,
        is_lazy: bool,
        nan_positions: dict[str, int],
        watch: Callable[[StepPlan], None],
    ) -> None:
        """`watch` is called with each plan as it is launched."""
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._cells = [[_POISON] * block_size for _ in range(num_blocks)]
        self._windows = windows
        self._slots = [_Slot(tables=[[] for _ in windows], num_entries=[0] * len(windows)) for _ in range(num_slots)]
        self._is_lazy = is_lazy
        self._nan_positions = nan_positions
        self._watch = watch
        self._queue: list[StepPlan] = []
        self._results: dict[int, StepResult] = {}
        self._sent_tables: dict[tuple[int, int], dict[int, int]] = {}
        """(slot, group) -> entry -> block, including the last launched step, even if it has not run."""
        self._in_use: dict[int, set[int]] = {}
        """Launched steps whose results were not taken -> blocks that their rows read or write."""
        self._num_launched = 0
        self._awaiting: StepPlan | None = None
        """The last step launched, if it has not drawn yet."""
        self._masks: dict[int, TokenMasks] = {}
        """Masks of launched steps that have drawn, or will when they run."""

    # -- the executor's side -----------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> _Handle:
        if self._awaiting is not None:
            raise SimulationError(f"step {plan.step_id} launched before step {self._awaiting.step_id} has drawn")
        if plan.step_id != self._num_launched:
            raise SimulationError(f"step {plan.step_id} launched as number {self._num_launched}")
        if not 1 <= plan.num_tokens <= self._max_step_tokens:
            raise SimulationError(f"a step of {plan.num_tokens} tokens, at most {self._max_step_tokens} fit")
        if len({row.slot for row in plan.rows}) != len(plan.rows):
            raise SimulationError("two rows of one step share a slot")
        self._num_launched += 1
        self._queue.append(plan)
        self._in_use[plan.step_id] = self._blocks_of(plan)
        self._watch(plan)
        if awaits_masks:
            self._awaiting = plan
        else:
            self._masks[plan.step_id] = NO_MASKS
            self._run_eagerly()
        return _Handle(self, plan.step_id)

    def sample(self, step_id: int, masks: TokenMasks) -> None:
        plan, self._awaiting = self._awaiting, None
        if plan is None or plan.step_id != step_id:
            raise SimulationError(f"step {step_id} draws, and does not await masks")
        if len(masks.words) != NUM_WORDS * len(masks.rows) or list(masks.rows) != sorted(set(masks.rows)):
            raise SimulationError(f"{len(masks.words)} words for the rows {masks.rows}")
        if not all(plan.rows[row].samples for row in masks.rows):
            raise SimulationError("a mask for a row that draws nothing")
        self._masks[step_id] = masks
        self._run_eagerly()

    def _run_eagerly(self) -> None:
        if not self._is_lazy:
            self._run_next()

    def result_of(self, step_id: int) -> StepResult:
        if self._awaiting is not None and self._awaiting.step_id <= step_id:
            raise SimulationError(f"step {step_id} is waited for, and has drawn nothing")
        while step_id not in self._results:
            self._run_next()
        del self._in_use[step_id]
        return self._results.pop(step_id)

    def close(self) -> None:
        """There is nothing to close."""

    # -- the simulation's side ---------------------------------------------------------------------------------------

    def poison(self, block_ids: Iterable[int], slots: Iterable[int]) -> None:
        """Poison blocks and slots that, according to the host, no launched step touches any more."""
        for block_id in block_ids:
            self._cells[block_id] = [_POISON] * self._block_size
        for slot in slots:
            self._slots[slot].admission = None
            self._slots[slot].ids = []

    def blocks_in_use(self) -> set[int]:
        """Blocks that launched rows read or write, in steps whose results were not taken."""
        return set().union(*self._in_use.values())

    def _blocks_of(self, plan: StepPlan) -> set[int]:
        for update in plan.table_updates:
            entries = self._sent_tables.setdefault((update.slot, update.group), {})
            entries.update(enumerate(update.block_ids, start=update.first))
        used: set[int] = set()
        for row in plan.rows:
            for group in range(len(self._windows)):
                entries = self._sent_tables.get((row.slot, group), {})
                seen = self._seen(group, row.start, row.start + row.num_tokens)
                needed = {position // self._block_size for position in seen}
                if not needed <= entries.keys():
                    raise SimulationError(f"a row needs entries {needed - entries.keys()} of group {group}: never told")
                used.update(entries[i] for i in needed)
        return used

    # -- a step ------------------------------------------------------------------------------------------------------

    def _run_next(self) -> None:
        plan = self._queue.pop(0)
        for admission in plan.admissions:
            self._admit(admission)
        for update in plan.table_updates:
            self._update_table(update)
        masks = self._masks.pop(plan.step_id)
        allowed = {
            row: allowed_by(masks.words[NUM_WORDS * place : NUM_WORDS * (place + 1)])
            for place, row in enumerate(masks.rows)
        }
        rows = tuple(self._run_row(row, allowed.get(index)) for index, row in enumerate(plan.rows))
        self._results[plan.step_id] = StepResult(plan.step_id, rows, 0.001 + 0.0005 * plan.num_tokens)

    def _admit(self, admission: Admission) -> None:
        slot = self._slots[admission.slot]
        slot.admission, slot.ids, slot.states = admission, list(admission.token_ids), []
        slot.num_entries, slot.num_written, slot.is_broken = [0] * len(self._windows), None, False

    def _update_table(self, update: TableUpdate) -> None:
        slot = self._slots[update.slot]
        table, end = slot.tables[update.group], update.first + len(update.block_ids)
        table += [-1] * (end - len(table))
        table[update.first : end] = update.block_ids
        slot.num_entries[update.group] = end
        if slot.num_written is not None:
            for block_id in update.block_ids:
                self._cells[block_id] = [_POISON] * self._block_size

    def _run_row(self, row: Row, allowed: Sequence[int] | None) -> RowResult:
        slot = self._slots[row.slot]
        admission = slot.admission
        if admission is None:
            raise SimulationError(f"a row runs on slot {row.slot}, which nobody has")
        end = row.start + row.num_tokens
        if end > len(slot.ids):
            raise SimulationError(f"{admission.request_id}: a row up to {end} where {len(slot.ids)} tokens exist")
        if slot.num_written is None:
            self._wipe(slot, row.start)
        elif row.start != slot.num_written:
            raise SimulationError(f"{admission.request_id}: a row at {row.start} where {slot.num_written} are written")
        nan_position = self._nan_positions.get(admission.request_id)
        is_nan = slot.is_broken or (row.samples and end == nan_position)
        self._write(slot, row.start, end, is_nan=is_nan)
        if is_nan:
            slot.is_broken = True
            slot.ids += [0] * row.samples
            return RowResult(status=RowStatus.NUMERICAL_ERROR)
        return self._sample(slot, admission, row, self._read(slot, admission, row.start, end), allowed)

    def _sample(
        self, slot: _Slot, admission: Admission, row: Row, read: list[dict[int, int]], allowed: Sequence[int] | None
    ) -> RowResult:
        params, end = admission.params, row.start + row.num_tokens
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if params.prompt_logprobs is not None:
            positions = range(row.start + 1, min(end + 1, admission.num_prompt))
            prompt_logprobs = tuple(_logprob(self._views(read, p), slot.ids[p]) for p in positions)
        if not row.samples:
            return RowResult(prompt_logprobs=prompt_logprobs, embedding=self._pool(slot, admission, row, read))
        if end != len(slot.ids):
            raise SimulationError(f"{admission.request_id}: sampled behind {end} of {len(slot.ids)} tokens")
        views = self._views(read, end)
        if allowed is not None and not allowed:
            slot.ids.append(0)
            return RowResult(status=RowStatus.NOTHING_TO_DRAW, prompt_logprobs=prompt_logprobs)
        token_id = next_token(views, params.seed, range(VOCAB_SIZE) if allowed is None else allowed)
        slot.ids.append(token_id)
        logprobs = (_logprob(views, token_id),) if params.logprobs is not None else ()
        return RowResult((token_id,), RowStatus.OK, logprobs, prompt_logprobs)

    def _pool(self, slot: _Slot, admission: Admission, row: Row, read: list[dict[int, int]]) -> bytes:
        pooling, end = admission.params.pooling, row.start + row.num_tokens
        if pooling is None:
            return b""
        if pooling.how == "mean":
            slot.states += [self._views(read, position) for position in range(row.start + 1, end + 1)]
        else:
            slot.states = [self._views(read, end)]
        return vector_of(slot.states) if end == admission.num_prompt else b""

    # -- block slots -------------------------------------------------------------------------------------------------

    def _wipe(self, slot: _Slot, start: int) -> None:
        """Erase the admission's own blocks: only content before its first row's start is cached."""
        slot.num_written = start
        for table, num_entries in zip(slot.tables, slot.num_entries, strict=True):
            for position in range(start, num_entries * self._block_size):
                self._cells[table[position // self._block_size]][position % self._block_size] = _POISON

    def _write(self, slot: _Slot, start: int, end: int, *, is_nan: bool) -> None:
        size = self._block_size
        for group, table in enumerate(slot.tables):
            if (end - 1) // size >= len(table):
                raise SimulationError(f"a row writes position {end - 1} behind its {len(table)} blocks, group {group}")
            for position in range(start, end):
                cell = _NAN if is_nan else (slot.ids[position], position, group)
                self._cells[table[position // size]][position % size] = cell
        slot.num_written = end

    def _seen(self, group: int, start: int, end: int) -> range:
        """Positions that the queries `start` to `end - 1` see in a group, including their own."""
        window = self._windows[group]
        return range(0 if window is None else max(0, start - window + 1), end)

    def _read(self, slot: _Slot, admission: Admission, start: int, end: int) -> list[dict[int, int]]:
        """The tokens that attention finds for a row, by group and position. A misplaced one reads as another token.

        Positions that only earlier queries see do not affect the sampled token, so they are checked here.
        """
        size, read = self._block_size, []
        for group, table in enumerate(slot.tables):
            tokens: dict[int, int] = {}
            for position in self._seen(group, start, end):
                block_id = table[position // size]
                cell = self._cells[block_id][position % size] if block_id >= 0 else _POISON
                if cell in (_POISON, _NAN):
                    what = f"position {position} of {end} reads {'NaN' if cell == _NAN else 'poison'} in group {group}"
                    raise SimulationError(f"{admission.request_id}: {what}, block size {size}")
                token_id, *place = cell
                tokens[position] = token_id if place == [position, group] else -token_id - 1
            for position in self._seen(group, start, self._seen(group, end - 1, end).start):
                if tokens[position] != slot.ids[position]:
                    raise SimulationError(f"{admission.request_id}: position {position} reads {tokens[position]}")
            read.append(tokens)
        return read

    def _views(self, read: list[dict[int, int]], end: int) -> Views:
        """The tokens that each group sees from the query at `end - 1`."""
        return tuple(tuple(tokens[i] for i in self._seen(g, end - 1, end)) for g, tokens in enumerate(read))


def _logprob(views: Views, token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob_of(views, token_id), 1, ())
