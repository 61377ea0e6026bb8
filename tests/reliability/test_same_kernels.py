"""Each engine of a server has the kernels of its first one, whatever becomes of the directory in which they lie."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from inferd.kernels.cpu import library, native
from tests.e2e.conftest import Daemon
from tests.reliability.asking import Ask, Asker, asked_under
from tests.reliability.conftest import WITHOUT_CACHE, count, restarts, wait_until
from tests.reliability.test_pinned_files import asks, fingerprint, kill_while_streams_run, said

CACHE = "inferd/kernels"
NUM_TOKENS = 60


def shut(home: Path) -> None:
    """Make it impossible to keep kernels below `home`, also for a superuser."""
    shutil.rmtree(home / CACHE, ignore_errors=True)
    (home / CACHE).parent.mkdir(parents=True, exist_ok=True)
    (home / CACHE).write_text("no directory")


def open_up(home: Path) -> None:
    """Let this machine's kernels be found below `home`."""
    (home / CACHE).unlink(missing_ok=True)
    shutil.copytree(library.default_cache_dir(), home / CACHE)
    os.chmod(home / CACHE, 0o700)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    if native.prepare(library.default_cache_dir()).path is None:
        pytest.skip("this machine has no C++ kernels")
    return tmp_path / "home"


def asked() -> list[Ask]:
    return asks("tiny", max_tokens=NUM_TOKENS)


@pytest.mark.sampled(keep=4, among="recoveries")
def test_an_engine_after_one_in_plain_pytorch_is_the_same(start: Callable[..., Daemon], home: Path) -> None:
    """A cache without space for kernels, which has some when the next engine starts."""
    shut(home)
    daemon = start(WITHOUT_CACHE, env={"XDG_CACHE_HOME": str(home)})
    assert "plain PyTorch" in daemon.output
    asker, print_before = Asker(daemon.url), fingerprint(daemon, "tiny")
    expected = said(asker.ask(asked()))
    open_up(home)
    answers = asked_under(lambda: kill_while_streams_run(daemon, lambda: None), asker, asked())
    assert said(answers) == expected and count(daemon, "inferd_requests_replayed_total") > 0
    wait_until(lambda: restarts(daemon) == 1)
    assert said(asker.ask(asked())) == expected and fingerprint(daemon, "tiny") == print_before
    other = start(WITHOUT_CACHE, env={"XDG_CACHE_HOME": str(home)})
    assert said(Asker(other.url).ask(asked())) != expected, "C++ kernels give other log probabilities"
    assert fingerprint(other, "tiny") != print_before


@pytest.mark.long
def test_an_engine_that_cannot_have_the_same_kernels_is_refused(start: Callable[..., Daemon], home: Path) -> None:
    open_up(home)
    daemon = start(WITHOUT_CACHE, env={"XDG_CACHE_HOME": str(home)})
    answers = asked_under(lambda: kill_while_streams_run(daemon, lambda: shut(home)), Asker(daemon.url),
                          asks("tiny", max_tokens=500))  # fmt: skip
    for answer in answers:
        assert answer.error is not None and answer.error["code"] == "model_not_loaded", answer
        assert "C++ kernels kernels-" in answer.error["message"] and "became plain PyTorch" in answer.error["message"]
    state = daemon.get("/state").json()
    assert state["status"] == "failed" and "restart the server" in state["error"]
    assert daemon.get("/ready").status_code == 503
    assert daemon.stop() == 0


@pytest.mark.long
def test_an_unloaded_model_gets_the_same_kernels(start: Callable[..., Daemon], home: Path) -> None:
    shut(home)
    daemon = start("--idle-unload", "1s", env={"XDG_CACHE_HOME": str(home)})
    expected = said(Asker(daemon.url).ask(asked()))
    open_up(home)
    wait_until(lambda: daemon.get("/state").json()["status"] == "unloaded")
    assert said(Asker(daemon.url).ask(asked())) == expected
