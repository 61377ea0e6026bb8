"""Constrained output with the whole engine and the embedded model, at temperature 1, with a prompt that does not ask
for JSON. Output that ends by itself is valid, and all promises hold that hold without a grammar."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import AskedConfig, EngineConfig
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.resolve import resolve
from inferd.engine.api.wire.messages import Failure, Submit, WireLogprobs
from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.grammar.compiler import normal_form
from inferd.engine.grammar.thread import GrammarThread
from inferd.engine.grammar.vocabulary import load_vocabulary
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.speculation.guesses import Guesses
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from inferd.engine.worker.load import load_worker
from inferd.server.structured.language import Language, json_value, one_of, pattern
from inferd.server.structured.schema import read_schema
from tests.cpu.schemas import Schema, errors_of, make_schema, with_unenforced

IS_RECORDED = False

MODEL_PATH = Path(__file__).resolve().parents[2] / "engine" / "tiny" / "model"
VOCAB_SIZE = 3_072
EOS = (2, 0)
MAX_SEQS = 32
CHUNK = 25
SHORT, LONG = 4, 80
"""Number of chunks of schemas: 150, and 2,000 with `--long`."""
PEOPLE: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@dataclass
class Answer:
    """Results of one request."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[WireLogprobs, ...] = ()
    reason: str | None = None
    stop_token_id: int | None = None
    failure: Failure | None = None


@dataclass
class Engine:
    """The embedded model, with a fresh core for each run."""

    config: EngineConfig
    worker: object
    grammars: GrammarThread
    thread: WorkerThread
    vocabulary: LLTokenizer
    prompt: tuple[int, ...] = field(default=())

    def core(self, *, num_blocks: int = 0, depth: int = 1, guesses: Guesses | None = None) -> EngineCore:
        config, worker = self.config, self.worker
        assert config.num_blocks and config.block_size and config.max_model_len
        limits = SchedulerConfig(
            max_num_seqs=MAX_SEQS, max_num_batched_tokens=64, max_model_len=config.max_model_len, max_draws=64
        )
        cache = KVCache(num_blocks or config.num_blocks, config.block_size, worker.cache_windows, step_tokens=64)  # type: ignore[attr-defined]
        executor = ThreadExecutor(worker, self.thread)  # type: ignore[arg-type]
        return EngineCore(
            Scheduler(limits, cache, guesser=guesses),
            executor,
            vocab_size=VOCAB_SIZE,
            depth=depth,
            grammars=self.grammars,
            guesses=guesses,
        )

    def run(self, core: EngineCore, *submits: Submit) -> dict[str, Answer]:
        for submit in submits:
            core.submit(submit, now=0.0)
        answers = {submit.request_id: Answer(submit.emitted_ids) for submit in submits}
        while core.has_work or core.is_awaiting:
            if not core.has_work:
                time.sleep(0.001)  # a grammar is being compiled: poll, as the process's loop does
            output = core.step(0.0)
            for delta in output.deltas if output else ():
                answer = answers[delta.request_id]
                assert answer.reason is None, "a delta after the terminal one"
                answer.token_ids += delta.token_ids
                answer.logprobs += delta.logprobs
                answer.reason, answer.failure = delta.finish_reason, delta.failure
                answer.stop_token_id = delta.stop_token_id
        core.check()
        return answers

    def submit(self, name: str, language: Language | None, **params: object) -> Submit:
        defaults: dict[str, object] = {
            "max_tokens": 200, "seed": 11, "temperature": 1.0, "eos_token_ids": EOS,
            "grammar": "" if language is None else normal_form(language.text()).text,
        }  # fmt: skip
        emitted = params.pop("emitted_ids", ())
        return Submit(
            request_id=name,
            prompt_ids=self.prompt,
            params=SamplingParams(**{**defaults, **params}),  # type: ignore[arg-type]
            emitted_ids=emitted,  # type: ignore[arg-type]
        )

    def ask(self, language: Language | None, **params: object) -> Answer:
        return self.run(self.core(), self.submit("r", language, **params))["r"]

    def text(self, answer: Answer) -> str:
        """The text without the token that ended it."""
        ids = answer.token_ids[:-1] if answer.stop_token_id is not None else answer.token_ids
        return self.vocabulary.decode_bytes(list(ids)).decode()


@pytest.fixture(scope="module")
def engine(kernels: str) -> Iterator[Engine]:
    del kernels
    asked = AskedConfig(model_path=str(MODEL_PATH), kv_memory_bytes=64 * 2**20, max_num_seqs=MAX_SEQS, block_size=16)
    config, _, _ = resolve(asked, ModelFacts.of(Checkpoint.read(MODEL_PATH)), Machine.detect())
    thread = WorkerThread()
    worker, _ = thread.submit(load_worker, config, time.monotonic(), lambda phase: None).result()
    vocabulary = load_vocabulary(MODEL_PATH, VOCAB_SIZE)
    prompt = vocabulary.tokenize_str(
        "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n", parse_special=True
    )
    grammars = GrammarThread(MODEL_PATH, VOCAB_SIZE)
    yield Engine(config, worker, grammars, thread, vocabulary, tuple(prompt))
    grammars.close()
    thread.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chunk" in metafunc.fixturenames:
        metafunc.parametrize("chunk", range(LONG if metafunc.config.getoption("--long") else SHORT))


# -- valid -------------------------------------------------------------------------------------------------------------


def test_what_ends_by_itself_is_valid(engine: Engine, chunk: int) -> None:
    """Under generated schemas. Every second one is read leniently and has keywords that are left to the model."""
    seeds = range(CHUNK * chunk, CHUNK * (chunk + 1))
    schemas = {str(seed): make_schema(seed) for seed in seeds}
    submits = []
    for seed in seeds:
        is_strict = seed % 2 == 0
        asked = schemas[str(seed)] if is_strict else with_unenforced(schemas[str(seed)], seed)
        submits.append(engine.submit(str(seed), read_schema(asked, "schema", is_strict=is_strict), seed=seed))
    answers = engine.run(engine.core(), *submits)
    wrong = {}
    for name, answer in answers.items():
        assert answer.reason in ("stop", "length"), answer
        if answer.reason == "stop":
            text = engine.text(answer)
            found = errors_of(json.loads(text), schemas[name])
            if found:
                wrong[name] = (text, found)
    assert wrong == {}
    num_ended = sum(answer.reason == "stop" for answer in answers.values())
    assert num_ended >= 0.7 * CHUNK, f"{num_ended} of {CHUNK} answers ended by themselves: too few to tell"


def test_drafts_change_no_answer(engine: Engine, is_long: bool) -> None:
    """With forced tokens, and what earlier answers to the same schemas had, as drafts. The scheduler drafts only if the
    measured times of steps promise that it pays, so a busy machine needs more requests for as many drafts."""
    num_drafts = num_accepted = 0
    for first in range(0, 400, 8):
        if num_accepted > 10 and not is_long:
            break
        submits = [
            engine.submit(
                f"{seed}",
                read_schema(make_schema(seed // 2), "schema", is_strict=True),
                seed=seed,
                logprobs=1 if seed % 3 else None,
                frequency_penalty=0.3 * (seed % 4 == 1),
                max_tokens=60,
            )
            for seed in range(first, first + 8)
        ]
        plain = engine.run(engine.core(), *submits)
        core = engine.core(guesses=Guesses(looks_at_answers=True))
        assert core._scheduler._drafting is not None
        core._scheduler._drafting.ignore_gains()
        for submit in submits[:2]:
            assert engine.run(core, submit)[submit.request_id] == plain[submit.request_id]
        assert engine.run(core, *submits) == plain
        num_drafts += core._scheduler.stats.num_drafts
        num_accepted += sum(core._scheduler.stats.accepted_drafts)
    assert num_drafts > num_accepted > 10, "nothing was speculated, or all of it was right"


def test_a_wrong_answer_would_be_seen() -> None:
    schema = {"type": "string", "format": "date"}
    assert errors_of("2026-13-01", schema) and not errors_of("2026-12-01", schema)
    assert errors_of({"a": 1}, {"properties": {"a": {"type": "string"}}})


def test_any_json_object_is_one(engine: Engine) -> None:
    language = json_value({"type": "object"})
    answers = engine.run(engine.core(), *(engine.submit(str(i), language, seed=i) for i in range(MAX_SEQS)))
    ended = [json.loads(engine.text(answer)) for answer in answers.values() if answer.reason == "stop"]
    assert len(ended) >= MAX_SEQS // 4 and all(isinstance(value, dict) for value in ended)


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_complete_grammar_ends_without_an_end_token(engine: Engine) -> None:
    for params in ({}, {"eos_token_ids": ()}, {"min_tokens": 50, "max_tokens": 60}):
        answer = engine.ask(pattern("[0-9]{4}-[0-9]{2}"), **params)
        assert (answer.reason, answer.stop_token_id) == ("stop", None)
        assert re.fullmatch("[0-9]{4}-[0-9]{2}", engine.text(answer))


def test_where_more_may_follow_the_model_ends_it_or_the_length(engine: Engine) -> None:
    language = pattern("[ab]+")
    answers = [engine.ask(language, seed=seed, max_tokens=400) for seed in range(6)]
    assert any(answer.reason == "stop" and answer.stop_token_id in EOS for answer in answers)
    endless = engine.ask(language, eos_token_ids=(), max_tokens=40)
    assert (endless.reason, len(endless.token_ids)) == ("length", 40)
    least = engine.ask(language, min_tokens=40, max_tokens=400)
    assert len(least.token_ids) >= 40


def test_a_stop_token_of_the_callers_ends_it_where_it_may_end(engine: Engine) -> None:
    (comma,) = engine.vocabulary.tokenize_str(",")
    answer = engine.ask(pattern("[ab]{3}(c[ab]{3})*"), stop_token_ids=(comma,), logit_bias=((comma, 100.0),))
    assert (answer.reason, answer.stop_token_id) == ("stop", comma)
    assert re.fullmatch("[ab]{3}", engine.text(answer))


def test_what_other_parameters_forbid_is_told(engine: Engine) -> None:
    """The grammar applies first. If other parameters leave none of its tokens, that request alone fails."""
    digit = tuple(engine.vocabulary.tokenize_str(str(i))[0] for i in range(10))
    core = engine.core()
    answers = engine.run(
        core,
        engine.submit("bad words", one_of(["yes", "no"]), bad_words=tuple((i,) for i in range(VOCAB_SIZE))),
        engine.submit("allowed", pattern("[a-z]+"), allowed_token_ids=digit),
        engine.submit("banned", pattern("[0-9]{3}"), allowed_token_ids=digit, logit_bias=((digit[7], -100.0),)),
        engine.submit("free", None, max_tokens=8),
    )
    for name in ("bad words", "allowed"):
        failure = answers[name].failure
        assert failure is not None and failure.code == "invalid_value"
        assert "the grammar, allowed_token_ids" in failure.message and "after 0 tokens" in failure.message
    assert set(answers["banned"].token_ids) <= set(digit)
    assert answers["free"].failure is None and answers["free"].token_ids


def test_an_answer_that_may_end_ends_where_nothing_else_is_left(engine: Engine) -> None:
    digit = tuple(engine.vocabulary.tokenize_str(str(i))[0] for i in range(10))
    only_one = engine.ask(pattern("([0-9][a-z]?)*"), eos_token_ids=(), allowed_token_ids=digit, max_tokens=9)
    assert only_one.reason == "length"
    (x,) = engine.vocabulary.tokenize_str("x")
    stuck = engine.ask(pattern("x([0-9]x)*"), eos_token_ids=(), allowed_token_ids=(x,), max_tokens=9)
    assert (stuck.reason, stuck.token_ids, stuck.failure) == ("stop", (x,), None)


def test_a_grammar_that_becomes_too_complex_fails_its_own_request(engine: Engine) -> None:
    rules = "\n".join(f'r{i}: "a"? "b"*' for i in range(2_000))
    wide = 'start: "q" ' + " ".join(f"r{i}" for i in range(2_000)) + "\n" + rules
    answers = engine.run(
        engine.core(),
        Submit(
            request_id="wide",
            prompt_ids=engine.prompt,
            params=SamplingParams(max_tokens=50, seed=0, eos_token_ids=EOS, grammar=wide),
        ),
        engine.submit("other", pattern("[0-9]{20}")),
    )
    failure = answers["wide"].failure
    assert failure is not None and failure.param == "grammar"
    assert "could not be followed beyond token 1 of the answer: " in failure.message
    assert re.fullmatch("[0-9]{20}", engine.text(answers["other"]))


def test_a_grammar_that_does_not_compile_fails_its_own_request(engine: Engine) -> None:
    answer = engine.ask(pattern("(a"))
    assert answer.failure is not None and "the grammar cannot be served: invalid regex" in answer.failure.message
    assert answer.failure.param == "grammar"


# -- the same tokens every time ----------------------------------------------------------------------------------------


def mixed(engine: Engine) -> list[Submit]:
    """Greedy and sampled, with and without a grammar, with all options that change a draw."""
    people, short = json_value(PEOPLE), pattern("[a-z]{3}( [a-z]{3}){0,9}")
    return [
        engine.submit("greedy", people, temperature=0.0, logprobs=2),
        engine.submit("sampled", people, logprobs=0),
        engine.submit("cut", people, top_k=40, top_p=0.9, seed=5),
        engine.submit("penalised", short, repetition_penalty=1.3, frequency_penalty=0.5, seed=9),
        engine.submit("free", None, max_tokens=40, logprobs=3),
        engine.submit("plain", None, max_tokens=40, temperature=0.0),
        *(engine.submit(f"more {i}", short, seed=i, max_tokens=30) for i in range(8)),
    ]


def test_answers_do_not_depend_on_the_batch_on_overlap_or_on_preemption(engine: Engine) -> None:
    submits = mixed(engine)
    alone = {submit.request_id: engine.run(engine.core(), submit)[submit.request_id] for submit in submits}
    assert engine.run(engine.core(), *submits) == alone
    assert engine.run(engine.core(depth=0), *submits) == alone
    tight = engine.core(num_blocks=24)
    assert engine.run(tight, *submits) == alone
    assert tight.stats().num_preemptions > 0


def test_a_replay_goes_on_within_its_grammar(engine: Engine) -> None:
    whole = engine.ask(json_value(PEOPLE))
    for num_emitted in (1, len(whole.token_ids) // 2, len(whole.token_ids)):
        submit = engine.submit("r", json_value(PEOPLE), emitted_ids=whole.token_ids[:num_emitted])
        again = engine.run(engine.core(), submit)["r"]
        assert (again.token_ids, again.reason) == (whole.token_ids, whole.reason)


def test_an_abort_while_the_grammar_is_compiled(engine: Engine) -> None:
    core = engine.core()
    core.submit(engine.submit("r", json_value({"enum": [f"v{i}" for i in range(4_000)]})), now=0.0)
    core.abort(["r"])
    output = core.flush()
    assert output is not None and [delta.finish_reason for delta in output.deltas] == ["abort"]
    assert not core.is_awaiting and not core.has_work
    core.check()


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    """They are of the distribution before the grammar, so forbidden tokens stay among the alternatives."""
    free = engine.ask(None, max_tokens=1, logprobs=5, temperature=0.0)
    bound = engine.ask(pattern("[0-9]"), max_tokens=1, logprobs=5, temperature=0.0)
    assert bound.logprobs[0].top == free.logprobs[0].top
    assert bound.token_ids != free.token_ids and bound.logprobs[0].rank > 1
