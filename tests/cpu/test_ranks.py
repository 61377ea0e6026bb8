"""Ranks that share a model compute the bits of one process: in every family that they can share, in every way to store
weights, K and V."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.quality.checkpoint_formats import FORMATS, FP8_FORMATS, Format
from benchmarks.quality.gguf_blocks import Pack, as_q4_k, as_q6_k, as_q8_0
from benchmarks.quality.gguf_files import convert
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch.registry import describe
from inferd.engine.arch.sharding import counts_of, refuses
from inferd.engine.layers.collectives import ALONE, Ranks
from inferd.engine.layers.parameter import Parameter
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import load, recipe_of
from inferd.engine.quant.recipe import RECIPES
from inferd.kernels.ops.kv_format import KV_FORMATS
from tests.cpu.cases import CASES
from tests.cpu.checkpoints import Case, load_decoder, random_decoder, read_config
from tests.cpu.paging import prompt_logits
from tests.cpu.quantized_checkpoints import CONFIG, save
from tests.cpu.ranks import on_ranks

IDS = [7 * i % 199 for i in range(70)]
CHUNKS = [33, 1, 35, 1]
SIZES = {"hidden_size": 128, "intermediate_size": 160, "vocab_size": 201}
LLAMA = Case("llama", "llama", SIZES | {"attention_bias": True, "mlp_bias": True})

pytestmark = pytest.mark.usefixtures("_cpp")


@pytest.fixture
def _cpp(kernels: str) -> None:
    if kernels != "cpp":
        pytest.skip("ranks of a CPU exchange by a C++ kernel")


def assert_same(alone: Tensor, shared: list[Tensor]) -> None:
    """Rank 0 alone has the logits."""
    assert not alone.isnan().any()
    assert torch.equal(shared[0], alone)


FP8_KV, INT8_KV = KV_FORMATS


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("quantization", "dtype", "kv_dtype"),
    [
        ("none", torch.float32, None),
        ("none", torch.bfloat16, FP8_KV),
        ("int8", torch.bfloat16, None),
        ("int4", torch.bfloat16, INT8_KV),
        ("fp8", torch.bfloat16, None),
    ],
)
def test_logits_in_every_precision(
    quantization: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, num_ranks: int
) -> None:
    def run(ranks: Ranks) -> Tensor:
        decoder = random_decoder(LLAMA, dtype, RECIPES[quantization], ranks)
        return prompt_logits(decoder, IDS, CHUNKS, kv_dtype)

    assert_same(run(ALONE), on_ranks(num_ranks, run))


def counts_to_test(case: Case) -> list[int]:
    return [count for count in counts_of(describe(case.config_json())) if count > 1]


@pytest.mark.sampled(keep=8)
@pytest.mark.parametrize(
    ("case", "num_ranks"),
    [(case, count) for case in CASES for count in counts_to_test(case)],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_logits_of_every_family(case: Case, num_ranks: int) -> None:
    """Up to eight ranks, of which several have the same heads of K and V."""

    def run(ranks: Ranks) -> Tensor:
        return prompt_logits(random_decoder(case, torch.float32, ranks=ranks), IDS, CHUNKS)

    assert_same(run(ALONE), on_ranks(num_ranks, run))


OLMO2 = next(case for case in CASES if case.model_type == "olmo2")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_norm_of_all_heads(num_ranks: int) -> None:
    """Ranks gather q and k before it. Of four, two have the same head of K."""

    def run(ranks: Ranks) -> Tensor:
        return prompt_logits(random_decoder(OLMO2, torch.bfloat16, ranks=ranks), IDS, CHUNKS)

    assert_same(run(ALONE), on_ranks(num_ranks, run))


def test_every_family_can_be_shared() -> None:
    assert all(counts_to_test(case) for case in CASES)


BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_key_value_heads": 4, "vocab_size": 216}


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize("form", [*FORMATS, *FP8_FORMATS], ids=lambda form: form.name)
def test_logits_of_every_stored_format(form: Format, tmp_path: Path) -> None:
    """From files: each rank reads or keeps its rows of weights, scales, zero points and orders."""
    save(form, tmp_path, **(BLOCKS if "blocks" in form.name else {}))
    arch = describe(read_config(tmp_path))

    def run(ranks: Ranks) -> Tensor:
        recipe = recipe_of(arch, "none", torch.bfloat16)
        decoder = load_decoder(tmp_path, torch.bfloat16, recipe=recipe, ranks=ranks)
        return prompt_logits(decoder, IDS, CHUNKS)

    assert_same(run(ALONE), on_ranks(2, run))


def test_files_of_a_plain_checkpoint(tmp_path: Path) -> None:
    case = replace(LLAMA, config=LLAMA.config | {"tie_word_embeddings": True})
    case.save(tmp_path, torch.bfloat16)

    def run(ranks: Ranks) -> Tensor:
        return prompt_logits(load_decoder(tmp_path, torch.bfloat16, ranks=ranks), IDS, CHUNKS)

    assert_same(run(ALONE), on_ranks(2, run))


@pytest.mark.parametrize("keeps_blocks", [True, False])
def test_a_gguf_file(keeps_blocks: bool, tmp_path: Path) -> None:
    """Its q and k have another order of rows, v another type, and the head keeps the embedding's blocks."""
    case = replace(LLAMA, config={"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True})
    case.save(tmp_path)

    def pack(name: str) -> Pack:
        return as_q8_0 if name == "token_embd.weight" else as_q6_k if "attn_v" in name else as_q4_k

    file = convert(tmp_path, tmp_path / "x.gguf", pack)
    checkpoint = Checkpoint.read(file, keeps_blocks=keeps_blocks)
    arch = ModelFacts.of(checkpoint).arch

    def run(ranks: Ranks) -> Tensor:
        recipe = recipe_of(arch, "none", torch.bfloat16)
        decoder = Decoder(arch, torch.bfloat16, "cpu", recipe=recipe, ranks=ranks)
        load(decoder, checkpoint.tensors_of(arch))
        return prompt_logits(decoder, IDS, CHUNKS)

    assert_same(run(ALONE), on_ranks(2, run))


def test_the_comparison_sees_another_order_of_rows() -> None:
    def run(ranks: Ranks) -> Tensor:
        decoder = random_decoder(LLAMA, torch.float32, ranks=ranks)
        if ranks is not ALONE and ranks.own.index:
            gather = decoder._layers[1]._mlp._down._gather
            assert gather is not None
            decoder._layers[1]._mlp._down._gather = lambda part, size: gather(part.flip(1), size)
        return prompt_logits(decoder, IDS, CHUNKS)

    with pytest.raises(AssertionError):
        assert_same(run(ALONE), on_ranks(2, run))


def test_a_parameter_keeps_its_rows_and_wants_no_others() -> None:
    taken: list[Tensor] = []
    parameter = Parameter((10, 2), torch.float32, torch.device("cpu"), taken.append, ((1, 3), (6, 9)))
    whole = torch.arange(20.0).view(10, 2)
    assert [(row, len(rows)) for row, rows in parameter.needed(2, whole[2:7])] == [(2, 1), (6, 1)]
    parameter.write(0, whole[:2])
    assert parameter.missing_rows == ((2, 3), (6, 9))
    parameter.write(3, whole[3:6])
    parameter.write(6, whole[6:])
    assert not taken
    parameter.write(2, whole[2:3])
    assert torch.equal(taken[0], whole[[1, 2, 6, 7, 8]])
    assert not parameter.missing_rows
    with pytest.raises(AssertionError, match="written twice"):
        parameter.write(9, whole[9:])


@pytest.mark.parametrize(
    ("changes", "num_ranks", "reason"),
    [
        ({}, 3, "3 does not divide its 4 attention heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "2 ranks cannot share its 3 heads of K and V"),
        ({"num_attention_heads": 16, "intermediate_size": 36}, 16, "its MLP of 36 leaves nothing to the last of 16"),
        ({"num_attention_heads": 16, "vocab_size": 33}, 16, "its vocabulary of 33 leaves nothing"),
        (
            {"architectures": ["Olmo2ForCausalLM"], "num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 8},
            12,
            "its norm of k needs equal parts of 8 numbers from 12 ranks",
        ),
    ],
)
def test_refusals_say_why(changes: dict[str, Any], num_ranks: int, reason: str) -> None:
    arch = describe(CONFIG | changes)
    found = refuses(arch, num_ranks)
    assert found is not None and reason in found
    assert num_ranks not in counts_of(arch)


def test_blocks_of_fp8_stay_whole() -> None:
    form = next(one for one in FP8_FORMATS if one.name == "FP8, blocks")
    arch = describe(CONFIG | {"quantization_config": form.quantization, "hidden_size": 256, "intermediate_size": 384})
    assert refuses(arch, 2) == "2 ranks would cut its FP8 blocks of 128 rows in qkv"


def test_a_process_group_ends_though_its_file_was_closed_and_the_number_used_again() -> None:
    script = """
import gc, os, torch, torch.distributed as dist
from inferd.kernels.ops.gather.group import open_exchange
descriptor = os.memfd_create("first")
exchange = open_exchange(descriptor, 0, 1, torch.float32, torch.device("cpu"))
os.close(descriptor)
other = os.memfd_create("second")
os.write(other, (1 << 20).to_bytes(8, "little") * 512)  # lengths that reach behind the end
assert other == descriptor
dist.destroy_process_group()
del exchange
gc.collect()
"""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environment)
