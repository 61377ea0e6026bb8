"""Loading a checkpoint. A damaged checkpoint, or one that contradicts its config, is refused before weights are
read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch.registry import describe
from inferd.engine.layers.parameter import Parameter
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import load, recipe_of
from inferd.engine.quant.checkpoints.reader import CheckpointError
from tests.cpu.cases import CASES, Case
from tests.cpu.checkpoints import load_decoder, read_config
from tests.cpu.paging import prompt_logits

SHARDED, TIED = CASES[0], CASES[2]
Change = Callable[[dict[str, Tensor]], Any]


def rewrite(directory: Path, change: Change) -> None:
    """Change the tensors of the only file."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


def refused(directory: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        load_decoder(directory, torch.float32)


def test_one_file_and_shards_give_the_same_model(tmp_path: Path) -> None:
    ids = list(range(40))
    SHARDED.save(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    merged: dict[str, Tensor] = {}
    for file in (tmp_path / "shards").glob("*.safetensors"):
        merged.update(load_file(file))
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.json").write_text((tmp_path / "shards" / "config.json").read_text())
    save_file(merged, tmp_path / "one" / "model.safetensors")
    shards, one = (
        prompt_logits(load_decoder(tmp_path / name, torch.float32), ids, (40,)) for name in ("shards", "one")
    )
    assert torch.equal(shards, one)


@pytest.mark.parametrize("case", [SHARDED, TIED], ids=["own head", "tied head"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_keep_16_bits_give_the_same_logits(
    case: Case, quantization: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    case.save(tmp_path, dtype)
    arch, ids = describe(read_config(tmp_path)), list(range(40))
    wide, narrow = (recipe_of(arch, quantization, torch.float32, narrow=kept) for kept in (None, dtype))
    decoder = load_decoder(tmp_path, torch.float32, recipe=narrow)
    taken = {name: parameter.dtype for name, parameter in decoder.parameters.items() if len(parameter.shape) == 2}
    assert taken.pop("embed.weight") == dtype
    assert set(taken.values()) == {dtype if quantization == "none" else torch.float32}
    expected = prompt_logits(load_decoder(tmp_path, torch.float32, recipe=wide), ids, (40,))
    assert torch.equal(prompt_logits(decoder, ids, (40,)), expected)


def test_a_model_that_embeds_may_be_stored_without_what_generates(tmp_path: Path) -> None:
    """As transformers stores the body alone: the names lack `model.`, and config.json is that of the whole model."""
    whole, body, ids = tmp_path / "whole", tmp_path / "body", list(range(20))
    TIED.save(whole)
    AutoModel.from_pretrained(whole).save_pretrained(body)
    (body / "config.json").write_text((whole / "config.json").read_text())
    assert {"embed_tokens.weight", "norm.weight"} < load_file(body / "model.safetensors").keys()
    expected = prompt_logits(load_decoder(whole, torch.float32), ids, (20,))
    assert torch.equal(prompt_logits(load_decoder(body, torch.float32), ids, (20,)), expected)
    rewrite(body, lambda tensors: tensors.update({"model.norm.weight": tensors.pop("norm.weight")}))
    refused(body, "unexpected: embed_tokens.weight")


EXPERTS = Case("mixtral", "mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2})


def stacked(tensors: dict[str, Tensor]) -> None:
    """Changes names and shapes to those that transformers has in memory."""
    for layer in range(3):
        theirs, ours = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        own = {
            part: [tensors.pop(f"{theirs}.experts.{e}.{part}.weight") for e in range(3)] for part in ("w1", "w2", "w3")
        }
        pairs = zip(own["w1"], own["w3"], strict=True)
        tensors[f"{ours}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{ours}.experts.down_proj"] = torch.stack(own["w2"])
        tensors[f"{ours}.gate.weight"] = tensors.pop(f"{theirs}.gate.weight")


def test_experts_may_be_stacked(tmp_path: Path) -> None:
    EXPERTS.save(tmp_path)
    ids = list(range(20))
    expected = prompt_logits(load_decoder(tmp_path, torch.float32), ids, (20,))
    rewrite(tmp_path, stacked)
    assert len(load_file(tmp_path / "model.safetensors")) == 3 + 3 * 9
    assert torch.equal(prompt_logits(load_decoder(tmp_path, torch.float32), ids, (20,)), expected)
    facts = ModelFacts.of(Checkpoint.read(tmp_path))
    assert facts.num_params == sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.1.mlp.experts.down_proj": torch.zeros(2, 64, 104)}))
    refused(tmp_path, r"1 missing: model.layers.1.block_sparse_moe.experts.2.w2.weight")


def test_experts_of_gpt_oss_have_one_tensor(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.model_type == "gpt_oss")
    case.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.1.mlp.experts.gate_up_proj"].shape == (6, 64, 208)
    facts = ModelFacts.of(Checkpoint.read(tmp_path))
    assert facts.num_params == sum(tensor.numel() for tensor in tensors.values())
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.1.mlp.experts.down_proj": torch.zeros(5, 104, 64)}))
    refused(tmp_path, r"1 missing: model.layers.1.mlp.experts.5.down_proj.weight$")
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.1.mlp.experts.down_proj": torch.zeros(6, 64, 104)}))
    refused(tmp_path, r"experts.0.down_proj.weight is \[104, 64\], by config.json \[64, 104\]")


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    EXPERTS.save(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.2.block_sparse_moe.experts.1.w3.weight"))
    refused(tmp_path, "1 missing: model.layers.2.block_sparse_moe.experts.1.w3.weight")


def test_progress_ends_at_the_total_and_total_is_the_files_tensors(tmp_path: Path) -> None:
    TIED.save(tmp_path, torch.bfloat16)
    seen: list[tuple[int, int]] = []
    decoder = Decoder(describe(read_config(tmp_path)), torch.float32, "cpu")
    read = load(decoder, Checkpoint.read(tmp_path).tensors, lambda done, total: seen.append((done, total)))
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert seen[-1] == (stored, stored) == (read, read)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_stored_head_may_repeat_the_tied_embedding_and_not_contradict_it(tmp_path: Path) -> None:
    TIED.save(tmp_path)
    ids = list(range(20))
    expected = prompt_logits(load_decoder(tmp_path, torch.float32), ids, (20,))
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(prompt_logits(load_decoder(tmp_path, torch.float32), ids, (20,)), expected)
    rewrite(tmp_path, lambda tensors: tensors["lm_head.weight"][3, 3].add_(1e-3))
    refused(
        tmp_path, r"ties lm_head.weight to model.embed_tokens.weight, but the checkpoint stores both and they differ"
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "1 missing: model.norm.weight"),
        (lambda tensors: tensors.update({"extra.weight": torch.zeros(2)}), "1 unexpected: extra.weight"),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(16, 64)}),
            r"model.layers.0.self_attn.k_proj.weight is \[16, 64\], by config.json \[64, 64\]",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int64)}),
            "model.norm.weight in .* is stored as I64; by config.json it is one of: F64, F32, F16, BF16",
        ),
    ],
)
def test_tensors_that_contradict_the_config(tmp_path: Path, change: Change, match: str) -> None:
    TIED.save(tmp_path)
    rewrite(tmp_path, change)
    refused(tmp_path, match)


def test_a_config_that_contradicts_the_tensors(tmp_path: Path) -> None:
    TIED.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"9 missing: model.layers.3.*\[104, 64\], by config.json \[96, 64\]"):
        load_decoder(tmp_path, torch.float32, {"num_hidden_layers": 4, "intermediate_size": 96})


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path, stored: torch.dtype, value: float) -> None:
    TIED.save(tmp_path, stored)
    name = sorted(load_file(tmp_path / "model.safetensors"))[int(value == -float("inf")) + 2]

    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    rewrite(tmp_path, damage)
    refused(
        tmp_path, rf"{re.escape(name)} must hold finite numbers, but 1 of its \d+ values are NaN or infinite in b?float"
    )


def test_weights_whose_sum_alone_is_infinite_are_numbers(tmp_path: Path) -> None:
    TIED.save(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors["model.embed_tokens.weight"].fill_(3e38))
    load_decoder(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("stored", "served", "value"),
    [
        (torch.float64, torch.float32, 1e39),
        (torch.float32, torch.bfloat16, 3.4e38),
        (torch.bfloat16, torch.float16, 1e5),
    ],
)
def test_a_weight_that_what_is_served_cannot_hold_is_refused(
    tmp_path: Path, stored: torch.dtype, served: torch.dtype, value: float
) -> None:
    TIED.save(tmp_path)
    norm = torch.ones(64, dtype=stored)
    norm[0] = value
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": norm}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight must hold finite numbers, but 1 of its 64 values"):
        load(Decoder(describe(read_config(tmp_path)), served, "cpu"), Checkpoint.read(tmp_path).tensors)


def test_a_parameter_is_handed_over_when_each_row_was_written_once() -> None:
    taken: list[Tensor] = []
    parameter = Parameter((5, 2), torch.float32, torch.device("cpu"), taken.append)
    rows = torch.arange(10, dtype=torch.float64).view(5, 2)
    parameter.write(3, rows[3:])
    assert parameter.missing_rows == ((0, 3),)
    with pytest.raises(AssertionError, match=r"rows 2\.\.4 written twice"):
        parameter.write(2, rows[2:4])
    parameter.write(0, rows[:1])
    assert parameter.missing_rows == ((1, 3),)
    assert not taken
    parameter.write(1, rows[1:3])
    assert torch.equal(taken[0], rows.float())
    assert not parameter.missing_rows


def test_rows_may_arrive_in_any_order() -> None:
    random, whole = Random(1), torch.arange(60.0).view(30, 2)
    for _ in range(50):
        taken: list[Tensor] = []
        parameter = Parameter((30, 2), torch.float32, torch.device("cpu"), taken.append)
        cuts = sorted(random.sample(range(1, 30), random.randrange(1, 12)))
        pieces = list(itertools.pairwise([0, *cuts, 30]))
        random.shuffle(pieces)
        for number, (start, end) in enumerate(pieces):
            parameter.write(start, whole[start:end])
            there = {row for piece in pieces[: number + 1] for row in range(*piece)}
            assert {row for gap in parameter.missing_rows for row in range(*gap)} == set(range(30)) - there
            for again in (start, end - 1):
                with pytest.raises(AssertionError, match="written twice"):
                    parameter.write(again, whole[again : again + 1])
        assert len(taken) == 1 and torch.equal(taken[0], whole)
