"""The keys file: refusals and their messages, changes while the server runs, and quotas over HTTP."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from inferd.engine.api.errors import ConfigError, RequestError
from inferd.server.auth.keyring import Keyring
from inferd.server.auth.keys_file import (
    KEY_PREFIX,
    KeyEntry,
    append_entry,
    digest_of,
    entry_of,
    new_key,
    parse_keys,
    read_keys,
)
from inferd.server.auth.quotas import KeyAccount, Quota
from inferd.server.commands.app import app
from inferd.server.config.settings import Settings
from inferd.server.config.sources import read_yaml
from inferd.server.lifecycle.models import read_models
from inferd.server.observability.metrics import Metrics
from tests.api.conftest import Script, ScriptedRouter, app_settings, model, router, serve, shared_router

__all__ = ["model", "router", "serve", "shared_router"]

TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hello there"}
ONE, TWO, THREE = "sk-one", "sk-two", "sk-three"


def entry(key: str, **fields: Any) -> KeyEntry:
    return entry_of(**{"sha256": digest_of(key).hex(), "name": key.removeprefix("sk-"), **fields})


def written(path: Path, *entries: KeyEntry) -> Path:
    path.write_text(json.dumps({"keys": [one.model_dump() for one in entries]}))
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# -- the file ----------------------------------------------------------------------------------------------------------

_DIGEST = digest_of(ONE).hex()


class Compared(str):
    """A text that counts its comparisons."""

    num = 0

    def __eq__(self, other: object) -> bool:
        type(self).num += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_mapping_of_many_names_is_read_in_linear_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file is read while requests run, and 4 MiB have room for 400,000 names."""
    composed = yaml.SafeLoader.compose_scalar_node

    def compose(loader: yaml.SafeLoader, anchor: str | None) -> yaml.ScalarNode:
        node = composed(loader, anchor)
        node.value = Compared(node.value)
        return node

    monkeypatch.setattr(yaml.SafeLoader, "compose_scalar_node", compose)
    with pytest.raises(ConfigError, match="expected `keys:`"):
        parse_keys("".join(f"k{i}: 1\n" for i in range(500)).encode(), tmp_path)
    assert Compared.num < 10_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected `keys:`"),
        ("- 1\n", "the keys file"),
        ("keys: [\n", "line 2"),
        (f"keys:\n  - sha256: {_DIGEST}\n", "keys.1.name: the entry needs this field"),
        ("keys:\n  - sha256: abc\n    name: a\n", "64 hexadecimal digits"),
        (
            f"keys:\n  - sha256: {_DIGEST}\n    name: a\n    wieght: 2\n",
            "keys.1.wieght: there is no such field; an entry may have sha256, name, tenant, weight",
        ),
        (f"keys:\n  - sha256: {_DIGEST}\n    name: a\n    weight: 0\n", "keys.1.weight"),
        (f"keys:\n  - sha256: {_DIGEST}\n    name: a\n    weight: 1.0e-7\n", "keys.1.weight"),
        (f"keys:\n  - sha256: {_DIGEST}\n    name: a\n    weight: .nan\n", "keys.1.weight"),
        (f"keys:\n  - sha256: {_DIGEST}\n    name: a\n    requests_per_minute: -1\n", "keys.1.requests_per_minute"),
        (f"keys:\n  - sha256: {_DIGEST}\n    name: a\n    tokens_per_minute: 1.5\n", "keys.1.tokens_per_minute"),
        (f"keys:\n  - sha256: {_DIGEST}\n    name: a\n    name: b\n", "'name' appears twice"),
        (f"keys:\n  - &a {{sha256: {_DIGEST}, name: a}}\n  - *a\n", "aliases are not allowed"),
        (f"keys:\n  - {{sha256: {_DIGEST}, name: a}}\n  - {{sha256: {_DIGEST}, name: b}}\n", "are the same key"),
        (
            f"keys:\n  - {{sha256: {_DIGEST}, name: a}}\n  - {{sha256: {'f' * 64}, name: a}}\n",
            "two keys have the name",
        ),
        ("keys: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        (f"keys:\n  - sha256: {_DIGEST}\n    name: 2024-02-30\n", "a value that YAML cannot read; put it in quotes"),
        (
            f"keys:\n  - sha256: {_DIGEST}\n    name: !!timestamp soon\n",
            "a value that YAML cannot read; put it in quotes",
        ),
        (f"keys:\n  - {{sha256: {_DIGEST}, name: a, tenant: other}}\n", "keys.1.tenant: is the label of all tenants"),
        ("keys: " + "[" * 5_000 + "]" * 5_000, "nested too deeply"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="keys file") as refused:
        read_keys(path)
    assert said in str(refused.value)
    assert _DIGEST not in str(refused.value)
    assert len(str(refused.value)) < 600


def test_one_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"keys: \xff\n")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 6"):
        read_keys(tmp_path / "bytes")


def test_a_bad_file_ends_the_start_before_anything_is_loaded(tmp_path: Path) -> None:
    settings = Settings(keys_file=str(tmp_path / "none"), model=str(tmp_path / "no model"))
    with pytest.raises(ConfigError, match="cannot read the keys file"):
        read_models(settings)[0]
    assert Settings(keys_file="keys.yaml", host="0.0.0.0"), "a keys file is what other machines need"


def test_a_tenant_has_one_weight(tmp_path: Path) -> None:
    entries = (entry(ONE, tenant="t", weight=2.0), entry(TWO, tenant="t", weight=3.0))
    with pytest.raises(ConfigError, match="weights 2 and 3; give them one weight"):
        read_keys(written(tmp_path / "keys", *entries))


def test_the_command_makes_what_the_server_reads(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    made = []
    for name in ("alice", "yes", 'caf\u00e9 "1"'):
        result = CliRunner().invoke(app, ["keys", "new", name, "--file", str(path), "--tokens-per-minute", "500"])
        assert result.exit_code == 0, result.output
        made.append(next(line for line in result.output.splitlines() if line.startswith(KEY_PREFIX)))
    entries = read_keys(path)
    assert [one.name for one in entries] == ["alice", "yes", 'caf\u00e9 "1"']
    assert [one.digest for one in entries] == [digest_of(key) for key in made]
    assert {one.tokens_per_minute for one in entries} == {500}
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert all(key not in text for key in made)
    with pytest.raises(ConfigError, match="two keys have the name 'alice'"):
        append_entry(path, entry(ONE, name="alice"))
    assert path.read_text() == text, "what was refused changed nothing"
    assert len({new_key() for _ in range(100)}) == 100


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    append_entry(path, entry(ONE))
    os.chown(path, 12, 34)
    append_entry(path, entry(TWO))
    status = path.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (12, 34, 0o600)
    assert os.listdir(tmp_path) == ["keys"]


def test_who_adds_a_key_waits_for_who_adds_another(tmp_path: Path) -> None:
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    adding = threading.Thread(target=append_entry, args=(tmp_path / "keys", entry(ONE)))
    adding.start()
    adding.join(0.3)
    assert adding.is_alive() and not (tmp_path / "keys").exists()
    os.close(other)
    adding.join()
    assert len(read_keys(tmp_path / "keys")) == 1


# -- reading it again --------------------------------------------------------------------------------------------------


def test_a_change_is_taken_whole_and_a_bad_one_not_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, read = written(tmp_path / "keys", entry(ONE)), list[tuple[int, bool]]()
    keyring = Keyring((THREE,), (), path, lambda num_keys, is_good: read.append((num_keys, is_good)))
    assert keyring.find(ONE) and keyring.find(THREE) and not keyring.find(TWO)
    written(path, entry(TWO))
    os.utime(path, ns=(1, 1))
    asyncio.run(keyring.look())
    assert keyring.find(TWO) and keyring.find(THREE) and not keyring.find(ONE)
    path.write_text("keys: [")
    with caplog.at_level(logging.ERROR, "inferd.keys"):
        for _ in range(3):
            asyncio.run(keyring.look())
    assert keyring.find(TWO) and not keyring.find(ONE)
    assert [
        record.getMessage().endswith("the 1 keys that were read before stay valid") for record in caplog.records
    ] == [True]
    path.unlink()
    for _ in range(2):
        asyncio.run(keyring.look())
    assert keyring.find(TWO)
    other = written(tmp_path / "other", entry(ONE), entry(TWO))
    path.symlink_to(other)
    asyncio.run(keyring.look())
    assert keyring.find(ONE) and keyring.find(TWO)
    assert read == [(1, True), (1, True), (1, False), (1, False), (2, True)]


def test_what_nobody_expected_is_told_and_the_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, read = written(tmp_path / "keys", entry(ONE)), list[tuple[int, bool]]()
    was_read = asyncio.Event()

    def on_read(num_keys: int, is_good: bool) -> None:
        read.append((num_keys, is_good))
        was_read.set()

    keyring = Keyring((), (), path, on_read)

    def refuse(path: Path) -> tuple[KeyEntry, ...]:
        raise RuntimeError("a fault of ours")

    async def scene() -> None:
        watch = asyncio.create_task(keyring.watch(0.001))
        with monkeypatch.context() as patch:
            patch.setattr("inferd.server.auth.keyring.read_keys", refuse)
            os.utime(path, ns=(1, 1))
            was_read.clear()
            await asyncio.wait_for(was_read.wait(), 20)
        os.utime(path, ns=(2, 2))
        was_read.clear()
        await asyncio.wait_for(was_read.wait(), 20)
        watch.cancel()

    asyncio.run(scene())
    assert read == [(1, True), (1, False), (1, True)]
    assert any(record.exc_info for record in caplog.records)


NOT_FILES: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a link to a FIFO": lambda path: (os.mkfifo(path.with_name("fifo")), path.symlink_to(path.with_name("fifo"))),
    "a directory": Path.mkdir,
    "a device that never ends": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to(os.ttyname(pty.openpty()[1])),
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "a link to itself": lambda path: path.symlink_to(path),
    "too much": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40),
}


@pytest.mark.parametrize("make", NOT_FILES.values(), ids=NOT_FILES)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], object]
) -> None:
    """A bad file at the start, or in place of the first one. The next good file is read."""
    path = tmp_path / "keys"
    make(path)
    for read in (read_keys, lambda path: read_yaml(path, ()), lambda path: append_entry(path, entry(ONE))):
        with pytest.raises(ConfigError):
            read(path)
    path.rename(tmp_path / "odd")
    keyring = Keyring((), (), written(path, entry(ONE)))
    path.unlink()
    (tmp_path / "odd").rename(path)
    for _ in range(3):
        asyncio.run(keyring.look())
    assert keyring.find(ONE)
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) <= 1
    path.rename(tmp_path / "gone")
    written(path, entry(TWO))
    asyncio.run(keyring.look())
    assert keyring.find(TWO) and not keyring.find(ONE)


def test_a_file_that_could_not_be_read_is_tried_again_at_each_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same file is read again, because the error was not in its content."""
    path = written(tmp_path / "keys", entry(ONE))
    keyring = Keyring((), (), path)
    written(path, entry(TWO))
    os.utime(path, ns=(1, 1))

    def refuse(path: Path, num_bytes: int) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("inferd.server.auth.keys_file.read_regular", refuse)
        for _ in range(3):
            asyncio.run(keyring.look())
    assert keyring.find(ONE) and not keyring.find(TWO)
    assert len(caplog.records) == 1, "said once"
    asyncio.run(keyring.look())
    assert keyring.find(TWO) and not keyring.find(ONE)


def test_a_file_that_does_not_answer_is_reported_and_read_once_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading hangs, as on a network mount."""
    monkeypatch.setattr("inferd.server.auth.keyring.OVERDUE_S", 0.01)
    path, ages = written(tmp_path / "keys", entry(ONE)), list[float]()
    reported, answers = asyncio.Event(), threading.Event()

    def on_age(age_s: float) -> None:
        ages.append(age_s)
        if caplog.records:
            reported.set()

    keyring = Keyring((), (), path, on_age=on_age)
    stat = Path.stat

    def hang(self: Path, **options: Any) -> os.stat_result:
        if self == path:
            assert answers.wait(20)
        return stat(self, **options)

    async def scene() -> None:
        looking = asyncio.create_task(keyring.look(0.005))
        await asyncio.wait_for(reported.wait(), 20)
        assert keyring.find(ONE)
        written(path, entry(TWO))
        os.utime(path, ns=(1, 1))
        answers.set()
        await asyncio.wait_for(looking, 20)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", hang)
        asyncio.run(scene())
    assert keyring.find(TWO) and not keyring.find(ONE)
    assert [record.levelname for record in caplog.records if record.levelno >= logging.WARNING] == ["ERROR", "WARNING"]
    assert max(ages) > 0.01, "it grows while nothing is known"
    assert ages[-1] < max(ages)


def test_keys_age_while_the_file_is_wrong(tmp_path: Path) -> None:
    path, ages = written(tmp_path / "keys", entry(ONE)), list[float]()
    keyring = Keyring((), (), path, on_age=ages.append)
    asyncio.run(keyring.look())
    path.write_text("keys: [")
    for _ in range(3):
        asyncio.run(keyring.look())
    assert ages[0] < 1e-3 < ages[-1] or ages[0] < ages[1] < ages[2] < ages[3]
    written(path, entry(ONE))
    os.utime(path, ns=(1, 1))
    asyncio.run(keyring.look())
    assert ages[-1] < ages[-2]


HANGS = """
import asyncio, pathlib, sys, threading
from inferd.server.auth.keyring import Keyring

path = pathlib.Path(sys.argv[1])
keyring = Keyring((), (), path)
stat, hung = pathlib.Path.stat, threading.Event()

def hang(self, **options):
    hung.set()
    threading.Event().wait()

async def main():
    watching = asyncio.create_task(keyring.watch(0.001))
    pathlib.Path.stat = hang
    await asyncio.to_thread(hung.wait)
    watching.cancel()

asyncio.run(main())
print("ended")
"""


def test_a_file_that_never_answers_keeps_no_server_from_ending(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", entry(ONE))
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_what_was_used_outlives_a_reload(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", entry(ONE, requests_per_minute=4))
    keyring = Keyring((), (), path)
    holder = keyring.find(ONE)
    assert holder is not None and holder.account is not None
    holder.account.enter()
    holder.account.enter()
    written(path, entry(ONE, requests_per_minute=2, weight=2.0))
    os.utime(path, ns=(1, 1))
    asyncio.run(keyring.look())
    again = keyring.find(ONE)
    assert again is not None and again.account is holder.account
    assert again.weight == 2.0
    again.account.enter()
    with pytest.raises(RequestError, match="limit 2"):
        again.account.enter()


def test_a_lower_quota_locks_nobody_out() -> None:
    """Half of 1,000,000 tokens per minute is used. With 1,000 per minute, that debt would last eight hours."""
    account = KeyAccount(Quota(tokens_per_minute=1_000_000), lambda: 0.0)
    account.take(500_000)
    account.apply(Quota(tokens_per_minute=1_000))
    account.take(500)
    account.owe(500)
    account.apply(Quota(tokens_per_minute=10))
    assert account.headers()["x-ratelimit-reset-tokens"] == "1m30s", "and what is owed is worth as long as before"


def test_tenants_are_apart_whatever_they_are_called(tmp_path: Path) -> None:
    alone = digest_of(ONE).hex()[:32]
    entries = (entry(ONE), entry(TWO, tenant="one"), entry(THREE, tenant=alone), entry("sk-4", tenant="one"))
    names: dict[str, str] = {}
    keyring = Keyring((), (), written(tmp_path / "keys", *entries), on_tenants=names.update)
    holders = [keyring.find(key) for key in (ONE, TWO, THREE, "sk-4")]
    tenants = [holder.tenant for holder in holders if holder is not None]
    assert tenants[1] == tenants[3]
    assert len(set(tenants)) == 3
    assert [(holder.tenant, holder.tenant in names) for holder in holders if holder is not None] == [
        (tenant, True) for tenant in tenants
    ]
    assert list(names.values()) == ["one", "one", alone], "in the file's order, and a lone key by its own name"
    assert all("one" not in tenant for tenant in tenants), "what becomes a salt does not show a name"


# -- quotas ------------------------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_fills_evenly_and_says_when() -> None:
    clock = Clock()
    account = KeyAccount(Quota(requests_per_minute=60), clock)
    for _ in range(60):
        account.enter()
        account.leave()
    with pytest.raises(RequestError, match=r"limit 60, remaining 0. Please try again in [12]s") as refused:
        account.enter()
    assert (refused.value.code, refused.value.retry_after_s) == ("rate_limit_exceeded", pytest.approx(1.0))
    clock.now += 1.0
    account.enter()
    with pytest.raises(RequestError):
        account.enter()
    clock.now += 3600.0
    assert account.headers() == {
        "x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "60", "x-ratelimit-reset-requests": "0ms",
    }  # fmt: skip


def test_tokens_are_taken_before_and_owed_after() -> None:
    clock = Clock()
    account = KeyAccount(Quota(tokens_per_minute=600), clock)
    with pytest.raises(RequestError, match="it will never fit"):
        account.take(601)
    account.take(500)
    with pytest.raises(RequestError, match=r"limit 600, remaining 100\. Please try again in (1\d|20)s"):
        account.take(200)
    account.owe(400)
    assert account.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert account.headers()["x-ratelimit-reset-tokens"] == "1m30s"
    with pytest.raises(RequestError, match="tokens per min") as refused:
        account.enter()
    assert refused.value.retry_after_s == pytest.approx(30.1)
    clock.now += 31.0
    account.enter()


def test_part_of_a_request_and_part_of_a_token_let_nothing_in() -> None:
    """A bucket that is not empty may hold less than one request."""
    clock = Clock()
    requests = KeyAccount(Quota(requests_per_minute=60), clock)
    tokens = KeyAccount(Quota(tokens_per_minute=60), clock)
    for _ in range(60):
        requests.enter()
        requests.leave()
    tokens.take(60)
    for seconds in (0.5, 0.499):
        clock.now += seconds
        for account in (requests, tokens):
            with pytest.raises(RequestError, match="remaining 0"):
                account.enter()
    clock.now += 0.0011
    requests.enter()
    tokens.enter()


def test_concurrency_counts_what_is_not_over() -> None:
    account = KeyAccount(Quota(concurrent_requests=2))
    account.enter()
    account.enter()
    with pytest.raises(RequestError, match="2 requests running") as refused:
        account.enter()
    assert refused.value.code == "slow_down"
    account.leave()
    account.enter()


# -- on the wire -------------------------------------------------------------------------------------------------------


@pytest.fixture
def locked(tmp_path: Path, serve: Callable[..., str]) -> tuple[str, Path, Metrics]:
    """A server with a keys file, which it checks every second."""
    path = tmp_path / "keys"
    for one in (entry(ONE, requests_per_minute=3, tokens_per_minute=40), entry(TWO, weight=4.0)):
        append_entry(path, one)
    metrics = Metrics("tiny")
    return serve(app_settings(keys_file=path, access_log=False), metrics=metrics), path, metrics


def ask(url: str, key: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={**TEXT, **fields}, headers=bearer(key), timeout=20)


def test_keys_of_the_file_open_and_quotas_refuse(locked: tuple[str, Path, Metrics], router: ScriptedRouter) -> None:
    url, _, metrics = locked
    router.will(Script(text="hi"))
    assert ask(url, "wrong").status_code == 401
    assert httpx.post(f"{url}/v1/completions", json=TEXT).status_code == 401
    first = ask(url, ONE)
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    left = int(first.headers["x-ratelimit-remaining-tokens"])
    num_prompt, num_output = first.json()["usage"]["prompt_tokens"], first.json()["usage"]["completion_tokens"]
    assert 40 - num_prompt - num_output <= left <= 40 - num_prompt + 1
    assert "x-ratelimit-limit-requests" not in ask(url, TWO).headers
    assert httpx.get(f"{url}/v1/models", headers=bearer(ONE)).status_code == 200, "what reads no prompt is not counted"
    for _ in range(2):
        ask(url, ONE)
    refused = ask(url, ONE)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert error["message"].endswith(f"Please try again in {refused.headers['retry-after']}s.")
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    first, second = (submit.scheduling for submit in router.submits[:2])
    assert (first.tenant, first.weight) != (second.tenant, second.weight)
    assert second.weight == 4.0
    assert first.tenant == first.cache_salt
    assert ask(url, TWO, model="none").status_code == 404
    assert metrics.tenant_refused.values == {("one", "rate_limit_exceeded"): 1, ("two", "model_not_found"): 1}
    page = httpx.get(f"{url}/metrics").text
    assert 'inferd_tenant_requests_waiting{model_name="tiny",tenant="two"} 0.0' in page


def test_a_prompt_beyond_the_tokens_left_is_refused_and_not_submitted(
    locked: tuple[str, Path, Metrics], router: ScriptedRouter
) -> None:
    url, _, _ = locked
    refused = ask(url, ONE, prompt=[1] * 41)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "41 tokens" in refused.json()["error"]["message"]
    embedded = httpx.post(f"{url}/v1/embeddings", json={"input": [1] * 41}, headers=bearer(ONE))
    assert embedded.status_code == 429
    assert router.submits == []


def test_a_running_server_takes_a_new_file_and_keeps_the_old_from_a_bad_one(
    locked: tuple[str, Path, Metrics], router: ScriptedRouter
) -> None:
    del router
    url, path, metrics = locked
    append_entry(path, entry(THREE))
    wait_until(lambda: ask(url, THREE).status_code == 200)
    assert ask(url, TWO).status_code == 200
    path.write_text("keys: [")
    wait_until(lambda: metrics.key_readings.values.get(("refused",)) == 1.0)
    assert ask(url, THREE).status_code == 200
    page = httpx.get(f"{url}/metrics").text
    assert 'inferd_keys_file_readings_total{outcome="refused"} 1.0' in page
    assert "inferd_keys 3.0" in page


def test_at_most_so_many_at_a_time_in_the_background_too(
    tmp_path: Path, serve: Callable[..., str], router: ScriptedRouter
) -> None:
    path = written(tmp_path / "keys", entry(ONE, concurrent_requests=2))
    url = serve(app_settings(keys_file=path, access_log=False))
    router.will(Script(ends=False), Script(ends=False), Script(text="done"))
    started = [
        httpx.post(f"{url}/v1/responses", json={"input": "hi", "background": True}, headers=bearer(ONE)).json()
        for _ in range(2)
    ]
    assert ask(url, ONE).json()["error"]["code"] == "slow_down"
    httpx.post(f"{url}/v1/responses/{started[0]['id']}/cancel", headers=bearer(ONE))
    assert ask(url, ONE).status_code == 200
    httpx.post(f"{url}/v1/responses/{started[1]['id']}/cancel", headers=bearer(ONE))


def wait_until(fact: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)
