"""What the server counts and times, and its Prometheus page.

The router and the HTTP side call one short method per event; nothing here calls back or knows HTTP routes. Times are
seconds of the monotonic clock. Not thread-safe: it belongs to the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from inferd.engine.api.cost.roofline import StepPhase
from inferd.engine.api.wire.messages import EngineStats, FinishReason, Phase, Ready, StepOutput
from inferd.engine.api.wire.params import SchedulingParams
from inferd.server.observability.efficiency import Efficiency, PhaseSummary
from inferd.server.observability.instruments import Counter, Export, Gauge, Histogram
from inferd.server.observability.vllm_names import ITERATION_TOKENS, ITL, REQUEST_LATENCY, TTFT, show_vllm_names

FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_OPENMETRICS = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8"
"""With any other escaping prometheus_client 0.26 turns the colons of vLLM's names into underscores."""


def _fine(low_s: float, peers: tuple[float, ...]) -> tuple[float, ...]:
    """Seven buckets a decade from `low_s` to 100 s, and every bucket a vLLM dashboard may ask for."""
    decades = (low_s * 10**power for power in range(6))
    own = {round(decade * step, 6) for decade in decades for step in (1, 1.5, 2, 3, 4, 5, 7)}
    return tuple(sorted({bound for bound in own if bound <= 100} | set(peers)))


_COUNTS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One generated choice, when it is over. The `_s` fields are monotonic times; None where it never came so far."""

    scheduling: SchedulingParams
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    finish_reason: FinishReason
    e2e_target_s: float | None = None

    def attainment(self) -> dict[str, bool]:
        """Latency -> whether its target was met, of those that have one. What never came is late; an answer of one
        token has no TPOT, and meets any."""
        is_served = self.finish_reason in ("stop", "length")
        seen = (
            ("ttft", self.scheduling.ttft_target_s, self.ttft_s),
            ("tpot", self.scheduling.tpot_target_s, self.tpot_s or 0.0),
            ("e2e", self.e2e_target_s, self.e2e_s),
        )
        return {
            name: is_served and value is not None and value <= target
            for name, target, value in seen
            if target is not None
        }

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.scheduling.arrival_s

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled_s is None else self.scheduled_s - self.scheduling.arrival_s

    @property
    def prefill_s(self) -> float | None:
        """From the first step that ran it to its first token."""
        if self.scheduled_s is None or self.first_token_s is None:
            return None
        return self.first_token_s - self.scheduled_s

    @property
    def decode_s(self) -> float | None:
        """From its first token to its end."""
        return None if self.first_token_s is None else self.finished_s - self.first_token_s

    @property
    def e2e_s(self) -> float:
        return self.finished_s - self.scheduling.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Decode time over the tokens after the first; None where there are none."""
        if self.decode_s is None or self.num_generation_tokens < 2:
            return None
        return self.decode_s / (self.num_generation_tokens - 1)


class Metrics:
    """All instruments of one server, and the page that shows them."""

    def __init__(
        self,
        model_name: str,
        compat: Literal["none", "vllm"] = "none",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model_name = model_name
        self.efficiency = Efficiency(clock)
        self._make_latency()
        self._make_engine()
        self._make_http()
        self._last = EngineStats()
        self._num_starts = 0
        self._registry = CollectorRegistry()
        self._registry.register(self._own_names())
        self._registry.register(self._server_names())
        if compat == "vllm":
            self._registry.register(show_vllm_names(self))
        ProcessCollector(registry=self._registry)

    def _make_latency(self) -> None:
        self.ttft = Histogram(_fine(0.001, TTFT))
        self.tpot = Histogram(_fine(0.0001, ITL))
        self.itl = Histogram(_fine(0.0001, ITL))
        self.e2e, self.queue, self.prefill, self.decode = (Histogram(_fine(0.001, REQUEST_LATENCY)) for _ in range(4))
        self.request_prompt_tokens, self.request_generation_tokens = Histogram(_COUNTS), Histogram(_COUNTS)
        self.finished = Counter()
        for reason in FINISH_REASONS:
            self.finished.add(0, reason)
        for histogram in (self.ttft, self.tpot, self.itl, self.e2e, self.queue, self.prefill, self.decode):
            histogram.cell()
        self._ttft, self._itl = self.ttft.cell(), self.itl.cell()

    def _make_engine(self) -> None:
        self.running, self.waiting, self.kv_usage, self.up = (Gauge.zero() for _ in range(4))
        self.standby = Gauge.zero()
        self.blocks, self.phases, self.memory = Gauge(), Gauge(), Gauge()
        self.prefix_queries, self.prefix_hits, self.preemptions, self.restarts = (Counter.zero() for _ in range(4))
        self.prompt_tokens, self.computed_tokens, self.generation_tokens, self.steps = (
            Counter.zero() for _ in range(4)
        )
        self.replayed = Counter.zero()
        self.recovery = Histogram(_fine(0.001, ()))
        self.recovery.cell()
        self.step_duration = Histogram(_fine(0.0001, ()))
        self.schedule_duration = Histogram(_fine(0.00001, ()))
        self.step_tokens = Histogram(tuple(sorted({*_COUNTS[:16], *ITERATION_TOKENS})))
        self._step_cells = self.step_duration.cell(), self.schedule_duration.cell(), self.step_tokens.cell()
        self.cache_config = Gauge()
        self.mfu, self.mbu, self.peak_reads, self.peak_flops = Gauge(), Gauge(), Gauge(), Gauge()
        self.shed, self.goodput, self.goodput_tokens = Counter.zero(), Counter.zero(), Counter.zero()
        self.slo, self.step_error = Counter(), Gauge()
        self.tokens_waiting, self.prefill_rate = Gauge.zero(), Gauge.zero()

    def _make_http(self) -> None:
        self.arrived, self.http = Counter(), Counter()
        self.http_duration = Histogram(_fine(0.001, ()))
        self.loop = Histogram((0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10))
        self._loop = self.loop.cell()
        self.tasks = Gauge.zero()
        self.keys, self.key_readings, self.key_age = Gauge.zero(), Counter(), Gauge.zero()
        for outcome in ("good", "refused"):
            self.key_readings.add(0, outcome)

    def request_arrived(self, api: str) -> None:
        """A generation was accepted by the route family `api`, such as "chat"."""
        self.arrived.add(1, api)

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def tokens(self, num_tokens: int, gap_s: float) -> None:
        """The engine had `num_tokens` more of one stream after `gap_s`: each counts as an equal share of the gap."""
        self._itl.observe(gap_s / num_tokens, num_tokens)

    def request_finished(self, record: RequestRecord) -> None:
        """Latencies are of generations that ended by themselves; of aborts and errors only the waiting is known."""
        self.finished.add(1, record.finish_reason)
        self._count_targets(record)
        if record.queue_s is not None:
            self.queue.cell().observe(record.queue_s)
        if record.prefill_s is not None:
            self.prefill.cell().observe(record.prefill_s)
        if record.finish_reason not in ("stop", "length"):
            return
        self.e2e.cell().observe(record.e2e_s)
        self.request_prompt_tokens.cell().observe(record.num_prompt_tokens)
        self.request_generation_tokens.cell().observe(record.num_generation_tokens)
        if record.decode_s is not None:
            self.decode.cell().observe(record.decode_s)
        if record.tpot_s is not None:
            self.tpot.cell().observe(record.tpot_s)

    @property
    def num_finished(self) -> tuple[int, int]:
        """Generations that ended by themselves, and those that did not, by whoever's doing."""
        whole = sum(self.finished.values[(reason,)] for reason in ("stop", "length"))
        return int(whole), int(sum(self.finished.values.values()) - whole)

    def _count_targets(self, record: RequestRecord) -> None:
        """An abort is its caller's doing: it met nothing and missed nothing."""
        if record.finish_reason == "abort":
            return
        attainment = record.attainment()
        for latency, is_met in attainment.items():
            self.slo.add(1, latency, "met" if is_met else "missed")
        if record.finish_reason != "error" and all(attainment.values()):
            self.goodput.add(1)
            self.goodput_tokens.add(record.num_generation_tokens)

    def step(self, output: StepOutput) -> None:
        """Once per message of the engine, whatever the number of streams; one of no step has no duration."""
        if output.step_phase is not None:
            duration, schedule, tokens = self._step_cells
            duration.observe(output.step_duration_s)
            schedule.observe(output.schedule_duration_s)
            tokens.observe(output.step_num_tokens)
        self.efficiency.step(output)
        stats, last, self._last = output.stats, self._last, output.stats
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.kv_usage.set(stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0)
        self.blocks.set(stats.num_blocks_used, "used")
        self.blocks.set(stats.num_blocks_cached, "cached")
        self.blocks.set(stats.num_blocks - stats.num_blocks_used - stats.num_blocks_cached, "free")
        computed = _grown(stats.num_prompt_tokens, last.num_prompt_tokens)
        hits = _grown(stats.prefix_hit_tokens, last.prefix_hit_tokens)
        self.computed_tokens.add(computed)
        self.prompt_tokens.add(computed + hits)
        self.prefix_hits.add(hits)
        self.prefix_queries.add(_grown(stats.prefix_query_tokens, last.prefix_query_tokens))
        self.generation_tokens.add(_grown(stats.num_generation_tokens, last.num_generation_tokens))
        self.preemptions.add(_grown(stats.num_preemptions, last.num_preemptions))
        self.steps.add(_grown(stats.num_steps, last.num_steps))
        self.shed.add(_grown(stats.num_shed, last.num_shed))
        self.tokens_waiting.set(stats.num_tokens_waiting)
        self.prefill_rate.set(stats.step_model.prefill_tokens_per_s)
        self.step_error.set(stats.step_model.error_p50, "50")
        self.step_error.set(stats.step_model.error_p95, "95")

    def engine_ready(self, ready: Ready) -> None:
        """An engine takes requests; its counters begin at zero, those of the server go on."""
        self._last = EngineStats()
        self._num_starts += 1
        if self._num_starts > 1:
            self.restarts.add(1)
        self.up.set(1)
        for kind in ("weights", "kv"):
            self.memory.set(getattr(ready, f"planned_{kind}_bytes"), kind, "planned")
            self.memory.set(getattr(ready, f"{kind}_bytes"), kind, "measured")
        self.efficiency.engine_ready(ready.peaks)
        self.peak_reads.set(ready.peaks.read_bytes_per_s)
        self.peak_flops.set(ready.peaks.flops_per_s)
        self.cache_config.values.clear()
        self.cache_config.set(1, str(ready.block_size), str(ready.num_blocks))

    def recovered(self, num_replayed: int, outage_s: float) -> None:
        """The next engine took over what the last one left."""
        self.replayed.add(num_replayed)
        self.recovery.cell().observe(outage_s)

    @property
    def num_restarts(self) -> int:
        """Engines that replaced one that died."""
        return max(0, self._num_starts - 1)

    def engine_down(self) -> None:
        """No engine: nothing runs, waits or holds blocks."""
        for gauge in (self.up, self.running, self.waiting, self.kv_usage, self.tokens_waiting):
            gauge.set(0)
        self.blocks.values.clear()

    def phase(self, phase: Phase) -> None:
        self.phases.set(phase.duration_s, phase.name)

    def http_request(self, route: str, method: str, status: int, duration_s: float) -> None:
        """`route` is the route's template or one constant for unknown paths, never a caller's path."""
        self.http.add(1, route, method if method in _METHODS else "OTHER", str(status))
        self.http_duration.cell(route).observe(duration_s)

    def keys_read(self, num_keys: int, is_good: bool) -> None:
        """The keys file was read, and so many of its keys are known; not `is_good`: it was refused, and those stay."""
        self.keys.set(num_keys)
        self.key_readings.add(1, "good" if is_good else "refused")

    def keys_age(self, age_s: float) -> None:
        """The keys in force were last seen to be those of the keys file `age_s` ago."""
        self.key_age.set(age_s)

    def num_tasks(self, count: int) -> None:
        self.tasks.set(count)

    def loop_lag(self, lag_s: float) -> None:
        """By how much a beat of the event loop came late."""
        self._loop.observe(lag_s)

    def last_minute(self) -> Mapping[StepPhase, PhaseSummary]:
        """How near the steps came to the device's peaks; a phase that had none is not there."""
        return self.efficiency.last_minute()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """(page, content type) in the format that the Accept header asks for."""
        summaries = self.last_minute()
        self.mfu.values = {(phase,): summary.mfu for phase, summary in summaries.items()}
        self.mbu.values = {(phase,): summary.mbu for phase, summary in summaries.items()}
        encode, content_type = choose_encoder(_OPENMETRICS if _OPENMETRICS.partition(";")[0] in accept else "")
        return encode(self._registry), content_type

    def names(self) -> set[str]:
        """The name of every sample the page can hold, such as `x_bucket`, `x_sum` and `x_count` of a histogram."""
        suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
        return {
            family.name + suffix for family in self._registry.collect() for suffix in suffixes.get(family.type, ("",))
        }

    def _own_names(self) -> Export:
        page = Export({"model_name": self.model_name})
        page.histogram(
            "inferd_time_to_first_token_seconds", "From arrival to the first token in the engine.", self.ttft
        )
        page.histogram(
            "inferd_time_per_output_token_seconds", "Mean time a token after the first, by request.", self.tpot
        )
        page.histogram("inferd_inter_token_latency_seconds", "Time between a stream's tokens in the engine.", self.itl)
        page.histogram("inferd_e2e_request_latency_seconds", "From arrival to the last token.", self.e2e)
        page.histogram("inferd_request_queue_time_seconds", "From arrival to the first step that ran it.", self.queue)
        page.histogram("inferd_request_prefill_time_seconds", "From its first step to its first token.", self.prefill)
        page.histogram("inferd_request_decode_time_seconds", "From its first token to its last.", self.decode)
        page.histogram("inferd_request_prompt_tokens", "Prompt tokens of a request.", self.request_prompt_tokens)
        page.histogram("inferd_request_generation_tokens", "Tokens generated.", self.request_generation_tokens)
        page.histogram("inferd_step_duration_seconds", "One engine step, launch to ids.", self.step_duration)
        page.histogram("inferd_schedule_duration_seconds", "Planning one engine step.", self.schedule_duration)
        page.histogram("inferd_step_tokens", "Tokens computed in one engine step.", self.step_tokens)
        self._show_efficiency(page)
        self._show_targets(page)
        page.gauge("inferd_requests_running", "Requests in the batch.", self.running)
        page.gauge("inferd_requests_waiting", "Requests in the queue.", self.waiting)
        page.gauge("inferd_kv_cache_usage_ratio", "Share of KV blocks held by requests, 0 to 1.", self.kv_usage)
        page.gauge("inferd_kv_cache_blocks", "KV blocks: used, cached (free, reusable), free.", self.blocks, "state")
        page.gauge(
            "inferd_memory_bytes", "Memory of weights and KV, planned and measured.", self.memory, "kind", "source"
        )
        page.gauge("inferd_startup_phase_seconds", "Start-up, by phase.", self.phases, "phase")
        page.gauge("inferd_engine_up", "Whether an engine takes requests.", self.up)
        page.gauge("inferd_standby_ready", "Whether a standby waits to take the engine's place.", self.standby)
        page.counter("inferd_engine_restarts", "Engines that replaced one that died.", self.restarts)
        page.counter("inferd_requests_replayed", "Requests sent again to a new engine.", self.replayed)
        page.histogram("inferd_engine_recovery_seconds", "From an engine's loss to the next one ready.", self.recovery)
        page.counter("inferd_engine_steps", "Engine steps.", self.steps)
        page.counter("inferd_prompt_tokens", "Prompt tokens taken in, prefix hits included.", self.prompt_tokens)
        page.counter("inferd_prompt_tokens_computed", "Prompt tokens computed.", self.computed_tokens)
        page.counter("inferd_generation_tokens", "Tokens generated.", self.generation_tokens)
        page.counter("inferd_prefix_cache_query_tokens", "Prompt tokens looked up.", self.prefix_queries)
        page.counter("inferd_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", self.prefix_hits)
        page.counter("inferd_preemptions", "Requests put back to free KV blocks.", self.preemptions)
        page.counter("inferd_requests_arrived", "Generations accepted.", self.arrived, "api")
        page.counter("inferd_requests_finished", "Generations over, by why.", self.finished, "finish_reason")
        return page

    def _show_efficiency(self, page: Export) -> None:
        seen = self.efficiency
        page.gauge("inferd_mfu_ratio", "FLOPs over the peak's, in the last minute's steps.", self.mfu, "phase")
        page.gauge("inferd_mbu_ratio", "Bytes over the peak's, in the last minute's steps.", self.mbu, "phase")
        page.counter("inferd_step_flops", "FLOPs that the steps' work needs.", seen.flops, "phase")
        page.counter("inferd_step_bytes", "Bytes of memory that the steps' work needs.", seen.bytes, "phase")
        page.counter("inferd_step_seconds", "Steps' own time, by what held them up.", seen.seconds, "phase", "bound_by")
        page.counter("inferd_step_floor_seconds", "Least time for the steps' work.", seen.floor_seconds, "phase")
        page.gauge("inferd_peak_flops_per_second", "Measured at start: matrix products.", self.peak_flops)
        page.gauge("inferd_peak_read_bytes_per_second", "Measured at start: memory.", self.peak_reads)

    def _show_targets(self, page: Export) -> None:
        page.counter("inferd_slo_requests", "Requests with a target, by latency.", self.slo, "latency", "outcome")
        page.counter("inferd_goodput_requests", "Requests served within all of their targets.", self.goodput)
        page.counter("inferd_goodput_tokens", "Tokens generated for those requests.", self.goodput_tokens)
        page.counter("inferd_requests_shed", "Requests refused for their TTFT target.", self.shed)
        page.gauge("inferd_waiting_prompt_tokens", "Tokens of prompts in the queue.", self.tokens_waiting)
        page.gauge("inferd_prefill_tokens_per_second", "Prompts, by the step-time model.", self.prefill_rate)
        page.gauge(
            "inferd_step_model_error_ratio",
            "|predicted - measured| step time, as a share of the larger, newest steps.",
            self.step_error,
            "percentile",
        )

    def _server_names(self) -> Export:
        page = Export({})
        build = Gauge()
        build.set(1, version("inferd"))
        page.gauge("inferd_build_info", "The version that runs.", build, "version")
        page.counter("inferd_http_requests", "HTTP answers.", self.http, "route", "method", "status")
        page.histogram("inferd_event_loop_lag_seconds", "How late the event loop came to a timer.", self.loop)
        page.histogram("inferd_http_request_duration_seconds", "HTTP, to the last byte.", self.http_duration, "route")
        page.gauge("inferd_keys", "Keys known from the keys file.", self.keys)
        page.gauge(
            "inferd_keys_file_age_seconds",
            "Seconds since the server last found the keys in force to be those of the keys file.",
            self.key_age,
        )
        page.counter("inferd_keys_file_readings", "Readings of the keys file.", self.key_readings, "outcome")
        page.gauge("inferd_asyncio_tasks", "Tasks of the server's event loop.", self.tasks)
        return page


def _grown(now: int, before: int) -> int:
    """How much an engine's counter grew; one that fell was reset with its engine, and counts whole."""
    return now - before if now >= before else now
