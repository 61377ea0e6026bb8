"""Tests real clients against a real server: `make clients`.

Every folder beside this file is one client. `requirements.txt` or `package.json` pins its packages; a program from the
PATH, such as curl, has neither. `check.py` or `check.mjs` holds its checks. Each client has its own environment
under build/clients, which is made once. All clients use one server with the embedded model. At the end this prints a
table with the clients' versions, and exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / "build" / "clients"
KEY = "sk-clients"
READY_S, CHECK_S, INSTALL_S = 120, 300, 1800


def requirements_of(file: Path) -> str:
    """The text of a file of requirements, with those that its lines `-r FILE` include."""
    lines = file.read_text().splitlines()
    included = (requirements_of(file.parent / line[3:]) if line.startswith("-r ") else f"{line}\n" for line in lines)
    return "".join(included)


@dataclass(frozen=True, slots=True)
class Client:
    """One client, described by its folder."""

    folder: Path
    environments: Path = ENVIRONMENTS

    @property
    def home(self) -> Path:
        """Its environment."""
        return self.environments / self.folder.name

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_node(self) -> bool:
        return (self.folder / "package.json").exists()

    @property
    def requirements(self) -> Path:
        return self.folder / ("package.json" if self.is_node else "requirements.txt")

    @property
    def python(self) -> str:
        """The interpreter of its environment: this one, or that which a line such as `# python3.12` names."""
        named = re.search(r"^# (python3\.\d+)$", requirements_of(self.requirements), re.MULTILINE)
        return named[1] if named else sys.executable

    @property
    def version(self) -> str:
        """Name and version of the first package in the requirements. Without requirements: what the program prints."""
        if not self.requirements.exists():
            words = subprocess.run([self.name, "--version"], capture_output=True, text=True, check=True).stdout.split()
            return " ".join(words[:2])
        text = requirements_of(self.requirements)
        if self.is_node:
            return " ".join(next(iter(json.loads(text)["dependencies"].items())))
        return re.sub(r"\[.*?\]", "", text.splitlines()[0]).replace("==", " ")


@dataclass(frozen=True, slots=True)
class Outcome:
    client: Client
    passed: int
    failed: int
    seconds: float


def clients(folder: Path = HERE, environments: Path = ENVIRONMENTS) -> list[Client]:
    """The clients in `folder`."""
    found = (path for path in sorted(folder.iterdir()) if path.is_dir() and list(path.glob("check.*")))
    return [Client(path, environments) for path in found]


def main() -> int:
    options = _options()
    chosen = chosen_of(clients(), options.only)
    outcomes = []
    with _server(options.base_url) as url:
        for client in chosen:
            print(f"\n== {client.version}", flush=True)
            outcomes.append(_run(client, url))
    report(outcomes)
    return int(any(outcome.failed for outcome in outcomes))


def chosen_of(known: list[Client], names: list[str] | None) -> list[Client]:
    """The clients of these names, or all. Ends the program if a name is not known."""
    unknown = set(names or ()) - {client.name for client in known}
    if unknown:
        print(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(client.name for client in known)}")
        sys.exit(2)
    return [client for client in known if not names or client.name in names]


def _run(client: Client, url: str) -> Outcome:
    began = time.monotonic()
    try:
        command = prepare(client)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"  FAILED  the environment could not be made: {error}")
        return Outcome(client, 0, 1, time.monotonic() - began)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
        "INFERD_URL": url,
        "INFERD_KEY": KEY,
        "INFERD_PYTHON": sys.executable,
        "INFERD_TINY": str(ROOT / "engine" / "tiny" / "model"),
        "PYTHONPATH": str(HERE),
        "DO_NOT_TRACK": "1",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return run_checks(client, command, environment)


def run_checks(client: Client, command: list[str], environment: dict[str, str], within_s: float = CHECK_S) -> Outcome:
    """Run a client's checks, and show and count what they print. They are killed after `within_s`."""
    began = time.monotonic()
    passed = failed = 0
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    watchdog = threading.Timer(within_s, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    assert process.stdout is not None
    for line in process.stdout:
        print("  " + line, end="", flush=True)
        passed += line.startswith("ok ")
        failed += line.startswith("FAILED ")
    code = process.wait()
    watchdog.cancel()
    if not failed and (code or not passed):
        print(f"  FAILED  ended with {code} after {passed} checks")
        failed += 1
    return Outcome(client, passed, failed, time.monotonic() - began)


def prepare(client: Client) -> list[str]:
    """Make the client's environment if its requirements have changed. Returns the command that runs its checks."""
    if not client.requirements.exists():
        return [sys.executable, "-P", str(client.folder / "check.py")]
    home = client.home
    digest = hashlib.sha256(requirements_of(client.requirements).encode()).hexdigest()
    stamp = home / ".installed"
    if not stamp.exists() or stamp.read_text() != digest:
        print(f"  installing into {home.relative_to(ROOT)} (once)", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        if client.is_node:
            shutil.copy(client.requirements, home)
            install = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
            subprocess.run(install, cwd=home, check=True, timeout=INSTALL_S)
        else:
            subprocess.run([client.python, "-m", "venv", str(home / "venv")], check=True, timeout=INSTALL_S)
            pip = [str(home / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "--upgrade", "pip"], check=True, timeout=INSTALL_S)  # older ones resolve slowly
            subprocess.run([*pip, "-r", str(client.requirements)], check=True, timeout=INSTALL_S)
        stamp.write_text(digest)
    if client.is_node and (client.folder / "check.mjs").exists():
        # Node looks for modules beside the script.
        for script in (client.folder / "check.mjs", HERE / "checks.mjs"):
            shutil.copy(script, home)
        return ["node", str(home / "check.mjs")]
    python = sys.executable if client.is_node else str(home / "venv/bin/python")
    return [python, "-P", str(client.folder / "check.py")]


@contextmanager
def _server(given: str | None) -> Iterator[str]:
    """URL of the server `given`, or of a new server with the embedded model."""
    if given:
        yield given.rstrip("/")
        return
    with started([str(Path(sys.executable).parent / "inferd"), "serve", "tiny"]) as url:
        yield url


@contextmanager
def started(serve: list[str], log_file: Path | None = None) -> Iterator[str]:
    """URL of the server that a command starts, once it is ready."""
    command = [*serve, "--port", "0", "--api-key", KEY]
    with open(log_file, "w+") if log_file else tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        try:
            yield _url_of(lines)
        except BaseException:
            log.seek(0)
            print(log.read()[-10_000:])
            raise
        finally:
            process.terminate()
            process.wait(30)


def _url_of(lines: queue.Queue[str | None]) -> str:
    """URL of the server, read from its READY card. Waits for that."""
    deadline = time.monotonic() + READY_S
    while True:
        line = lines.get(timeout=max(0.1, deadline - time.monotonic()))
        if line is None:
            raise RuntimeError("the server ended before it was ready")
        found = re.search(r"curl .*?(http://[^/ ]+:\d+)", line)
        if found:
            return found.group(1)


def report(outcomes: list[Outcome]) -> None:
    table = Table("client", "checks", "seconds", "")
    for outcome in outcomes:
        mark = f"{outcome.failed} FAILED" if outcome.failed else "ok"
        table.add_row(outcome.client.version, str(outcome.passed + outcome.failed), f"{outcome.seconds:.1f}", mark)
    Console().print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="CLIENT", help="a folder's name; may be given again")
    parser.add_argument("--base-url", help=f"a running server with the embedded model and the key {KEY}")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
