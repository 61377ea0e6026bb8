"""The process in which a caller's grammar is tried out before the engine sees it: whatever that does, it can be killed.

Started by the server as `python -P -m inferd.engine.grammar.check CHECKPOINT ROWS`; frames of `engine.api.grammar` come
on standard input and go to standard output. Its address space is bounded: a grammar for which memory is short ends this
process, and so is refused.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import time
from array import array
from pathlib import Path
from typing import BinaryIO

from llguidance import LLMatcher, LLTokenizer

from inferd.engine.api.grammar import (
    CHECK_MEMORY_BYTES,
    CHECK_TIMEOUT_S,
    FRAME_HEADER_BYTES,
    MAX_REASON,
    Verdict,
    body_length,
    frame_of,
    read_text,
)
from inferd.engine.grammar.compiler import compile_grammar, normal_form
from inferd.engine.grammar.matcher import MatchedGrammar
from inferd.engine.grammar.ports import WORD_BITS, GrammarError
from inferd.engine.grammar.vocabulary import load_vocabulary

_LAST_RESORT_S = 2 * math.ceil(CHECK_TIMEOUT_S)

_PROBED_TOKENS = 256
_PROBE_CPU_S = 0.5
"""How far a grammar is followed, and the processor's time that this may take: a hundredth of it is usual. Limits that
bite late would fail a request that was taken, and masks that take milliseconds would hold up everybody's steps."""

_PROBE_STRIDE = 7919
"""A prime: from mask to mask another of the allowed tokens is followed, the same ones each time."""


def main() -> int:
    """Answer until the input ends."""
    path, vocab_size = Path(sys.argv[1]), int(sys.argv[2])
    vocabulary: LLTokenizer | None = None
    broken = Verdict()
    try:
        vocabulary = load_vocabulary(path, vocab_size)
    except GrammarError as error:
        broken = Verdict(error=str(error)[:MAX_REASON], is_broken=True)
    _bound_memory()
    source, target = sys.stdin.buffer, sys.stdout.buffer
    # Says that it is there: the time of a grammar is not that of a start.
    _send(target, broken)
    while header := source.read(FRAME_HEADER_BYTES):
        text = read_text(source.read(body_length(header)))
        # For the case that nobody is left to kill this process.
        signal.alarm(_LAST_RESORT_S)
        verdict = broken if vocabulary is None else judge(vocabulary, text)
        signal.alarm(0)
        _send(target, verdict)
    return 0


def judge(vocabulary: LLTokenizer, text: str) -> Verdict:
    """Compile a grammar and follow it a little."""
    try:
        normal = normal_form(text)
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


def _send(target: BinaryIO, verdict: Verdict) -> None:
    target.write(frame_of(verdict))
    target.flush()


if __name__ == "__main__":
    sys.exit(main())
