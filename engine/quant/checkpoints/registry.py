"""The table of checkpoint formats that can be read, by the names that `engine/arch/stored` gives them.

To add a format, write one short file beside this one and one line in `READERS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from inferd.engine.quant.checkpoints import awq, fp4, fp8, gguf, gptq, int_quantized, pack_quantized
from inferd.engine.quant.checkpoints.reader import Reader

READERS: Mapping[str, Reader] = {
    "awq": awq.READER,
    "fp4": fp4.READER,
    "fp8": fp8.READER,
    "gguf": gguf.READER,
    "gptq": gptq.READER,
    "int-quantized": int_quantized.READER,
    "pack-quantized": pack_quantized.READER,
}
