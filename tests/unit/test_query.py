"""The query of a URL: what it may hold, and that reading it takes time proportional to its length."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from starlette.requests import Request

from inferd.engine.api.errors import RequestError
from inferd.server.endpoints import body
from inferd.server.endpoints.body import MAX_PARAMETERS, read_query
from inferd.server.schema.responses import InputItemsQuery, RetrieveQuery


def request(text: str) -> Request:
    return Request({"type": "http", "method": "GET", "headers": [], "query_string": text.encode()})


def num_operations(work: Callable[[], object]) -> int:
    """Number of Python instructions that `work` takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_a_list_is_given_by_naming_it_again() -> None:
    given = request("include=message.output_text.logprobs&limit=5&include[]=reasoning.encrypted_content&order=asc")
    found = read_query(given, InputItemsQuery)
    assert found.include == ("message.output_text.logprobs", "reasoning.encrypted_content")
    assert (found.limit, found.order) == (5, "asc")


@pytest.mark.parametrize("name", ["include", "include[]", "after", "a", ""])
def test_more_parameters_than_any_route_has_are_refused_before_they_are_read(name: str) -> None:
    for num in (MAX_PARAMETERS + 1, 8_000):
        given = request("&".join([name] * num))
        with pytest.raises(RequestError) as refused:
            read_query(given, RetrieveQuery)
        assert refused.value.code == "object_above_max_properties"
        assert not hasattr(given, "_query_params"), "nothing of it was parsed"


@pytest.mark.parametrize("name", ["include", "include[]", "after", "a"])
def test_reading_takes_time_in_proportion_to_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bound on its length, which would hide how the work grows."""
    monkeypatch.setattr(body, "MAX_PARAMETERS", 10_000)

    def work(num: int) -> int:
        given = request("&".join([f"{name}=x"] * num))

        def read() -> None:
            with pytest.raises(RequestError):
                read_query(given, RetrieveQuery)

        return num_operations(read)

    work(10)
    assert work(2_000) < 2.2 * work(1_000)
