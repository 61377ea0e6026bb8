"""The facts that an engine's results depend on, besides the request.

The first engine of a model that is ready decides them. Each later engine must have the same, or it is refused.
"""

from __future__ import annotations

import msgspec

from inferd.engine.api.errors import ChangedError

NUMERICS_VERSION = 1
"""Number that grows with each change after which the same request may get another answer, unless a source of the C++
kernels shows it."""


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one engine."""

    version: int = NUMERICS_VERSION
    files: str = ""
    """Digest of the model's files, without those that only the server reads."""
    inferd: str = ""
    torch: str = ""
    model_impl: str = "native"
    """Code that computes the model."""
    library: str = ""
    """Name of the library of C++ kernels: instruction set, and a hash of sources and flags. Empty in plain PyTorch."""
    dtype: str = ""
    weights_dtype: str = ""
    quantization: str = "none"
    activations: str = "own"
    """How activations are quantized."""
    kv_cache_dtype: str = "auto"
    device: str = ""
    """The kind of GPU or processor, with the number of threads if bits may depend on it."""
    num_ranks: int = 1
    deterministic: bool = True
    """Whether tokens depend on the request alone."""
    kernels: tuple[tuple[str, str], ...] = ()
    """(op, chosen implementation)."""


_OF_ALL = (
    "version", "files", "inferd", "torch", "model_impl", "library", "dtype", "weights_dtype", "quantization",
    "activations", "kv_cache_dtype", "deterministic",
)  # fmt: skip
_OF_DETERMINISTIC = (*_OF_ALL, "device", "num_ranks", "kernels")
"""Other engines promise no equal bits, and may have other GPUs."""
_PLAIN = "plain PyTorch"


def check_numerics(first: Numerics, own: Numerics | None) -> None:
    """Raises `ChangedError` if an engine with `own` would not compute what the first one did, or does not say."""
    if own is None:
        raise ChangedError(
            "an engine does not say what its answers depend on, but the first one of this server did, so it may not "
            "compute the same: restart the server to serve with what there is now"
        )
    for name in _OF_DETERMINISTIC if first.deterministic else _OF_ALL:
        wanted, found = getattr(first, name), getattr(own, name)
        if wanted != found:
            raise other_numerics(name, wanted, found)


def other_numerics(name: str, wanted: object, found: object, why: str = "") -> ChangedError:
    """The error of an engine in which the fact `name` is another."""
    shown = "C++ kernels" if name == "library" else name
    return ChangedError(
        f"an engine would not compute the same answers as the first one of this server: {shown} {wanted or _PLAIN} "
        f"became {found or _PLAIN}{f' ({why})' if why else ''}; restart the server to serve with what there is now"
    )
