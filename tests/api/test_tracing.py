"""One span for each request that generates, with its times and counts, as a child of the caller's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from inferd.engine.api.errors import ConfigError
from inferd.engine.api.wire.messages import Failure
from inferd.engine.api.wire.params import SchedulingParams
from inferd.server.endpoints.app import Backend, create_app
from inferd.server.observability import tracing
from inferd.server.observability.metrics import Metrics
from inferd.server.observability.request_record import RequestRecord, current_trace
from inferd.server.text.model import ServedModel
from tests.api.conftest import Script, ScriptedRouter, ScriptedStream, app_settings, serving

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ON = app_settings(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces")


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch, router: Any) -> Iterator[Callable[[], tuple[ReadableSpan, ...]]]:
    """Collects the spans of one server. Each sequence ends as it is submitted, as the router would report it."""
    exporter, made = InMemorySpanExporter(), []
    begin = tracing.Tracing.__init__

    def collected(self: tracing.Tracing, endpoint: str, model: str, version: str) -> None:
        begin(self, endpoint, model, version, exporter)
        made.append(self)

    submit = ScriptedRouter.submit

    def reported(self: ScriptedRouter, *args: Any, **kwargs: Any) -> ScriptedStream:
        trace = current_trace.get()
        if trace is not None:
            trace.ended(record(), num_restarts=2, model=self.model.names[0])
        return submit(self, *args, **kwargs)

    monkeypatch.setattr(tracing.Tracing, "__init__", collected)
    monkeypatch.setattr(ScriptedRouter, "submit", reported)

    def finished() -> tuple[ReadableSpan, ...]:
        made[0]._provider.force_flush()
        return exporter.get_finished_spans()

    yield finished
    for each in made:
        each.close()


def record() -> RequestRecord:
    return RequestRecord(
        scheduling=SchedulingParams(arrival_s=100.0), scheduled_s=100.5, first_token_s=101.25, finished_s=103.25,
        num_prompt_tokens=7, num_generation_tokens=5, num_cached_tokens=4, finish_reason="stop",
    )  # fmt: skip


def ask(url: str, **body: Any) -> httpx.Response:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a secret"}], **body}
    return httpx.post(f"{url}/v1/chat/completions", json=chat, headers={"traceparent": CALLER})


def test_a_request_is_a_span_below_the_callers(serve: Callable[..., str], spans: Any) -> None:
    answer = ask(serve(ON), n=2)
    (span,) = spans()
    assert (span.name, span.kind, span.status.status_code) == ("chat tiny", SpanKind.SERVER, StatusCode.UNSET)
    _, trace_id, parent_id, flags = CALLER.split("-")
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (trace_id, parent_id)
    assert answer.headers["traceresponse"] == f"00-{trace_id}-{span.context.span_id:016x}-{flags}"
    seen = dict(span.attributes)
    assert seen.pop("inferd.request_id") == answer.headers["x-request-id"]
    assert seen == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "inferd",
        "gen_ai.request.model": "tiny",
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 1.25,
        "gen_ai.latency.time_in_model_prefill": 0.75,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "inferd.restarts": 2,
    }
    first_step, first_token = span.events
    assert first_token.timestamp - first_step.timestamp == 750_000_000
    assert "secret" not in span.to_json()


def test_the_span_has_the_name_of_the_model_that_answered(
    model: ServedModel, router: ScriptedRouter, spans: Any
) -> None:
    second = ScriptedRouter(replace(model, names=("second",)))
    beside = Backend(second.model, second, Metrics("second"), app_settings())  # type: ignore[arg-type]
    with serving(model, router, ON, others=[beside]) as url:
        ask(url, model="second")
        (span,) = spans()
    assert span.name == "chat second" and span.attributes["gen_ai.request.model"] == "second"


def test_failures_and_refusals_are_told(serve: Callable[..., str], router: Any, spans: Any) -> None:
    url = serve(ON)
    ask(url, temperature=9)
    router.will(Script(failure=Failure("engine_error", "it broke")))
    ask(url)
    refused, failed = spans()
    assert refused.attributes["http.response.status_code"] == 400 and refused.status.status_code is StatusCode.UNSET
    assert failed.attributes["http.response.status_code"] == 500 and failed.status.status_code is StatusCode.ERROR


def test_other_routes_and_servers_without_a_collector_have_none(serve: Callable[..., str], spans: Any) -> None:
    url = serve(ON)
    assert "traceresponse" not in httpx.get(f"{url}/v1/models", headers={"traceparent": CALLER}).headers
    assert not spans()
    assert "traceresponse" not in ask(serve(app_settings())).headers


def test_without_the_library_the_start_says_what_to_install(
    model: Any, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "inferd.server.observability.tracing", None)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint needs OpenTelemetry .*pip install 'inferd\[otel\]'"):
        create_app(Backend(model, router, Metrics("tiny"), ON))
