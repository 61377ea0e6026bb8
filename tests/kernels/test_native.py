"""The library of C++ kernels: what is loaded, what is refused and said, what is built anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.kernels import native
from tests.conftest import KERNEL_CACHE


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Whatever a test leaves behind, the next one finds the cached library."""
    yield
    native.prepare(KERNEL_CACHE)


def test_without_compiler_and_cache_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_COMPILERS", ("no-such-compiler",))
    built = native.prepare(tmp_path)
    assert built.path is None
    assert "no C++ compiler (no-such-compiler)" in built.reason
    assert native.missing() == built.reason


@pytest.mark.skipif(not native.has_compiler(), reason="no C++ compiler")
def test_a_library_built_before_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    native.prepare(KERNEL_CACHE)
    monkeypatch.setattr(native, "_COMPILERS", ("no-such-compiler",))
    assert native.prepare(KERNEL_CACHE).path is not None
    assert native.missing() is None


@pytest.mark.skipif(not native.has_compiler(), reason="no C++ compiler")
def test_a_damaged_library_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = native.prepare(KERNEL_CACHE).path
    assert whole is not None
    content = whole.read_bytes()
    (tmp_path / whole.name).write_bytes(content[: len(content) // 2])
    with monkeypatch.context() as patched:
        patched.setattr(native, "_COMPILERS", ("no-such-compiler",))
        assert native.prepare(tmp_path).path is None
    monkeypatch.setattr(native, "_compile", lambda command: Path(command[-1]).write_bytes(content))
    assert native.prepare(tmp_path).path == tmp_path / whole.name
    assert native.missing() is None


def test_a_cache_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert "others may write to it" in native.prepare(tmp_path).reason


def test_an_unwritable_cache_says_so() -> None:
    assert "cannot be written to /proc/nowhere" in native.prepare(Path("/proc/nowhere")).reason


def test_an_unknown_level_is_refused_by_name(tmp_path: Path) -> None:
    assert "unknown instruction set level 'mmx'" in native.prepare(tmp_path, "mmx").reason


def test_the_last_level_runs_everywhere() -> None:
    assert native.runnable_levels()[-1] == "portable"
