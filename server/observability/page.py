"""The Prometheus names of a server's instruments, with their help texts: ours, and those of vLLM.

vLLM's names are for gateways and dashboards that read them. They show the same instruments: nothing is counted twice.
"""

from __future__ import annotations

from importlib.metadata import version

from inferd.server.observability.exposition import Export
from inferd.server.observability.instruments import Gauge
from inferd.server.observability.server_instruments import ServerInstruments


def show_engine_names(seen: ServerInstruments) -> Export:
    """Requests, steps, memory and engines, labelled with the model's name."""
    page = Export({"model_name": seen.model_name})
    _show_latencies(page, seen)
    page.histogram("inferd_step_duration_seconds", "Time of an engine step, from launch to ids.", seen.step_duration)
    page.histogram("inferd_schedule_duration_seconds", "Time to schedule an engine step.", seen.schedule_duration)
    page.histogram("inferd_step_tokens", "Number of tokens that an engine step computed.", seen.step_tokens)
    _show_efficiency(page, seen)
    _show_targets(page, seen)
    page.gauge("inferd_requests_running", "Number of sequences in the batch.", seen.running)
    page.gauge(
        "inferd_requests_waiting",
        "Number of sequences in the queue, and of those that wait for an engine.",
        seen.waiting,
    )
    page.gauge("inferd_kv_cache_usage_ratio", "Share of KV blocks that requests hold, from 0 to 1.", seen.kv_usage)
    page.gauge(
        "inferd_kv_cache_blocks",
        "Number of KV blocks by state: held, cached (free, but reusable by prefix), or free. 0 for encoders.",
        seen.blocks,
        "state",
    )
    page.gauge(
        "inferd_memory_bytes",
        "Memory of the weights and of the KV cache, as planned and as measured.",
        seen.memory,
        "kind",
        "source",
    )
    page.gauge("inferd_startup_phase_seconds", "Duration of each phase of the start.", seen.phases, "phase")
    page.gauge(
        "inferd_engine_up",
        "1 if an engine accepts requests, otherwise 0; missing while the model is unloaded or asleep.",
        seen.up,
    )
    page.gauge(
        "inferd_replica_up", "1 if this replica's engine accepts requests, otherwise 0.", seen.replica_up, "replica"
    )
    page.gauge(
        "inferd_replica_requests",
        "Number of a replica's sequences: running in its batch, or waiting in its queue.",
        seen.replica_requests,
        "replica",
        "state",
    )
    page.gauge(
        "inferd_replica_kv_cache_usage_ratio",
        "Share of a replica's KV blocks that requests hold, from 0 to 1.",
        seen.replica_kv_usage,
        "replica",
    )
    page.gauge(
        "inferd_sleep_state",
        "1 for the level at which the model sleeps, or for awake; 0 for others.",
        seen.sleep_state,
        "state",
    )
    page.gauge("inferd_standby_ready", "Number of replicas with a standby that is ready.", seen.standby)
    page.counter("inferd_engine_restarts", "Number of engines that replaced a dead one.", seen.restarts)
    page.counter("inferd_requests_replayed", "Number of sequences that were sent again to a new engine.", seen.replayed)
    page.histogram(
        "inferd_engine_recovery_seconds", "Time from the loss of an engine until the next one is ready.", seen.recovery
    )
    page.counter(
        "inferd_kv_left_blocks",
        "Number of KV blocks and states that an engine found of the one before it, and used, or dropped as damaged.",
        seen.left_blocks,
        "result",
    )
    page.counter(
        "inferd_kv_tier_tokens",
        "Number of prompt tokens that were loaded from the KV directory or from host memory.",
        seen.tier_tokens,
    )
    page.counter(
        "inferd_kv_tier_recomputed_tokens",
        "Number of loaded tokens that were computed again while idle, and were the same.",
        seen.tier_same_tokens,
    )
    page.counter(
        "inferd_kv_tier_bytes",
        "Bytes of KV read from and written to the directory and host memory.",
        seen.tier_bytes,
        "direction",
    )
    page.counter(
        "inferd_kv_host_read_bytes",
        "Bytes of KV copied from host memory to GPUs, which inferd_kv_tier_bytes counts too.",
        seen.host_reads,
    )
    page.gauge("inferd_kv_host_bytes", "Bytes of KV in host memory beside GPUs.", seen.host_bytes)
    page.counter(
        "inferd_kv_tier_segments",
        "Number of KV segments that were slow (computed instead), failed, damaged, unwritten, different or distrusted.",
        seen.tier_pieces,
        "result",
    )
    page.counter(
        "inferd_kv_tier_seconds",
        "Time that requests waited for the KV directory, and that computing what they loaded would have taken.",
        seen.tier_seconds,
        "kind",
    )
    page.gauge(
        "inferd_kv_tier_held_bytes",
        "Bytes of all files in the KV directory, of whichever server, when an engine last counted them.",
        seen.tier_held_bytes,
    )
    page.counter("inferd_engine_steps", "Number of engine steps.", seen.steps)
    page.counter("inferd_prompt_tokens", "Number of prompt tokens, prefix cache hits included.", seen.prompt_tokens)
    page.counter("inferd_prompt_tokens_computed", "Number of prompt tokens that were computed.", seen.computed_tokens)
    page.counter("inferd_generation_tokens", "Number of generated tokens.", seen.generation_tokens)
    page.counter(
        "inferd_prefix_cache_query_tokens",
        "Number of prompt tokens looked up in the prefix cache.",
        seen.prefix_queries,
    )
    page.counter(
        "inferd_prefix_cache_hit_tokens", "Number of prompt tokens found in the prefix cache.", seen.prefix_hits
    )
    page.counter("inferd_preemptions", "Number of sequences that were preempted to free KV blocks.", seen.preemptions)
    page.counter("inferd_draft_rows", "Number of rows of steps that verified draft tokens.", seen.draft_rows)
    page.counter("inferd_draft_tokens", "Number of draft tokens: guessed ones that steps verified.", seen.drafts)
    page.counter("inferd_accepted_draft_tokens", "Number of draft tokens that were accepted.", seen.accepted_drafts)
    page.counter(
        "inferd_accepted_draft_tokens_per_position",
        "Number of accepted draft tokens, by their place in the row, from 0.",
        seen.accepted_by_position,
        "position",
    )
    page.gauge(
        "inferd_expert_peak_ratio",
        "Tokens of a layer's busiest expert, divided by the mean of its experts, since the engine began (CPUs only).",
        seen.expert_peaks,
        "layer",
    )
    page.gauge(
        "inferd_lora_requests",
        "Number of sequences that use each LoRA adapter: running in the batch, or waiting in the queue.",
        seen.adapters,
        "adapter",
        "state",
    )
    page.counter("inferd_requests_arrived", "Number of accepted requests, by API.", seen.arrived, "api")
    page.counter(
        "inferd_requests_finished", "Number of sequences that ended, by finish reason.", seen.finished, "finish_reason"
    )
    page.counter(
        "inferd_tenant_requests_finished",
        "Number of a tenant's sequences that ended, by finish reason.",
        seen.tenant_finished,
        "tenant",
        "finish_reason",
    )
    page.counter(
        "inferd_tenant_prompt_tokens",
        "Number of prompt tokens of a tenant's sequences that ended, prefix cache hits included.",
        seen.tenant_prompt_tokens,
        "tenant",
    )
    page.counter(
        "inferd_tenant_generation_tokens",
        "Number of tokens generated for a tenant's sequences that ended.",
        seen.tenant_generation_tokens,
        "tenant",
    )
    page.gauge(
        "inferd_tenant_requests_waiting", "Number of a tenant's sequences in the queue.", seen.tenant_waiting, "tenant"
    )
    return page


def _show_latencies(page: Export, seen: ServerInstruments) -> None:
    page.histogram(
        "inferd_time_to_first_token_seconds", "Time from arrival to the first token in the engine.", seen.ttft
    )
    page.histogram(
        "inferd_time_per_output_token_seconds",
        "Mean time per output token after the first, one value per sequence.",
        seen.tpot,
    )
    page.histogram(
        "inferd_inter_token_latency_seconds", "Time between two tokens of a sequence in the engine.", seen.itl
    )
    page.histogram("inferd_e2e_request_latency_seconds", "Time from arrival to the last token.", seen.e2e)
    page.histogram(
        "inferd_request_queue_time_seconds", "Time from arrival to the first step that ran the sequence.", seen.queue
    )
    page.histogram(
        "inferd_request_prefill_time_seconds",
        "Time from a sequence's first step to its first token, or to its vector.",
        seen.prefill,
    )
    page.histogram("inferd_request_decode_time_seconds", "Time from a sequence's first token to its last.", seen.decode)
    page.histogram("inferd_request_prompt_tokens", "Number of prompt tokens per sequence.", seen.request_prompt_tokens)
    page.histogram(
        "inferd_request_generation_tokens", "Number of generated tokens per sequence.", seen.request_generation_tokens
    )


def _show_efficiency(page: Export, seen: ServerInstruments) -> None:
    work = seen.efficiency
    page.gauge("inferd_mfu_ratio", "FLOPs as a share of the peak, over the last minute's steps.", seen.mfu, "phase")
    page.gauge(
        "inferd_mbu_ratio", "Memory traffic as a share of the peak, over the last minute's steps.", seen.mbu, "phase"
    )
    page.counter("inferd_step_flops", "FLOPs that the steps needed.", work.flops, "phase")
    page.counter("inferd_step_bytes", "Bytes of memory that the steps needed to read and write.", work.bytes, "phase")
    page.counter(
        "inferd_step_seconds", "Time of the steps without overlap, by bottleneck.", work.seconds, "phase", "bound_by"
    )
    page.counter(
        "inferd_step_floor_seconds",
        "Time that the steps would have taken at the device's peaks.",
        work.floor_seconds,
        "phase",
    )
    page.gauge("inferd_peak_flops_per_second", "Peak speed of matrix products, measured at the start.", seen.peak_flops)
    page.gauge(
        "inferd_peak_read_bytes_per_second", "Peak speed of memory reads, measured at the start.", seen.peak_reads
    )


def _show_targets(page: Export, seen: ServerInstruments) -> None:
    page.counter(
        "inferd_slo_requests",
        "Number of sequences with a latency target, by latency and by whether they met it.",
        seen.slo,
        "latency",
        "outcome",
    )
    page.counter("inferd_goodput_requests", "Number of sequences that met all of their targets.", seen.goodput)
    page.counter("inferd_goodput_tokens", "Number of tokens generated for these sequences.", seen.goodput_tokens)
    page.counter(
        "inferd_requests_shed", "Number of sequences refused because they could not meet their TTFT target.", seen.shed
    )
    page.gauge("inferd_waiting_prompt_tokens", "Number of prompt tokens in the queue.", seen.tokens_waiting)
    page.gauge(
        "inferd_prefill_tokens_per_second", "Prefill speed that the step-time model predicts.", seen.prefill_rate
    )
    page.gauge(
        "inferd_step_model_error_ratio",
        "Error of the predicted step time, |predicted - measured| over the larger, of the newest steps.",
        seen.step_error,
        "percentile",
    )


def show_server_names(seen: ServerInstruments) -> Export:
    """HTTP, keys and the event loop."""
    page = Export({})
    build = Gauge()
    build.set(1, version("inferd"))
    page.gauge("inferd_build_info", "The version of inferd, as a label.", build, "version")
    page.counter("inferd_http_requests", "Number of HTTP answers.", seen.http, "route", "method", "status")
    page.counter(
        "inferd_request_notices",
        "Number of requests of which a part was accepted and not done, by what.",
        seen.notices,
        "notice",
    )
    page.counter(
        "inferd_answer_repairs",
        "Number of repairs that were needed to read answers: markers left out, or calls written in another format.",
        seen.repairs,
        "repair",
    )
    page.histogram("inferd_event_loop_lag_seconds", "Lateness of a timer in the server's event loop.", seen.loop)
    page.histogram(
        "inferd_http_request_duration_seconds", "Time of an HTTP request to its last byte.", seen.http_duration, "route"
    )
    page.counter(
        "inferd_tenant_requests_refused",
        "Number of a tenant's requests that were answered with an error, by its code.",
        seen.tenant_refused,
        "tenant",
        "code",
    )
    page.gauge("inferd_keys", "Number of valid keys from the keys file.", seen.keys)
    page.gauge(
        "inferd_keys_file_age_seconds",
        "Seconds since the server last found that the valid keys match the keys file.",
        seen.key_age,
    )
    page.counter(
        "inferd_keys_file_readings", "Number of readings of the keys file, by outcome.", seen.key_readings, "outcome"
    )
    page.gauge("inferd_asyncio_tasks", "Number of tasks in the server's event loop.", seen.tasks)
    return page


def show_vllm_names(seen: ServerInstruments) -> Export:
    """vLLM's names. `vllm:time_per_output_token_seconds` is the time between tokens, as in vLLM."""
    page = Export({"model_name": seen.model_name, "engine": "0"})
    page.gauge("vllm:num_requests_running", "Number of sequences in the batch.", seen.running)
    page.gauge(
        "vllm:num_requests_waiting",
        "Number of sequences in the queue, and of those that wait for an engine.",
        seen.waiting,
    )
    page.gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1.", seen.kv_usage)
    page.gauge(
        "vllm:engine_sleep_state", "1 for the state of the model, 0 for others.", seen.vllm_sleep_state, "sleep_state"
    )
    page.gauge("vllm:cache_config_info", "Size of the KV cache.", seen.cache_config, "block_size", "num_gpu_blocks")
    page.gauge(
        "vllm:lora_requests_info",
        "Time, with the LoRA adapters that have sequences as labels.",
        seen.adapters_info,
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
    )
    page.counter("vllm:prefix_cache_queries", "Number of prompt tokens looked up.", seen.prefix_queries)
    page.counter("vllm:prefix_cache_hits", "Number of prompt tokens found in the prefix cache.", seen.prefix_hits)
    page.counter("vllm:num_preemptions", "Number of sequences preempted to free KV blocks.", seen.preemptions)
    page.counter("vllm:spec_decode_num_drafts", "Number of rows that verified draft tokens.", seen.draft_rows)
    page.counter("vllm:spec_decode_num_draft_tokens", "Number of draft tokens.", seen.drafts)
    page.counter("vllm:spec_decode_num_accepted_tokens", "Number of accepted draft tokens.", seen.accepted_drafts)
    page.counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Number of accepted draft tokens, by their place in the row, from 0.",
        seen.accepted_by_position,
        "position",
    )
    page.counter("vllm:prompt_tokens", "Number of prompt tokens.", seen.prompt_tokens)
    page.counter("vllm:generation_tokens", "Number of generated tokens.", seen.generation_tokens)
    page.counter(
        "vllm:request_success", "Number of sequences that ended, by finish reason.", seen.finished, "finished_reason"
    )
    page.histogram("vllm:time_to_first_token_seconds", "Time to first token.", seen.ttft)
    page.histogram("vllm:inter_token_latency_seconds", "Time between tokens.", seen.itl)
    page.histogram("vllm:time_per_output_token_seconds", "Time between tokens (older name).", seen.itl)
    page.histogram("vllm:request_time_per_output_token_seconds", "Mean time per token of a sequence.", seen.tpot)
    page.histogram("vllm:e2e_request_latency_seconds", "Time from arrival to the last token.", seen.e2e)
    page.histogram("vllm:request_queue_time_seconds", "Time in the queue.", seen.queue)
    page.histogram("vllm:request_prefill_time_seconds", "Time of prefill.", seen.prefill)
    page.histogram("vllm:request_decode_time_seconds", "Time of decode.", seen.decode)
    page.histogram("vllm:request_prompt_tokens", "Number of prompt tokens per sequence.", seen.request_prompt_tokens)
    page.histogram(
        "vllm:request_generation_tokens", "Number of generated tokens per sequence.", seen.request_generation_tokens
    )
    page.histogram("vllm:iteration_tokens_total", "Number of tokens computed in a step.", seen.step_tokens)
    return page
