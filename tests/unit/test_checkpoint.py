"""Checkpoints are judged by their files alone: each broken one is refused before anything is loaded, with its fault
named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from inferd.engine.api.checkpoint import EMBEDDED_PATH, Checkpoint, read_header, read_json
from inferd.engine.api.errors import ModelError
from inferd.engine.api.locate import locate


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """Writes the format by hand, so that a broken file is as easy to make as a good one."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def checkpoint(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], **config: object) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(safetensors(tensors))
    return path


WEIGHT = {"w": ("F32", [2, 3], bytes(24))}


def test_a_checkpoint_is_its_config_and_its_headers(tmp_path: Path) -> None:
    read = Checkpoint.read(checkpoint(tmp_path, WEIGHT, model_type="llama"))
    assert read.config == {"model_type": "llama"}
    assert read.tensors["w"].shape == (2, 3)
    assert (read.num_bytes, read.dtype, read.is_embedded) == (24, "float32", False)


def test_the_config_states_the_dtype_before_the_weights_do(tmp_path: Path) -> None:
    assert Checkpoint.read(checkpoint(tmp_path, WEIGHT, dtype="bfloat16")).dtype == "bfloat16"
    assert Checkpoint.read(checkpoint(tmp_path, WEIGHT, torch_dtype="torch.float16")).dtype == "float16"
    assert Checkpoint.read(checkpoint(tmp_path, {"w": ("BF16", [2], bytes(4))})).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("file", "method"),
    [("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt")],
)
def test_an_older_file_may_describe_the_quantization(tmp_path: Path, file: str, method: str) -> None:
    """config.json wins, and so does a `quant_method` of the older file."""
    checkpoint(tmp_path, WEIGHT)
    (tmp_path / file).write_text(json.dumps({"bits": 4}))
    assert Checkpoint.read(tmp_path).config == {"quantization_config": {"quant_method": method, "bits": 4}}
    (tmp_path / file).write_text(json.dumps({"quant_method": "x"}))
    assert Checkpoint.read(tmp_path).config == {"quantization_config": {"quant_method": "x"}}
    checkpoint(tmp_path, WEIGHT, quantization_config={"quant_method": "fp8"})
    assert Checkpoint.read(tmp_path).config == {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / file).write_text("[")
    checkpoint(tmp_path, WEIGHT)
    with pytest.raises(ModelError, match=rf"{file} is not JSON"):
        Checkpoint.read(tmp_path)


def test_packed_words_say_nothing_of_the_dtype(tmp_path: Path) -> None:
    tensors = {"w": ("I32", [9], bytes(36)), "s": ("F16", [2], bytes(4))}
    assert Checkpoint.read(checkpoint(tmp_path, tensors)).dtype == "float16"


def test_shards_are_read_by_the_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors({name: ("I8", [4], bytes(4))}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    assert set(Checkpoint.read(tmp_path).tensors) == {"a", "b"}
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "c": "c.safetensors"}}))
    with pytest.raises(ModelError, match=r"missing: c\.safetensors"):
        Checkpoint.read(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ModelError, match="outside its directory"):
        Checkpoint.read(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors(WEIGHT))
    with pytest.raises(ModelError, match="w is in both"):
        Checkpoint.read(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 8, 20, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(safetensors(WEIGHT)[:kept])
    with pytest.raises(ModelError, match=r"truncated|not valid JSON"):
        read_header(file)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "8 bytes, but its data_offsets span 4"),
        ({"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}, "dtype F33"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}, "data_offsets span -4"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}, "ends at byte 16 of 8"),
        ({"dtype": "F32", "shape": "x", "data_offsets": [0, 8]}, "malformed"),
        ({"dtype": "F32", "shape": [2]}, "malformed"),
        (7, "malformed"),
        ({"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 8]}, "malformed"),
        ({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}, "malformed"),
        ({"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}, "malformed"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}, "malformed"),
        ({"dtype": "F32", "shape": [10**4000], "data_offsets": [0, 8]}, "malformed"),
        ({"dtype": "F32", "shape": [1] * 65 + [2], "data_offsets": [0, 8]}, "malformed"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, entry: object, words: str) -> None:
    text = json.dumps({"w": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ModelError, match=words):
        read_header(file)


def test_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
        Checkpoint.read(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_json(file)


def test_only_regular_files_are_weights(tmp_path: Path) -> None:
    """Reading a pipe would wait without end."""
    checkpoint(tmp_path, WEIGHT)
    os.mkfifo(tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    assert set(Checkpoint.read(tmp_path).tensors) == {"w"}
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ModelError, match="no safetensors weights"):
        Checkpoint.read(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"cannot read .*config\.json: it must be a regular file"):
        Checkpoint.read(tmp_path)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    """The file is a directory, because root can read every file."""
    with pytest.raises(ModelError, match=r"cannot read .*: it must be a regular file"):
        read_header(tmp_path)


def test_more_layers_than_tensors_are_refused_unbuilt(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="num_hidden_layers 1000000000, but there are 1 tensors"):
        Checkpoint.read(checkpoint(tmp_path, WEIGHT, num_hidden_layers=10**9))
    assert Checkpoint.read(checkpoint(tmp_path, WEIGHT, num_hidden_layers=1)).tensors


def test_locating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate("tiny") == EMBEDDED_PATH
    assert locate(str(tmp_path)) == tmp_path.resolve()
    with pytest.raises(ModelError, match="no directory"):
        locate(str(tmp_path / "nothing"))
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ModelError, match="is a file"):
        locate(str(file))
    with pytest.raises(ModelError, match=r"nor a hub id .*name of their own are `tiny` and `smollm2`"):
        locate("tinny")
    for name in ("mistral/config.json", "here/model.gguf", "model.safetensors", "./config.json"):
        with pytest.raises(ModelError, match=f"no file {name}; give a directory, a hub id"):
            locate(name)
    with pytest.raises(ModelError, match=r"no directory ./nothing; give another"):
        locate("./nothing")
    with pytest.raises(ModelError, match="give the whole path"):
        locate("~no-such-user-here/x")
    with pytest.raises(ModelError, match="cannot look at"):
        locate("x" * 10_000)


def test_offline_the_hub_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="not in the local cache and HF_HUB_OFFLINE is set: unset it"):
        locate("organisation/never-downloaded")


def test_a_hub_out_of_reach_is_not_called_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(repo_id: str, **options: object) -> str:
        raise LocalEntryNotFoundError("x")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("inferd.engine.api.hub.snapshot_download", unreachable)
    with pytest.raises(ModelError, match="the hub cannot be reached: download it on") as caught:
        locate("organisation/never-downloaded")
    assert "HF_HUB_OFFLINE" not in str(caught.value)
