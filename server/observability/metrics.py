"""Counts and times what the server does, and renders the Prometheus page.

The router and the HTTP side call one short method per event. Nothing here calls back or knows HTTP routes. Times are
seconds of the monotonic clock. It belongs to the event loop and is not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, TypeVar

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from inferd.engine.api.cost.roofline import StepPhase
from inferd.engine.api.wire.messages import EngineStats, Phase, Ready, StepOutput
from inferd.server.auth.keys_file import OTHER_TENANTS
from inferd.server.observability.efficiency import PhaseSummary
from inferd.server.observability.page import show_engine_names, show_server_names, show_vllm_names
from inferd.server.observability.request_record import RequestRecord
from inferd.server.observability.server_instruments import FINISH_REASONS, TIER_PIECES, Repair, ServerInstruments
from inferd.server.schema.notices import Name

_Number = TypeVar("_Number", int, float)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

MAX_TENANTS = 32
"""Number of tenants with a label of their own. All further tenants share one label."""

_OPENMETRICS = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8"
"""With another escaping, prometheus_client 0.26 replaces the colons of vLLM's names by underscores."""


@dataclass(frozen=True, slots=True)
class Page:
    """The page of one moment, in both formats."""

    text: bytes
    openmetrics: bytes

    def answer(self, accept: str) -> tuple[bytes, str]:
        """(page, content type), in the format that the Accept header asks for."""
        if _OPENMETRICS.partition(";")[0] in accept:
            return self.openmetrics, choose_encoder(_OPENMETRICS)[1]
        return self.text, choose_encoder("")[1]


class _Process(Collector):
    """The library's metrics of this process, read once for both formats."""

    def __init__(self) -> None:
        self._families = tuple(ProcessCollector(registry=None).collect())

    def collect(self) -> Iterable[Metric]:
        return self._families


_SLEEP_STATES = "awake", "level_0", "level_1", "level_2"
_VLLM_SLEEP_STATES = "awake", "", "weights_offloaded", "discard_all"
"""vLLM has no series for level 0."""


class Metrics(ServerInstruments):
    """All instruments of one model and its server, with one method per event, and the page that shows them."""

    def __init__(
        self, model_name: str, compat: Literal["none", "vllm"] = "none", clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(model_name, clock)
        self._stats: dict[int, EngineStats] = {}
        """Replica that takes requests -> the last of its engine."""
        self._ready: dict[int, Ready] = {}
        self._tenant_labels: dict[str, str] = {}
        """Id of a tenant -> its label, for at most `MAX_TENANTS`."""
        self._num_starts = 0
        self._of_model = [show_engine_names(self), *([show_vllm_names(self)] if compat == "vllm" else [])]
        self._exports = [self._of_model[0], show_server_names(self), *self._of_model[1:]]
        self._beside: list[Metrics] = []
        self._held = EngineStats()
        self.sleeps(None)

    def show_beside(self, other: Metrics) -> None:
        """Show what another model's engines do on this page too. What concerns the whole server is counted here."""
        self._beside.append(other)
        for export, its in zip(self._of_model, other._of_model, strict=True):
            export.join(its)

    def request_arrived(self, api: str) -> None:
        """The route family `api`, such as "chat", accepted a request."""
        self.arrived.add(1, api)

    def notices_sent(self, names: Iterable[Name]) -> None:
        """An answer had these notices."""
        for name in names:
            self.notices.add(1, name)

    def answer_repaired(self, repairs: Mapping[Repair, int]) -> None:
        """An answer was read with these repairs: kind -> how often."""
        for kind, count in repairs.items():
            if count:
                self.repairs.add(count, kind)

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)
        self.recent_ttft.observe(ttft_s)

    def tokens(self, num_tokens: int, gap_s: float) -> None:
        """A sequence got `num_tokens` tokens after `gap_s`. Each token counts with an equal share of the gap."""
        self._itl.observe(gap_s / num_tokens, num_tokens)

    def request_finished(self, record: RequestRecord) -> None:
        """Counts latencies of sequences that ended normally, and queue and prefill time of aborts and errors too."""
        self.finished.add(1, record.finish_reason)
        self._count_targets(record)
        if record.scheduling.tenant:
            self._count_tenant(record)
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
            self.recent_tpot.observe(record.tpot_s)

    @property
    def num_finished(self) -> tuple[int, int]:
        """Number of sequences that ended normally, and of those that did not."""
        whole = sum(self.finished.values[(reason,)] for reason in ("stop", "length"))
        return int(whole), int(sum(self.finished.values.values()) - whole)

    def _count_targets(self, record: RequestRecord) -> None:
        """Skips aborts: the caller caused them, so they neither met nor missed a target."""
        if record.finish_reason == "abort":
            return
        attainment = record.attainment()
        for latency, is_met in attainment.items():
            self.slo.add(1, latency, "met" if is_met else "missed")
        if record.finish_reason != "error" and all(attainment.values()):
            self.goodput.add(1)
            self.goodput_tokens.add(record.num_generation_tokens)

    def _count_tenant(self, record: RequestRecord) -> None:
        label = self.tenant_label(record.scheduling.tenant)
        self.tenant_finished.add(1, label, record.finish_reason)
        self.tenant_prompt_tokens.add(record.num_prompt_tokens, label)
        self.tenant_generation_tokens.add(record.num_generation_tokens, label)
        self.recent_tenant_tokens[label].add(record.num_prompt_tokens + record.num_generation_tokens)

    def step(self, output: StepOutput, replica: int = 0) -> None:
        """Called once per message of an engine, however many streams there are. A message may report no step."""
        if output.step_phase is not None:
            duration, schedule, tokens = self._step_cells
            duration.observe(output.step_duration_s)
            schedule.observe(output.schedule_duration_s)
            tokens.observe(output.step_num_tokens)
        self.efficiency.step(output)
        stats, last = output.stats, self._stats.get(replica, EngineStats())
        self._stats[replica] = stats
        computed = _grown(stats.num_prompt_tokens, last.num_prompt_tokens)
        hits = _grown(stats.prefix_hit_tokens, last.prefix_hit_tokens)
        self.computed_tokens.add(computed)
        self.prompt_tokens.add(computed + hits)
        self.prefix_hits.add(hits)
        self.prefix_queries.add(_grown(stats.prefix_query_tokens, last.prefix_query_tokens))
        self.generation_tokens.add(_grown(stats.num_generation_tokens, last.num_generation_tokens))
        self.preemptions.add(_grown(stats.num_preemptions, last.num_preemptions))
        self.steps.add(_grown(stats.num_steps, last.num_steps))
        for name in TIER_PIECES:
            self.tier_pieces.add(_grown(getattr(stats, f"tier_{name}"), getattr(last, f"tier_{name}")), name)
        self.tier_bytes.add(_grown(stats.tier_read_bytes, last.tier_read_bytes), "read")
        self.tier_bytes.add(_grown(stats.tier_written_bytes, last.tier_written_bytes), "written")
        self.host_reads.add(_grown(stats.host_read_bytes, last.host_read_bytes))
        self.tier_tokens.add(_grown(stats.tier_loaded_tokens, last.tier_loaded_tokens))
        self.tier_same_tokens.add(_grown(stats.tier_same_tokens, last.tier_same_tokens))
        self.tier_seconds.add(_grown(stats.tier_wait_s, last.tier_wait_s), "waiting")
        self.tier_seconds.add(_grown(stats.tier_compute_s, last.tier_compute_s), "computing")
        self.left_blocks.add(_grown(stats.num_left_taken, last.num_left_taken), "taken")
        self.left_blocks.add(_grown(stats.num_left_damaged, last.num_left_damaged), "damaged")
        self.shed.add(_grown(stats.num_shed, last.num_shed))
        if stats.num_drafts:
            self._count_drafts(stats, last)
        self._show_load(replica)

    def _show_load(self, replica: int) -> None:
        """Set the gauges of what runs, waits and is held: of the replica, and of all."""
        own, label = self._stats.get(replica, EngineStats()), str(replica)
        self.replica_requests.set(own.num_running, label, "running")
        self.replica_requests.set(own.num_waiting, label, "waiting")
        self.replica_kv_usage.set(_usage(own), label)
        stats = EngineStats.total(list(self._stats.values()) or [own])
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting + self._held.num_waiting)
        self.kv_usage.set(_usage(stats))
        self.blocks.set(stats.num_blocks_used, "used")
        self.blocks.set(stats.num_blocks_cached, "cached")
        self.blocks.set(stats.num_blocks - stats.num_blocks_used - stats.num_blocks_cached, "free")
        for layer, peak in stats.expert_peaks:
            self.expert_peaks.set(peak, str(layer))
        self.tier_held_bytes.set(stats.tier_held_bytes)
        self.host_bytes.set(stats.host_bytes)
        self.tokens_waiting.set(stats.num_tokens_waiting + self._held.num_tokens_waiting)
        self.prefill_rate.set(stats.step_model.prefill_tokens_per_s)
        self.step_error.set(stats.step_model.error_p50, "50")
        self.step_error.set(stats.step_model.error_p95, "95")

    def requests_held(self, held: EngineStats) -> None:
        """Add the sequences that wait in the server for an engine to those in the engines' queues. Called before each
        page, because no step tells of them."""
        self._held = held
        stats = EngineStats.total([*self._stats.values(), held])
        self.waiting.set(stats.num_waiting)
        self.tokens_waiting.set(stats.num_tokens_waiting)

    def _count_drafts(self, stats: EngineStats, last: EngineStats) -> None:
        self.draft_rows.add(_grown(stats.num_draft_rows, last.num_draft_rows))
        self.drafts.add(_grown(stats.num_drafts, last.num_drafts))
        for position, (now, before) in enumerate(zip_longest(stats.accepted_drafts, last.accepted_drafts, fillvalue=0)):
            num_accepted = _grown(now, before)
            self.accepted_drafts.add(num_accepted)
            self.accepted_by_position.add(num_accepted, str(position))

    def engine_ready(self, ready: Ready, replica: int = 0) -> None:
        """A new engine accepts requests. Its counters begin at zero, while the server's continue."""
        self._stats[replica] = EngineStats(num_blocks=ready.num_blocks)
        self._show_load(replica)
        self._num_starts += 1
        if replica in self._ready:
            self.restarts.add(1)
        self._ready[replica] = ready
        self.up.set(1)
        self.replica_up.set(1, str(replica))
        for kind in ("weights", "kv"):
            for source, prefix in (("planned", "planned_"), ("measured", "")):
                num_bytes = sum(getattr(each, f"{prefix}{kind}_bytes") for each in self._ready.values())
                self.memory.set(num_bytes, kind, source)
        self.efficiency.engine_ready(ready.peaks)
        self.peak_reads.set(ready.peaks.read_bytes_per_s)
        self.peak_flops.set(ready.peaks.flops_per_s)
        self.cache_config.values.clear()
        self.cache_config.set(1, str(ready.block_size), str(sum(each.num_blocks for each in self._ready.values())))

    def recovered(self, num_replayed: int, outage_s: float) -> None:
        """A new engine took over the sequences of the last one."""
        self.replayed.add(num_replayed)
        self.recovery.cell().observe(outage_s)

    @property
    def num_restarts(self) -> int:
        """Number of engines that replaced a dead one."""
        return max(0, self._num_starts - len(self._ready))

    def engine_down(self, replica: int = 0) -> None:
        """The replica has no engine, so nothing runs, waits or holds blocks there."""
        self._stats.pop(replica, None)
        self.replica_up.set(0, str(replica))
        self._show_load(replica)
        if not self._stats:
            self.up.set(0)
            self.blocks.values.clear()

    def engine_unloaded(self, replica: int = 0) -> None:
        """The replica's engine was stopped to free its memory. The next one replaces no dead one.

        No series says that it is down, because nobody has to be called.
        """
        self.engine_down(replica)
        self.up.values.clear()
        self.replica_up.values.pop((str(replica),), None)
        if self._ready.pop(replica, None) is not None:
            self._num_starts -= 1
        for kind in ("weights", "kv"):
            self.memory.set(sum(getattr(each, f"{kind}_bytes") for each in self._ready.values()), kind, "measured")

    def sleeps(self, level: int | None) -> None:
        """The level at which the model sleeps; None if it is awake. Called before each page."""
        levels = None, 0, 1, 2
        for gauge, names in ((self.sleep_state, _SLEEP_STATES), (self.vllm_sleep_state, _VLLM_SLEEP_STATES)):
            gauge.values = {(name,): float(each == level) for each, name in zip(levels, names, strict=True) if name}

    def phase(self, phase: Phase) -> None:
        self.phases.set(phase.duration_s, phase.name)

    def adapter_requests(self, requests: Mapping[str, tuple[int, int]], most: int) -> None:
        """Adapter -> its sequences that (run, wait). `most`: number of adapters that there is memory for."""
        states = ("running", "waiting")
        self.adapters.values = {
            (name, state): number
            for name, numbers in requests.items()
            for state, number in zip(states, numbers, strict=True)
        }
        running, waiting = (",".join(name for name, numbers in requests.items() if numbers[i]) for i in range(2))
        self.adapters_info.values = {(str(most), running, waiting): time.time()}

    def http_request(self, route: str, method: str, status: int, duration_s: float) -> None:
        """`route` is the template of the route, or a constant for unknown paths. It is never a caller's path."""
        self.http.add(1, route, method if method in _METHODS else "OTHER", str(status))
        self.http_duration.cell(route).observe(duration_s)

    def keys_read(self, num_keys: int, is_good: bool) -> None:
        """The keys file was read, and `num_keys` of its keys are valid. If not `is_good`, the old keys stay valid."""
        self.keys.set(num_keys)
        self.key_readings.add(1, "good" if is_good else "refused")

    def keys_age(self, age_s: float) -> None:
        """The valid keys were last found to match the keys file `age_s` ago."""
        self.key_age.set(age_s)

    def tenants_known(self, names: Mapping[str, str]) -> None:
        """Id of each tenant of the keys file -> its name, in the file's order.

        A tenant that has a label keeps it. Others get one as long as there are fewer than `MAX_TENANTS`, so that a file
        that changes all the time makes no endless series.
        """
        for tenant, name in names.items():
            if len(self._tenant_labels) < MAX_TENANTS:
                self._tenant_labels.setdefault(tenant, name)
        for label in (*self._tenant_labels.values(), OTHER_TENANTS):
            for counter in (self.tenant_prompt_tokens, self.tenant_generation_tokens):
                counter.add(0, label)
            for reason in FINISH_REASONS:
                self.tenant_finished.add(0, label, reason)

    def tenant_refused_with(self, tenant: str, code: str) -> None:
        """A request of the tenant was answered with the error `code`."""
        label = self.tenant_label(tenant)
        self.tenant_refused.add(1, label, code)
        self.recent_tenant_refused[label].add(1)

    def tenants_waiting(self, num_waiting: Mapping[str, int]) -> None:
        """Id of each tenant with waiting sequences -> their number."""
        totals = dict.fromkeys((label for label, _ in self.tenant_finished.values), 0)
        for tenant, number in num_waiting.items():
            label = self.tenant_label(tenant)
            totals[label] = totals.get(label, 0) + number
        self.tenant_waiting.values = {(label,): number for label, number in totals.items()}

    def tenant_label(self, tenant: str) -> str:
        return self._tenant_labels.get(tenant, OTHER_TENANTS)

    @property
    def tenant_labels(self) -> tuple[str, ...]:
        """The labels of all tenants, in the order of the keys file. Empty without one."""
        return tuple(dict.fromkeys((*self._tenant_labels.values(), OTHER_TENANTS))) if self._tenant_labels else ()

    def num_tasks(self, count: int) -> None:
        self.tasks.set(count)

    def loop_lag(self, lag_s: float) -> None:
        """Lateness of a timer in the event loop."""
        self._loop.observe(lag_s)

    def last_minute(self) -> Mapping[StepPhase, PhaseSummary]:
        """Efficiency of the last minute's steps. A phase without steps is missing."""
        return self.efficiency.last_minute()

    def page_pieces(self) -> Generator[None, None, Page]:
        """Make the page in pieces of at most some hundred lines, or 1 ms. Counts may grow between two pieces, but each
        instrument of a model is written in one."""
        for metrics in (self, *self._beside):
            summaries = metrics.last_minute()
            metrics.mfu.values = {(phase,): summary.mfu for phase, summary in summaries.items()}
            metrics.mbu.values = {(phase,): summary.mbu for phase, summary in summaries.items()}
            yield
        text, openmetrics = [], []
        for family in (family for export in self._exports for family in export.families):
            text.append(family.text_head)
            openmetrics.append(family.openmetrics_head)
            for series in family.series:
                lines = series.text()
                text.append(lines)
                openmetrics.append(lines)
                yield
        process = _Process()
        yield
        as_text = "".join(text).encode() + choose_encoder("")[0](process)
        yield
        return Page(as_text, "".join(openmetrics).encode() + choose_encoder(_OPENMETRICS)[0](process))

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """(page, content type), made in one go, for programs that have no event loop."""
        pieces = self.page_pieces()
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                page: Page = end.value
                return page.answer(accept)

    def names(self) -> set[str]:
        """Names of all samples that the page can have, such as `x_bucket`, `x_sum` and `x_count` of a histogram."""
        own = {name for export in self._exports for family in export.families for name in family.names}
        return own | {sample.name for family in _Process().collect() for sample in family.samples}


def _usage(stats: EngineStats) -> float:
    return stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0


def _grown(now: _Number, before: _Number) -> _Number:
    """Growth of an engine's counter. A counter that fell was reset with its engine, and counts in full."""
    return now - before if now >= before else now
