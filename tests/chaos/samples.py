"""Samples of what a server's processes hold, as the system and the server report it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import psutil

from tests.chaos.client import Client

ENGINE = "inferd.engine.process.boot"
"""Part of the command line of an engine process."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory, descriptors and threads of one process."""

    rss_bytes: int
    pss_bytes: int
    """Memory, with shared memory divided among the sharing processes: it also changes when others start and end."""
    private_bytes: int
    """Memory that only this process has."""
    num_fds: int
    num_threads: int
    num_sockets: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample of a server and its engine."""

    at_s: float
    """Seconds since the load began."""
    is_rest: bool
    """Whether it was taken at rest: no requests came, and all earlier ones had ended."""
    server: Usage
    engine: Usage
    num_tasks: int
    """Number of tasks of the server's event loop."""
    num_blocks_used: int
    num_open: int
    """Number of requests that the load generator waits for."""
    num_asked: int
    """Number of requests that had ended."""


def engine_of(server: psutil.Process) -> psutil.Process | None:
    """The server's newest engine process; None if it has none now."""
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
    """Take one sample. Raises `psutil.NoSuchProcess` and `httpx.HTTPError` if a process is gone."""
    engine = engine_of(server)
    if engine is None:
        raise psutil.NoSuchProcess(server.pid, msg="it has no engine")
    num_tasks = int(metric(await client.text("/metrics"), "inferd_asyncio_tasks"))
    used = (await client.state())["kv_cache"]["used"]
    return Sample(at_s, is_rest, usage_of(server), usage_of(engine), num_tasks, used, num_open, num_asked)


def metric(page: str, name: str) -> float:
    """Value of a metric on the metrics page; the first if there are several series."""
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    assert found is not None, f"the metrics page has no {name}"
    return float(found[1])
