"""Names what `write.py` writes, for tests, which have none of its writers."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).with_name("quantized.safetensors")
COLUMNS = 5
"""Every so manieth column of a dequantized matrix is kept. 5 shares no factor with the sizes of words and groups."""
