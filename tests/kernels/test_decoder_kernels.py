"""A whole decoder on a GPU's kernels, interpreted. Linear layers are fused with their neighbours; invariant ones give a
token bits that depend on it alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.engine.layers.linear import Linear
from inferd.engine.models.decoder import Decoder
from inferd.engine.quant.recipe import recipes
from inferd.kernels import gpu, registry
from inferd.kernels.ops.linear import LINEAR, Choices
from inferd.kernels.ops.linear.fused import GATE_UP_ACT, LINEAR_RESIDUAL, NORM_LINEAR
from inferd.kernels.ops.linear.tuning import LIBRARY, Table, cases
from inferd.kernels.ops.linear_fp8 import LINEAR_FP8_FEW_ROWS, activations
from inferd.kernels.ops.paged_attention import PAGED_ATTENTION
from tests.cpu.checkpoints import Case, random_decoder
from tests.cpu.paging import Pool, Request
from tests.kernels import interpreter
from tests.kernels.conftest import forced, is_on_gpu

pytest.importorskip("triton")
pytestmark = pytest.mark.recorded("models", keep=3)

FUSED_OPS = (NORM_LINEAR, LINEAR_RESIDUAL, GATE_UP_ACT)
SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run linear layers and their fused neighbours in Triton, and everything else in plain PyTorch, which is faster."""
    if is_on_gpu(request.config):
        pytest.skip("decoders of tests are the processor's; benchmarks.gpu.checks has those of a GPU")
    gpu.interpret(True)
    interpreter.repair()
    yield from forced("", "reference")
    gpu.interpret(False)


def decoder_of(
    case: Case, multiply: str, choices: Choices | None = None, quantization: str = "none", dtype: Any = torch.bfloat16
) -> Decoder:
    """A decoder with weights that bfloat16 holds exactly, so that all dtypes have the same."""
    LINEAR.force(multiply)
    random = recipes(choices or Choices())[quantization]
    decoder = random_decoder(Case(case.name, case.model_type, SMALL | case.config), dtype, random)
    LINEAR.force(None)
    return decoder


def hidden_of(decoder: Decoder, num_rows: int) -> Tensor:
    """[num_rows, hidden] of a step that decodes one token for each of as many requests, behind 3 tokens each."""
    pool = Pool(decoder, num_blocks=2 * num_rows, block_size=16)
    requests = [Request([(7 * row + 3 * place) % 61 for place in range(4)]) for row in range(num_rows)]
    with torch.inference_mode():
        pool.step([(request, 3) for request in requests])
        return torch.cat(pool.step([(request, 1) for request in requests]))


FAMILIES = [
    (Case("llama", "llama", {}), 4, 4),
    (Case("qwen2, with biases", "qwen2", {}), 4, 4),
    (Case("gemma2, norms behind too, in fp32", "gemma2", {"sliding_window": 70}), 4, 0),
    (Case("granite, scaled", "granite", {"residual_multiplier": 0.3}), 4, 0),
    (Case("olmo2, norms only behind", "olmo2", {}), 0, 0),
    (Case("starcoder2, layer norms and no gate", "starcoder2", {"sliding_window": 70}), 0, 4),
]
"""(case, products of two layers that include a norm, products that include an add)."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of calls of each fused form of a layer."""
    counts: Counter[str] = Counter()
    for name in ("after_norm", "add_to"):

        def called(*given: Any, name: str, run: Any) -> Tensor:
            counts[name] += 1
            result: Tensor = run(*given)
            return result

        monkeypatch.setattr(Linear, name, partialmethod(called, name=name, run=getattr(Linear, name)))
    return counts


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("case", "num_norms", "num_adds"), FAMILIES, ids=[case.name for case, *_ in FAMILIES])
def test_fused_layers_are_as_near_to_the_formula_as_plain_ones(
    case: Case, num_norms: int, num_adds: int, calls: Counter[str]
) -> None:
    """Fused layers round less often: their errors are 0.89 to 1.05 times those of plain ones in these cases."""
    exact = hidden_of(decoder_of(case, "onednn_packed", dtype=torch.float32), 3).float()
    decoder = decoder_of(case, "triton_few_rows")
    fused = hidden_of(decoder, 3)
    # The prompt's step has 9 rows, too many for the kernel for few.
    assert (calls["after_norm"], calls["add_to"]) == (num_norms, num_adds)
    for op in FUSED_OPS:
        op.force("plain")
    plain = hidden_of(decoder, 3)
    assert calls.total() == num_norms + num_adds
    assert (torch.equal(fused, plain)) == (num_norms + num_adds == 0)
    tolerance = 1.3 * distance(plain, exact)
    assert distance(fused, exact) < tolerance < 0.02


@pytest.mark.parametrize("wrong", ["norm", "eps", "residual"])
def test_the_tolerance_sees_a_wrong_one(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FAMILIES[0][0]
    decoder = decoder_of(case, "triton_few_rows")
    right = hidden_of(decoder, 3)
    norm, add = Linear.after_norm, Linear.add_to
    if wrong == "residual":
        monkeypatch.setattr(Linear, "add_to", lambda self, residual, x: add(self, residual.roll(1, 0), x))
    else:
        monkeypatch.setattr(
            Linear,
            "after_norm",
            lambda self, x, weight, eps, gate=None: norm(
                self, x, weight.roll(1) if wrong == "norm" else weight, eps if wrong == "norm" else 1.0, gate
            ),
        )
    assert distance(hidden_of(decoder, 3), right.float()) > 0.06


@pytest.mark.parametrize(("num_rows", "is_fused"), [(8, True), (9, False)])
def test_few_rows_are_few(num_rows: int, is_fused: bool, calls: Counter[str]) -> None:
    hidden_of(decoder_of(FAMILIES[0][0], "triton_few_rows"), num_rows)
    assert calls.total() == (8 if is_fused else 0)


def test_a_layer_that_the_library_multiplies_faster_takes_nothing_in(calls: Counter[str]) -> None:
    """The other layers still fuse: if only one of two neighbours is fused, the stream is added between them."""
    down = {case.name: LIBRARY for case in cases(32, 40, "torch.bfloat16")}
    decoder = decoder_of(FAMILIES[0][0], "triton_few_rows", Choices(table=Table("here", down)))
    mixed = hidden_of(decoder, 3)
    assert (calls["after_norm"], calls["add_to"]) == (4, 2)
    fused = hidden_of(decoder_of(FAMILIES[0][0], "triton_few_rows"), 3)
    assert distance(mixed, fused.float()) < 0.02


def test_float16_takes_in_adds_alone(calls: Counter[str]) -> None:
    """A norm multiplies by its factor last, and float16 might overflow before."""
    hidden_of(decoder_of(FAMILIES[0][0], "triton_few_rows", dtype=torch.float16), 3)
    assert (calls["after_norm"], calls["add_to"]) == (0, 4)


def test_few_rows_of_fp8_are_fused_and_are_not_quantized(calls: Counter[str]) -> None:
    """So they are nearer to the formula than the plain layers, which quantize activations."""
    exact = hidden_of(decoder_of(FAMILIES[0][0], "onednn_packed", dtype=torch.float32), 3).float()
    decoder = decoder_of(FAMILIES[0][0], "triton_few_rows", quantization="fp8")
    few = hidden_of(decoder, 2)
    assert (calls["after_norm"], calls["add_to"]) == (8, 8)  # its prompts have 6 rows
    LINEAR_FP8_FEW_ROWS.force("none")
    plain = hidden_of(decoder_of(FAMILIES[0][0], "triton_few_rows", quantization="fp8"), 2)
    assert distance(few, exact[:2]) < distance(plain, exact[:2]) < 0.1


def test_fp8_layers_take_quantized_activations_from_norms_and_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what attention gives is quantized by a kernel of its own, once in each layer and step."""
    quantized: list[int] = []
    quantize = activations.quantize_fp8
    monkeypatch.setattr(
        activations, "quantize_fp8", lambda x, **given: (quantized.append(len(x)), quantize(x, **given))[1]
    )
    decoder = decoder_of(FAMILIES[0][0], "triton_few_rows", quantization="fp8")
    quantized.clear()
    fused = hidden_of(decoder, 9)
    assert quantized == [27, 27, 9, 9]
    quantized.clear()
    monkeypatch.setattr(Linear, "groups_of", lambda *_: None)
    assert torch.equal(hidden_of(decoder, 9), fused)
    assert quantized == [27] * 8 + [9] * 8


ONE_LAYER = Case("qwen2, one layer", "qwen2", {"num_hidden_layers": 1})
HYBRIDS = [
    Case(
        "qwen 3.5",
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
        },
    ),
    Case(
        "granite 4",
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
        },
    ),
    Case("lfm2", "lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
]
PROMPT = [(5 * place + 1) % 61 for place in range(12)]


def logits_of(decoder: Decoder, chunks: list[int], num_neighbours: int) -> Tensor:
    """[vocab] behind the prompt, computed in `chunks` among other requests that have a chunk of their own in every
    step."""
    pool = Pool(decoder, num_blocks=4 * (num_neighbours + 1), block_size=16)
    target = Request(PROMPT)
    others = [Request([(11 * row + place) % 61 for place in range(12)]) for row in range(num_neighbours)]
    with torch.inference_mode():
        for step, count in enumerate(chunks):
            rows = [(other, 1 + (step + place) % 3) for place, other in enumerate(others)]
            place = num_neighbours // 2
            hidden = pool.step([*rows[:place], (target, count), *rows[place:]])
        last = torch.stack([row[-1] for row in hidden])
        return decoder.logits(last)[place]


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_invariant_layers_give_a_token_its_own_bits(quantization: str, calls: Counter[str]) -> None:
    """Attention stays plain: interpreting it takes minutes, and its own tests check the same property."""
    for op in registry.ops().values():
        if "triton" in op.implementation_names and op is not PAGED_ATTENTION:
            op.force("triton")
    decoder = decoder_of(ONE_LAYER, "triton_invariant", Choices(is_invariant=True), quantization)
    alone = logits_of(decoder, [12], 0)
    assert torch.equal(logits_of(decoder, [11, 1], 0), alone)
    assert torch.equal(logits_of(decoder, [7, 4, 1], 3), alone)
    assert calls.total() == 0


@pytest.mark.sampled(keep=2, among="long checks of all kernels")
@pytest.mark.parametrize("case", HYBRIDS, ids=[case.name for case in HYBRIDS])
def test_invariant_hybrids_do_too(case: Case) -> None:
    """Every op of theirs runs in Triton, apart from attention, and from what torch computes number by number."""
    reference = hidden_of(decoder_of(case, "onednn_packed", dtype=torch.float32), 3).float()
    for op in registry.ops().values():
        if "triton" in op.implementation_names and op is not PAGED_ATTENTION:
            op.force("triton")
    decoder = decoder_of(case, "triton_invariant", Choices(is_invariant=True))
    assert distance(hidden_of(decoder, 3), reference) < 0.02
    alone = logits_of(decoder, [12], 0)
    assert torch.equal(logits_of(decoder, [7, 4, 1], 3), alone)


def test_the_others_do_not() -> None:
    """Shows that the comparison can fail: the kernel for few rows rounds differently."""
    decoder = decoder_of(ONE_LAYER, "triton_few_rows")
    assert not torch.equal(logits_of(decoder, [11, 1], 0), logits_of(decoder, [12], 0))
