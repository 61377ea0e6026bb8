"""Admission control: bounds on waiting requests and prompt tokens, in all and for one tenant, and Retry-After."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

import pytest

from inferd.engine.api.errors import RequestError
from inferd.server.config.settings import Settings
from inferd.server.dispatch.admission import CERTAINTY, FLOOD_FACTOR, Backlog, QueueBounds, _Waiting
from inferd.server.lifecycle.engines import router_options


def refused(
    backlog: Backlog,
    tenant: str,
    num_tokens: int = 10,
    pace: float = 0.0,
    left_s: float | None = None,
    num_requests: int = 1,
) -> RequestError | None:
    try:
        backlog.check(tenant, num_requests, num_tokens, pace, left_s)
    except RequestError as error:
        return error
    return None


def filled(bounds: QueueBounds, tenant: str, num_tokens: int = 10, pace: float = 0.0) -> Backlog:
    """A queue that one tenant has filled as far as it can."""
    backlog = Backlog(bounds)
    while refused(backlog, tenant, num_tokens, pace) is None:
        backlog.add(tenant, num_tokens)
        assert backlog.num_requests <= 10_000, "there is no bound"
    return backlog


def test_without_keys_the_whole_queue_is_filled() -> None:
    backlog = filled(QueueBounds(90), "")
    assert backlog.num_requests == 90
    error = refused(backlog, "")
    assert error is not None
    assert (error.code, str(error)) == (
        "server_is_overloaded", "90 requests are waiting, and at most 90 may; retry later."
    )  # fmt: skip


def test_a_tenant_leaves_a_ninth_to_others_and_many_share_what_there_is() -> None:
    backlog = filled(QueueBounds(90), "flood")
    assert backlog.num_requests == 80
    error = refused(backlog, "flood")
    assert error is not None
    assert error.code == "slow_down"
    held = [0, 0]
    for turn in range(400):
        name = f"late {turn % 2}"
        if refused(backlog, name) is None:
            backlog.add(name, 10)
            held[turn % 2] += 1
    assert backlog.num_requests == 89, "the last place is for who holds none"
    assert refused(backlog, "late 2") is None
    assert min(held) >= 4
    for _ in range(80):
        backlog.remove("flood", 10)
    assert refused(backlog, "late 0") is None


@pytest.mark.parametrize(("most", "own"), [(2, 1), (3, 2), (8, 7), (9, 8), (10, 8)])
def test_also_of_few_places_one_is_left_to_another_tenant(most: int, own: int) -> None:
    backlog = filled(QueueBounds(most), "flood")
    assert backlog.num_requests == own
    error = refused(backlog, "flood")
    assert error is not None
    assert error.code == "slow_down"
    assert refused(backlog, "late") is None


def test_a_long_prompt_of_who_holds_nothing_may_have_what_is_left() -> None:
    backlog = filled(QueueBounds(seconds=9.0), "flood", num_tokens=10, pace=100.0)
    left = 900 - backlog.num_tokens
    assert refused(backlog, "late", left, 100.0) is None
    error = refused(backlog, "late", left + 1, 100.0)
    assert error is not None
    assert error.code == "server_is_overloaded"


def test_tokens_are_bounded_by_what_the_pace_makes_of_seconds() -> None:
    backlog = filled(QueueBounds(seconds=2.0), "", num_tokens=50, pace=1000.0)
    assert backlog.num_tokens == 2000
    error = refused(backlog, "", 50, 1000.0)
    assert error is not None
    assert error.code == "server_is_overloaded"
    assert error.retry_after_s == pytest.approx(1.0), "until half of the 2 s is computed"
    assert refused(backlog, "", 50, 1100.0) is None, "a faster engine takes more"
    assert refused(backlog, "", 50, 0.0) is None, "before anything was measured requests alone are counted"


def test_a_target_does_not_count_the_tokens_ahead() -> None:
    """30 s of prompts wait, but all may be prefix hits. The engine knows, and refuses requests that would be late."""
    queue = router_options(Settings(ttft_target=0.2, max_wait=600.0)).queue
    backlog = Backlog(queue)
    backlog.add("a", 30_000)
    backlog.check("b", 1, 30_000, 1000.0, left_s=0.5)


def test_a_pace_may_be_forgotten_while_another_thread_asks_for_it() -> None:
    class Cleared(deque[float]):
        def __iter__(self) -> Iterator[float]:
            gaps_s = list(super().__iter__())
            self.clear()
            return iter(gaps_s)

    held = _Waiting(num_requests=1, gaps_s=Cleared([0.5] * 40))
    assert held.wait_s(0.0) == 1.0
    assert held.wait_s(0.0) is None


def test_one_alone_is_taken_whatever_its_length() -> None:
    backlog = Backlog(QueueBounds(seconds=1.0))
    assert refused(backlog, "a", 10**6, 1000.0) is None
    backlog.add("a", 10**6)
    assert refused(backlog, "b", 1, 1000.0) is not None
    backlog.remove("a", 10**6)
    assert (backlog.num_requests, backlog.num_tokens) == (0, 0)
    assert FLOOD_FACTOR == 8


def test_the_choices_of_one_request_ask_for_room_together() -> None:
    backlog = Backlog(QueueBounds(90))
    error = refused(backlog, "flood", num_requests=81)
    assert error is not None
    assert (error.code, error.param) == ("request_exceeds_work_limit", "n"), "in no queue, however empty"
    assert refused(backlog, "flood", num_requests=80) is None
    for _ in range(80):
        backlog.add("flood", 10)
    error = refused(backlog, "late", num_requests=10)
    assert error is not None
    assert error.code == "slow_down", "they would fill the queue"
    assert refused(backlog, "late", num_requests=8) is None
    assert refused(backlog, "late") is None


def test_without_keys_more_choices_than_may_wait_are_taken_where_nothing_waits() -> None:
    backlog = Backlog(QueueBounds(8))
    assert refused(backlog, "", num_requests=16) is None
    backlog.add("", 10)
    error = refused(backlog, "", num_requests=8)
    assert error is not None
    assert error.code == "server_is_overloaded"


class Line:
    """One tenant's requests, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.backlog = Backlog(QueueBounds(), lambda: self.now_s)

    def join(self, num_requests: int) -> None:
        for _ in range(num_requests):
            self.backlog.add("a", 1)

    def begin(self, num_requests: int, every_s: float) -> None:
        """Start requests, each so long after the one before."""
        for _ in range(num_requests):
            self.now_s += every_s
            self.backlog.remove("a", 1)

    def give_up(self, num_requests: int) -> None:
        for _ in range(num_requests):
            self.backlog.remove("a", 1, has_begun=False)

    def refusal(self, left_s: float) -> RequestError | None:
        """Refusal of one more request, which has so long to its first token."""
        return refused(self.backlog, "a", 1, left_s=left_s)


def test_who_would_wait_longer_than_its_target_is_told_at_once() -> None:
    """Ten requests wait, and one begins every 50 ms: the next has its first token in about 0.55 s."""
    line = Line()
    line.join(43)
    line.begin(33, every_s=0.05)
    assert line.refusal(left_s=0.55 / CERTAINTY + 0.01) is None
    line.backlog.check("a", 1, 1, 0.0)
    told = line.refusal(left_s=0.5)
    assert told is not None
    assert re.search(r"in about 0\.55 s, and the target leaves 0\.5 s: 10 requests", str(told)), told
    assert told.code == "rate_limit_exceeded"
    assert told.retry_after_s == pytest.approx(0.55 - CERTAINTY * 0.5)
    line.join(5)
    line.give_up(5)
    again = line.refusal(left_s=0.5)
    assert again is not None and "about 0.55 s" in str(again), "who gives up is no measure of the pace"
    assert refused(line.backlog, "b", 1, left_s=0.5) is None
    line.backlog.forget_pace()
    assert line.refusal(left_s=0.5) is None


def test_a_pace_is_believed_for_a_while_after_the_queue_is_empty() -> None:
    line = Line()
    line.join(40)
    line.begin(40, every_s=0.05)
    for pause_s, is_known in ((5.0, True), (15.0, False)):
        line.now_s += pause_s
        line.join(9)
        assert (line.refusal(left_s=0.5) is not None) is is_known
        line.give_up(9)
    for i in range(50):
        line.backlog.add(f"t{i}", 1)
        line.backlog.remove(f"t{i}", 1)
        line.now_s += 1.0
    assert len(line.backlog._by_tenant) < 15, "tenants that are gone are forgotten"


def test_time_without_a_queue_is_no_pace() -> None:
    line = Line()
    for _ in range(50):
        line.join(1)
        line.begin(1, every_s=30.0)
    line.join(1)
    assert line.refusal(left_s=0.01) is None


def test_a_slow_pace_of_before_does_not_keep_two_at_a_time_out() -> None:
    """A flood is over. Requests now begin at once, one at a time, which is no gap in the pace."""
    line = Line()
    line.join(40)
    line.begin(40, every_s=2.0)
    for _ in range(12):
        line.join(1)
        line.begin(1, every_s=1.0)
    line.join(1)
    assert line.refusal(left_s=0.5) is None
