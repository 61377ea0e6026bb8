"""The life of a model's engines: which state may follow which, and what each says to requests and to waiters."""

from __future__ import annotations

from itertools import pairwise

import pytest

from inferd.server.dispatch import model_lifecycle as lifecycle_module
from inferd.server.dispatch.model_lifecycle import CHANGES, ModelLifecycle, State

WAYS = {
    State.STARTING: (),
    State.SERVING: (State.SERVING,),
    State.RECOVERING: (State.SERVING, State.RECOVERING),
    State.UNLOADED: (State.SERVING, State.UNLOADED),
    State.LOADING: (State.SERVING, State.UNLOADED, State.LOADING),
    State.PAUSED: (State.SERVING, State.PAUSED),
    State.SLEEPING: (State.SERVING, State.PAUSED, State.SLEEPING),
    State.FAILED: (State.FAILED,),
    State.STOPPED: (State.STOPPED,),
}
"""State -> the changes that lead to it."""


def to(state: State) -> ModelLifecycle:
    lifecycle = ModelLifecycle("tiny", outage_grace_s=10.0)
    for each in WAYS[state]:
        change(lifecycle, each)
    return lifecycle


def change(lifecycle: ModelLifecycle, state: State) -> None:
    lifecycle.change(state, "no memory" if state is State.FAILED else "")


@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("after", State)
def test_what_the_table_lacks_raises_and_changes_nothing(before: State, after: State) -> None:
    lifecycle = to(before)
    if after in CHANGES[before]:
        change(lifecycle, after)
        assert lifecycle.state is after
        return
    with pytest.raises(AssertionError, match=f"{before.value} cannot become {after.value}"):
        change(lifecycle, after)
    assert lifecycle.state is before


def test_every_state_can_be_reached_and_no_state_follows_itself() -> None:
    assert CHANGES.keys() == set(State) == WAYS.keys()
    assert all(state not in after for state, after in CHANGES.items())
    assert all(after in CHANGES[before] for way in WAYS.values() for before, after in pairwise((State.STARTING, *way)))


def test_what_each_state_says() -> None:
    """(requests are taken, it is known whether engines run, loaded, a death ends the server)."""
    told = {
        State.STARTING: (False, False, False, True),
        State.SERVING: (True, True, True, False),
        State.RECOVERING: (True, True, True, False),
        State.UNLOADED: (True, True, False, False),
        State.LOADING: (True, False, False, False),
        State.PAUSED: (False, True, True, False),
        State.SLEEPING: (False, True, False, False),
        State.FAILED: (False, True, False, True),
        State.STOPPED: (False, True, False, True),
    }
    for state, expected in told.items():
        it = to(state)
        found = it.is_ready, it.settled.is_set(), it.loaded.is_set(), it.is_first_start
        assert found == expected, state
        assert (it.failure != "") is (state is State.FAILED)
        assert it.is_asleep is (state in (State.PAUSED, State.SLEEPING)) is not it.awake.is_set()
        assert not it.is_leaving
        it.leave()
        assert it.is_leaving and it.is_ready is expected[0], "senders have time"
        it.drain()
        it.leave()
        assert it.is_draining and it.draining.is_set() and not it.is_ready


def test_a_long_outage_refuses_requests_and_the_next_one_is_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(lifecycle_module.time, "monotonic", lambda: now[0])
    lifecycle = to(State.RECOVERING)
    now[0] = 9.9
    assert lifecycle.is_ready
    now[0] = 10.0
    assert not lifecycle.is_ready
    lifecycle.change(State.SERVING)
    lifecycle.change(State.RECOVERING)
    assert lifecycle.is_ready


@pytest.mark.parametrize(("state", "reason"), [(State.FAILED, ""), (State.STOPPED, "no memory")])
def test_a_failure_alone_has_a_reason(state: State, reason: str) -> None:
    with pytest.raises(AssertionError, match="with the reason"):
        to(State.STARTING).change(state, reason)
