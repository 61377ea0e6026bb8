"""Adapters that cannot be served are refused with the name of what does not fit, before anything is loaded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferd.engine.api.adapter import CONFIG, WEIGHTS, read_adapter, space_for
from inferd.engine.api.checkpoint import EMBEDDED_PATH, Checkpoint
from inferd.engine.api.errors import ConfigError, ModelError
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch.registry import weights
from inferd.engine.process.main import serve
from tests.cpu.adapters import write_adapter

ARCH = ModelFacts.of(Checkpoint.read(EMBEDDED_PATH)).arch
SHAPES = {
    module.name: (module.out_size, module.in_size) for modules in weights(ARCH).modules().values() for module in modules
}
DOWN = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_adapter(tmp_path, SHAPES, seed=0, names=("q_proj", "down_proj"), rank=4)
    return tmp_path


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', but is 'IA3'"),
        ({"bias": "all"}, "bias must be 'none', but is 'all'; merge"),
        ({"use_dora": True}, "use_dora is not supported, but is True; merge"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is not supported, but is \['lm_head'\]"),
        ({"r": 8}, "has rank 4 in adapter_model.safetensors, but 8 in adapter_config.json"),
        ({"alpha_pattern": {"q.*": 2}}, r"alpha_pattern must have names of modules, but has the pattern 'q\.\*'"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
        ({"lora_alpha": "much"}, "lora_alpha must be a number below 1,000,000, but is 'much'"),
        ({"lora_alpha": 1e7}, "lora_alpha must be a number below"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights is 'pissa_niter_4', with which PEFT changes the model",
        ),
    ],
)
def test_a_configuration_that_is_not_served(path: Path, config: dict[str, Any], message: str) -> None:
    stated = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps({**stated, **config}))
    with pytest.raises(ModelError, match=message):
        read_adapter(path, ARCH)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (DOWN, torch.zeros(4, 7), r"down_proj.lora_A.weight must be \[4, \d+\], but is \[4, 7\]: it does not fit the "
         r"served model \(\w+\), and the adapter's base is 'base'"),
        (DOWN, torch.zeros(4), "must be"),
        (DOWN, torch.zeros(0, 7), "must be"),
        (DOWN, torch.zeros(4, SHAPES["model.layers.0.mlp.down_proj"][1], dtype=torch.int8), "is stored as I8"),
        (DOWN, None, "down_proj must have lora_A and lora_B, but has only B"),
        (DOWN.replace("layers.0", "layers.99"), torch.zeros(4, 7), "is no linear module of the layers of the served"),
        (DOWN.replace("lora_A", "lora_magnitude_vector"), torch.zeros(4), "is no A or B of a linear module"),
        ("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 4), "lm_head is no linear module of the layers"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(path: Path, name: str, tensor: torch.Tensor | None, message: str) -> None:
    tensors = load_file(path / WEIGHTS)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, path / WEIGHTS)
    with pytest.raises(ModelError, match=message):
        read_adapter(path, ARCH)


@pytest.mark.parametrize("seed", range(8))
def test_the_first_pattern_that_a_module_ends_with_counts(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    ends = [".".join(module.split(".")[i:]) for module in SHAPES for i in range(5)] + ["proj", "x.q_proj"]
    names = chance.sample(sorted({*ends, *("^" + end for end in ends)}), 20)
    stated = json.loads((path / CONFIG).read_text())
    patterns = {name: chance.randrange(1, 100) for name in names}
    (path / CONFIG).write_text(json.dumps({**stated, "alpha_pattern": patterns, "lora_alpha": 100}))
    found = [update.scale * update.rank for update in read_adapter(path, ARCH).updates]
    expected = []
    for name in load_file(path / WEIGHTS):
        if "lora_A" in name:
            module = name.removeprefix("base_model.model").removesuffix(".lora_A.weight")
            matching = [patterns[each] for each in patterns if module.endswith("." + each.removeprefix("^"))]
            expected.append(matching[0] if matching else 100)
    assert sorted(found) == pytest.approx(sorted(expected)) and len(set(found)) > 1


def test_a_module_that_is_named_twice(path: Path) -> None:
    tensors = load_file(path / WEIGHTS)
    other = {name.replace("model.model.model.", "model.model."): tensor + 1 for name, tensor in tensors.items()}
    save_file({**tensors, **other}, path / WEIGHTS)
    with pytest.raises(ModelError, match=r"down_proj and base_model.*down_proj are the same module; keep one of them"):
        read_adapter(path, ARCH)


def test_a_rank_that_there_is_no_space_for(path: Path) -> None:
    with pytest.raises(ModelError, match=r"must be at most 2, but .* has 4; start the server with --max-lora-rank 4"):
        read_adapter(path, ARCH, 2)
    write_adapter(path, SHAPES, seed=0, rank=65)
    with pytest.raises(ModelError, match=r"must be at most 64, but .* has 65$"):
        read_adapter(path, ARCH)


def test_what_is_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"is no directory: an adapter is a directory with {CONFIG}"):
        read_adapter(tmp_path / "none", ARCH)
    with pytest.raises(ModelError, match="cannot be read: File name too long"):
        read_adapter(tmp_path / ("long" * 100), ARCH)
    with pytest.raises(ModelError, match=f"holds no {CONFIG}"):
        read_adapter(tmp_path, ARCH)
    (tmp_path / CONFIG).write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="must be saved as safetensors, because pickled"):
        read_adapter(tmp_path, ARCH)
    save_file({}, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match="holds no weights of LoRA"):
        read_adapter(tmp_path, ARCH)


@pytest.mark.parametrize("body", ["model.", "model.model.language_model.", "model.language_model.model."])
def test_names_of_adapters_of_models_without_a_head_or_with_eyes(path: Path, body: str) -> None:
    expected = read_adapter(path, ARCH)
    tensors = load_file(path / WEIGHTS)
    renamed = {name.replace("model.model.model.", "model." + body): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / WEIGHTS)
    found = read_adapter(path, ARCH)
    assert [(low.matrix, low.part, low.rank) for low in found.updates] == [
        (low.matrix, low.part, low.rank) for low in expected.updates
    ]
    assert found.digest != expected.digest, "of the content"


def test_an_idle_engine_takes_requests_while_it_reads_an_adapter() -> None:
    """Its check of the whole pool, which takes long, waits until nothing is read."""
    link, core, adapters, waits = Mock(), Mock(is_awaiting=False, has_work=False), Mock(is_busy=True), list[int]()
    core.flush.return_value = None
    adapters.ended.return_value = []

    def receive(timeout_ms: int) -> list[object]:
        waits.append(timeout_ms)
        if len(waits) == 3:
            adapters.is_busy = False
        if len(waits) == 5:
            raise StopAsyncIteration
        return []

    link.receive = receive
    with pytest.raises(StopAsyncIteration):
        serve(core, Mock(), link, Mock(num_beats=0), adapters)
    assert waits == [1, 1, 1, 1000, 1000]
    assert core.check.call_count == 1, "only once nothing was read"


def test_space_for_the_adapters_that_are_given(path: Path) -> None:
    files = read_adapter(path, ARCH)
    assert space_for(None, None, ()) == (0, 16)
    assert space_for(None, None, (files,)) == (8, 16)
    assert space_for(None, None, (files,) * 9) == (9, 16)
    assert space_for(3, 4, (files,)) == (3, 4)
    with pytest.raises(ConfigError, match="max_loras must be at least 2, the adapters given by --lora, but got 1"):
        space_for(1, None, (files, files))
