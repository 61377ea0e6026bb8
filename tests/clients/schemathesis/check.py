"""Runs all checks of schemathesis but one against a server with keys and a server without keys.

schemathesis writes requests from /openapi.json: first the boundary cases, then random ones until `RUN_S` is over, about
20,000 in all. Few of them are valid and ask for a stream, so a third run makes only such requests. This program starts
both servers. A context of 128 tokens keeps their answers short.
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
from typing import Any

HERE = Path(__file__).resolve().parent
PYTHON = os.environ["INFERD_PYTHON"]
READY_S, RUN_S = 60, 80
ADMIN_KEY = "sk-admin"
MIN_TOKENS = 1_000
"""Tokens that the run of streams must have, so that its checks have seen some."""
EXCLUDED_CHECK = "positive_data_acceptance"
"""This check expects that a body is accepted if it matches the schema. But a field may need another one, as
`tool_choice` needs `tools`, which the schema does not say."""
STREAM = "text/event-stream"
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


def answers(url: str) -> dict[str, list[Any]]:
    """Each path's 200 answers in the document, one for each method that has one."""
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        paths = json.load(answer)["paths"]
    return {
        path: [method["responses"]["200"] for method in methods.values() if "200" in method["responses"]]
        for path, methods in paths.items()
    }


def num_tokens(url: str) -> int:
    """Tokens that the server has generated."""
    asked = urllib.request.Request(f"{url}/metrics", headers={"Cache-Control": "no-cache"})
    with urllib.request.urlopen(asked) as answer:
        found = re.search(r"^inferd_generation_tokens_total\S* (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found, "the server counts no tokens"
    return int(float(found[1]))


def run(name: str, url: str, *options: str, only_streams: bool = False) -> bool:
    """Run schemathesis and print its result. Returns whether all checks passed."""
    documented, env = answers(url), {**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(HERE)}
    if only_streams:
        chosen = [path for path, found in documented.items() if any(STREAM in one.get("content", ()) for one in found)]
        assert chosen, "no path has streams"
        paths = [word for path in chosen for word in ("--include-path", path)]
        env["INFERD_ONLY_STREAMS"] = "1"
        phases, options = "fuzzing", (*options, "--mode", "positive", "--max-examples", "100000")
    else:
        # schemathesis would report each answer of a path that always answers 501.
        paths = [word for path, found in documented.items() if not found for word in ("--exclude-path", path)]
        phases = "coverage,fuzzing"
    command = [
        str(Path(sys.executable).with_name("st")), "--config-file", str(HERE / "schemathesis.toml"),
        "run", f"{url}/openapi.json", "--checks", "all", "--exclude-checks", EXCLUDED_CHECK,
        "--phases", phases, "--max-time", str(RUN_S), "--continue-on-failure", "--no-color",
        "--warnings", "off", *paths, *options,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        ended = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=RUN_S + 30, check=False
        )
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
        num_before = num_tokens(url)
        streams = run("streams", url, only_streams=True)
        assert num_tokens(url) > num_before + MIN_TOKENS, "hardly a stream was answered"
    return int(not (keyed and open_ and streams))


if __name__ == "__main__":
    sys.exit(main())
