"""Every instrument of one server, with its buckets. `metrics` updates them; `page` gives them Prometheus names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Literal, get_args

from inferd.engine.api.wire.messages import FinishReason
from inferd.server.observability.efficiency import Efficiency
from inferd.server.observability.instruments import Counter, Gauge, Histogram, LastMinute, MinuteSum
from inferd.server.schema.notices import ABOUT

Repair = Literal["stray_marker", "call_in_other_format"]
"""How an answer was read otherwise than the model's format says: a marker that belonged to nothing was left out, or a
call was read that the model wrote in another way."""
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)

# Bucket bounds of vLLM's v1 engine. Our histograms have a superset of them, so that vLLM's dashboards work.
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0)  # fmt: skip
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                   480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
ITERATION_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


def _fine(low_s: float, peers: tuple[float, ...]) -> tuple[float, ...]:
    """Seven buckets a decade from `low_s` to 100 s, and all buckets of `peers`."""
    decades = (low_s * 10**power for power in range(6))
    own = {round(decade * step, 6) for decade in decades for step in (1, 1.5, 2, 3, 4, 5, 7)}
    return tuple(sorted({bound for bound in own if bound <= 100} | set(peers)))


TIER_PIECES = ("slow", "failed", "damaged", "unwritten", "different", "distrusted")
"""Results of pieces of the KV directory, by the names of `EngineStats`."""
_COUNTS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))


class ServerInstruments:
    """The instruments of one server. They belong to the event loop."""

    def __init__(self, model_name: str, clock: Callable[[], float]) -> None:
        self.model_name = model_name
        self.efficiency = Efficiency(clock)
        self.recent_ttft, self.recent_tpot = LastMinute(clock), LastMinute(clock)
        self._make_latency()
        self._make_engine()
        self._make_http()
        self._make_tenants(clock)

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
        self.sleep_state, self.vllm_sleep_state = Gauge(), Gauge()
        self.replica_up, self.replica_requests, self.replica_kv_usage = Gauge(), Gauge(), Gauge()
        self.blocks, self.phases, self.memory = Gauge(), Gauge(), Gauge()
        self.prefix_queries, self.prefix_hits, self.preemptions, self.restarts = (Counter.zero() for _ in range(4))
        self.prompt_tokens, self.computed_tokens, self.generation_tokens, self.steps = (
            Counter.zero() for _ in range(4)
        )
        self.replayed, self.left_blocks = Counter.zero(), Counter()
        for result in ("taken", "damaged"):
            self.left_blocks.add(0, result)
        self.tier_pieces, self.tier_bytes = Counter(), Counter()
        self.host_reads, self.host_bytes = Counter.zero(), Gauge.zero()
        self.tier_tokens, self.tier_same_tokens = Counter.zero(), Counter.zero()
        for name in TIER_PIECES:
            self.tier_pieces.add(0, name)
        for name in ("read", "written"):
            self.tier_bytes.add(0, name)
        self.tier_seconds, self.tier_held_bytes = Counter(), Gauge.zero()
        for name in ("waiting", "computing"):
            self.tier_seconds.add(0, name)
        self.recovery = Histogram(_fine(0.001, ()))
        self.recovery.cell()
        self.step_duration = Histogram(_fine(0.0001, ()))
        self.schedule_duration = Histogram(_fine(0.00001, ()))
        self.step_tokens = Histogram(tuple(sorted({*_COUNTS[:16], *ITERATION_TOKENS})))
        self._step_cells = self.step_duration.cell(), self.schedule_duration.cell(), self.step_tokens.cell()
        self.cache_config = Gauge()
        self.mfu, self.mbu, self.peak_reads, self.peak_flops = Gauge(), Gauge(), Gauge(), Gauge()
        self.draft_rows, self.drafts, self.accepted_drafts = (Counter.zero() for _ in range(3))
        self.accepted_by_position = Counter()
        self.expert_peaks = Gauge()
        self.adapters, self.adapters_info = Gauge(), Gauge()
        self.shed, self.goodput, self.goodput_tokens = Counter.zero(), Counter.zero(), Counter.zero()
        self.slo, self.step_error = Counter(), Gauge()
        self.tokens_waiting, self.prefill_rate = Gauge.zero(), Gauge.zero()

    def _make_http(self) -> None:
        self.arrived, self.http, self.notices, self.repairs = Counter(), Counter(), Counter(), Counter()
        for kind in get_args(Repair):
            self.repairs.add(0, kind)
        for name in ABOUT:
            self.notices.add(0, name)
        self.http_duration = Histogram(_fine(0.001, ()))
        self.loop = Histogram((0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10))
        self._loop = self.loop.cell()
        self.tasks = Gauge.zero()
        self.keys, self.key_readings, self.key_age = Gauge.zero(), Counter(), Gauge.zero()
        for outcome in ("good", "refused"):
            self.key_readings.add(0, outcome)

    def _make_tenants(self, clock: Callable[[], float]) -> None:
        self.tenant_finished, self.tenant_refused, self.tenant_waiting = Counter(), Counter(), Gauge()
        self.tenant_prompt_tokens, self.tenant_generation_tokens = Counter(), Counter()
        self.recent_tenant_tokens = defaultdict[str, MinuteSum](lambda: MinuteSum(clock))
        self.recent_tenant_refused = defaultdict[str, MinuteSum](lambda: MinuteSum(clock))
