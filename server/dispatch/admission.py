"""Admission control: bounds the requests and prompt tokens that wait for the engine, in all and of one tenant.

Refuses a request over a bound, and a request that would miss its TTFT target. The pace at which earlier requests got
their first tokens predicts that.

Without keys there is one tenant, which may fill the whole queue. With keys a tenant may hold eight times as much as it
leaves free (the dynamic threshold of shared switch buffers: Choudhury and Hahne, 1998). One flooding tenant thus leaves
a ninth, or one place, to the others, and two flooding tenants share the queue. Knows no requests and no engine.

The engine knows better and refuses too, but only between two steps. A refusal here costs no step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from inferd.engine.api.errors import RequestError

FLOOD_FACTOR = 8
"""One of several tenants may hold so many times what is free."""
LEAST_RETRY_S = 1.0
CERTAINTY = 0.75
"""Share of a target that the expected wait may take. Of requests expected to be just in time, half are late."""
_NUM_GAPS = 64
"""First tokens that the pace is computed from; fewer than `_LEAST_GAPS` are too few."""
_LEAST_GAPS = 32
_PACE_HOLDS_S = 10.0
"""Seconds for which a pace holds after its last gap, even if nothing waits meanwhile: the next burst is then judged
from its first request on."""


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Bounds on what waits."""

    num_requests: int = 2048
    seconds: float = 600.0
    """Bound on prompt tokens, as the time that computing them takes at the measured pace. OpenAI's clients wait ten
    minutes for an answer by default, so no request is refused that would have waited. A TTFT target cannot be this
    bound, because prefix hits are not known here."""

    def num_tokens(self, tokens_per_s: float) -> float:
        """Bound on prompt tokens; infinite while the pace is not known."""
        return self.seconds * tokens_per_s if tokens_per_s > 0.0 else float("inf")


@dataclass(frozen=True, slots=True)
class _Measure:
    """One of the queue's two measures (requests, prompt tokens) when a request arrives."""

    unit: str
    own: float
    """Amount of the request's tenant that waits."""
    total: float
    more: float
    most: float


@dataclass(slots=True)
class _Waiting:
    num_requests: int = 0
    num_tokens: int = 0
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_GAPS))
    """Seconds between requests that left the queue one after another while others waited."""
    last_s: float | None = None
    """When the last request left the queue; None if none has waited since."""
    paced_s: float = 0.0
    """Time of the newest gap."""

    def wait_s(self, now: float) -> float | None:
        """Seconds that a request arriving now would wait; None if that is not known, or nothing is ahead."""
        gaps_s = tuple(self.gaps_s)  # a copy, so that another thread may ask while the event loop adds and clears
        if not self.num_requests or len(gaps_s) < _LEAST_GAPS or now - self.paced_s > _PACE_HOLDS_S:
            return None
        return (self.num_requests + 1) * sum(gaps_s) / len(gaps_s)


class Backlog:
    """Requests and prompt tokens that wait now, by tenant."""

    def __init__(self, bounds: QueueBounds, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds, self._clock = bounds, clock
        self._all = _Waiting()
        self._by_tenant: dict[str, _Waiting] = {}

    @property
    def num_requests(self) -> int:
        return self._all.num_requests

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that wait; prefix hits are not known here."""
        return self._all.num_tokens

    def num_requests_by_tenant(self) -> dict[str, int]:
        """Tenant -> its requests that wait, for tenants with some."""
        return {name: held.num_requests for name, held in self._by_tenant.items() if name and held.num_requests}

    def add(self, tenant: str, num_tokens: int) -> None:
        """Count a request with a prompt of so many tokens as waiting."""
        own = self._by_tenant.get(tenant)
        if own is None:
            self._forget_idle()
            own = self._by_tenant[tenant] = _Waiting()
        for held in (self._all, own):
            held.num_requests += 1
            held.num_tokens += num_tokens

    def remove(self, tenant: str, num_tokens: int, *, has_begun: bool = True) -> None:
        """Count a request as waiting no longer. `has_begun`: it has its first token, and was not refused or aborted."""
        own, now = self._by_tenant[tenant], self._clock()
        for held in (self._all, own):
            held.num_requests -= 1
            held.num_tokens -= num_tokens
            assert held.num_requests >= 0 <= held.num_tokens, "more left the queue than came"
        if has_begun:
            if own.last_s is not None:
                own.gaps_s.append(now - own.last_s)
                own.paced_s = now
            own.last_s = now
        if not own.num_requests:
            own.last_s = None

    def _forget_idle(self) -> None:
        """Drop the tenants with nothing waiting and no recent pace."""
        now = self._clock()
        self._by_tenant = {
            name: held
            for name, held in self._by_tenant.items()
            if held.num_requests or now - held.paced_s <= _PACE_HOLDS_S
        }

    def forget_pace(self) -> None:
        """Forget every pace, because there was no engine for a while."""
        for held in self._by_tenant.values():
            held.gaps_s.clear()
            held.last_s = None

    def check(
        self, tenant: str, num_requests: int, num_tokens: int, tokens_per_s: float, left_s: float | None = None
    ) -> None:
        """Raises `RequestError` if the queue has no place for so many requests with so many prompt tokens together.

        If nothing waits and there are no tenants, it always has. `num_tokens` may be a lower bound. `tokens_per_s`: the
        engine's prefill speed; 0: not known. `left_s`: seconds left until the first token is due; None: no target.
        """
        if tenant:
            self._check_ever(num_requests)
        if not self._all.num_requests:
            return
        own = self._by_tenant.get(tenant, _Waiting())
        requests = _Measure(
            "requests", own.num_requests, self._all.num_requests, num_requests, self._bounds.num_requests
        )
        self._check(tenant, requests, tokens_per_s, takes_rest=own.num_requests == 0 and num_requests == 1)
        most = self._bounds.num_tokens(tokens_per_s)
        if most < float("inf"):
            tokens = _Measure("prompt tokens", own.num_tokens, self._all.num_tokens, num_tokens, most)
            self._check(tenant, tokens, tokens_per_s, takes_rest=own.num_tokens == 0)
        wait_s = own.wait_s(self._clock())
        if left_s is not None and wait_s is not None and wait_s > CERTAINTY * left_s:
            message = (
                f"the first token would come in about {wait_s:.2g} s, and the target leaves {max(left_s, 0.0):.2g} s: "
                f"{own.num_requests} requests are ahead; retry later, or ask for a longer target"
            )
            raise RequestError("rate_limit_exceeded", message, retry_after_s=wait_s - CERTAINTY * left_s)

    def _check_ever(self, num_requests: int) -> None:
        """Raises `RequestError` for more choices than one tenant may put into an empty queue."""
        most = max(1, FLOOD_FACTOR * self._bounds.num_requests // (FLOOD_FACTOR + 1))
        if num_requests > most:
            message = (
                f"Invalid 'n': this request has {num_requests} choices (prompts times 'n'). This server's queue has "
                f"{self._bounds.num_requests} places, and one key may take {most} of them. Send fewer in one request."
            )
            raise RequestError("request_exceeds_work_limit", message, "n")

    def _check(self, tenant: str, line: _Measure, pace: float, *, takes_rest: bool) -> None:
        """`takes_rest`: the tenant has nothing waiting and may take what is left, even the last place."""
        if line.total + line.more > line.most:
            adds = f", this request adds {line.more:.0f}" if line.more > 1 else ""
            message = f"{line.total:.0f} {line.unit} are waiting{adds}, and at most {line.most:.0f} may; retry later."
            raise RequestError("server_is_overloaded", message, retry_after_s=self._seconds(pace))
        if tenant and not takes_rest and line.own + line.more > FLOOD_FACTOR * (line.most - line.total - line.more):
            message = (
                f"{line.own:.0f} {line.unit} of your tenant are waiting, and the queue keeps its last "
                f"{line.most - line.total:.0f} for other tenants; retry later."
            )
            raise RequestError("slow_down", message, retry_after_s=self._seconds(pace))

    def _seconds(self, tokens_per_s: float) -> float:
        """Seconds until half of the waiting tokens are computed: then there is room, and the engine is still busy."""
        if tokens_per_s <= 0.0:
            return LEAST_RETRY_S
        return max(LEAST_RETRY_S, self._all.num_tokens / tokens_per_s / 2)
