"""Calls the C++ kernels of all ops, which `library` builds.

Nothing is built before `prepare` is called. Until then, or if it fails, `missing` gives the reason and ops run their
plain PyTorch reference.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inferd.kernels.cpu.library import PORTABLE, NativeError, load, runnable_levels

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""Number of each accepted dtype in the kernels' C interface."""
WEIGHT_CODES = {**DTYPE_CODES, torch.float16: 2}
"""The same for weights that a kernel widens."""


@dataclass(frozen=True, slots=True)
class Build:
    """The result of `prepare`."""

    level: str
    """Instruction set that the kernels were compiled for."""
    path: Path | None
    """The library; None if there is none."""
    reason: str
    """Why there is no library; empty if there is one."""
    compile_s: float
    """Seconds of compiling; 0 if the library was cached."""
    rejected: tuple[str, ...]
    """Why each existing library is not used."""


Recorder = Callable[[int, bytes], None]
"""Called with the address of a kernel and its packed arguments."""

_library: ctypes.CDLL | None = None
_library_name = ""
_level = PORTABLE
_functions: dict[str, Callable[..., None]] = {}
_recorder: Recorder | None = None
_missing = "the C++ kernels were not prepared in this process"


def prepare(
    cache_dir: Path,
    level: str | None = None,
    before_compiling: Callable[[], None] | None = None,
    *,
    may_build: bool = True,
) -> Build:
    """Load the kernels for this processor, and compile them if `cache_dir` does not have them and `may_build`. Never
    raises for a failure.

    `before_compiling` is called before a compilation, which takes half a minute on two cores. Call `prepare` once,
    before any op gets its first key: an op keeps the implementation that it has chosen.
    """
    global _library, _library_name, _missing, _level
    _functions.clear()
    best = runnable_levels()[0]
    _level = level = level or best
    rejected: list[str] = []
    try:
        _library, path, compile_s = load(cache_dir, level, before_compiling, rejected, may_build=may_build)
        _library_name, _missing = path.stem, ""
    except NativeError as error:
        leave_out("; ".join([*rejected, str(error)]))
        return Build(level, None, _missing, 0.0, tuple(rejected))
    return Build(level, path, "", compile_s, tuple(rejected))


def leave_out(reason: str) -> None:
    """Have every op run its plain PyTorch reference. Call this instead of `prepare`."""
    global _library, _library_name, _missing
    _functions.clear()
    _library, _library_name, _missing = None, "", reason


def missing() -> str | None:
    """Why no native kernel can run in this process; None if they can. For predicates."""
    return _missing or None


def library_name() -> str:
    """The library's name, which says its instruction set level and has a hash of sources and flags; empty without
    one."""
    return _library_name


def level() -> str:
    """The instruction set level that the kernels were prepared for."""
    return _level


def refuses(device_type: str, *dtypes: torch.dtype) -> str | None:
    """Why no native kernel accepts tensors of this device and these dtypes; None if one may. All predicates share this
    check."""
    if device_type != "cpu":
        return "runs on CPUs only"
    others = [str(dtype) for dtype in dtypes if dtype not in DTYPE_CODES]
    if others:
        return f"takes float32 and bfloat16, not {', '.join(others)}"
    return missing()


def function(name: str) -> Callable[..., None]:
    """The C++ kernel `name`. The last lines of its `cpu.cpp` list its arguments: addresses (0 for none), integers and
    numbers. A macro makes its name there: `inferd_linear` is `INFERD_EXPORT(linear)`."""
    found = _functions.get(name)
    if found is not None:
        return found
    assert _library is not None, _missing
    loaded = _library[name]
    loaded.argtypes, loaded.restype = [ctypes.c_char_p], None
    address, pack = _address(loaded), struct.Struct(_format(_library, name)).pack

    def call(*arguments: float) -> None:
        packed = pack(*arguments)
        loaded(packed)
        if _recorder is not None:
            _recorder(address, packed)

    _functions[name] = call
    return call


def _format(library: ctypes.CDLL, name: str) -> str:
    return ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, f"{name}_format"))).decode()


def _address(loaded: Any) -> int:
    address = ctypes.cast(loaded, ctypes.c_void_p).value
    assert address is not None
    return address


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product x [T, in_size] -> [T, out_size] by the C++ kernel `name`. Another kernel can call it too.

    Arguments of the kernel: x, out, the number of rows, the code of the dtype of x, then `others`, and last the number
    of threads.
    """

    name: str
    in_size: int
    out_size: int
    others: tuple[float, ...]
    kept: tuple[Tensor | None, ...]
    """Tensors whose addresses are among `others`."""
    x_dtype: torch.dtype | None = None
    """Dtype that x is widened to; None: x stays as it is."""

    def __call__(self, x: Tensor) -> Tensor:
        assert x.shape[1] == self.in_size
        x = x.to(self.x_dtype or x.dtype).contiguous()
        out = torch.empty((x.shape[0], self.out_size), dtype=x.dtype)
        self.run(x, out, self.others)
        return out

    def run(self, x: Tensor, out: Tensor, others: tuple[float, ...]) -> None:
        code, threads = DTYPE_CODES[x.dtype], torch.get_num_threads()
        function(self.name)(x.data_ptr(), out.data_ptr(), x.shape[0], code, *others, threads)

    def call(self, dtype: torch.dtype) -> tuple[int, bytes]:
        """(address of the kernel, its arguments) for x in `dtype`, without x, out and the number of rows, and for one
        thread."""
        assert _library is not None, _missing
        arguments = (0, 0, 0, DTYPE_CODES[dtype], *self.others, 1)
        return _address(_library[self.name]), struct.pack(_format(_library, self.name), *arguments)


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Call `recorder` for every kernel call, after the kernel ran."""
    global _recorder
    assert _recorder is None, "calls are recorded already"
    _recorder = recorder
    try:
        yield
    finally:
        _recorder = None
