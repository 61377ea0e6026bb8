"""A strict device: it does what a worker does with a plan, on token ids instead of tensors.

Each row writes its own positions. It then reads back, through the slot's block tables, what each group sees of the
context, as attention would (`cells`). Rejected drafts stay written until the next row overwrites them. A draft model
has cells of its own, in the blocks of the first group, and checks that it reads the sequence there. Knows no scheduler
and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

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
from inferd.engine.speculation.ports import MOST_DRAFTS
from tests.sim.cells import Cells, SimulationError, Tokens
from tests.sim.grammar import NUM_WORDS, allowed_by
from tests.sim.left_memory import LeftMemory
from tests.sim.oracle import STATE, VOCAB_SIZE, Views, Windows, logprob_of, next_token, vector_of, views_of
from tests.sim.states import State, States, states_in

_ANY = range(VOCAB_SIZE)
_Logprobs = tuple[TokenLogprobs, ...]


@dataclass(slots=True)
class _Slot:
    admission: Admission | None = None
    ids: list[int] = field(default_factory=list)
    """The ids of the sequence that the worker knows: the admission's, and those sampled since. While a row runs, its
    drafts too."""
    tables: list[list[int]] = field(default_factory=list)
    """Block tables by group. Entries of earlier requests in the slot stay until they are overwritten, as on a real
    device."""
    num_entries: list[int] = field(default_factory=list)
    """Number of entries sent for this admission, by group."""
    num_written: int | None = None
    """Positions whose KV is written; None until the first row says at which one it starts."""
    state: State = None
    """The working state. That of an earlier request stays, as on a real device."""
    state_to_save: State = None
    """The working state before the drafts of the row that ran last."""
    states: list[Views] = field(default_factory=list)
    """Results of this admission's rows, if a mean of them was requested."""
    is_broken: bool = False
    """A row of this admission gave NaN, so all that it computes later is meaningless."""


_FOUND_DONE = 8
"""The host measures next to no time for one in so many steps."""


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
        max_model_len: int,
        max_draws: int,
        token_s: float,
        is_lazy: bool,
        nan_positions: dict[str, int],
        watch: Callable[[StepPlan], None],
        num_checkpoints: int | None = None,
        memory: LeftMemory | None = None,
    ) -> None:
        """`num_checkpoints`: those of a model with recurrent state, None for another. `memory`: that of the engines
        before, which this one takes over. `watch` is called with each plan
        as it is launched. `max_draws`: tokens that a step with drafts may draw. `token_s`: seconds that each token adds
        to a step."""
        self._block_size, self._token_s = block_size, token_s
        self._max_step_tokens, self._max_model_len, self._max_draws = max_step_tokens, max_model_len, max_draws
        self._cells = Cells(num_blocks, block_size, windows if num_checkpoints is None else (*windows, STATE))
        self._draft_cells = Cells(num_blocks, block_size, (None,))
        self._states = None if num_checkpoints is None else States(num_checkpoints)
        if memory is not None:
            self._cells, self._states = memory.take_over(self._cells, self._states)
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
        self._untaken: dict[int, StepPlan] = {}
        """The plans of these steps."""
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
        self._check_drafts(plan)
        self._num_launched += 1
        self._queue.append(plan)
        self._in_use[plan.step_id] = self._blocks_of(plan)
        if self._states is not None:
            self._states.launched(plan)
        self._untaken[plan.step_id] = plan
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
        if len(masks.words) != NUM_WORDS * len(masks.draws) or list(masks.draws) != sorted(set(masks.draws)):
            raise SimulationError(f"{len(masks.words)} words for the draws {masks.draws}")
        num_draws = sum(row.num_draws for row in plan.rows)
        if masks.draws and masks.draws[-1] >= num_draws:
            raise SimulationError(f"a mask for draw {masks.draws[-1]}, and the step has {num_draws}")
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
        del self._in_use[step_id], self._untaken[step_id]
        return self._results.pop(step_id)

    def close(self) -> None:
        """There is nothing to close."""

    # -- the simulation's side ---------------------------------------------------------------------------------------

    def poison(self, block_ids: Iterable[int], slots: Iterable[int], checkpoint_ids: Iterable[int] = ()) -> None:
        """Poison blocks and slots that, according to the host, no launched step touches any more, and checkpoints that
        no step launched from now on loads."""
        for block_id in block_ids:
            self._cells.poison((block_id,))
            self._draft_cells.poison((block_id,))
        if self._states is not None:
            self._states.free = frozenset(checkpoint_ids)
        for slot in slots:
            self._slots[slot].admission = None
            self._slots[slot].ids = []

    def blocks_in_use(self) -> set[int]:
        """Blocks that launched rows read or write, in steps whose results were not taken."""
        return set().union(*self._in_use.values())

    def _check_drafts(self, plan: StepPlan) -> None:
        """Drafts follow an id that the host knows, and nothing is launched behind them before they are verified. So a
        request with drafts has no other row whose result was not taken."""
        launched = [row for each in self._untaken.values() for row in each.rows]
        drafting = {row.slot for row in (*launched, *plan.rows) if row.num_drafts}
        for row in plan.rows:
            if row.slot in drafting and any(other.slot == row.slot for other in launched):
                raise SimulationError(f"slot {row.slot} has drafts beside a row whose result is not known")
            if row.num_drafts and not (row.samples and row.num_tokens == 1 + row.num_drafts <= 1 + MOST_DRAFTS):
                raise SimulationError(f"{row.num_drafts} drafts in a row of {row.num_tokens} tokens")
            if row.draft_ids and row.num_to_draft:
                raise SimulationError("a row has guesses and drafts of the draft model")
        num_draws = sum(row.num_draws for row in plan.rows)
        if plan.has_drafts and num_draws > self._max_draws:
            raise SimulationError(f"a step with drafts draws {num_draws} tokens, at most {self._max_draws}")

    def _blocks_of(self, plan: StepPlan) -> set[int]:
        for update in plan.table_updates:
            entries = self._sent_tables.setdefault((update.slot, update.group), {})
            entries.update(enumerate(update.block_ids, start=update.first))
        used: set[int] = set()
        for row in plan.rows:
            for group in range(len(self._windows)):
                entries = self._sent_tables.get((row.slot, group), {})
                seen = self._cells.seen(group, row.start, row.start + row.num_tokens)
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
        if self._states is not None:
            for slot, state in self._states.begin(plan).items():
                self._slots[slot].state = state
        masks = self._masks.pop(plan.step_id)
        allowed = {
            draw: allowed_by(masks.words[NUM_WORDS * place : NUM_WORDS * (place + 1)])
            for place, draw in enumerate(masks.draws)
        }
        results, first_draw = list[RowResult](), 0
        for row in plan.rows:
            draws = range(first_draw, first_draw + row.num_draws)
            results.append(self._run_row(row, [allowed.get(draw, _ANY) for draw in draws]))
            first_draw += row.num_draws
        if self._states is not None:
            self._states.end(plan, {row.slot: self._slots[row.slot].state_to_save for row in plan.rows})
        # A host that was late for the end of a step finds the next one done, if it was launched before that end.
        is_found_done = plan.step_id % _FOUND_DONE == 0 and not plan.has_drafts
        duration_s = 1e-6 if is_found_done else 0.001 + self._token_s * plan.num_tokens
        self._results[plan.step_id] = StepResult(plan.step_id, tuple(results), duration_s)

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
            self._cells.poison(update.block_ids)
            if update.group == 0:
                self._draft_cells.poison(update.block_ids)

    def _run_row(self, row: Row, allowed: Sequence[Sequence[int]]) -> RowResult:
        """`allowed`: tokens that may be drawn, for each of the row's draws."""
        slot = self._slots[row.slot]
        admission = slot.admission
        if admission is None:
            raise SimulationError(f"a row runs on slot {row.slot}, which nobody has")
        first, end = row.start + row.num_tokens - row.num_drafts, row.start + row.num_tokens
        if first > len(slot.ids):
            raise SimulationError(f"{admission.request_id}: a row up to {first} where {len(slot.ids)} tokens exist")
        if row.samples and first != len(slot.ids):
            raise SimulationError(f"{admission.request_id}: draws behind {first} of {len(slot.ids)} tokens")
        if row.samples and end >= self._longest(admission):
            raise SimulationError(f"{admission.request_id}: draws behind {end} tokens")
        if slot.num_written is None:
            self._cells.wipe(slot.tables, slot.num_entries, row.start)
            self._draft_cells.wipe(slot.tables[:1], slot.num_entries[:1], row.start)
        elif row.start != slot.num_written:
            raise SimulationError(f"{admission.request_id}: a row at {row.start} where {slot.num_written} are written")
        if row.num_to_draft:
            row = row._replace(draft_ids=self._make_drafts(slot, admission, row))
        slot.ids += row.draft_ids
        num_finite = self._num_finite(slot, row)
        is_nan = slot.is_broken or num_finite < min(row.num_draws, 1)
        first_nan = row.start if is_nan else end - row.num_draws + num_finite
        self._cells.write(slot.tables, slot.ids, row.start, end, first_nan)
        slot.num_written = end
        if is_nan:
            slot.is_broken, slot.state, slot.state_to_save = True, None, None
            slot.ids[first:] = [0] if row.samples else slot.ids[first:]
            return RowResult(status=RowStatus.NUMERICAL_ERROR)
        read = self._cells.read(slot.tables, slot.ids, row.start, first_nan, admission.request_id)
        if self._states is not None:
            states = states_in(slot.state, slot.ids, row.start, end, admission.request_id)
            slot.state = slot.state_to_save = states[first]
            read.append(states)
        prompt_logprobs = self._score(slot, admission, row, read)
        if not row.samples:
            return RowResult(prompt_logprobs=prompt_logprobs, embedding=self._pool(slot, admission, row, read))
        result = self._draw(admission, row, read, allowed[:num_finite])
        slot.ids[first:] = result.token_ids or (0,)
        slot.num_written = len(slot.ids) - 1
        if self._states is not None:
            slot.state = self._states.accepted(read[-1], first, len(slot.ids) - 1, end)
        return result._replace(prompt_logprobs=prompt_logprobs)

    def _make_drafts(self, slot: _Slot, admission: Admission, row: Row) -> tuple[int, ...]:
        """Drafts of the draft model, which are right, wrong, or wrong in part."""
        name, seed = admission.request_id, admission.params.seed
        if admission.params.grammar or not 0 <= row.draft_start <= row.start:
            raise SimulationError(f"{name}: drafts from {row.draft_start} on, at {row.start}")
        rng, ids = Random(f"draft {name} {len(slot.ids)}"), list(slot.ids)
        wrong = rng.choice((0.0, 0.0, 0.0, 0.3, 1.0))
        for _ in range(row.num_to_draft):
            is_wrong = rng.random() < wrong
            ids.append(rng.choice(_ANY) if is_wrong else next_token(views_of(tuple(ids), self._windows), seed))
        end = row.start + row.num_to_draft
        self._draft_cells.write(slot.tables[:1], ids, row.draft_start, end, end)
        (read,) = self._draft_cells.read(slot.tables[:1], ids, row.start, end, f"draft of {name}")
        if [read[position] for position in range(end)] != ids[:end]:
            raise SimulationError(f"{name}: the draft model reads {read}, not {ids[:end]}")
        return tuple(ids[len(slot.ids) :])

    def _num_finite(self, slot: _Slot, row: Row) -> int:
        """Number of draws of a row before the one whose logits are NaN."""
        assert slot.admission is not None
        first = row.start + row.num_tokens - row.num_drafts
        nan_position = self._nan_positions.get(slot.admission.request_id)
        if nan_position is None or not first <= nan_position < first + row.num_draws:
            return row.num_draws
        return nan_position - first

    def _longest(self, admission: Admission) -> int:
        """Most tokens of a sequence. The last is drawn and never computed."""
        return min(admission.num_prompt + admission.params.max_tokens, self._max_model_len)

    def _score(self, slot: _Slot, admission: Admission, row: Row, read: Tokens) -> _Logprobs:
        """Logprobs of the prompt's tokens behind those that a row computes, if requested."""
        if admission.params.prompt_logprobs is None:
            return ()
        positions = range(row.start + 1, min(row.start + row.num_tokens + 1, admission.num_prompt))
        return tuple(_logprob(self._cells.views(read, position), slot.ids[position]) for position in positions)

    def _draw(self, admission: Admission, row: Row, read: Tokens, allowed: Sequence[Sequence[int]]) -> RowResult:
        """Draw as a worker does, behind each draft, from what is read there. The result ends before the first draw
        that fails; a failed draw fails the row only if it is the first."""
        params, first = admission.params, row.start + row.num_tokens - len(row.draft_ids)
        drawn, logprobs = list[int](), list[TokenLogprobs]()
        for number, choices in enumerate(allowed):
            if number < len(row.draft_ids) and row.draft_ids[number] not in choices:
                raise SimulationError(f"{admission.request_id}: draft {row.draft_ids[number]} is forbidden")
            if not choices:
                break
            views = self._cells.views(read, first + number)
            drawn.append(next_token(views, params.seed, choices))
            logprobs += [_logprob(views, drawn[-1])] if params.logprobs is not None else []
        if not drawn:
            return RowResult(status=RowStatus.NOTHING_TO_DRAW)
        num_accepted = row.accepted(drawn)
        return RowResult(tuple(drawn[:num_accepted]), logprobs=tuple(logprobs[:num_accepted]))

    def _pool(self, slot: _Slot, admission: Admission, row: Row, read: Tokens) -> bytes:
        pooling, end = admission.params.pooling, row.start + row.num_tokens
        if pooling is None:
            return b""
        if pooling.how == "mean":
            slot.states += [self._cells.views(read, position) for position in range(row.start + 1, end + 1)]
        else:
            slot.states = [self._cells.views(read, end)]
        return vector_of(slot.states) if end == admission.num_prompt else b""


def _logprob(views: Views, token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob_of(views, token_id), 1, ())
