"""Factors of K's channels: they change no bit of K and V in 16 or 32 bits, in any family. In 8 bits a model whose keys
are large in a few channels loses less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from inferd.engine.arch.registry import describe
from inferd.engine.arch.sharding import Rank
from inferd.engine.layers import smoothing
from inferd.engine.layers.collectives import ALONE, Ranks
from inferd.engine.layers.smoothing import factors
from inferd.engine.models.decoder import Decoder
from inferd.kernels.ops.kv_format import KV_FORMATS
from tests.cpu.cases import CASES, HYBRIDS
from tests.cpu.checkpoints import Case, random_decoder
from tests.cpu.paging import prompt_logits
from tests.cpu.ranks import on_ranks
from tests.cpu.test_engine import Engine

FP8, INT8 = KV_FORMATS
IDS = [7 * i % 199 for i in range(70)]
CHUNKS = (33, 1, 36)
QWEN2 = Case("qwen2", "qwen2", {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2})


def found_in(decoder: Decoder) -> dict[int, Tensor]:
    """The factors of each layer with attention."""
    decoder.smooth_keys()
    layers = {layer: decoder._layers[layer]._attention._smoothing for layer in decoder.arch.attention_layers}
    return {layer: found for layer, found in layers.items() if found is not None}


def random_factors(keys: Tensor, rotary_dim: int) -> Tensor:
    """As of `factors`, for keys of any size: those of a random model are all alike."""
    own, half = 2.0 ** torch.randint(0, 9, keys.shape[1:]), rotary_dim // 2
    own[:, half:rotary_dim] = own[:, :half]
    return torch.stack([own, 1 / own])


@pytest.mark.sampled(keep=12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [*CASES, *HYBRIDS], ids=lambda case: case.name)
def test_they_change_no_bit_of_wider_keys(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoothing, "factors", random_factors)
    decoder = random_decoder(case, dtype)
    plain = prompt_logits(decoder, IDS, CHUNKS)
    found = found_in(decoder)
    assert list(found) == list(decoder.arch.attention_layers)
    assert all(bool((own != 1).any()) for own in found.values())
    assert torch.equal(prompt_logits(decoder, IDS, CHUNKS), plain)


def with_large_keys(name: str, weight: Tensor) -> Tensor:
    """A bias of K that is large in a pair of channels of each head, as in Qwen 2.5. Those of q are small, so that other
    channels matter too."""
    heads = describe(QWEN2.config_json()).heads(0)
    pair = [3, heads.head_dim // 2 + 3]
    if ".qkv." in name:
        torch.unflatten(weight[: heads.q_size], 0, (-1, heads.head_dim))[:, pair] /= 60
    if name.endswith(".qkv.bias"):
        k = weight[heads.q_size : heads.q_size + heads.kv_size]
        torch.unflatten(k, 0, (-1, heads.head_dim))[:, pair] = 60.0
    return weight


def error(decoder: Decoder, kv_dtype: torch.dtype) -> float:
    """Distance of the logits with K and V in 8 bits, as a share of the logits' norm."""
    exact = prompt_logits(decoder, IDS, CHUNKS)
    return float((prompt_logits(decoder, IDS, CHUNKS, kv_dtype) - exact).norm() / exact.norm())


def test_large_channels_of_keys_cost_the_others_little(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = random_decoder(QWEN2, torch.float32, change=with_large_keys)
    smooth = error(decoder, INT8)
    monkeypatch.setattr(Decoder, "smooth_keys", lambda self: None)
    plain = error(random_decoder(QWEN2, torch.float32, change=with_large_keys), INT8)
    assert smooth < plain / 4


@pytest.mark.parametrize(("kv_cache_dtype", "num_calls"), [("int8", 1), ("fp8", 0), ("auto", 0)])
def test_an_engine_smooths_keys_in_int8_alone(
    kv_cache_dtype: str, num_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smoothed, smooth = list[Decoder](), Decoder.smooth_keys

    def noted(decoder: Decoder) -> None:
        smoothed.append(decoder)
        smooth(decoder)

    monkeypatch.setattr(Decoder, "smooth_keys", noted)
    QWEN2.save(tmp_path)
    Engine.load(tmp_path, "float32", kv_cache_dtype)
    assert len(smoothed) == num_calls


def test_large_channels_have_the_nearest_powers_of_two() -> None:
    """Two heads of 8 channels, of which 6 rotate. Sizes up to twice the median, 1 here, stay as they are."""
    sizes = torch.tensor([[1.0, 32.0, 0.0, 1.0, 32.0, 0.0, 2.7, 2.9], [0.0] * 8])
    own, inverse = factors(sizes * torch.tensor([1.0, -1.0] * 8)[:, None, None], 6)
    assert own[0].tolist() == [1, 16, 1, 1, 16, 1, 1, 2]
    assert own[1].tolist() == [1.0] * 8
    assert torch.equal(own * inverse, torch.ones_like(own))


def test_a_pair_has_the_mean_of_its_squares() -> None:
    own, _ = factors(torch.tensor([[[1.0, 6.0, 1.0, 1.0, 0.0, 1.0, 1.0]]]), 6)
    assert own[0].tolist() == [1, 2, 1, 1, 2, 1, 1]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("model_type", ["qwen2", "olmo2"])
def test_ranks_have_the_factors_of_one_process(model_type: str, num_ranks: int, kernels: str) -> None:
    if kernels != "cpp":
        pytest.skip("ranks of a CPU exchange by a C++ kernel")
    case = next(case for case in CASES if case.model_type == model_type)

    def run(ranks: Ranks) -> dict[int, Tensor]:
        return found_in(random_decoder(case, torch.float32, ranks=ranks))

    alone = run(ALONE)
    for rank, own in enumerate(on_ranks(num_ranks, run)):
        for layer, whole in alone.items():
            first, end = Rank(rank, num_ranks).kv_heads(describe(case.config_json()).heads(layer))
            assert torch.equal(own[layer], whole[:, first:end])
