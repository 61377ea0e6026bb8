"""Metrics against the Prometheus library: its parser reads the page, and its own histogram is the oracle of ours."""

from __future__ import annotations

import math
import shutil
import subprocess
from typing import Any, Literal

import msgspec
import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from inferd.engine.api.cost.roofline import Peaks, StepPhase
from inferd.engine.api.wire.messages import EngineStats, Phase, Ready, StepModel, StepOutput
from inferd.engine.api.wire.params import SchedulingParams
from inferd.server.observability.exposition import Series
from inferd.server.observability.instruments import Histogram
from inferd.server.observability.metrics import MAX_TENANTS, Metrics
from inferd.server.observability.request_record import RequestRecord
from inferd.server.observability.server_instruments import FINISH_REASONS, ITERATION_TOKENS, ITL, REQUEST_LATENCY, TTFT

PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain"
PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.5"

Sample = tuple[str, tuple[tuple[str, str], ...]]


def scrape(metrics: Metrics) -> dict[Sample, float]:
    page, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    families = text_string_to_metric_families(page.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return scrape(metrics)[name, tuple(sorted({"model_name": "m", **labels}.items()))]


def record(**changes: object) -> RequestRecord:
    targets = {name: changes.pop(name) for name in ("ttft_target_s", "tpot_target_s") if name in changes}
    fields: dict[str, object] = {
        "scheduling": SchedulingParams(arrival_s=100.0, **targets),  # type: ignore[arg-type]
        "scheduled_s": 101.0, "first_token_s": 103.0, "finished_s": 107.0, "num_prompt_tokens": 10,
        "num_generation_tokens": 5, "num_cached_tokens": 0, "finish_reason": "stop",
    }  # fmt: skip
    return RequestRecord(**{**fields, **changes})  # type: ignore[arg-type]


def ready(num_blocks: int = 8) -> Ready:
    return Ready(
        num_blocks=num_blocks, block_size=16, max_model_len=64, vocab_size=10, weights_bytes=110, kv_bytes=55,
        planned_weights_bytes=100, planned_kv_bytes=50, device="cpu", dtype="float32", peaks=Peaks(1e10, 1e12),
    )  # fmt: skip


def step(**stats: Any) -> StepOutput:
    """A step whose work was not measured."""
    return StepOutput(
        deltas=(), stats=EngineStats(**stats), step_duration_s=0.01, step_num_tokens=7, step_phase="decode"
    )


def worked(phase: StepPhase, own_s: float, flops: int, num_bytes: int) -> StepOutput:
    return msgspec.structs.replace(step(), step_phase=phase, step_own_s=own_s, step_flops=flops, step_bytes=num_bytes)


@given(st.lists(st.floats(min_value=0, max_value=1e4), max_size=50), st.integers(1, 4))
def test_a_histogram_is_the_librarys(values: list[float], count: int) -> None:
    registry = prometheus_client.CollectorRegistry()
    oracle = prometheus_client.Histogram("x", "x", registry=registry, buckets=TTFT)
    ours = Histogram(TTFT)
    for seen in values:
        ours.cell().observe(seen, count)
        for _ in range(count):
            oracle.observe(seen)
    expected = {
        sample.labels["le"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "x_bucket"
    }
    assert dict(zip((*map(repr, ours.bounds), "+Inf"), ours.cell().cumulative(), strict=True)) == expected
    assert math.isclose(ours.cell().sum, sum(values) * count, rel_tol=1e-9, abs_tol=1e-9)


def test_the_phases_of_a_request_add_up() -> None:
    seen = record()
    assert (seen.queue_s, seen.prefill_s, seen.decode_s, seen.ttft_s, seen.tpot_s) == (1.0, 2.0, 4.0, 3.0, 1.0)
    assert seen.queue_s is not None
    assert seen.prefill_s is not None
    assert seen.decode_s is not None
    assert seen.queue_s + seen.prefill_s + seen.decode_s == seen.e2e_s == 7.0


def test_latencies_of_the_last_minute_are_its_newest() -> None:
    now = 0.0
    metrics = Metrics("m", clock=lambda: now)
    for now in range(100):
        metrics.first_token(float(99 - now))
        metrics.request_finished(record(finish_reason="abort" if now % 2 else "stop"))
    assert metrics.recent_ttft.ascending() == list(range(60))
    assert metrics.recent_tpot.ascending() == [1.0] * 30
    for _ in range(2000):
        metrics.first_token(7.0)
    assert metrics.recent_ttft.ascending() == [7.0] * 1000
    now += 60
    assert metrics.recent_ttft.ascending() == []


def test_a_request_that_never_ran_has_no_phases() -> None:
    metrics = Metrics("m")
    metrics.request_finished(
        record(scheduled_s=None, first_token_s=None, num_generation_tokens=0, finish_reason="abort")
    )
    assert value(metrics, "inferd_requests_finished_total", finish_reason="abort") == 1
    for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "e2e_request_latency"):
        assert value(metrics, f"inferd_{name}_seconds_count") == 0


def test_one_token_has_no_time_per_output_token() -> None:
    metrics = Metrics("m")
    metrics.request_finished(record(num_generation_tokens=1))
    assert value(metrics, "inferd_time_per_output_token_seconds_count") == 0


def test_tokens_that_came_together_share_their_gap() -> None:
    metrics = Metrics("m")
    metrics.first_token(0.25)
    metrics.tokens(4, 0.2)
    metrics.tokens(1, 0.3)
    assert value(metrics, "inferd_time_to_first_token_seconds_sum") == 0.25
    assert value(metrics, "inferd_inter_token_latency_seconds_count") == 5
    assert value(metrics, "inferd_inter_token_latency_seconds_sum") == pytest.approx(0.5)
    assert value(metrics, "inferd_inter_token_latency_seconds_bucket", le="0.05") == 4


COUNTERS = {
    "num_steps": "inferd_engine_steps_total",
    "num_preemptions": "inferd_preemptions_total",
    "num_prompt_tokens": "inferd_prompt_tokens_computed_total",
    "num_generation_tokens": "inferd_generation_tokens_total",
    "prefix_query_tokens": "inferd_prefix_cache_query_tokens_total",
    "prefix_hit_tokens": "inferd_prefix_cache_hit_tokens_total",
    "num_draft_rows": "inferd_draft_rows_total",
    "num_drafts": "inferd_draft_tokens_total",
}


@settings(deadline=None, max_examples=10)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=3), st.booleans())
def test_counters_go_on_when_an_engine_is_replaced(engines: list[list[int]], says_ready: bool) -> None:
    """Each engine counts from zero. The page shows the sum of all, which never falls."""
    metrics, total = Metrics("m"), 0
    before = scrape(metrics)
    for growths in engines:
        if says_ready:
            metrics.engine_ready(ready())
        count = 0
        for growth in (0, *growths):
            count += growth
            stats: dict[str, Any] = {**dict.fromkeys(COUNTERS, count), "accepted_drafts": (count,) * (count > 0)}
            metrics.step(step(**stats))
            after = scrape(metrics)
            assert all(after[key] >= before[key] for key in before if key[0].endswith("_total"))
            before = after
        total += count
    assert {name: value(metrics, name) for name in COUNTERS.values()} == dict.fromkeys(COUNTERS.values(), total)
    assert value(metrics, "inferd_prompt_tokens_total") == 2 * total
    assert value(metrics, "inferd_accepted_draft_tokens_total") == total
    assert value(metrics, "inferd_engine_restarts_total") == (len(engines) - 1 if says_ready else 0)


def test_the_tier_of_several_engines_is_counted_by_what_grew_and_its_size_once() -> None:
    metrics = Metrics("m")
    for replica, held_bytes in ((0, 500), (1, 700), (0, 600)):
        metrics.step(step(tier_wait_s=0.25, tier_compute_s=2.0, tier_held_bytes=held_bytes), replica)
    seconds = [value(metrics, "inferd_kv_tier_seconds_total", kind=kind) for kind in ("waiting", "computing")]
    assert seconds == [0.5, 4.0]
    assert value(metrics, "inferd_kv_tier_held_bytes") == 700, "replicas share the directory"


def test_expert_peaks_have_a_label_for_each_layer() -> None:
    metrics = Metrics("m")
    metrics.step(step(expert_peaks=((0, 1.5), (3, 2.25))))
    metrics.step(step(expert_peaks=((0, 1.25), (3, 2.25))))
    shown = {key: found for key, found in scrape(metrics).items() if key[0] == "inferd_expert_peak_ratio"}
    assert sorted(shown.values()) == [1.25, 2.25] and len(shown) == 2


def test_a_step_sets_the_gauges_and_a_dead_engine_clears_them() -> None:
    metrics = Metrics("m")
    metrics.engine_ready(ready())
    states = ("used", "cached", "free")
    assert [value(metrics, "inferd_kv_cache_blocks", state=state) for state in states] == [0, 0, 8], (
        "before its first step"
    )
    metrics.step(step(num_running=3, num_waiting=2, num_blocks=8, num_blocks_used=2, num_blocks_cached=5))
    names = ("inferd_engine_up", "inferd_requests_running", "inferd_requests_waiting", "inferd_kv_cache_usage_ratio")
    assert [value(metrics, name) for name in names] == [1, 3, 2, 0.25]
    assert [value(metrics, "inferd_kv_cache_blocks", state=state) for state in states] == [2, 5, 1]
    assert value(metrics, "inferd_step_tokens_sum") == 7
    for _ in range(2):
        metrics.requests_held(EngineStats(num_waiting=4))
        assert [value(metrics, name) for name in names] == [1, 3, 6, 0.25], (
            "those that wait for an engine are added once"
        )
    metrics.step(step(num_running=2, num_waiting=3, num_blocks=8, num_blocks_used=2))
    assert [value(metrics, name) for name in names] == [1, 2, 7, 0.25], "a step while a page is made loses none of them"
    metrics.engine_down()
    assert [value(metrics, name) for name in names] == [0, 0, 4, 0]
    metrics.requests_held(EngineStats())
    assert [value(metrics, name) for name in names] == [0, 0, 0, 0]
    metrics.requests_held(EngineStats(num_waiting=4))
    assert [value(metrics, name) for name in names] == [0, 0, 4, 0], "of a dead engine's nothing is left"


def test_a_message_of_no_step_is_in_no_histogram_of_steps() -> None:
    """A refusal or an abort does not wait for a step and takes none of its time."""
    metrics = Metrics("m")
    metrics.engine_ready(ready())
    metrics.step(step(num_waiting=1))
    metrics.step(StepOutput(deltas=(), stats=EngineStats(num_waiting=2)))
    names = ("inferd_step_duration_seconds", "inferd_schedule_duration_seconds", "inferd_step_tokens")
    assert [value(metrics, f"{name}_count") for name in names] == [1, 1, 1]
    assert value(metrics, "inferd_requests_waiting") == 2, "its gauges count"


def test_host_memory_beside_gpus_is_shown_as_the_sum_of_all_replicas() -> None:
    metrics = Metrics("m")
    metrics.engine_ready(ready())
    for replica, num_bytes in enumerate((30, 40)):
        stats = EngineStats(host_bytes=num_bytes, host_read_bytes=7 * num_bytes)
        metrics.step(StepOutput(deltas=(), stats=stats), replica)
    assert value(metrics, "inferd_kv_host_bytes") == 70
    assert value(metrics, "inferd_kv_host_read_bytes_total") == 490


def test_work_is_counted_by_phase_and_by_what_bound_it() -> None:
    """Peaks of 1e10 B/s and 1e12 FLOP/s: calculated by hand."""
    now = 1000.0
    metrics = Metrics("m", clock=lambda: now)
    metrics.engine_ready(ready())
    metrics.step(worked("prefill", 0.02, 10**10, 10**7))  # 10 ms to compute, 1 ms to read
    metrics.step(worked("decode", 0.01, 10**9, 6 * 10**7))  # 1 ms to compute, 6 ms to read
    metrics.step(worked("decode", 0.03, 10**9, 6 * 10**7))  # more than twice that
    seconds = {
        (dict(labels)["phase"], dict(labels)["bound_by"]): seen
        for (name, labels), seen in scrape(metrics).items()
        if name == "inferd_step_seconds_total"
    }
    assert len(seconds) == 9, "a rate needs a zero to begin from"
    assert {key: seen for key, seen in seconds.items() if seen} == {
        ("prefill", "compute"): 0.02,
        ("decode", "memory"): 0.01,
        ("decode", "host"): 0.03,
    }
    assert value(metrics, "inferd_step_flops_total", phase="decode") == 2e9
    assert value(metrics, "inferd_step_bytes_total", phase="prefill") == 1e7
    assert value(metrics, "inferd_step_floor_seconds_total", phase="decode") == pytest.approx(0.012)
    assert value(metrics, "inferd_mfu_ratio", phase="prefill") == pytest.approx(0.5)
    assert value(metrics, "inferd_mbu_ratio", phase="decode") == pytest.approx(0.3)
    assert value(metrics, "inferd_peak_flops_per_second") == 1e12
    assert value(metrics, "inferd_peak_read_bytes_per_second") == 1e10
    now += 61.0
    assert "inferd_mfu_ratio" not in {name for name, _ in scrape(metrics)}, "an idle engine has no share of its peaks"
    assert value(metrics, "inferd_step_flops_total", phase="decode") == 2e9


def test_planned_and_measured_memory_stand_beside_each_other() -> None:
    metrics = Metrics("m")
    metrics.engine_ready(ready())
    metrics.phase(Phase("weights", 1.5, "detail"))
    seen = {
        (k, s): value(metrics, "inferd_memory_bytes", kind=k, source=s)
        for k in ("weights", "kv")
        for s in ("planned", "measured")
    }
    assert seen == {
        ("weights", "planned"): 100,
        ("weights", "measured"): 110,
        ("kv", "planned"): 50,
        ("kv", "measured"): 55,
    }
    assert value(metrics, "inferd_startup_phase_seconds", phase="weights") == 1.5


def test_a_callers_method_makes_no_series_of_its_own() -> None:
    metrics = Metrics("m")
    for method in ("GET", "BREW", "X" * 1000):
        metrics.http_request("/v1/models", method, 200, 0.1)
    methods = {dict(labels)["method"] for name, labels in scrape(metrics) if name == "inferd_http_requests_total"}
    assert methods == {"GET", "OTHER"}


def test_tenants_have_labels_up_to_a_bound_and_keep_them() -> None:
    metrics = Metrics("m")
    metrics.tenants_known({f"id{i}": f"name{i}" for i in range(MAX_TENANTS + 2)})
    metrics.tenants_known({"new": "new", **{f"id{i}": f"name{i}" for i in range(MAX_TENANTS)}})
    for tenant in ("id0", f"id{MAX_TENANTS}", "new", "a fixed key"):
        metrics.request_finished(record(scheduling=SchedulingParams(arrival_s=100.0, tenant=tenant)))
        metrics.tenant_refused_with(tenant, "slow_down")
    metrics.request_finished(record())  # without keys
    metrics.tenants_waiting({"id1": 2, "new": 1, "a fixed key": 3})
    assert value(metrics, "inferd_tenant_requests_finished_total", tenant="name0", finish_reason="stop") == 1
    assert value(metrics, "inferd_tenant_requests_finished_total", tenant="other", finish_reason="stop") == 3
    assert value(metrics, "inferd_tenant_prompt_tokens_total", tenant="other") == 30
    assert value(metrics, "inferd_tenant_generation_tokens_total", tenant="name0") == 5
    assert [value(metrics, "inferd_tenant_requests_waiting", tenant=name) for name in ("name1", "other", "name2")] == [
        2, 4, 0,
    ]  # fmt: skip
    refused = {
        key: number for key, number in scrape(metrics).items() if key[0] == "inferd_tenant_requests_refused_total"
    }
    assert sorted(refused.values()) == [1, 3]
    labels = {dict(labels).get("tenant", "") for _, labels in scrape(metrics)} - {""}
    assert labels == {*(f"name{i}" for i in range(MAX_TENANTS)), "other"}


def test_tokens_and_refusals_of_a_tenant_in_the_last_minute() -> None:
    now = 0.0
    metrics = Metrics("m", clock=lambda: now)
    assert metrics.tenant_labels == (), "without a keys file there are no tenants to show"
    metrics.tenants_known({"t": "acme", "u": "acme"})
    assert metrics.tenant_labels == ("acme", "other")
    for second in range(200):
        now = second + 0.5
        for tenant in "tu":
            metrics.request_finished(record(scheduling=SchedulingParams(arrival_s=0.0, tenant=tenant)))
        metrics.tenant_refused_with("a fixed key", "slow_down")
    assert metrics.recent_tenant_tokens["acme"].total() == 60 * 2 * 15
    assert (metrics.recent_tenant_refused["other"].total(), metrics.recent_tenant_refused["acme"].total()) == (60, 0)
    now += 60
    assert metrics.recent_tenant_tokens["acme"].total() == 0


def busy(compat: Literal["none", "vllm"]) -> Metrics:
    """Metrics with everything counted at least once."""
    metrics = Metrics("m", compat)
    metrics.engine_ready(ready())
    metrics.step(worked("decode", 0.01, 10**9, 10**7))
    metrics.step(step(num_draft_rows=1, num_drafts=3, accepted_drafts=(1, 1, 0), expert_peaks=((0, 1.5),)))
    metrics.request_arrived("chat")
    metrics.request_finished(record(ttft_target_s=1.0))
    metrics.http_request("/x", "GET", 200, 0.1)
    metrics.phase(Phase("weights", 1.5, ""))
    metrics.adapter_requests({"a": (2, 1), "b": (1, 0), "c": (0, 0)}, 4)
    metrics.tenants_known({"t": "acme"})
    metrics.tenant_refused_with("t", "slow_down")
    metrics.tenants_waiting({"t": 1})
    return metrics


def samples(metrics: Metrics, accept: str) -> list[tuple[str, Sample]]:
    """(type, sample) of every sample, as a scraper with this Accept header reads them."""
    families = (openmetrics if accept else text_string_to_metric_families)(metrics.render(accept)[0].decode())
    return [(f.type, (s.name, tuple(sorted(s.labels.items())))) for f in families for s in f.samples]


def test_adapters_with_sequences_are_labels_in_vllms_way() -> None:
    metrics = busy("vllm")
    assert value(metrics, "inferd_lora_requests", adapter="a", state="waiting") == 1
    (labels,) = [dict(labels) for name, labels in scrape(metrics) if name == "vllm:lora_requests_info"]
    of_adapters = {name: labels[name] for name in labels.keys() - {"model_name", "engine"}}
    assert of_adapters == {"max_lora": "4", "running_lora_adapters": "a,b", "waiting_lora_adapters": "a"}


@pytest.mark.parametrize("compat", ["none", "vllm"])
@pytest.mark.parametrize("accept", ["application/openmetrics-text", PROMETHEUS_2, PROMETHEUS_3])
def test_both_formats_say_the_same(compat: Literal["none", "vllm"], accept: str) -> None:
    """Also with a colon in a name, for which Prometheus prefers OpenMetrics."""
    metrics = busy(compat)
    assert any(name.startswith("vllm:") for _, (name, _) in samples(metrics, accept)) == (compat == "vllm")
    assert {sample for _, sample in samples(metrics, accept)} == {sample for _, sample in samples(metrics, "")}


@pytest.mark.parametrize("compat", ["none", "vllm"])
def test_no_label_is_one_that_a_type_reserves(compat: Literal["none", "vllm"]) -> None:
    seen = {(kind, label) for kind, (_, labels) in samples(busy(compat), "") for label, _ in labels}
    assert ("histogram", "le") in seen
    assert {label for kind, label in seen if kind != "histogram"}.isdisjoint({"le", "quantile"})


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")
@pytest.mark.parametrize("compat", ["none", "vllm"])
def test_promtool_finds_nothing_wrong(compat: Literal["none", "vllm"]) -> None:
    page, _ = busy(compat).render()
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    said = set((done.stdout + done.stderr).decode().splitlines())
    assert {line for line in said if not line.startswith("vllm:")} == set()


@pytest.mark.parametrize("compat", ["none", "vllm"])
def test_names_are_those_of_the_page(compat: Literal["none", "vllm"]) -> None:
    metrics = busy(compat)
    assert {name for name, _ in scrape(metrics)} == metrics.names()


def test_a_page_of_several_models_is_made_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of them the event loop may go on. Each has the lines of one instrument of one model."""
    write, written = Series.text, [0]

    def counted(series: Series) -> str:
        lines = write(series)
        written[-1] += lines.count("\n")
        return lines

    monkeypatch.setattr(Series, "text", counted)
    first, *others = [busy("vllm") for _ in range(4)]
    for other in others:
        first.show_beside(other)
    for _ in first.page_pieces():
        written.append(0)
    assert sum(written) > 4_000 and max(written) < 100


def test_vllm_names_have_vllms_labels_buckets_and_our_values() -> None:
    metrics = Metrics("m", "vllm")
    metrics.engine_ready(ready(num_blocks=9))
    metrics.engine_ready(ready(num_blocks=8))
    metrics.first_token(0.04)
    metrics.request_finished(record())
    metrics.step(
        step(num_running=1, num_waiting=4, num_blocks=8, num_blocks_used=2, num_prompt_tokens=6, prefix_hit_tokens=3)
    )
    page = scrape(metrics)
    labels = (("engine", "0"), ("model_name", "m"))
    expected = {
        ("vllm:num_requests_running", labels): 1,
        ("vllm:num_requests_waiting", labels): 4,
        ("vllm:kv_cache_usage_perc", labels): 0.25,
        ("vllm:prompt_tokens_total", labels): 9,
        ("vllm:prefix_cache_hits_total", labels): 3,
        ("vllm:cache_config_info", (("block_size", "16"), *labels, ("num_gpu_blocks", "8"))): 1,
        ("vllm:request_success_total", (labels[0], ("finished_reason", "stop"), labels[1])): 1,
        ("vllm:time_to_first_token_seconds_count", labels): 1,
        ("vllm:e2e_request_latency_seconds_sum", labels): 7,
    }
    assert {key: page.get(key) for key in expected} == expected
    assert sum(name == "vllm:cache_config_info" for name, _ in page) == 1
    for name, bounds in [
        ("time_to_first_token_seconds", TTFT),
        ("inter_token_latency_seconds", ITL),
        ("time_per_output_token_seconds", ITL),
        ("e2e_request_latency_seconds", REQUEST_LATENCY),
        ("request_queue_time_seconds", REQUEST_LATENCY),
        ("iteration_tokens_total", ITERATION_TOKENS),
    ]:
        shown = {dict(labels)["le"] for sample, labels in page if sample == f"vllm:{name}_bucket"}
        assert {str(bound) for bound in bounds} < shown, name


def test_drafts_are_counted_by_their_place_under_our_names_and_vllms() -> None:
    """Two steps: rows with 4 and 2 + 3 drafts, of which 3, and 1 + 0 were accepted."""
    metrics = Metrics("m", "vllm")
    metrics.engine_ready(ready())
    metrics.step(step())
    assert value(metrics, "inferd_draft_tokens_total") == 0, "a rate needs a zero to begin from"
    metrics.step(step(num_draft_rows=1, num_drafts=4, accepted_drafts=(1, 1, 1, 0)))
    metrics.step(step(num_draft_rows=3, num_drafts=9, accepted_drafts=(2, 1, 1, 0)))
    page, labels = scrape(metrics), (("engine", "0"), ("model_name", "m"))
    for ours, vllms, expected in (
        ("draft_rows", "num_drafts", 3),
        ("draft_tokens", "num_draft_tokens", 9),
        ("accepted_draft_tokens", "num_accepted_tokens", 4),
    ):
        assert value(metrics, f"inferd_{ours}_total") == page[f"vllm:spec_decode_{vllms}_total", labels] == expected
    for position, expected in enumerate((2, 1, 1, 0)):
        place = ("position", str(position))
        assert value(metrics, "inferd_accepted_draft_tokens_per_position_total", position=place[1]) == expected
        assert page["vllm:spec_decode_num_accepted_tokens_per_pos_total", (*labels, place)] == expected


def test_without_compat_there_are_no_vllm_names() -> None:
    assert not any(name.startswith("vllm:") for name in Metrics("m").names())


def test_openmetrics_is_given_to_those_who_ask() -> None:
    page, content_type = Metrics("m", "vllm").render("application/openmetrics-text;version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert page.endswith(b"# EOF\n")


def test_finish_reasons_are_shown_before_they_happen() -> None:
    page = scrape(Metrics("m"))
    shown = {dict(labels)["finish_reason"] for name, labels in page if name == "inferd_requests_finished_total"}
    assert shown == set(FINISH_REASONS) == {"stop", "length", "abort", "error"}


@pytest.mark.parametrize(
    ("changes", "met", "missed", "good"),
    [
        ({}, {}, {}, 1),  # TTFT 3 s, TPOT 1 s, 7 s in all
        ({"ttft_target_s": 3.0, "tpot_target_s": 1.0, "e2e_target_s": 7.0}, {"ttft", "tpot", "e2e"}, {}, 1),
        ({"ttft_target_s": 2.9, "tpot_target_s": 1.0, "e2e_target_s": 7.0}, {"tpot", "e2e"}, {"ttft"}, 0),
        ({"ttft_target_s": 3.0, "tpot_target_s": 0.9}, {"ttft"}, {"tpot"}, 0),
        ({"e2e_target_s": 6.9}, {}, {"e2e"}, 0),
        ({"tpot_target_s": 0.1, "num_generation_tokens": 1}, {"tpot"}, {}, 1),
        ({"ttft_target_s": 3.0, "finish_reason": "error", "first_token_s": None}, {}, {"ttft"}, 0),
        ({"ttft_target_s": 3.0, "finish_reason": "abort"}, {}, {}, 0),
    ],
)
def test_attainment_and_goodput(changes: dict[str, Any], met: set[str], missed: set[str], good: int) -> None:
    metrics = Metrics("m")
    metrics.request_finished(record(**changes))
    for outcome, latencies in (("met", met), ("missed", missed)):
        for latency in ("ttft", "tpot", "e2e"):
            found = metrics.slo.values.get((latency, outcome), 0)
            assert found == (latency in latencies), (latency, outcome)
    assert value(metrics, "inferd_goodput_requests_total") == good
    assert value(metrics, "inferd_goodput_tokens_total") == good * changes.get("num_generation_tokens", 5)


def test_the_step_time_models_error_and_who_was_refused() -> None:
    metrics = Metrics("m")
    for num_shed in (2, 5, 1):  # the last value is that of a new engine
        model = StepModel(error_p50=0.02, error_p95=0.06, prefill_tokens_per_s=1000.0)
        stats = EngineStats(num_shed=num_shed, num_tokens_waiting=77, step_model=model)
        metrics.step(StepOutput(deltas=(), stats=stats))
    assert value(metrics, "inferd_requests_shed_total") == 6
    assert value(metrics, "inferd_waiting_prompt_tokens") == 77
    assert value(metrics, "inferd_prefill_tokens_per_second") == 1000
    assert value(metrics, "inferd_step_model_error_ratio", percentile="50") == 0.02
    assert value(metrics, "inferd_step_model_error_ratio", percentile="95") == 0.06
