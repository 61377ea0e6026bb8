"""Several models in one server: the settings of each, and the division of the machine."""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.checkpoint import EMBEDDED_PATH, Checkpoint
from inferd.engine.api.config import replicas_of
from inferd.engine.api.encoder_model import facts_of
from inferd.engine.api.errors import CapacityError, ConfigError, ModelError
from inferd.engine.api.machine.cpu import DRIVER_BYTES, Machine
from inferd.engine.api.machine.gpu import Accelerator
from inferd.engine.api.memory.division import MemoryDemand, shares_of
from inferd.engine.api.memory.planner import MemoryPlan
from inferd.server.commands.plan_table import run
from inferd.server.config.models import OWN, Asked, nice_of, settings_of_models
from inferd.server.config.settings import Settings
from inferd.server.lifecycle.models import read_models
from tests.configs import engine_config

GIB, MIB = 2**30, 2**20
YAML = """
models:
  - tiny
  - model: ./checkpoints/small
    quantization: int8
    kv-memory: 64MiB
    ttft_target: 2s
kv_memory: 32MiB
port: 1
"""
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "pooling", "type": "sentence_transformers.models.Pooling"},
]


def load(flags: dict[str, object], tmp_path: Path, yaml: str = YAML) -> tuple[Settings, ...]:
    file = tmp_path / "inferd.yaml"
    file.write_text(yaml)
    return settings_of_models(Settings.load(flags, file))


def test_an_entry_wins_over_the_file_and_a_flag_over_both(tmp_path: Path) -> None:
    tiny, small = load({"port": 2}, tmp_path)
    assert (tiny.served_names, tiny.quantization, tiny.kv_memory) == (("tiny",), "auto", 32 * MIB)
    assert (small.served_names, small.quantization, small.kv_memory) == (("small",), "int8", 64 * MIB)
    assert (tiny.ttft_target, small.ttft_target) == (None, 2.0) and tiny.port == small.port == 2
    assert small.origin("quantization") == "models, entry 2" and tiny.origin("kv_memory").startswith("file ")
    _, small = load({"kv_memory": "16MiB"}, tmp_path)
    assert small.kv_memory == 16 * MIB and small.quantization == "int8"


def test_a_stronger_source_replaces_all_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [own.model for own in load({"model": "x"}, tmp_path)] == ["x"]
    named = load({"models": ["a=tiny", "b=./x=y", "./c=d"]}, tmp_path, "model: z")
    assert [(own.served_names, own.model) for own in named] == [
        (("a",), "tiny"), (("b",), "./x=y"), (("c=d",), "./c=d")
    ]  # fmt: skip
    monkeypatch.setenv("INFERD_MODELS", "a=tiny, smollm2")
    assert [own.served_names[0] for own in load({}, tmp_path)] == ["a", "smollm2"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": ["tiny", "tiny"]}, "two models or adapters have the name 'tiny'; name them differently"),
        ({"models": ["tiny", "b=x"], "lora": ["b=dir"]}, "two models or adapters have the name 'b'"),
        ({"models": ["a=tiny", "b=x"], "lora": ["c=dir"]}, "two models or adapters have the name 'c'"),
        ({"models": ["a=tiny", "b=x"], "kv_events": "tcp://*:1"}, "give each model its own endpoints"),
        (
            {"models": [{"model": f"m{n}", "kv_events": f"tcp://*:{n}"} for n in (1, 2)], "replicas": 2},
            "two of them have KV events at tcp://*:2; give each model its own endpoints",
        ),
        ({"models": ["a=tiny", "b=x"], "served_model_name": "c"}, "served_model_name cannot name a model of a list"),
        ({"models": ["a=tiny", ""]}, "model: must not be empty, but got '' (models, entry 2)"),
        ({"models": ["a=tiny", {"model": "x", "port": 1}]}, "port is a setting of the whole server: write it beside"),
        ({"models": ["a=tiny", {"model": "x", "dtipe": 1}]}, "there is no setting 'dtipe'; did you mean dtype?"),
        ({"models": ["a=tiny", {"dtype": "auto"}]}, "an entry must name its model, such as `model: tiny`"),
        ({"models": [{"model": "x", "block_size": 7}]}, "block_size must be one of 16, 32, 64, 128, or auto"),
        ({"models": ["a=tiny"], "model": "b"}, "both model and models are given"),
    ],
)  # fmt: skip
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        settings_of_models(Settings.load(given))
    assert message in str(raised.value)


def test_settings_of_the_whole_server_are_not_a_models() -> None:
    assert {"quantization", "max_model_len", "speculative", "lora", "kv_memory", "tpot_target"} <= OWN
    assert not OWN & {"port", "api_key", "keys_file", "log_level", "max_body_bytes", "models"}


def demand(name: str, weights: int, *, kv: int | None = None, gpus: int = 0, engines: int = 1) -> MemoryDemand:
    """A model with so many bytes of weights, and nothing else beside its KV cache."""

    class Plan(MemoryPlan):
        weights_bytes = weights  # type: ignore[assignment]
        kv_bytes = GIB  # type: ignore[assignment]
        working_bytes = 0  # type: ignore[assignment]

    loading = type("Loading", (), {"num_bytes": -GIB})()
    return MemoryDemand(name, gpus > 0, gpus or engines, Plan((), None, (), loading), kv)  # type: ignore[arg-type]


def host(available: int) -> Machine:
    return Machine(4, 64 * GIB, available)


def available(machine: Machine, *demands: MemoryDemand) -> list[int]:
    return [share.machine.memory_available_bytes for share in shares_of(machine, demands)]


def test_what_is_left_beside_all_weights_is_divided_equally() -> None:
    both = available(host(20 * GIB), demand("a", 2 * GIB), demand("b", 8 * GIB))
    assert both == [2 * GIB + 5 * GIB, 8 * GIB + 5 * GIB]
    with_asked = available(host(20 * GIB), demand("a", 2 * GIB, kv=4 * GIB), demand("b", 8 * GIB))
    assert with_asked[1] == 8 * GIB + 6 * GIB, "a KV cache of a size of its own takes no part of the rest"
    replicas = available(host(20 * GIB), demand("a", 2 * GIB, engines=3), demand("b", 8 * GIB))
    assert replicas == [6 * GIB + 3 * GIB, 8 * GIB + 3 * GIB], "each replica has the weights"


def test_models_that_do_not_fit_together_are_refused_with_their_sizes() -> None:
    with pytest.raises(CapacityError, match=r"a 2\.0 GiB, b 8\.0 GiB, but 9\.0 GiB are available; serve fewer, or"):
        shares_of(host(9 * GIB), [demand("a", 2 * GIB), demand("b", 8 * GIB)])


def test_models_have_gpus_of_their_own_or_share_the_first() -> None:
    free = tuple(size * GIB + DRIVER_BYTES for size in (10, 20, 30))
    gpu = Accelerator("H200", (9, 0), 80 * GIB, free[0], free[1:])
    machine = replace(host(99 * GIB), accelerator=gpu)
    a, b, c = demand("a", GIB, gpus=1), demand("b", 2 * GIB, gpus=2), demand("c", GIB)
    shares = shares_of(machine, [a, c, b])
    assert [share.first_gpu for share in shares] == [0, 0, 1]
    assert [share.machine.memory_available_bytes for share in shares] == [10 * GIB, 99 * GIB, 20 * GIB]
    config = engine_config(device="cuda", num_replicas=2, first_gpu=1)
    assert [each.first_gpu for each in replicas_of(config)] == [1, 2]
    shared = shares_of(replace(machine, accelerator=replace(gpu, others_free_bytes=())), [a, b])
    assert [(share.first_gpu, share.machine.memory_available_bytes) for share in shared] == [
        (0, GIB + 7 * GIB // 2), (0, 2 * GIB + 7 * GIB // 2)
    ]  # fmt: skip


def test_the_plan_of_several_divides_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = replace(Machine.detect(), memory_available_bytes=2 * GIB, accelerator=None)
    monkeypatch.setattr(Machine, "detect", lambda: machine)
    run(Settings(models=("tiny", "b=tiny")), 1, None, "10-20", as_json=True)
    together = json.loads(capsys.readouterr().out)["together"]
    tiny, b = together["tiny"], together["b"]
    assert tiny == b and tiny["needed_bytes"] + tiny["kv_share_bytes"] == GIB
    run(Settings(models=("tiny", "b=tiny")), 1, None, "10-20", as_json=False)
    said = capsys.readouterr().out.partition("Together")[2]
    sizes = [float(size) for size in re.findall(r"^  \w+: ([\d.]+) MiB with ", said, re.MULTILINE)]
    assert len(sizes) == 2 and float(said.partition("sum: ")[2].split()[0]) == round(sum(sizes) / 1024, 1)
    run(Settings(models=("tiny", "b=tiny"), kv_memory=16 * MIB, replicas=2), 1, None, "10-20", as_json=False)
    said = capsys.readouterr().out
    assert re.search(r"\nEach of 2 replicas has 1\.0 GiB of 2\.0 GiB available; fits", said)
    assert re.search(r"\n  b: 2 engine processes of [\d.]+ MiB, each with 16\.0 MiB of KV cache\n  sum: ", said)
    too_long = Settings(models=("tiny", {"model": "tiny", "served-model-name": "b", "max-model-len": 2049}))
    with pytest.raises(ConfigError, match=r"^b: .*must be from 1 to 2048"):
        run(too_long, 1, None, "0", as_json=True)


@pytest.mark.parametrize(
    ("names", "kv_memory", "message"),
    [
        (("tiny",), 64 * GIB, r"^kv_memory of 64\.0 GiB was asked for, but 1\."),
        (("tiny", "b=tiny"), 64 * GIB, r"^tiny: kv_memory of 64\.0 GiB was asked for"),
        (("tiny", "b=tiny"), GIB, r"^the models do not fit together: tiny 1\.3 GiB, b 1\.3 GiB, but 2\.0 GiB are"),
    ],
)
def test_the_plan_of_what_would_be_refused_is_printed_before_the_refusal(
    names: tuple[str, ...], kv_memory: int, message: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    machine = replace(Machine.detect(), memory_available_bytes=2 * GIB, accelerator=None)
    monkeypatch.setattr(Machine, "detect", lambda: machine)
    settings = Settings(models=names, kv_memory=kv_memory)
    with pytest.raises(CapacityError, match=message) as tables:
        run(settings, 1, None, "10-20", as_json=False)
    said = capsys.readouterr().out
    assert said.count("All precisions; ") == len(names) and "Together" not in said
    with pytest.raises(CapacityError, match=message):
        run(settings, 1, None, "10-20", as_json=True)
    said = json.loads(capsys.readouterr().out)
    models = said["models"] if len(names) > 1 else [said]
    assert [each["serve"] for each in models] == [{"refusal": str(tables.value)}] * len(names)


PLANNED = """
models:
  - tiny
  - {model: tiny, served-model-name: b, quantization: int8, kv-memory: 32MiB, max-num-seqs: 4, num-threads: 1}
  - {model: tiny, served-model-name: c, replicas: 2, max-model-len: 300, kv-cache-dtype: int8}
host: 0.0.0.0
api-key: secret
"""


def test_the_plan_of_a_settings_file_is_what_the_server_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = replace(Machine.detect(), memory_available_bytes=3 * GIB, accelerator=None)
    monkeypatch.setattr(Machine, "detect", lambda: machine)
    (tmp_path / "inferd.yaml").write_text(PLANNED)
    settings = Settings.load({}, tmp_path / "inferd.yaml")
    run(settings, 1, None, "10-20", as_json=True)
    said = json.loads(capsys.readouterr().out)
    served = read_models(settings)
    reasons = [each["serve"].pop("kv_reason") for each in said["models"]]
    assert [reason.split(" of ")[0] for reason in reasons] == ["60%", "kv_memory", "what 128 sequences"]
    assert [each["serve"] for each in said["models"]] == [
        {
            "kv_bytes": one.memory.kv_bytes,
            "kv_tokens": (one.config.num_blocks or 0) * 32,
            "max_model_len": one.config.max_model_len,
            "max_num_seqs": one.config.max_num_seqs,
            "host_bytes": 0,
            "total_bytes": one.memory.total_bytes,
            "kv_directory": None,
        }
        for one in served
    ]
    assert [each["context"] for each in said["models"]] == [2048, 2048, 300]
    assert said["together"]["b"]["kv_share_bytes"] == 32 * MIB
    assert sum(each["needed_bytes"] + each["kv_share_bytes"] for each in said["together"].values()) == 3 * GIB
    rows = {row["name"]: row["max_context"] for row in said["models"][2]["precisions"]}
    assert rows["float32"] == 300, "the model has 2,048 positions, and its settings allow 300"


def test_the_models_of_a_server_fit_its_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(Machine.detect(), memory_available_bytes=2 * GIB, accelerator=None)
    monkeypatch.setattr(Machine, "detect", lambda: machine)
    alone = read_models(Settings(device="cpu"))
    three = read_models(Settings(models=("a=tiny", "b=tiny", "c=tiny"), device="cpu"))
    assert [report.settings.served_names for report in three] == [("a",), ("b",), ("c",)]
    assert 2 * GIB // 2 < sum(report.memory.total_bytes for report in three) <= 2 * GIB
    assert three[0].memory.kv_bytes < alone[0].memory.kv_bytes
    with pytest.raises(ModelError, match=r"^b: "):
        read_models(Settings(models=("tiny", "b=/nowhere/at/all"), device="cpu"))


def test_log_lines_begin_with_the_name_of_the_model_if_there_are_several(caplog: pytest.LogCaptureFixture) -> None:
    said = "deterministic: False -> True (on a CPU results are always deterministic)"
    with caplog.at_level(logging.INFO):
        read_models(Settings(models=("a=tiny", "b=tiny"), device="cpu", deterministic=False, kv_memory=64 * MIB))
        read_models(Settings(device="cpu", deterministic=False, kv_memory=64 * MIB))
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if said in line] == [f"a: {said}", f"b: {said}", said]


@pytest.mark.parametrize("kind", ["a body", "a folder of sentence-transformers"])
def test_a_decoder_that_embeds_yields_to_one_that_streams(kind: str, tmp_path: Path) -> None:
    for name in ("embedder", "other"):
        shutil.copytree(EMBEDDED_PATH, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        if kind == "a body":
            config = json.loads((tmp_path / name / "config.json").read_text())
            (tmp_path / name / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
        else:
            (tmp_path / name / "pooling").mkdir()
            (tmp_path / name / "pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
            (tmp_path / name / "modules.json").write_text(json.dumps(MODULES))

    def nice_values(*models: str) -> list[int]:
        found = read_models(Settings(models=models, kv_memory=32 * MIB, allow_unauthenticated=True))
        return [report.config.nice for report in found]

    embedder, other = (f"{name}={tmp_path / name}" for name in ("embedder", "other"))
    assert nice_values("tiny", embedder) == [0, 10]
    assert nice_values(embedder, other) == [0, 0], "nothing streams beside them"


@pytest.mark.parametrize(
    ("architecture", "names", "nice"),
    [
        ("Qwen3ForCausalLM", ("Qwen3-Reranker-0.6B",), 10),
        ("Qwen3ForCausalLM", ("Qwen3-0.6B",), 0),
        ("LlamaForCausalLM", ("reranker",), 0),
    ],
)
def test_a_reranker_that_only_its_name_tells_yields_to_streams(
    architecture: str, names: tuple[str, ...], nice: int
) -> None:
    settings, facts = Settings(), facts_of(Checkpoint.read(EMBEDDED_PATH))
    talker, named = Asked.of(settings, facts), Settings(served_model_name=names)
    other = Asked.of(named, replace(facts, arch=replace(facts.arch, architecture=architecture)))
    assert (nice_of(other, (talker, other)), nice_of(talker, (talker, other))) == (nice, 0)
