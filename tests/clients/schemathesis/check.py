"""Runs all checks of schemathesis but one against a server with keys and a server without keys.

schemathesis writes requests from /openapi.json: first the boundary cases, then random ones until `RUN_S` is over, about
5,000 in all. This program starts both servers. A context of 128 tokens keeps their answers short.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON = os.environ["INFERD_PYTHON"]
READY_S, RUN_S = 60, 100
ADMIN_KEY = "sk-admin"
EXCLUDED_CHECK = "positive_data_acceptance"
"""This check expects that a body is accepted if it matches the schema. But a field may need another one, as
`tool_choice` needs `tools`, which the schema does not say."""
SERVE = "from inferd.server.cli import main; main()"


@contextmanager
def server(*flags: str) -> Iterator[str]:
    """Start a server, and stop it at the end. Yields its URL."""
    command = [PYTHON, "-P", "-c", SERVE, "serve", "tiny", "--port", "0", "--max-model-len", "128", *flags]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + READY_S
            while not (found := re.search(r"curl (http://[^/ ]+:\d+)", Path(log.name).read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(Path(log.name).read_text()[-5_000:])
                time.sleep(0.1)
            yield found[1]
            assert process.poll() is None, "the server ended"
        finally:
            process.terminate()
            process.wait(30)


def unserved(url: str) -> list[str]:
    """Paths that always answer 501. schemathesis would report each such answer as a failure."""
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        paths = json.load(answer)["paths"]
    return [path for path, methods in paths.items() if not any("200" in one["responses"] for one in methods.values())]


def run(name: str, url: str, *options: str) -> bool:
    """Run schemathesis and print its result. Returns whether all checks passed."""
    excluded = [word for path in unserved(url) for word in ("--exclude-path", path)]
    command = [
        str(Path(sys.executable).with_name("st")), "--config-file", str(HERE / "schemathesis.toml"),
        "run", f"{url}/openapi.json", "--checks", "all", "--exclude-checks", EXCLUDED_CHECK,
        "--phases", "coverage,fuzzing", "--max-time", str(RUN_S), "--continue-on-failure", "--no-color",
        "--warnings", "off", *excluded, *options,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RUN_S + 30, check=False)
    counted = re.search(r"(\d+) generated", ended.stdout)
    print(f"{'FAILED' if ended.returncode else 'ok'} {name}: {counted[1] if counted else 'no'} cases", flush=True)
    if ended.returncode:
        print(ended.stdout[-20_000:], ended.stderr[-2_000:], flush=True)
    return ended.returncode == 0


def main() -> int:
    with server("--api-key", "sk-user", "--admin-key", ADMIN_KEY) as url:
        keyed = run("with keys", url, "--header", f"Authorization: Bearer {ADMIN_KEY}")
    with server() as url:
        open_ = run("without keys", url, "--exclude-tag", "Administration")
    return int(not (keyed and open_))


if __name__ == "__main__":
    sys.exit(main())
