"""Imports of an engine's libraries. A standby imports them at low priority, and keeps no trace of it later."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inferd.engine.api.process.engine_process import IMPORT_FIRST, EngineLaunch
from inferd.engine.api.process.logs import LogStyle
from inferd.engine.process import boot, priority
from inferd.engine.process.standby import stand_by
from tests.configs import engine_config

MODULE = """
import os, threading
from pathlib import Path
def nice():
    group = Path("/proc/self/autogroup")
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    return own, group.exists() and int(group.read_text().split()[-1])
READ = nice()
import gc
WAS_WATCHED = gc.isenabled()
"""
PROGRAM = """
import gc, json, os
from inferd.engine.process import boot, priority
engine = boot.import_engine("what_is_read", is_urgent={is_urgent})
print(json.dumps([engine.READ, engine.nice(), engine.WAS_WATCHED, gc.isenabled()]))
"""


@pytest.mark.parametrize("is_urgent", [True, False])
def test_a_standby_reads_its_libraries_nicely_and_serves_as_any(is_urgent: bool, tmp_path: Path) -> None:
    """By its thread's priority, and by its session's if the kernel has such groups."""
    (tmp_path / "what_is_read.py").write_text(MODULE)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM.format(is_urgent=is_urgent)],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}, start_new_session=True,
    )  # fmt: skip
    read, after, was_watched, is_watched = json.loads(done.stdout)
    assert (was_watched, is_watched) == (False, True)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert after[0] == own
    assert not after[1]
    if sys.platform == "linux":
        assert read[0] == (own if is_urgent else max(own, 10))
        assert read[1] in ((0, False) if is_urgent else (10, False))


EARLY = """
import sys
from inferd.engine.process import boot, priority
boot.ENGINE = "what_is_read"
sys.exit(boot.main())
"""
EARLY_MODULE = """
print("imported", flush=True)
def main(line, promoted, before_end):
    print(line.decode().strip(), flush=True)
    return 7
"""


ENDING_MODULE = """
import os, threading, time
def main(line, promoted, before_end):
    def act(text):
        time.sleep(0.05)
        os.write(1, text)
    before_end += [lambda: act(b"first "), lambda: act(b"second")]
    if line.startswith(b'{"fails'):
        before_end.insert(1, lambda: 1 / 0)
    os.write(1, b"ready\\n")
    threading.Event().wait()
"""


@pytest.mark.parametrize(("begin", "done"), [('{"is', b"first second"), ('{"fails": 1, "is', b"first ")])
def test_the_process_ends_after_what_the_engine_wants_done_before(begin: str, done: bytes, tmp_path: Path) -> None:
    """Also if that fails."""
    (tmp_path / "what_is_read.py").write_text(ENDING_MODULE)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    launch = f'{begin}_standby": false, "config": {{"tensor_parallel_size": 1}}, "run_dir": "{tmp_path}/run"}}\n'
    with subprocess.Popen(
        [sys.executable, "-P", "-c", EARLY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path}, bufsize=0, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(launch.encode())
        assert process.stdout.readline() == b"ready\n"
        process.stdin.close()
        assert process.stdout.read() == done
        assert process.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("launch", "code"),
    [(b'{"run_dir": "/nowhere", "is_standby": false, "config": {"tensor_parallel_size": 1}}', 7), (b"", 0)],
)
def test_an_empty_line_makes_it_import_before_it_knows_more(launch: bytes, code: int, tmp_path: Path) -> None:
    """It ends without the launch line if the input ends first, as it does with the server."""
    (tmp_path / "what_is_read.py").write_text(EARLY_MODULE)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    with subprocess.Popen(
        [sys.executable, "-P", "-c", EARLY], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path}, bufsize=0,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(IMPORT_FIRST)
        assert process.stdout.readline() == b"imported\n"
        if launch:
            process.stdin.write(launch + b"\n")
            assert process.stdout.readline().strip() == launch
        else:
            process.stdin.close()
        assert process.wait(20) == code


@pytest.mark.parametrize("knows_more", [False, True])
def test_it_ends_with_its_server_while_it_imports(knows_more: bool, tmp_path: Path) -> None:
    """The server may be killed before or after it has sent the launch line. No run directory is left, and no process
    that the engine started, such as a compiler: it would keep the output open."""
    (tmp_path / "what_is_read.py").write_text(
        "import subprocess; subprocess.Popen(['sleep', '300']); print('importing', flush=True); subprocess.os.wait()"
    )
    run_dir = tmp_path / "inferd-run"
    run_dir.mkdir()
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    with subprocess.Popen(
        [sys.executable, "-P", "-c", EARLY], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path}, bufsize=0, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(IMPORT_FIRST)
        assert process.stdout.readline() == b"importing\n"
        if knows_more:
            process.stdin.write(json.dumps({"run_dir": str(run_dir), "is_standby": False}).encode() + b"\n")
        process.stdin.close()
        assert process.stdout.read() == b""
    assert run_dir.exists() != knows_more


def test_garbage_is_looked_for_again_where_libraries_cannot_be_read() -> None:
    with pytest.raises(ModuleNotFoundError):
        boot.import_engine("no_such_module", is_urgent=True)
    assert gc.isenabled()
    gc.unfreeze()


def test_a_standby_is_bound_to_its_server_before_it_says_that_it_is_ready(tmp_path: Path) -> None:
    did: list[str] = []
    config = engine_config(model_path=str(tmp_path))
    launch = EngineLaunch(
        config=config,
        run_dir=str(tmp_path),
        heartbeat_fd=-1,
        flight_fd=-1,
        epoch=1,
        log_style=LogStyle(),
        server_pid=1,
        spawned_s=0.0,
    )
    told = (lambda phase: did.append(phase.name), lambda launch: did.append("bound"))
    stand_by(launch, *told, lambda: did.append("promoted"))
    assert did == ["libraries", "bound", "standby", "promoted"]


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel shares processors out by session")
def test_a_session_that_cannot_be_made_urgent_again_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, text: str) -> int:
        raise BlockingIOError

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(priority, "_TRY_S", 0.0)
    with caplog.at_level(logging.WARNING, "inferd"):
        assert boot.import_engine("json", is_urgent=False) is json
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["the engine's session keeps nice 10"]
