"""A request's hidden states, ids and logprobs have the same bits alone and among others, whole and in chunks, on a
cached prefix, and after it lost its KV halfway.

Tested in fp32, bf16, int8, int4 and fp8, with K and V in the dtype or in 8 bits, greedy and sampled with every option.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from torch import Tensor

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.models.decoder import Decoder
from inferd.engine.quant.recipe import RECIPES
from inferd.engine.sample.sampler import Sampler
from inferd.kernels.ops.kv_format import KV_FORMATS
from tests.cpu.cases import GEMMA4
from tests.cpu.checkpoints import Case, random_decoder
from tests.cpu.paging import Pool, Request

VOCAB = 997
WIDE = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
EXPERTS = {
    "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 160
}  # fmt: skip
GPT_OSS = {
    "intermediate_size": 96,
    "num_local_experts": 9,
    "num_experts_per_tok": 3,
    "head_dim": 32,
    "sliding_window": 70,
}
ALL_OF_GEMMA4 = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_key_value_heads": 4,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2, "enable_moe_block": True,
    "num_experts": 6, "top_k_experts": 2, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB,
    "moe_intermediate_size": 96,
    "sliding_window": 70,
}  # fmt: skip
CASES = (
    Case("llama", "llama", WIDE | {"attention_bias": True}),
    Case("qwen3", "qwen3", WIDE | {"head_dim": 48, "tie_word_embeddings": True}),
    Case("gemma2", "gemma2", WIDE | {"head_dim": 32, "sliding_window": 70}),
    Case("starcoder2", "starcoder2", WIDE | {"sliding_window": 70}),
    Case("qwen2 moe", "qwen2_moe", WIDE | EXPERTS),
    Case("gpt-oss", "gpt_oss", WIDE | GPT_OSS),
    Case("gemma4", "gemma4_text", WIDE | GEMMA4 | ALL_OF_GEMMA4),
)
PROMPT_LEN, OUTPUT_LEN = 270, 14
BLOCK = 16
CACHED_LEN = 5 * BLOCK
NUM_NEIGHBOURS = 31

GREEDY = SamplingParams(max_tokens=OUTPUT_LEN, seed=0, temperature=0.0, logprobs=2)
SAMPLED = SamplingParams(
    max_tokens=OUTPUT_LEN,
    seed=2**40 + 17,
    temperature=0.9,
    top_k=200,
    top_p=0.97,
    min_p=0.001,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=((5, 2.0), (6, -100.0)),
    bad_words=((7,), (11, 12), (13, 14, 15)),
    min_tokens=4,
    eos_token_ids=(3,),
    logprobs=3,
)


@dataclass
class Trace:
    """Results of one run of the target: hidden states of the tokens it computed, by position, and the drawn ids."""

    hidden: dict[int, Tensor] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)

    def assert_equal(self, other: Trace) -> None:
        assert self.ids == other.ids
        assert self.logprobs == other.logprobs
        shared = self.hidden.keys() & other.hidden.keys()
        assert len(shared) >= OUTPUT_LEN
        for position in shared:
            assert torch.equal(self.hidden[position], other.hidden[position]), f"position {position}"


class Company:
    """Random requests with random parameters that go through the same steps, in slots 1 and up."""

    def __init__(self, count: int, sampler: Sampler, random: Random) -> None:
        self._random, self._sampler = random, sampler
        self.requests = [self._new(slot) for slot in range(1, count + 1)]

    def _new(self, slot: int) -> Request:
        ids = [self._random.randrange(VOCAB) for _ in range(self._random.choice((40, 150, 400)))]
        params = SamplingParams(
            max_tokens=500,
            seed=self._random.randrange(2**53),
            temperature=self._random.choice((0.0, 0.7, 1.5)),
            top_k=self._random.choice((0, 1, 40)),
            top_p=self._random.choice((1.0, 0.5)),
            frequency_penalty=self._random.choice((0.0, 1.0)),
            logprobs=self._random.choice((None, 0, 5)),
        )
        self._sampler.fill(slot, params, ids, len(ids))
        return Request(ids)

    def rows(self) -> list[tuple[Request, int]]:
        """A row for each: most decode one token, some a chunk. A request at its end is replaced."""
        rows = []
        for index, request in enumerate(self.requests):
            left = len(request.token_ids) - request.computed
            if not left:
                request = self.requests[index] = self._new(index + 1)
                left = len(request.token_ids)
            rows.append((request, min(left, self._random.choice((1, 1, 1, 2, 33)))))
        return rows


class Run:
    """The target in slot 0, through steps with chunks of its own choice, among `num_neighbours`."""

    def __init__(
        self, decoder: Decoder, params: SamplingParams, num_neighbours: int, seed: int, kv_dtype: torch.dtype | None
    ) -> None:
        self.decoder, self.params, self.random = decoder, params, Random(seed)
        self.sampler = Sampler(NUM_NEIGHBOURS + 1, VOCAB, "cpu")
        self.pool = Pool(decoder, num_blocks=1200, block_size=BLOCK, seed=seed, kv_dtype=kv_dtype)
        self.company = Company(num_neighbours, self.sampler, self.random)
        self.target = Request([])
        self.trace = Trace()

    def start(self, ids: Sequence[int], num_prompt: int, prefix: Request | None = None) -> None:
        """Admit the target with `ids` so far; with a `prefix`, onto the blocks that already hold its KV."""
        self.target = Request(list(ids))
        if prefix is not None:
            self.target.blocks, self.target.computed = prefix.blocks[: CACHED_LEN // BLOCK], CACHED_LEN
        self.sampler.fill(0, self.params, ids, num_prompt)

    def advance(self, count: int) -> None:
        """One step: `count` tokens of the target in a row among the others. It draws when it reaches its last token."""
        rows = [*self.company.rows(), (self.target, count)]
        self.random.shuffle(rows)
        starts = [request.computed for request, _ in rows]
        hidden = self.pool.step(rows)
        place = next(index for index, (request, _) in enumerate(rows) if request is self.target)
        for offset, state in enumerate(hidden[place]):
            self.trace.hidden[starts[place] + offset] = state
        sampling = [index for index, (request, _) in enumerate(rows) if self._draws(request)]
        if place not in sampling:
            return
        logits = self.decoder.logits(torch.stack([hidden[index][-1] for index in sampling]))
        slots = [0 if index == place else self.company.requests.index(rows[index][0]) + 1 for index in sampling]
        drawn = self.sampler.sample(logits, slots, [rows[index][0].computed for index in sampling])
        assert drawn.logprobs is not None
        assert not drawn.is_failed.any()
        row = sampling.index(place)
        self.target.token_ids.append(int(drawn.token_ids[row]))
        self.trace.ids.append(self.target.token_ids[-1])
        self.trace.logprobs.append(drawn.logprobs.to_host()[drawn.logprob_rows.index(row)])

    def _draws(self, request: Request) -> bool:
        return request is not self.target or request.computed == len(request.token_ids)

    def finish(self, chunks: Sequence[int]) -> Trace:
        """Compute the rest in `chunks`, then decode until `OUTPUT_LEN` ids are drawn."""
        for count in chunks:
            self.advance(count)
        while len(self.trace.ids) < OUTPUT_LEN:
            self.advance(1)
        return self.trace


@dataclass(frozen=True)
class Setup:
    """One model, one dtype, one way to draw, and the target's results alone, with its prompt in one step."""

    decoder: Decoder
    params: SamplingParams
    prompt: list[int]
    alone: Trace
    kv_dtype: torch.dtype | None

    def run(self, num_neighbours: int, seed: int) -> Run:
        return Run(self.decoder, self.params, num_neighbours, seed, self.kv_dtype)


FP8, INT8 = KV_FORMATS
SETUPS = [
    *itertools.product(CASES[:1], (torch.float32, torch.bfloat16), (GREEDY, SAMPLED), ("none",), (None,)),
    *((case, torch.bfloat16, SAMPLED, "none", None) for case in CASES[1:6]),
    (CASES[6], torch.bfloat16, SAMPLED, "none", INT8),
    (CASES[0], torch.bfloat16, SAMPLED, "int8", None),
    (CASES[0], torch.bfloat16, SAMPLED, "int4", None),
    (CASES[0], torch.bfloat16, SAMPLED, "fp8", None),
    (CASES[4], torch.bfloat16, SAMPLED, "int4", None),
    (CASES[2], torch.bfloat16, SAMPLED, "none", FP8),
    (CASES[1], torch.float32, GREEDY, "none", INT8),
    pytest.param((CASES[1], torch.float32, GREEDY, "int4", None), marks=pytest.mark.long),
    pytest.param((CASES[4], torch.float32, GREEDY, "none", None), marks=pytest.mark.long),
    pytest.param((CASES[4], torch.bfloat16, SAMPLED, "int8", None), marks=pytest.mark.long),
    pytest.param((CASES[4], torch.bfloat16, SAMPLED, "fp8", None), marks=pytest.mark.long),
    pytest.param((CASES[0], torch.bfloat16, SAMPLED, "int4", INT8), marks=pytest.mark.long),
]


def setup_id(setup: tuple[Case, torch.dtype, SamplingParams, str, torch.dtype | None]) -> str:
    case, dtype, params, quantization, kv_dtype = setup
    kind = "greedy" if params is GREEDY else "sampled"
    return f"{case.name} {dtype} {kind} {quantization}{f' {kv_dtype} KV' if kv_dtype else ''}"


@pytest.fixture(scope="module", params=SETUPS, ids=setup_id)
def setup(request: pytest.FixtureRequest) -> Setup:
    case, dtype, params, quantization, kv_dtype = request.param
    torch.set_num_threads(1)
    prompt = [Random(9).randrange(VOCAB) for _ in range(PROMPT_LEN)]
    with torch.inference_mode():
        decoder = random_decoder(case, dtype, RECIPES[quantization])
        run = Run(decoder, params, num_neighbours=0, seed=1, kv_dtype=kv_dtype)
        run.start(prompt, PROMPT_LEN)
        return Setup(decoder, params, prompt, run.finish([PROMPT_LEN]), kv_dtype)


def test_in_a_batch_of_32(setup: Setup) -> None:
    run = setup.run(NUM_NEIGHBOURS, seed=2)
    run.start(setup.prompt, PROMPT_LEN)
    run.finish([PROMPT_LEN]).assert_equal(setup.alone)


def test_in_odd_chunks(setup: Setup) -> None:
    run = setup.run(num_neighbours=0, seed=3)
    run.start(setup.prompt, PROMPT_LEN)
    run.finish([1, 2, 3, 131, 120, 1, 12]).assert_equal(setup.alone)


@pytest.mark.parametrize("num_threads", [pytest.param(2, marks=pytest.mark.long), 3])
def test_on_other_numbers_of_threads(setup: Setup, num_threads: int) -> None:
    run = setup.run(num_neighbours=5, seed=num_threads)
    run.start(setup.prompt, PROMPT_LEN)
    torch.set_num_threads(num_threads)
    run.finish([PROMPT_LEN]).assert_equal(setup.alone)


def test_on_a_cached_prefix_among_others(setup: Setup) -> None:
    run = setup.run(num_neighbours=3, seed=4)
    run.start([*setup.prompt[:CACHED_LEN], *setup.prompt[:50]], PROMPT_LEN)
    for count in (CACHED_LEN - 7, 27):
        run.advance(count)
    donor, run.trace = run.target, Trace()
    run.start(setup.prompt, PROMPT_LEN, donor)
    run.finish([100, PROMPT_LEN - CACHED_LEN - 100]).assert_equal(setup.alone)


def test_after_losing_its_kv_halfway(setup: Setup) -> None:
    run = setup.run(num_neighbours=7, seed=5)
    run.start(setup.prompt, PROMPT_LEN)
    run.advance(PROMPT_LEN)
    for _ in range(OUTPUT_LEN // 2):
        run.advance(1)
    run.start(run.target.token_ids, PROMPT_LEN)
    run.finish([200, len(run.target.token_ids) - 200]).assert_equal(setup.alone)


@pytest.mark.sampled(keep=4)
def test_the_comparison_sees_one_other_token(setup: Setup) -> None:
    run = setup.run(num_neighbours=0, seed=1)
    run.start([(setup.prompt[0] + 1) % VOCAB, *setup.prompt[1:]], PROMPT_LEN)
    with pytest.raises(AssertionError):
        run.finish([PROMPT_LEN]).assert_equal(setup.alone)
