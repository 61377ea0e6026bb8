"""GPT-2's printable alphabet of bytes, in which byte-level vocabularies write their tokens."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    """Visible Latin-1 stands for itself, the other 68 bytes are U+0100 and up."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF_CHAR = _alphabet()
"""Character -> the byte that it stands for."""
