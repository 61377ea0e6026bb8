"""A key's quota on a clock that the test moves: buckets of a minute, concurrent requests, and their headers."""

from __future__ import annotations

import pytest

from inferd.engine.api.errors import RequestError
from inferd.server.auth.quotas import UNLIMITED, KeyAccount, Quota


class Key:
    """An account with a clock that the test sets."""

    def __init__(self, **quota: int) -> None:
        self.now_s = 100.0
        self.account = KeyAccount(Quota(**quota), lambda: self.now_s)

    def refusal(self, num_tokens: int | None = None) -> RequestError:
        """The refusal of a request, or of a prompt of so many tokens."""
        with pytest.raises(RequestError) as caught:
            self.account.enter() if num_tokens is None else self.account.take(num_tokens)
        return caught.value


def test_requests_a_minute_come_back_evenly() -> None:
    key = Key(requests_per_minute=6)
    for _ in range(6):
        key.account.enter()
    error = key.refusal()
    assert (error.code, error.retry_after_s) == ("rate_limit_exceeded", 10.0)
    assert str(error).startswith("Rate limit reached for requests per min: limit 6, remaining 0. Please try again in ")
    key.now_s += 9.9
    assert key.refusal().retry_after_s == pytest.approx(0.1)
    key.now_s += 0.1
    key.account.enter()
    assert key.refusal().retry_after_s == pytest.approx(10.0)
    key.now_s += 3_600
    for _ in range(6):
        key.account.enter()
    key.refusal()
    assert key.account.num_active == 13, "what was refused did not begin"


def test_requests_at_a_time_wait_for_one_to_end() -> None:
    key = Key(concurrent_requests=2)
    key.account.enter()
    key.account.stay()
    assert key.refusal().code == "slow_down"
    key.account.leave()
    key.account.enter()
    assert key.account.num_active == 2


def test_a_prompt_is_paid_for_before_and_an_answer_after() -> None:
    key = Key(tokens_per_minute=60)
    key.account.take(40)
    assert key.refusal(21).retry_after_s == pytest.approx(1.0)
    key.account.take(20)
    assert key.refusal().retry_after_s == pytest.approx(1.0), "no request begins without a token left"
    key.account.owe(30)
    assert key.refusal().retry_after_s == pytest.approx(31.0), "an answer may be owed"
    key.account.owe(-31)
    key.account.enter()
    key.account.take(1)
    key.now_s += 1_000
    key.account.take(60)
    error = key.refusal(61)
    assert (error.code, error.retry_after_s) == ("rate_limit_exceeded", 60.0)
    assert "has 61 tokens, but the quota of this key is 60 per minute, so it will never fit" in str(error)


def test_another_quota_leaves_the_same_part() -> None:
    key = Key(tokens_per_minute=60, requests_per_minute=60)
    key.account.take(30)
    key.account.apply(Quota(tokens_per_minute=120))
    assert key.account.headers() == {
        "x-ratelimit-limit-tokens": "120",
        "x-ratelimit-remaining-tokens": "60",
        "x-ratelimit-reset-tokens": "30s",
    }
    key.account.apply(Quota(requests_per_minute=3, concurrent_requests=1))
    assert key.account.headers()["x-ratelimit-remaining-requests"] == "3", "a new bucket is full"
    key.account.enter()
    assert key.refusal().code == "slow_down"
    key.account.apply(Quota())
    assert key.account.headers() == {}
    key.account.take(10**9)


def test_headers_tell_both_buckets() -> None:
    key = Key(requests_per_minute=60, tokens_per_minute=600)
    key.account.enter()
    key.account.take(100)
    key.account.owe(600)
    assert key.account.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m10s",
    }
    key.now_s += 35
    assert key.account.headers()["x-ratelimit-reset-tokens"] == "35s"


def test_an_account_without_bounds_takes_all() -> None:
    UNLIMITED.take(10**12)
    UNLIMITED.owe(10**12)
    UNLIMITED.stay()
    UNLIMITED.leave()
