"""A recorded GPU on which Triton's kernels are launched, and compute nothing: memory holds zeros.

It shows the Python code around the kernels: the tensors and the memory that it gives them, and what it asks the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from torch import Tensor
from triton.runtime.jit import JITFunction

from inferd.kernels.registry import Op
from tests.cpu.capturing import tensors_in
from tests.cpu.recorded_gpu.device import RecordedGpu


class LaunchingGpu(RecordedGpu):
    """Counts launches by the kernel's name."""

    def __init__(self, sm: int = 90) -> None:
        super().__init__(sm)
        self.launches: Counter[str] = Counter()

    def install_kernels(self, patch: pytest.MonkeyPatch) -> None:
        def launched(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self._launch(kernel.__name__, args, kwargs)

        patch.setattr(JITFunction, "run", launched)
        # Not in the ops, because a start judges a process by the choices there.
        choose = cache(Op._choose)
        patch.setattr(Op, "resolve", lambda op, key: choose(op, key)[0])
        patch.setattr(Op, "choice", lambda op, key: choose(op, key)[1])

    def _launch(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.launches[name] += 1
        self._check_arguments(name, (args, kwargs))
        work = self.queue(name)
        for memory in {self.memories.of(tensor) for tensor in tensors_in((args, kwargs))}:
            assert memory is not None
            self.touch(memory, work, is_read=True, is_write=True)

    def fill(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.zero_()
