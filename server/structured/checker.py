"""Has grammars tried out by a process of its own, off the event loop, and remembers what came of them.

The process is started with the first grammar and kept. One grammar at a time is tried for a moment; what takes longer
is tried again on a second lane, behind everything else that the machine has to do, so that it holds up no quick one.
Tenants take turns on either lane. Knows no fields.
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
from inferd.engine.api.grammar import (
    CHECK_COMMAND,
    CHECK_CPU_S,
    FRAME_HEADER_BYTES,
    MAX_GRAMMAR_BYTES,
    Question,
    Verdict,
    body_length,
    frame_of,
    read_verdict,
)
from inferd.server.structured.bounds import refusal
from inferd.server.structured.turns import Turns

logger = logging.getLogger("inferd.server")

_START_TIMEOUT_S = 60.0
"""A vocabulary of 200,000 tokens is read within 2 s, on a machine that has nothing else to do."""

_END_TIMEOUT_S = 2.0

_FORGIVEN_AFTER_S = 60.0
"""A grammar that took too much processor time is tried again after so long: how much it takes varies a little."""

_MAX_WAIT_S = 10.0
"""Longest that a grammar waits for its turn on a lane."""

_MAX_RUN_S = 20.0
"""Longest that it then takes on the clock: where the processors are busy, a nice process gets a tenth of one."""

_QUICK_CPU_S = 0.15
"""Fifty times what a usual grammar takes."""

_MAX_KEPT_BYTES = 64 * 2**20
_MAX_PENDING = 256
_MAX_PENDING_OF_TENANT = 64


@dataclass(frozen=True, slots=True)
class _Lane:
    """Tries one grammar at a time."""

    cpu_s: float
    is_nice: bool
    turns: Turns = field(default_factory=Turns)


class GrammarChecker:
    """One checking process for one checkpoint; `close` ends it."""

    def __init__(self, model_path: Path, vocab_size: int, command: Sequence[str] = CHECK_COMMAND) -> None:
        self._command = (*command, str(model_path), str(vocab_size))
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._is_closed = False
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Verdict]] = {}
        """Questions that the process has yet to answer."""
        self._quick, self._long = _Lane(_QUICK_CPU_S, is_nice=False), _Lane(CHECK_CPU_S, is_nice=True)
        self._pending: dict[tuple[str, bytes], asyncio.Task[Verdict]] = {}
        """(tenant, digest) of what is tried, or waits for it."""
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()
        self._kept_bytes = 0
        self._forgiven_s: dict[bytes, float] = {}
        """When grammars that took too long are tried again, on the event loop's clock."""

    async def check(self, text: str, param: str, tenant: str = "") -> str:
        """The grammar as the engine is to be given it. Raises `RequestError`, which names `param`."""
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise refusal(param, "it holds a character that is no Unicode text (half of a surrogate pair)") from error
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise refusal(
                param, f"it makes a grammar of {num_bytes} bytes, but at most {MAX_GRAMMAR_BYTES} are allowed"
            )
        verdict = await self._verdict(text, tenant)
        if verdict.is_broken:
            raise RequestError("unsupported_value", f"'{param}' cannot be served: {verdict.error}.", param)
        if verdict.stopped == "wall":
            raise _overloaded("The server is too busy to compile this grammar now")
        if verdict.error:
            raise refusal(param, verdict.error)
        return verdict.text

    async def close(self) -> None:
        """End the process; what waits for it is refused, and no other is started."""
        self._is_closed = True
        if self._process is not None:
            await _end(self._process)
        if self._reading is not None:
            await self._reading

    async def _verdict(self, text: str, tenant: str) -> Verdict:
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        kept = self._recall(digest)
        if kept is not None:
            return kept
        key = (tenant, digest)
        if key not in self._pending:
            self._check_room(tenant)
            pending = asyncio.ensure_future(self._tried(digest, text, tenant))
            self._pending[key] = pending
            pending.add_done_callback(lambda done: self._done(key, done))
        # Shielded: others may wait for the same grammar.
        return await asyncio.shield(self._pending[key])

    def _check_room(self, tenant: str) -> None:
        """Raises `RequestError` where no more may wait."""
        num_own = sum(owner == tenant for owner, _ in self._pending)
        if num_own >= _MAX_PENDING_OF_TENANT or len(self._pending) >= _MAX_PENDING:
            limits = f"at most {_MAX_PENDING} may wait, {_MAX_PENDING_OF_TENANT} for one tenant"
            waiting = f"{len(self._pending)} grammars are waiting to be compiled, {num_own} of them yours"
            raise _overloaded(f"{waiting}; {limits}")

    def _done(self, key: tuple[str, bytes], pending: asyncio.Future[Verdict]) -> None:
        del self._pending[key]
        if not pending.cancelled():
            pending.exception()

    async def _tried(self, digest: bytes, text: str, tenant: str) -> Verdict:
        verdict = await self._in_turn(self._quick, digest, text, tenant)
        return verdict if verdict.stopped != "cpu" else await self._in_turn(self._long, digest, text, tenant)

    async def _in_turn(self, lane: _Lane, digest: bytes, text: str, tenant: str) -> Verdict:
        """Raises `RequestError` where its turn does not come in time."""
        try:
            await asyncio.wait_for(lane.turns.acquire(tenant), _MAX_WAIT_S)
        except TimeoutError:
            raise _overloaded(
                f"Other grammars were compiled first, and this one waited for {_MAX_WAIT_S:g} s"
            ) from None
        try:
            # An earlier turn may have been for the same grammar.
            verdict = self._recall(digest)
            if verdict is None:
                verdict = await self._ask(text, lane)
                if lane is self._long or not verdict.stopped:
                    self._keep(digest, verdict)
            return verdict
        finally:
            lane.turns.release()

    async def _ask(self, text: str, lane: _Lane) -> Verdict:
        """Ask the process, which is started where there is none."""
        async with self._starting:
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
        """The process, ready for questions, or why it can be none."""
        if self._process is not None:
            return self._process
        if self._is_closed:
            return Verdict(stopped="wall")
        process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        try:
            verdict = await asyncio.wait_for(_answer(process), _START_TIMEOUT_S)
        except (TimeoutError, asyncio.IncompleteReadError, OSError, msgspec.MsgspecError):
            logger.exception("the process that compiles grammars did not start")
            verdict = Verdict(error="the process that compiles grammars did not start", is_broken=True)
        if verdict.is_broken:
            await _end(process)
            return verdict
        self._process = process
        self._reading = asyncio.create_task(self._read(process))
        return process

    async def _read(self, process: Process) -> None:
        """Hand out verdicts until the process ends. What it leaves unanswered was stopped by the machine."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, msgspec.MsgspecError):
            while True:
                verdict = await _answer(process)
                self._asked.pop(verdict.number).set_result(verdict)
        self._process, lost, self._asked = None, self._asked, {}
        for answer in lost.values():
            answer.set_result(Verdict(stopped="wall"))
        await _end(process)

    def _recall(self, digest: bytes) -> Verdict | None:
        if digest not in self._kept or self._forgiven_s.get(digest, math.inf) <= _now():
            return None
        self._kept.move_to_end(digest)
        return self._kept[digest]

    def _keep(self, digest: bytes, verdict: Verdict) -> None:
        if verdict.is_broken or verdict.stopped == "wall":
            return
        if digest in self._kept:
            self._forget(digest)
        self._kept[digest] = verdict
        self._kept_bytes += _size_of(verdict)
        if verdict.stopped:
            self._forgiven_s[digest] = _now() + _FORGIVEN_AFTER_S
        while self._kept_bytes > _MAX_KEPT_BYTES:
            self._forget(next(iter(self._kept)))

    def _forget(self, digest: bytes) -> None:
        self._kept_bytes -= _size_of(self._kept.pop(digest))
        self._forgiven_s.pop(digest, None)


def _overloaded(reason: str) -> RequestError:
    return RequestError("server_is_overloaded", f"{reason}; retry later.")


def _now() -> float:
    return asyncio.get_running_loop().time()


def _size_of(verdict: Verdict) -> int:
    return 256 + 4 * len(verdict.text) + len(verdict.error)


async def _answer(process: Process) -> Verdict:
    assert process.stdout is not None
    header = await process.stdout.readexactly(FRAME_HEADER_BYTES)
    return read_verdict(await process.stdout.readexactly(body_length(header)))


async def _end(process: Process) -> None:
    """It ends with its input, and the processes of grammars with it."""
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
        return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
