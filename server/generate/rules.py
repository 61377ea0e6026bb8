"""What fields of a request say together: each alone may be right, and both be wrong."""

from __future__ import annotations

from inferd.engine.api.errors import RequestError
from inferd.server.errors import table as errors
from inferd.server.generate import work
from inferd.server.schema.chat import ChatRequest
from inferd.server.schema.completions import CompletionRequest
from inferd.server.schema.generation import GenerationFields, is_sane_id
from inferd.server.tools.asked import check_tools


def check_chat(wire: ChatRequest) -> None:
    """Raises `RequestError`."""
    _check_generation(wire)
    if wire.top_logprobs is not None and not wire.logprobs:
        raise _needs("top_logprobs", "'logprobs' is enabled")
    check_tools(wire)
    if wire.continue_final_message and wire.add_generation_prompt:
        raise _needs("continue_final_message", "'add_generation_prompt' is false")


def check_completion(wire: CompletionRequest) -> None:
    """Raises `RequestError`."""
    _check_generation(wire)
    work.check_choices(len(wire.prompt), wire.n or 1)


def _check_generation(wire: GenerationFields) -> None:
    if wire.stream_options is not None and not wire.stream:
        raise _needs("stream_options", "'stream' is enabled")
    if wire.prompt_logprobs is not None and wire.stream:
        raise _needs("prompt_logprobs", "'stream' is disabled")
    if wire.include_metrics and wire.stream and not (wire.stream_options and wire.stream_options.include_usage):
        raise _needs("include_metrics", "'stream_options.include_usage' or no 'stream' is asked for")
    if wire.request_id is not None and not is_sane_id(wire.request_id):
        rule = "Expected letters, digits, '.', '_', ':' or '-'."
        raise errors.invalid_value("request_id", wire.request_id, rule)


def _needs(param: str, condition: str) -> RequestError:
    return RequestError("invalid_value", f"The '{param}' parameter is only allowed when {condition}.", param)
