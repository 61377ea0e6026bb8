"""Seeds of choices: one given or chosen for the request, and one derived from it for each further choice."""

from __future__ import annotations

import hashlib
import secrets

from inferd.engine.api.wire.params import MAX_SEED


def engine_seed(seed: int) -> int:
    """The engine's seed for a caller's signed 64-bit one: the same from 0 to `MAX_SEED`, else 53 bits of its hash.

    They are the low 53 bits of BLAKE2b with an 8-byte digest over the seed as an 8-byte little-endian integer (two's
    complement), read little-endian.
    """
    if 0 <= seed <= MAX_SEED:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def choose_seed() -> int:
    """A seed for a request that names none; returned with the answer, so that it can be made again."""
    return secrets.randbelow(MAX_SEED + 1)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice: `seed` itself for choice 0, else the low 53 bits of a hash of (seed, choice).

    The hash is BLAKE2b with an 8-byte digest over the two numbers as 8-byte little-endian integers, read little-endian.
    """
    if choice == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + choice.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
