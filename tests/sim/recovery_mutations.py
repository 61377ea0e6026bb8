"""Planted bugs of the code that carries requests over a crash of the engine: journal, quarantine, restarts, hangs and
the wire. See `tests.sim.planting`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec
from msgspec import structs

from inferd.engine.api.errors import EngineDeadError
from inferd.engine.api.process.flight_recorder import FlightReader, FlightRecord, Rows
from inferd.engine.api.process.processor_time import ProcessorUse
from inferd.engine.api.wire import messages as messages_module
from inferd.engine.api.wire.client import EngineClient
from inferd.engine.api.wire.messages import Envelope, Submit
from inferd.engine.process import step_watch as watch_module
from inferd.server.dispatch import recovery as quarantine_module
from inferd.server.dispatch.recovery import Quarantine
from inferd.server.dispatch.router import Router
from inferd.server.dispatch.token_stream import TokenStream
from inferd.server.supervision import watchdog as watchdog_module
from inferd.server.supervision.engine_handle import EngineHandle
from inferd.server.supervision.supervisor import EngineSupervisor, RestartPolicy
from inferd.server.supervision.watchdog import Watchdog
from tests.sim.loop import Clocks
from tests.sim.planting import Patch, Plants

plant = Plants()


def _replay_as(patch: Patch, change: object) -> None:
    """Make replays be `change(submit)`."""
    replay = TokenStream.replay
    patch.setattr(TokenStream, "replay", lambda self, *, alone: change(replay(self, alone=alone)))  # type: ignore[operator]


# -- journal -----------------------------------------------------------------------------------------------------------


@plant
def token_is_emitted_twice_after_a_replay(patch: Patch) -> None:
    """The journal is one token behind what the caller was given."""
    _replay_as(patch, lambda submit: structs.replace(submit, emitted_ids=submit.emitted_ids[:-1]))


@plant
def replay_starts_over(patch: Patch) -> None:
    """The next engine gets the prompt alone, and generates all tokens again."""
    _replay_as(patch, lambda submit: structs.replace(submit, emitted_ids=()))


@plant
def max_tokens_is_not_reduced(patch: Patch) -> None:
    """Emitted tokens are sent as prompt, and the answer may be as long again."""

    def longer(submit: Submit) -> Submit:
        return structs.replace(submit, prompt_ids=submit.prompt_ids + submit.emitted_ids, emitted_ids=())

    _replay_as(patch, longer)


@plant
def seed_changes_with_a_replay(patch: Patch) -> None:
    """Random generators with state: the next engine's starts anew."""

    def reseeded(submit: Submit) -> Submit:
        params = structs.replace(submit.params, seed=submit.params.seed + 1)
        return structs.replace(submit, params=params) if submit.emitted_ids else submit

    _replay_as(patch, reseeded)


@plant
def position_is_off_by_one_after_a_replay(patch: Patch) -> None:
    """The prompt's first token is mistaken for one that the next engine adds itself."""

    def shifted(submit: Submit) -> Submit:
        is_long = len(submit.prompt_ids) > 1 and submit.emitted_ids
        return structs.replace(submit, prompt_ids=submit.prompt_ids[1:]) if is_long else submit

    _replay_as(patch, shifted)


@plant
def prompt_is_scored_again_after_a_replay(patch: Patch) -> None:
    """Log-probabilities of the prompt are delivered again."""
    _replay_as(patch, lambda submit: structs.replace(submit, num_prompt_logprobs=0))


@plant
def outage_makes_requests_late(patch: Patch) -> None:
    """A request accepted before an outage is refused after it, for a target that the outage used up."""
    replay = TokenStream.replay

    def as_asked(self: TokenStream, *, alone: bool) -> Submit:
        submit, target_s = replay(self, alone=alone), self.submit.scheduling.ttft_target_s
        return structs.replace(submit, scheduling=structs.replace(submit.scheduling, ttft_target_s=target_s))

    patch.setattr(TokenStream, "replay", as_asked)


# -- quarantine --------------------------------------------------------------------------------------------------------


def _judge_by(patch: Patch, change: object) -> None:
    """Give the quarantine `change(in_flight, streams)` as the requests in flight."""
    judge = Quarantine.judge

    def misled(
        self: Quarantine,
        in_flight: Mapping[int, int],
        streams: Iterable[TokenStream],
        *,
        is_external_kill: bool = False,
    ) -> list[TokenStream]:
        known = list(streams)
        return judge(self, change(in_flight, known), known, is_external_kill=is_external_kill)  # type: ignore[operator]

    patch.setattr(Quarantine, "judge", misled)


@plant
def first_in_the_queue_is_the_suspect(patch: Patch) -> None:
    """Wrong suspect: the first request in the queue, computed or not."""
    _judge_by(patch, lambda in_flight, known: {known[0].tag: 1} if known else {})


@plant
def no_request_is_a_suspect(patch: Patch) -> None:
    """A request that crashes engines goes on to do so."""
    _judge_by(patch, lambda in_flight, known: {})


@plant
def flight_record_is_read_after_it_was_cleared(patch: Patch) -> None:
    """The supervisor reads an empty flight record: no request was in flight."""
    patch.setattr(FlightReader, "in_flight", lambda self: {})


@plant
def flight_record_holds_the_newest_step_alone(patch: Patch) -> None:
    """Overlap: the step that crashed is the one before the newest."""
    launched = FlightRecord.launched

    def newest(self: FlightRecord, step_id: int, rows: Rows) -> None:
        self.ended(step_id + 1)
        launched(self, step_id, rows)

    patch.setattr(FlightRecord, "launched", newest)


@plant
def suspects_are_never_alone(patch: Patch) -> None:
    """Suspects never run alone, so the guilty one stays unknown and engine after engine crashes."""
    patch.setattr(Quarantine, "replay", staticmethod(lambda stream: stream.replay(alone=False)))


@plant
def first_death_is_proof(patch: Patch) -> None:
    """Wrong suspect: an engine crashes by chance, and the request that ran alone is given up."""
    patch.setattr(quarantine_module, "FAILED_AFTER", 1)


@plant
def one_kill_is_proof(patch: Patch) -> None:
    """Wrong suspect: engines are killed from outside, and the request that runs alone at the third kill is given up."""
    patch.setattr(quarantine_module, "FAILED_AFTER_ALONE", 1)


@plant
def poison_may_come_back(patch: Patch) -> None:
    """A request that crashed engines is accepted again as soon as it is sent again."""
    patch.setattr(Quarantine, "_refuse", lambda self, submit: None)


@plant
def poison_is_known_by_its_seed(patch: Patch) -> None:
    """The same prompt with another seed counts as another request."""

    def with_seed(submit: Submit) -> bytes:
        return msgspec.msgpack.encode((submit.prompt_ids, submit.params))

    patch.setattr(quarantine_module, "_digest", with_seed)


# -- deaths and hangs --------------------------------------------------------------------------------------------------


@plant
def crash_loop_never_ends(patch: Patch) -> None:
    """Engines that crash at once are started for ever."""
    patch.setattr(RestartPolicy, "died", lambda self, now, num_delivered: 0.0)


@plant
def progress_does_not_count(patch: Patch) -> None:
    """The server gives up although tokens came between the crashes."""
    died = RestartPolicy.died
    patch.setattr(RestartPolicy, "died", lambda self, now, num_delivered: died(self, now, 0))


@plant
def crash_loop_of_one_replica_ends_the_server(patch: Patch) -> None:
    """The server gives up although another replica serves."""

    def strict(self: EngineSupervisor, reason: str) -> float:
        raise EngineDeadError(reason)

    patch.setattr(EngineSupervisor, "_give_up", strict)


@plant
def tokens_of_another_replica_count_as_progress(patch: Patch) -> None:
    """A replica whose engines crash at once is started again and again while another serves."""
    begin = EngineSupervisor.__init__

    class Shared(RestartPolicy):
        router: Router

        def died(self, now: float, num_delivered: int) -> float | None:
            return super().died(now, self.router.replicas.num_delivered)

    def shared(self: EngineSupervisor, router: Router, *args: object, **kwargs: object) -> None:
        begin(self, router, *args, **kwargs)  # type: ignore[arg-type]
        self._restart_policy = Shared()
        self._restart_policy.router = router

    patch.setattr(EngineSupervisor, "__init__", shared)


@plant
def event_loop_waits_until_memory_is_free(patch: Patch) -> None:
    """All streams stand still while the system frees the memory of an engine that died."""

    async def end(self: EngineHandle) -> None:
        self.process.kill()
        self.discard()

    patch.setattr(EngineHandle, "end", end)


@plant
def hang_is_never_seen(patch: Patch) -> None:
    """Streams wait for ever for an engine that hangs."""
    patch.setattr(Watchdog, "look", lambda self, pulse, now: None)


@plant
def short_silence_is_a_hang(patch: Patch) -> None:
    """An engine that was suspended for a moment is killed."""
    patch.setattr(watchdog_module, "MAX_STOPPED_S", 0.3)


@plant
def starved_engine_counts_as_hung(patch: Patch) -> None:
    """An engine that waits for a processor is killed, because all of the time counts."""
    patch.setattr(ProcessorUse, "share", 1.0)


@plant
def long_step_is_a_hang(patch: Patch) -> None:
    """A legal step of eight seconds is cut off."""
    patch.setattr(watch_module, "_MIN_S", 1.0)
    patch.setattr(watch_module, "_FIRST_S", 1.0)


@plant
def times_are_of_the_wall_clock(patch: Patch) -> None:
    """Times are taken from the wall clock: it is set, and an hour passes at once, or time goes back."""
    patch.setattr(Clocks, "monotonic", Clocks.time)


@plant
def standby_outlives_the_server(patch: Patch) -> None:
    """Orphan: a process that waits to be promoted is forgotten."""

    async def forget(self: EngineSupervisor) -> None:
        pass

    patch.setattr(EngineSupervisor, "_drop_standby", forget)


@plant
def lent_cores_are_never_given_back(patch: Patch) -> None:
    """Replicas compute on a dead one's cores beside its next engine."""
    share = EngineSupervisor._share_cores

    def kept(self: EngineSupervisor, *, is_lent: bool) -> None:
        if is_lent:
            share(self, is_lent=True)
        else:
            self._replica.lends_cores = False

    patch.setattr(EngineSupervisor, "_share_cores", kept)


# -- the wire ----------------------------------------------------------------------------------------------------------


def _open_as(patch: Patch, expect: object) -> None:
    """Open frames as if `expect(envelope, epoch, sequence)` had been expected."""
    open_frame = messages_module._open

    def trusting(frame: bytes, epoch: int, sequence: int) -> msgspec.Raw:
        try:
            envelope = msgspec.msgpack.decode(frame, type=Envelope)
        except msgspec.MsgspecError:
            return open_frame(frame, epoch, sequence)
        return open_frame(frame, *expect(envelope, epoch, sequence))  # type: ignore[operator]

    patch.setattr(messages_module, "_open", trusting)


@plant
def frame_of_an_old_epoch_is_accepted(patch: Patch) -> None:
    """Frames of an earlier engine are accepted as those of the current one."""
    _open_as(patch, lambda envelope, epoch, sequence: (envelope.epoch, sequence))


@plant
def lost_frame_is_not_missed(patch: Patch) -> None:
    """A gap in the frame numbers is ignored."""
    _open_as(patch, lambda envelope, epoch, sequence: (epoch, max(sequence, envelope.sequence)))


@plant
def last_frame_to_the_server_is_not_missed(patch: Patch) -> None:
    """No later number shows the gap: a stream waits for an end that was sent."""
    _see_traffic(patch, is_awaited=False)


@plant
def last_frame_to_the_engine_is_not_missed(patch: Patch) -> None:
    """A request is sent, nothing follows it, and the engine never receives it."""
    _see_traffic(patch, num_sent=0)


@plant
def late_frame_is_a_lost_one(patch: Patch) -> None:
    """An engine with a late frame is killed."""
    patch.setattr(watchdog_module, "MAX_LATE_S", 0.1)


def _see_traffic(patch: Patch, **fields: int) -> None:
    """Give the watchdog wrong counts of frames."""
    frame_counts = EngineClient.frame_counts.fget
    patch.setattr(EngineClient, "frame_counts", property(lambda self: replace(frame_counts(self), **fields)))  # type: ignore[misc]


@plant
def repeated_frame_is_taken_again(patch: Patch) -> None:
    """A frame number that was seen before is accepted as a new one."""
    _open_as(patch, lambda envelope, epoch, sequence: (epoch, min(sequence, envelope.sequence)))


@plant
def checksum_is_not_looked_at(patch: Patch) -> None:
    """A wrong bit becomes a wrong token."""
    patch.setattr(messages_module, "crc32", lambda body: 0)
