"""An engine whose model costs nothing: the real engine process, with a worker that answers each row without arithmetic.

The token at position p is `_FIRST_ID` + p mod `_NUM_IDS`. So a prompt can hold its own answer, and guesses come true.
A vector, or the logit of a classifier with one label, depends on the ids of its text alone (`free_numbers`).

The supervisor starts it by its own command (`free_server.py`). The worker sleeps `--step-ms` for each step, so that
every token is an event of its own. At 0 steps run as fast as the scheduler plans them. It never imports torch, so a
start costs a tenth of the real engine's processor time.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.stacks import sample_into
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import EngineConfig
from inferd.engine.api.cost.roofline import Peaks
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.wire.messages import Phase, Ready
from inferd.engine.arch.description import Arch
from inferd.engine.process import boot
from inferd.engine.sched.plan import Admission, Row, RowResult, StepPlan, StepResult

Report = Callable[[Phase], None]

_FIRST_ID, _NUM_IDS = 300, 1000
"""Ordinary tokens of the embedded model's tokenizer, each with a text."""
NUM_LABELS = 1
_WEIGHT_BYTES = 2
"""Bytes of a weight as it is served."""


class FreeWorker:
    """Draws ids that depend on the position alone."""

    cache_windows: tuple[int | None, ...] = (None,)
    """One group of layers, which all see the whole context."""
    adapters = None
    draft_arch = None
    ledger = None

    def __init__(self, arch: Arch, step_s: float) -> None:
        self.arch, self._step_s = arch, step_s
        self._results = tuple(RowResult((_FIRST_ID + i,)) for i in range(_NUM_IDS))
        self._nothing = RowResult()
        self._pooled: dict[int, Admission] = {}
        """Slot -> the request that ends with a vector."""

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> FreeStep:
        """One result for each row, after a sleep."""
        time.sleep(self._step_s)
        for admission in plan.admissions:
            self._pooled.pop(admission.slot, None)
            if admission.params.pooling is not None:
                self._pooled[admission.slot] = admission
        results, nothing = self._results, self._nothing
        rows = (
            self._drawn(row)
            if row.draft_ids
            else results[(row.start + row.num_tokens) % _NUM_IDS]
            if row.samples
            else self._vector(row)
            if self._pooled
            else nothing
            for row in plan.rows
        )
        return FreeStep(StepResult(plan.step_id, tuple(rows), self._step_s))

    def use_threads(self, num_threads: int) -> None:
        """Does nothing: the worker only sleeps."""

    def _vector(self, row: Row) -> RowResult:
        """The result of a row that draws nothing."""
        admission = self._pooled.get(row.slot)
        if admission is None or row.start + row.num_tokens < admission.num_prompt:
            return self._nothing
        del self._pooled[row.slot]
        pooling, ids = admission.params.pooling, admission.token_ids
        assert pooling is not None
        if pooling.gives == "logits":
            return RowResult(embedding=free_numbers(ids, NUM_LABELS, pooling.num_first))
        texts = [(token_id,) for token_id in ids] if pooling.gives == "token_embeddings" else [ids]
        num_components = pooling.num_components or self.arch.hidden_size
        return RowResult(embedding=b"".join(free_numbers(text, num_components) for text in texts))

    def _drawn(self, row: Row) -> RowResult:
        """The result of a row with drafts."""
        first = row.start + row.num_tokens - len(row.draft_ids)
        ids = [_FIRST_ID + position % _NUM_IDS for position in range(first, first + row.num_draws)]
        return RowResult(tuple(ids[: row.accepted(ids)]))


def free_numbers(token_ids: tuple[int, ...], count: int, num_first: int = 0) -> bytes:
    """Numbers from -2 to 2 that depend on all ids, their order, and how many are of the first type. fp32."""
    digest = hashlib.blake2b(struct.pack(f"<{1 + len(token_ids)}q", num_first, *token_ids), digest_size=4).digest()
    (seed,) = struct.unpack("<I", digest)
    return struct.pack(f"<{count}f", *(2 * math.sin(seed + i) for i in range(count)))


@dataclass(frozen=True, slots=True)
class FreeStep:
    """A step that has ended."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


def load_free(
    config: EngineConfig, started_s: float, report: Report, *ranks: object, step_s: float = 0.0
) -> tuple[FreeWorker, Ready]:
    """Replaces `load_any`: reads the checkpoint's config and not its weights. There is one rank."""
    del ranks
    facts = ModelFacts.of(Checkpoint.read(Path(config.model_path)))
    report(Phase("free model", time.monotonic() - started_s, f"{step_s * 1e3:g} ms a step, asleep"))
    return FreeWorker(facts.arch, step_s), Ready(
        pid=os.getpid(),
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        vocab_size=facts.arch.vocab_size,
        hidden_size=facts.arch.hidden_size,
        num_labels=NUM_LABELS,
        gives_token_embeddings=True,
        weights_bytes=0,
        kv_bytes=0,
        planned_weights_bytes=0,
        planned_kv_bytes=0,
        device="none",
        dtype=config.dtype,
        # The step-time model begins with what a step takes.
        peaks=Peaks(facts.num_params * _WEIGHT_BYTES / step_s if step_s else 1e12, 1e15),
        speculative=config.speculative,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--stacks", type=Path, help="write sampled stacks here")
    asked = parser.parse_args()
    if asked.stacks is not None:
        sample_into(asked.stacks)
    replace_worker(partial(load_free, step_s=asked.step_ms / 1e3))
    return boot.main()


def replace_worker(load_worker: Callable[..., tuple[FreeWorker, Ready]]) -> None:
    """Replace the function that loads the engine process's worker. The engine must not be imported yet."""
    module = ModuleType("inferd.engine.worker.load")
    vars(module).update(load_any=load_worker)
    sys.modules[module.__name__] = module


if __name__ == "__main__":
    sys.exit(main())
