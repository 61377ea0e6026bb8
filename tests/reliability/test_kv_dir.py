"""The KV directory outlives every process: a later server reads what an earlier one computed, and answers the same."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from xxhash import xxh3_128_digest

from tests.e2e.conftest import INFERD, Daemon
from tests.reliability.asking import Answer, Ask, Asker
from tests.reliability.conftest import count, wait_until

NUM_PROMPTS, PROMPT_TOKENS = 6, 700
SHORT_KILLS, LONG_KILLS = 3, 30
QUOTA_BYTES = 64 * 2**20


def asks(salt: str = "") -> list[Ask]:
    """Long prompts, some of which begin alike."""
    rng = random.Random(7)
    shared = [rng.randrange(300, 3000) for _ in range(300)]
    prompts = []
    for number in range(NUM_PROMPTS):
        begin = shared if number % 2 else []
        prompts.append([*begin, *(rng.randrange(300, 3000) for _ in range(PROMPT_TOKENS - len(begin)))])
    body = {"max_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 5, "return_token_ids": True}
    salted = {"cache_salt": salt} if salt else {}
    return [Ask("/v1/completions", {**body, **salted, "prompt": prompt}) for prompt in prompts]


def begin(start: Callable[..., Daemon], folder: Path, *options: str) -> Daemon:
    return start("--kv-dir", str(folder), "--kv-disk", f"{QUOTA_BYTES}", *options)


def kill_everything(daemon: Daemon) -> None:
    """As a machine that loses its power does, but for what the system still writes to the disk."""
    with suppress(psutil.NoSuchProcess):  # the server is dead, and the system ends its processes
        server = psutil.Process(daemon.process.pid)
        for process in (server, *server.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    daemon.stop(signal.SIGKILL)


def wait_written(daemon: Daemon) -> None:
    """Wait until everything is written that is going to be."""
    wait_until(lambda: tier_bytes(daemon, "written") > 0)
    written = -1.0
    while written != tier_bytes(daemon, "written"):
        written = tier_bytes(daemon, "written")
        time.sleep(0.3)
        httpx.post(daemon.url + "/v1/completions", json={"model": "tiny", "prompt": "Hi", "max_tokens": 1}, timeout=60)


def tier_bytes(daemon: Daemon, direction: str) -> float:
    lines = daemon.get("/metrics").text.splitlines()
    (line,) = (line for line in lines if line.startswith("inferd_kv_tier_bytes_total{") and direction in line)
    return float(line.rpartition(" ")[2])


def segments(daemon: Daemon, result: str) -> float:
    lines = daemon.get("/metrics").text.splitlines()
    (line,) = (line for line in lines if line.startswith("inferd_kv_tier_segments_total{") and result in line)
    return float(line.rpartition(" ")[2])


def num_cached(answers: list[Answer]) -> list[int]:
    return [(answer.usage or {})["prompt_tokens_details"]["cached_tokens"] for answer in answers]


def texts(answers: list[Answer]) -> list[object]:
    assert all(answer.status == 200 and not answer.error for answer in answers)
    return [answer.choices for answer in answers]


def verified(folder: Path) -> dict[str, object]:
    done = subprocess.run([INFERD, "kv", "verify", "--json", folder], capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def planned(folder: Path) -> dict[str, int]:
    command = [INFERD, "plan", "tiny", "--kv-dir", folder, "--kv-disk", str(QUOTA_BYTES), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return {"block_size": found["block_size"], **found["serve"]["kv_directory"]}


def test_a_later_server_computes_no_prompt_again(start: Callable[..., Daemon], tmp_path: Path) -> None:
    first = begin(start, tmp_path / "kv")
    expected = Asker(first.url).ask(asks())
    wait_written(first)
    kill_everything(first)
    sizes, plan = [path.stat().st_size for path in (tmp_path / "kv").rglob("*.kv")], planned(tmp_path / "kv")
    whole = 8 * plan["block_size"] * plan["token_bytes"]
    assert whole < max(sizes) < whole + 1024, "`inferd plan` counts other bytes of a token"
    assert plan["used_bytes"] == sum(sizes)
    second = begin(start, tmp_path / "kv")
    Asker(second.url).ask(asks("another tenant"))
    assert count(second, "inferd_kv_tier_tokens_total") == 0, "another tenant's prefix was loaded"
    body = {"model": "tiny", **asks()[0].body, "include_metrics": True}
    told = [httpx.post(second.url + "/v1/completions", json=body, timeout=60).json()["metrics"] for _ in range(2)]
    sources = [[each[f"{source}_tokens"] for source in ("pool", "loaded", "computed")] for each in told]
    num_loaded = sources[0][1]
    assert num_loaded == told[0]["cached_tokens"] >= PROMPT_TOKENS - 2 * 32
    assert sources[0] == [0, num_loaded, PROMPT_TOKENS - num_loaded]
    assert sources[1][1] == 0 and sources[1][0] == told[1]["cached_tokens"] >= num_loaded, "it is in memory by now"
    assert count(second, "inferd_kv_tier_tokens_total") == num_loaded
    answers = Asker(second.url).ask(asks())
    assert texts(answers) == texts(expected)
    assert min(num_cached(answers)) >= PROMPT_TOKENS - 2 * 32
    assert count(second, "inferd_kv_tier_tokens_total") > 0
    assert count(second, "inferd_prompt_tokens_computed_total") < 1.5 * NUM_PROMPTS * PROMPT_TOKENS


def test_a_wrong_block_under_a_right_checksum_is_found_and_its_writer_distrusted(
    start: Callable[..., Daemon], tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    first = begin(start, folder)
    expected = texts(Asker(first.url).ask(asks()))
    wait_written(first)
    kill_everything(first)
    num_files = len(list(folder.rglob("*.kv")))
    for path in folder.rglob("*.kv"):
        make_wrong(path)
    assert not verified(folder)["damaged"], "the checksums would tell"
    second = begin(start, folder)
    Asker(second.url).ask(asks()[:1])
    wait_until(lambda: segments(second, "different") > 0, 30)
    assert segments(second, "distrusted") >= num_files
    assert texts(Asker(second.url).ask(asks())) == expected
    wait_written(second)
    kill_everything(second)
    third = begin(start, folder)
    assert texts(Asker(third.url).ask(asks())) == expected
    wait_until(lambda: count(third, "inferd_kv_tier_recomputed_tokens_total") >= PROMPT_TOKENS - 2 * 32, 30)
    assert segments(third, "different") == 0


def make_wrong(path: Path) -> None:
    """Turn one bit of the first block, and make all checksums right."""
    data = bytearray(path.read_bytes())
    num_blocks, fixed_bytes = int.from_bytes(data[12:16], "little"), 8 + 4 + 4 + 32 + 16 + 32 + 16
    content = fixed_bytes + 24 * num_blocks + 16
    size = int.from_bytes(data[fixed_bytes : fixed_bytes + 8], "little")
    data[content + size // 2] ^= 1
    data[fixed_bytes + 8 : fixed_bytes + 24] = xxh3_128_digest(bytes(data[content : content + size]))
    data[content - 16 : content] = xxh3_128_digest(bytes(data[: content - 16]))
    path.write_bytes(data)


def test_a_reset_clears_the_directory_only_if_it_is_asked_to(start: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = begin(start, tmp_path / "kv", "--admin-key", "secret")
    body = {"model": "tiny", **asks()[0].body, "include_metrics": True}

    def computed_after(query: str) -> int:
        url = f"{daemon.url}/reset_prefix_cache{query}"
        httpx.post(url, headers={"Authorization": "Bearer secret"}).raise_for_status()
        if query:
            wait_until(lambda: not list((tmp_path / "kv").rglob("*.kv")))
        answer = httpx.post(daemon.url + "/v1/completions", json=body, timeout=60)
        return int(answer.json()["metrics"]["computed_tokens"])

    httpx.post(daemon.url + "/v1/completions", json=body, timeout=60).raise_for_status()
    wait_written(daemon)
    assert computed_after("") <= 2 * 32
    assert computed_after("?reset_external=true") == PROMPT_TOKENS
    wait_until(lambda: bool(list((tmp_path / "kv").rglob("*.kv"))), what="what was computed anew")


@pytest.mark.timeout(1800)
def test_kills_of_everything_at_random_moments_change_no_answer(
    start: Callable[..., Daemon], tmp_path: Path, is_long: bool
) -> None:
    folder, rng = tmp_path / "kv", random.Random(3)
    expected = texts(Asker(begin(start, folder).url).ask(asks()))
    for _ in range(LONG_KILLS if is_long else SHORT_KILLS):
        daemon = begin(start, folder)
        killer = subprocess.Popen(
            ["sh", "-c", f"sleep {rng.random() * 1.5:.3f}; kill -9 {daemon.process.pid}"], start_new_session=True
        )
        with suppress(httpx.HTTPError):
            Asker(daemon.url).ask(asks())
        killer.wait()
        kill_everything(daemon)
    last = begin(start, folder)
    assert texts(Asker(last.url).ask(asks())) == expected
    found = verified(folder)
    assert not found["damaged"] and found["num_sound"], found
    assert sum(path.stat().st_size for path in folder.rglob("*.kv")) <= QUOTA_BYTES
