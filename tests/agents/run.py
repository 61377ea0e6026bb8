"""Runs real agent programs against a real server: `make agents`.

Every folder beside this file is one program, made and described like the clients of `tests/clients`, in an environment
under build/agents. Its `check.py` gives the program a task, such as: read a file, mend it, run its test. Then it looks
at what is on disk, and at the program's last answer. All programs use one server: `inferd serve` with its engine
process, whose model follows the plan in each task (`scripted_model`).

The server and the programs run in a network namespace that has the loopback alone. Without one, which needs Linux and
either root or user namespaces, each program is named as skipped, and this exits with 1. Each program has an empty home
directory, and five minutes.

A program fails if a route that is served refused or failed one of its requests (4xx, 5xx). `refused.txt` in its folder
states exceptions, each as `METHOD PATH STATUS reason`; one that did not occur is a failure too. `--record` writes the
requests of each program, trimmed to one of each shape, into `tests/api/recorded`, from which `make test` replays them.

`--model CHECKPOINT` serves a real model. It gets the first task of each program in plain words. A table says what it
could do, and fails nothing: whether the file is mended, and how many requests were made and refused.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks import tables
from inferd.server.endpoints.routes import methods_of
from tests.agents.agent import MENDED
from tests.agents.scripted_model import write_checkpoint
from tests.agents.shapes import write_rows
from tests.clients.run import KEY, ROOT, Client, Outcome, chosen_of, clients, prepare, report, run_checks, started

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = ROOT / "build" / "agents"
RECORDED = ROOT / "tests" / "api" / "recorded"
NAMES = ("scripted", "gpt-5.5", "gpt-6.2-sol", "claude-sonnet-4-5")
"""Names of the model. Programs know some of them."""
TASK = (
    "The function add in calc.py is wrong: it returns a - b. Read the file, change it so that it returns a + b, "
    "and run python3 test_calc.py."
)
"""The task of a real model."""
TRY_S = 1200.0
"""Seconds that a program may take with a real model."""
_REQUEST_ID = re.compile(r',"request_id":"\w+"')
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def main() -> int:
    options = _options()
    chosen = chosen_of(clients(HERE, ENVIRONMENTS), options.only)
    commands: dict[Client, list[str]] = {}
    outcomes = []
    for program in chosen:
        try:
            commands[program] = prepare(program)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"FAILED  the environment of {program.name} could not be made: {error}")
            outcomes.append(Outcome(program, 0, 1, 0.0))
    if reason := isolate():
        for program in commands:
            print(f"skipped {program.name}: {reason}")
        return 1
    record = ENVIRONMENTS / "requests.jsonl"
    record.unlink(missing_ok=True)
    record.touch()
    if options.model:
        with started(_serve("real", options.model, record), ENVIRONMENTS / "server.log") as url:
            tasks = [_try(program, command, url, record) for program, command in commands.items()]
        print("\n" + tables.markdown(("program", "mended", "requests", "refused", "seconds"), tasks))
        return 0
    checkpoint = ENVIRONMENTS / "model"
    write_checkpoint(checkpoint)
    serve = [*_serve("scripted", str(checkpoint), record), "--speculative", "none", "--kv-memory", "2GiB"]
    with started(serve, ENVIRONMENTS / "server.log") as url:
        for program, command in commands.items():
            print(f"\n== {program.version}", flush=True)
            outcomes.append(_run(program, command, url, record, is_recorded=options.record))
    report(outcomes)
    return int(any(outcome.failed for outcome in outcomes))


def _serve(engine: str, checkpoint: str, record: Path) -> list[str]:
    names = [word for name in NAMES for word in ("--served-model-name", name)]
    program = [sys.executable, "-P", str(HERE / "recording_server.py"), str(record), engine]
    return [*program, "serve", checkpoint, *names]


def _try(program: Client, command: list[str], url: str, record: Path) -> tuple[str, str, str, str, float]:
    """One program's task for a real model: a row of the table."""
    print(f"\n== {program.version}", flush=True)
    start = record.stat().st_size
    with tempfile.TemporaryDirectory(prefix=f"{program.name}-", ignore_cleanup_errors=True) as home:
        real = {"TASK": TASK, "NUM_CHECKS": "1", "RUN_S": str(TRY_S)}
        outcome = run_checks(program, command, _environment(program, url, Path(home)) | real, TRY_S)
        _end_daemons(home)
        files = list(Path(home).glob("**/calc.py"))
        mended = sum(MENDED in file.read_text() for file in files)
    requests = _requests(record, start)
    refused = sum(request["status"] >= 400 and bool(methods_of(request["path"])) for request in requests)
    row = f"{mended} of {len(files)}", str(len(requests)), str(refused)
    print(f"  mended {row[0]}; {row[1]} requests, {row[2]} of them refused", flush=True)
    return program.version, *row, outcome.seconds


def _requests(record: Path, start: int) -> list[dict[str, Any]]:
    """The requests of which lines begin at the byte `start` or after it."""
    with record.open("rb") as lines:
        lines.seek(start)
        return [json.loads(line) for line in lines]


def _run(program: Client, command: list[str], url: str, record: Path, *, is_recorded: bool) -> Outcome:
    start = record.stat().st_size
    with tempfile.TemporaryDirectory(prefix=f"{program.name}-", ignore_cleanup_errors=True) as home:
        outcome = run_checks(program, command, _environment(program, url, Path(home)))
        _end_daemons(home)
    requests = _requests(record, start)
    print(f"  {len(requests)} requests")
    for warning in dict.fromkeys(request["warning"] for request in requests if request["warning"]):
        print(f"  told: {warning}")
    faults = faults_of(requests, program.folder / "refused.txt")
    for fault in faults:
        print(f"  FAILED {fault}")
    if is_recorded and not outcome.failed and not faults:
        write_rows(RECORDED / f"{program.name}.jsonl", requests)
    return replace(outcome, failed=outcome.failed + len(faults))


def _end_daemons(home: str) -> None:
    """End the processes that a program left behind. They have its home directory."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("HOME") == home:
                process.kill()


def _environment(program: Client, url: str, home: Path) -> dict[str, str]:
    node = shutil.which("node")
    path = [
        program.home / "node_modules" / ".bin",
        program.home / "venv" / "bin",
        *([Path(node).parent] if node else []),
    ]
    return {
        "PATH": os.pathsep.join([*map(str, path), "/usr/local/bin", "/usr/bin", "/bin"]),
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PYTHONDONTWRITEBYTECODE": "1",
        "USER": "agent",
        "INFERD_URL": url,
        "INFERD_KEY": KEY,
        "PYTHONPATH": os.pathsep.join((str(HERE), str(ROOT / "tests" / "clients"))),
        "DO_NOT_TRACK": "1",
    }


def faults_of(requests: list[dict[str, Any]], stated: Path) -> list[str]:
    """Faults of a program's requests: refusals and failures of a served route, and stated ones that did not occur."""
    lines = stated.read_text().splitlines() if stated.exists() else []
    expected = {tuple(line.split(maxsplit=3)[:3]) for line in lines}
    faults, seen = [], set()
    for request in requests:
        key = request["method"], request["path"], str(request["status"])
        seen.add(key)
        if request["status"] >= 400 and methods_of(request["path"]) and key not in expected:
            faults.append(f"{' '.join(key)}: {_REQUEST_ID.sub('', request['answer'])[:600]}")
    faults += [f"{' '.join(key)} is stated in {stated.name} and did not occur" for key in sorted(expected - seen)]
    return list(dict.fromkeys(faults))


def isolate() -> str:
    """Move this process, which has one thread, into a network namespace with the loopback alone.

    Returns the reason if that is impossible.
    """
    if sys.platform != "linux":
        return "only Linux has network namespaces"
    user, group = os.getuid(), os.getgid()
    flags = _CLONE_NEWNET | (0 if user == 0 else _CLONE_NEWUSER)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        return f"no network namespace: {os.strerror(ctypes.get_errno())}; it needs root or user namespaces"
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        is_up = struct.unpack("16sH14x", request)[1] | _IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", is_up))
    return ""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="PROGRAM", help="a folder's name; may be given again")
    parser.add_argument("--record", action="store_true", help="write the requests for make test to replay")
    parser.add_argument("--model", metavar="CHECKPOINT", help="a real model in place of the scripted one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
