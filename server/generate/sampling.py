"""Wire fields and defaults -> the engine's `SamplingParams`, seeds included.

Order of precedence: caller, checkpoint, OpenAI.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TypeVar

from inferd.engine.api.wire.params import MAX_SEED, SamplingParams
from inferd.server.schema.generation import GenerationFields
from inferd.server.text.model import ServedModel

T = TypeVar("T")


def sampling_params(
    wire: GenerationFields,
    model: ServedModel,
    seed: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    bad_words: tuple[tuple[int, ...], ...],
    grammar: str,
) -> SamplingParams:
    """The parameters of choice 0, not yet checked against the model's bounds. `seed` is the caller's."""
    defaults = model.defaults
    return SamplingParams(
        max_tokens=max_tokens,
        seed=engine_seed(seed),
        min_tokens=wire.min_tokens or 0,
        temperature=_first(wire.temperature, defaults.temperature),
        # -1 is another spelling of "off".
        top_k=max(0, _first(wire.top_k, defaults.top_k)),
        top_p=_first(wire.top_p, defaults.top_p),
        min_p=_first(wire.min_p, defaults.min_p),
        repetition_penalty=_first(wire.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=wire.presence_penalty or 0.0,
        frequency_penalty=wire.frequency_penalty or 0.0,
        logit_bias=wire.logit_bias or (),
        allowed_token_ids=tuple(dict.fromkeys(wire.allowed_token_ids or ())),
        bad_words=bad_words,
        eos_token_ids=() if wire.ignore_eos else model.eos_token_ids,
        stop_token_ids=tuple(dict.fromkeys(wire.stop_token_ids or ())),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def _first(given: T | None, default: T) -> T:
    return default if given is None else given


def engine_seed(seed: int) -> int:
    """The engine's seed for a caller's signed 64-bit one: the same from 0 to `MAX_SEED`, else 53 bits of its hash.

    The hash is the low 53 bits of BLAKE2b with an 8-byte digest over the seed as an 8-byte little-endian integer (two's
    complement), read little-endian.
    """
    if 0 <= seed <= MAX_SEED:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def choose_seed() -> int:
    """A seed for a request that names none. The answer carries it, so that it can be reproduced."""
    return secrets.randbelow(MAX_SEED + 1)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice: `seed` itself for choice 0, else the low 53 bits of a hash of (seed, choice).

    The hash is BLAKE2b with an 8-byte digest over the two numbers as 8-byte little-endian integers, read little-endian.
    """
    if choice == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + choice.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
