"""Drafts under a grammar: masks follow each draft, and a request gives the tokens that it gives without any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from llguidance import LLTokenizer

from inferd.engine.api.wire.messages import Submit
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.grammar.ports import WORD_BITS, Grammar
from inferd.engine.request import Request
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import NO_MASKS, RowResult, RowStatus, StepPlan, StepResult, TokenMasks
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.speculation.ports import Guess
from inferd.server.structured.language import Language, literal, pattern
from tests.unit.test_core_loop import ids_of, run, submit
from tests.unit.test_grammar import END, NUM_WORDS, VOCAB_SIZE, matched, vocabulary

__all__ = ["vocabulary"]


@dataclass(slots=True)
class Step:
    """A launched step, which draws the lowest token that its masks allow."""

    plan: StepPlan
    masks: TokenMasks = NO_MASKS

    def sample(self, masks: TokenMasks) -> None:
        self.masks = masks

    def wait(self) -> StepResult:
        (row,), drawn = self.plan.rows, list[int]()
        for place in range(len(self.masks.draws)):
            mask = self.masks.words[NUM_WORDS * place : NUM_WORDS * (place + 1)]
            lowest = next((i for i in range(VOCAB_SIZE) if mask[i // WORD_BITS] >> i % WORD_BITS & 1), None)
            if lowest is None:
                break
            drawn.append(lowest)
        status = RowStatus.OK if drawn else RowStatus.NOTHING_TO_DRAW
        return StepResult(self.plan.step_id, (RowResult(tuple(drawn[: row.accepted(drawn)]), status),), 0.01)


@dataclass(slots=True)
class Device:
    most_drafts: int = 0

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> Step:
        assert awaits_masks
        self.most_drafts = max(self.most_drafts, len(plan.rows[0].draft_ids))
        return Step(plan)

    def close(self) -> None:
        """Does nothing."""


@dataclass(slots=True)
class Known:
    """Guesses an answer that is known."""

    answer: Sequence[int]

    def open(self, request: Request, grammar: Grammar | None) -> None:
        del request, grammar

    def close(self, request: Request) -> None:
        del request

    def guess(self, request: Request) -> Guess:
        rest = tuple(self.answer[request.num_output :])
        return Guess(rest, (0.99,) * len(rest))


@dataclass(slots=True)
class Compiled:
    """Gives each request a grammar that was compiled before."""

    language: Language
    vocabulary: LLTokenizer
    is_done: bool = field(default=True, init=False)

    def open(self, text: str, token_ids: Sequence[int], ending_ids: Sequence[int], tenant: str = "") -> Compiled:
        del text, token_ids, ending_ids, tenant
        return self

    def take(self) -> Grammar:
        return matched(self.vocabulary, self.language)


def answer(compiled: Compiled, guesses: Known | None) -> tuple[list[int], object, int | None, int]:
    """(ids, finish reason, id that ended it, most drafts of a row)."""
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64, max_draws=16)
    device = Device()
    core = EngineCore(
        Scheduler(config, KVCache(32, 4), guesser=guesses),
        device,
        vocab_size=VOCAB_SIZE,
        clock=lambda: 0.0,
        grammars=compiled,
        guesses=guesses,
    )
    message: Submit = submit(max_tokens=30, grammar="any", eos_token_ids=(END,))
    deltas = run(core, message)
    return ids_of(deltas), deltas[-1].finish_reason, deltas[-1].stop_token_id, device.most_drafts


@pytest.mark.parametrize("language", [literal("to be or not to be"), pattern("[0-9]{7}"), pattern("ab?c*")])
def test_a_text_ends_where_its_grammar_does(vocabulary: LLTokenizer, language: Language) -> None:
    """Behind a complete text llguidance allows the end token. Nothing is drawn there without drafts."""
    compiled = Compiled(language, vocabulary)
    *plain, num_drafts = answer(compiled, None)
    assert num_drafts == 0
    *with_drafts, num_drafts = answer(compiled, Known(plain[0]))
    assert with_drafts == plain and num_drafts >= min(3, len(plain[0]) - 1)
