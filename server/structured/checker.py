"""Checks grammars: a separate process compiles each within limits, and the verdict is cached.

The process starts with the first grammar and is kept. A grammar passes through up to three lanes. Each lane gives it
more processor time than the one before, so that slow grammars do not delay quick ones. Tenants take turns on every
lane. A request waits for its verdict only for a bounded time. The check goes on without it, and a retry finds the
verdict. Knows no fields.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import math
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from inferd.engine.api.errors import RequestError
from inferd.engine.api.machine.cpu import num_cpus
from inferd.engine.api.pinned_files import PinnedFile, to_bytes
from inferd.engine.api.process.processor_time import ProcessorTime
from inferd.engine.api.process.written_once import WrittenOnce
from inferd.engine.api.round_robin import RoundRobin
from inferd.engine.api.wire.grammar_check import (
    CHECK_COMMAND,
    CHECK_CPU_S,
    FRAME_HEADER_BYTES,
    MAX_GRAMMAR_BYTES,
    Question,
    Verdict,
    body_length,
    frame_of,
    framed,
    read_verdict,
)
from inferd.server.errors import messages as errors
from inferd.server.structured.bounds import refusal


class TenantTurns:
    """At most `num_at_once` turns are held at a time, each from `acquire` to `release`."""

    def __init__(self, num_at_once: int = 1) -> None:
        self.num_at_once = num_at_once
        self._num_held = 0
        self._waiting: RoundRobin[asyncio.Future[None]] = RoundRobin()

    def num_ahead(self, tenant: str) -> int:
        """Number of turns that are held, or that begin before the tenant's next request would get one."""
        return self._num_held + self._waiting.num_before(tenant)

    async def acquire(self, tenant: str) -> None:
        """Wait for a turn. Requests of one tenant get theirs in order of arrival."""
        if self._num_held < self.num_at_once:
            self._num_held += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Give the turn to the next waiter."""
        assert self._num_held
        while self._waiting:
            turn = self._waiting.take()
            if not turn.done():
                turn.set_result(None)
                return
        self._num_held -= 1


logger = logging.getLogger("inferd.server")

_START_TIMEOUT_S = 60.0
"""Most time that it may use to start. A vocabulary of 262,000 tokens is read and built in 5 s of processor time (AMD
EPYC Zen 4, 2026-11-28). Time in which it waits for a processor does not count."""
_LOOK_S = 1.0

_END_TIMEOUT_S = 2.0

_RETRY_AFTER_S = 60.0
"""Seconds after which a grammar that took too much processor time is tried again: the time it takes varies a little."""

_MAX_ANSWER_S = 1.5
"""Longest wait of a request for its verdict, once the process has started."""

_MAX_WAIT_S = 5.0
"""A lane takes no grammar that would wait longer for its turn if each grammar ahead used all its time."""

_MAX_RUN_S = 20.0
"""Longest wall-clock time for one compilation: on busy processors a nice process gets a tenth of one."""

_QUICK_CPU_S, _MIDDLE_CPU_S = 0.03, 0.25
"""Usual grammars take 0.001 to 0.03 s with a vocabulary of 3,072 tokens. With 152,000 tokens, grammars of digits and
JSON take 0.003 to 0.012 s, and those of free letters 0.05 to 0.14 s (one core, AMD EPYC Zen 4, 2026-11-23). The schemas
of 25 tools with 100 properties each take 0.11 s, and up to twice as long on a busy machine (2026-11-28)."""

_MAX_LONG_LANES = 4
"""Each may use `CHECK_MEMORY_BYTES`."""

_MAX_KEPT_BYTES = 64 * 2**20
_MAX_PENDING = 256
_MAX_PENDING_OF_TENANT = 64

_NOTHING_KNOWN = Verdict(stopped="wall")


@dataclass(frozen=True, slots=True)
class _Lane:
    """Compiles as many grammars at once as it has turns, each for at most `cpu_s`."""

    cpu_s: float
    is_nice: bool
    turns: TenantTurns = field(default_factory=TenantTurns)

    def wait_s(self, tenant: str) -> float:
        """Most seconds until the turn of a tenant's next grammar, if each grammar ahead has a processor."""
        return self.cpu_s * self.turns.num_ahead(tenant) / self.turns.num_at_once


@dataclass(frozen=True, slots=True)
class _Kept:
    verdict: Verdict
    retry_at_s: float
    """When the grammar may be tried again, on the event loop's clock: only if it took too long."""


class GrammarChecker:
    """One process that checks grammars for one checkpoint; `close` ends it."""

    def __init__(
        self,
        model_path: Path,
        vocab_size: int,
        command: Sequence[str] = CHECK_COMMAND,
        files: Sequence[PinnedFile] = (),
        vocabulary: WrittenOnce | None = None,
    ) -> None:
        """`files`: the checkpoint's files without the weights, as the server holds them open. `vocabulary`: what the
        engines share with the process."""
        self._vocabulary = vocabulary or WrittenOnce()
        self._command = (*command, str(model_path), str(vocab_size), self._vocabulary.path)
        self._files = framed(to_bytes(files))
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[Process | Verdict] | None = None
        self._is_closed = False
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Verdict]] = {}
        """Questions that the process has not answered yet, by number."""
        num_long = max(1, min(_MAX_LONG_LANES, num_cpus() - 1))
        self._lanes = (
            _Lane(_QUICK_CPU_S, is_nice=False),
            _Lane(_MIDDLE_CPU_S, is_nice=False),
            _Lane(CHECK_CPU_S, is_nice=True, turns=TenantTurns(num_long)),
        )
        self._pending: dict[tuple[str, bytes], asyncio.Task[Verdict]] = {}
        """Checks that run or wait, by (tenant, digest of the grammar)."""
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        """By digest of the grammar; the least recently used first."""
        self._kept_bytes = 0

    async def check(self, text: str, param: str, tenant: str = "") -> Verdict:
        """The grammar in the form that the engine takes, and what it leaves to the model. Raises `RequestError`, which
        names `param`."""
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise refusal(param, "it holds a character that is no Unicode text (half of a surrogate pair)") from error
        if len(raw) > MAX_GRAMMAR_BYTES:
            raise refusal(param, f"it makes a grammar of {len(raw)} bytes, but at most {MAX_GRAMMAR_BYTES} are allowed")
        verdict = await self._verdict(text, hashlib.blake2b(raw, digest_size=16).digest(), tenant)
        if verdict.is_broken:
            raise RequestError("unsupported_value", f"'{param}' cannot be served: {verdict.error}.", param)
        if verdict.stopped == "wall":
            raise self._no_verdict(param, tenant)
        if verdict.error:
            raise refusal(param, verdict.error)
        return verdict

    async def close(self) -> None:
        """End the process and refuse what waits for it; no other is started."""
        self._is_closed = True
        if self._starting is not None:
            await asyncio.wait({self._starting})
        if self._process is not None:
            await _end(self._process)
        if self._reading is not None:
            await self._reading
        if self._pending:
            await asyncio.wait(self._pending.values())

    def _no_verdict(self, param: str, tenant: str) -> RequestError:
        wait_s = max(1.0, sum(lane.wait_s(tenant) for lane in self._lanes))
        reason = f"The server has too much to do to compile the grammar of '{errors.clip(param, errors.MAX_ECHO)}' now"
        way_out = "It may be valid. Send the request again after the time in 'Retry-After'."
        return RequestError("rate_limit_exceeded", f"{reason}. {way_out}", param, wait_s)

    async def _verdict(self, text: str, digest: bytes, tenant: str) -> Verdict:
        """The verdict on a grammar, waited for at most `_MAX_ANSWER_S`; `stopped` is "wall" if there is none by
        then."""
        kept = self._recall(digest)
        if kept is not None:
            return kept
        process = await self._running()
        if isinstance(process, Verdict):
            return process
        key = (tenant, digest)
        if key not in self._pending:
            if not self._has_room(tenant):
                return _NOTHING_KNOWN
            pending = asyncio.ensure_future(self._check_in_lanes(digest, text, tenant))
            self._pending[key] = pending
            pending.add_done_callback(lambda done: self._done(key, done))
        # Not cancelled with this request: other requests may wait for this grammar, or this one may be retried.
        done, _ = await asyncio.wait({self._pending[key]}, timeout=_MAX_ANSWER_S)
        return done.pop().result() if done else _NOTHING_KNOWN

    def _has_room(self, tenant: str) -> bool:
        num_own = sum(owner == tenant for owner, _ in self._pending)
        return num_own < _MAX_PENDING_OF_TENANT and len(self._pending) < _MAX_PENDING

    def _done(self, key: tuple[str, bytes], pending: asyncio.Future[Verdict]) -> None:
        del self._pending[key]
        if not pending.cancelled():
            pending.exception()

    async def _check_in_lanes(self, digest: bytes, text: str, tenant: str) -> Verdict:
        """The verdict of the first lane that has enough processor time for the grammar, or of the last lane."""
        verdict = _NOTHING_KNOWN
        for lane in self._lanes:
            verdict = await self._in_turn(lane, digest, text, tenant)
            if verdict.stopped != "cpu":
                break
        self._keep(digest, verdict)
        return verdict

    async def _in_turn(self, lane: _Lane, digest: bytes, text: str, tenant: str) -> Verdict:
        if lane.wait_s(tenant) > _MAX_WAIT_S:
            return _NOTHING_KNOWN
        await lane.turns.acquire(tenant)
        try:
            # An earlier turn may have checked the same grammar.
            return self._recall(digest) or await self._ask(text, lane)
        finally:
            lane.turns.release()

    async def _ask(self, text: str, lane: _Lane) -> Verdict:
        """Ask the process, starting it if there is none."""
        process = await self._running()
        if isinstance(process, Verdict):
            return process
        assert process.stdin is not None
        number = next(self._numbers)
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        process.stdin.write(frame_of(Question(number, text, lane.cpu_s, _MAX_RUN_S, lane.is_nice)))
        return await answer

    async def _running(self) -> Process | Verdict:
        """The process, ready for questions, or a verdict that says why there is none."""
        if self._process is not None:
            return self._process
        if self._is_closed:
            return _NOTHING_KNOWN
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
            self._starting.add_done_callback(lambda _: self._started())
        # Shielded: the waiting request may be cancelled, and the process must not be lost.
        return await asyncio.shield(self._starting)

    def _started(self) -> None:
        self._starting = None

    async def _start(self) -> Process | Verdict:
        process, verdict = None, Verdict(error="the process that compiles grammars did not start", is_broken=True)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, start_new_session=True
            )
            assert process.stdin is not None
            process.stdin.write(self._files)
            verdict = await _first_answer(process)
        except (TimeoutError, asyncio.IncompleteReadError, OSError, msgspec.MsgspecError):
            logger.exception(verdict.error)
        if process is None:
            return verdict
        if verdict.is_broken:
            await _end(process)
            return verdict
        self._process = process
        self._reading = asyncio.create_task(self._read(process))
        return process

    async def _read(self, process: Process) -> None:
        """Hand out verdicts until the process ends. Questions that it leaves unanswered get no verdict."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, msgspec.MsgspecError):
            while True:
                verdict = await _answer(process)
                self._asked.pop(verdict.number).set_result(verdict)
        self._process, lost, self._asked = None, self._asked, {}
        for answer in lost.values():
            answer.set_result(_NOTHING_KNOWN)
        await _end(process)

    def _recall(self, digest: bytes) -> Verdict | None:
        kept = self._kept.get(digest)
        if kept is None or kept.retry_at_s <= _now():
            return None
        self._kept.move_to_end(digest)
        return kept.verdict

    def _keep(self, digest: bytes, verdict: Verdict) -> None:
        if verdict.is_broken or verdict.stopped == "wall":
            return
        if digest in self._kept:
            self._forget(digest)
        self._kept[digest] = _Kept(verdict, _now() + _RETRY_AFTER_S if verdict.stopped else math.inf)
        self._kept_bytes += _size_of(verdict)
        while self._kept_bytes > _MAX_KEPT_BYTES:
            self._forget(next(iter(self._kept)))

    def _forget(self, digest: bytes) -> None:
        self._kept_bytes -= _size_of(self._kept.pop(digest).verdict)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _size_of(verdict: Verdict) -> int:
    return 256 + 4 * len(verdict.text) + len(verdict.error) + sum(len(left.text) for left in verdict.left)


async def _answer(process: Process) -> Verdict:
    assert process.stdout is not None
    header = await process.stdout.readexactly(FRAME_HEADER_BYTES)
    return read_verdict(await process.stdout.readexactly(body_length(header)))


async def _first_answer(process: Process) -> Verdict:
    """The process's word that it has started. Raises `TimeoutError` if it takes too long."""
    answer, kernel, used_s = asyncio.ensure_future(_answer(process)), ProcessorTime(process.pid), 0.0
    try:
        while not (await asyncio.wait({answer}, timeout=_LOOK_S))[0]:
            used_s += _LOOK_S * kernel.use().share
            if used_s > _START_TIMEOUT_S:
                raise TimeoutError
        return answer.result()
    finally:
        answer.cancel()


async def _end(process: Process) -> None:
    """End the process by closing its input; its own child processes end with it."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
        return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
