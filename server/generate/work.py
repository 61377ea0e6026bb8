"""Bounds the work of one request: products of fields, each of which is within its own bound.

Every refusal names the factors, their product and the limit. The checks run before anything of that size is built.
Knows no route, no queue and no engine. `structured` bounds the size of an expanded grammar.
"""

from __future__ import annotations

from inferd.engine.api.wire.params import SamplingParams
from inferd.server.errors import messages as errors

MAX_CHOICES_IN_ALL = 2_048
"""Prompts times `n`."""

MAX_PROMPT_IDS = 2**22
"""Prompt tokens times `n`. A prompt is sent to the engine once. There each choice keeps 8 bytes for each prompt id, so
this is 32 MiB."""

MAX_INPUT_IDS = 2**20
"""Tokens of all inputs of one request for embeddings, scores or classes: 40 MiB as Python's numbers."""

MAX_COMPONENTS = 2**23
"""Components of all vectors of one answer, or its numbers for labels: those of 2,048 vectors of 4,096, about 170 MB of
JSON."""

MAX_LABEL_BYTES = 2**26
"""Bytes of labels' names in one answer that has those of all labels for each input."""

MAX_LISTED_ENTRIES = 2**20
"""Entries of a list of ids times choices: the engine reads the list again for each choice."""

MAX_LOGPROBS = 3 * 2**18
"""Log probabilities of one request: five alternatives for 131,072 tokens. Each takes 12 bytes while it waits, and 65 as
JSON. Copying an answer holds the interpreter lock for 0.65 ms a megabyte (2 cores, AMD EPYC Zen 4, 2026-11-22)."""

MAX_GRAMMAR_CHARS = 2**25
"""Characters of a grammar times choices: the engine compiles it for each choice."""


def check_choices(num_prompts: int, n: int) -> None:
    """Raises `RequestError`."""
    if num_prompts * n > MAX_CHOICES_IN_ALL:
        factors = ((num_prompts, "prompts"), (n, "choices per prompt"))
        raise errors.too_much_work("n", factors, MAX_CHOICES_IN_ALL, "choices")


def check_prompt_ids(param: str, num_ids: int, n: int) -> None:
    """`num_ids`: tokens of all prompts together, or a lower bound. Raises `RequestError`."""
    if num_ids * n > MAX_PROMPT_IDS:
        factors = ((num_ids, "prompt tokens"), (n, "choices per prompt"))
        raise errors.too_much_work(param, factors, MAX_PROMPT_IDS, "prompt tokens")


def check_input_ids(param: str, num_inputs: int, num_ids: int) -> None:
    """`num_ids`: tokens of the first `num_inputs` inputs together. Raises `RequestError`."""
    if num_ids > MAX_INPUT_IDS:
        factors = ((num_inputs, "inputs counted"), (-(-num_ids // num_inputs), "tokens per input (rounded up)"))
        raise errors.too_much_work(param, factors, MAX_INPUT_IDS, "tokens")


def check_token_vectors(param: str, num_tokens: int, num_components: int) -> None:
    """Raises `RequestError`."""
    if num_tokens * num_components > MAX_COMPONENTS:
        factors = ((num_tokens, "tokens"), (num_components, "components per token"))
        raise errors.too_much_work(param, factors, MAX_COMPONENTS, "components")


def check_vectors(param: str, num_inputs: int, num_components: int, component: str = "components") -> None:
    """`component`: name of a vector's components. Raises `RequestError`."""
    if num_inputs * num_components > MAX_COMPONENTS:
        factors = ((num_inputs, "inputs"), (num_components, f"{component} per input"))
        raise errors.too_much_work(param, factors, MAX_COMPONENTS, component)


def check_labels(param: str, num_inputs: int, num_bytes: int) -> None:
    """`num_bytes`: bytes of all labels' names, which the answer has for each input. Raises `RequestError`."""
    if num_inputs * num_bytes > MAX_LABEL_BYTES:
        factors = ((num_inputs, "inputs"), (num_bytes, "bytes of labels per input"))
        raise errors.too_much_work(param, factors, MAX_LABEL_BYTES, "bytes")


def most_scored_tokens(num_choices: int, num_top: int | None) -> int | None:
    """Most output tokens of a choice with log probabilities, if each has `num_top` alternatives. None: no bound."""
    return None if num_top is None else max(1, MAX_LOGPROBS // (num_choices * (1 + num_top)))


def check_output_logprobs(param: str, max_tokens: int, num_choices: int, num_top: int | None) -> None:
    """`max_tokens`: the most that a choice may have, as the context has cut it. Raises `RequestError`."""
    most = most_scored_tokens(num_choices, num_top)
    if most is not None and max_tokens > most:
        assert num_top is not None
        factors = ((num_choices, "choices"), (max_tokens, "tokens"), (1 + num_top, "log probabilities per token"))
        raise errors.too_much_work(param, factors, MAX_LOGPROBS, "log probabilities")


def check_prompt_logprobs(param: str, num_ids: int, n: int, num_each: int) -> None:
    """`num_each`: log probabilities for each prompt token, in all forms together. Raises `RequestError`."""
    if num_ids * n * num_each > MAX_LOGPROBS:
        factors = ((num_ids, "prompt tokens"), (n, "choices per prompt"), (num_each, "log probabilities per token"))
        raise errors.too_much_work(param, factors, MAX_LOGPROBS, "log probabilities")


def check_lists(params: SamplingParams, num_choices: int) -> None:
    """Check the lists that every choice carries. Raises `RequestError`."""
    words = params.bad_words
    entries = {
        "allowed_token_ids": len(params.allowed_token_ids),
        "logit_bias": len(params.logit_bias),
        # The sampler pads every word to the longest.
        "bad_words": len(words) * max(map(len, words), default=0),
    }
    for name, count in entries.items():
        if count * num_choices > MAX_LISTED_ENTRIES:
            factors = ((count, "token ids"), (num_choices, "choices"))
            raise errors.too_much_work(name, factors, MAX_LISTED_ENTRIES, "token ids")


def check_grammar(param: str, num_chars: int, num_choices: int) -> None:
    """Raises `RequestError`."""
    if num_chars * num_choices > MAX_GRAMMAR_CHARS:
        factors = ((num_chars, "characters of grammar"), (num_choices, "choices"))
        raise errors.too_much_work(param, factors, MAX_GRAMMAR_CHARS, "characters")
