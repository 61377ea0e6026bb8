"""Runs whole engines on random encoders: what is pooled, what a classifier says, and that bits depend on a text alone.

Poolings are compared with sentence-transformers' formulas in float64, on the hidden states of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import AskedConfig
from inferd.engine.api.encoder_model import EncoderFacts
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.resolve_encoder import resolve_encoder
from inferd.engine.api.wire.messages import Delta, Ready, Submit
from inferd.engine.api.wire.params import Pooling, PoolingKind, SamplingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.worker.encoding import EncoderWorker
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from inferd.engine.worker.load import load_any
from inferd.engine.worker.text_pooling import POOLINGS, pooled
from tests.cpu.encoder_cases import CASES, VOCAB, EncoderCase, load_transformers
from tests.cpu.sentence_modules import write_modules

CLOSE = 2e-5
"""Largest difference of a component from float64. Measured: 4e-6."""
CLASSIFIES = "ForSequenceClassification"


def case_named(name: str) -> EncoderCase:
    return next(case for case in CASES if case.name == name)


class Served:
    """An engine of one encoder, and what it answers."""

    def __init__(self, path: Path, **asked: Any) -> None:
        facts = EncoderFacts.of(Checkpoint.read(path))
        config, _, _ = resolve_encoder(AskedConfig(model_path=str(path), **asked), facts, Machine.detect())
        thread = WorkerThread()
        worker, self.ready = thread.submit(load_any, config, 0.0, lambda phase: None).result()
        assert isinstance(worker, EncoderWorker)
        limits = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            keeps_prompts_whole=True,
        )
        cache = KVCache(config.num_blocks, config.block_size, worker.cache_windows, shares_prefixes=False)
        executor = ThreadExecutor(worker, thread)
        self._core = EngineCore(
            Scheduler(limits, cache), executor, vocab_size=self.ready.vocab_size, refuses=self.ready.refuses
        )

    def answers(self, asks: Mapping[str, tuple[Sequence[int], Pooling | None]]) -> dict[str, Delta]:
        """The last delta of each request. All are sent at once."""
        for name, (ids, pooling) in asks.items():
            params = SamplingParams(max_tokens=0 if pooling else 1, seed=0, pooling=pooling)
            self._core.submit(Submit(request_id=name, prompt_ids=tuple(ids), params=params), 1.0)
        ended: dict[str, Delta] = {}
        while self._core.has_work:
            output = self._core.step(1.0)
            ended |= {delta.request_id: delta for delta in (output.deltas if output else ()) if delta.finish_reason}
        assert ended.keys() == asks.keys()
        return ended

    def vectors(self, asks: Mapping[str, tuple[Sequence[int], Pooling]]) -> dict[str, Tensor]:
        """The numbers of each request's answer, fp32."""
        found = {}
        for name, delta in self.answers(asks).items():
            assert delta.finish_reason == "stop", delta.failure
            found[name] = torch.frombuffer(bytearray(delta.embedding), dtype=torch.float32)
        return found


def texts(lengths: Sequence[int]) -> list[list[int]]:
    torch.manual_seed(5)
    return [torch.randint(4, VOCAB, (length,)).tolist() for length in lengths]


def states_of(model: Any, ids: Sequence[int], types: Sequence[int] | None = None) -> Tensor:
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.inference_mode():
        found: Tensor = model(input_ids=torch.tensor([ids]), **given).last_hidden_state[0]
    return found


def by_formula(states: Tensor, how: PoolingKind) -> Tensor:
    """As sentence-transformers pools, without padding."""
    count = states.shape[0]
    weights = torch.arange(1, count + 1, dtype=states.dtype)[:, None]
    pooled_as: dict[PoolingKind, Tensor] = {
        "cls": states[0],
        "last": states[-1],
        "max": states.max(0).values,
        "mean": states.sum(0) / count,
        "mean_sqrt_len": states.sum(0) / count**0.5,
        "weightedmean": (states * weights).sum(0) / weights.sum(),
    }
    return pooled_as[how]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    case_named("bert").save(path)
    return path


@pytest.mark.parametrize("how", POOLINGS)
def test_a_text_is_pooled_as_sentence_transformers_pools_it(bert: Path, how: PoolingKind) -> None:
    served, exact = Served(bert), load_transformers(bert, torch.float64)
    asks = {str(i): (ids, Pooling(how, is_normalized=False)) for i, ids in enumerate(texts((7, 1, 120)))}
    for name, vector in served.vectors(asks).items():
        assert float((vector - by_formula(states_of(exact, asks[name][0]), how)).abs().max()) < CLOSE


def test_vectors_are_cut_and_scaled_as_asked(bert: Path) -> None:
    served, (ids,) = Served(bert), texts((9,))
    found = served.vectors(
        {
            "whole": (ids, Pooling("mean", is_normalized=False)),
            "cut": (ids, Pooling("mean", 16)),
            "unit": (ids, Pooling("mean")),
        }
    )
    torch.testing.assert_close(found["cut"], found["whole"][:16] / found["whole"][:16].norm())
    torch.testing.assert_close(found["unit"], found["whole"] / found["whole"].norm())


def test_a_folders_dense_layers_follow_the_pooling(tmp_path: Path) -> None:
    case_named("bert").save(tmp_path)
    torch.manual_seed(2)
    dense = nn.Sequential(nn.Linear(64, 24), nn.Tanh())
    write_modules(tmp_path, ["mean", dense])
    served, exact, (ids,) = Served(tmp_path), load_transformers(tmp_path, torch.float64), texts((17,))
    assert served.ready.hidden_size == 24
    assert not served.ready.gives_token_embeddings, "the layers are for pooled states"
    found = served.vectors({"a": (ids, Pooling("mean", is_normalized=False))})["a"]
    with torch.inference_mode():
        theirs = dense.double()(by_formula(states_of(exact, ids), "mean"))
    assert float((found - theirs).abs().max()) < CLOSE


def test_every_token_has_a_vector(bert: Path) -> None:
    served, exact, (ids,) = Served(bert), load_transformers(bert, torch.float64), texts((11,))
    asked = Pooling(gives="token_embeddings", is_normalized=False)
    found = served.vectors({"a": (ids, asked)})["a"].view(11, -1)
    assert float((found - states_of(exact, ids)).abs().max()) < CLOSE
    unit = served.vectors({"a": (ids, Pooling(gives="token_embeddings"))})["a"].view(11, -1)
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(11))


def test_the_second_text_of_a_pair_has_the_second_type(bert: Path) -> None:
    served, exact, (ids,) = Served(bert), load_transformers(bert, torch.float64), texts((12,))
    asks = {
        "pair": (ids, Pooling("cls", is_normalized=False, num_first=5)),
        "one": (ids, Pooling("cls", is_normalized=False)),
    }
    found = served.vectors(asks)
    theirs = states_of(exact, ids, [0] * 5 + [1] * 7)[0]
    assert float((found["pair"] - theirs).abs().max()) < CLOSE < float((found["one"] - theirs).abs().max())


@pytest.mark.parametrize("name", ["bert", "modernbert", "xlm-roberta"])
def test_a_classifier_answers_with_its_logits(name: str, tmp_path: Path) -> None:
    case_named(name).save(tmp_path, end=CLASSIFIES)
    served, exact = Served(tmp_path), load_transformers(tmp_path, torch.float64)
    assert (served.ready.num_labels, served.ready.num_blocks) == (3, 0), "no block of KV has memory"
    asks = {str(i): (ids, Pooling(gives="logits")) for i, ids in enumerate(texts((30, 4)))}
    for key, logits in served.vectors(asks).items():
        with torch.inference_mode():
            theirs = exact(input_ids=torch.tensor([asks[key][0]])).logits[0]
        assert float((logits - theirs).abs().max()) < CLOSE


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_the_same_bits_whatever_runs_beside_it(name: str, quantization: str, tmp_path: Path) -> None:
    case_named(name).save(tmp_path, end=CLASSIFIES)
    served = Served(tmp_path, quantization=quantization, max_num_batched_tokens=200)
    lengths = (7, 120, 1, 33, 64, 15, 150, 3)
    asked = [*(Pooling(how) for how in POOLINGS), Pooling(gives="logits"), Pooling(gives="token_embeddings")]
    asks = {str(i): (ids, asked[i]) for i, ids in enumerate(texts(lengths))}
    together = served.vectors(asks)
    other = served.vectors(dict(reversed(asks.items())))
    for key, ask in asks.items():
        alone = served.vectors({key: ask})[key]
        assert torch.equal(alone, together[key]) and torch.equal(alone, other[key])


@pytest.mark.parametrize("how", ["mean", "weightedmean", "mean_sqrt_len"])
def test_sums_do_not_depend_on_the_order_of_tokens_and_fail_loudly(how: PoolingKind) -> None:
    torch.manual_seed(0)
    states = torch.randn(300, 8)
    backwards = pooled(states.flip(0), [300], how)
    assert torch.equal(pooled(states, [300], how), backwards) is (how != "weightedmean")
    states[100, 3] = float("nan")
    states[250, 2] = 1e9
    found = pooled(states, [50, 100, 150], how)
    assert found[0].isfinite().all() and found[1:].isnan().all()


def refusal(ready: Ready, pooling: Pooling | None) -> str | None:
    return ready.refuses(SamplingParams(max_tokens=0 if pooling else 1, seed=0, pooling=pooling))


def test_what_the_engine_cannot_answer_fails_alone(bert: Path) -> None:
    served, (ids,) = Served(bert), texts((5,))
    asks: dict[str, tuple[Sequence[int], Pooling | None]] = {
        "fine": (ids, Pooling("cls")), "draws": (ids, None), "classifies": (ids, Pooling(gives="logits")),
        "long": ([5] * 161, Pooling("cls")), "unknown": ([VOCAB], Pooling("cls")),
    }  # fmt: skip
    ended = served.answers(asks)
    reasons = {name: "" if delta.failure is None else delta.failure.message for name, delta in ended.items()}
    assert reasons.pop("fine") == ""
    assert "draws no tokens" in reasons["draws"] and "no classifier" in reasons["classifies"]
    assert ("160" in reasons["long"] and f"below {VOCAB}" in reasons["unknown"]) or str(VOCAB) in reasons["unknown"]
    decoder = msgspec.structs.replace(served.ready, generates=True, poolings=("last",), gives_token_embeddings=False)
    assert refusal(decoder, None) is None and refusal(decoder, Pooling("last")) is None
    assert "'cls'" in str(refusal(decoder, Pooling("cls")))
    assert "each token" in str(refusal(decoder, Pooling(gives="token_embeddings")))
