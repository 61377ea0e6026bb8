"""The files that a server opened at its start stay its files: others that take their names change nothing, and a file
that is written to is refused by its name."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.quality.gguf_files import convert, convert_in_parts
from inferd.engine.api.checkpoint import EMBEDDED_PATH, Checkpoint
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch.registry import weights
from tests.cpu.adapters import write_adapter
from tests.e2e.conftest import Daemon, free_model
from tests.reliability.asking import Answer, Ask, Asker, asked_under
from tests.reliability.conftest import HTTP, WITHOUT_CACHE, count, engines, restarts, wait_until

NUM_TOKENS = 900


def copy_of_tiny(folder: Path, *, is_changed: bool = False) -> Path:
    """The embedded model as a folder, with other weights if it is changed."""
    shutil.copytree(EMBEDDED_PATH, folder)
    if is_changed:
        found = load_file(folder / "model.safetensors")
        noise = torch.Generator().manual_seed(1)
        changed = {name: each + 0.05 * torch.randn(each.shape, generator=noise) for name, each in found.items()}
        save_file(changed, folder / "model.safetensors")
    return folder


def adapter(folder: Path, seed: int) -> Path:
    arch = ModelFacts.of(Checkpoint.read(EMBEDDED_PATH)).arch
    modules = [module for own in weights(arch).modules().values() for module in own]
    shapes = {module.name: (module.out_size, module.in_size) for module in modules}
    write_adapter(folder, shapes, seed=seed, rank=4, strength=0.5)
    return folder


def replace_all(old: Path, new: Path) -> None:
    """Give every file of `old` the content of its counterpart in `new`, by renaming a copy over it."""
    for file in new.iterdir():
        copy = shutil.copy(file, old / f"{file.name}.new")
        os.replace(copy, old / file.name)


def asks(*models: str, seeds: int = 2, max_tokens: int = NUM_TOKENS) -> list[Ask]:
    common = {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True, "stream": True,
              "return_token_ids": True, "logprobs": 2}  # fmt: skip
    return [
        Ask("/v1/completions", {**common, "model": model, "seed": seed}) for model in models for seed in range(seeds)
    ]


def said(answers: list[Answer]) -> list[tuple[object, ...]]:
    return [answer.said for answer in answers]


def fingerprint(daemon: Daemon, model: str = "m") -> str:
    body = {"model": model, "prompt": "Once", "max_tokens": 1}
    answer = HTTP.post(daemon.url + "/v1/completions", json=body).json()
    assert answer.get("system_fingerprint"), answer
    return str(answer["system_fingerprint"])


def kill_while_streams_run(daemon: Daemon, before: Callable[[], None]) -> None:
    """Call `before` and kill the engine, once some tokens were delivered."""
    goal = count(daemon, "inferd_generation_tokens_total") + 40
    wait_until(lambda: count(daemon, "inferd_generation_tokens_total") >= goal)
    before()
    os.kill(daemon.engine_pid, signal.SIGKILL)


def check_unmoved(daemon: Daemon, asked: list[Ask], before: Callable[[], None]) -> None:
    """Kill an engine under streams after `before`. All answers and the fingerprint stay as they were."""
    asker, print_before = Asker(daemon.url), fingerprint(daemon)
    expected, num_restarts = said(asker.ask(asked)), restarts(daemon)
    assert all(answer[0] == 200 and answer[3] is None for answer in expected), expected
    answers = asked_under(lambda: kill_while_streams_run(daemon, before), asker, asked)
    assert said(answers) == expected
    wait_until(lambda: restarts(daemon) > num_restarts, what=daemon.output)
    assert count(daemon, "inferd_requests_replayed_total") > 0, "the kill came under streams"
    assert said(asker.ask(asked)) == expected, "the next engine too"
    assert fingerprint(daemon) == print_before


@pytest.mark.sampled(keep=4, among="recoveries")
def test_a_replaced_model_and_adapter_change_nothing(start: Callable[..., Daemon], tmp_path: Path) -> None:
    """Both are read again by the next engine: also the tokenizer, which its grammars are compiled for."""
    model, other = copy_of_tiny(tmp_path / "model"), copy_of_tiny(tmp_path / "other", is_changed=True)
    (other / "tokenizer.json").write_text("{}")
    (other / "config.json").write_text("{}")
    lora, other_lora = adapter(tmp_path / "lora", 1), adapter(tmp_path / "other_lora", 2)
    daemon = start(str(model), "--served-model-name", "m", "--lora", f"a={lora}", WITHOUT_CACHE)

    def replace() -> None:
        replace_all(model, other)
        replace_all(lora, other_lora)

    check_unmoved(daemon, asks("m", "a"), replace)
    os.rename(model, tmp_path / "moved")
    shutil.rmtree(lora)
    check_unmoved(daemon, asks("m", "a"), lambda: None)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "response_format": schema}
    answer = HTTP.post(daemon.url + "/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] in ("true", "false"), "its grammar was compiled from the old file"


@pytest.mark.sampled(keep=4, among="recoveries")
@pytest.mark.parametrize("kind", ["replicas", "standby", "gguf", "split", "ranks", "draft", "late adapter"])
def test_a_replaced_file_changes_nothing(start: Callable[..., Daemon], tmp_path: Path, kind: str) -> None:
    model, other = copy_of_tiny(tmp_path / "model"), copy_of_tiny(tmp_path / "other", is_changed=True)
    flags, served, names = [], model, ["m"]
    if kind in ("gguf", "split"):
        for folder in (model, other):
            make = convert_in_parts(folder, "x", 2)[0] if kind == "split" else convert(folder, folder / "x.gguf")
            served = model / make.name
            (folder / "model.safetensors").unlink()
    if kind == "replicas":
        flags = ["--replicas", "2"]
    if kind == "standby":
        flags = ["--standby"]
    if kind == "ranks":
        flags = ["--tensor-parallel-size", "2", "--num-threads", "2"]
    if kind == "draft":
        flags = ["--speculative", str(copy_of_tiny(tmp_path / "draft"))]
    lora = adapter(tmp_path / "lora", 1)
    if kind == "late adapter":
        flags, names = ["--max-loras", "1", "--admin-key", "k"], ["m", "a"]
    daemon = start(str(served), "--served-model-name", "m", WITHOUT_CACHE, *flags)
    if kind == "late adapter":
        fields = {"lora_name": "a", "lora_path": str(lora)}
        done = httpx.post(f"{daemon.url}/v1/load_lora_adapter", json=fields, headers={"Authorization": "Bearer k"})
        assert done.status_code == 200, done.text
    if kind == "standby":
        wait_until(lambda: count(daemon, "inferd_standby_ready") == 1)

    def replace() -> None:
        replace_all(model, other)
        shutil.rmtree(lora)
        if kind == "draft":
            replace_all(tmp_path / "draft", other)

    check_unmoved(daemon, asks(*names), replace)
    if kind == "replicas":
        wait_until(lambda: [each["status"] for each in daemon.get("/state").json()["replicas"]] == 2 * ["up"])
        answers = Asker(daemon.url).ask(asks("m", seeds=1, max_tokens=12) * 48)
        assert len(set(map(repr, said(answers)))) == 1, "both replicas have the same weights"


@pytest.mark.sampled(keep=4, among="recoveries")
@pytest.mark.parametrize("by", ["idle", "route"])
def test_a_model_that_is_loaded_again_is_the_same(start: Callable[..., Daemon], tmp_path: Path, by: str) -> None:
    model, other = copy_of_tiny(tmp_path / "model"), copy_of_tiny(tmp_path / "other", is_changed=True)
    flags = ["--idle-unload", "1s"] if by == "idle" else ["--admin-key", "k"]
    daemon = start(str(model), "--served-model-name", "m", *flags)
    asker, asked = Asker(daemon.url), asks("m", max_tokens=50)
    expected, print_before = said(asker.ask(asked)), fingerprint(daemon)
    replace_all(model, other)
    if by == "route":
        unload = httpx.post(f"{daemon.url}/v1/models/m/unload", headers={"Authorization": "Bearer k"}, timeout=60)
        assert unload.status_code == 200
    wait_until(lambda: not engines(daemon), what=daemon.output)
    assert said(asker.ask(asked)) == expected
    assert fingerprint(daemon) == print_before


def flipped(file: Path) -> None:
    """Change one bit of a file in place."""
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last[0] ^ 1]))


def refused_by_name(daemon: Daemon, name: str) -> None:
    """The server lives, is not ready, and says which file it was."""
    state = daemon.get("/state").json()
    assert state["status"] == "failed" and state["error"].startswith(f"{name} was written to"), state
    assert daemon.get("/ready").status_code == 503 and daemon.get("/live").status_code == 200
    assert count(daemon, "inferd_replica_up") == 0
    body = {"model": "m", "prompt": "Once", "max_tokens": 1}
    answer = HTTP.post(daemon.url + "/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_loaded")
    assert name in answer.json()["error"]["message"] and str(Path.cwd().anchor + "tmp") not in answer.text
    assert daemon.process.poll() is None


def cut(file: Path) -> None:
    os.truncate(file, 1000)


@pytest.mark.parametrize(
    ("name", "change"), [("model.safetensors", flipped), ("model.safetensors", cut), ("config.json", flipped)]
)
@pytest.mark.sampled(keep=1)
def test_a_file_that_is_written_to_is_refused_by_its_name(
    start: Callable[..., Daemon], tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    """Before an engine of which the model only sleeps. Its process reads the same files."""
    model = copy_of_tiny(tmp_path / "model")
    daemon = start(str(model), "--served-model-name", "m", "--admin-key", "k", program=free_model(5.0))
    asked = [*asks("m"), Ask("/v1/completions", {"model": "m", "prompt": "Once", "max_tokens": 400})]
    answers = asked_under(
        lambda: kill_while_streams_run(daemon, lambda: change(model / name)), Asker(daemon.url), asked
    )
    for answer in answers:
        assert answer.error is not None and answer.error["code"] == "model_not_loaded", answer
        assert f"{name} was written to" in answer.error["message"]
    assert [answer.status for answer in answers] == [200, 200, 503]
    refused_by_name(daemon, name)
    assert daemon.output.count("starting another engine") == 1, "it is not tried again and again"
    again = httpx.post(f"{daemon.url}/v1/models/m/load", headers={"Authorization": "Bearer k"}, timeout=60)
    assert again.status_code == 503 and name in again.json()["error"]["message"]
    refused_by_name(daemon, name)
    assert daemon.stop() == 0


@pytest.mark.long
def test_the_other_replica_goes_on_if_a_file_is_written_to(start: Callable[..., Daemon], tmp_path: Path) -> None:
    model = copy_of_tiny(tmp_path / "model")
    daemon = start(str(model), "--served-model-name", "m", "--replicas", "2", program=free_model(5.0))
    asker, asked = Asker(daemon.url), asks("m")
    expected = said(asker.ask(asked))
    change = lambda: flipped(model / "model.safetensors")  # noqa: E731
    assert said(asked_under(lambda: kill_while_streams_run(daemon, change), asker, asked)) == expected

    def reasons() -> list[str]:
        return [each["reason"] or "" for each in daemon.get("/state").json()["replicas"]]

    wait_until(lambda: any(map(bool, reasons())), what=daemon.output)
    assert any(reason.startswith("model.safetensors was written to") for reason in reasons())
    assert daemon.get("/ready").status_code == 200 and said(asker.ask(asked)) == expected


@pytest.mark.long
def test_weights_are_not_read_while_requests_are_served(start: Callable[..., Daemon], tmp_path: Path) -> None:
    """A file that is cut short under a running engine ends none: all weights were copied. The next one is refused."""
    model = copy_of_tiny(tmp_path / "model")
    lora = adapter(tmp_path / "lora", 1)
    daemon = start(str(model), "--served-model-name", "m", "--lora", f"a={lora}", WITHOUT_CACHE)
    asker, asked = Asker(daemon.url), asks("m", "a")
    expected = said(asker.ask(asked))
    os.truncate(model / "model.safetensors", 0)
    os.truncate(lora / "adapter_model.safetensors", 0)
    assert said(asker.ask(asked)) == expected and restarts(daemon) == 0
    os.kill(daemon.engine_pid, signal.SIGKILL)
    wait_until(lambda: daemon.get("/state").json()["status"] == "failed", what=daemon.output)
    refused_by_name(daemon, "model.safetensors")


@pytest.mark.long
def test_an_adapter_that_is_written_to_fails_alone(start: Callable[..., Daemon], tmp_path: Path) -> None:
    lora = adapter(tmp_path / "lora", 1)
    daemon = start(str(EMBEDDED_PATH), "--served-model-name", "m", "--lora", f"a={lora}", WITHOUT_CACHE)
    asker, asked = Asker(daemon.url), asks("m", "a", seeds=1)
    expected = said(asker.ask(asked))
    change = lambda: flipped(lora / "adapter_model.safetensors")  # noqa: E731
    model_answer, adapter_answer = asked_under(lambda: kill_while_streams_run(daemon, change), asker, asked)
    assert model_answer.said == expected[0]
    assert adapter_answer.error is not None and adapter_answer.error["code"] == "engine_error"
    assert "has changed since it was loaded: unload it, and load it again" in adapter_answer.error["message"]
    assert daemon.get("/ready").status_code == 200
