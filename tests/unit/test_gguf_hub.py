"""GGUF files by their names: local ones, and those of a hub repository by a part of the name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import DryRunError

from inferd.engine.api.errors import ModelError
from inferd.engine.api.locate import locate
from inferd.server.config.settings import Settings

NAMES = (
    "README-Q8_0.md", "Model-Q4_K_M.gguf", "Model-Q4_K_S.gguf", "Model.Q8_0.gguf", "mmproj-Model-Q8_0.gguf",
    "BF16/Model-BF16-00001-of-00002.gguf", "BF16/Model-BF16-00002-of-00002.gguf", "old/Model-Q4_K_S.gguf",
)  # fmt: skip


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A hub with the files of `NAMES`; the list receives the patterns of each download."""
    patterns: list[list[str]] = []

    def snapshot(repo_id: str, **options: Any) -> Any:
        assert repo_id == "org/Model-GGUF" and options["revision"] == "v1"
        if options.get("dry_run"):
            return [SimpleNamespace(filename=name) for name in NAMES if name.endswith(".gguf")]
        patterns.append(options["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setattr("inferd.engine.api.hub.snapshot_download", snapshot)
    return patterns


@pytest.mark.parametrize("quant", ["Q8_0", "q8_0", "Q4_K_M"])
def test_the_one_file_with_the_quant_in_its_name_is_downloaded(
    quant: str, asked: list[list[str]], tmp_path: Path
) -> None:
    name = "Model-Q4_K_M.gguf" if quant == "Q4_K_M" else "Model.Q8_0.gguf"
    assert locate(f"org/Model-GGUF:{quant}", "v1") == tmp_path / name
    assert asked == [[name]]


def test_all_parts_of_a_split_file_are_downloaded(asked: list[list[str]], tmp_path: Path) -> None:
    assert locate("org/Model-GGUF:BF16", "v1") == tmp_path / "BF16/Model-BF16-00001-of-00002.gguf"
    assert asked == [["BF16/Model-BF16-00001-of-00002.gguf", "BF16/Model-BF16-00002-of-00002.gguf"]]


def test_an_unclear_or_absent_quant_is_refused_with_the_files(asked: list[list[str]]) -> None:
    with pytest.raises(ModelError, match=r"has 2 GGUF files with Q4_K_S .*: Model-Q4_K_S, old/Model-Q4_K_S$"):
        locate("org/Model-GGUF:Q4_K_S", "v1")
    with pytest.raises(ModelError, match=r"has no GGUF file with Q4_K as .*: BF16/Model-BF16, Model-Q4_K_M, "):
        locate("org/Model-GGUF:Q4_K", "v1")
    assert asked == []


def test_a_cached_file_is_found_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Model-Q8_0.gguf").touch()

    def snapshot(repo_id: str, **options: Any) -> Any:
        if options.get("dry_run"):
            raise DryRunError("no network")
        return str(tmp_path)

    monkeypatch.setattr("inferd.engine.api.hub.snapshot_download", snapshot)
    assert locate("org/Model-GGUF:Q8_0") == tmp_path / "Model-Q8_0.gguf"


def test_a_repository_of_gguf_files_asks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.engine.api.hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelError, match=r"has no config.json; one of its GGUF files is served as org/Model-GGUF:"):
        locate("org/Model-GGUF")


def test_local_files_are_found(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert locate(str(file)) == file
    link = tmp_path / "link.gguf"
    link.symlink_to("blob-without-an-ending")
    (tmp_path / "blob-without-an-ending").touch()
    assert locate(str(link)) == link, "the hub's cache links names to hashes"
    assert Settings.load({"model": str(link)}, None).served_names == ("link",)
    with pytest.raises(ModelError, match="no file"):
        locate(str(tmp_path / "other.gguf"))
