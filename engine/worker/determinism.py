"""What deterministic results on a GPU rest on: that no kernel runs whose rows know of each other.

On a processor all kernels are so. On a GPU each implementation of an op says whether it is (`registry.varies`): one
that chooses its arithmetic by the number of rows is refused here, whichever way it came to be chosen.
"""

from __future__ import annotations

from collections.abc import Iterable

from inferd.engine.api.errors import ModelError
from inferd.kernels.registry import Selection


def refuse_varying(choices: Iterable[Selection]) -> None:
    """Raises `ModelError` that names each op whose choice for a GPU varies, and why nothing else can run."""
    found = [choice for choice in choices if choice.varies is not None and _device_type(choice) == "cuda"]
    if found:
        raise ModelError(
            "deterministic results were asked for, and on this GPU this model gives none: "
            f"{'; '.join(dict.fromkeys(map(_words, found)))}; give --no-deterministic, or --device cpu"
        )


def _device_type(choice: Selection) -> str:
    """Of the key, as every op's names it."""
    device_type: str = choice.key.device_type  # type: ignore[attr-defined]
    return device_type


def _words(choice: Selection) -> str:
    others = "; ".join(f"{name} {reason}" for name, reason in choice.refused if name != "cpp")
    return f"{choice.op} runs in {choice.chosen}, where {choice.varies}" + (f" ({others})" if others else "")
