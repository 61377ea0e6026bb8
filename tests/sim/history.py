"""The run's own record of engines and requests, with which the server's decisions are compared.

It holds which requests each crashed engine was computing, whether tokens were delivered between crashes, and what may
have been refused and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from inferd.engine.api.errors import EngineDeadError, StartError
from inferd.engine.api.wire.params import SamplingParams
from inferd.server.observability.metrics import Metrics
from inferd.server.observability.request_record import RequestRecord
from tests.sim.process import SimulatedProcess

MAX_DEATHS = 5
"""R4: most crashes in a minute of serving without a token between them; one more ends the server."""
WINDOW_S = 60.0
GUILTY_DEATHS = 3
"""R3: a request is given up only after so many crashes, and must have run alone in the last."""
REFUSED_S = 600.0


@dataclass(frozen=True, slots=True)
class Death:
    """The end of one engine."""

    replica: int
    served_s: float
    in_flight: frozenset[str]
    num_delivered: int
    """Tokens delivered by all engines of its replica until then."""
    harms: tuple[str, ...]
    was_killed: bool
    """Whether it was killed from outside."""


Asked = tuple[tuple[int, ...], SamplingParams]
"""The identity of a request in the quarantine, for any caller."""


def asked(prompt_ids: tuple[int, ...], params: SamplingParams) -> Asked:
    """The identity without the seed, which is drawn anew each time."""
    return prompt_ids, structs.replace(params, seed=0)


class History:
    """The record of one run. Every check raises `AssertionError`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.deaths: list[Death] = []
        self.num_sent: dict[str, int] = {}
        """Request -> number of engines that received it."""
        self._aborted_in: dict[str, SimulatedProcess | None] = {}
        self._guilty: list[tuple[float, Asked]] = []
        self.has_given_up = False

    # -- engines -----------------------------------------------------------------------------------------------------

    def died(self, process: SimulatedProcess, in_flight: set[str], num_delivered: int) -> None:
        """Record that an engine ended because of a planted fault."""
        harms, is_standby = process.harms, not process.promoted.is_set()
        assert harms or is_standby, "an engine was ended with which nothing was wrong"
        if not is_standby and harms != ["stopped"]:
            served_s, names = max(self._loop.time() - process.ready_s, 0.0), frozenset(in_flight)
            death = Death(process.replica, served_s, names, num_delivered, tuple(harms), process.was_killed)
            self.deaths.append(death)

    def check_failed_start(self, recovery: asyncio.Task[None]) -> None:
        """The first engine of a replica did not start, so the server must end at once."""
        assert recovery.done() and isinstance(recovery.exception(), (EngineDeadError, StartError)), recovery
        tried = [death.replica for death in self.deaths]
        assert tried and len(tried) == len(set(tried)), f"{tried} were tried where the first could not start"

    def check_given_up(self, num_replicas: int) -> None:
        """Check that no further engine starts after so many crashes in a minute of serving with nothing delivered
        between them, in any replica."""
        self.has_given_up = True
        for replica in range(num_replicas):
            deaths = self._of(replica)
            ends = range(MAX_DEATHS + 1, len(deaths) + 1)
            is_loop = any(self._is_loop(deaths[end - MAX_DEATHS - 1 : end]) for end in ends)
            assert is_loop, f"given up after {deaths} of replica {replica}"

    def check_not_given_up(self, replica: int, num_delivered: int) -> None:
        """`num_delivered`: by the replica at the end of the run."""
        deaths = self._of(replica)
        for end in range(len(deaths) + 1):
            loop = deaths[max(0, end - MAX_DEATHS - 2) : end]
            # A frame that the last engine sent may be delivered after its crash.
            after = deaths[end].num_delivered if end < len(deaths) else num_delivered
            # Tokens between the first two crashes may be of the second engine: the count begins anew.
            is_over = bool(loop) and (after > loop[-1].num_delivered or loop[-1].num_delivered > loop[0].num_delivered)
            assert is_over or not self._is_loop(loop, more=1), "a crash loop goes on"

    def _of(self, replica: int) -> list[Death]:
        return [death for death in self.deaths if death.replica == replica]

    def _is_loop(self, deaths: list[Death], more: int = 0) -> bool:
        if len(deaths) < MAX_DEATHS + 1 + more:
            return False
        # A frame that an engine sent before its crash may be delivered after it.
        served_s = sum(death.served_s for death in deaths[1:])
        return served_s <= WINDOW_S and deaths[-1].num_delivered == deaths[1].num_delivered

    # -- requests ----------------------------------------------------------------------------------------------------

    def sent(self, request_id: str, process: SimulatedProcess) -> None:
        """Record that an engine received the request."""
        self.num_sent[request_id] = self.num_sent.get(request_id, 0) + 1
        aborted_in = self._aborted_in.get(request_id, process)
        assert aborted_in is process, f"{request_id} was aborted in another engine, and is sent again"

    def aborted(self, request_id: str, process: SimulatedProcess | None) -> None:
        """Record that the caller disconnected while this engine had the request, or none."""
        self._aborted_in.setdefault(request_id, process)

    def given_up(self, request_id: str, what: Asked) -> None:
        """Check a request that was given up for crashing engines. Three engines crashed while they computed it, the
        last with nothing else. Two are enough if that one was killed from outside, which may be chance."""
        deaths = [death for death in self.deaths if request_id in death.in_flight]
        assert len(deaths) >= GUILTY_DEATHS, f"{request_id} is given up after {len(deaths)} deaths with it"
        assert deaths[-1].in_flight == {request_id}, f"{request_id} is given up and was not alone: {deaths[-1]}"
        num_alone = sum(death.in_flight == {request_id} for death in deaths)
        assert num_alone > deaths[-1].was_killed, f"{request_id} is given up by one kill: {deaths}"
        self._guilty.append((self._loop.time(), what))

    def is_refused(self, what: Asked) -> bool:
        """Whether an equal request was given up lately."""
        now = self._loop.time()
        return any(each == what and now - at_s < REFUSED_S for at_s, each in self._guilty)

    def check_poison(self, request_id: str) -> None:
        """R3: a request that crashes engines is found. Requests computed beside it may have to run alone first."""
        name = f"poison {request_id}"
        own = [death for death in self.deaths if name in death.harms]
        # A crash with another cause beside the poison may count as chance, as a kill from outside does.
        most = GUILTY_DEATHS + any(death.was_killed or len(death.harms) > 1 for death in own)
        assert len(own) <= most, f"{request_id} ended {len(own)} engines"


class CheckedMetrics(Metrics):
    """R20: no time is negative, even if the wall clock jumps, and the counts are those of what was delivered."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__("simulated", clock=clock)
        self.num_counted = 0

    def first_token(self, ttft_s: float) -> None:
        assert ttft_s >= 0, f"a first token after {ttft_s} s"
        super().first_token(ttft_s)

    def tokens(self, num_tokens: int, gap_s: float) -> None:
        assert 0 <= gap_s < 7200, f"{gap_s} s between tokens"
        super().tokens(num_tokens, gap_s)

    def recovered(self, num_replayed: int, outage_s: float) -> None:
        assert 0 <= outage_s < 7200, f"an outage of {outage_s} s"
        super().recovered(num_replayed, outage_s)

    def request_finished(self, record: RequestRecord) -> None:
        times = (record.queue_s, record.prefill_s, record.decode_s, record.e2e_s)
        assert all(value is None or 0 <= value < 7200 for value in times), record
        self.num_counted += record.num_generation_tokens
        super().request_finished(record)
