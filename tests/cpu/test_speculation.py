"""Speculation changes no bit: with drafts that are right, wrong and partly right, requests of every option give the ids
and logprobs that they give without, alone and in a batch, in every precision."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from inferd.engine.api.wire.messages import Submit
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.grammar.ports import Grammar
from inferd.engine.request import Request
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.speculation.ports import MOST_DRAFTS, NO_GUESS, Guess
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from tests.cpu.test_engine import VOCAB, Answer, Engine, prompt, request, run, save


@dataclass
class KnownAnswers:
    """Guesses that know the answers, and are wrong at each id with a given probability."""

    answers: dict[str, Answer]
    rng: random.Random
    wrong: float
    guessed: dict[tuple[str, int], Guess] = field(default_factory=dict)

    def open(self, request: Request, grammar: Grammar | None) -> None:
        del request, grammar

    def close(self, request: Request) -> None:
        del request

    def guess(self, request: Request) -> Guess:
        key = request.request_id, request.num_output
        if key not in self.guessed:
            self.guessed[key] = self._made(request)
        return self.guessed[key]

    def _made(self, request: Request) -> Guess:
        rest = self.answers[request.request_id].token_ids[request.num_output :]
        most = self.rng.choice((0, 1, 2, 5, MOST_DRAFTS + 1, MOST_DRAFTS + 1))
        ids = [self.rng.randrange(VOCAB) if self.rng.random() < self.wrong else token_id for token_id in rest[:most]]
        # Also beyond the end of the answer.
        ids += [self.rng.randrange(VOCAB)] * (most - len(ids))
        return Guess(tuple(ids), (0.99,) * len(ids)) if ids else NO_GUESS


def core_of(engine: Engine, guesses: KnownAnswers | None, num_blocks: int = 0) -> EngineCore:
    config = engine.config
    assert config.num_blocks and config.block_size and config.max_model_len
    limits = SchedulerConfig(
        max_num_seqs=40, max_num_batched_tokens=64, max_model_len=config.max_model_len, max_draws=64
    )
    cache = KVCache(num_blocks or config.num_blocks, config.block_size, engine.runner.cache_windows, step_tokens=64)
    return EngineCore(
        Scheduler(limits, cache, guesser=guesses),
        ThreadExecutor(engine.runner, WorkerThread()),
        vocab_size=VOCAB,
        guesses=guesses,
    )


OPTIONS: tuple[dict[str, object], ...] = (
    {},
    {"logprobs": None},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 6, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
    {"temperature": 1.3, "seed": 7, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"repetition_penalty": 1.8, "logprobs": 5},
    {"temperature": 0.9, "seed": 8, "min_tokens": 9, "stop_token_ids": tuple(range(0, VOCAB, 3))},
    {"temperature": 1.0, "seed": 9, "eos_token_ids": tuple(range(0, VOCAB, 17))},
    {"temperature": 1.0, "seed": 3, "bad_words": ((5, 6), (7,), (1, 2, 3))},
    {"logit_bias": ((3, 2.5), (9, -4.0)), "max_tokens": 3},
    {"temperature": 1.0, "seed": 4, "allowed_token_ids": tuple(range(40))},
    {"prompt_logprobs": 2, "max_tokens": 40},
)  # fmt: skip


def submits(number: int) -> Iterator[Submit]:
    """Requests of every option, with prompts of which some share a beginning."""
    shared = prompt(99, 48)
    for index in range(number):
        own = prompt(index, 3 + 5 * index % 37)
        yield request(f"r{index}", shared + own if index % 3 == 0 else own, **OPTIONS[index % len(OPTIONS)])


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path: Path = save(tmp_path_factory.mktemp("model"), "qwen3")
    return Engine.load(path, request.param, speculative="ngram")


def test_drafts_change_no_bit(engine: Engine) -> None:
    asked = list(submits(32))
    plain = {one.request_id: run(core_of(engine, None), one)[one.request_id] for one in asked}
    for wrong in (0.0, 0.2, 1.0):
        guesses = KnownAnswers(plain, random.Random(1), wrong)
        core = core_of(engine, guesses)
        assert run(core, *asked) == plain
        stats = core._scheduler.stats
        assert stats.num_drafts > 50, "nothing was speculated"
        assert sum(stats.accepted_drafts) == stats.num_drafts if wrong == 0.0 else True
        for one in asked[:12]:
            assert run(core_of(engine, guesses), one) == {one.request_id: plain[one.request_id]}
