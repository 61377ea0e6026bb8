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

from inferd.server.api.routes import methods_of
from tests.agents.scripted_model import write_checkpoint
from tests.agents.shapes import write_rows
from tests.clients.run import KEY, ROOT, Client, Outcome, chosen_of, clients, prepare, report, run_checks, started

HERE = Path(__file__).resolve().parent
ENVIRONMENTS = ROOT / "build" / "agents"
RECORDED = ROOT / "tests" / "api" / "recorded"
NAMES = ("scripted", "gpt-5.5", "gpt-6.2-sol", "claude-sonnet-4-5")
"""Names of the model. Programs know some of them."""
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
    checkpoint, record = ENVIRONMENTS / "model", ENVIRONMENTS / "requests.jsonl"
    write_checkpoint(checkpoint)
    record.unlink(missing_ok=True)
    record.touch()
    with started(_serve(checkpoint, record), ENVIRONMENTS / "server.log") as url:
        for program, command in commands.items():
            print(f"\n== {program.version}", flush=True)
            outcomes.append(_run(program, command, url, record, is_recorded=options.record))
    report(outcomes)
    return int(any(outcome.failed for outcome in outcomes))


def _serve(checkpoint: Path, record: Path) -> list[str]:
    names = [word for name in NAMES for word in ("--served-model-name", name)]
    serve = [sys.executable, "-P", str(HERE / "scripted_server.py"), str(record), "serve", str(checkpoint), *names]
    return [*serve, "--speculative", "none", "--kv-memory", "2GiB"]


def _run(program: Client, command: list[str], url: str, record: Path, *, is_recorded: bool) -> Outcome:
    start = record.stat().st_size
    with tempfile.TemporaryDirectory(prefix=f"{program.name}-", ignore_cleanup_errors=True) as home:
        outcome = run_checks(program, command, _environment(program, url, Path(home)))
        _end_daemons(home)
    with record.open("rb") as lines:
        lines.seek(start)
        requests = [json.loads(line) for line in lines]
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
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
