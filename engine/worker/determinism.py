"""Ends a deterministic start on a GPU if a chosen kernel's results for a row depend on the other rows.

On a CPU no kernel's results do. On a GPU each implementation of an op says whether its results do
(`Implementation.varies`). It is refused here however it was chosen.
"""

from __future__ import annotations

from collections.abc import Iterable

from inferd.engine.api.errors import ModelError
from inferd.kernels.registry import Selection


def refuse_varying(choices: Iterable[Selection]) -> None:
    """Raises a `ModelError` that names each op whose kernel varies on the GPU, and why no other can run."""
    found = [choice for choice in choices if choice.varies is not None and _device_type(choice) == "cuda"]
    if found:
        raise ModelError(
            "deterministic results were asked for, but this model cannot give them on this GPU: "
            f"{'; '.join(dict.fromkeys(map(_described, found)))}; give --no-deterministic, or --device cpu"
        )


def _device_type(choice: Selection) -> str:
    """Device type of the choice's key, a field that every op's key has."""
    device_type: str = choice.key.device_type  # type: ignore[attr-defined]
    return device_type


def _described(choice: Selection) -> str:
    others = "; ".join(f"{name} {reason}" for name, reason in choice.refused if name != "cpp")
    return f"{choice.op} runs in {choice.chosen}, where {choice.varies}" + (f" ({others})" if others else "")
