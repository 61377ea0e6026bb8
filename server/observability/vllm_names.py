"""The metric names of vLLM, for gateways and dashboards that read them: the same instruments under other names.

Nothing is counted twice. Bucket bounds are those of vLLM's v1 engine; our instruments hold a superset of them.
"""

from __future__ import annotations

from typing import Protocol

from inferd.server.observability.instruments import Counter, Export, Gauge, Histogram

TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0)  # fmt: skip
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                   480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
ITERATION_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


class Shown(Protocol):
    """The instruments that have a vLLM name."""

    model_name: str
    ttft: Histogram
    tpot: Histogram
    itl: Histogram
    e2e: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram
    request_prompt_tokens: Histogram
    request_generation_tokens: Histogram
    step_tokens: Histogram
    running: Gauge
    waiting: Gauge
    kv_usage: Gauge
    cache_config: Gauge
    prefix_queries: Counter
    prefix_hits: Counter
    preemptions: Counter
    prompt_tokens: Counter
    generation_tokens: Counter
    finished: Counter


def show_vllm_names(metrics: Shown) -> Export:
    """A page of vLLM's names. `vllm:time_per_output_token_seconds` is what vLLM made of it: the latency by token."""
    page = Export({"model_name": metrics.model_name, "engine": "0"})
    page.gauge("vllm:num_requests_running", "Requests in the batch.", metrics.running)
    page.gauge("vllm:num_requests_waiting", "Requests in the queue.", metrics.waiting)
    page.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use; 1 is all.", metrics.kv_usage)
    page.gauge("vllm:cache_config_info", "The KV cache.", metrics.cache_config, "block_size", "num_gpu_blocks")
    page.counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", metrics.prefix_queries)
    page.counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", metrics.prefix_hits)
    page.counter("vllm:num_preemptions", "Requests put back to free KV blocks.", metrics.preemptions)
    page.counter("vllm:prompt_tokens", "Prompt tokens taken in.", metrics.prompt_tokens)
    page.counter("vllm:generation_tokens", "Tokens generated.", metrics.generation_tokens)
    page.counter("vllm:request_success", "Generations over, by why.", metrics.finished, "finished_reason")
    page.histogram("vllm:time_to_first_token_seconds", "Time to first token.", metrics.ttft)
    page.histogram("vllm:inter_token_latency_seconds", "Time between tokens.", metrics.itl)
    page.histogram("vllm:time_per_output_token_seconds", "Time between tokens (older name).", metrics.itl)
    page.histogram("vllm:request_time_per_output_token_seconds", "Mean time a token, by request.", metrics.tpot)
    page.histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", metrics.e2e)
    page.histogram("vllm:request_queue_time_seconds", "Waiting.", metrics.queue)
    page.histogram("vllm:request_prefill_time_seconds", "Prefill.", metrics.prefill)
    page.histogram("vllm:request_decode_time_seconds", "Decode.", metrics.decode)
    page.histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", metrics.request_prompt_tokens)
    page.histogram("vllm:request_generation_tokens", "Tokens of an answer.", metrics.request_generation_tokens)
    page.histogram("vllm:iteration_tokens_total", "Tokens computed in one step.", metrics.step_tokens)
    return page
