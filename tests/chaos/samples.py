"""What a server's processes hold at a moment, as the system and the server itself tell it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import psutil

from tests.chaos.client import Client

ENGINE = "inferd.engine.process.boot"
"""What the command line of an engine process holds."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process."""

    rss_bytes: int
    pss_bytes: int
    """Memory, with what is shared divided among those who share it: also changed by others' starts and ends."""
    private_bytes: int
    """Memory that is this process's alone."""
    num_fds: int
    num_threads: int
    num_sockets: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Of a server and its engine."""

    at_s: float
    """Since the load began."""
    is_rest: bool
    """Taken while nothing was asked, and after all that was asked had ended."""
    server: Usage
    engine: Usage
    num_tasks: int
    """Of the server's event loop."""
    num_blocks_used: int
    num_open: int
    """Requests that the load generator waits for."""
    num_asked: int
    """Requests that were over."""


def engine_of(server: psutil.Process) -> psutil.Process | None:
    """The server's newest engine process; None where it has none now."""
    found = [child for child in server.children() if _is_engine(child)]
    return max(found, key=lambda child: child.create_time(), default=None)


def _is_engine(process: psutil.Process) -> bool:
    try:
        return ENGINE in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def usage_of(process: psutil.Process) -> Usage:
    """Raises `psutil.NoSuchProcess`."""
    with process.oneshot():
        memory = process.memory_full_info()
        sockets = process.net_connections(kind="all")
        return Usage(memory.rss, memory.pss, memory.uss, process.num_fds(), process.num_threads(), len(sockets))


async def take(
    server: psutil.Process, client: Client, at_s: float, num_open: int, num_asked: int, *, is_rest: bool
) -> Sample:
    """One sample. Raises `psutil.NoSuchProcess` and `httpx.HTTPError` where a process is not there."""
    engine = engine_of(server)
    if engine is None:
        raise psutil.NoSuchProcess(server.pid, msg="it has no engine")
    num_tasks = int(metric(await client.text("/metrics"), "inferd_asyncio_tasks"))
    used = (await client.state())["kv_cache"]["used"]
    return Sample(at_s, is_rest, usage_of(server), usage_of(engine), num_tasks, used, num_open, num_asked)


def metric(page: str, name: str) -> float:
    """A sample of the metrics page, of the first series where there are several."""
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    assert found is not None, f"the metrics page has no {name}"
    return float(found[1])
