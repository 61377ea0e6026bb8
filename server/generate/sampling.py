"""Wire fields and defaults -> the engine's `SamplingParams`. Order of precedence: caller, checkpoint, OpenAI."""

from __future__ import annotations

from typing import TypeVar

from inferd.engine.api.wire.params import SamplingParams
from inferd.server.generate.seeds import engine_seed
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
