"""An engine whose model follows plans: the real engine process, with a worker that knows each answer by its prompt.

The supervisor starts it by its own command (`scripted_server.py`).
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.free_engine import FreeStep, FreeWorker, Report, load_free, replace_worker
from inferd.engine.api.config import EngineConfig
from inferd.engine.api.wire.messages import Ready
from inferd.engine.process import boot
from inferd.engine.sched.plan import NO_RESULT, Row, RowResult, StepPlan, StepResult
from tests.agents.scripted_model import ScriptedModel

logger = logging.getLogger("inferd.scripted")


class ScriptedWorker(FreeWorker):
    """Draws the tokens of each request's answer in turn. Its steps take no time."""

    def __init__(self, free: FreeWorker, model: ScriptedModel) -> None:
        super().__init__(free.arch, 0.0)
        self._model = model
        self._answers: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Slot -> (number of the prompt's tokens, ids of the answer)."""

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> FreeStep:
        for admission in plan.admissions:
            text, ids = self._model.answer(admission.token_ids[: admission.num_prompt])
            logger.info("%s: %d tokens, then %r", admission.request_id, admission.num_prompt, text)
            self._answers[admission.slot] = admission.num_prompt, ids
        return FreeStep(StepResult(plan.step_id, tuple(map(self._result, plan.rows)), 0.0))

    def _result(self, row: Row) -> RowResult:
        if not row.samples:
            return NO_RESULT
        num_prompt, ids = self._answers[row.slot]
        return RowResult((ids[min(row.start + row.num_tokens - num_prompt, len(ids) - 1)],))


def load_worker(config: EngineConfig, started_s: float, report: Report, *ranks: object) -> tuple[FreeWorker, Ready]:
    """Replaces the engine's own."""
    free, ready = load_free(config, started_s, report, *ranks)
    return ScriptedWorker(free, ScriptedModel(Path(config.model_path))), ready


if __name__ == "__main__":
    replace_worker(load_worker)
    sys.exit(boot.main())
