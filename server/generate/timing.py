"""How long one generation took, as `metrics` tells it. The names and what they count are vLLM's."""

from __future__ import annotations

from inferd.server.generate.ports import TokenStream

Metrics = dict[str, float | None]


def metrics_of(stream: TokenStream, arrival_s: float) -> Metrics:
    """In milliseconds, and tokens a second; null for what did not happen."""
    scheduled_s, first_s, last_s = stream.scheduled_s, stream.first_token_s, stream.last_token_s
    num_tokens = stream.num_generated
    generation_s = _between(first_s, last_s)
    total_s = _between(scheduled_s, last_s)
    return {
        "time_to_first_token_ms": _ms(_between(scheduled_s, first_s)),
        "queue_time_ms": _ms(_between(arrival_s, scheduled_s)),
        "generation_time_ms": _ms(generation_s),
        "mean_itl_ms": _ms(generation_s / (num_tokens - 1)) if generation_s is not None and num_tokens > 1 else None,
        "tokens_per_second": round(num_tokens / total_s, 2) if total_s else None,
    }


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else max(0.0, end_s - start_s)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
