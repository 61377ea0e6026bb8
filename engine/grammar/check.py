"""Compiles and tries callers' grammars before the engine sees them, each in a process that can be killed.

The server starts it as `python -P -m inferd.engine.grammar.check CHECKPOINT ROWS SHARED`. Frames of
`engine.api.wire.grammar_check` come on standard input and go to standard output. The first one has the files that the
server holds open. This process has read the vocabulary,
and forks one process for each grammar. The processor time, the wall time and the address space of that process are
bounded.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import selectors
import signal
import sys
import time
import traceback
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from inferd.engine.api.errors import ChangedError, StartError
from inferd.engine.api.pinned_files import of_bytes, read_pinned
from inferd.engine.api.wire.grammar_check import (
    CHECK_CPU_S,
    CHECK_MEMORY_BYTES,
    FRAME_HEADER_BYTES,
    MAX_LARK_CHARS,
    MAX_LEFT,
    MAX_REASON,
    Question,
    Verdict,
    body_length,
    frame_of,
    read_question,
    read_verdict,
)
from inferd.engine.grammar.compiler import compile_grammar, normal_form
from inferd.engine.grammar.matcher import MatchedGrammar
from inferd.engine.grammar.ports import WORD_BITS, GrammarError
from inferd.engine.grammar.vocabulary import load_vocabulary

_INPUT, _OUTPUT = 0, 1
_PIECE_BYTES = 2**16
_FAULT, _NO_MEMORY = 1, 2
"""Exit statuses of the process that checks one grammar."""
_NICENESS = 10
"""A tenth of the processor share of a normal process. 19 would be a seventieth, which is nothing on a busy machine."""

_PROBED_TOKENS = 256
_PROBE_CPU_S = 0.5
"""How far a grammar is followed, and the most processor time for it; a hundredth of it is usual. A grammar that
exceeded its limits later would fail a request that was accepted. Masks that take milliseconds would delay every
request's steps."""

_PROBE_STRIDE = 7919
"""A prime, so that each mask follows another of its allowed tokens; the choice is always the same."""


@dataclass(slots=True)
class _Check:
    """The check of one grammar, in its process."""

    number: int
    pid: int
    pipe: int
    end_s: float
    """Time (monotonic) at which it is stopped."""
    is_late: bool = False
    answer: bytearray = field(default_factory=bytearray)


def main() -> int:
    """Answer until the input ends."""
    path, vocab_size, shared = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    pinned = _next_frame()
    if pinned is None:
        return 0
    files = of_bytes(pinned)
    try:
        read_pinned(files)
        vocabulary = load_vocabulary(path, vocab_size, shared, files)
    except (StartError, GrammarError) as error:
        _write(_OUTPUT, frame_of(Verdict(error=_told(error), is_broken=True)))
        return 0
    _bound_memory()
    gc.freeze()  # the collector then leaves these pages alone, so that a fork shares them
    _write(_OUTPUT, frame_of(Verdict()))
    checks: dict[int, _Check] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(_INPUT, selectors.EVENT_READ)
        try:
            while _serve(vocabulary, ready, checks):
                pass
        finally:
            for check in checks.values():
                _kill(check)
    return 0


def _told(error: StartError | GrammarError) -> str:
    """Why no grammar can be checked, for callers."""
    if isinstance(error, GrammarError):
        return str(error)[:MAX_REASON]
    is_changed = isinstance(error, ChangedError)
    reason = "was written to after the server read it" if is_changed else "cannot be read now: try again"
    return f"a file of its tokenizer {reason}"


def _serve(vocabulary: LLTokenizer, ready: selectors.BaseSelector, checks: dict[int, _Check]) -> bool:
    """Wait for the next event and handle it. False once the input has ended."""
    next_end_s = min((check.end_s for check in checks.values() if not check.is_late), default=None)
    timeout_s = None if next_end_s is None else max(0.0, next_end_s - time.monotonic())
    for key, _ in ready.select(timeout_s):
        if key.fd == _INPUT:
            question = _next_question()
            if question is None:
                return False
            check = _start(vocabulary, question)
            checks[check.pipe] = check
            ready.register(check.pipe, selectors.EVENT_READ)
        elif piece := os.read(key.fd, _PIECE_BYTES):
            checks[key.fd].answer += piece
        else:
            ready.unregister(key.fd)
            _write(_OUTPUT, frame_of(_verdict_of(checks.pop(key.fd))))
    now_s = time.monotonic()
    for check in checks.values():
        if check.end_s <= now_s and not check.is_late:
            check.is_late = True
            _kill(check)
    return True


def _start(vocabulary: LLTokenizer, question: Question) -> _Check:
    source, target = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = _FAULT
        try:
            for inherited in (_INPUT, _OUTPUT):
                os.close(inherited)  # their closing tells the server that this program has ended
            _run(vocabulary, question, target)
        except MemoryError:
            status = _NO_MEMORY
        except Exception:  # an error of ours
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(target)
    return _Check(question.number, pid, source, time.monotonic() + question.wall_s)


def _run(vocabulary: LLTokenizer, question: Question, target: int) -> None:
    """Runs in a process of its own, which the timer ends by a signal, even inside native code."""
    if question.is_nice:
        _lower_priority()
    signal.setitimer(signal.ITIMER_PROF, question.cpu_s)
    frame = frame_of(judge(vocabulary, question.text))
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    _write(target, frame)
    os._exit(0)


def _verdict_of(check: _Check) -> Verdict:
    """The verdict of a process that has closed its pipe, which it does when it ends."""
    os.close(check.pipe)
    _, status = os.waitpid(check.pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        verdict = read_verdict(bytes(check.answer[FRAME_HEADER_BYTES:]))
        return Verdict(text=verdict.text, error=verdict.error, number=check.number, left=verdict.left)
    if check.is_late:
        return Verdict(stopped="wall", number=check.number)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        reason = f"it takes more than {CHECK_CPU_S:g} s of processor time to compile; make it smaller or simpler"
        return Verdict(error=reason, stopped="cpu", number=check.number)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _FAULT:
        return Verdict(error="its check failed, and the server's log says how", is_broken=True, number=check.number)
    reason = "it takes more memory to compile than one grammar may use; make it smaller or simpler"
    return Verdict(error=reason, number=check.number)


def _kill(check: _Check) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(check.pid, signal.SIGKILL)


def _lower_priority() -> None:
    """Lower the priority of this process: the engine's steps use every core, and one busy core delays them all.

    Beside an endless grammar another stream of some 700 tokens a second fell to 65 without this (embedded model, 2
    cores of an AMD EPYC Zen 4, 2026-11-21). What it falls to with it was not measured. If Linux groups by session, it
    weighs sessions before the processes in one.
    """
    with contextlib.suppress(OSError):
        os.setsid()
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
        Path("/proc/self/autogroup").write_text(str(_NICENESS))


def judge(vocabulary: LLTokenizer, text: str) -> Verdict:
    """Compile a grammar and follow it for some tokens."""
    try:
        normal = normal_form(text)
        num_chars = len(normal.text)
        if num_chars > MAX_LARK_CHARS:
            raise GrammarError(f"in Lark it has {num_chars} characters, but at most {MAX_LARK_CHARS} are allowed")
        matcher = compile_grammar(vocabulary, normal.text)
        _probe(vocabulary, matcher)
    except GrammarError as error:
        return Verdict(error=str(error)[:MAX_REASON])
    except RecursionError:
        return Verdict(error="it is nested too deeply")
    return Verdict(text=normal.text, left=normal.left[:MAX_LEFT])


def _probe(vocabulary: LLTokenizer, matcher: LLMatcher) -> None:
    """Raises `GrammarError` if nothing can be generated, or if following it soon exceeds its limits."""
    grammar = MatchedGrammar(matcher, vocabulary, ())
    words = array("I", bytes(4 * -(-vocabulary.vocab_size // WORD_BITS)))
    started_s = time.process_time()
    for step in range(_PROBED_TOKENS):
        grammar.fill(words, 0)
        if grammar.failure:
            raise GrammarError(grammar.failure)
        token_id = _some_token(words, _PROBE_STRIDE * step)
        if token_id is None and step == 0:
            raise GrammarError("it allows nothing but the empty text" if grammar.is_accepting else "it allows no text")
        if token_id is None:
            return
        grammar.accept((token_id,))
        if grammar.is_finished:
            return
        if time.process_time() - started_s > _PROBE_CPU_S:
            raise GrammarError(f"it takes too long to follow: {step + 1} tokens took {_PROBE_CPU_S:g} s")


def _some_token(words: array[int], start: int) -> int | None:
    """A token of the first word that allows one, from `start` on and around; None if nothing is allowed."""
    for offset in range(len(words)):
        place = (start + offset) % len(words)
        if words[place]:
            bits = [bit for bit in range(WORD_BITS) if words[place] >> bit & 1]
            return WORD_BITS * place + bits[start % len(bits)]
    return None


def _bound_memory() -> None:
    """Bound the memory to what is used now and `CHECK_MEMORY_BYTES`. If the system does not report its use, it stays
    unbounded."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    limit = num_pages * os.sysconf("SC_PAGE_SIZE") + CHECK_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _next_question() -> Question | None:
    """None at the end of the input."""
    body = _next_frame()
    return None if body is None else read_question(body)


def _next_frame() -> bytes | None:
    """The body of a frame; None at the end of the input."""
    header = _read(FRAME_HEADER_BYTES)
    return _read(body_length(header)) if header else None


def _read(num_bytes: int) -> bytes:
    """Exactly so many bytes of the input, or none at its end."""
    parts = bytearray()
    while len(parts) < num_bytes:
        piece = os.read(_INPUT, num_bytes - len(parts))
        if not piece:
            return b""
        parts += piece
    return bytes(parts)


def _write(target: int, frame: bytes) -> None:
    while frame:
        frame = frame[os.write(target, frame) :]


if __name__ == "__main__":
    sys.exit(main())
