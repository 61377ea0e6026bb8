"""What cannot start says so at once: one line with the value and the rule, a non-zero code, before weights are read."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from inferd.engine.api.checkpoint import EMBEDDED_PATH

from .conftest import INFERD

Broken = tuple[list[str], int, str]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED_PATH, tmp_path / "model"))


def refused(*arguments: str) -> tuple[int, str]:
    """(exit code, the line) of a start that must fail; the timeout leaves a slow machine room."""
    run = subprocess.run([INFERD, "serve", *arguments], capture_output=True, text=True, timeout=20, check=False)
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1, run.stderr
    assert "Traceback" not in run.stderr
    assert "READY" not in run.stdout
    return run.returncode, lines[0]


def edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, line = refused("--port", str(port))
    assert code == 2
    assert f"127.0.0.1:{port}" in line and "--port" in line


def test_no_such_model() -> None:
    code, line = refused("./nowhere", "--port", "0")
    assert code == 3 and "nowhere" in line


def test_missing_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    code, line = refused(str(copy), "--port", "0")
    assert code == 3 and "no safetensors" in line


def test_truncated_weights(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    code, line = refused(str(copy), "--port", "0")
    assert code == 3 and "truncated" in line


def test_a_config_that_contradicts_its_weights(copy: Path) -> None:
    hidden = json.loads((copy / "config.json").read_text())["intermediate_size"]
    edit_config(copy, intermediate_size=hidden + 8)
    code, line = refused(str(copy), "--port", "0")
    assert code == 3 and str(hidden) in line and str(hidden + 8) in line


def test_an_unknown_architecture(copy: Path) -> None:
    edit_config(copy, architectures=["MambaForCausalLM"])
    code, line = refused(str(copy), "--port", "0")
    assert code == 3 and "MambaForCausalLM" in line and "LlamaForCausalLM" in line


def test_a_missing_tokenizer(copy: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (copy / file).unlink()
    code, line = refused(str(copy), "--port", "0")
    assert code == 3 and "tokenizer" in line


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--max-model-len", "99999999"], 2, "at most"),
        (["--max-model-len", "1024", "--kv-memory", "1MiB"], 4, "would fit"),
        (["--host", "0.0.0.0"], 2, "--api-key"),
        (["--dtype", "int3"], 2, "float32, bfloat16, float16"),
        (["--port", "70000"], 2, "65535"),
    ],
)
def test_settings_that_cannot_be_honoured(arguments: list[str], code: int, words: str) -> None:
    got, line = refused("--port", "0", *arguments)
    assert (got, words in line) == (code, True), line
