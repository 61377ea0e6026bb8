"""An engine whose model follows plans: the real engine process, with a worker that knows each answer by its prompt.

The supervisor starts it by its own command (`recording_server.py`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.free_engine import FreeWorker, Report, load_free, replace_worker
from inferd.engine.api.config import EngineConfig
from inferd.engine.api.wire.messages import Ready
from inferd.engine.process import boot
from inferd.engine.sched.plan import NO_RESULT, Row, RowResult, StepPlan, StepResult, TokenMasks
from tests.agents.scripted_model import Answer, ScriptedModel

logger = logging.getLogger("inferd.scripted")


class ScriptedWorker(FreeWorker):
    """Draws the tokens of each request's answer in turn. Its steps take no time."""

    def __init__(self, free: FreeWorker, model: ScriptedModel) -> None:
        super().__init__(free.arch, 0.0)
        self._model = model
        self._answers: dict[int, tuple[int, list[Answer]]] = {}
        """Slot -> (number of the prompt's tokens, answers that it may still get, the preferred one first)."""

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> ScriptedStep:  # type: ignore[override]
        for admission in plan.admissions:
            answers = self._model.answers(admission.token_ids[: admission.num_prompt])
            logger.info("%s: %d tokens, then %r", admission.request_id, admission.num_prompt, answers[0].text)
            self._answers[admission.slot] = admission.num_prompt, answers
        return ScriptedStep(self, plan)

    def drawn(self, row: Row, mask: Sequence[int] | None = None) -> RowResult:
        """The next token of an answer that the mask allows. Raises `ValueError` if there is none: the plan, or the
        grammar, is wrong."""
        if not row.samples:
            return NO_RESULT
        num_prompt, answers = self._answers[row.slot]
        place = row.start + row.num_tokens - num_prompt
        allowed = [
            answer for answer in answers if mask is None or mask[answer.at(place) // 32] >> answer.at(place) % 32 & 1
        ]
        if not allowed:
            raise ValueError(f"a grammar forbids token {place} of {answers[0].text!r}")
        answers[:] = [answer for answer in allowed if answer.at(place) == allowed[0].at(place)]
        return RowResult((allowed[0].at(place),))


class ScriptedStep:
    """A step that has been launched."""

    def __init__(self, worker: ScriptedWorker, plan: StepPlan) -> None:
        self._worker, self._plan = worker, plan
        self._masks: dict[int, Sequence[int]] = {}
        """Draw -> its mask, in words of 32 tokens."""

    def sample(self, masks: TokenMasks) -> None:
        num_words = len(masks.words) // max(1, len(masks.draws))
        self._masks = {draw: masks.words[i * num_words :][:num_words] for i, draw in enumerate(masks.draws)}

    def wait(self) -> StepResult:
        draws = count()
        rows = (
            self._worker.drawn(row, self._masks.get(next(draws)) if row.samples else None) for row in self._plan.rows
        )
        return StepResult(self._plan.step_id, tuple(rows), 0.0)


def load_worker(config: EngineConfig, started_s: float, report: Report, *ranks: object) -> tuple[FreeWorker, Ready]:
    """Replaces the engine's own."""
    free, ready = load_free(config, started_s, report, *ranks)
    return ScriptedWorker(free, ScriptedModel(Path(config.model_path))), ready


if __name__ == "__main__":
    replace_worker(load_worker)
    sys.exit(boot.main())
