"""Compiles grammars on a thread beside the engine's loop, and keeps the most recent ones.

llguidance releases the interpreter's lock while it compiles, but not while it takes in a vocabulary, which holds up all
steps. So that happens when the engine has been idle for a while, or when the first grammar comes. The tokenizer is read
by a process of its own, once for all engines of a server.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from llguidance import LLMatcher

from inferd.engine.api.pinned_files import PinnedFile
from inferd.engine.api.round_robin import RoundRobin
from inferd.engine.grammar.compiler import compile_grammar
from inferd.engine.grammar.matcher import MatchedGrammar
from inferd.engine.grammar.vocabulary import load_vocabulary

_MAX_KEPT = 64
"""Number of compiled grammars kept, each of a few hundred kilobytes."""


class _Pending:
    __slots__ = ("_future",)

    def __init__(self, future: Future[MatchedGrammar]) -> None:
        self._future = future

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def take(self) -> MatchedGrammar:
        return self._future.result()


@dataclass(frozen=True, slots=True)
class _Job:
    """A grammar to be compiled."""

    future: Future[MatchedGrammar]
    text: str
    token_ids: tuple[int, ...]
    ending_ids: tuple[int, ...]


class GrammarThread:
    """One thread. A tenant's grammars are compiled in the order in which they were opened, and tenants take turns."""

    def __init__(self, model_path: Path, vocab_size: int, shared: str = "", files: Sequence[PinnedFile] = ()) -> None:
        """`shared`: path of the server's file for the vocabulary. `files`: the checkpoint's, as the server holds them
        open."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="inferd-grammar")
        self._load = cache(partial(load_vocabulary, model_path, vocab_size, shared, files))
        """Reads the vocabulary on the thread. Known without delay once a grammar was compiled."""
        self._is_prepared = False
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._waiting: RoundRobin[_Job] = RoundRobin()
        """For each job, one call of `_compile_next` is queued."""

    def open(self, text: str, token_ids: Sequence[int], ending_ids: Sequence[int], tenant: str = "") -> _Pending:
        """Returns a copy at once if the grammar was compiled before and no token was drawn yet. Otherwise it is
        compiled on the thread."""
        if not token_ids:
            copy = self._copy_of(text)
            if copy is not None:
                done: Future[MatchedGrammar] = Future()
                done.set_result(MatchedGrammar(copy, self._load(), ending_ids))
                return _Pending(done)
        job = _Job(Future(), text, tuple(token_ids), tuple(ending_ids))
        with self._lock:
            self._waiting.add(tenant, job)
        self._pool.submit(self._compile_next)
        return _Pending(job.future)

    def prepare(self) -> None:
        if not self._is_prepared:
            self._is_prepared = True
            self._pool.submit(self._load)  # an error is raised again for the first grammar

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _compile_next(self) -> None:
        """Compile the grammar whose turn it is. An error is set on the job's future."""
        with self._lock:
            job = self._waiting.take()
        try:
            job.future.set_result(self._compile(job))
        except Exception as error:  # as the pool itself does
            job.future.set_exception(error)

    def _compile(self, job: _Job) -> MatchedGrammar:
        """Raises `GrammarError`."""
        vocabulary = self._load()
        copy = self._copy_of(job.text)
        if copy is None:
            copy = compile_grammar(vocabulary, job.text)
            with self._lock:
                self._kept[job.text] = copy.deep_copy()
                if len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
        grammar = MatchedGrammar(copy, vocabulary, job.ending_ids)
        grammar.accept(job.token_ids)
        return grammar

    def _copy_of(self, text: str) -> LLMatcher | None:
        with self._lock:
            kept = self._kept.get(text)
            if kept is None:
                return None
            self._kept.move_to_end(text)
            return kept.deep_copy()
