"""Runs a step plan: fills slots, builds the batch, runs the decoder, samples, and copies the results to the host.

Every tensor is built from the plan's rows in their order, so row i of a result is row i of the plan. Knows only the
slots of requests, and no scheduling.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.lora.adapters import Adapters
from inferd.engine.models.loader import Progress
from inferd.engine.sample.logprobs import Logprobs
from inferd.engine.sample.sampler import EMPTY, FAILED, Masks
from inferd.engine.sched.plan import (
    NO_MASKS,
    Row,
    RowResult,
    RowStatus,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMasks,
)
from inferd.engine.worker.device import Device
from inferd.engine.worker.draft_heads import HeadDrafts
from inferd.engine.worker.draft_model import DraftModel
from inferd.engine.worker.followers import Followers
from inferd.engine.worker.graphs import StepGraphs, run_layers, uses_adapters
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.mixed_graphs import MixedGraphs
from inferd.engine.worker.pooling import Pooled, Pooler
from inferd.engine.worker.slots import Batch
from inferd.kernels.cpu import native
from inferd.kernels.gpu import from_host

_SCORED_ROWS = 32
"""Number of prompt positions whose logits exist at once: 256 with a vocabulary of 152,000 would take over a
gigabyte."""
_PEAK_STEPS = 64
"""The loads of experts are looked at once in so many steps."""
_FAULTS = {FAILED: RowStatus.NUMERICAL_ERROR, EMPTY: RowStatus.NOTHING_TO_DRAW}


class _Computed(NamedTuple):
    """Results of a step before its S sampling rows are drawn."""

    logits: Tensor | None
    """[S, V] fp32; None if no row samples."""
    outcomes: Tensor | None = None
    """[S] outcomes if the step was recorded with its draws, which hold for plain rows only; else None."""
    scored: Mapping[int, Sequence[Logprobs]] = MappingProxyType({})
    """Index of a row in the plan -> its prompt logprobs."""
    pooled: Pooled | None = None
    """Pooled vectors of the rows that end a pooled prompt."""
    drafts: Tensor | None = None
    """[N] int64: drafts that the worker made, of the rows that ask for them, in their order."""
    read: Tensor | None = None
    """[T, states * hidden]: hidden states that a draft head reads, in the order of the step's tokens."""


class _Draw(NamedTuple):
    """One token to draw."""

    slot: int
    position: int


class _Drawn(NamedTuple):
    """Results of a step's S sampling rows, on the device."""

    outcomes: Tensor
    """[S] int64: `SampleResult.outcomes`."""
    logprobs: Logprobs | None
    logprob_rows: Sequence[int]
    """Index within the S rows that each entry of `logprobs` belongs to."""


class Runner:
    """The worker: one model, one KV pool, and the slots of the running requests."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_step_tokens: int = sys.maxsize,
        max_draws: int = 0,
        followers: Followers | None = None,
        draft_model: DraftModel | HeadDrafts | None = None,
    ) -> None:
        """Steps have at most `max_step_tokens` tokens, and draw at most `max_draws` if they verify drafts. `followers`:
        other ranks, which run the same plans. `draft_model` makes the drafts of rows that ask for them. It may be a
        draft head, which follows each step."""
        self.model, self._followers = model, followers or Followers()
        self._slots, self._sampler, self._device, self._states = model.slots, model.sampler, model.device, model.states
        self._graphs = StepGraphs(model, max_draws=max_draws)
        self._mixed = MixedGraphs(model, max_step_tokens)
        self._pooler = Pooler(model.slots)
        self._draft_model = draft_model

    @property
    def arch(self) -> Arch:
        """Description of the served model."""
        return self.model.decoder.arch

    @property
    def draft_arch(self) -> Arch | None:
        """Description of the draft model or the draft head; None if there is none."""
        return None if self._draft_model is None else self._draft_model.arch

    @property
    def adapters(self) -> Adapters | None:
        """Those that rows may have; None if there is no memory for any."""
        return self.model.adapters

    @property
    def cache_windows(self) -> tuple[int | None, ...]:
        """Number of last positions that the layers of each cache group see; None for all, and for a window that is at
        least as long as the longest sequence. Groups are in the order of step plans."""
        windows = (group.window for group in self.model.decoder.arch.cache_groups)
        return tuple(None if window is None or window >= self._slots.max_model_len else window for window in windows)

    @torch.inference_mode()
    def record_steps(self, progress: Progress) -> str | None:
        """Record the steps that can be recorded before any request comes. Returns a text about them; None if the device
        records a step when it is first needed."""
        if not self._device.records_all:
            return None
        self._mixed.record_all(progress)
        self._graphs.record_all(progress)
        if self._draft_model is not None:
            self._draft_model.record_steps(progress)
        rows, tokens = self._graphs.recorded_rows, self._mixed.recorded_tokens
        return self._graphs.refusal or (
            f"decodes in {len(rows)} sizes up to {max(rows, default=0)} rows, "
            f"prompts in {len(tokens)} sizes up to {max(tokens, default=0)} tokens"
        )

    def close(self) -> None:
        """End the other ranks."""
        self._followers.close()

    def use_threads(self, num_threads: int) -> None:
        """Compute on so many threads from now on, except for recorded steps: they run on the device's own number. Plain
        PyTorch keeps that too, because its sums may depend on the number; those of the C++ kernels do not."""
        if native.missing() is None:
            torch.set_num_threads(num_threads)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan to its end."""
        return self.launch(plan).wait()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> _LaunchedStep:
        """Queue one plan on the device, after those launched before. With `awaits_masks`, tokens are not drawn yet."""
        started_s = time.monotonic()
        self._followers.send(plan)
        for admission in plan.admissions:
            self._slots.admit(admission)
            self._sampler.admit(admission.slot, admission.params, admission.token_ids, admission.num_prompt)
            if self.model.adapters is not None:
                adapter = admission.params.adapter
                self.model.adapters.assign(admission.slot, None if adapter is None else adapter.index)
        for update in plan.table_updates:
            self._slots.extend_table(update)
        self._slots.write_drafts(plan.rows)
        if self._states is not None:
            self._states.load(plan.state_loads)
            self._states.expect(plan.rows)
        drafts = None if self._draft_model is None else self._draft_model.draft(plan.rows)
        computed = self._decode(plan.rows) or self._compute(plan)
        if self._states is not None:
            self._states.save(plan.state_saves)
        step = _LaunchedStep(
            plan, started_s, computed._replace(drafts=drafts), self._end, self._device, self._expert_peaks(plan)
        )
        if not awaits_masks:
            step.sample(NO_MASKS)
        return step

    def _decode(self, rows: Sequence[Row]) -> _Computed | None:
        """Run a step in which every row computes one token and its drafts and draws behind each, if such steps are
        recorded."""
        if any(row.num_tokens != row.num_draws for row in rows):
            return None
        # A recorded draw knows no order among its rows.
        if self._device.records_all and any(row.num_drafts and self._sampler.has_rules(row.slot) for row in rows):
            return None
        tokens = [(row.slot, row.start + number) for row in rows for number in range(row.num_tokens)]
        decoded = self._graphs.decode(tokens)
        return None if decoded is None else _Computed(decoded.logits, decoded.outcomes, read=decoded.read)

    def _compute(self, plan: StepPlan) -> _Computed:
        """Run a step of any kind: its layers by a recording if there is one, the rest call by call."""
        first_tokens = [0, *accumulate(row.num_tokens for row in plan.rows)]
        output = self._mixed.forward(plan.rows) if self._device.records_all else None
        if output is None:
            output = self._forward(plan)
        hidden, read = self.model.decoder.parts(output)
        last_tokens = [
            token
            for row, end in zip(plan.rows, first_tokens[1:], strict=True)
            for token in range(end - row.num_draws, end)
        ]
        logits = None
        if last_tokens:
            logits = self.model.decoder.logits(hidden.index_select(0, self._device.to_device(last_tokens)))
        scored = {
            index: parts
            for index, row in enumerate(plan.rows)
            if (parts := self._prompt_logprobs(row, hidden, first_tokens[index]))
        }
        pooled = self._pooler.pool(plan.rows, hidden, first_tokens)
        return _Computed(logits, scored=scored, pooled=pooled, read=read)

    def _forward(self, plan: StepPlan) -> Tensor:
        """The layers, call by call."""
        spans = [(row.slot, row.start, row.num_tokens) for row in plan.rows]
        num_kept = [row.num_tokens - row.num_drafts for row in plan.rows] if plan.has_drafts else None
        batch = Batch.of_spans(spans, self._slots, is_deterministic=self.model.is_deterministic, num_kept=num_kept)
        return run_layers(self.model, batch, has_adapters=uses_adapters(self.model, (row.slot for row in plan.rows)))

    @torch.inference_mode()
    def _end(self, plan: StepPlan, computed: _Computed, token_masks: TokenMasks) -> _Drawn | None:
        """Draw, and advance recurrent states by the accepted drafts. Let a draft head compute the step's positions, for
        which it needs the tokens that follow them."""
        drawn = self._draw(plan, computed, token_masks)
        if self._states is not None and drawn is not None and plan.has_drafts:
            drafts = [] if computed.drafts is None else computed.drafts.tolist()
            given = [_num_given(row, own) for row, own in _drawn_of(plan.rows, drawn.outcomes.tolist(), drafts)]
            accepted = self._states.accepted(plan.rows, [max(count - 1, 0) for count in given])
            if accepted is not None:
                self.model.decoder.advance_states(*accepted)
        if computed.read is not None and isinstance(self._draft_model, HeadDrafts):
            self._draft_model.follow(plan.rows, computed.read)
        return drawn

    def _draw(self, plan: StepPlan, computed: _Computed, token_masks: TokenMasks) -> _Drawn | None:
        """Draw the sampling rows that the step did not draw itself, and write the ids to their slots."""
        logits, outcomes = computed.logits, computed.outcomes
        if logits is None:
            return None
        draws = list(_draws_of(plan.rows))
        masks = self._masks_of(token_masks)
        if outcomes is None:
            return _Drawn(*self._sample(draws, logits, masks))
        special = [index for index, draw in enumerate(draws) if not self._sampler.is_plain(draw.slot)]
        if not special:
            return _Drawn(outcomes, None, ())
        chosen = self._device.to_device(special)
        masks = None if masks is None else masks.among(special)
        drawn = _Drawn(*self._sample([draws[index] for index in special], logits.index_select(0, chosen), masks))
        outcomes.index_copy_(0, chosen, drawn.outcomes)
        return _Drawn(outcomes, drawn.logprobs, [special[place] for place in drawn.logprob_rows])

    def _expert_peaks(self, plan: StepPlan) -> tuple[tuple[int, float], ...]:
        """`StepResult.expert_peaks`. A GPU would have to be awaited for them."""
        if self._device.torch_device.type != "cpu" or plan.step_id % _PEAK_STEPS:
            return ()
        loads = self.model.decoder.expert_loads()
        return tuple((layer, float(own.max() * len(own) / own.sum().clamp(min=1))) for layer, own in loads.items())

    def _masks_of(self, masks: TokenMasks) -> Masks | None:
        """The masks on the device."""
        if not masks.draws:
            return None
        words = torch.frombuffer(masks.words, dtype=torch.int32).view(len(masks.draws), -1)
        return Masks(masks.draws, from_host(words, self._device.torch_device))

    def _sample(
        self, draws: Sequence[_Draw], logits: Tensor, masks: Masks | None
    ) -> tuple[Tensor, Logprobs | None, Sequence[int]]:
        slots, positions = [draw.slot for draw in draws], [draw.position for draw in draws]
        slots_of, positions_of = self._device.to_device(slots), self._device.to_device(positions)
        # A row's drafts lie in the places of its tokens.
        drafts = self._slots.gather_ids(slots_of, positions_of)
        drawn = self._sampler.sample(logits, slots, positions, masks, drafts)
        self._slots.write_ids(slots_of, positions_of, drawn.token_ids)
        return drawn.outcomes, drawn.logprobs, drawn.logprob_rows

    def _prompt_logprobs(self, row: Row, hidden: Tensor, first_token: int) -> list[Logprobs]:
        """Logprobs of the prompt tokens at `start + 1 .. start + num_tokens`, each from the hidden state before it."""
        num_top = self._slots.params(row.slot).prompt_logprobs
        end = min(row.start + row.num_tokens, self._slots.num_prompt(row.slot) - 1)
        if num_top is None or end <= row.start:
            return []
        targets = self._slots.token_ids[row.slot, row.start + 1 : end + 1]
        states = hidden[first_token : first_token + targets.shape[0]]
        scored: list[Logprobs] = []
        for start in range(0, states.shape[0], _SCORED_ROWS):
            part, ids = states[start : start + _SCORED_ROWS], targets[start : start + _SCORED_ROWS]
            scored.append(self._sampler.prompt_logprobs(self.model.decoder.logits(part), ids, num_top))
        return scored


class _LaunchedStep:
    """A step in the device's queue, and the copy of its results to the host."""

    def __init__(
        self,
        plan: StepPlan,
        started_s: float,
        computed: _Computed,
        end: Callable[[StepPlan, _Computed, TokenMasks], _Drawn | None],
        device: Device,
        expert_peaks: tuple[tuple[int, float], ...] = (),
    ) -> None:
        self._plan, self._started_s, self._scored = plan, started_s, computed.scored
        self._pooled, self._drafts = computed.pooled, computed.drafts
        self._end, self._device, self._expert_peaks = end, device, expert_peaks
        self._computed: _Computed | None = computed

    def sample(self, masks: TokenMasks) -> None:
        """Draw the rows that are not drawn yet, and start copying the results to the host."""
        # Frees the logits before the results have arrived.
        computed, self._computed = self._computed, None
        assert computed is not None, "a step draws once"
        self._drawn = drawn = self._end(self._plan, computed, masks)
        self._tables = [drawn.logprobs] if drawn is not None and drawn.logprobs is not None else []
        self._tables += [part for parts in self._scored.values() for part in parts]
        outcomes = [] if drawn is None else [drawn.outcomes]
        if self._drafts is not None:
            outcomes.append(self._drafts)
        vectors = [] if self._pooled is None else [self._pooled.vectors]
        self._copy = self._device.copy_to_host(
            [*outcomes, *(column for table in self._tables for column in table.columns), *vectors]
        )

    def wait(self) -> StepResult:
        """The step's results. Rows that do not sample give no id; a row whose logits hold a NaN fails alone."""
        columns = iter(self._copy.wait())
        outcomes = [] if self._drawn is None else next(columns).tolist()
        drafts = [] if self._drafts is None else next(columns).tolist()
        tables = (table.with_columns(columns) for table in self._tables)
        results = self._results(outcomes, drafts, tables)
        for index, parts in self._scored.items():
            prompt = tuple(entry for _ in parts for entry in _entries(next(tables)))
            results[index] = results[index]._replace(prompt_logprobs=prompt)
        if self._pooled is not None:
            for index, status, embedding in self._pooled.outcomes(next(columns)):
                results[index] = results[index]._replace(status=status, embedding=embedding)
        duration_s = time.monotonic() - self._started_s
        return StepResult(self._plan.step_id, tuple(results), duration_s, self._expert_peaks)

    def _results(self, outcomes: Sequence[int], drafts: Sequence[int], tables: Iterator[Logprobs]) -> list[RowResult]:
        logprobs: dict[int, TokenLogprobs] = {}
        if self._drawn is not None and self._drawn.logprobs is not None:
            logprobs = dict(zip(self._drawn.logprob_rows, _entries(next(tables)), strict=True))
        results = [RowResult()] * len(self._plan.rows)
        place = 0
        for index, (row, drawn) in enumerate(_drawn_of(self._plan.rows, outcomes, drafts)):
            if row.samples:
                end = place + len(drawn)
                results[index] = _result_of(row, drawn, [logprobs[i] for i in range(place, end) if i in logprobs])
                place = end
        assert place == len(outcomes), f"{len(outcomes)} drawn, {place} planned"
        return results


def _draws_of(rows: Sequence[Row]) -> Iterator[_Draw]:
    """The draws of a step, in the order of its rows."""
    for row in rows:
        first = row.start + row.num_tokens - row.num_drafts
        for number in range(row.num_draws):
            yield _Draw(row.slot, first + number)


def _drawn_of(
    rows: Sequence[Row], outcomes: Sequence[int], drafts: Sequence[int]
) -> Iterator[tuple[Row, Sequence[int]]]:
    """Each row of a step, with the ids of its drafts, and what it drew. `drafts`: those that the worker made."""
    place = first_draft = 0
    for row in rows:
        if row.num_to_draft:
            row = row._replace(draft_ids=tuple(drafts[first_draft : first_draft + row.num_to_draft]))
            first_draft += row.num_to_draft
        yield row, outcomes[place : place + row.num_draws]
        place += row.num_draws


def _num_given(row: Row, drawn: Sequence[int]) -> int:
    """Number of tokens that a row gives. A draw that failed behind accepted drafts is made again by the next step, so
    that it fails alone."""
    count = next((place for place, outcome in enumerate(drawn) if outcome in _FAULTS), len(drawn))
    return row.accepted(drawn[:count])


def _result_of(row: Row, drawn: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> RowResult:
    """The result of a row's draws."""
    if drawn[0] in _FAULTS:
        return RowResult(status=_FAULTS[drawn[0]])
    count = _num_given(row, drawn)
    return RowResult(tuple(drawn[:count]), logprobs=tuple(logprobs[:count]))


def _entries(logprobs: Logprobs) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(*entry) for entry in logprobs.to_host())
