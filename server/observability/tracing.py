"""Traces for OpenTelemetry: one span for each request that generates, sent to a collector over OTLP.

A span has the times of queue, prefill and decode, the token counts and the restarts. It has no text of prompts or
answers. A caller's `traceparent` makes it a child, and the answer's `traceresponse` names it. This file needs the extra
`otel`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inferd.server.observability.request_record import RequestRecord, current_trace

_EXPORT_TIMEOUT_S = 5.0
"""Longest time for one export. Spans wait in a bounded queue, and those beyond it are lost."""


class Tracing:
    """The spans of one server, on their way to a collector."""

    def __init__(self, endpoint: str, model: str, version: str, exporter: SpanExporter | None = None) -> None:
        """`endpoint`: a URL that takes traces as OTLP over HTTP. `exporter`: for tests, in place of it."""
        self.model = model
        resource = Resource.create({"service.name": "inferd", "service.version": version})
        self._provider = TracerProvider(resource=resource)
        exporter = exporter or OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("inferd", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, operation: str, route: str, headers: Mapping[str, str]) -> Span:
        """The span of a request that has just arrived, as a child of the caller's if `headers` name one."""
        return self._tracer.start_span(
            f"{operation} {self.model}",
            context=self._propagator.extract(dict(headers)),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "inferd",
                "gen_ai.request.model": self.model,
                "http.request.method": "POST",
                "http.route": route,
            },
        )

    def close(self) -> None:
        """Send what waits. Takes some seconds if the collector does not answer."""
        self._provider.shutdown()


class Traces:
    """Middleware that gives each request of certain routes a span."""

    def __init__(self, app: ASGIApp, tracing: Tracing, operations: Mapping[str, str]) -> None:
        """`operations`: path -> name of the operation in OpenTelemetry's conventions."""
        self._app, self._tracing, self._operations = app, tracing, operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = self._operations.get(scope.get("path", "")) if scope["type"] == "http" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        span = self._tracing.begin(operation, scope["path"], Headers(scope=scope))
        span.set_attribute("inferd.request_id", scope["state"]["request_id"])
        context = span.get_span_context()
        named = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

        async def send_with_trace(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["traceresponse"] = named
            await send(message)

        trace = _Trace(span, operation)
        token = current_trace.set(trace)
        try:
            await self._app(scope, receive, send_with_trace)
        finally:
            current_trace.reset(token)
            trace.close(scope["state"]["sent"].status)


class _Trace:
    """One span. Sums the tokens of a request's sequences; the times are those of the first that ends."""

    def __init__(self, span: Span, operation: str) -> None:
        self._span, self._operation = span, operation
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        """Unix time of the monotonic clock's zero, because spans have Unix times."""
        self._reasons: list[str] = []
        self._num_input = self._num_output = self._num_cached = self._num_restarts = 0

    def ended(self, record: RequestRecord, num_restarts: int, model: str) -> None:
        if not self._reasons:
            self._show_times(record)
            # The span began with the name of the server's first model, before the body was read.
            self._span.set_attribute("gen_ai.request.model", model)
            self._span.update_name(f"{self._operation} {model}")
        self._reasons.append(record.finish_reason)
        self._num_input = max(self._num_input, record.num_prompt_tokens)
        self._num_output += record.num_generation_tokens
        self._num_cached = max(self._num_cached, record.num_cached_tokens)
        self._num_restarts = max(self._num_restarts, num_restarts)

    def _show_times(self, record: RequestRecord) -> None:
        seconds = {
            "gen_ai.latency.time_in_queue": record.queue_s,
            "gen_ai.latency.time_to_first_token": record.ttft_s,
            "gen_ai.latency.time_in_model_prefill": record.prefill_s,
            "gen_ai.latency.time_in_model_decode": record.decode_s,
        }
        self._span.set_attributes({name: value for name, value in seconds.items() if value is not None})
        for name, at_s in (("first step", record.scheduled_s), ("first token", record.first_token_s)):
            if at_s is not None:
                self._span.add_event(name, timestamp=self._epoch_ns + int(at_s * 1e9))

    def close(self, status: int) -> None:
        """The answer was sent, with the HTTP status."""
        self._span.set_attribute("http.response.status_code", status)
        if self._reasons:
            self._span.set_attributes(
                {
                    "gen_ai.response.finish_reasons": self._reasons,
                    "gen_ai.usage.input_tokens": self._num_input,
                    "gen_ai.usage.output_tokens": self._num_output,
                    "gen_ai.usage.cache_read.input_tokens": self._num_cached,
                    "inferd.restarts": self._num_restarts,
                }
            )
        if status >= 500 or "error" in self._reasons:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()
