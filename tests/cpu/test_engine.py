"""The whole engine in one process: real core, scheduler, cache, worker and model, compared with transformers and
itself.

The bitwise promise is tested here as users see it. A request's ids and logprobs have the same bits alone, among 32,
chunked, with a prefix hit, and after preemption.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import AskedConfig, EngineConfig
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.resolve import resolve
from inferd.engine.api.wire.messages import Delta, Submit
from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from inferd.engine.worker.load import load_worker
from inferd.engine.worker.runner import Runner
from tests.cpu.test_parity import continues

VOCAB = 320
NUM_NEW = 24
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}


def save(path: Path, family: str) -> Path:
    """Save a random checkpoint whose logits are far from ties: its weights are three times their usual size."""
    torch.manual_seed(7)
    model = (
        LlamaForCausalLM(LlamaConfig(**SHAPE))
        if family == "llama"
        else Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, use_sliding_window=False))
    )
    for parameter in model.parameters():
        parameter.data.mul_(3)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save(tmp_path_factory.mktemp(family), family) for family in ("llama", "qwen3")}


@dataclass
class Engine:
    """One worker, with a fresh scheduler and cache for each run."""

    runner: Runner
    config: EngineConfig

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: str,
        kv_cache_dtype: str = "auto",
        facts: ModelFacts | None = None,
        **settings: object,
    ) -> Engine:
        given = {"kv_memory_bytes": 16 * 2**20, "max_num_seqs": 40, "block_size": 16, **settings}
        asked = AskedConfig(model_path=str(path), dtype=dtype, kv_cache_dtype=kv_cache_dtype, **given)  # type: ignore[arg-type]
        machine = Machine.detect()
        machine = replace(machine, num_cpus=max(machine.num_cpus, asked.tensor_parallel_size))
        config, _, _ = resolve(asked, facts or ModelFacts.of(Checkpoint.read(path)), machine)
        runner, _ = load_worker(config, time.monotonic(), lambda phase: None)
        return cls(runner, config)

    def core(self, *, num_blocks: int = 0, max_num_batched_tokens: int = 256, depth: int = 1) -> EngineCore:
        assert self.config.num_blocks and self.config.block_size and self.config.max_model_len
        limits = SchedulerConfig(
            max_num_seqs=40, max_num_batched_tokens=max_num_batched_tokens, max_model_len=self.config.max_model_len
        )
        cache = KVCache(
            num_blocks or self.config.num_blocks,
            self.config.block_size,
            self.runner.cache_windows,
            step_tokens=max_num_batched_tokens,
        )
        executor = ThreadExecutor(self.runner, WorkerThread())
        return EngineCore(Scheduler(limits, cache), executor, vocab_size=VOCAB, depth=depth)


@dataclass
class Answer:
    """Results of one request. Comparing two answers compares every bit."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[object, ...] = ()
    prompt_logprobs: tuple[object, ...] = ()
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        assert self.finish_reason is None, "a delta after the terminal one"
        assert delta.failure is None, delta.failure
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish_reason = delta.finish_reason


def run(core: EngineCore, *submits: Submit) -> dict[str, Answer]:
    for submit in submits:
        core.submit(submit, now=0.0)
    answers = {submit.request_id: Answer() for submit in submits}
    while core.has_work:
        output = core.step(0.0)
        for delta in output.deltas if output else ():
            answers[delta.request_id].add(delta)
    core.check()
    return answers


def prompt(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())


def request(name: str, prompt_ids: tuple[int, ...], **params: object) -> Submit:
    defaults: dict[str, object] = {"max_tokens": NUM_NEW, "seed": 11, "temperature": 0.0, "logprobs": 3}
    return Submit(request_id=name, prompt_ids=prompt_ids, params=SamplingParams(**{**defaults, **params}))  # type: ignore[arg-type]


def neighbours(count: int) -> list[Submit]:
    """Requests of all lengths and kinds."""
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 1.3, "top_k": 20, "logprobs": None, "max_tokens": 9},
    ]
    return [request(f"n{i}", prompt(100 + i, 1 + 7 * i % 90), **kinds[i % len(kinds)]) for i in range(count)]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ids_are_those_of_transformers_alone_and_32_at_once(checkpoints: dict[str, Path], family: str) -> None:
    path = checkpoints[family]
    engine = Engine.load(path, "float32")
    model = (LlamaForCausalLM if family == "llama" else Qwen3ForCausalLM).from_pretrained(path, dtype=torch.float32)
    prompts = {f"p{i}": prompt(i, 3 + 5 * i) for i in range(32)}
    together = run(engine.core(), *(request(name, ids) for name, ids in prompts.items()))
    for name, answer in together.items():
        assert len(answer.token_ids) == NUM_NEW and continues(model, prompts[name], answer.token_ids)
    for name in ("p0", "p1", "p31"):
        assert run(engine.core(), request(name, prompts[name]))[name].token_ids == together[name].token_ids


@pytest.fixture(
    scope="module", params=[("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8"), ("float32", "int8")]
)
def engine(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Engine:
    return Engine.load(checkpoints["qwen3"], *request.param)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"temperature": 1.0}, id="sampled"),
        pytest.param({"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.5, "min_p": 0.01}, id="shaped"),
    ],
)
def test_the_same_bits_whatever_runs_beside_it(engine: Engine, params: dict[str, object]) -> None:
    ids = prompt(1, 75)
    submit = request("x", ids, **params)
    alone = run(engine.core(), submit)["x"]
    assert len(alone.token_ids) == len(alone.logprobs) == NUM_NEW

    crowd = neighbours(31)
    assert run(engine.core(), *crowd[:17], submit, *crowd[17:])["x"] == alone, "among 32"
    assert run(engine.core(depth=0), submit)["x"] == alone, "without overlap"
    for budget in (7, 16, 33):
        assert run(engine.core(max_num_batched_tokens=budget), submit)["x"] == alone, f"in chunks of {budget}"

    warm = engine.core()
    run(warm, request("earlier", (*ids[:60], 1, 2, 3)))
    assert run(warm, submit)["x"] == alone, "with a prefix hit"
    assert warm.stats().prefix_hit_tokens == 48

    tight = engine.core(num_blocks=10)
    rivals = [request(f"r{i}", prompt(200 + i, 40)) for i in range(3)]
    answers = run(tight, *rivals, submit)
    assert tight.stats().num_preemptions > 0
    assert answers["x"] == alone, "after preemption, its own or others'"


def test_prompt_logprobs_are_the_same_bits_chunked(engine: Engine) -> None:
    submit = request("x", prompt(2, 50), prompt_logprobs=2, max_tokens=1)
    whole = run(engine.core(), submit)["x"]
    assert len(whole.prompt_logprobs) == 49
    for budget in (1, 8, 49):
        assert run(engine.core(max_num_batched_tokens=budget), submit)["x"] == whole


def test_replaying_what_was_emitted_goes_on_with_the_same_ids(engine: Engine) -> None:
    submit = request("x", prompt(3, 30), temperature=1.0, repetition_penalty=1.3)
    whole = run(engine.core(), submit)["x"]
    for emitted in (1, 10, NUM_NEW - 1):
        replay = msgspec.structs.replace(submit, emitted_ids=whole.token_ids[:emitted])
        rest = run(engine.core(), replay)["x"]
        assert rest.token_ids == whole.token_ids[emitted:]
        assert rest.logprobs == whole.logprobs[emitted:]


def test_another_seed_gives_other_tokens(engine: Engine) -> None:
    """Shows that the bitwise tests do not compare a constant."""
    first = run(engine.core(), request("x", prompt(1, 75), temperature=1.0, seed=1))["x"]
    second = run(engine.core(), request("x", prompt(1, 75), temperature=1.0, seed=2))["x"]
    assert first.token_ids != second.token_ids


def test_a_nan_fails_its_own_request_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of NaN among the logits, as from a broken activation, ends one request and affects no other."""
    decoder = engine.runner.model.decoder
    true_logits = decoder.logits
    alone = run(engine.core(), request("good", prompt(4, 20)))["good"]

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = true_logits(hidden)
        if logits.shape[0] == 2:
            logits[0] = float("nan")
        return logits

    monkeypatch.setattr(decoder, "logits", poisoned)
    core = engine.core()
    for submit in (request("bad", prompt(5, 20)), request("good", prompt(4, 20))):
        core.submit(submit, now=0.0)
    failures, good = {}, Answer()
    while core.has_work:
        output = core.step(0.0)
        for delta in output.deltas if output else ():
            if delta.failure is not None:
                failures[delta.request_id] = delta.failure.code
            else:
                good.add(delta)
    assert failures == {"bad": "numerical_error"}
    assert good == alone
    core.check()
