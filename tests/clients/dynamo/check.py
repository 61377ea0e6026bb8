"""Dynamo's indexer of KV events: it finds the blocks of each replica, also those before it came and after a death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from socket import create_server

import httpx
from checks import MODEL, check, run

BLOCK = 32
EARLY, LATE = list(range(300, 300 + 3 * BLOCK + 1)), list(range(1300, 1300 + 5 * BLOCK + 1))
"""Prompts of three and five whole blocks."""


def free_ports() -> int:
    """The first of two ports in turn that are free. Each replica adds its index to a port."""
    while True:
        with closing(create_server(("127.0.0.1", 0))) as one:
            port = int(one.getsockname()[1])
            try:
                create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


def wait_for(what: str, test: Callable[[], bool], within_s: float = 60.0) -> None:
    end_s = time.monotonic() + within_s
    while not test():
        assert time.monotonic() < end_s, f"not after {within_s:.0f} s: {what}"
        time.sleep(0.1)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


SERVER, EVENTS, REPLAY, INDEXER = (free_ports() for _ in range(4))
API, INDEX = f"http://127.0.0.1:{SERVER}", f"http://127.0.0.1:{INDEXER}"


def ask(ids: list[int]) -> None:
    body = {"model": MODEL, "prompt": ids, "max_tokens": 2}
    httpx.post(f"{API}/v1/completions", json=body, timeout=60).raise_for_status()


def matched(ids: list[int]) -> list[int]:
    """Tokens of the prompt that each replica holds in the engine's own memory, most first."""
    found = httpx.post(f"{INDEX}/query", json={"model_name": MODEL, "token_ids": ids}).json()["instances"]
    ranks = found.get("1", {}).get("dp", {})
    return sorted((tokens for tokens in ranks.values() if tokens), reverse=True)


@check
def the_indexer_reads_what_came_before_it() -> None:
    """It asks for a replay as soon as it sees a gap."""
    ask(EARLY)
    for rank in (0, 1):
        endpoints = {
            "endpoint": f"tcp://127.0.0.1:{EVENTS + rank}",
            "replay_endpoint": f"tcp://127.0.0.1:{REPLAY + rank}",
        }
        facts = {"instance_id": 1, "dp_rank": rank, "model_name": MODEL, "block_size": BLOCK}
        httpx.post(f"{INDEX}/register", json={**facts, **endpoints}).raise_for_status()
    assert matched(EARLY) == []
    # Prompts of other beginnings, until each replica has sent a batch.
    number = count(5)

    def is_found() -> bool:
        ask([next(number), *EARLY])
        time.sleep(0.5)
        return matched(EARLY) == [3 * BLOCK]

    wait_for("the blocks of a prompt from before", is_found)


@check
def a_prompt_is_found_on_one_replica() -> None:
    ask(LATE)
    wait_for("five blocks on one replica", lambda: matched(LATE) == [5 * BLOCK])
    assert matched([1, *LATE]) == []


def on_disk(ids: list[int]) -> int:
    """Tokens of the prompt that a replica holds in memory or in its directory."""
    found = httpx.post(f"{INDEX}/query", json={"model_name": MODEL, "token_ids": ids}).json()["instances"]
    return int(found.get("1", {}).get("disk", 0))


@check
def what_only_the_directory_has_counts_as_disk() -> None:
    number = count(2000)

    def has_written() -> bool:
        """The small memory would be used again before all of it is written."""
        before = len(list(Path(folder.name).rglob("*.kv")))
        time.sleep(0.5)
        return before == len(list(Path(folder.name).rglob("*.kv"))) > 0

    wait_for("all segments", has_written)

    def is_evicted() -> bool:
        ask([next(number), *range(2000, 2000 + 12 * BLOCK)])
        return matched(LATE) == []

    wait_for("the prompt out of memory", is_evicted)
    wait_for("five blocks on the disk", lambda: on_disk(LATE) == 5 * BLOCK)
    ask(LATE)
    wait_for("five blocks in memory again", lambda: matched(LATE) == [5 * BLOCK])


@check
def a_dead_engine_holds_nothing() -> None:
    children = subprocess.run(["pgrep", "-P", str(server.pid), "-f", "engine.process"], capture_output=True, text=True)
    for pid in children.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    wait_for("no block", lambda: matched(LATE) == matched(EARLY) == [])
    wait_for("another engine", lambda: answers(f"{API}/ready"))
    ask(LATE)
    wait_for("the blocks again", lambda: matched(LATE) == [5 * BLOCK])


if __name__ == "__main__":
    events = ["--kv-events", f"tcp://*:{EVENTS}", "--kv-events-replay", f"tcp://*:{REPLAY}"]
    program = [os.environ["INFERD_PYTHON"], "-m", "inferd", "serve", MODEL, "--port", str(SERVER), "--replicas", "2"]
    folder = tempfile.TemporaryDirectory()
    flags = ["--block-size", str(BLOCK), "--log-level", "warning", "--max-model-len", "512", "--kv-memory", "4MiB"]
    flags += ["--kv-dir", f"{folder.name}/kv", "--kv-events-tiers"]
    server = subprocess.Popen([*program, *events, *flags])
    indexer = subprocess.Popen([sys.executable, "-m", "dynamo.indexer", "--port", str(INDEXER)])
    try:
        wait_for("the server", lambda: answers(f"{API}/ready"), 120)
        wait_for("the indexer", lambda: answers(f"{INDEX}/health"))
        run()
    finally:
        server.terminate()
        indexer.kill()
        server.wait(60)
        folder.cleanup()
