"""Padding of recorded steps changes nothing of the rows beside it, on a GPU's kernels, interpreted.

Memory that nothing has written is NaN, or the largest integer. So what padding reads or computes is such a number, and
a row that saw it would become one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.quant.recipe import recipes
from inferd.engine.sample.sampler import Sampler
from inferd.engine.sched.plan import Admission
from inferd.engine.worker.graphs import PADDING_SLOT, compute_layers
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.slots import Batch, Slots
from inferd.engine.worker.states import StatePool
from inferd.kernels import gpu, registry
from inferd.kernels.ops.kv_format import KV_FORMATS
from inferd.kernels.ops.linear import Choices
from inferd.kernels.ops.step_inputs import write_drawn
from tests.cpu.capturing import CapturingDevice
from tests.cpu.checkpoints import Case, random_decoder
from tests.kernels import interpreter
from tests.kernels.conftest import forced, is_on_gpu
from tests.kernels.test_decoder_kernels import HYBRIDS, SMALL

pytest.importorskip("triton")

from inferd.kernels.ops.paged_attention.split import ATTENTION_SPLIT_KERNEL

pytestmark = pytest.mark.recorded("models", keep=2)
# Not among the tests of kernels: it imports more than their record covers.
IS_RECORDED = False

FP8, INT8 = KV_FORMATS
NAN, VOCAB, BLOCK, NUM_SLOTS, BLOCKS_EACH = float("nan"), SMALL["vocab_size"], 16, 5, 2
PROMPTS = {3: 11, 1: 6}
"""Tokens of each prompt, by slot."""
LLAMA = Case("llama", "llama", {})
WIDER = Case("llama", "llama", {"intermediate_size": 64})
WINDOWED = Case("gemma2", "gemma2", {"sliding_window": 7})
EXPERTS = Case("qwen3 moe", "qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24})
CASES = [
    pytest.param(LLAMA, "none", None, True, id="llama"),
    pytest.param(LLAMA, "none", None, False, id="llama in parts"),
    pytest.param(LLAMA, "none", FP8, True, id="llama, kv in fp8"),
    pytest.param(LLAMA, "none", INT8, False, id="llama, kv in int8"),
    pytest.param(WIDER, "int4", None, True, id="llama in int4"),
    pytest.param(LLAMA, "fp8", None, True, id="llama in fp8"),
    pytest.param(WINDOWED, "none", None, False, id="windows and a cap"),
    pytest.param(EXPERTS, "none", None, True, id="experts"),
    *(pytest.param(case, "none", None, True, id=case.name) for case in HYBRIDS),
]


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    if is_on_gpu(request.config):
        pytest.skip("decoders of tests are the processor's; benchmarks.gpu.checks has those of a GPU")
    gpu.interpret(True)
    interpreter.repair()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what `torch.empty` gives
    yield from forced("", "triton")
    torch.use_deterministic_algorithms(False)
    gpu.interpret(False)


class Found(NamedTuple):
    """Results of a prompts' step and of a decode step behind it, for the rows of `PROMPTS`."""

    hidden: tuple[Tensor, Tensor]
    token_ids: Tensor
    kv: Tensor
    states: tuple[Tensor, ...]


class Engine:
    """A decoder, and all that its steps read and write."""

    def __init__(self, case: Case, quantization: str, kv_dtype: torch.dtype | None, *, is_deterministic: bool) -> None:
        for op in registry.ops().values():
            names = op.implementation_names
            if op is not ATTENTION_SPLIT_KERNEL:
                op.force(next(name for name in ("triton_invariant", "triton", names[-1]) if name in names))
        recipe = recipes(Choices(is_invariant=True))[quantization]
        decoder = random_decoder(Case(case.name, case.model_type, SMALL | case.config), torch.bfloat16, recipe)
        device, num_groups = CapturingDevice(), len(decoder.arch.cache_groups)
        self.num_blocks = NUM_SLOTS * BLOCKS_EACH * num_groups
        kv = KVPool.allocate(decoder.arch, self.num_blocks, BLOCK, kv_dtype or torch.bfloat16, device)
        kv.data.copy_(torch.full(kv.data.shape, NAN))
        if kv.scales is not None:
            kv.scales.fill_(NAN)
        slots = Slots(NUM_SLOTS, BLOCK * BLOCKS_EACH, BLOCK, device, num_groups)
        for group in range(num_groups):
            first = group * NUM_SLOTS * BLOCKS_EACH
            slots.block_tables[group] = torch.arange(first, first + NUM_SLOTS * BLOCKS_EACH).view(NUM_SLOTS, -1)
        states = StatePool.allocate(decoder.arch, NUM_SLOTS, 0, torch.bfloat16, device)
        if states is not None:
            states.matrices.fill_(NAN)
            states.inputs.fill_(NAN)
        sampler = Sampler(NUM_SLOTS, VOCAB, "cpu")
        for slot, count in PROMPTS.items():
            ids = tuple(range(slot, slot + count))
            params = SamplingParams(max_tokens=9, temperature=0.8 if slot == 1 else 0.0, top_p=0.9, seed=slot)
            slots.fill(Admission(slot, str(slot), ids, count, params))
            sampler.fill(slot, params, ids, count)
        self.model = LoadedModel(decoder, kv, slots, sampler, device, is_deterministic, states)

    def run(self, num_rows: int, num_tokens: int) -> Found:
        """Both steps, padded to so many rows, and the first also to so many tokens."""
        with torch.inference_mode():
            hidden = self._prompts(num_rows, num_tokens), self._decodes(num_rows)
        model = self.model
        kv = model.kv.data[:, : self.num_blocks].clone()
        states = () if model.states is None else (model.states.matrices.clone(), model.states.inputs.clone())
        return Found(hidden, model.slots.token_ids.clone(), kv, states)

    def _prompts(self, num_rows: int, num_tokens: int) -> Tensor:
        lens = [*PROMPTS.values(), *[0] * (num_rows - len(PROMPTS))]
        row_slots = torch.tensor([*PROMPTS, *[0] * (num_rows - len(PROMPTS))])
        num_own = sum(lens)
        slots = row_slots.repeat_interleave(torch.tensor(lens))
        positions = torch.cat([torch.arange(count) for count in lens])
        batch = Batch.of_tokens(
            self.model.slots,
            (row_slots, torch.tensor(lens), torch.tensor(lens).cumsum(0)),
            (padded(slots, num_tokens, PADDING_SLOT), padded(positions, num_tokens, 0)),
            self._padding_block,
            is_deterministic=self.model.is_deterministic,
        )
        hidden = compute_layers(self.model, batch)[:num_own]
        last = torch.tensor([*PROMPTS.values()]).cumsum(0) - 1
        self._draw(hidden[last], torch.tensor([*PROMPTS]), torch.tensor([*PROMPTS.values()]) - 1)
        return hidden

    def _decodes(self, num_rows: int) -> Tensor:
        """Padding lies before, between and behind the rows."""
        places = torch.tensor([1, num_rows - 2]) if num_rows > 3 else torch.arange(2)
        slots, positions = torch.full((num_rows,), PADDING_SLOT), torch.zeros(num_rows, dtype=torch.int64)
        slots[places], positions[places] = torch.tensor([*PROMPTS]), torch.tensor([*PROMPTS.values()])
        starts = torch.arange(num_rows + 1, dtype=torch.int32)
        batch = Batch.of_decodes(
            self.model.slots,
            (slots, positions, starts),
            self._padding_block,
            is_deterministic=self.model.is_deterministic,
        )
        hidden = compute_layers(self.model, batch)
        hidden[slots < 0] = NAN  # what it is depends on memory that nothing has written
        self._draw(hidden, slots, positions)
        return hidden[places]

    @property
    def _padding_block(self) -> int:
        assert self.model.kv.padding_block is not None
        return self.model.kv.padding_block

    def _draw(self, hidden: Tensor, slots: Tensor, positions: Tensor) -> None:
        logits = self.model.decoder.logits(self.model.decoder.parts(hidden)[0])
        token_ids, _ = self.model.sampler.draw(logits, slots, positions + 1)
        write_drawn(token_ids, slots, positions, self.model.slots.token_ids)


def padded(values: Tensor, size: int, value: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, size - len(values)), value=value)


def is_written(kv: Tensor, slots: Sequence[int]) -> bool:
    """Whether blocks of these slots hold a number."""
    by_slot = kv.float().unflatten(1, (-1, NUM_SLOTS, BLOCKS_EACH))
    return bool((~by_slot[:, :, list(slots)].isnan()).any())


@pytest.mark.sampled(keep=3, among="long checks of all kernels")
@pytest.mark.parametrize(("case", "quantization", "kv_dtype", "is_deterministic"), CASES)
def test_rows_do_not_see_padding(
    case: Case, quantization: str, kv_dtype: torch.dtype | None, is_deterministic: bool
) -> None:
    """Rows without padding have the same bits. Without `--deterministic` keys are added up in another order."""
    plain, beside = (
        Engine(case, quantization, kv_dtype, is_deterministic=is_deterministic).run(*sizes)
        for sizes in ((2, sum(PROMPTS.values())), (5, 24))
    )
    others = [slot for slot in range(NUM_SLOTS) if slot not in PROMPTS]
    for found in (plain, beside):
        assert all(hidden.isfinite().all() for hidden in found.hidden)
        assert kv_dtype == INT8 or not is_written(found.kv, others)
        assert all(state[:, others].isnan().all() for state in found.states)
        assert not found.token_ids[others].any()
    if is_deterministic:
        assert all(map(torch.equal, plain.hidden, beside.hidden))
        assert torch.equal(plain.token_ids, beside.token_ids)
    for first, second in zip(plain.hidden, beside.hidden, strict=True):
        assert (first.float() - second.float()).abs().max() < 0.02 * first.float().abs().max()


def test_a_row_whose_block_padding_writes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Engine(LLAMA, "none", None, is_deterministic=True).run(2, sum(PROMPTS.values())).hidden
    monkeypatch.setattr(Engine, "_padding_block", 3 * BLOCKS_EACH)
    found = Engine(LLAMA, "none", None, is_deterministic=True).run(5, 24).hidden
    assert not torch.equal(found[1], expected[1])
