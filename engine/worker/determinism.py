"""Ends a deterministic start on a GPU if a chosen kernel's results for a row depend on the other rows. Warns if long
contexts may take longer than without `--deterministic`.

On a CPU no kernel's results do. On a GPU each implementation of an op says whether its results do
(`Implementation.varies`). It is refused here however it was chosen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from inferd.engine.api.config import EngineConfig
from inferd.engine.api.errors import ModelError
from inferd.engine.api.memory.precision import KV_FORMATS
from inferd.engine.arch.description import Arch
from inferd.kernels.device import DeviceProperties
from inferd.kernels.ops.paged_attention.passes import SLOT_BYTES, STEADY_ROWS, Shape, most_cut
from inferd.kernels.registry import Selection

logger = logging.getLogger(__name__)


def refuse_varying(choices: Iterable[Selection]) -> None:
    """Raises a `ModelError` that names each op whose kernel varies on the GPU, and why no other can run."""
    found = [choice for choice in choices if choice.varies is not None and _device_type(choice) == "cuda"]
    if found:
        raise ModelError(
            "deterministic results were asked for, but this model cannot give them on this GPU: "
            f"{'; '.join(dict.fromkeys(map(_described, found)))}; give --no-deterministic, or --device cpu"
        )


def warn_of_uncut_keys(config: EngineConfig, arch: Arch, device: DeviceProperties | None) -> None:
    """Warns if partial sums of the longest contexts may not fit. Then multiprocessors do not share a context's keys.
    None is a CPU, whose threads always do."""
    if device is None:
        return
    kinds = {(arch.heads(layer), arch.windows[layer]) for layer in arch.attention_layers}
    for heads, window in kinds:
        num_kv_heads, group = heads.num_kv_heads, heads.num_heads // heads.num_kv_heads
        own = max(1, num_kv_heads // config.tensor_parallel_size)
        kv_bytes = 1 if config.kv_cache_dtype in KV_FORMATS else 2
        found = most_cut(Shape(own, group, heads.head_dim, kv_bytes, window, device), config.max_model_len)
        if found is not None:
            logger.warning(
                "with --deterministic, multiprocessors share the keys of a long context only while the partial sums of "
                "a step fit %d MiB: with --max-model-len %d, those of %d tokens behind such a context may fit, and a "
                "prompt of more may take longer; give a smaller --max-model-len, or --no-deterministic",
                SLOT_BYTES >> 20,
                config.max_model_len,
                found * max(1, STEADY_ROWS // group),
            )
            return


def _device_type(choice: Selection) -> str:
    """Device type of the choice's key, a field that every op's key has."""
    device_type: str = choice.key.device_type  # type: ignore[attr-defined]
    return device_type


def _described(choice: Selection) -> str:
    others = "; ".join(f"{name} {reason}" for name, reason in choice.refused if name != "cpp")
    return f"{choice.op} runs in {choice.chosen}, where {choice.varies}" + (f" ({others})" if others else "")
