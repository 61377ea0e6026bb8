"""Runs `inferd serve` in a process that already has the libraries. Importing them is most of a refusal's cost."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
from multiprocessing.connection import Connection

from inferd.server import cli

FORKS = multiprocessing.get_context("forkserver")
"""Forks from a server process that has imported the libraries once, and has no threads."""
FORKS.set_forkserver_preload([__name__, "inferd.server.commands.app", "inferd.server.lifecycle.serve"])


def serve(
    arguments: list[str], environment: dict[str, str], out: Connection, error: Connection, cpu_s: int, file_bytes: int
) -> None:
    """Run the command in this process."""
    os.dup2(out.fileno(), 1)
    os.dup2(error.fileno(), 2)
    os.environ.update(environment)
    tempfile.tempdir = None  # Python determines the directory only once
    bound_to(cpu_s, file_bytes)
    sys.argv = ["inferd", "serve", *arguments]
    cli.main()


def bound_to(cpu_s: int, file_bytes: int) -> None:
    """The kernel ends this process if it uses more processor time. -1 allows files of any length."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
