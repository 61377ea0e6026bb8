"""SHA-256 of weight files: that of the file, once for each state of it, and none of a file that was written to."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from inferd.engine.api.held_files import HeldFiles
from inferd.server.lifecycle import weights_digest as module
from inferd.server.lifecycle.weights_digest import WeightsDigest

NAME = "model.safetensors"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(module, "_REST", 0.0)


def weights(folder: Path, content: bytes) -> HeldFiles:
    (folder / NAME).write_bytes(content)
    (folder / "config.json").write_text("{}")
    held = HeldFiles([folder / NAME, folder / "config.json"])
    held.pin()
    return held


def known(held: HeldFiles, cache: Path) -> dict[str, str]:
    digest = WeightsDigest(cache)
    asyncio.run(digest.run(held.pinned))
    return digest.known


def test_it_is_that_of_the_file_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(4567)
    held = weights(tmp_path, content)
    expected = {NAME: hashlib.sha256(content).hexdigest()}
    assert known(held, tmp_path / "cache") == expected
    monkeypatch.setattr(module, "_read", lambda path, begin: pytest.fail("it is known"))
    assert known(held, tmp_path / "cache") == expected


def test_a_file_that_has_the_name_by_now_is_not_read(tmp_path: Path) -> None:
    content = os.urandom(3000)
    held = weights(tmp_path, content)
    (tmp_path / "other").write_bytes(bytes(3000))
    (tmp_path / "other").replace(tmp_path / NAME)
    assert known(held, tmp_path / "cache") == {NAME: hashlib.sha256(content).hexdigest()}


def test_a_file_that_was_written_to_has_none(tmp_path: Path) -> None:
    held = weights(tmp_path, os.urandom(3000))
    with (tmp_path / NAME).open("r+b") as file:
        file.write(b"other")
    assert known(held, tmp_path / "cache") == {}
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_is_damaged_or_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    content = os.urandom(3000)
    held = weights(tmp_path, content)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "weights.json").write_text("{")
    (tmp_path / "file").write_text("")
    for cache in (tmp_path / "damaged", tmp_path / "file"):
        assert known(held, cache) == {NAME: hashlib.sha256(content).hexdigest()}
