"""`inferd serve` in a process that has the server's libraries already: to read them is most of what a refusal costs."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
from multiprocessing.connection import Connection

from inferd.server import cli

FORKS = multiprocessing.get_context("forkserver")
"""Whose server reads them once, and has no threads."""
FORKS.set_forkserver_preload([__name__, "inferd.server.lifecycle.serve"])


def serve(
    arguments: list[str], environment: dict[str, str], out: Connection, error: Connection, cpu_s: int, file_bytes: int
) -> None:
    """Becomes the command."""
    os.dup2(out.fileno(), 1)
    os.dup2(error.fileno(), 2)
    os.environ.update(environment)
    tempfile.tempdir = None  # Python looks where to keep such files once
    bound_to(cpu_s, file_bytes)
    sys.argv = ["inferd", "serve", *arguments]
    cli.main()


def bound_to(cpu_s: int, file_bytes: int) -> None:
    """The kernel ends this process where it takes more processor time; -1: a file may have any length."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
