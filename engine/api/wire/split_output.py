"""A long step, told in several messages. The server decodes a message in one turn of its event loop."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from inferd.engine.api.wire.messages import Delta, StepOutput

MAX_SCORED = 2**15
"""Log probabilities of prompts in one message: so many are decoded in 7 ms, and a step of 50,000 tokens with 20
alternatives each in 300 to 380 (one core of an AMD EPYC Zen 4, 2026-11-21)."""


def parts_of(output: StepOutput) -> Iterator[StepOutput]:
    """`output` as messages none of which holds more log probabilities of prompts than `MAX_SCORED`.

    They go before the rest, as if they were of chunks of their own; the last message is that of the step.
    """
    num_scored = sum(len(delta.prompt_logprobs) * _entries_of(delta) for delta in output.deltas)
    if num_scored <= MAX_SCORED:
        yield output
        return
    for delta in output.deltas:
        scored, size = delta.prompt_logprobs, max(1, MAX_SCORED // _entries_of(delta))
        for start in range(0, len(scored), size):
            early = Delta(
                request_id=delta.request_id,
                prompt_logprobs=scored[start : start + size],
                num_cached_tokens=delta.num_cached_tokens,
                scheduled_s=delta.scheduled_s,
            )
            yield StepOutput(deltas=(early,), stats=output.stats)
    rest = tuple(structs.replace(delta, prompt_logprobs=()) for delta in output.deltas)
    yield structs.replace(output, deltas=rest)


def _entries_of(delta: Delta) -> int:
    """Log probabilities that each scored token of a prompt has: its own and its alternatives'."""
    return 1 + len(delta.prompt_logprobs[0].top) if delta.prompt_logprobs else 1
