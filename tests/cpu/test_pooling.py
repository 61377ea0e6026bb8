"""Pooled hidden states equal transformers'. Their bits are the same among other requests, in chunks, after prefix hits
and preemption."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from inferd.engine.api.sentence_folder import SentenceFolder
from inferd.engine.api.wire.messages import Submit
from inferd.engine.api.wire.params import Pooling, PoolingKind, SamplingParams
from inferd.engine.core.loop import EngineCore
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.pooled_heads import NO_HEADS, PooledHeads
from inferd.engine.sample.sampler import Sampler
from inferd.engine.sched.plan import Admission, Row, RowResult, RowStatus, StepPlan, TableUpdate
from inferd.engine.worker import pooling as worker_pooling
from inferd.engine.worker.device import CpuDevice
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.pooling import Pooler
from inferd.engine.worker.runner import Runner
from inferd.engine.worker.slots import Slots
from inferd.engine.worker.step import Step
from tests.cpu.capturing import CapturingDevice
from tests.cpu.cases import CASES
from tests.cpu.checkpoints import Case, load_decoder, load_transformers, random_decoder
from tests.cpu.sentence_modules import write_modules
from tests.cpu.test_engine import Engine, neighbours, prompt, request, save
from tests.cpu.test_no_waiting import nothing_is_read

KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)
RATIO = {torch.float32: 1.5, torch.bfloat16: 1.7}
"""Our error may be so many times that of transformers' own run in the dtype. Few numbers make a noisy ratio, and in
bfloat16 a router may choose another expert of two that are nearly alike."""
LENGTHS = (17, 18, 31, 100)
"""Length above the original context of a case for which transformers chooses frequencies by the length."""
MAX_LEN, BLOCK, NUM_SLOTS = 128, 16, 4


def runner_of(decoder: Decoder, device: CpuDevice | None = None, heads: PooledHeads = NO_HEADS) -> Runner:
    device = device or CpuDevice(1)
    num_groups = len(decoder.arch.cache_groups)
    kv = KVPool.allocate(decoder.arch, NUM_SLOTS * num_groups * MAX_LEN // BLOCK, BLOCK, decoder.dtype, device)
    slots = Slots(NUM_SLOTS, MAX_LEN, BLOCK, device, num_groups)
    sampler = Sampler(NUM_SLOTS, decoder.arch.vocab_size, "cpu")
    return Runner(LoadedModel(decoder, kv, slots, sampler, device, heads=heads))


def admission(slot: int, ids: Sequence[int], params: SamplingParams) -> Admission:
    return Admission(slot, str(slot), tuple(ids), len(ids), params)


def tables(runner: Runner, slot: int) -> tuple[TableUpdate, ...]:
    """A block table for each slot, with blocks of its own for all that it may need."""
    num_groups, each = len(runner.arch.cache_groups), MAX_LEN // BLOCK
    firsts = [(slot * num_groups + group) * each for group in range(num_groups)]
    return tuple(TableUpdate(slot, group, 0, tuple(range(first, first + each))) for group, first in enumerate(firsts))


def pooled(runner: Runner, ids: Sequence[int], asked: Pooling, chunks: Sequence[int] = (), slot: int = 0) -> RowResult:
    """Pooled vector of one prompt, computed in `chunks`."""
    params = SamplingParams(max_tokens=0, seed=0, pooling=asked)
    start, results = 0, list[RowResult]()
    for i, count in enumerate(chunks or (len(ids),)):
        first = (admission(slot, ids, params),), tables(runner, slot)
        admissions, updates = first if i == 0 else ((), ())
        plan = StepPlan(i, admissions, updates, (Row(slot, start, count, samples=False),))
        results += runner.execute(plan).rows
        start += count
    assert start == len(ids)
    assert all(result == RowResult() for result in results[:-1]), "a vector before the prompt's end"
    return results[-1]


def numbers(embedding: bytes) -> Tensor:
    return torch.frombuffer(bytearray(embedding), dtype=torch.float32).to(torch.float64)


def theirs(model: Any, ids: Sequence[int], how: PoolingKind) -> Tensor:
    """transformers' states, pooled and normalised in fp64."""
    states = model.model(torch.tensor([ids])).last_hidden_state[0].to(torch.float64)
    vector = of_states(states, how)
    return vector / vector.norm()


def of_states(states: Tensor, how: PoolingKind) -> Tensor:
    """[N, hidden] -> [hidden]."""
    match how:
        case "last" | "cls":
            return states[-1 if how == "last" else 0]
        case "max":
            return states.amax(dim=0)
        case "weightedmean":
            weights = torch.arange(1, 1 + states.shape[0], dtype=states.dtype)
            return weights @ states / weights.sum()
    return states.sum(dim=0) / states.shape[0] ** (0.5 if how == "mean_sqrt_len" else 1.0)


def error(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Root mean square error over all components."""
    return float((torch.stack(list(found)) - torch.stack(list(expected))).square().mean().sqrt())


@pytest.mark.sampled(keep=12)
@pytest.mark.parametrize("how", KINDS)
@pytest.mark.parametrize("dtype", RATIO)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vectors_are_as_near_to_fp64_as_transformers_own(
    case: Case, dtype: torch.dtype, how: PoolingKind, tmp_path: Path
) -> None:
    case.save(tmp_path, dtype)
    inputs = [torch.randint(0, 211, (length,)).tolist() for length in LENGTHS]
    runner = runner_of(load_decoder(tmp_path, dtype, {}, case.max_positions))
    ours = [numbers(pooled(runner, ids, Pooling(how)).embedding) for ids in inputs]
    exact_model, same_model = load_transformers(tmp_path, torch.float64), load_transformers(tmp_path, dtype)
    exact = [theirs(exact_model, ids, how) for ids in inputs]
    allowed = RATIO[dtype] * error(exact, [theirs(same_model, ids, how) for ids in inputs])
    assert error(exact, ours) < allowed
    # One token less, or half of them in a mean, gives an error far above it.
    wrong = [ids[1:] if how == "cls" else ids[:-1] if how == "last" else ids[: len(ids) // 2] for ids in inputs]
    assert error([theirs(exact_model, ids, how) for ids in wrong], ours) > 2 * allowed


@pytest.mark.parametrize("how", KINDS)
def test_what_is_kept_and_whether_it_is_scaled(how: PoolingKind) -> None:
    runner = runner_of(random_decoder(CASES[0], torch.bfloat16))
    ids = torch.randint(0, 211, (37,)).tolist()
    raw = numbers(pooled(runner, ids, Pooling(how, is_normalized=False)).embedding)
    assert raw.shape == (64,) and abs(float(raw.norm()) - 1.0) > 0.5
    for count, asked in ((64, 0), (64, 64), (64, 10**9), (17, 17), (1, 1)):
        kept = pooled(runner, ids, Pooling(how, asked, is_normalized=False)).embedding
        assert torch.equal(numbers(kept), raw[:count])
        scaled = numbers(pooled(runner, ids, Pooling(how, asked)).embedding)
        exact = raw[:count] / raw[:count].norm()
        assert torch.equal(scaled, exact.to(torch.float32).to(torch.float64))


# -- the same bits -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine.load(save(tmp_path_factory.mktemp("qwen3"), "qwen3"), request.param)


def asks(name: str, ids: tuple[int, ...], how: PoolingKind) -> Submit:
    params = SamplingParams(max_tokens=0, seed=0, pooling=Pooling(how, is_normalized=False))
    return Submit(request_id=name, prompt_ids=ids, params=params)


def vectors(core: EngineCore, *submits: Submit) -> dict[str, bytes]:
    for submit in submits:
        core.submit(submit, now=0.0)
    found: dict[str, bytes] = {}
    while core.has_work:
        output = core.step(0.0)
        for delta in output.deltas if output else ():
            assert delta.failure is None, delta.failure
            if delta.embedding:
                assert delta.finish_reason == "stop" and delta.request_id not in found
                found[delta.request_id] = delta.embedding
    core.check()
    return found


@pytest.mark.parametrize("how", KINDS)
def test_the_same_bits_whatever_runs_beside_it(engine: Engine, how: PoolingKind) -> None:
    submit = asks("x", prompt(1, 75), how)
    alone = vectors(engine.core(), submit)["x"]
    assert len(alone) == 4 * 64

    crowd = neighbours(15) + [asks(f"e{i}", prompt(300 + i, 1 + 11 * i), KINDS[i % len(KINDS)]) for i in range(12)]
    assert vectors(engine.core(), *crowd[:17], submit, *crowd[17:])["x"] == alone, "in company"
    assert vectors(engine.core(depth=0), submit)["x"] == alone, "without overlap"
    for budget in (1, 7, 16, 33):
        assert vectors(engine.core(max_num_batched_tokens=budget), submit)["x"] == alone, f"in chunks of {budget}"

    warm = engine.core()
    vectors(warm, request("earlier", (*prompt(1, 75)[:60], 1, 2, 3)))
    assert vectors(warm, submit)["x"] == alone, "with a prefix that another computed"
    assert warm.stats().prefix_hit_tokens == (48 if how == "last" else 0)

    tight = engine.core(num_blocks=10, max_num_batched_tokens=16)
    rivals = [request(f"r{i}", prompt(200 + i, 40)) for i in range(3)]
    assert vectors(tight, *rivals, submit, asks("y", prompt(1, 75), how)) == {"x": alone, "y": alone}
    assert tight.stats().num_preemptions > 0

    wrong = prompt(1, 75)[1 if how == "cls" else 0 : None if how == "cls" else 60]
    assert vectors(engine.core(), asks("x", wrong, how))["x"] != alone, "the comparison sees other tokens"


def test_a_mean_of_one_token_is_its_state(engine: Engine) -> None:
    ids = prompt(5, 1)
    found = vectors(engine.core(), asks("last", ids, "last"), asks("mean", ids, "mean"))
    assert float((numbers(found["mean"]) - numbers(found["last"])).abs().max()) <= 2.0**-26


def test_a_slot_that_was_left_halfway_begins_anew(engine: Engine) -> None:
    expected = vectors(engine.core(), asks("x", prompt(6, 60), "mean"))["x"]
    core = engine.core(max_num_batched_tokens=16)
    for i in range(4):
        core.submit(asks(f"left {i}", prompt(7, 60), "mean"), now=0.0)
        core.step(0.0)
        core.step(0.0)
        core.abort([f"left {i}"])
    assert vectors(core, asks("x", prompt(6, 60), "mean"))["x"] == expected


def test_a_nan_fails_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The NaN comes in a chunk before the last one of a mean, and the failure is remembered. Neighbours get their
    vectors."""
    runner = runner_of(random_decoder(CASES[0], torch.float32))
    ids = list(range(40))
    sound = {how: pooled(runner, ids, Pooling(how)) for how in KINDS}
    forward = Decoder.forward

    def poisoned(self: Decoder, token_ids: Tensor, *rest: Any) -> Tensor:
        hidden = forward(self, token_ids, *rest)
        hidden[3, 5] = float("nan")
        return hidden

    params = [SamplingParams(max_tokens=0, seed=0, pooling=Pooling(how)) for how in ("mean", "mean", "last")]
    admissions = tuple(admission(slot, ids, asked) for slot, asked in enumerate(params))
    updates = tuple(update for slot in range(3) for update in tables(runner, slot))
    monkeypatch.setattr(Decoder, "forward", poisoned)
    rows = tuple(Row(slot, 0, 25, samples=False) for slot in range(3))
    assert runner.execute(StepPlan(0, admissions, updates, rows)).rows == (RowResult(),) * 3
    monkeypatch.setattr(Decoder, "forward", forward)
    rows = tuple(Row(slot, 25, 15, samples=False) for slot in range(3))
    results = runner.execute(StepPlan(1, (), (), rows)).rows
    assert results == (RowResult(status=RowStatus.NUMERICAL_ERROR), sound["mean"], sound["last"])


# -- beside recorded steps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", KINDS)
def test_a_row_of_one_token_that_pools_is_not_lost_beside_decodes(how: PoolingKind, kernels: str) -> None:
    if kernels != "cpp":
        pytest.skip("plain PyTorch is not recorded")
    device = CapturingDevice()
    decoder = random_decoder(CASES[0], torch.bfloat16)
    runner = runner_of(decoder, device)
    ids = torch.randint(0, 211, (18,)).tolist()
    expected = pooled(runner_of(decoder), ids, Pooling(how))
    drawing, pooling = SamplingParams(max_tokens=9, seed=1), SamplingParams(max_tokens=0, seed=0, pooling=Pooling(how))
    admissions = (admission(0, ids, drawing), admission(1, ids, pooling))
    updates = (*tables(runner, 0), *tables(runner, 1))
    runner.execute(StepPlan(0, admissions, updates, (Row(0, 0, 18, True), Row(1, 0, 17, False))))
    runner.execute(StepPlan(1, (), (), (Row(0, 18, 1, True),)))
    events = device.events.count("record"), device.events.count("replay")
    with nothing_is_read(torch.device("cpu")):
        launched = runner.launch(StepPlan(2, (), (), (Row(0, 19, 1, True), Row(1, 17, 1, False))))
    drawn, found = launched.wait().rows
    assert drawn.token_ids and found == expected
    # The layers are recorded as those of a step with prompts, and the rest runs call by call.
    assert (device.events.count("record"), device.events.count("replay")) == (events[0], events[1] + 1)
    assert events[0], "nothing was recorded: the decode alone ran call by call too"


# -- the sum -----------------------------------------------------------------------------------------------------------


def mean_of(states: Tensor, chunks: Sequence[int], how: PoolingKind = "mean") -> Tensor:
    """Vector that a `Pooler` of its own makes of the states."""
    slots = Slots(1, 4096, BLOCK, CpuDevice(1))
    params = SamplingParams(max_tokens=0, seed=0, pooling=Pooling(how, is_normalized=False))
    slots.fill(admission(0, [0] * states.shape[0], params))
    pooler, start = Pooler(slots), 0
    for count in chunks:
        step = Step(StepPlan(0, (), (), (Row(0, start, count, samples=False),)))
        pooler.read_hidden(step, states[start : start + count], [0])
        start += count
    (report,) = step.reports
    return report.tensors[0][0]


@pytest.mark.parametrize("how", ["mean", "weightedmean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mean_is_the_exact_one_to_half_a_unit(dtype: torch.dtype, how: PoolingKind) -> None:
    states = (torch.randn(3_000, 5) * torch.tensor([1e-3, 1.0, 30.0, 1e4, 0.0])).to(dtype)
    found = mean_of(states, [3_000], how)
    weights = [Fraction(i if how == "weightedmean" else 1) for i in range(1, 3_001)]
    for column in range(5):
        numbers_of = map(Fraction, states[:, column].tolist())
        exact = sum(map(operator.mul, weights, numbers_of), Fraction(0)) / sum(weights)
        bound = Fraction(1, 2**27) + abs(exact) / 2**24
        assert abs(Fraction(float(found[column])) - exact) <= bound


@pytest.mark.parametrize("how", KINDS)
def test_chunks_do_not_change_a_vector_and_would_change_a_mean_of_fp32(how: PoolingKind) -> None:
    states = torch.randn(1_000, 64) * 3.0
    whole = mean_of(states, [1_000], how)
    assert float((whole - of_states(states.double(), how)).abs().max()) < 1e-5
    ways = [[1] * 1_000, [999, 1], [7] * 142 + [6], [256, 512, 232]]
    assert all(torch.equal(mean_of(states, chunks, how), whole) for chunks in ways)
    in_fp32 = [sum(part.sum(dim=0) for part in states.split(chunks)) for chunks in ways]
    assert not all(torch.equal(found, in_fp32[0]) for found in in_fp32)


@pytest.mark.parametrize("how", ["mean", "mean_sqrt_len", "weightedmean"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**16 * 1.01])
def test_what_cannot_be_counted_is_told_however_far_back(bad: float, how: PoolingKind) -> None:
    states = torch.randn(600, 4)
    states[2, 1] = bad
    assert bool(mean_of(states, [100, 500], how).isnan().all())
    states[2, 1] = -(2.0**16)
    assert bool(mean_of(states, [100, 500], how).isfinite().all())


def test_the_largest_sum_fits() -> None:
    per_token, most = int(worker_pooling._LARGEST * worker_pooling._UNITS), 2**20
    assert most * per_token < 2**63
    high = most * per_token >> worker_pooling._LOW_BITS
    assert most * high < 2**63 and most * 2**worker_pooling._LOW_BITS < 2**63


# -- behind the pooling ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "theirs"), [("last", "lasttoken"), ("mean", "mean")])
def test_heads_change_the_pooled_vector_before_it_is_scaled(how: PoolingKind, theirs: str, tmp_path: Path) -> None:
    layer = nn.Sequential(nn.Linear(64, 24), nn.Tanh())
    write_modules(tmp_path, [theirs, layer])
    sentences = SentenceFolder.read(tmp_path)
    assert sentences is not None and not sentences.unsupported
    decoder = random_decoder(CASES[0], torch.float32)
    plain, headed = runner_of(decoder), runner_of(decoder, heads=PooledHeads.of(tmp_path, sentences, 64, "cpu"))
    ids = torch.randint(0, 211, (37,)).tolist()
    before = numbers(pooled(plain, ids, Pooling(how, is_normalized=False)).embedding)
    with torch.inference_mode():
        exact = layer.double()(before)
    for count in (0, 7):
        asked = Pooling(how, count, is_normalized=True)
        ours, expected = numbers(pooled(headed, ids, asked, (20, 17)).embedding), exact[: count or None]
        assert float((ours - expected / expected.norm()).abs().max()) < 1e-6
