"""A real Prometheus scrapes two daemons under load, and answers every query of the dashboard and of the rules.

The embedded model gives data for the panels. A model that sleeps 20 ms a step has known latencies, which Prometheus and
the client must see alike.
"""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from inferd.server.auth.keys_file import digest_of, entry_of, entry_text
from tests.deploy.test_dashboard import shown_panels
from tests.e2e.conftest import Daemon, free_model
from tests.prometheus.test_rules import RULES, needs_promtool
from tests.reliability.conftest import wait_until

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus: apt-get install prometheus")

STEP_MS, NUM_STREAMS, NUM_TOKENS = 20, 8, 60
LOAD_S = 6
FACTOR = 2.0
"""Latencies of Prometheus and of the client differ at most by this factor. A bucket ends at up to 1.5 times its lower
bound, and a client also waits for HTTP."""
EMPTY = {"Busiest expert", "Sequences of adapters", "Recovery time"}
"""Panels without data under this load: there are no experts, no adapters and no lost engine."""
MAY_BE_EMPTY = {"Acceptance", "Drafts of a row", "Accepted draft tokens by place"}
"""Panels of drafts. Steps verify drafts only if that is faster, which depends on the machine."""

Latencies = tuple[list[float], list[float]]


class Prometheus:
    """One process with its data in a directory, which scrapes each daemon every second as a job."""

    def __init__(self, directory: Path, daemons: dict[str, Daemon]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        jobs = [
            {"job_name": job, "static_configs": [{"targets": [daemon.url.removeprefix("http://")]}]}
            for job, daemon in daemons.items()
        ]
        interval = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config = directory / "prometheus.yml"  # JSON is YAML
        config.write_text(json.dumps({"global": interval, "rule_files": [str(RULES)], "scrape_configs": jobs}))
        options = (f"--config.file={config}", f"--storage.tsdb.path={directory}", f"--web.listen-address={address}")
        self._http = httpx.Client(base_url=f"http://{address}", timeout=30)
        with (directory / "log").open("w") as log:
            self.process = subprocess.Popen(["prometheus", *options], stdout=log, stderr=log)
        wait_until(self._is_up)

    def _is_up(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        answer = self._http.get(f"/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def query(self, expression: str) -> list[float]:
        """The values of all series."""
        return [float(series["value"][1]) for series in self.get("query", query=expression)["result"]]

    def one(self, expression: str) -> float:
        """The value of the only series. A rule that was just loaded may not have been evaluated yet."""
        wait_until(lambda: bool(self.query(expression)))
        (value,) = self.query(expression)
        return value


@pytest.fixture
def prometheus(start: Callable[..., Daemon], tmp_path: Path) -> Iterator[tuple[Prometheus, Daemon, Latencies]]:
    """Prometheus after the loads, the daemon with the embedded model, and what a client measured of the other one."""
    keys = [entry_of(sha256=digest_of("sk-many").hex(), name="many", tenant="acme"),
            entry_of(sha256=digest_of("sk-few").hex(), name="few", requests_per_minute=1)]  # fmt: skip
    (tmp_path / "keys.yaml").write_text("keys:\n" + "".join(map(entry_text, keys)))
    options = ("--keys-file", str(tmp_path / "keys.yaml"), "--speculative", "suffix", "--tpot-target", "10s")
    served = start(*options, "--ttft-target", "60s", ready=False)
    paced = start(program=free_model(STEP_MS))
    served.wait_ready()
    made = Prometheus(tmp_path, {"inferd": served, "paced": paced})
    try:
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            streams = list(pool.map(lambda _: stream(paced.url), range(NUM_STREAMS)))
            list(pool.map(lambda _: ask_for(served.url, LOAD_S), range(3)))
        wait_until(lambda: made.query('inferd_generation_tokens_total{job="inferd"}') == [num_generated(served)])
        yield made, served, ([first for first, _ in streams], [gap for _, gaps in streams for gap in gaps])
    finally:
        made.process.kill()
        made.process.wait()


def num_generated(served: Daemon) -> float:
    return float(served.get("/metrics").text.partition("\ninferd_generation_tokens_total")[2].split()[1])


def stream(url: str) -> tuple[float, list[float]]:
    """Seconds to the first token of an answer, and between its tokens."""
    body = {"model": "tiny", "prompt": "Once", "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=60) as client:
        client.get("/live")  # connects, which the server does not see and a busy machine delays
        times = [time.monotonic()]
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if '"text"' in line:
                    times.append(time.monotonic())
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return gaps[0], gaps[1:]


def ask_for(url: str, seconds: float) -> None:
    """Ask one question after the other. Some have a target that no answer meets, and some are beyond their quota."""
    body = {"model": "tiny", "prompt": "one two three four " * 20, "max_tokens": 40, "temperature": 0}
    end_s = time.monotonic() + seconds
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.monotonic() < end_s:
            for key, headers in (("sk-many", {}), ("sk-many", {"X-SLO-TPOT-Ms": "0.1"}), ("sk-few", {})):
                client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}", **headers})


def agree(one: float, other: float) -> bool:
    return max(one, other) <= FACTOR * min(one, other)


@needs_promtool
def test_the_dashboard_the_rules_and_the_page_work(prometheus: tuple[Prometheus, Daemon, Latencies]) -> None:
    """One test, because each load takes seconds."""
    scraped, served, (firsts, gaps) = prometheus
    check_panels(scraped)
    check_rules(scraped)
    check_latencies(scraped, median(firsts), median(gaps))
    page = served.get("/metrics").content
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def check_panels(scraped: Prometheus) -> None:
    """Every query has an answer. Only panels of the two lists lack data, and shares are between 0 and 1."""
    empty = set()
    for panel in shown_panels():
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "10s")
            values = scraped.query(expression.replace("$job", "inferd").replace("$instance", ".*"))
            assert all(value == value and value >= 0 for value in values), (expression, values)
            assert max(values, default=0) <= panel["fieldConfig"]["defaults"].get("max", 1e30), (expression, values)
            if not values:
                empty.add(panel["title"])
    assert empty - MAY_BE_EMPTY == EMPTY


def check_rules(scraped: Prometheus) -> None:
    """Every rule was evaluated, and this load, which is refused and late in part, is no reason to call anyone yet."""
    rules = [rule for group in scraped.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 15
    assert {(rule["health"], rule.get("lastError", "")) for rule in rules} == {("ok", "")}
    assert not [rule["name"] for rule in rules if rule.get("state") == "firing"]
    assert 0 < scraped.one('inferd:slo_missed:ratio_rate5m{job="inferd", latency="tpot"}') < 1


def check_latencies(scraped: Prometheus, ttft_s: float, itl_s: float) -> None:
    """Medians, since the start. A wrong metric would be found: a first token takes a few steps, an answer all."""
    names = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    first, gap, whole = (
        scraped.one(f'histogram_quantile(0.5, inferd_{name}_seconds_bucket{{job="paced"}})') for name in names
    )
    print(f"TTFT {first:.4f} s (client {ttft_s:.4f}), ITL {gap:.4f} s (client {itl_s:.4f})")
    # A busy machine delays what the client sees. The first token still takes nothing like an answer.
    assert first <= FACTOR * ttft_s and not agree(first, NUM_TOKENS * itl_s), (first, ttft_s, itl_s)
    assert agree(gap, itl_s), (gap, itl_s)
    assert agree(gap, STEP_MS / 1e3)
    assert not agree(whole, ttft_s) and not agree(gap, NUM_TOKENS * itl_s)
