"""Has grammars tried out by a process of its own, off the event loop, and remembers what came of them.

The process is started with the first grammar and kept; one that takes too long, or dies of a grammar, is replaced and
the grammar refused. Grammars are tried one at a time, in the order in which they came. Knows no fields.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from inferd.engine.api.errors import RequestError
from inferd.engine.api.grammar import (
    CHECK_COMMAND,
    CHECK_TIMEOUT_S,
    FRAME_HEADER_BYTES,
    MAX_GRAMMAR_BYTES,
    Verdict,
    body_length,
    frame_of,
    read_verdict,
)
from inferd.server.structured.bounds import refusal

logger = logging.getLogger("inferd.server")

_START_TIMEOUT_S = 60.0
"""A vocabulary of 200,000 tokens is read within 2 s, on a machine that has nothing else to do."""

_PATIENCE_S = 0.25
"""A hundred times what a usual grammar takes."""

_LEAST_PRIORITY = 19

_TOOK_TOO_LONG = Verdict(error=f"it takes more than {CHECK_TIMEOUT_S:g} s to compile; make it smaller or simpler")
_FORGIVEN_AFTER_S = 60.0
"""Such a verdict may be a busy machine's: after so long the grammar is tried again."""

_MAX_KEPT_BYTES = 64 * 2**20
_MAX_PENDING = 256


class GrammarChecker:
    """One checking process for one checkpoint; `close` ends it."""

    def __init__(self, model_path: Path, vocab_size: int, command: Sequence[str] = CHECK_COMMAND) -> None:
        self._command = (*command, str(model_path), str(vocab_size))
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._num_pending = 0
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
            raise refusal(param, f"it makes a grammar of {num_bytes} bytes, and at most {MAX_GRAMMAR_BYTES} are served")
        verdict = await self._verdict(text)
        if verdict.is_broken:
            raise RequestError("unsupported_value", f"'{param}' cannot be served: {verdict.error}.", param)
        if verdict.error:
            raise refusal(param, verdict.error)
        return verdict.text

    async def close(self) -> None:
        """End the process; what waits for it is refused."""
        if self._process is not None:
            await _end(self._process)

    async def _verdict(self, text: str) -> Verdict:
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        kept = self._recall(digest)
        if kept is not None:
            return kept
        if self._num_pending >= _MAX_PENDING:
            message = f"{self._num_pending} grammars are waiting to be compiled, the most that may; retry later."
            raise RequestError("server_is_overloaded", message)
        self._num_pending += 1
        turn = asyncio.ensure_future(self._in_turn(digest, text))
        turn.add_done_callback(self._done)
        try:
            # Shielded: a caller that goes away must not leave half an answer in the pipe.
            return await asyncio.shield(turn)
        finally:
            del turn  # an error of its own names this frame, and would keep itself

    def _done(self, turn: asyncio.Future[Verdict]) -> None:
        self._num_pending -= 1
        if not turn.cancelled():
            turn.exception()

    async def _in_turn(self, digest: bytes, text: str) -> Verdict:
        async with self._turn:
            # An earlier turn may have been for the same grammar.
            verdict = self._recall(digest)
            if verdict is None:
                verdict = await self._asked(text)
                self._keep(digest, verdict)
            return verdict

    async def _asked(self, text: str) -> Verdict:
        """Ask the process, which is started where there is none. A grammar that it does not survive is refused."""
        process = await self._running()
        if isinstance(process, Verdict):
            return process
        assert process.stdin is not None
        process.stdin.write(frame_of(text))
        answer = asyncio.ensure_future(_answer(process))
        try:
            await asyncio.wait({answer}, timeout=_PATIENCE_S)
            if answer.done():
                return await answer
            _step_back(process)
            verdict = await asyncio.wait_for(answer, CHECK_TIMEOUT_S - _PATIENCE_S)
            # Nobody may raise a priority again: the next grammar has a process of its own.
            await self._discard(process)
            return verdict
        except TimeoutError:
            verdict = _TOOK_TOO_LONG
        except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError):
            verdict = Verdict(error="it takes more memory to compile than a grammar may; make it smaller or simpler")
        finally:
            del answer  # its error names this frame, and would keep itself
        await self._discard(process)
        return verdict

    async def _discard(self, process: Process) -> None:
        self._process = None
        await _end(process)

    async def _running(self) -> Process | Verdict:
        """The process, ready for a grammar, or why it can be none."""
        if self._process is not None and self._process.returncode is None:
            return self._process
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
        return process

    def _recall(self, digest: bytes) -> Verdict | None:
        if digest not in self._kept or self._forgiven_s.get(digest, math.inf) <= _now():
            return None
        self._kept.move_to_end(digest)
        return self._kept[digest]

    def _keep(self, digest: bytes, verdict: Verdict) -> None:
        if verdict.is_broken:
            return
        if digest in self._kept:
            self._forget(digest)
        self._kept[digest] = verdict
        self._kept_bytes += _size_of(verdict)
        if verdict is _TOOK_TOO_LONG:
            self._forgiven_s[digest] = _now() + _FORGIVEN_AFTER_S
        while self._kept_bytes > _MAX_KEPT_BYTES:
            self._forget(next(iter(self._kept)))

    def _forget(self, digest: bytes) -> None:
        self._kept_bytes -= _size_of(self._kept.pop(digest))
        self._forgiven_s.pop(digest, None)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _size_of(verdict: Verdict) -> int:
    return 256 + 4 * len(verdict.text) + len(verdict.error)


def _step_back(process: Process) -> None:
    """Let a grammar that takes long have the processor after all others: the engine's steps share every core, and one
    core that is busy holds them all up. Beside a grammar without end another stream of some 700 tokens a second fell to
    65 without this (embedded model, 2 cores of an AMD EPYC Zen 4, 2026-11-21). What it falls to with it was not
    measured.

    Linux weighs sessions before it weighs the processes in one, where it groups by session.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, _LEAST_PRIORITY)
        Path(f"/proc/{process.pid}/autogroup").write_text(str(_LEAST_PRIORITY))


async def _answer(process: Process) -> Verdict:
    assert process.stdout is not None
    header = await process.stdout.readexactly(FRAME_HEADER_BYTES)
    return read_verdict(await process.stdout.readexactly(body_length(header)))


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
