"""A checkpoint is data from a stranger. It is refused in one line within seconds, or served without the harm."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.quality.checkpoint_formats import FORMATS, Format
from inferd.engine.api.checkpoint import EMBEDDED_PATH
from inferd.engine.api.errors import ModelError
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch.draft_heads import EAGLE3_ARCHITECTURES
from inferd.engine.arch.registry import known_architectures
from inferd.engine.arch.shown import MAX_MESSAGE
from tests.cpu.quantized_checkpoints import config_json
from tests.e2e.conftest import INFERD, Daemon, start

from .hostile_checkpoints import (
    CANARY,
    REFUSED,
    SERVED,
    UNREADABLE,
    Case,
    config,
    copy_of_tiny,
    remote_tokenizer,
    tokenizer,
)

__all__ = ["start"]

ROOT = Path(__file__).resolve().parents[2]
Outcomes = dict[str, tuple[str, str]]
"""Case -> (class of the error or "", message)."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, case in {**REFUSED, **{name: Case(edit, "") for name, edit in SERVED.items()}}.items():
        folder = copy_of_tiny(tmp_path_factory.mktemp("hostile") / "model")
        case.edit(folder)
        made[name] = folder / case.file
    return made


@pytest.fixture(scope="module", params=["", "-O"], ids=["python", "python -O"])
def outcomes(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Outcomes:
    """The result of a start with every checkpoint, also without assertions. Fails the test that ran too long."""
    options = [request.param] if request.param else []
    command = [sys.executable, *options, "-m", "tests.security.starting", *map(str, folders.values())]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    told = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(told) == len(folders), f"ended by {list(folders)[len(told)]!r}: {run.returncode} {run.stderr[-2_000:]}"
    assert not [folder for folder in folders.values() if (folder / CANARY).exists()], "code of a checkpoint ran"
    return {name: (kind, message) for name, (_, kind, message) in zip(folders, told, strict=True)}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_harm_is_refused_with_its_reason(name: str, outcomes: Outcomes) -> None:
    kind, message = outcomes[name]
    assert kind == "ModelError"
    assert re.search(REFUSED[name].words, message), message[:500]
    assert len(message) <= MAX_MESSAGE and message.isprintable()


@pytest.mark.parametrize("name", SERVED)
def test_what_harms_nobody_until_it_is_used_starts(name: str, outcomes: Outcomes) -> None:
    assert outcomes[name] == ("", "")


@pytest.mark.parametrize("change", [{"architectures": ["x" * 100_000]}, {"architectures": ["a\nb\ud800"]}])
def test_the_refusal_is_one_line_of_bounded_length(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = copy_of_tiny(tmp_path / "model")
    config(**change)(folder)
    command = [sys.executable, "-O", INFERD, "serve", str(folder), "--port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (run.returncode, run.stderr.count("\n")) == (3, 1), run.stderr[-2_000:]
    assert run.stderr.startswith("inferd: ") and len(run.stderr) <= 1_000


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("name", UNREADABLE)
def test_weights_that_are_no_numbers_end_the_start(tmp_path: Path, name: str) -> None:
    folder = copy_of_tiny(tmp_path / "model")
    UNREADABLE[name].edit(folder)
    command = [INFERD, "serve", str(folder / UNREADABLE[name].file), "--port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 3, run.stderr[-2_000:]
    assert re.search(UNREADABLE[name].words, run.stderr.splitlines()[-1]), run.stderr[-2_000:]


def test_a_served_stranger_runs_no_code_and_no_id_leaves_the_embedding(
    tmp_path: Path, start: Callable[..., Daemon]
) -> None:
    """A text may contain a token whose id is outside of the vocabulary. The engine refuses the request and goes on."""
    folder = copy_of_tiny(tmp_path / "model")
    remote_tokenizer(folder)
    tokenizer(lambda value: value["model"]["vocab"].update({"Q": 2**32 - 2}))(folder)
    daemon = start(str(folder))
    pid = daemon.engine_pid

    def ask(**body: object) -> httpx.Response:
        return httpx.post(daemon.url + "/v1/completions", json={"max_tokens": 3, **body}, timeout=30)

    refused = ask(prompt="Q")
    assert refused.status_code == 400 and "4294967294" in refused.json()["error"]["message"], refused.text
    for fields in ({"bad_words": ["Q"]}, {"stop_token_ids": [2**32 - 2]}, {"logit_bias": {"3072": 1}}):
        assert ask(prompt="a", **fields).status_code == 400, fields
    assert ask(prompt="a").status_code == 200
    assert daemon.engine_pid == pid
    assert daemon.stop(signal.SIGTERM) == 0
    assert not (folder / CANARY).exists()


# -- config.json, field by field ---------------------------------------------------------------------------------------

OTHER_FIELDS: dict[str, Any] = {
    "rope_scaling": None, "quantization_config": None, "sliding_window": 4096, "layer_types": None, "rope_theta": 1e4,
    "attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 64,
    "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0,
    "no_rope_layers": None, "use_sliding_window": False, "max_window_layers": 2, "partial_rotary_factor": 1.0,
    "norm_epsilon": 1e-5, "use_bias": True, "sliding_window_pattern": 6, "no_rope_layer_interval": 4,
    "original_max_position_embeddings": 2048, "rope_local_base_freq": 1e4, "hidden_activation": "gelu_pytorch_tanh",
    "norm_type": "layer_norm",
}  # fmt: skip
"""Fields that model families read besides those of the embedded model."""

HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**40, 2**63, 10**400, -0.0, 1.5, float("nan"), float("inf"), -float("inf"),
    1e308, 1e-320, "", "x", "x" * 10_000, "\ud800", [], [None], [[]], ["full_attention"] * 4, ["x"] * 4, [10**400], {},
    {"x": 1}, {"rope_type": "yarn"}, {"rope_type": "llama3", "factor": 0}, {"type": None}, {"quant_method": []},
    {"rope_type": "longrope", "short_factor": [float("inf")] * 32, "long_factor": ["x"]}, {"quant_method": "fp8"},
    {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "sliding_attention": 7},
    {"quant_method": "compressed-tensors", "config_groups": {"x": 5}},
    {"quant_method": "compressed-tensors", "config_groups": [1]},
    {"quant_method": "fp8", "weight_block_size": [0, 0]},
)  # fmt: skip


@pytest.mark.parametrize("architecture", [*known_architectures(), EAGLE3_ARCHITECTURES[0]])
def test_no_value_of_any_field_of_a_config_breaks_its_reader(architecture: str) -> None:
    """A value is accepted or refused with an error of ours. No other exception is raised."""
    tiny = json.loads((EMBEDDED_PATH / "config.json").read_text())
    whole = {**tiny, **{name: value for name, value in OTHER_FIELDS.items() if value is not None}}
    num_refused = 0
    for name in (*tiny, *OTHER_FIELDS):
        for value in HOSTILE_VALUES:
            try:
                ModelFacts.of_config(Path("x"), {**whole, "architectures": [architecture], name: value})
            except ModelError:
                num_refused += 1
    assert num_refused > 300


def test_no_value_of_any_field_of_a_text_config_breaks_its_reader() -> None:
    tiny = json.loads((EMBEDDED_PATH / "config.json").read_text())
    whole = {"architectures": ["InternVLForConditionalGeneration"], "text_config": tiny}
    num_refused = 0
    for name in (*tiny, "rope_scaling", "quantization_config"):
        for value in (*HOSTILE_VALUES, {"a": [["x"] * 3] * 3}, {"quant_method": "fp8", "modules_to_not_convert": {}}):
            for part in ({**tiny, name: value}, value):
                try:
                    ModelFacts.of_config(Path("x"), {**whole, "text_config": part})
                except ModelError:
                    num_refused += 1
    assert num_refused > 300


def places(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every place in nested objects, by the keys that lead to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from places(inner, (*path, key))


@pytest.mark.parametrize("checkpoint", FORMATS, ids=lambda checkpoint: checkpoint.name)
def test_no_value_of_any_field_of_a_quantization_config_breaks_its_reader(checkpoint: Format) -> None:
    optional = {
        "modules_to_not_convert", "ignore", "dynamic", "extra_config", "modules_in_block_to_quantize", "lm_head",
        "block_name_to_quantize", "packing_format", "data_type", "checkpoint_format", "transform_config",
        "sparsity_config", "quantization", "pack_dtype", "exclude_modules", "w_bit", "q_group_size", "version",
    }  # fmt: skip
    whole = {**dict.fromkeys(optional), **checkpoint.quantization}
    num_refused = 0
    for place in places(whole):
        for value in (*HOSTILE_VALUES, [{}], {"re:(": {"bits": 8}}, {"+:.*": {"bits": 2**70}}, ["re:" + "(" * 400]):
            changed = json.loads(json.dumps(whole))
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            try:
                ModelFacts.of_config(Path("x"), {**config_json(checkpoint), "quantization_config": changed})
            except ModelError:
                num_refused += 1
    assert num_refused > 100
