"""Shared by all tiers: `--long`, the order of files, and fixed samples of large parameter sets."""

from __future__ import annotations

import math
import os
import random
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from inferd.engine.api.process.garbage import collector_paused
from tests import forking
from tests.records import RECORDS
from tests.tiers import CACHE_HOME

ROOT = Path(__file__).resolve().parents[1]
KERNEL_CACHE = CACHE_HOME / "inferd" / "kernels"
"""Folder of the compiled C++ kernels, for tests and for the servers that they start."""

NO_AUTHORITIES = ROOT / "build" / "no_authorities"
"""An empty folder of certificate authorities, for the HTTP clients of the tests. They use no TLS, and reading the usual
list takes 20 ms of processor time a client."""
HTTP_WAIT_S = 60.0
"""Time that httpx waits for an answer if a test names none. Its own 5 s pass on a busy machine."""
FRESH = {"Cache-Control": "no-cache"}
"""Header of requests for /metrics and /state that must not be answered from the server's cache."""
LONGEST_FIRST = (
    "deploy/test_packaging", "benchmarks/test_gpu_runner", "cpu/test_over_http", "e2e/test_benchmark_scenarios",
    "e2e/test_benchmark_slo", "e2e/test_serve", "e2e/test_boundaries", "e2e/test_benchmark_overhead",
    "e2e/test_request_path", "prometheus/test_live", "e2e/test_structured", "e2e/test_clients",
    "reliability/test_kills",
    "reliability/test_hangs", "reliability/test_orphans", "reliability/test_ranks",
    "reliability/test_drain", "reliability/test_quarantine",
    "chaos/test_chaos", "reliability/test_standby", "security/test_hostile_checkpoints", "security/test_secrets",
    "security/test_egress", "security/test_fields", "security/test_recorded_answers",
)  # fmt: skip
"""Files that start first. Otherwise one process would still run a long file while the others are idle."""
PART_ELSEWHERE = 0.25
"""Part of the recorded tests that run if the record is of another processor."""
RECORDED = pytest.StashKey[str]()
"""Lines of the report about recorded tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a test that would be skipped fails")
    parser.addoption("--long", action="store_true", help="run every case of every test")
    parser.addoption("--recorded", choices=tuple(RECORDS), help="run only the tests of this record, and all of them")
    parser.addoption(
        "--kernels", choices=("cpp", "reference"), default="cpp", help="what computes in tests/cpu (default: cpp)"
    )
    parser.addoption(
        "--device",
        choices=("cpu", "interpreter", "cuda"),
        default="cpu",
        help="tests/kernels: all kernels on the CPU, or those of Triton alone, interpreted or on a GPU (default: cpu)",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ["XDG_CACHE_HOME"] = str(CACHE_HOME)
    DEFAULT_TIMEOUT_CONFIG.read = HTTP_WAIT_S
    NO_AUTHORITIES.mkdir(parents=True, exist_ok=True)
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = str(NO_AUTHORITIES)
    config.addinivalue_line(
        "markers",
        "sampled(keep, of=None, among=None): run `keep` of this test's cases, or of those whose `implementation` is"
        " `of`, always the same ones; all with --long. Tests with the same `among` are drawn from together",
    )
    config.addinivalue_line("markers", "long: run with --long only")
    config.addinivalue_line(
        "markers",
        "recorded(name, keep=1): `keep` such tests of a file run, unless what they are made of has changed since"
        " `make records`, or with --long; a quarter if that record is of another processor. `name`: of the record"
        " (records.py)",
    )
    config.addinivalue_line("markers", "browser: needs Chromium and Playwright; skipped by name without them")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With `--no-skips`, a test that lacks its tool fails with the reason."""
    report = yield
    if report.skipped and item.config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which --no-skips forbids: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Pause the garbage collector. It would take a sixth of the time, and collected tests stay anyway."""
    with collector_paused():
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(f"{item.path.parent.name}/{item.path.stem}", len(ranks)))
    if config.getoption("--long"):
        return
    dropped = {item for item in items if item.get_closest_marker("long")}
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker and marker.kwargs.get("of") in (None, _implementation(item)):
            groups[marker.kwargs.get("among") or item.nodeid.partition("[")[0]].append(item)
    for name, group in groups.items():
        marker = group[0].get_closest_marker("sampled")
        assert marker is not None
        kept = random.Random(name).sample(group, min(len(group), marker.kwargs["keep"]))
        dropped.update(set(group) - set(kept))
    dropped |= _left_out(config, [item for item in items if item not in dropped])
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def _left_out(config: pytest.Config, items: list[pytest.Item]) -> set[pytest.Item]:
    """Recorded tests that need not run, because nothing that they are made of has changed. Also notes their number for
    the report."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("recorded")
        if marker:
            groups[marker.args[0]].append(item)
    only = config.getoption("--recorded")
    if only:
        return set(items) - set(groups[only])
    left_out, told = set[pytest.Item](), list[str]()
    is_usual = config.getoption("--device") == "cpu" and config.getoption("--kernels") == "cpp"
    for name, recorded in groups.items():
        why_all = RECORDS[name].why_all()
        if not is_usual:
            why_all = "the record is of runs without --device and --kernels"
        elsewhere = RECORDS[name].elsewhere() if why_all and is_usual else ""
        kept = _kept(recorded, PART_ELSEWHERE if elsewhere else 0.0)
        more = set(recorded) - kept if elsewhere or not why_all else set[pytest.Item]()
        left_out |= more
        told.append(_told(name, len(recorded), len(more), why_all, elsewhere))
    if told:
        config.stash[RECORDED] = "\n".join(told)
    return left_out


def _kept(recorded: list[pytest.Item], part: float) -> set[pytest.Item]:
    """Recorded tests that run: of each file as many as its marker says or this part, always the same ones."""
    files: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in recorded:
        files[item.path].append(item)
    kept = set[pytest.Item]()
    for path, group in files.items():
        marker = group[0].get_closest_marker("recorded")
        assert marker is not None
        num_kept = max(marker.kwargs.get("keep", 1), math.ceil(part * len(group)))
        kept.update(random.Random(path.name).sample(group, min(len(group), num_kept)))
    return kept


def _told(name: str, num_recorded: int, num_left_out: int, why_all: str, elsewhere: str) -> str:
    if elsewhere:
        kept = num_recorded - num_left_out
        return (
            f"recorded tests of {name}: {kept} of {num_recorded}, because {elsewhere} is of another processor and the"
            f" same content. `make records` writes {RECORDS[name].file.name}"
        )
    if why_all:
        return f"recorded tests of {name}: all {num_recorded}, because {why_all}. `make records` writes it"
    kept = num_recorded - num_left_out
    return (
        f"recorded tests of {name}: {kept} of {num_recorded}, because nothing that they are made of has changed since"
        f" the last full run without a failure ({RECORDS[name].file.name}). `make long` and --long run all"
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends processes that tests share, and tells the first process of pytest-xdist, which collects no tests itself."""
    forking.end()
    if hasattr(session.config, "workeroutput") and RECORDED in session.config.stash:
        session.config.workeroutput["recorded"] = session.config.stash[RECORDED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    told = getattr(node, "workeroutput", {}).get("recorded")
    if told:
        node.config.stash[RECORDED] = told


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if RECORDED in config.stash:
        terminalreporter.write_line(config.stash[RECORDED])


def _implementation(item: pytest.Item) -> object:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("implementation") if callspec else None


@pytest.fixture(scope="session")
def is_long(request: pytest.FixtureRequest) -> bool:
    """Whether all cases run (`--long`)."""
    return bool(request.config.getoption("--long"))
