"""Adapters through the whole engine: ids are those of merged weights, and a request's bits are the same alone and among
requests of other adapters and of none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from inferd.engine.api.adapter import WEIGHTS, read_adapter
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import plan_of
from inferd.engine.api.errors import ModelError
from inferd.engine.api.memory.activations import LORA_PANEL
from inferd.engine.api.wire.messages import Submit
from inferd.engine.api.wire.params import Adapter
from inferd.engine.arch.registry import describe
from inferd.engine.core.loop import EngineCore
from inferd.engine.lora.adapters import Adapters, read_updates
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import load
from inferd.kernels.ops.lora.weights import PANEL
from tests.cpu.adapters import linear_modules, merge, write_adapter
from tests.cpu.cases import CASES
from tests.cpu.checkpoints import Case, load_transformers, read_config
from tests.cpu.paging import Pool, Request
from tests.cpu.test_engine import NUM_NEW, Engine, prompt, request, run, save

KINDS = (
    {"rank": 4},
    {"rank": 7, "names": ("q_proj", "v_proj", "down_proj"), "use_rslora": True},
    {"rank": 8, "names": ("o_proj", "gate_proj"), "rank_pattern": {"o_proj": 3}, "alpha_pattern": {"o_proj": 2}},
)
"""Adapters of one model: every module, some of them, and patterns."""


@dataclass
class Adapted:
    """An engine with three adapters, and their content."""

    engine: Engine
    adapters: list[Adapter]

    @classmethod
    def load(cls, path: Path, adapters: Path, dtype: str, **settings: object) -> Adapted:
        engine = Engine.load(path, dtype, max_loras=4, max_lora_rank=9, **settings)
        loaded = []
        for index in range(len(KINDS)):
            files = read_adapter(adapters / str(index), engine.runner.arch)
            loaded.append(Adapter(index, files.digest))
            engine.runner.model.adapters.put(index, read_updates(files.path, files.digest, engine.runner.arch, 9))
        return cls(engine, loaded)

    def core(self, **options: int) -> EngineCore:
        core = self.engine.core(**options)
        for adapter in self.adapters:
            core.add_adapter(adapter)
        return core

    def request(self, name: str, ids: tuple[int, ...], index: int | None, **params: object) -> Submit:
        return request(name, ids, adapter=None if index is None else self.adapters[index], **params)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, adapters for it, and the checkpoint merged with each."""
    path = tmp_path_factory.mktemp("lora")
    shapes = linear_modules(save(path / "base", "qwen3"))
    for index, kind in enumerate(KINDS):
        deltas = write_adapter(path / str(index), shapes, seed=index, strength=0.3, **kind)
        merge(path / "base", deltas, path / f"merged{index}")
    return path


def test_ids_are_those_of_merged_weights(files: Path) -> None:
    adapted = Adapted.load(files / "base", files, "float32")
    ids = prompt(1, 60)
    answers = run(adapted.core(), *(adapted.request(str(i), ids, i) for i in (0, 1, 2)), request("base", ids))
    assert len({answer.token_ids for answer in answers.values()}) == 4
    for index in range(len(KINDS)):
        merged = run(Engine.load(files / f"merged{index}", "float32").core(), request("x", ids))["x"]
        assert answers[str(index)].token_ids == merged.token_ids
        for ours, theirs in zip(answers[str(index)].logprobs, merged.logprobs, strict=True):
            assert abs(ours.logprob - theirs.logprob) < 2e-4  # type: ignore[attr-defined]
    assert answers["base"] == run(Engine.load(files / "base", "float32").core(), request("x", ids))["x"]


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"},
     pytest.param({"dtype": "float32", "quantization": "int4"}, marks=pytest.mark.long)],
    ids=str,
)  # fmt: skip
def test_the_same_bits_whatever_runs_beside_it(files: Path, settings: dict[str, str]) -> None:
    adapted = Adapted.load(files / "base", files, **settings)
    ids = prompt(1, 75)
    crowd = [adapted.request(f"n{i}", prompt(100 + i, 1 + 7 * i % 90), (None, 0, 1, 2)[i % 4]) for i in range(16)]
    for index in (0, 1, None):
        submit = adapted.request("x", ids, index, temperature=0.8)
        alone = run(adapted.core(), submit)["x"]
        assert len(alone.token_ids) == NUM_NEW
        assert run(adapted.core(), *crowd[:9], submit, *crowd[9:])["x"] == alone, "among 17"
        assert run(adapted.core(depth=0, max_num_batched_tokens=7), submit)["x"] == alone, "in chunks"
        replay = msgspec.structs.replace(submit, emitted_ids=alone.token_ids[:9])
        assert run(adapted.core(), replay)["x"].token_ids == alone.token_ids[9:]
        warm = adapted.core()
        others = [adapted.request(f"o{i}", (*ids[:60], 1, 2, 3), i) for i in (None, 0, 1, 2)]
        run(warm, *others)
        before = warm.stats().prefix_hit_tokens
        assert run(warm, submit)["x"] == alone, "with a prefix hit"
        assert warm.stats().prefix_hit_tokens - before == 48
        tight = adapted.core(num_blocks=10)
        assert run(tight, *(adapted.request(f"r{i}", prompt(200 + i, 40), i) for i in range(3)), submit)["x"] == alone
        assert tight.stats().num_preemptions > 0


def test_prefixes_are_shared_within_one_adapter_alone(files: Path) -> None:
    adapted = Adapted.load(files / "base", files, "float32")
    core, ids = adapted.core(), prompt(1, 70)
    run(core, adapted.request("base", ids, None), adapted.request("0", ids, 0))
    run(core, adapted.request("1", ids, 1))
    assert core.stats().prefix_hit_tokens == 0
    run(core, adapted.request("again", ids, 1))
    assert core.stats().prefix_hit_tokens == 64


def test_other_weights_at_an_index_find_nothing_of_the_first(files: Path) -> None:
    """Also under the same name: what was cached belongs to the content."""
    adapted = Adapted.load(files / "base", files, "float32")
    core, ids = adapted.core(), prompt(1, 70)
    expected = run(core, adapted.request("second", ids, 1))["second"]
    run(core, adapted.request("first", ids, 0))
    runner, digest = adapted.engine.runner, adapted.adapters[1].digest
    runner.model.adapters.put(0, read_updates(files / "1", digest, runner.arch, 9))
    core.add_adapter(Adapter(0, digest))
    assert run(core, request("x", ids, adapter=Adapter(0, digest)))["x"] == expected
    core.submit(adapted.request("gone", ids, 0), now=0.0)
    output = core.flush()
    assert output is not None and output.deltas[0].failure is not None
    assert output.deltas[0].failure.code == "model_not_found"


UNLIKE = (
    "phi 3, long factors",
    "starcoder2, window",
    "gemma 2",
    "gemma 4, k is v in wide layers",
    "glm, no biases",
)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in UNLIKE], ids=lambda case: case.name)
def test_logits_are_those_of_merged_weights_in_transformers(case: Case, tmp_path: Path) -> None:
    """Fused modules, biases, MLPs without a gate, norms behind the branches, and a rope that turns neighbours."""
    case.save(tmp_path / "base")
    deltas = write_adapter(tmp_path / "adapter", linear_modules(tmp_path / "base"), seed=3, strength=0.2)
    model = load_transformers(merge(tmp_path / "base", deltas, tmp_path / "merged"), torch.float32)
    arch = describe(read_config(tmp_path / "base"))
    adapters = Adapters.allocate(arch, 2, 4, 2, torch.float32)
    files = read_adapter(tmp_path / "adapter", arch)
    adapters.put(1, read_updates(files.path, files.digest, arch, 4))
    adapters.assign(1, 1)
    decoder = Decoder(arch, torch.float32, "cpu", loras=adapters.matrices)
    load(decoder, Checkpoint.read(tmp_path / "base").tensors)
    ids = torch.randint(0, arch.vocab_size, (40,)).tolist()
    with adapters.used_by(torch.ones(40, dtype=torch.int64)):
        got = decoder.logits(Pool(decoder, num_blocks=8).step([(Request(ids), 40)])[0])
    expected = model(torch.tensor([ids])).logits[0]
    tolerance = 2e-4 * float(expected.abs().max())
    assert (got - expected).abs().max() < tolerance
    plain = decoder.logits(Pool(decoder, num_blocks=8).step([(Request(ids), 40)])[0])
    assert (plain - expected).abs().max() > 100 * tolerance


def test_a_damaged_adapter_is_refused(files: Path, tmp_path: Path) -> None:
    arch = describe(read_config(files / "base"))
    shapes = linear_modules(files / "base")
    write_adapter(tmp_path / "nan", shapes, seed=0, strength=float("nan"))
    digest = read_adapter(tmp_path / "nan", arch).digest
    with pytest.raises(ModelError, match=r"lora_B\.weight must hold finite numbers"):
        read_updates(tmp_path / "nan", digest, arch, 9)
    with pytest.raises(ModelError, match="has changed since it was loaded"):
        read_updates(files / "0", digest, arch, 9)
    (tmp_path / "nan" / WEIGHTS).write_bytes((files / "0" / WEIGHTS).read_bytes()[:-1])
    with pytest.raises(ModelError, match="truncated"):
        read_updates(tmp_path / "nan", digest, arch, 9)


def test_planned_memory_is_what_is_allocated(files: Path) -> None:
    assert LORA_PANEL == PANEL
    engine = Adapted.load(files / "base", files, "float32").engine
    matrices = engine.runner.model.adapters.matrices.values()
    held = sum(tensor.nbytes for one in matrices for tensor in (one.weights.down, one.weights.up))
    (part,) = [one for one in plan_of(engine.config, engine.runner.arch).working if one.name == "adapters"]
    assert part.num_bytes == held, part.formula.text
