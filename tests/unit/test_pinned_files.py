"""Files that a server holds open: what is read in their place, which changes are seen, and what the digest covers."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs
from torch import nn

from inferd.engine.api import held_files, pinned_files
from inferd.engine.api.checkpoint import EMBEDDED_PATH, Checkpoint, Documents
from inferd.engine.api.errors import ChangedError, ModelError, StartError
from inferd.engine.api.held_files import HeldCheckpoint, HeldFiles
from inferd.engine.api.numerics import Numerics, check_numerics
from inferd.engine.api.pinned_files import (
    PAGE_BYTES,
    adapter_pinned,
    check_pinned,
    digest_of_all,
    read_pinned,
    source_of,
)
from inferd.engine.api.sentence_folder import SentenceFolder
from inferd.engine.api.wire.messages import LoadAdapter
from inferd.engine.api.wire.params import Adapter
from inferd.engine.models.pooled_heads import PooledHeads
from inferd.engine.worker.adapter_loader import AdapterLoader
from inferd.server.config.settings import Settings
from inferd.server.endpoints.chunks import fingerprint
from inferd.server.lifecycle.models import opened_anew, read_models
from tests.cpu.sentence_modules import write_modules

LARGE_BYTES = 40 * PAGE_BYTES


@pytest.fixture(autouse=True)
def _process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget afterwards what this process was made to read."""
    monkeypatch.setattr(pinned_files, "_sources", {})
    yield
    for source in pinned_files._sources.values():
        os.close(int(source.name))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED_PATH, tmp_path / "model"))


def hold(model: Path) -> tuple[HeldCheckpoint, str]:
    """(the held files, a digest of them all)."""
    held = HeldCheckpoint(model)
    held.pin(Checkpoint.read(model))
    return held, held.texts_digest + digest_of_all(held.pinned)


def large(path: Path, monkeypatch: pytest.MonkeyPatch) -> HeldFiles:
    """A held file of which the digest covers the first page and the pages in the middle of two tensors."""
    monkeypatch.setattr(held_files, "_MAX_COVERED_BYTES", 0)
    path.write_bytes(os.urandom(LARGE_BYTES))
    held = HeldFiles([path])
    held.pin({path: [(PAGE_BYTES, 2 * PAGE_BYTES), (10 * PAGE_BYTES, 20 * PAGE_BYTES)]})
    return held


def write_at(path: Path, at: int, *, keeps_time: bool = False) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        found = file.read(1)
        file.seek(at)
        file.write(bytes([found[0] ^ 1]))
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_pinned_files_are_read_after_others_have_their_names(model: Path, tmp_path: Path) -> None:
    before, texts = Checkpoint.read(model), Documents(model)("tokenizer.json")
    held, _ = hold(model)
    for file in model.iterdir():
        (tmp_path / "new").write_text("{}")
        os.replace(tmp_path / "new", file)
    (model / "quantize_config.json").write_text('{"bits": 4}')
    assert Documents(model)("tokenizer.json") == {}, "the server reads by names"
    read_pinned(held.pinned)
    assert Checkpoint.read(model) == before and Documents(model)("tokenizer.json") == texts
    assert Documents(model)("quantize_config.json") is None, "a file that came later is none of them"
    shutil.rmtree(model)
    assert Checkpoint.read(model) == before
    check_pinned(held.pinned)


def test_a_folder_of_sentence_transformers_stays_as_it_was(model: Path) -> None:
    layer = nn.Sequential(nn.Linear(64, 3), nn.Tanh())
    write_modules(model, ["cls", layer], prompts={"query": "Find: "})
    before = SentenceFolder.read(model)
    assert before is not None and before.heads
    _, digest = hold(model)
    write_at(model / "2_Dense" / "model.safetensors", -1 + (model / "2_Dense" / "model.safetensors").stat().st_size)
    held, changed = hold(model)
    assert changed != digest
    shutil.rmtree(model)
    assert SentenceFolder.read(model) is None
    read_pinned(held.pinned)
    assert SentenceFolder.read(model) == before
    assert PooledHeads.of(model, before, 64, "cpu").num_outputs == 3


def test_another_process_reads_them_through_this_one(model: Path) -> None:
    held, _ = hold(model)
    shutil.rmtree(model)
    program = (
        "import sys; from pathlib import Path; from inferd.engine.api import pinned_files as p, checkpoint as c; "
        "p.read_pinned(p.of_bytes(sys.stdin.buffer.read())); print(len(c.Checkpoint.read(Path(sys.argv[1])).tensors))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(model)],
        input=pinned_files.to_bytes(held.pinned),
        capture_output=True,
        check=True,
    )
    assert int(done.stdout) == len(Checkpoint.read(EMBEDDED_PATH).tensors)


def test_a_system_that_lends_no_descriptors_gets_the_same_file_by_its_name(model: Path) -> None:
    held, _ = hold(model)
    refused = [structs.replace(file, opened="/proc/1/fd/none") for file in held.pinned]
    read_pinned(refused)
    assert source_of(model / "config.json").read_bytes() == (EMBEDDED_PATH / "config.json").read_bytes()
    (model / "new").write_text("{}")
    os.replace(model / "new", model / "config.json")
    with pytest.raises(ChangedError, match=r"config\.json was written to"):
        read_pinned(refused)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: write_at(path, 100, keeps_time=True),
        lambda path: write_at(path, path.stat().st_size - 1),
        lambda path: os.truncate(path, path.stat().st_size - 1),
        lambda path: os.truncate(path, 0),
        lambda path: path.open("ab").write(b"x"),
    ],
    ids=["header", "last byte", "shorter", "empty", "longer"],
)
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_was_written_to_is_refused_by_name(
    model: Path, name: str, change: Callable[[Path], object]
) -> None:
    held, _ = hold(model)
    read_pinned(held.pinned)
    change(model / name)
    with pytest.raises(ChangedError, match=rf"{name} was written to .*: restart the server"):
        read_pinned(held.pinned)
    os.utime(model / name)
    with pytest.raises(ChangedError, match=f"{name} was written to"):
        check_pinned(held.pinned)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """Have a call of the system fail from now on."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(pinned_files.os, name, fail)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("open", errno.EMFILE),
        ("open", errno.EACCES),
        ("pread", errno.EIO),
        ("pread", errno.ESTALE),
        ("pread", errno.ENOMEM),
        ("dup", errno.EMFILE),
    ],
)
def test_an_error_that_may_pass_is_no_change(
    model: Path, name: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server gives up at a `ChangedError`, and tries again at any other `StartError`."""
    held, _ = hold(model)
    rule = rf"{held.pinned[0].path} cannot be read now.*: {os.strerror(code)}; .* try again"
    with monkeypatch.context() as broken:
        failing(broken, name, code)
        for read in (read_pinned, lambda files: adapter_pinned(files).__enter__()):
            with pytest.raises(StartError, match=rule) as refusal:
                read(held.pinned)
            assert type(refusal.value) is StartError
    read_pinned(held.pinned)
    for file in model.iterdir():
        os.utime(file)
    with monkeypatch.context() as broken:
        failing(broken, name, code)
        if name != "dup":
            with pytest.raises(StartError, match="cannot be read now") as refusal:
                check_pinned(held.pinned)
            assert type(refusal.value) is StartError
    check_pinned(held.pinned)


def test_another_file_with_the_name_says_nothing_if_the_servers_cannot_be_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, _ = hold(model)
    (model / "new").write_text("{}")
    os.replace(model / "new", model / "config.json")
    real = os.open

    def without_the_servers(path: Path, flags: int) -> int:
        if str(path).startswith("/proc/"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, flags)

    with monkeypatch.context() as broken:
        broken.setattr(pinned_files.os, "open", without_the_servers)
        with pytest.raises(StartError, match=r"config\.json cannot be read now") as refusal:
            read_pinned(held.pinned)
    assert not isinstance(refusal.value, ChangedError)
    read_pinned(held.pinned)


def test_an_adapter_that_cannot_be_read_now_is_not_called_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("x")
    held = HeldFiles([tmp_path / "x"])
    held.pin()
    failing(monkeypatch, "pread", errno.EIO)
    loader = AdapterLoader(None, None, None)  # type: ignore[arg-type]
    loader.load(LoadAdapter(Adapter(0, "digest"), str(tmp_path), "name", held.pinned))
    loader._reader.shutdown()
    (loaded,) = loader.ended()
    assert re.search(r"x cannot be read now.*: Input/output error; .* try again", loaded.error), loaded.error
    assert "changed" not in loaded.error and "written" not in loaded.error


def test_a_file_that_was_only_touched_is_the_same(model: Path) -> None:
    held, _ = hold(model)
    read_pinned(held.pinned)
    for file in model.iterdir():
        os.utime(file)
    check_pinned(held.pinned)
    read_pinned(held.pinned)


@pytest.mark.parametrize("page", [0, 2, 20], ids=["header", "first tensor", "second tensor"])
def test_pages_of_a_large_file_are_looked_at(page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = large(tmp_path / "x", monkeypatch)
    read_pinned(held.pinned)
    write_at(tmp_path / "x", page * PAGE_BYTES, keeps_time=True)
    with pytest.raises(ChangedError):
        read_pinned(held.pinned)


def test_other_pages_show_by_the_time_of_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = large(tmp_path / "x", monkeypatch)
    write_at(tmp_path / "x", 35 * PAGE_BYTES, keeps_time=True)
    read_pinned(held.pinned)  # not all of a large file is read
    write_at(tmp_path / "x", 35 * PAGE_BYTES)
    with pytest.raises(ChangedError):
        check_pinned(held.pinned)


def test_the_work_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_files, "_MAX_COVERED_BYTES", 0)
    path = tmp_path / "x"
    path.write_bytes(bytes(2**22))
    held = HeldFiles([path])
    held.pin({path: [(at, 8) for at in range(8, 2**22, 8)]})
    assert len(held.pinned[0].pages) <= held_files._MAX_PAGES and held.pinned[0].num_first_bytes == 8


def test_a_file_that_changes_while_the_server_reads_is_refused(model: Path) -> None:
    held, checkpoint = HeldCheckpoint(model), Checkpoint.read(model)
    shutil.copy(model / "tokenizer.json", model / "new")
    os.replace(model / "new", model / "tokenizer.json")
    with pytest.raises(ModelError, match=r"tokenizer\.json was replaced .* start the server again"):
        held.pin(checkpoint)


def test_the_digest_is_of_weights_tokenizer_and_template(model: Path, tmp_path: Path) -> None:
    """Not of the place, and not of the time of the files."""
    _, same = hold(model)
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert hold(copy)[1] == same
    digests = {same}
    write_at(copy / "model.safetensors", 5_000_001)
    digests.add(hold(copy)[1])
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer | {"version": "2"}))
    digests.add(hold(copy)[1])
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    digests.add(hold(copy)[1])
    (copy / "generation_config.json").write_text('{"temperature": 0.5}')
    digests.add(hold(copy)[1])
    (copy / "LICENSE.txt").write_text("x")
    assert hold(copy)[1] in digests and len(digests) == 5


def test_descriptors_end_with_their_holder(model: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    held, _ = hold(model)
    assert len(os.listdir("/proc/self/fd")) == before + len(held)
    del held
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_does_not_hold_up_the_start(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    os.mkfifo(model / "tokenizer.json")
    held, _ = hold(model)
    assert not any(file.path.endswith("tokenizer.json") for file in held.pinned)


def test_a_thread_reads_the_files_of_one_adapter(tmp_path: Path) -> None:
    """Another adapter may have had the same path before, and other threads read others."""
    path = tmp_path / "x"
    path.write_text("first")
    first = HeldFiles([path])
    first.pin()
    path.unlink()
    path.write_text("second")
    beside: list[Path] = []
    with adapter_pinned(first.pinned):
        assert source_of(path).read_text() == "first"
        thread = threading.Thread(target=lambda: beside.append(source_of(path)))
        thread.start()
        thread.join()
    assert beside == [path] and source_of(path).read_text() == "second"


def printed(model: Path, numerics: Numerics, adapter: object = None) -> str:
    """The fingerprint of answers of a server that starts with this model."""
    report = read_models(Settings(model=str(model), kv_memory=2**26, device="cpu"))[0]
    numerics = structs.replace(numerics, files=digest_of_all(report.config.files))
    service = SimpleNamespace(
        version="1", model=report.model, router=SimpleNamespace(replicas=SimpleNamespace(numerics=numerics))
    )
    request = SimpleNamespace(params=SimpleNamespace(adapter=adapter))
    return fingerprint(service, request)  # type: ignore[arg-type]


def test_the_fingerprint_is_of_the_files_and_the_numerics(model: Path) -> None:
    """It is the same at every start, and another if an answer may be another."""
    first = Numerics(library="kernels-avx2-1")
    prints = [printed(model, first) for _ in range(2)]
    assert prints[0] == prints[1]
    prints.append(printed(model, Numerics()))
    prints.append(printed(model, first, SimpleNamespace(digest="1")))
    write_at(model / "model.safetensors", 7_000_000)
    prints.append(printed(model, first))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    prints.append(printed(model, first))
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    prints.append(printed(model, first))
    assert len(set(prints)) == len(prints) - 1, prints


@pytest.mark.parametrize("field", [name for name in Numerics.__struct_fields__ if name != "deterministic"])
def test_an_engine_with_other_numerics_is_refused_by_the_fact_that_differs(field: str) -> None:
    first = Numerics()
    check_numerics(first, Numerics())
    other = {"version": 7, "num_ranks": 2, "kernels": (("linear", "reference"),)}.get(field, "another")
    with pytest.raises(ChangedError, match="C\\+\\+ kernels" if field == "library" else field):
        check_numerics(first, structs.replace(first, **{field: other}))


def test_gpus_that_promise_no_bits_may_differ() -> None:
    first = Numerics(deterministic=False, device="NVIDIA H100")
    check_numerics(first, structs.replace(first, device="NVIDIA H200", kernels=(("linear", "triton"),)))
    with pytest.raises(ChangedError, match="torch"):
        check_numerics(first, structs.replace(first, torch="another"))


def test_a_model_that_never_served_may_get_other_weights(model: Path) -> None:
    """Its texts are those that the server has read."""
    report = read_models(Settings(model=str(model), kv_memory=2**26, device="cpu"))[0]
    assert opened_anew(report) is report
    write_at(model / "model.safetensors", 7_000_000)
    again = opened_anew(report)
    read_pinned(again.config.files)
    assert again.model is report.model and again.config.files != report.config.files
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ModelError, match="the server has read more than its weights: restart the server"):
        opened_anew(report)
