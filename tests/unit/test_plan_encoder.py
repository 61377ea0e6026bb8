"""Tests `inferd plan` of encoders: from config.json alone, as tables and as JSON, alone and beside a chat model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferd.engine.api.errors import CapacityError, ModelError
from inferd.engine.api.machine.cpu import Machine
from inferd.server.commands import plan_table
from inferd.server.config.settings import Settings
from tests.unit.test_encoder_config import EMBEDDING_GEMMA, GIB, MINILM


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Machine(num_cpus=2, memory_total_bytes=8 * GIB, memory_available_bytes=8 * GIB)
    monkeypatch.setattr(Machine, "detect", lambda: found)


@pytest.fixture
def config(tmp_path: Path) -> str:
    classifier = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}}
    (tmp_path / "config.json").write_text(json.dumps(MINILM | classifier))
    return str(tmp_path / "config.json")


def planned(capsys: pytest.CaptureFixture[str], *, as_json: bool = True, **settings: Any) -> str:
    assert plan_table.run(Settings(**settings), 1, None, "10-20", as_json=as_json) == 0
    return capsys.readouterr().out


def test_the_plan_is_what_serve_would_take(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(planned(capsys, model=config))
    assert (found["is_encoder"], found["num_labels"], found["max_model_len"]) == (True, 2, 512)
    assert found["total_bytes"] == found["serve"]["total_bytes"] > found["weights_bytes"] > 4 * 22_000_000
    assert sum(part["bytes"] for part in found["weights"]) == found["weights_bytes"]
    assert found["text_flops"]["128"] == pytest.approx(2.87e9, rel=0.01)
    sizes = {row["name"]: row["weights_bytes"] for row in found["formats"]}
    assert sizes["int4"] < sizes["int8"] < sizes["float32"] == 2 * sizes["bfloat16"]
    int8 = json.loads(planned(capsys, model=config, quantization="int8"))
    assert int8["weights_bytes"] == sizes["int8"]


def test_the_tables_say_that_it_is_an_encoder(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(planned(capsys, model=config, as_json=False).split())
    assert "an encoder of" in shown and "a classifier with 2 labels" in shown and "no KV cache" in shown
    assert "2.87 GFLOP for 128" in shown and "With these settings inferd serve takes" in shown


def test_an_encoder_beside_a_chat_model(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(planned(capsys, models=({"model": "tiny"}, {"model": config, "served_model_name": ("m",)})))
    assert found["together"]["m"]["kv_share_bytes"] >= 0
    assert [model["serve"]["kv_tokens"] > 0 for model in found["models"]] == [True, False]


def test_it_is_refused_as_serve_refuses_it(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="native code alone"):
        plan_table.run(Settings(model=config, model_impl="transformers"), 1, None, "10-20", as_json=True)
    small = Machine(num_cpus=2, memory_total_bytes=GIB, memory_available_bytes=GIB // 4)
    monkeypatch.setattr(Machine, "detect", lambda: small)
    with pytest.raises(CapacityError, match="--quantization int8"):
        plan_table.run(Settings(model=config), 1, None, "10-20", as_json=True)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_decoder_whose_tokens_see_those_behind_them(
    as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EMBEDDING_GEMMA))
    found = planned(capsys, model=str(tmp_path / "config.json"), as_json=as_json)
    assert ("302863104" if as_json else "302,863,104") in found.replace("\n", "")
