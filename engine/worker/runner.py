"""A plan becomes a step: fill slots, build the batch, run the decoder, sample, and bring the results to the host.

Every tensor is built from the plan's rows in their order, so a result's row is the plan's row. Knows no requests beyond
their slots, and no scheduling.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.models.decoder import Decoder
from inferd.engine.sample.logprobs import Logprobs, logprobs_of
from inferd.engine.sample.sampler import Sampler, SampleResult
from inferd.engine.sched.plan import Row, RowResult, RowStatus, StepPlan, StepResult, TokenLogprobs
from inferd.engine.worker.batch import Batch
from inferd.engine.worker.device import Device
from inferd.engine.worker.graphs import StepGraphs
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.slots import Slots

_SCORED_ROWS = 32
"""Prompt positions whose logits exist at once: 256 of them over a vocabulary of 152,000 would take over a gigabyte."""


class Runner:
    """One model, one KV pool, and the slots of the requests that run."""

    def __init__(self, decoder: Decoder, kv: KVPool, slots: Slots, sampler: Sampler, device: Device) -> None:
        self._decoder, self._kv, self._slots, self._sampler, self._device = decoder, kv, slots, sampler, device
        self._graphs = StepGraphs(decoder, kv, device)

    @property
    def arch(self) -> Arch:
        """What is served."""
        return self._decoder.arch

    @property
    def cache_windows(self) -> tuple[int | None, ...]:
        """By cache group, as plans number them: how many last positions its layers see; None for all.

        A window that no sequence outgrows is none.
        """
        windows = (group.window for group in self._decoder.arch.cache_groups)
        return tuple(None if window is None or window >= self._slots.max_model_len else window for window in windows)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan to its end."""
        return self.launch(plan).wait()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> _LaunchedStep:
        """Queue one plan on the device, to run behind those launched before."""
        started_s = time.monotonic()
        for admission in plan.admissions:
            self._slots.admit(admission)
            self._sampler.admit(admission.slot, admission.params, admission.token_ids, admission.num_prompt)
        for update in plan.table_updates:
            self._slots.extend_table(update)
        batch = Batch.build(plan, self._slots, self._kv.block_size, self._device)
        hidden = self._graphs.forward(batch.token_ids, batch.attention)
        drawn = self._sample(plan, batch, hidden)
        scored = {
            index: parts
            for index, row in enumerate(plan.rows)
            if (parts := self._prompt_logprobs(row, hidden, batch.first_tokens[index]))
        }
        return _LaunchedStep(plan, started_s, drawn, scored, self._device)

    def _sample(self, plan: StepPlan, batch: Batch, hidden: Tensor) -> SampleResult | None:
        """Draw for the rows that sample, from their last token's hidden state, and record the ids in their slots."""
        sampling = [index for index, row in enumerate(plan.rows) if row.samples]
        if not sampling:
            return None
        rows = [plan.rows[index] for index in sampling]
        last_tokens = [batch.first_tokens[index] + plan.rows[index].num_tokens - 1 for index in sampling]
        logits = self._decoder.logits(hidden.index_select(0, self._device.to_device(last_tokens)))
        slots, positions = [row.slot for row in rows], [row.start + row.num_tokens for row in rows]
        drawn = self._sampler.sample(logits, slots, positions)
        self._slots.write_ids(self._device.to_device(slots), self._device.to_device(positions), drawn.token_ids)
        return drawn

    def _prompt_logprobs(self, row: Row, hidden: Tensor, first_token: int) -> list[Logprobs]:
        """Of the prompt tokens at `start + 1 .. start + num_tokens`, each from the hidden state before it."""
        num_top = self._slots.params(row.slot).prompt_logprobs
        end = min(row.start + row.num_tokens, self._slots.num_prompt(row.slot) - 1)
        if num_top is None or end <= row.start:
            return []
        targets = self._slots.token_ids[row.slot, row.start + 1 : end + 1]
        states = hidden[first_token : first_token + targets.shape[0]]
        scored: list[Logprobs] = []
        for start in range(0, states.shape[0], _SCORED_ROWS):
            part, ids = states[start : start + _SCORED_ROWS], targets[start : start + _SCORED_ROWS]
            scored.append(logprobs_of(self._decoder.logits(part), ids, [num_top] * part.shape[0]))
        return scored


class _LaunchedStep:
    """A step in the device's queue, and its results on their way to the host."""

    def __init__(
        self,
        plan: StepPlan,
        started_s: float,
        drawn: SampleResult | None,
        scored: Mapping[int, Sequence[Logprobs]],
        device: Device,
    ) -> None:
        self._plan, self._started_s, self._drawn, self._scored = plan, started_s, drawn, scored
        self._tables = [drawn.logprobs] if drawn is not None and drawn.logprobs is not None else []
        self._tables += [part for parts in scored.values() for part in parts]
        columns = [] if drawn is None else [drawn.token_ids, drawn.is_failed, drawn.is_empty]
        self._num_columns = len(columns)
        columns += [column for table in self._tables for column in table.columns]
        self._copy = device.copy_to_host(columns)

    def wait(self) -> StepResult:
        """Rows that do not sample give no id; a row whose logits hold a NaN fails alone."""
        columns = iter(self._copy.wait())
        drawn = [next(columns).tolist() for _ in range(self._num_columns)]
        tables = (table.with_columns(columns) for table in self._tables)
        results = self._results(drawn, tables)
        for index, parts in self._scored.items():
            prompt = tuple(entry for _ in parts for entry in _entries(next(tables)))
            results[index] = replace(results[index], prompt_logprobs=prompt)
        return StepResult(self._plan.step_id, tuple(results), time.monotonic() - self._started_s)

    def _results(self, drawn: Sequence[Sequence[int]], tables: Iterator[Logprobs]) -> list[RowResult]:
        results = [RowResult()] * len(self._plan.rows)
        if self._drawn is None:
            return results
        logprobs: dict[int, TokenLogprobs] = {}
        if self._drawn.logprobs is not None:
            logprobs = dict(zip(self._drawn.logprob_rows, _entries(next(tables)), strict=True))
        sampling = (index for index, row in enumerate(self._plan.rows) if row.samples)
        for place, (index, token_id, is_failed, is_empty) in enumerate(zip(sampling, *drawn, strict=True)):
            if is_failed or is_empty:
                status = RowStatus.NUMERICAL_ERROR if is_failed else RowStatus.NOTHING_TO_DRAW
                results[index] = RowResult(status=status)
            else:
                results[index] = RowResult((token_id,), logprobs=(logprobs[place],) if place in logprobs else ())
        return results


def _entries(logprobs: Logprobs) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(*entry) for entry in logprobs.to_host())
