"""Speculation changes no bit: with drafts that are right, wrong and partly right, requests of every option give the ids
and logprobs that they give without, alone and in a batch, in every precision."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from inferd.engine.api.wire.messages import Submit
from inferd.engine.cache.state_checkpoints import StateCheckpointRules
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.grammar.ports import Grammar
from inferd.engine.layers.recurrent import States
from inferd.engine.models.decoder import Decoder
from inferd.engine.request import Request
from inferd.engine.sample.sampler import Sampler
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.plan import Row, StateCopy
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.speculation.ports import MOST_DRAFTS, NO_GUESS, Guess
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from inferd.engine.worker.runner import Runner
from inferd.engine.worker.states import StatePool
from tests.cpu.cases import CASES, HYBRIDS
from tests.cpu.test_engine import Answer, Engine, request, run, save

VOCAB = 211
"""Vocabulary of the smaller model."""


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


def core_of(
    engine: Engine, guesses: KnownAnswers | None, num_blocks: int = 0, checkpoints: StateCheckpointRules | None = None
) -> EngineCore:
    config = engine.config
    assert config.num_blocks and config.block_size and config.max_model_len
    limits = SchedulerConfig(
        max_num_seqs=40,
        max_num_batched_tokens=64,
        max_model_len=config.max_model_len,
        max_draws=config.most_draws if checkpoints else 64,
    )
    cache = KVCache(
        num_blocks or config.num_blocks,
        config.block_size,
        engine.runner.cache_windows,
        step_tokens=64,
        checkpoints=checkpoints,
    )
    scheduler = Scheduler(limits, cache, guesser=guesses)
    if scheduler._drafting is not None:
        scheduler._drafting.ignore_gains()
    return EngineCore(
        scheduler,
        ThreadExecutor(engine.runner, WorkerThread()),
        vocab_size=engine.runner.arch.vocab_size,
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


PRECISIONS: tuple[dict[str, str], ...] = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int4"},
    {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
)


WHOLE_GROUPS = {
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "shared_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
}
"""Sizes of a hybrid model that int4 can store."""


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3", settings) for settings in PRECISIONS] + [("gemma 3, tied", settings) for settings in PRECISIONS[:2]],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()),
)
def test_drafts_change_no_bit(family: str, settings: dict[str, str], tmp_path: Path, is_long: bool) -> None:
    """Alone, in a batch, with little memory. gemma 3 has layers with a window."""
    compare(Engine.load(saved(tmp_path, family), speculative="ngram", **settings), None, is_long=is_long)


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("family", ["qwen 3.5", "qwen3 next, an MLP", "granite 4, experts", "lfm2 moe"])
@pytest.mark.parametrize("settings", PRECISIONS[:4], ids=lambda settings: "-".join(settings.values()))
def test_drafts_change_no_state(family: str, settings: dict[str, str], tmp_path: Path, is_long: bool) -> None:
    """The same for hybrid models, also over checkpoints."""
    engine = Engine.load(saved(tmp_path, family), speculative="ngram", **settings)
    compare(engine, StateCheckpointRules(min(20, engine.config.num_checkpoints), 3 * 16), is_long=is_long)


def compare(engine: Engine, checkpoints: StateCheckpointRules | None, *, is_long: bool) -> None:
    """Answers with drafts are those without."""
    asked = list(submits(500 if is_long else len(OPTIONS) + 4))
    plain = run(core_of(engine, None, checkpoints=checkpoints), *asked)
    num_drafts = num_accepted = 0
    for wrong in (0.0, 0.2, 1.0):
        guesses = KnownAnswers(plain, random.Random(1), wrong)
        for num_blocks in (0, 24):
            core = core_of(engine, guesses, num_blocks, checkpoints)
            assert run(core, *asked) == plain
            num_drafts += core._scheduler.stats.num_drafts
            num_accepted += sum(core._scheduler.stats.accepted_drafts)
            if num_blocks:
                assert core.stats().num_preemptions > 0
        for one in asked[:: 40 if is_long else 3]:
            core = core_of(engine, guesses, checkpoints=checkpoints)
            assert run(core, one) == {one.request_id: plain[one.request_id]}
    assert num_drafts > num_accepted > 100


def test_a_wrong_state_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected drafts advance a state, accepted ones do not, or do twice."""
    engine = Engine.load(saved(tmp_path, "qwen 3.5"), dtype="float32", speculative="ngram")
    asked = [request(f"r{i}", prompt(i, 9)) for i in range(3)]
    plain = run(core_of(engine, None), *asked)
    rules = StateCheckpointRules(5, 3 * 16)
    accepted, advance = StatePool.accepted, Decoder.advance_states

    def all_of(self: StatePool, rows: Sequence[Row], counts: Sequence[int]) -> tuple[Tensor, States] | None:
        return accepted(self, rows, [row.num_drafts for row in rows])

    def twice(self: Decoder, projected: Tensor, states: States) -> None:
        advance(self, projected, states)
        advance(self, projected, states)

    mistakes: tuple[tuple[type, str, object], ...] = (
        (StatePool, "expect", StatePool.expect),
        (StatePool, "accepted", all_of),
        (StatePool, "accepted", lambda self, rows, counts: None),
        (Decoder, "advance_states", twice),
    )
    for owner, name, mistake in mistakes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, mistake)
            found = run(core_of(engine, KnownAnswers(plain, random.Random(1), 0.3), checkpoints=rules), *asked)
        assert (found == plain) == (name == "expect"), name


def test_the_next_turn_goes_on_from_the_right_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of an answer holds the state before the drafts of its row. A later state would be seen."""
    engine = Engine.load(saved(tmp_path, "qwen 3.5"), dtype="float32", speculative="ngram")
    asked = [request(f"r{i}", prompt(i, 20 + i)) for i in range(4)]
    plain = run(core_of(engine, None), *asked)
    turns = [request(f"{one.request_id}+", (*one.prompt_ids, *plain[one.request_id].token_ids, 7)) for one in asked]
    expected = run(core_of(engine, None), *turns)

    def next_turn() -> tuple[dict[str, Answer], int]:
        guesses = KnownAnswers(plain | expected, random.Random(1), 0.0)
        core = core_of(engine, guesses, checkpoints=StateCheckpointRules(20, 1000 * 16))
        run(core, *asked)
        return run(core, *turns), core.stats().prefix_hit_tokens

    assert next_turn() == (expected, 4 * 32)
    save, end, late = StatePool.save, Runner._end, list[tuple[StatePool, Iterable[StateCopy]]]()

    def save_late(self: Runner, *step: Any) -> Any:
        drawn = end(self, *step)
        while late:
            save(*late.pop())
        return drawn

    monkeypatch.setattr(StatePool, "save", lambda self, copies: late.append((self, copies)))
    monkeypatch.setattr(Runner, "_end", save_late)
    # Whether the row that leaves a checkpoint has drafts depends on how long steps take.
    assert any(next_turn()[0] != expected for _ in range(5))


def test_an_answer_with_a_wrong_token_would_be_seen(tmp_path: Path) -> None:
    """Guesses for another seed are rejected: an accepted draft of theirs would change the answer."""
    engine = Engine.load(saved(tmp_path, "qwen3"), dtype="float32", speculative="ngram")
    first, second = (request("r", prompt(1, 9), temperature=1.0, seed=seed) for seed in (1, 2))
    plain = run(core_of(engine, None), first)
    assert run(core_of(engine, None), second) != plain
    assert run(core_of(engine, KnownAnswers(plain, random.Random(1), 0.0)), second) != plain


def test_a_rejected_token_that_counts_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties must not see what was drawn behind a rejected draft."""
    engine = Engine.load(saved(tmp_path, "qwen3"), dtype="float32", speculative="ngram")
    penalties = {"repetition_penalty": 1.8, "frequency_penalty": 1.5}
    asked = [request(f"r{i}", prompt(i, 9), temperature=1.0, seed=i, **penalties) for i in range(6)]
    plain = run(core_of(engine, None), *asked)
    guesses = KnownAnswers(plain, random.Random(1), wrong=0.3)
    assert run(core_of(engine, guesses), *asked) == plain
    draw = Sampler._draw

    def record_all(self: Sampler, logits: Tensor, *of_rows: Any) -> tuple[Tensor, Tensor]:
        return draw(self, logits, *of_rows[:3])

    monkeypatch.setattr(Sampler, "_draw", record_all)
    assert run(core_of(engine, guesses), *asked) != plain


def saved(path: Path, family: str) -> Path:
    if family == "qwen3":
        return save(path, family)
    case = next(case for case in (*CASES, *HYBRIDS) if case.name == family)
    replace(case, config=case.config | WHOLE_GROUPS if case in HYBRIDS else case.config).save(path)
    return path


def prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB) for _ in range(length))
