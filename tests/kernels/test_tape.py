"""A recording repeats its run on new inputs, reuses memory, and refuses runs that it cannot repeat."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inferd.kernels.cpu import library, native
from inferd.kernels.cpu.tape import Buffers, NotRecordableError, record
from inferd.kernels.ops.gated_mul import silu_mul
from inferd.kernels.ops.linear import linear
from inferd.kernels.ops.rms_norm import add_rms_norm, rms_norm
from tests.conftest import KERNEL_CACHE

SIZE = 64


@pytest.fixture(autouse=True)
def _native_kernels() -> None:
    built = native.prepare(KERNEL_CACHE)
    if not library.has_compiler():
        pytest.skip(built.reason)


def layers(count: int) -> Callable[[Tensor], Tensor]:
    """A few kernels that pass tensors on, like a decoder."""
    norm = torch.rand(SIZE)
    weights = [(linear(torch.randn(2 * SIZE, SIZE), None), linear(torch.randn(SIZE, SIZE), None)) for _ in range(count)]

    def run(x: Tensor) -> Tensor:
        residual = x
        for up, down in weights:
            x = down(silu_mul(up(rms_norm(x, norm, 1e-5))))
            x, residual = add_rms_norm(x, residual, norm, 1e-5)
        return x

    return run


def test_replays_on_new_inputs() -> None:
    run, x = layers(3), torch.randn(4, SIZE)
    expected = run(x)
    tape = record(lambda: run(x), Buffers())
    assert torch.equal(tape.output, expected)
    for _ in range(3):
        x.copy_(torch.randn(4, SIZE))
        tape.replay()
        assert torch.equal(tape.output, run(x))
    assert not torch.equal(tape.output, expected)


def test_memory_serves_again() -> None:
    def bytes_for(count: int) -> int:
        buffers, x = Buffers(), torch.randn(4, SIZE)
        run = layers(count)
        for _ in range(3):
            record(lambda: run(x), buffers)
        return buffers.num_bytes

    assert bytes_for(12) == bytes_for(3)


def test_recordings_share_memory_and_do_not_disturb_each_other() -> None:
    run, buffers = layers(2), Buffers()
    inputs = {rows: torch.randn(rows, SIZE) for rows in (1, 2, 7)}
    tapes = {rows: record(lambda x=x: run(x), buffers) for rows, x in inputs.items()}  # type: ignore[misc]
    for rows in (7, 1, 2, 1, 7):
        inputs[rows].copy_(torch.randn(rows, SIZE))
        tapes[rows].replay()
        assert torch.equal(tapes[rows].output, run(inputs[rows]))


def test_other_operations_are_refused_by_name() -> None:
    run, x = layers(1), torch.randn(4, SIZE)
    with pytest.raises(NotRecordableError, match="mul"):
        record(lambda: run(x * 2), Buffers())
    with pytest.raises(NotRecordableError, match="clone"):
        record(lambda: run(x[:, ::2].contiguous()), Buffers())
    with pytest.raises(NotRecordableError, match="no C\\+\\+ kernel"):
        record(lambda: x.view(2, -1), Buffers())


def test_after_a_refusal_kernels_are_called_as_before() -> None:
    run, x = layers(1), torch.randn(4, SIZE)
    expected, buffers = run(x), Buffers()
    with pytest.raises(NotRecordableError):
        record(lambda: run(x) + 1, buffers)
    assert torch.equal(run(x), expected)
    assert torch.equal(record(lambda: run(x), buffers).output, expected)


@pytest.mark.sampled(keep=2, among="long checks of all kernels")
def test_recording_does_not_load_the_compiler() -> None:
    program = f"""
import sys, torch
from pathlib import Path
from inferd.kernels.cpu import native
from inferd.kernels.ops.rms_norm import rms_norm
from inferd.kernels.cpu.tape import Buffers, record
native.prepare(Path({str(KERNEL_CACHE)!r}))
x, weight = torch.ones(2, 64), torch.ones(64)
record(lambda: rms_norm(x, weight, 1e-5), Buffers())
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
