"""Steps that are one replay, from the slots of their rows to the drawn ids, equal steps that run call by call. Results,
ids and KV are the same for requests of all kinds among any others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inferd.engine.api.wire.params import Adapter, SamplingParams
from inferd.engine.arch.registry import describe, weights
from inferd.engine.lora.adapters import Adapters, Update
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.draft_head import EagleHead
from inferd.engine.sample.sampler import Sampler
from inferd.engine.sched.plan import Admission, Row, RowStatus, StepPlan, StepResult, TableUpdate
from inferd.engine.worker import graphs, mixed_graphs, runner
from inferd.engine.worker.device import CpuDevice, Device
from inferd.engine.worker.draft_heads import HeadDrafts
from inferd.engine.worker.draft_model import DraftModel
from inferd.engine.worker.graphs import uses_adapters
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.runner import Runner
from inferd.engine.worker.slots import Slots
from inferd.engine.worker.states import StatePool
from inferd.kernels.ops.paged_attention import AttentionBatch
from tests.cpu import cases
from tests.cpu.capturing import CapturingDevice
from tests.cpu.checkpoints import Case, random_decoder

VOCAB, BLOCK, MAX_LEN, NUM_SLOTS, BLOCKS_EACH = 199, 16, 64, 6, 4
WINDOWED = Case("gemma2", "gemma2", {"vocab_size": VOCAB, "num_hidden_layers": 3, "head_dim": 32, "sliding_window": 20})
CAPPED = Case("granite", "granite", {"vocab_size": VOCAB, "num_hidden_layers": 2, "logits_scaling": 3.0})
EAGLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-6,
}  # fmt: skip
PLAIN: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 7, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.7, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3, "bad_words": ((3, 4), (9,))},
    {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": 0.5, "top_k": 20},
    {"temperature": 0.5, "allowed_token_ids": (7,), "eos_token_ids": (7,), "min_tokens": 30},
)
SPECIAL: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "presence_penalty": 0.5, "logprobs": 0},
    {"temperature": 0.8, "repetition_penalty": 1.3, "bad_words": (tuple(range(30)),)},
)

pytestmark = pytest.mark.usefixtures("_cpp")


@pytest.fixture
def _cpp(kernels: str) -> None:
    if kernels != "cpp":
        pytest.skip("plain PyTorch is not recorded")


class Engine:
    """A runner, and the parts that it computes with."""

    def __init__(
        self,
        case: Case,
        device: Device,
        dtype: torch.dtype = torch.bfloat16,
        *,
        is_deterministic: bool = True,
        adapters: Adapters | None = None,
    ) -> None:
        loras, place = {} if adapters is None else adapters.matrices, device.torch_device
        decoder = random_decoder(case, dtype, loras=loras, device=place)
        self.num_groups = len(decoder.arch.cache_groups)
        self.num_blocks = NUM_SLOTS * BLOCKS_EACH * self.num_groups
        self.kv = KVPool.allocate(decoder.arch, self.num_blocks, BLOCK, dtype, device)
        self.kv.data.zero_()
        self.slots = Slots(NUM_SLOTS, MAX_LEN, BLOCK, device, self.num_groups)
        sampler = Sampler(NUM_SLOTS, VOCAB, place)
        self.states = StatePool.allocate(decoder.arch, NUM_SLOTS, 1, dtype, device)
        if self.states is not None:
            self.states.matrices.fill_(0.5)
            self.states.inputs.fill_(0.5)
        model = LoadedModel(decoder, self.kv, self.slots, sampler, device, is_deterministic, self.states, adapters)
        self.runner = Runner(model)

    def state(self) -> tuple[torch.Tensor, ...]:
        """State that steps leave for later ones: ids, the KV of all blocks that a request may have, and recurrent
        states."""
        recurrent = () if self.states is None else (self.states.matrices, self.states.inputs)
        return self.slots.token_ids, self.kv.data[:, : self.num_blocks].view(torch.uint8), *recurrent


@dataclass
class Company:
    """Requests that come and go, over slots and blocks of their own, as step plans."""

    num_groups: int
    kinds: Sequence[Mapping[str, Any]]
    random: Random
    running: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Slot -> (number of tokens computed, number of tokens that exist)."""

    def plans(self, count: int) -> Iterator[StepPlan]:
        for step_id in range(count):
            for slot, (_, total) in list(self.running.items()):
                if total == MAX_LEN or self.random.random() < 0.04:
                    del self.running[slot]
            free = sorted(set(range(NUM_SLOTS)) - set(self.running))
            admitted = self.random.sample(free, 1) if free and self.random.random() < 0.4 else []
            admissions = tuple(self._admission(slot) for slot in admitted)
            tables = tuple(self._table(slot, group) for slot in admitted for group in range(self.num_groups))
            if self.running:
                yield StepPlan(step_id, admissions, tables, tuple(self._rows()))

    def _admission(self, slot: int) -> Admission:
        ids = tuple(self.random.randrange(VOCAB) for _ in range(self.random.randrange(1, 12)))
        asked = {"max_tokens": 50, "seed": self.random.randrange(2**53), **self.random.choice(self.kinds)}
        self.running[slot] = 0, len(ids)
        return Admission(slot, str(slot), ids, len(ids), SamplingParams(**asked))

    def _table(self, slot: int, group: int) -> TableUpdate:
        first = (slot * self.num_groups + group) * BLOCKS_EACH
        return TableUpdate(slot, group, 0, tuple(range(first, first + BLOCKS_EACH)))

    def _rows(self) -> Iterator[Row]:
        """Some requests decode. Prompts come whole, in pieces, or in a piece of one token."""
        for slot in self.random.sample(list(self.running), self.random.randrange(1, len(self.running) + 1)):
            computed, total = self.running[slot]
            num_tokens = self.random.choice([total - computed, self.random.randrange(1, total - computed + 1)])
            samples = computed + num_tokens == total
            self.running[slot] = computed + num_tokens, total + samples
            yield Row(slot, computed, num_tokens, samples)


def by_calls(case: Case, dtype: torch.dtype = torch.bfloat16, adapters: Adapters | None = None) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDevice, "row_buckets", (0,))
        return Engine(case, CpuDevice(1), dtype, adapters=adapters)


def is_decode(plan: StepPlan) -> bool:
    return all(row.num_tokens == 1 and row.samples for row in plan.rows)


@pytest.mark.parametrize("kinds", [PLAIN, SPECIAL, PLAIN + SPECIAL], ids=["plain", "special", "mixed"])
@pytest.mark.parametrize(
    ("case", "dtype"), [(WINDOWED, torch.bfloat16), (CAPPED, torch.float32)], ids=["windowed", "capped"]
)
def test_a_replayed_step_is_the_step(case: Case, dtype: torch.dtype, kinds: Sequence[Mapping[str, Any]]) -> None:
    device = CapturingDevice()
    recorded, called = Engine(case, device, dtype), by_calls(case, dtype)
    num_decodes, num_mixed, launched = 0, 0, list[Any]()
    expected = list[StepResult]()
    for plan in Company(called.num_groups, kinds, Random(1)).plans(150):
        launched.append(recorded.runner.launch(plan))
        expected.append(called.runner.execute(plan))
        num_decodes += is_decode(plan)
        num_mixed += not is_decode(plan) and plan.num_tokens <= device.token_buckets[-1]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(recorded.state(), called.state(), strict=True))
    # All steps are awaited at the end: a later step may not change the results of an earlier one.
    assert [step.wait().rows for step in launched] == [result.rows for result in expected]
    assert device.events.count("record") == len(device.row_buckets) + len(device.token_buckets)
    assert device.events.count("replay") == num_decodes + num_mixed
    assert num_decodes > 60 and num_mixed > 20


class HybridCompany(Company):
    """Some steps save the state of a row, or load it into the slot of another."""

    def plans(self, count: int) -> Iterator[StepPlan]:
        for plan in super().plans(count):
            last, draw = plan.rows[-1], self.random.random()
            copies = ((last.slot, 0),)
            if draw < 0.3:
                yield replace(plan, state_saves=copies)
            else:
                yield replace(plan, state_loads=copies) if draw > 0.7 and last.start else plan


HYBRIDS = [
    replace(case, config=case.config | {"vocab_size": VOCAB})
    for case in cases.HYBRIDS
    if case.name in ("qwen 3.5 moe", "lfm2, biases", "granite 4, experts")
]


@pytest.mark.parametrize("case", HYBRIDS, ids=[case.name for case in HYBRIDS])
def test_a_replayed_step_of_a_hybrid_is_the_step(case: Case) -> None:
    """Padding changes no state, and a checkpoint is what it was."""
    device = CapturingDevice()
    recorded, called = Engine(case, device), by_calls(case)
    for plan in HybridCompany(called.num_groups, PLAIN, Random(1)).plans(60):
        assert recorded.runner.execute(plan).rows == called.runner.execute(plan).rows
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(recorded.state(), called.state(), strict=True))
    assert device.events.count("record") == len(device.row_buckets) + len(device.token_buckets)
    assert device.events.count("replay") > 40


EXPERTS = Case(
    "olmoe", "olmoe", {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_experts": 5, "num_experts_per_tok": 2}
)


def test_recorded_steps_count_the_loads_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 64th step says how much the busiest expert of each layer has, as its results do."""
    engine = Engine(EXPERTS, CpuDevice(1))
    plan, loads = decoding(engine, PLAIN[:3]), engine.runner.model.decoder.expert_loads()
    assert [engine.runner.execute(plan(step)).expert_peaks for step in (1, 2)] == [(), ()]
    before = {layer: int(own.sum()) for layer, own in loads.items()}
    monkeypatch.setattr(runner, "_PEAK_STEPS", 3)
    peaks = engine.runner.execute(plan(3)).expert_peaks
    assert {layer: int(own.sum()) for layer, own in loads.items()} == {layer: n + 3 * 2 for layer, n in before.items()}
    assert peaks == tuple((layer, float(own.max() * 5 / own.sum())) for layer, own in loads.items()) and len(peaks) == 2
    assert all(1 <= peak <= 5 / 2 for _, peak in peaks)


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_attention_of_recorded_steps_may_vary_if_the_engine_may(
    monkeypatch: pytest.MonkeyPatch, is_deterministic: bool
) -> None:
    """Steps with prompts have only bounds of the rows' queries."""
    asked = set()
    run_layers = Decoder.run_layers

    def noted(decoder: Decoder, hidden: torch.Tensor, batches: Sequence[AttentionBatch], *others: Any) -> torch.Tensor:
        asked.update((batch.is_deterministic, batch.knows_query_lens, batch.host_seq_lens) for batch in batches)
        return run_layers(decoder, hidden, batches, *others)

    monkeypatch.setattr(Decoder, "run_layers", noted)
    Engine(WINDOWED, CapturingDevice(), is_deterministic=is_deterministic).runner.record_steps(lambda *_: None)
    assert asked == {(is_deterministic, True, None), (is_deterministic, False, None)}


class DraftingCompany(Company):
    """Half of the decodes carry drafts, and go on behind their first token whatever was accepted."""

    def _rows(self) -> Iterator[Row]:
        for row in super()._rows():
            most = min(3, MAX_LEN - row.start - 2)
            if row.num_tokens > 1 or not row.samples or most < 1 or self.random.random() < 0.5:
                yield row
                continue
            draft_ids = tuple(self.random.randrange(VOCAB) for _ in range(self.random.randrange(1, most + 1)))
            yield row._replace(num_tokens=1 + len(draft_ids), draft_ids=draft_ids)


@pytest.mark.parametrize("kinds", [PLAIN[:6], PLAIN + SPECIAL], ids=["plain", "mixed"])
def test_a_replayed_step_with_drafts_is_the_step(kinds: Sequence[Mapping[str, Any]]) -> None:
    """Rows with rules and drafts are drawn one position after the other, so such a step is not one replay."""
    device = CapturingDevice()
    recorded, called = Engine(WINDOWED, device), by_calls(WINDOWED)
    num_recorded = 0
    for plan in DraftingCompany(called.num_groups, kinds, Random(4)).plans(150):
        num_before = device.events.count("replay")
        assert recorded.runner.execute(plan).rows == called.runner.execute(plan).rows
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(recorded.state(), called.state(), strict=True))
        num_recorded += plan.has_drafts and device.events.count("replay") > num_before
    assert num_recorded > 40


def two_adapters(case: Case, device: torch.device | str = "cpu") -> Adapters:
    """Adapters of random weights, which are the same in each call."""
    arch, generator = describe(case.config_json()), torch.Generator().manual_seed(5)
    adapters = Adapters.allocate(arch, 2, 8, NUM_SLOTS, torch.bfloat16, device)
    for index, rank in enumerate((8, 3)):
        adapters.put(index, random_updates(case, rank, generator))
    return adapters


def random_updates(case: Case, rank: int, generator: torch.Generator) -> list[Update]:
    """An adapter of all matrices."""
    return [
        Update(
            matrix,
            part,
            torch.randn(rank, own.in_size, generator=generator) * own.in_size**-0.5,
            torch.randn(own.out_size, rank, generator=generator),
            0.3,
        )
        for matrix, modules in weights(describe(case.config_json())).modules().items()
        for part, own in enumerate(modules)
    ]


def test_a_replayed_step_with_adapters_is_the_step() -> None:
    """The requests have either adapter, or none."""
    device = CapturingDevice()
    recorded = Engine(WINDOWED, device, adapters=two_adapters(WINDOWED))
    called = by_calls(WINDOWED, adapters=two_adapters(WINDOWED))
    kinds = [{}, *({"adapter": Adapter(index, "")} for index in (0, 1)), {"temperature": 0.0}]
    num_adapted = num_plain = 0
    for plan in Company(called.num_groups, kinds, Random(1)).plans(100):
        assert recorded.runner.execute(plan).rows == called.runner.execute(plan).rows
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(recorded.state(), called.state(), strict=True))
        is_adapted = uses_adapters(called.runner.model, (row.slot for row in plan.rows))
        num_adapted += is_adapted
        num_plain += not is_adapted
    assert device.events.count("replay") > 80
    assert num_adapted > 40 and num_plain > 5


class DraftModelCompany(Company):
    """Half of the decodes have drafts of the draft model, and go on behind their first token."""

    draft_starts: dict[int, int]

    def _admission(self, slot: int) -> Admission:
        self.draft_starts[slot] = 0
        return super()._admission(slot)

    def _rows(self) -> Iterator[Row]:
        for row in super()._rows():
            most = min(3, MAX_LEN - row.start - 2)
            if row.num_tokens > 1 or not row.samples or most < 1 or self.random.random() < 0.5:
                yield row
                continue
            count, draft_start = self.random.randrange(1, most + 1), self.draft_starts[row.slot]
            yield row._replace(num_tokens=1 + count, num_to_draft=count, draft_start=draft_start)
            # Often the last token was drafted too, and is behind by one.
            self.draft_starts[row.slot] = row.start + self.random.randrange(2)


def with_draft_model(engine: Engine, device: Device) -> tuple[Engine, KVPool, DraftModel]:
    decoder = random_decoder(CAPPED, torch.bfloat16, device=device.torch_device)
    kv = KVPool.allocate(decoder.arch, engine.num_blocks, BLOCK, torch.bfloat16, device)
    kv.data.zero_()
    model = LoadedModel(decoder, kv, engine.slots.of_group(0), engine.runner.model.sampler, device)
    draft_model = DraftModel(model, max_step_tokens=5, max_draws=7)
    engine.runner._parts += (draft_model,)
    return engine, kv, draft_model


def test_replayed_passes_of_a_draft_model_are_its_passes() -> None:
    """Its KV too, whether it is behind by a token, by a few, or by a whole prompt."""
    device = CapturingDevice()
    recorded, kv, _ = with_draft_model(Engine(WINDOWED, device), device)
    called, called_kv, draft_model = with_draft_model(by_calls(WINDOWED), CpuDevice(1))
    draft_model._graphs._recordings[False]._sizes = ()
    company = DraftModelCompany(called.num_groups, PLAIN + SPECIAL, Random(4))
    company.draft_starts = {}
    num_drafted = 0
    for plan in company.plans(150):
        assert recorded.runner.execute(plan).rows == called.runner.execute(plan).rows
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(recorded.state(), called.state(), strict=True))
        assert torch.equal(kv.data[:, : called.num_blocks].view(torch.uint8), called_kv.data.view(torch.uint8))
        num_drafted += plan.has_drafts
    assert num_drafted > 60
    assert device.events.count("replay") > 150


def with_draft_head(engine: Engine, device: Device) -> tuple[Engine, KVPool]:
    runner, read = engine.runner, (0, 2, 3)
    runner.model.decoder._layers_read, runner.model.decoder._is_read = read, True
    config = {**EAGLE, "vocab_size": VOCAB, "eagle_aux_hidden_state_layer_ids": list(read)}
    head = EagleHead(describe(config), runner.model.decoder, read, MAX_LEN)
    generator = torch.Generator().manual_seed(3)
    for parameter in head.parameters.values():
        parameter.write(0, torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    kv = KVPool.allocate(head.arch, engine.num_blocks, BLOCK, torch.bfloat16, device)
    kv.data.zero_()
    runner._parts += (HeadDrafts(head, kv, engine.slots.of_group(0), runner.model.sampler),)
    return engine, kv


def test_a_draft_head_reads_the_same_of_replayed_steps() -> None:
    """Its KV shows what it read, of decodes with and without drafts, and of prompts."""
    device = CapturingDevice()
    recorded, kv = with_draft_head(Engine(WINDOWED, device), device)
    called, called_kv = with_draft_head(by_calls(WINDOWED), CpuDevice(1))
    company = DraftModelCompany(called.num_groups, PLAIN + SPECIAL, Random(4))
    company.draft_starts = {}
    num_drafted = 0
    for plan in company.plans(100):
        assert recorded.runner.execute(plan).rows == called.runner.execute(plan).rows
        assert torch.equal(kv.data[:, : called.num_blocks].view(torch.uint8), called_kv.data.view(torch.uint8))
        num_drafted += plan.has_drafts
    assert num_drafted > 40
    assert device.events.count("replay") > 60


def test_a_token_that_a_pass_writes_behind_a_known_one_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftModel, "_restore", lambda self, tokens, last, known: None)
    with pytest.raises(AssertionError):
        test_replayed_passes_of_a_draft_model_are_its_passes()


def test_rules_with_drafts_in_one_replay_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "has_rules", lambda sampler, slot: False)
    with pytest.raises(AssertionError):
        test_a_replayed_step_with_drafts_is_the_step(PLAIN[6:])


def decoding(engine: Engine, kinds: Sequence[Mapping[str, Any]]) -> Callable[[int], StepPlan]:
    """One request of each kind, with a prompt of 5 computed tokens. Gives the plan of the n-th decode of all."""
    company = Company(engine.num_groups, kinds, Random(2))
    slots = range(len(kinds))
    admissions = tuple(
        Admission(slot, str(slot), (slot, 2, 3, 4, 5), 5, SamplingParams(max_tokens=50, seed=slot, **kind))
        for slot, kind in enumerate(kinds)
    )
    tables = tuple(company._table(slot, group) for slot in slots for group in range(engine.num_groups))
    engine.runner.execute(StepPlan(0, admissions, tables, tuple(Row(slot, 0, 5, True) for slot in slots)))
    return lambda step: StepPlan(step, (), (), tuple(Row(slot, 4 + step, 1, True) for slot in slots))


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations that are launched outside of the device's own calls."""

    def __init__(self, device: CapturingDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self.names = device, list[str]()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self._device.is_busy and not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_plain_step_is_one_copy_one_replay_and_one_copy_back() -> None:
    device = CapturingDevice()
    engine = Engine(WINDOWED, device)
    plan = decoding(engine, PLAIN[:3])
    engine.runner.execute(plan(1))
    device.events.clear()
    with Launches(device) as launches:
        engine.runner.launch(plan(2))
    assert device.events == ["write", "replay", "copy 1"]
    assert launches.names == []


def test_special_rows_cost_launches_of_their_own_alone() -> None:
    device = CapturingDevice()
    engine = Engine(WINDOWED, device)
    plan = decoding(engine, [*PLAIN[:3], SPECIAL[0]])
    engine.runner.execute(plan(1))
    device.events.clear()
    with Launches(device) as launches:
        engine.runner.launch(plan(2))
    assert device.events == ["write", "replay", "to device", "to device", "to device", "copy 6"]
    assert launches.names


def test_a_row_without_numbers_fails_alone() -> None:
    """A row's KV holds a NaN. Neighbours of all kinds, and padding, draw the same as without it."""
    kinds = [*PLAIN[:2], SPECIAL[1], *PLAIN[:2]]
    device = CapturingDevice()
    sound, broken = by_calls(WINDOWED), Engine(WINDOWED, device)
    plan, _ = decoding(sound, kinds), decoding(broken, kinds)
    rows = broken.slots.block_tables[:, [1, 2, 3], 0].flatten().tolist()
    broken.kv.data[:, rows] = float("nan")
    for step in range(1, 8):
        expected, results = sound.runner.execute(plan(step)).rows, broken.runner.execute(plan(step)).rows
        assert [row.status for row in results] == [RowStatus(row in (1, 2, 3)) for row in range(5)]
        assert [results[row] for row in (0, 4)] == [expected[row] for row in (0, 4)]
    assert device.events.count("replay") == 7
    assert bool((broken.slots.token_ids < VOCAB).all() and (broken.slots.token_ids >= 0).all())


def test_a_step_of_any_number_of_tokens_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with every number of padding tokens, alone and behind decodes, give the bits of single calls."""
    monkeypatch.setattr(CapturingDevice, "token_buckets", (2, 16))
    device = CapturingDevice()
    recorded, called = Engine(WINDOWED, device), by_calls(WINDOWED)
    company = Company(called.num_groups, PLAIN, Random(5))
    for length in range(1, 14):
        tables = tuple(company._table(slot, group) for slot in range(3) for group in range(called.num_groups))
        ids = tuple(company.random.randrange(VOCAB) for _ in range(length + 1))
        params = SamplingParams(max_tokens=50, seed=length, temperature=1.0)
        admissions = tuple(Admission(slot, str(slot), ids, len(ids), params) for slot in range(3))
        plans = (
            StepPlan(0, admissions, tables, (Row(1, 0, length, False),)),
            StepPlan(1, (), (), (Row(1, length, 1, True), Row(2, 0, length, False), Row(0, 0, 1, False))),
        )
        for plan in plans:
            assert recorded.runner.execute(plan).rows == called.runner.execute(plan).rows
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(recorded.state(), called.state(), strict=True))
    assert device.events.count("replay") == 26


def test_prompts_whose_padding_had_a_slot_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_graphs, "PADDING_SLOT", 1)
    with pytest.raises(AssertionError):
        test_a_step_of_any_number_of_tokens_is_the_step(monkeypatch)


def test_padding_that_had_a_slot_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison notices a padding row that is taken for the request in slot 0."""
    monkeypatch.setattr(graphs, "PADDING_SLOT", 0)
    with pytest.raises(AssertionError):
        test_a_replayed_step_is_the_step(WINDOWED, torch.bfloat16, PLAIN)


def test_a_step_that_cannot_be_captured_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Sampler.draw

    def waiting(self: Sampler, logits: torch.Tensor, *rest: Any) -> Any:
        logits.max().item()
        return draw(self, logits, *rest)

    monkeypatch.setattr(Sampler, "draw", waiting)
    device = CapturingDevice()
    refused, called = Engine(CAPPED, device), by_calls(CAPPED)
    for plan in Company(1, PLAIN + SPECIAL, Random(3)).plans(40):
        assert refused.runner.execute(plan).rows == called.runner.execute(plan).rows
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(refused.state(), called.state(), strict=True))
    assert device.events.count("record") == len(device.token_buckets)
