"""Threads share a kernel's loops: with the same bits for any number of them, beside other callers, and after a fork."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from inferd.kernels.cpu import library, native
from inferd.kernels.ops.gated_mul import silu_mul
from inferd.kernels.ops.sample import sample
from tests.conftest import KERNEL_CACHE

ROWS, SIZE, VOCAB = 48, 2048, 40_000


@pytest.fixture(autouse=True)
def _native_kernels() -> Iterator[None]:
    built = native.prepare(KERNEL_CACHE)
    if not library.has_compiler():
        pytest.skip(built.reason)
    yield
    torch.set_num_threads(1)


def shared_loops() -> list[Tensor]:
    """Results of a kernel with turns of equal length and of one with turns of unequal length."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(ROWS, 2 * SIZE, generator=generator)
    scores = torch.randn(ROWS, VOCAB, generator=generator)
    ids = torch.arange(ROWS)
    return [silu_mul(gate_up), sample(scores, ids, ids)]


def counts() -> tuple[int, int]:
    """(loops that were shared, times that a thread of the pool fell asleep)."""
    found = (ctypes.c_int64 * 5)()
    native.function("inferd_parallel_counts")(ctypes.addressof(found))
    return found[0], found[1]


@pytest.mark.parametrize("num_threads", [2, 3, 17])
def test_the_number_of_threads_changes_nothing(num_threads: int) -> None:
    expected, before = shared_loops(), counts()
    torch.set_num_threads(num_threads)
    for _ in range(20):
        assert all(map(torch.equal, shared_loops(), expected))
    assert counts()[0] >= before[0] + 40
    # A loop of fewer threads leaves the others out.
    torch.set_num_threads(2)
    assert all(map(torch.equal, shared_loops(), expected))


def test_callers_at_the_same_time() -> None:
    expected = shared_loops()
    torch.set_num_threads(3)
    with ThreadPoolExecutor(4) as callers:
        for found in callers.map(lambda _: shared_loops(), range(40)):
            assert all(map(torch.equal, found, expected))


def test_idle_threads_sleep() -> None:
    torch.set_num_threads(2)
    before = counts()[1]
    shared_loops()
    while counts()[1] == before:
        os.sched_yield()


def test_a_forked_child_has_threads_of_its_own() -> None:
    program = f"""
import os, sys, torch
from pathlib import Path
from inferd.kernels.cpu import native
from inferd.kernels.ops.gated_mul import silu_mul
native.prepare(Path({str(KERNEL_CACHE)!r}))
torch.set_num_threads(2)
x = torch.randn({ROWS}, {2 * SIZE})
expected = silu_mul(x)
child = os.fork()
if not child:
    found = silu_mul(x)
    torch.set_num_threads(1)  # torch's own threads do not survive a fork
    os._exit(0 if torch.equal(found, expected) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "0"
