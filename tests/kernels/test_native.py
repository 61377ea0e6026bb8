"""The library of C++ kernels: which files are loaded, refused with a reason, or built again."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inferd.kernels.cpu import library, native
from tests.conftest import KERNEL_CACHE

_NOBODY = 65534


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """After a test, prepare the cached library again."""
    yield
    native.prepare(KERNEL_CACHE)


def test_without_compiler_and_cache_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_COMPILERS", ("no-such-compiler",))
    built = native.prepare(tmp_path)
    assert built.path is None
    assert "no C++ compiler (no-such-compiler)" in built.reason
    assert native.missing() == built.reason


@pytest.mark.skipif(not library.has_compiler(), reason="no C++ compiler")
def test_a_library_built_before_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    native.prepare(KERNEL_CACHE)
    monkeypatch.setattr(library, "_COMPILERS", ("no-such-compiler",))
    assert native.prepare(KERNEL_CACHE).path is not None
    assert native.missing() is None


@pytest.mark.skipif(not library.has_compiler(), reason="no C++ compiler")
def test_a_damaged_library_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = native.prepare(KERNEL_CACHE).path
    assert whole is not None
    content = whole.read_bytes()
    (tmp_path / whole.name).write_bytes(content[: len(content) // 2])
    with monkeypatch.context() as patched:
        patched.setattr(library, "_COMPILERS", ("no-such-compiler",))
        assert native.prepare(tmp_path).path is None
    monkeypatch.setattr(library, "_compile", lambda command, scratch: Path(command[-1]).write_bytes(content))
    assert native.prepare(tmp_path).path == tmp_path / whole.name
    assert native.missing() is None


@pytest.mark.skipif(not library.has_compiler(), reason="no C++ compiler")
def test_of_those_that_build_at_once_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock belongs to the opener of its file, so threads represent processes."""
    commands: list[list[str]] = []
    together = threading.Barrier(3)

    def compile_slowly(command: list[str], scratch: str) -> None:
        commands.append(command)
        time.sleep(0.05)
        Path(command[-1]).write_bytes(b"made")

    def build(_: int) -> Path:
        together.wait(10)
        return library.build(tmp_path, "portable")[0]

    monkeypatch.setattr(library, "_compile", compile_slowly)
    with ThreadPoolExecutor(together.parties) as pool:
        paths = set(pool.map(build, range(together.parties)))
    assert all(library._is_whole(path) for path in paths) and len(paths) == 1
    assert len(commands) == len(library._sources(".cpp")) + 1


@pytest.mark.skipif(not library.has_compiler(), reason="no C++ compiler")
def test_a_file_system_without_locks_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(library, "_compile", lambda command, scratch: Path(command[-1]).write_bytes(b"made"))
    assert library._is_whole(library.build(tmp_path, "portable")[0])


@pytest.mark.skipif(not library.has_compiler(), reason="no C++ compiler")
def test_a_build_that_fails_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(library, "_FLAGS", ("--no-such-option",))
        built = native.prepare(tmp_path)
    assert built.path is None and "do not compile" in built.reason and "--no-such-option" in built.reason
    assert not list(tmp_path.glob("*.so")) and not list(tmp_path.glob(f"{library._SCRATCH}*"))


@pytest.mark.skipif(not library.has_compiler(), reason="no C++ compiler")
def test_the_kernels_of_this_machine_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = native.prepare(KERNEL_CACHE).path
    assert whole is not None
    content, linked = whole.read_bytes()[: -library._DIGEST_BYTES], []

    def made(command: list[str], _: str) -> None:
        Path(command[-1]).write_bytes(content)
        if command[-1].endswith(".so"):
            linked.append(command)

    monkeypatch.setattr(library, "_compile", made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        library._build_for_this_machine()
    assert len(linked) == 1
    assert native.prepare(library.default_cache_dir(), may_build=False).path is not None


@pytest.fixture
def bundled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The output of `python -m inferd.kernels.cpu.library` under a strict umask, in a folder that every user can reach.
    One instruction set, compiled before, represents all."""
    made = native.prepare(KERNEL_CACHE).path
    if made is None:
        pytest.skip(native.missing() or "")
    content = made.read_bytes()[: -library._DIGEST_BYTES]
    with tempfile.TemporaryDirectory() as reached:
        Path(reached).chmod(0o755)
        monkeypatch.setattr(library, "BUNDLED_DIR", Path(reached) / "built")
        monkeypatch.setattr(library, "_shipped_levels", lambda: library.runnable_levels()[:1])
        monkeypatch.setattr(library, "_compile", lambda command, scratch: Path(command[-1]).write_bytes(content))
        umask = os.umask(0o077)
        try:
            library._build_all()
        finally:
            os.umask(umask)
        yield library.BUNDLED_DIR


@pytest.mark.skipif(not library.has_compiler(), reason="no C++ compiler")
def test_what_an_image_brings_is_readable_by_all(bundled: Path) -> None:
    assert oct(bundled.stat().st_mode) == oct(stat.S_IFDIR | 0o755)
    (file,) = bundled.iterdir()
    assert oct(file.stat().st_mode) == oct(stat.S_IFREG | 0o644)
    library._check_all()


@pytest.mark.skipif(not library.has_compiler(), reason="no C++ compiler")
@pytest.mark.skipif(os.geteuid() != 0, reason="to become another user takes root")
@pytest.mark.parametrize(("mode", "status"), [(0o755, 0), (0o700, 1)], ids=["as built", "as the builder's alone"])
def test_another_user_loads_what_an_image_brings(bundled: Path, mode: int, status: int) -> None:
    (file,) = bundled.iterdir()
    bundled.chmod(mode)
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
            library._open(file)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status


@pytest.mark.skipif(not library.has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("has_compiler", [True, False])
def test_every_reason_why_a_library_is_not_used_is_said(
    bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_compiler: bool
) -> None:
    """The reasons are given with and without a replacement."""
    (file,) = bundled.iterdir()
    file.write_bytes(b"another")
    (tmp_path / file.name).write_bytes(b"another")
    expected = tuple(f"{folder / file.name} does not load: it is damaged" for folder in (bundled, tmp_path))
    if not has_compiler:
        monkeypatch.setattr(library, "_COMPILERS", ("no-such-compiler",))
    built = native.prepare(tmp_path)
    assert (built.rejected, built.path is not None) == (expected, has_compiler)
    assert all(reason in built.reason for reason in expected) == (not has_compiler)
    file.unlink()
    assert native.prepare(tmp_path).rejected[0].startswith(f"{bundled} has no library for")


@pytest.mark.skipif(not library.has_compiler(), reason="no C++ compiler")
def test_the_check_of_an_image_fails_for_a_library_that_does_not_load(bundled: Path) -> None:
    (file,) = bundled.iterdir()
    file.unlink()
    with pytest.raises(OSError, match=file.name):
        library._check_all()


def test_a_cache_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert "others may write to it" in native.prepare(tmp_path).reason


@pytest.mark.skipif(not library.has_compiler(), reason="no C++ compiler")
@pytest.mark.skipif(os.geteuid() != 0, reason="to give a directory away takes root")
def test_a_cache_that_others_could_exchange_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of a directory may rename those inside, whichever user they belong to."""
    monkeypatch.setattr(library, "_compile_all", lambda *_: pytest.fail("nothing may be built there"))
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    theirs = shared / "inferd-1000"
    theirs.mkdir()
    os.chown(theirs, _NOBODY, -1)
    for _ in range(2):  # before and after this process has made its directory
        assert f"{theirs} belongs to another user" in native.prepare(theirs / "inferd" / "kernels").reason


def test_an_unwritable_cache_says_so() -> None:
    assert "cannot be written to /proc/nowhere" in native.prepare(Path("/proc/nowhere")).reason


def test_an_unknown_level_is_refused_by_name(tmp_path: Path) -> None:
    assert "unknown instruction set level 'mmx'" in native.prepare(tmp_path, "mmx").reason


def test_the_last_level_runs_everywhere() -> None:
    assert library.runnable_levels()[-1] == "portable"


def test_tiles_take_the_consent_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the other levels stay."""
    granted = library.runnable_levels()
    if "amx" not in granted:
        pytest.skip("this processor or system has no tiles")
    monkeypatch.setattr(library, "_TILE_DATA", 1)
    assert library.runnable_levels() == tuple(level for level in granted if level != "amx")
