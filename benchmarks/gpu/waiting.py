"""Launching a step must not wait for the device: what would wait fails while a step is launched, and a row tries every
kind of request.

On a GPU torch refuses calls that synchronize. On a CPU nothing waits, so this module refuses the operations that would
wait on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.bench import Bench, CannotRunError
from benchmarks.gpu.models import MODELS, Engine, greedy, random_decoder, random_ids, run
from benchmarks.gpu.points import Case, Trial
from benchmarks.gpu.tree import ROOT
from inferd.engine.arch.description import Arch
from inferd.engine.sched.plan import StepPlan
from inferd.engine.worker.runner import Runner
from inferd.kernels.cpu import native

_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
_OPS_THAT_WAIT = ("item", "is_nonzero", "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")
_REQUESTS: Sequence[Mapping[str, Any]] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": ((3, 1.0),), "bad_words": ((4, 5),), "min_tokens": 3, "eos_token_ids": (7,)},
    {"logprobs": 3, "prompt_logprobs": 2},
)
"""Parameters besides those of a greedy request."""
_NEW = 6


class ReadBackError(AssertionError):
    """Which operation waited for the device."""


def waits(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host would have to wait for a GPU: the operation asks for a value, or for a size that depends on
    one."""
    name = func.name().removeprefix("aten::").split(".")[0]
    if name == "repeat_interleave":
        return isinstance(args[-1], Tensor) and kwargs.get("output_size") is None
    if name in ("index", "index_put", "index_put_"):
        return any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1]))
    return name in _OPS_THAT_WAIT


class _NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if waits(func, args, kwargs or {}):
            raise ReadBackError(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_is_read(device: torch.device) -> Iterator[None]:
    """Within it, whatever would wait for the device raises `ReadBackError`."""
    with _no_synchronizing() if device.type == "cuda" else _no_reading():
        yield


@contextmanager
def _no_synchronizing() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise ReadBackError(str(error).splitlines()[0]) from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _no_reading() -> Iterator[None]:
    def refuse(name: str, *_: object) -> None:
        raise ReadBackError(name)

    with ExitStack() as stack:
        for name in _READS:
            stack.enter_context(mock.patch.object(Tensor, name, partial(refuse, name)))
        stack.enter_context(_NoWaiting())  # type: ignore[no-untyped-call]
        yield


@dataclass(frozen=True, slots=True)
class _Watched:
    """A runner whose launches may read nothing."""

    runner: Runner
    device: torch.device

    @property
    def arch(self) -> Arch:
        return self.runner.arch

    @property
    def cache_windows(self) -> tuple[int | None, ...]:
        return self.runner.cache_windows

    def launch(self, plan: StepPlan, *, awaits_masks: bool = False) -> Any:
        with nothing_is_read(self.device):
            return self.runner.launch(plan, awaits_masks=awaits_masks)


def launches(bench: Bench) -> None:
    """No step of any kind of request waits for the device while it is launched. On a CPU C++ kernels stand in for
    Triton's, because plain PyTorch may look at values."""
    if bench.device.type == "cpu" and not bench.is_listing:
        built = native.prepare(ROOT / "build" / "cache" / "inferd" / "kernels")
        if built.path is None:
            raise CannotRunError(f"needs a GPU or the C++ kernels: {built.reason}")
    model = bench.pick("0.6b", "smoke")
    labels = {"check": "launching a step reads nothing back", "model": model}
    bench.measure(Case(table="engine checks", labels=labels), lambda: _launches(bench, model))


def _launches(bench: Bench, model: str) -> Trial:
    """Two loads of the same requests: the first may compile and record, and launches of the second are watched."""
    decoder = random_decoder(MODELS[model], bench.device, "bf16", 256)
    engine = Engine.around(decoder, len(_REQUESTS), 128)
    submits = [
        greedy(str(index), random_ids(9 + 7 * index, engine.vocab_size, index), _NEW, **params)
        for index, params in enumerate(_REQUESTS)
    ]
    watched = replace(engine, runner=cast(Runner, _Watched(engine.runner, bench.device)))
    # At depth 1 another thread would read a step's results while the next one is launched.
    with engine.core(depth=0) as core:
        expected = run(core, submits)
    try:
        with watched.core(depth=0) as core:
            found = run(core, submits)
    except ReadBackError as error:
        return Trial(error=1.0, tolerance=0.0, note=f"a launch waited: {error}")
    return Trial(error=float(found != expected), tolerance=0.0, note=f"{len(submits)} kinds of requests")
