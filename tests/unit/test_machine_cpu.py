"""A container's limits count, and its page cache is available memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.engine.api.machine import cpu as machine
from inferd.engine.api.machine.cpu import Machine
from inferd.kernels.cpu import library

GIB = 2**30


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of 64 GiB with a container of 8."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_host_memory", lambda: (64 * GIB, 60 * GIB))
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{6 * GIB}\n")
    return tmp_path


def test_what_is_used_is_not_available(container: Path) -> None:
    found = Machine.detect()
    assert (found.memory_total_bytes, found.memory_available_bytes) == (8 * GIB, 2 * GIB)


def test_page_cache_can_be_had(container: Path) -> None:
    (container / "memory.stat").write_text(f"anon {GIB}\nfile {5 * GIB}\ninactive_file {5 * GIB}\nactive_file 0\n")
    assert Machine.detect().memory_available_bytes == 7 * GIB


def test_without_a_limit_the_host_counts(container: Path) -> None:
    (container / "memory.max").write_text("max\n")
    assert Machine.detect().memory_available_bytes == 60 * GIB


@pytest.mark.parametrize(
    ("nodes", "count", "groups"),
    [
        (["0-3", "4-7"], 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (["0-1,4-5", "2-3,6-7"], 4, [[0, 1], [4, 5], [2, 3], [6, 7]]),
        (["0-3", "4-7", ""], 1, [[]]),
        (["0-7"], 2, [[], []]),
        (["0-3", "8-11"], 2, [[], []]),
    ],
    ids=["two nodes", "halves of two nodes", "one group", "one node", "the other node is not allowed"],
)
def test_replicas_are_bound_to_nodes(
    nodes: list[str], count: int, groups: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for index, cpus in enumerate(nodes):
        (tmp_path / f"node{index}").mkdir()
        (tmp_path / f"node{index}" / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(machine, "_NODES", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)))
    assert [list(group) for group in machine.cpu_groups(count)] == groups


def test_kernels_of_an_image_are_looked_for_where_they_are_built() -> None:
    assert library.BUNDLED_DIR == machine._BUNDLED_KERNELS
