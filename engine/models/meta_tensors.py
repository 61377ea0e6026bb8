"""Leaves out the part of torch that computes with meta tensors: shapes and dtypes without values.

torch imports it always, and an engine needs it only if transformers' own code computes the model. It takes 0.6 of the
2.2 s of processor time in which Python imports torch (one core, AMD EPYC Zen 3, torch 2.13, 2026-11-29). Without it
`torch.Generator` raises an error. An engine on a GPU brings it in, because no GPU has tested what else lacks.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_PART = "torch._meta_registrations"
"""It registers operations and has nothing that the rest of torch calls while it is imported."""


def leave_out() -> None:
    """Have the first import of torch leave this part out. If torch is imported already, nothing changes."""
    if "torch" not in sys.modules:
        sys.modules[_PART] = ModuleType(_PART, "left out, see inferd.engine.models.meta_tensors")


def bring_in() -> None:
    """Import the part if it was left out."""
    if getattr(sys.modules.get(_PART), "__file__", None) is None:
        sys.modules.pop(_PART, None)
        importlib.import_module(_PART)
