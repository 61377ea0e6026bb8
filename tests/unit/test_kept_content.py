"""Content that is kept from start to start: it is made once for what it is made from, and never served damaged."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality.gguf_blocks import as_bf16
from benchmarks.quality.gguf_files import content_of, write
from inferd.engine.api import gguf, kept_content
from inferd.engine.api.checkpoint import EMBEDDED_PATH
from inferd.engine.grammar import reading
from inferd.engine.grammar.reading import tables_of
from inferd.server.text.model import ServedModel

MAKERS = (kept_content.__name__,)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_content, "_MIN_BYTES", 1)
    kept_content._tell_once.cache_clear()
    kept_content._source_of.cache_clear()
    yield tmp_path / "inferd" / "tokenizers"
    kept_content._source_of.cache_clear()


class Maker:
    """Makes some content, and counts how often."""

    def __init__(self, content: bytes) -> None:
        self.content, self.num_calls = content, 0

    def __call__(self) -> bytes:
        self.num_calls += 1
        return self.content


def kept(make: Callable[[], bytes], *made_from: bytes) -> bytes:
    return kept_content.kept_content(made_from, MAKERS, make)


def test_content_is_made_once_and_private(folder: Path) -> None:
    make = Maker(b"content")
    assert [kept(make, b"a", b"b") for _ in range(3)] == [b"content"] * 3
    assert make.num_calls == 1
    (entry,) = folder.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, entry)] == [0o700, 0o600]


def test_other_sources_have_other_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(Maker(b"1"), b"a", b"bc") == b"1"
    assert kept(Maker(b"2"), b"ab", b"c") == b"2"
    monkeypatch.setattr(kept_content, "version", lambda _: "another version")
    assert kept(Maker(b"3"), b"a", b"bc") == b"3"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "module.py").write_text("another way to make it")
    monkeypatch.setattr(kept_content, "__file__", str(tmp_path / "module.py"))
    kept_content._source_of.cache_clear()
    assert kept(Maker(b"4"), b"a", b"bc") == b"4"


@pytest.mark.parametrize("place", [0, 31, 32, -1])
def test_a_damaged_entry_is_made_anew(folder: Path, caplog: pytest.LogCaptureFixture, place: int) -> None:
    kept(Maker(b"content"), b"a")
    (entry,) = folder.iterdir()
    damaged = bytearray(entry.read_bytes())
    damaged[place] ^= 1
    entry.write_bytes(damaged)
    again = Maker(b"content")
    assert kept(again, b"a") == b"content"
    assert again.num_calls == 1
    assert "is damaged" in caplog.text
    assert kept(Maker(b"not asked"), b"a") == b"content"


@pytest.mark.parametrize("size", [0, 10, 38])
def test_an_entry_that_was_cut_is_made_anew(folder: Path, size: int) -> None:
    kept(Maker(b"content"), b"a")
    (entry,) = folder.iterdir()
    os.truncate(entry, size)
    assert kept(Maker(b"anew"), b"a") == b"anew"


def test_an_entry_under_the_name_of_another_is_not_served(folder: Path) -> None:
    kept(Maker(b"a's"), b"a")
    (first,) = folder.iterdir()
    kept(Maker(b"b's"), b"b")
    (second,) = set(folder.iterdir()) - {first}
    second.write_bytes(first.read_bytes())
    assert kept(Maker(b"b's"), b"b") == b"b's"


def test_servers_that_start_together_keep_one_entry(folder: Path) -> None:
    content, together = os.urandom(10**6), threading.Barrier(4)

    def start(_: int) -> bytes:
        together.wait()
        return kept(lambda: content, b"a")

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(start, range(4))) == [content] * 4
    assert len(list(folder.iterdir())) == 1
    assert kept(Maker(b"not asked"), b"a") == content


def test_a_folder_that_cannot_be_written_is_told_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.parent.mkdir()
    folder.write_text("a file in its place")
    make = Maker(b"content")
    assert [kept(make, name) for name in (b"a", b"a", b"another model")] == [b"content"] * 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"nothing is kept in {folder}, so that each start makes the tokenizer anew: ")


def test_a_disk_that_is_full_leaves_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(kept_content.os, "replace", fail)
    assert kept(Maker(b"content"), b"a") == b"content"
    assert list(folder.iterdir()) == []
    assert "no space left" in caplog.text


def test_a_folder_that_others_may_write_to_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept(Maker(b"theirs"), b"a")
    folder.chmod(0o777)
    assert kept(Maker(b"ours"), b"a") == b"ours"
    assert "chmod 700" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="to give a folder to another user takes root")
@pytest.mark.skipif(os.geteuid() != 0, reason="to give a folder away takes root")
@pytest.mark.usefixtures("folder")
def test_a_folder_that_another_user_may_exchange_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is below a directory for all, such as /tmp, in a folder that another user has made first."""
    shared = tmp_path / "tmp"
    theirs = shared / "inferd-1000"
    theirs.mkdir(parents=True)
    shared.chmod(0o1777)
    os.chown(theirs, 12345, -1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(theirs))
    maker = Maker(b"ours")
    assert [kept(maker, b"a"), kept(maker, b"a")] == [b"ours", b"ours"]
    assert not [path for path in theirs.rglob("*") if path.is_file()]
    assert f"{theirs} belongs to another user" in caplog.text


def test_what_was_not_used_for_longest_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_content, "_MAX_BYTES", 3 * 1032)
    for index, name in enumerate((b"a", b"b", b"c")):
        kept(Maker(bytes(1000)), name)
        for entry in folder.iterdir():
            os.utime(entry, (entry.stat().st_mtime - 1000,) * 2)
        assert len(list(folder.iterdir())) == index + 1
    kept(Maker(b"not asked"), b"a")
    kept(Maker(bytes(1000)), b"d")
    assert len(list(folder.iterdir())) == 3
    assert len(kept(Maker(b""), b"a")) == 1000, "it was used after b"
    assert kept(Maker(b"anew"), b"b") == b"anew"


def test_short_content_and_content_beyond_the_bound_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_content, "_MIN_BYTES", 3)
    monkeypatch.setattr(kept_content, "_MAX_BYTES", 10)
    for content in (b"12", b"123456"):
        assert kept(Maker(content), content) == content
    assert not folder.exists()


def never(*_: object) -> Any:
    pytest.fail("it is kept")


def refuse_tokens(text: bytes, what: str) -> str:
    assert what not in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"), "a token is decoded"
    return text.decode()


def test_the_second_start_makes_no_tokenizer(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata, tensors = content_of(EMBEDDED_PATH, lambda _: as_bf16)
    file, other = (write(tmp_path / f"{name}.gguf", metadata, tensors) for name in ("tiny", "other"))

    def load(path: Path) -> tuple[ServedModel, bytes]:
        model = ServedModel.load(path, ("m",), max_model_len=2048, vocab_size=3072)
        return model, bytes(reading._read(path, 3072))

    first, block = load(file)
    assert len(list(folder.iterdir())) == 2
    for name in ("tokenizer_of", "tokenizer_config_of", "generation_config_of"):
        monkeypatch.setattr(gguf.tokenizer, name, never)
    monkeypatch.setattr("inferd.engine.arch.gguf.header._decoded", refuse_tokens)
    monkeypatch.setattr(reading, "_made", never)
    for path in (file, other):  # the name says nothing
        again, same = load(path)
        assert same == block
        text = "Hello world, it's 12345 o'clock!<|im_end|>"
        assert again.tokenizer.encode(text, True) == first.tokenizer.encode(text, True)
        assert (again.eos_token_ids, again.defaults) == (first.eos_token_ids, first.defaults)
        assert again.tokenizer_info == first.tokenizer_info
    monkeypatch.undo()
    changed = write(tmp_path / "tiny.gguf", {**metadata, "tokenizer.ggml.add_eos_token": True}, tensors)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load(changed)[0].tokenizer.encode("Hello", True)[-1] in first.eos_token_ids
    assert tables_of(changed, 3080).facts.num_rows == 3080, "not those of another size"
