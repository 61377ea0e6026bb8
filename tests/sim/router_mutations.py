"""Planted bugs of the router and of the streams it feeds. See `tests.sim.planting`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from inferd.engine.api.wire.messages import Abort, Delta, Ready, SubmitChoices, ToEngine
from inferd.server.dispatch import token_stream as stream_module
from inferd.server.dispatch.admission import Backlog
from inferd.server.dispatch.live_streams import LiveStreams
from inferd.server.dispatch.model_lifecycle import ModelLifecycle, State
from inferd.server.dispatch.recovery import Quarantine, Recovery
from inferd.server.dispatch.replica import Replica
from inferd.server.dispatch.router import Router
from inferd.server.dispatch.token_stream import TokenStream
from tests.sim.planting import Patch, Plants

plant = Plants()


@plant
def abort_never_reaches_the_engine(patch: Patch) -> None:
    """Lost abort: the caller is gone, and the engine still generates the whole answer."""
    send = Replica.send

    def deaf(self: Replica, message: ToEngine) -> None:
        if not isinstance(message, Abort):
            send(self, message)

    patch.setattr(Replica, "send", deaf)


@plant
def aborted_streams_are_asked_of_the_next_engine(patch: Patch) -> None:
    """Lost abort: it was on its way to the engine that crashed."""
    lose = Recovery.lose

    def forget(self: Recovery, in_flight: Mapping[int, int], *, is_external_kill: bool = False, index: int = 0) -> None:
        reasons = {request_id: stream.abort_reason for request_id, stream in self._streams.by_id.items()}
        for stream in self._streams.by_id.values():
            stream.abort_reason = None
        lose(self, in_flight, is_external_kill=is_external_kill, index=index)
        for request_id, stream in self._streams.by_id.items():
            stream.abort_reason = reasons[request_id]

    patch.setattr(Recovery, "lose", forget)


@plant
def end_is_sent_twice(patch: Patch) -> None:
    """Two terminal events: the last delta read stays in the stream."""
    read = TokenStream.__anext__

    async def twice(self: TokenStream) -> Delta:
        delta = await read(self)
        if delta.finish_reason is not None:
            self._pending.append(delta)
        return delta

    patch.setattr(TokenStream, "__anext__", twice)


@plant
def end_is_lost_on_a_slow_reader(patch: Patch) -> None:
    """No terminal event: if deltas pile up, the end of the first is reported."""
    merge = stream_module.merge
    patch.setattr(
        stream_module,
        "merge",
        lambda deltas: structs.replace(merge(deltas), finish_reason=deltas[0].finish_reason, failure=deltas[0].failure),
    )


@plant
def backlog_loses_logprobs(patch: Patch) -> None:
    """If deltas pile up, all ids arrive but only the last log-probabilities."""
    merge = stream_module.merge

    def lossy(deltas: Sequence[Delta]) -> Delta:
        return structs.replace(merge(deltas), logprobs=deltas[-1].logprobs)

    patch.setattr(stream_module, "merge", lossy)


@plant
def begun_requests_are_not_sent_again(patch: Patch) -> None:
    """Lost request: the next engine gets only the requests that had not begun."""
    lose = Recovery.lose

    def forgetful(
        self: Recovery, in_flight: Mapping[int, int], *, is_external_kill: bool = False, index: int = 0
    ) -> None:
        lose(self, in_flight, is_external_kill=is_external_kill, index=index)
        self._streams.unsent = {name: stream for name, stream in self._streams.unsent.items() if not stream.has_begun}

    patch.setattr(Recovery, "lose", forgetful)


@plant
def death_in_the_middle_of_the_replays_is_forgotten(patch: Patch) -> None:
    """Lost request: a request that was sent to an engine which then crashed is not sent to the next one."""
    lose = Recovery.lose

    def forgetful(
        self: Recovery, in_flight: Mapping[int, int], *, is_external_kill: bool = False, index: int = 0
    ) -> None:
        untold = set(self._streams.unsent)
        lose(self, in_flight, is_external_kill=is_external_kill, index=index)
        if untold:
            self._streams.unsent = {name: stream for name, stream in self._streams.unsent.items() if name in untold}

    patch.setattr(Recovery, "lose", forgetful)


@plant
def everything_is_sent_twice(patch: Patch) -> None:
    """The next engine gets each request twice, and refuses the id that is in use."""
    begin = Recovery.begin

    async def eager(self: Recovery, replica: Replica, ready: Ready) -> None:
        await begin(self, replica, ready)
        for stream in replica.streams.values():
            replica.send(self._quarantine.replay(stream))

    patch.setattr(Recovery, "begin", eager)


@plant
def dead_engine_counts_as_up(patch: Patch) -> None:
    """Requests taken in an outage are sent to the dead engine, and the next engine never receives them."""
    lose = Recovery.lose

    def stay_up(
        self: Recovery, in_flight: Mapping[int, int], *, is_external_kill: bool = False, index: int = 0
    ) -> None:
        lose(self, in_flight, is_external_kill=is_external_kill, index=index)
        self._replicas[index].is_up = True

    patch.setattr(Recovery, "lose", stay_up)


@plant
def outage_is_never_over(patch: Patch) -> None:
    """Wrong state: the next engine computes what was left, and after a while new requests are refused."""
    change = ModelLifecycle.change

    def stuck(self: ModelLifecycle, to: State, failure: str = "") -> None:
        if self.state is not State.RECOVERING or to is not State.SERVING:
            change(self, to, failure)

    patch.setattr(ModelLifecycle, "change", stuck)


@plant
def cached_tokens_are_those_of_the_last_engine(patch: Patch) -> None:
    """Usage changes in the middle of an answer."""
    record = TokenStream.journal

    def latest(self: TokenStream, delta: Delta) -> None:
        record(self, delta)
        if delta.token_ids:
            self.num_cached += 1

    patch.setattr(TokenStream, "journal", latest)


@plant
def usage_counts_what_was_drawn(patch: Patch) -> None:
    """Usage differs from what was received: tokens after the end of an abort are counted."""
    patch.setattr(
        TokenStream,
        "num_generated",
        property(lambda self: len(self.emitted_ids) + (self.abort_reason is not None)),
    )


@plant
def queue_never_empties(patch: Patch) -> None:
    """Leak: running requests count as waiting, until no request is accepted any more."""
    patch.setattr(Backlog, "remove", lambda self, *args, **kwargs: None)


@plant
def aborted_in_the_queue_counts_as_waiting(patch: Patch) -> None:
    """Leak: only a request that starts leaves the queue's count."""
    push = LiveStreams.push

    def leak(self: LiveStreams, stream: TokenStream, delta: Delta) -> None:
        if delta.finish_reason is not None and not stream.has_begun:
            self.backlog.add(stream.submit.scheduling.tenant, len(stream.submit.prompt_ids))
        push(self, stream, delta)

    patch.setattr(LiveStreams, "push", leak)


@plant
def drain_never_ends(patch: Patch) -> None:
    """The last stream ends, and the drain that waits for it is not woken."""
    push = LiveStreams.push

    def silent(self: LiveStreams, stream: TokenStream, delta: Delta) -> None:
        push(self, stream, delta)
        self._is_idle.clear()

    patch.setattr(LiveStreams, "push", silent)


@plant
def id_in_use_is_taken(patch: Patch) -> None:
    """Cross-talk: two callers share an id, and one of them gets the other's tokens."""
    patch.setattr(Router, "_check_id", lambda self, submit: None)


@plant
def deltas_go_to_the_newest_stream(patch: Patch) -> None:
    """Cross-talk: a lookup by anything but the id."""
    deliver = Router._deliver

    def newest(self: Router, replica: Replica, output: object) -> None:
        deltas = output.deltas  # type: ignore[attr-defined]
        if len(deltas) > 1:
            swapped = [
                structs.replace(first, request_id=second.request_id)
                for first, second in zip(deltas, (*deltas[1:], deltas[0]), strict=True)
            ]
            output = structs.replace(output, deltas=tuple(swapped))  # type: ignore[type-var]
        deliver(self, replica, output)  # type: ignore[arg-type]

    patch.setattr(Router, "_deliver", newest)


@plant
def choices_share_a_seed(patch: Patch) -> None:
    """The engine gets further choices without their own seeds, so they are all the same."""
    send = Replica.send

    def same(self: Replica, message: ToEngine) -> None:
        if isinstance(message, SubmitChoices):
            seed = message.first.params.seed
            message = structs.replace(message, others=tuple((request_id, seed) for request_id, _ in message.others))
        send(self, message)

    patch.setattr(Replica, "send", same)


@plant
def last_choice_is_not_sent(patch: Patch) -> None:
    """Lost request: the last choice of a prompt never reaches the engine."""
    send = Replica.send

    def short(self: Replica, message: ToEngine) -> None:
        if isinstance(message, SubmitChoices):
            message = structs.replace(message, others=message.others[:-1])
        send(self, message)

    patch.setattr(Replica, "send", short)


@plant
def choices_ask_for_one_place(patch: Patch) -> None:
    """A request with many choices takes only one place in the queue."""
    check = Backlog.check

    def alone(self: Backlog, tenant: str, num_requests: int, *rest: float) -> None:
        check(self, tenant, min(1, num_requests), *rest)  # type: ignore[arg-type]

    patch.setattr(Backlog, "check", alone)


@plant
def abort_goes_to_the_first_replica(patch: Patch) -> None:
    """Lost abort: the replica that computes the request never hears of it."""

    def first(self: Router, request_id: str) -> None:
        if request_id in self.streams.unsent:
            self.streams.end_aborted(self.streams.by_id[request_id])
        else:
            self.replicas[0].try_send(Abort((request_id,)))

    patch.setattr(Router, "_abort", first)


@plant
def streams_of_a_lost_replica_are_left_there(patch: Patch) -> None:
    """Lost request: those of a replica that died wait for it, and it does not know them."""
    lose = Recovery.lose

    def forgetful(
        self: Recovery, in_flight: Mapping[int, int], *, is_external_kill: bool = False, index: int = 0
    ) -> None:
        lose(self, in_flight, is_external_kill=is_external_kill, index=index)
        if self._replicas.is_up:
            self._streams.unsent = {}

    patch.setattr(Recovery, "lose", forgetful)


@plant
def streams_move_without_their_tokens(patch: Patch) -> None:
    """The other replica generates all tokens again."""
    send_waiting = Recovery.send_waiting

    async def bare(self: Recovery, index: int) -> None:
        with Patch.context() as inner:
            inner.setattr(Quarantine, "replay", staticmethod(lambda stream: stream.submit))
            await send_waiting(self, index)

    patch.setattr(Recovery, "send_waiting", bare)


@plant
def streams_of_other_replicas_are_sent_again(patch: Patch) -> None:
    """Cross-talk: a request is computed in two replicas at once."""
    lose = Recovery.lose

    def all_of_them(
        self: Recovery, in_flight: Mapping[int, int], *, is_external_kill: bool = False, index: int = 0
    ) -> None:
        lose(self, in_flight, is_external_kill=is_external_kill, index=index)
        self._streams.unsent = dict(self._streams.by_id)

    patch.setattr(Recovery, "lose", all_of_them)
