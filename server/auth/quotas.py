"""Quotas of a key: concurrent requests, requests per minute and tokens per minute, with OpenAI's rate limit headers.

A limit per minute is a token bucket of that size, which fills evenly. A prompt is charged before its request goes on,
an answer when it ends. A bucket's debt is therefore at most the answers that run. It all belongs to the event loop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from inferd.engine.api.errors import RequestError
from inferd.server.errors import messages as errors

_MINUTE_S = 60.0
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{part}-{what}" for what in ("requests", "tokens") for part in ("limit", "remaining", "reset")
)


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of a key. None means unlimited."""

    concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class Account(Protocol):
    """The account that a request is charged to."""

    def take(self, num_tokens: int) -> None:
        """Charge prompt tokens. Raises `RequestError` if the quota does not cover them now."""
        ...

    def owe(self, num_tokens: int) -> None:
        """Charge the tokens of an answer. A negative number gives tokens back."""
        ...

    def stay(self) -> None:
        """Count one more running request, which goes on after its HTTP answer. It ends with `leave`."""
        ...

    def leave(self) -> None:
        """A running request ended."""
        ...


class Unlimited:
    """An account without a quota, which counts nothing and refuses nothing."""

    def take(self, num_tokens: int) -> None: ...

    def owe(self, num_tokens: int) -> None: ...

    def stay(self) -> None: ...

    def leave(self) -> None: ...


UNLIMITED = Unlimited()


@dataclass(slots=True)
class _Bucket:
    """A token bucket that fills evenly with `limit` per minute. Its level may be negative."""

    limit: int
    level: float
    at_s: float

    def fill(self, now: float) -> float:
        """Fill the bucket up to `now`. Returns its level."""
        self.level = min(float(self.limit), self.level + (now - self.at_s) * self.limit / _MINUTE_S)
        self.at_s = now
        return self.level

    def resize(self, limit: int, now: float) -> None:
        """Change the limit. The same share of it is left, and fills in the same time."""
        self.fill(now)
        self.level = self.level * limit / self.limit
        self.limit = limit

    def seconds_to(self, level: float) -> float:
        """Seconds until the bucket holds `level`."""
        return max(0.0, (level - self.level) * _MINUTE_S / self.limit)


class KeyAccount:
    """One key's use of its quota. It outlives a reload of the keys file."""

    def __init__(self, quota: Quota, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._concurrent: int | None = None
        self._requests: _Bucket | None = None
        self._tokens: _Bucket | None = None
        self.num_active = 0
        """Number of requests that entered and have not left."""
        self.apply(quota)

    def apply(self, quota: Quota) -> None:
        """Use this quota from now on."""
        now = self._clock()
        self._concurrent = quota.concurrent_requests
        self._requests = _resized(self._requests, quota.requests_per_minute, now)
        self._tokens = _resized(self._tokens, quota.tokens_per_minute, now)

    def enter(self) -> None:
        """Count a request that begins. It ends with `leave`. Raises `RequestError` if the quota does not allow it."""
        now = self._clock()
        if self._concurrent is not None and self.num_active >= self._concurrent:
            message = (
                f"This key has {self.num_active} requests running, and its quota allows {self._concurrent} at the same "
                "time. Wait until one ends."
            )
            raise RequestError("slow_down", message)
        tokens, requests = self._tokens, self._requests
        if tokens is not None and tokens.fill(now) < 1.0:
            raise _refusal("tokens", tokens, tokens.seconds_to(1.0))
        if requests is not None:
            if requests.fill(now) < 1.0:
                raise _refusal("requests", requests, requests.seconds_to(1.0))
            requests.level -= 1.0
        self.num_active += 1

    def stay(self) -> None:
        self.num_active += 1

    def leave(self) -> None:
        self.num_active -= 1
        assert self.num_active >= 0, "more requests ended than began"

    def take(self, num_tokens: int) -> None:
        tokens = self._tokens
        if tokens is None:
            return
        if num_tokens > tokens.limit:
            message = (
                f"The prompt has {num_tokens} tokens, but the quota of this key is {tokens.limit} per minute, so it "
                "will never fit. Send a shorter prompt, or ask for a larger quota."
            )
            raise RequestError("rate_limit_exceeded", message, retry_after_s=_MINUTE_S)
        if tokens.fill(self._clock()) < num_tokens:
            raise _refusal("tokens", tokens, tokens.seconds_to(num_tokens))
        tokens.level -= num_tokens

    def owe(self, num_tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.fill(self._clock())
            self._tokens.level -= num_tokens

    def headers(self) -> dict[str, str]:
        """OpenAI's headers `x-ratelimit-*`, for the limits that the key has."""
        now = self._clock()
        made: dict[str, str] = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                level = bucket.fill(now)
                made[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
                made[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(level)))
                made[f"x-ratelimit-reset-{name}"] = errors.duration_text(bucket.seconds_to(bucket.limit))
        return made


def _resized(bucket: _Bucket | None, limit: int | None, now: float) -> _Bucket | None:
    if limit is None:
        return None
    if bucket is None:
        return _Bucket(limit, float(limit), now)
    bucket.resize(limit, now)
    return bucket


def _refusal(what: str, bucket: _Bucket, wait_s: float) -> RequestError:
    remaining = max(0, math.floor(bucket.level))
    message = f"Rate limit reached for {what} per min: limit {bucket.limit}, remaining {remaining}."
    return errors.TryAgainError("rate_limit_exceeded", message, wait_s)
