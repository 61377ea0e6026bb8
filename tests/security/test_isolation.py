"""S3: cached prefixes do not reveal to one tenant what another has asked, neither by counts nor by steps or time.

Every probe has a control that must be detected: the same question by a key of the same tenant.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import httpx
import pytest

from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request
from inferd.server.auth.keys_file import append_entry, digest_of, entry_of
from tests.conftest import FRESH
from tests.e2e.conftest import INFERD, Daemon, free_model
from tests.reliability.conftest import wait_until

KEYS = {"alice": "acme", "bob": "acme", "carol": None, "dave": None}
"""Name of a key -> its tenant. The name is also the key."""
ADMIN = "may-ask-for-fresh-metrics"
NUM_TOKENS = 192
LONG_TOKENS = 300
"""Tokens of a question that fills a segment of the KV directory."""
FIRST_ID, LAST_ID = 300, 3000
"""Ordinary tokens of the embedded model."""


def started(folder: Path, *options: str, program: tuple[str, ...] = (str(INFERD),)) -> Iterator[Daemon]:
    path = folder / "keys.yaml"
    for name, tenant in KEYS.items():
        append_entry(path, entry_of(sha256=digest_of(name).hex(), name=name, tenant=tenant))
    with_keys = ("--keys-file", str(path), "--admin-key", ADMIN, "--log-level", "warning")
    daemon = Daemon(*with_keys, *options, program=program)
    daemon.wait_ready()
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a free model for counts, and the real one for times."""
    program = (str(INFERD),) if request.config.getoption("--long") else free_model(0)
    yield from started(tmp_path_factory.mktemp("keys"), program=program)


@pytest.fixture(scope="module")
def tiered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Path]]:
    """A daemon whose prefixes also lie in a directory."""
    folder = tmp_path_factory.mktemp("tiered")
    for daemon in started(folder, "--kv-dir", str(folder / "kv"), "--kv-disk", "4GiB"):
        yield daemon, folder / "kv"


class Prober:
    """Asks questions of one length, and records everything that a client can see."""

    def __init__(self, daemon: Daemon, seed: int, num_tokens: int = NUM_TOKENS) -> None:
        self._http = httpx.Client(base_url=daemon.url, timeout=30)
        self._random, self._num_tokens = Random(seed), num_tokens

    def question(self) -> list[int]:
        """A question that nobody has asked."""
        return [self._random.randrange(FIRST_ID, LAST_ID) for _ in range(self._num_tokens)]

    def ask(self, key: str, prompt: list[int], salt: str | None = None) -> tuple[int, float]:
        """(tokens found in the cache, seconds)."""
        body = {"prompt": prompt, "max_tokens": 1, "seed": 0, **({"cache_salt": salt} if salt else {})}
        began_s = time.perf_counter()
        answer = self._http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        took_s = time.perf_counter() - began_s
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], took_s

    def leave_below(self, key: str, prompt: list[int], folder: Path) -> None:
        """Ask a question, so that its prefix lies in the directory alone."""
        before = set(folder.rglob("*.kv"))
        self.ask(key, prompt)
        wait_until(lambda: set(folder.rglob("*.kv")) > before, what="a segment in the directory")
        self._http.post("/reset_prefix_cache", headers={"Authorization": f"Bearer {ADMIN}"}).raise_for_status()

    def steps(self) -> int:
        """Number of steps that the engine has made."""
        return self.count("inferd_engine_steps_total")

    def count(self, name: str) -> int:
        page = self._http.get("/metrics", headers={**FRESH, "Authorization": f"Bearer {ADMIN}"}).text
        found = re.search(rf"^{name}\S* (\S+)$", page, re.MULTILINE)
        assert found is not None
        return int(float(found[1]))

    def steps_of(self, ask: Callable[[], object]) -> int:
        before = self.steps()
        ask()
        return self.steps() - before


def auc(left: list[float], right: list[float]) -> float:
    """AUC, from 0.5 to 1: how often one of `left` is less than one of `right`. At 0.5 they cannot be distinguished."""
    wins = sum((a < b) + 0.5 * (a == b) for a in left for b in right) / (len(left) * len(right))
    return max(wins, 1.0 - wins)


def test_s3_counts_tell_a_tenant_what_is_its_own_and_nothing_of_others(served: Daemon) -> None:
    prober = Prober(served, 1)
    for _ in range(3):
        prompt = prober.question()
        assert prober.ask("alice", prompt)[0] == 0
        assert prober.ask("carol", prompt)[0] == 0, "another key is another tenant"
        assert prober.ask("dave", prompt)[0] == 0
        assert prober.ask("bob", prompt)[0] > NUM_TOKENS // 2, "the control: the same tenant"
        assert prober.ask("carol", prompt)[0] > NUM_TOKENS // 2, "and oneself"
        assert prober.ask("bob", prompt, salt="mine")[0] == 0, "a salt keeps apart within a tenant"
        for key, salt in (("carol", "acme"), ("carol", "alice"), ("carol", digest_of("alice").hex()[:32])):
            assert prober.ask(key, prompt, salt)[0] == 0, "no salt reaches into another tenant"


def test_s3_what_another_has_asked_takes_as_many_steps_as_what_nobody_has(served: Daemon) -> None:
    prober = Prober(served, 2)
    seen, unseen = prober.question(), prober.question()
    prober.ask("alice", seen)
    assert prober.steps_of(lambda: prober.ask("carol", seen)) == prober.steps_of(lambda: prober.ask("carol", unseen))


@pytest.mark.long
def test_s3_time_tells_nothing_of_others(served: Daemon) -> None:
    """AUC of distinguishing questions that the other tenant has asked from new ones. For the control it is near 1."""
    prober, rounds = Prober(served, 3), 1_500
    for _ in range(20):
        prober.ask("carol", prober.question())
    for prober_key, most, least in (("carol", 0.55, 0.0), ("bob", 1.0, 0.9)):
        hits: list[float] = []
        misses: list[float] = []
        for number in range(rounds):
            seen, unseen = prober.question(), prober.question()
            prober.ask("alice", seen)
            # In turn, so that a drift of the machine is no difference.
            for prompt, times in ((seen, hits), (unseen, misses))[:: 1 if number % 2 else -1]:
                times.append(prober.ask(prober_key, prompt)[1])
        told = auc(hits, misses)
        print(f"S3: AUC {told:.3f} for {prober_key}, {rounds} questions each")
        assert least <= told < most or told == most == 1.0


def test_s3_a_directory_tells_a_tenant_nothing_of_others(tiered: tuple[Daemon, Path]) -> None:
    """Neither by counts nor by steps: what another has asked lies there, and not in memory."""
    (daemon, folder), loaded = tiered, "inferd_kv_tier_tokens_total"
    prober = Prober(daemon, 4, LONG_TOKENS)
    for _ in range(2):
        seen, unseen = prober.question(), prober.question()
        prober.leave_below("alice", seen, folder)
        before = prober.count(loaded)
        told = [(prober.steps(), prober.ask("carol", prompt)[0], prober.steps()) for prompt in (seen, unseen)]
        assert [num_cached for _, num_cached, _ in told] == [0, 0] and prober.count(loaded) == before
        assert len({after - first for first, _, after in told}) == 1, "as many steps"
        assert prober.ask("bob", seen, salt="mine")[0] == 0 and prober.count(loaded) == before
        assert prober.ask("bob", seen)[0] > LONG_TOKENS // 2, "the control: the same tenant"
        assert prober.count(loaded) > before, "it came from the directory"


@pytest.mark.long
def test_s3_time_tells_nothing_of_what_others_have_in_a_directory(tiered: tuple[Daemon, Path]) -> None:
    """AUC as above, with all prefixes of the other tenant in the directory alone."""
    daemon, folder = tiered
    prober, rounds = Prober(daemon, 5, LONG_TOKENS), 1_000
    for _ in range(20):
        prober.ask("carol", prober.question())
    for prober_key, most, least in (("carol", 0.55, 0.0), ("bob", 1.0, 0.9)):
        hits: list[float] = []
        misses: list[float] = []
        for number in range(rounds if prober_key == "carol" else rounds // 10):
            seen, unseen = prober.question(), prober.question()
            prober.leave_below("alice", seen, folder)
            for prompt, times in ((seen, hits), (unseen, misses))[:: 1 if number % 2 else -1]:
                times.append(prober.ask(prober_key, prompt)[1])
        told = auc(hits, misses)
        print(f"S3: AUC {told:.3f} for {prober_key}, {len(hits)} questions each, from the directory")
        assert least <= told < most or told == most == 1.0


def test_a_collision_of_hashes_crosses_no_salt() -> None:
    """A cache in which all blocks have the same hash, so that only salt, prefix and ids decide."""
    cache = KVCache(64, 4, hash_block=lambda parent_key, payload: b"")
    ids = tuple(range(17))

    def hits(salt: str) -> int:
        params = SamplingParams(max_tokens=1, seed=0)
        request = Request.create("r", ids, params, SchedulingParams(cache_salt=salt), max_model_len=64)
        table = cache.open(request)
        match = table.match()
        assert table.admit(match, len(ids))
        request.admit(match.num_tokens, 0.0)
        request.launch(len(ids) - match.num_tokens)
        request.apply(match.num_tokens, len(ids) - match.num_tokens, (1,))
        table.commit(len(ids))
        table.release()
        cache.close(table)
        return match.num_tokens

    assert hits("one") == 0
    assert hits("one") > 0
    assert hits("two") == 0
