"""The repaired interpreter replaces Triton's language once a launch, and puts it back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels import interpreter

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _scaled(x, largest):
    return tl.sum(x, 0) / largest


@triton.jit
def _normalize(x, y, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    loaded = tl.load(x + place)
    for _ in tl.static_range(3):
        tl.store(y + tl.program_id(0), _scaled(loaded, tl.max(loaded, 0)))


def test_a_launch_patches_the_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tl.sum` and `tl.max` see another module of the language than our functions, which Triton patches for ever."""
    interpreter.repair()
    module = triton.runtime.interpreter
    always, patched = module._patch_always, []

    def counted(function: Any) -> Any:
        patched.append(function.__name__)
        return always(function)

    monkeypatch.setattr(module, "_patch_always", counted)
    x = torch.rand(5, 64)
    for launch in range(1, 4):
        y = torch.full((5,), float("nan"))
        _normalize[(5,)](x, y, BLOCK=64)
        torch.testing.assert_close(y, x.sum(1) / x.amax(1))
        assert patched.count("_normalize") == launch
        assert len(patched) <= launch + 1
        assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.tensor.to), "the language is as before"
