"""Tries out callers' grammars before the engine sees them: whatever one of them does, its process can be killed.

Started by the server as `python -P -m inferd.engine.grammar.check CHECKPOINT ROWS`; frames of `engine.api.grammar` come
on standard input and go to standard output. Each grammar has a process of its own, forked from this one, which has read
the vocabulary. Its processor time, its time on the clock and its address space are bounded.
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
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from inferd.engine.api.wire.grammar_check import (
    CHECK_CPU_S,
    CHECK_MEMORY_BYTES,
    FRAME_HEADER_BYTES,
    MAX_GRAMMAR_BYTES,
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
_NICENESS = 10
"""A tenth of what a process gets that nothing was done to. 19 would be a seventieth: nothing, on a busy machine."""

_PROBED_TOKENS = 256
_PROBE_CPU_S = 0.5
"""How far a grammar is followed, and the processor's time that this may take: a hundredth of it is usual. Limits that
bite late would fail a request that was taken, and masks that take milliseconds would hold up everybody's steps."""

_PROBE_STRIDE = 7919
"""A prime: from mask to mask another of the allowed tokens is followed, the same ones each time."""


@dataclass(slots=True)
class _Trial:
    """One grammar in its process."""

    number: int
    pid: int
    pipe: int
    end_s: float
    """When it is stopped, on the clock."""
    is_late: bool = False
    answer: bytearray = field(default_factory=bytearray)


def main() -> int:
    """Answer until the input ends."""
    path, vocab_size = Path(sys.argv[1]), int(sys.argv[2])
    try:
        vocabulary = load_vocabulary(path, vocab_size)
    except GrammarError as error:
        _write(_OUTPUT, frame_of(Verdict(error=str(error)[:MAX_REASON], is_broken=True)))
        return 0
    _bound_memory()
    gc.freeze()  # what is forked is not looked through, and so not copied
    _write(_OUTPUT, frame_of(Verdict()))
    trials: dict[int, _Trial] = {}
    with selectors.DefaultSelector() as ready:
        ready.register(_INPUT, selectors.EVENT_READ)
        try:
            while _serve(vocabulary, ready, trials):
                pass
        finally:
            for trial in trials.values():
                _kill(trial)
    return 0


def _serve(vocabulary: LLTokenizer, ready: selectors.BaseSelector, trials: dict[int, _Trial]) -> bool:
    """Wait for what happens next, and do what it asks for; False once the input has ended."""
    next_end_s = min((trial.end_s for trial in trials.values() if not trial.is_late), default=None)
    timeout_s = None if next_end_s is None else max(0.0, next_end_s - time.monotonic())
    for key, _ in ready.select(timeout_s):
        if key.fd == _INPUT:
            question = _next_question()
            if question is None:
                return False
            trial = _begin(vocabulary, question)
            trials[trial.pipe] = trial
            ready.register(trial.pipe, selectors.EVENT_READ)
        elif piece := os.read(key.fd, _PIECE_BYTES):
            trials[key.fd].answer += piece
        else:
            ready.unregister(key.fd)
            _write(_OUTPUT, frame_of(_verdict_of(trials.pop(key.fd))))
    now_s = time.monotonic()
    for trial in trials.values():
        if trial.end_s <= now_s and not trial.is_late:
            trial.is_late = True
            _kill(trial)
    return True


def _begin(vocabulary: LLTokenizer, question: Question) -> _Trial:
    source, target = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for inherited in (_INPUT, _OUTPUT):
                os.close(inherited)  # the server takes the end of both for the end of this program
            _try_out(vocabulary, question, target)
        finally:
            os._exit(1)
    os.close(target)
    return _Trial(question.number, pid, source, time.monotonic() + question.wall_s)


def _try_out(vocabulary: LLTokenizer, question: Question, target: int) -> None:
    """In a process of its own, which the timer ends by a signal, also in the middle of native code."""
    if question.is_nice:
        _step_back()
    signal.setitimer(signal.ITIMER_PROF, question.cpu_s)
    frame = frame_of(judge(vocabulary, question.text))
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    _write(target, frame)
    os._exit(0)


def _verdict_of(trial: _Trial) -> Verdict:
    """Of a process that has closed its pipe, which it does when it ends."""
    os.close(trial.pipe)
    _, status = os.waitpid(trial.pid, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        told = read_verdict(bytes(trial.answer[FRAME_HEADER_BYTES:]))
        return Verdict(text=told.text, error=told.error, number=trial.number)
    if trial.is_late:
        return Verdict(stopped="wall", number=trial.number)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        reason = f"it takes more than {CHECK_CPU_S:g} s of processor time to compile; make it smaller or simpler"
        return Verdict(error=reason, stopped="cpu", number=trial.number)
    reason = "it takes more memory to compile than one grammar may use; make it smaller or simpler"
    return Verdict(error=reason, number=trial.number)


def _kill(trial: _Trial) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(trial.pid, signal.SIGKILL)


def _step_back() -> None:
    """Let others have the processor first: the engine's steps share every core, and one core that is busy holds up all.

    Beside a grammar without end another stream of some 700 tokens a second fell to 65 without this (embedded model, 2
    cores of an AMD EPYC Zen 4, 2026-11-21). What it falls to with it was not measured.
    Linux weighs sessions before it weighs the processes in one, where it groups by session.
    """
    with contextlib.suppress(OSError):
        os.setsid()
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
        Path("/proc/self/autogroup").write_text(str(_NICENESS))


def judge(vocabulary: LLTokenizer, text: str) -> Verdict:
    """Compile a grammar and follow it a little."""
    try:
        normal = normal_form(text)
        if len(normal) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"in Lark it has {len(normal)} characters, but at most {MAX_GRAMMAR_BYTES} are allowed")
        matcher = compile_grammar(vocabulary, normal)
        _probe(vocabulary, matcher)
    except GrammarError as error:
        return Verdict(error=str(error))
    except RecursionError:
        return Verdict(error="it is nested too deeply")
    return Verdict(text=normal)


def _probe(vocabulary: LLTokenizer, matcher: LLMatcher) -> None:
    """Raises `GrammarError` where nothing can be generated, or where following it exceeds its limits soon."""
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
    """A token of the first word that allows one, from `start` on and around; None where nothing is allowed."""
    for offset in range(len(words)):
        place = (start + offset) % len(words)
        if words[place]:
            bits = [bit for bit in range(WORD_BITS) if words[place] >> bit & 1]
            return WORD_BITS * place + bits[start % len(bits)]
    return None


def _bound_memory() -> None:
    """What is taken now and `CHECK_MEMORY_BYTES`; a size that the system does not tell stays unbounded."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    limit = num_pages * os.sysconf("SC_PAGE_SIZE") + CHECK_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _next_question() -> Question | None:
    """None at the end of the input."""
    header = _read(FRAME_HEADER_BYTES)
    return read_question(_read(body_length(header))) if header else None


def _read(num_bytes: int) -> bytes:
    """So many bytes of the input, or none at its end."""
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
