"""R20: durations are measured with the monotonic clock. The wall clock, which people and services set, is used for
dates only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

DATES = {
    "server/text/model.py": "when a model was loaded, as `created`",
    "server/dispatch/adapter_places.py": "when an adapter was loaded, as `created`",
    "server/observability/metrics.py": "the value of `vllm:lora_requests_info`",
    "server/observability/tracing.py": "the times of spans",
    "server/endpoints/gateways.py": "the `timestamp` of /v1/loads",
    "server/endpoints/chunks.py": "an answer's `created`",
    "server/endpoints/scores.py": "an answer's `created`",
    "server/endpoints/responses/open_response.py": "an answer's `created_at` and `completed_at`",
    "server/commands/cache.py": "when a file was last used, for people",
    "server/commands/kv.py": "when segments were last used, for people",
    "server/commands/bench/report.py": "the date of a report",
    "engine/api/wire/kv_publisher.py": "the time of a batch, and the first sequence number",
    "engine/api/smollm2.py": "the age of files, whose times are the wall clock's",
    "engine/api/kv_store/listing.py": "the age of files, whose times are the wall clock's",
    "kernels/cpu/library.py": "the age of files, whose times are the wall clock's",
    "server/endpoints/embedding_dialects.py": "the time of an answer",
}
"""File -> its purpose, for files that may read the wall clock."""

_OF_TIME = frozenset({"time", "time_ns", "ctime", "localtime", "gmtime", "asctime", "strftime"})
_OF_DATETIME = frozenset({"now", "utcnow", "today"})


def wall_clocks(source: str) -> Iterator[int]:
    """Lines that read the wall clock, or import a function that reads it."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=name) if name in _OF_TIME:
                yield node.lineno
            case ast.Attribute(value=ast.Name(id="datetime" | "date"), attr=name) if name in _OF_DATETIME:
                yield node.lineno
            case ast.Attribute(attr="CLOCK_REALTIME"):
                yield node.lineno
            case ast.ImportFrom(module="time", names=names) if _OF_TIME & {alias.name for alias in names}:
                yield node.lineno
            case ast.Import(names=names) if any(each.name in ("time", "datetime") and each.asname for each in names):
                yield node.lineno


def test_nothing_is_timed_by_the_wall_clock() -> None:
    found = {
        str(file.relative_to(ROOT)): lines
        for room in ("server", "engine", "kernels")
        for file in sorted((ROOT / room).rglob("*.py"))
        if (lines := list(wall_clocks(file.read_text())))
    }
    assert set(found) == set(DATES), f"by lines: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "import time\nlater = time.time() + 5",
        "import time\nclock = time.time_ns",
        "from time import time",
        "import time as t",
        "from datetime import UTC, datetime\ndatetime.now(UTC)",
        "import time\ntime.clock_gettime(time.CLOCK_REALTIME)",
    ],
)
def test_the_gate_sees(source: str) -> None:
    assert list(wall_clocks(source))


def test_the_gate_lets_the_monotonic_clock_pass() -> None:
    assert not list(wall_clocks("import time\ntime.monotonic() + time.perf_counter() + time.clock_gettime(1)"))
