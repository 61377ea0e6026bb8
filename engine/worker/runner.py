"""Runs a step plan: has its parts prepare the step, runs the layers, has tokens drawn, and copies the results to the
host.

Every tensor is built from the plan's rows in their order, so row i of a result is row i of the plan. Features take part
by `StepPart`, and `Runner._parts_of` alone names them. Knows no scheduling.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from inferd.engine.arch.description import Arch
from inferd.engine.lora.adapters import Adapters
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import Progress
from inferd.engine.sched.plan import NO_MASKS, RowResult, StepPlan, StepResult, TokenMasks
from inferd.engine.worker.adapter_loader import AdaptedSlots
from inferd.engine.worker.device import Device, HostCopy
from inferd.engine.worker.device_memory import DeviceMemory
from inferd.engine.worker.drafter import Drafter
from inferd.engine.worker.drawing import Drawing
from inferd.engine.worker.followers import Followers
from inferd.engine.worker.graphs import StepGraphs, compute_layers, uses_adapters
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.mixed_graphs import MixedGraphs
from inferd.engine.worker.pool_memory import PoolMemory
from inferd.engine.worker.pooling import Pooler, PromptLogprobs
from inferd.engine.worker.ranks import SentPlans
from inferd.engine.worker.slots import Batch
from inferd.engine.worker.states import RecurrentStates
from inferd.engine.worker.step import Report, Step, StepPart
from inferd.kernels.cpu import native

_PEAK_STEPS = 64
"""The loads of experts are looked at once in so many steps."""


class _ExpertPeaks(StepPart):
    """Looks at the loads of a decoder's experts."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def after_layers(self, step: Step) -> None:
        if step.plan.step_id % _PEAK_STEPS == 0:
            loads = self._decoder.expert_loads()
            peaks = ((layer, float(own.max() * len(own) / own.sum().clamp(min=1))) for layer, own in loads.items())
            step.expert_peaks = tuple(peaks)


class _LaunchedStep(Step):
    """A step in the device's queue, and the copy of its results to the host."""

    def __init__(self, plan: StepPlan, end: Callable[[Step, TokenMasks], Sequence[Report]], device: Device) -> None:
        super().__init__(plan)
        self._started_s, self._end, self._device = time.monotonic(), end, device
        self._ended: tuple[Sequence[Report], HostCopy] | None = None

    def sample(self, masks: TokenMasks) -> None:
        """Draw the rows that are not drawn yet, and start copying the results to the host."""
        assert self._ended is None, "a step draws once"
        reports = self._end(self, masks)
        # Frees them before the results have arrived.
        self.logits = self.read = None
        self._ended = reports, self._device.copy_to_host([tensor for report in reports for tensor in report.tensors])

    def wait(self) -> StepResult:
        """The step's results."""
        assert self._ended is not None, "a step that awaits masks has been drawn"
        reports, copy = self._ended
        tensors, results = iter(copy.wait()), [RowResult()] * len(self.plan.rows)
        for report in reports:
            report.add(tensors, results)
        duration_s = time.monotonic() - self._started_s
        return StepResult(self.plan.step_id, tuple(results), duration_s, self.expert_peaks)


class Runner:
    """The worker: one model, one KV pool, and the slots of the running requests."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_step_tokens: int = sys.maxsize,
        max_draws: int = 0,
        followers: Followers | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """Steps have at most `max_step_tokens` tokens, and draw at most `max_draws` if they verify drafts. `followers`:
        other ranks, which run the same plans. `drafter` makes the drafts of rows that ask for them."""
        self.model, self._followers, self._drafter = model, followers or Followers(), drafter
        self._graphs = StepGraphs(model, max_draws=max_draws)
        self._mixed = MixedGraphs(model, max_step_tokens)
        self._drawing = Drawing(model)
        self._parts = tuple(self._parts_of(model))

    def _parts_of(self, model: LoadedModel) -> Iterator[StepPart]:
        """In the order in which they do their shares."""
        if not self._followers.are_none:
            yield SentPlans(self._followers.send)
        yield model.slots
        yield self._drawing
        yield PromptLogprobs(model)
        yield Pooler(model.slots, model.heads, model.decoder.labels)
        if model.adapters is not None:
            yield AdaptedSlots(model.adapters)
        if model.states is not None:
            yield RecurrentStates(model.states, model.decoder)
        # A GPU would have to be awaited for them.
        if model.device.torch_device.type == "cpu" and model.decoder.expert_loads():
            yield _ExpertPeaks(model.decoder)
        if self._drafter is not None:
            yield self._drafter

    @property
    def arch(self) -> Arch:
        """Description of the served model."""
        return self.model.decoder.arch

    @property
    def draft_arch(self) -> Arch | None:
        """Description of the draft model or the draft head; None if there is none."""
        return None if self._drafter is None else self._drafter.arch

    @property
    def adapters(self) -> Adapters | None:
        """Those that rows may have; None if there is no memory for any."""
        return self.model.adapters

    @property
    def ledger(self) -> PoolMemory | None:
        """The ledger of its KV pool and states; None if they end with this engine."""
        memory = self.model.device.pool_memory
        return memory if memory is not None and memory.is_usable else None

    def copied(self, num_blocks: int, num_checkpoints: int) -> DeviceMemory:
        """The memory of so many blocks and checkpoints, for a tier that copies them."""
        return DeviceMemory.of(self.model, num_blocks, num_checkpoints)

    @property
    def cache_windows(self) -> tuple[int | None, ...]:
        """Number of last positions that the layers of each cache group see; None for all, and for a window that is at
        least as long as the longest sequence. Groups are in the order of step plans."""
        windows, longest = (group.window for group in self.arch.cache_groups), self.model.slots.max_model_len
        return tuple(None if window is None or window >= longest else window for window in windows)

    @torch.inference_mode()
    def record_steps(self, progress: Progress) -> str | None:
        """Record the steps that can be recorded before any request comes. Returns a text about them; None if the device
        records a step when it is first needed."""
        if not self.model.device.records_all:
            return None
        self._mixed.record_all(progress)
        self._graphs.record_all(progress)
        for part in self._parts:
            part.record_steps(progress)
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
        step = _LaunchedStep(plan, self._end, self.model.device)
        for part in self._parts:
            part.before_layers(step)
        if not self._decode(step):
            self._compute(step)
        for part in self._parts:
            part.after_layers(step)
        if not awaits_masks:
            step.sample(NO_MASKS)
        return step

    @torch.inference_mode()
    def _end(self, step: Step, masks: TokenMasks) -> Sequence[Report]:
        """Draw. Returns what the host gets to know of the step."""
        drawn = self._drawing.draw(step, masks)
        for part in self._parts:
            part.after_draw(step, tuple if drawn is None else drawn.accepted)
        return step.reports if drawn is None else [Report(drawn.tensors, drawn.add), *step.reports]

    def _decode(self, step: Step) -> bool:
        """Run a step in which every row computes one token and its drafts and draws behind each. Returns False, with
        nothing computed, if it is another step, or such steps are not recorded."""
        rows, sampler = step.plan.rows, self.model.sampler
        if any(row.num_tokens != row.num_draws for row in rows):
            return False
        # A recorded draw knows no order among its rows.
        if self.model.device.records_all and any(row.num_drafts and sampler.has_rules(row.slot) for row in rows):
            return False
        tokens = [(row.slot, row.start + number) for row in rows for number in range(row.num_tokens)]
        decoded = self._graphs.decode(tokens)
        if decoded is None:
            return False
        step.logits, step.outcomes, step.read = decoded
        return True

    def _compute(self, step: Step) -> None:
        """Run a step of any kind: its layers by a recording if there is one, the rest call by call."""
        rows, decoder, device = step.plan.rows, self.model.decoder, self.model.device
        output = self._mixed.forward(rows) if device.records_all else None
        hidden, step.read = decoder.parts(self._forward(step.plan) if output is None else output)
        first_tokens = [0, *accumulate(row.num_tokens for row in rows)]
        last_tokens = [
            token for row, end in zip(rows, first_tokens[1:], strict=True) for token in range(end - row.num_draws, end)
        ]
        if last_tokens:
            step.logits = decoder.logits(hidden.index_select(0, device.to_device(last_tokens)))
        for part in self._parts:
            part.read_hidden(step, hidden, first_tokens)

    def _forward(self, plan: StepPlan) -> Tensor:
        """The layers, call by call."""
        spans = [(row.slot, row.start, row.num_tokens) for row in plan.rows]
        num_kept = [row.num_tokens - row.num_drafts for row in plan.rows] if plan.has_drafts else None
        batch = Batch.of_spans(self.model.slots, spans, is_deterministic=self.model.is_deterministic, num_kept=num_kept)
        return compute_layers(
            self.model, batch, has_adapters=uses_adapters(self.model, (row.slot for row in plan.rows))
        )
