"""The checkpoint's vocabulary for llguidance: the bytes of every token, and the tokenizer for text.

llguidance could read tokenizer.json itself, in one call that holds the interpreter's lock throughout, and each process
would keep its own copy of the tokenizer. Here both come from tables that all processes share (`reading`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from inferd.engine.api.pinned_files import PinnedFile
from inferd.engine.api.process.written_once import is_written
from inferd.engine.grammar.merging import MergingTokenizer
from inferd.engine.grammar.ports import GrammarError
from inferd.engine.grammar.reading import give_memory_back, read_apart, tables_of, tokenizer_of
from inferd.engine.grammar.tables import Tables

logger = logging.getLogger(__name__)

_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [_IN_STRING + "{1,10}", _IN_STRING + "{1,30}", _IN_STRING + "+"]
"""Sets of tokens whose masks llguidance keeps, for characters in strings of JSON; they change no mask. Its own fourth
set, of blanks, takes 15 MiB more with 262,000 tokens, and no grammar that was measured gains by it. Without the shorter
two a mask in a string with a length limit takes ten times as long (0.7 instead of 0.07 ms; AMD EPYC (Zen 4),
2026-11-28)."""


def load_vocabulary(path: Path, vocab_size: int, shared: str = "", files: Sequence[PinnedFile] = ()) -> LLTokenizer:
    """`path`: the checkpoint's folder, or its GGUF file. `vocab_size`: number of embedding rows. `shared`: path of the
    server's file for the tables; empty if there is none. `files`: the checkpoint's, as the server holds them open.
    Raises `GrammarError` for a tokenizer it cannot read."""
    try:
        if shared and not is_written(shared):
            read_apart(path, vocab_size, shared, files)  # if it fails, this process reads them, and says why it cannot
        tables = tables_of(path, vocab_size, shared)
        source = _Source(tables, _tokenize_of(tables, path))
        # Each of the two calls holds the interpreter's lock, for 0.5 s of processor time with 262,000 tokens (AMD
        # EPYC Zen 4, 2026-11-28). llguidance cannot do less in one. The first alone needs the bytes of all tokens.
        vocabulary = LLTokenizer(source, eos_token=list(tables.facts.eos_ids) or None, slices=[])
        source.tokens = ()
        return vocabulary.with_slices(_SLICES)
    except GrammarError:
        raise
    except Exception as error:  # tokenizers raises bare Exception for a file that it cannot read
        raise GrammarError(f"the tokenizer of {path.name} cannot constrain output: {str(error)[:200]}") from error
    finally:
        give_memory_back()


def _tokenize_of(tables: Tables, path: Path) -> Callable[[str], list[int]]:
    """A function from a text to its ids."""
    if tables.facts.symbols:
        return MergingTokenizer(tables)
    logger.info("each process keeps the tokenizer of %s for grammars: its model is of a kind that none shares", path)
    tokenizer = tokenizer_of(path)
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


class _Source(TokenizerWrapper):
    """The tokenizer as llguidance asks for it."""

    def __init__(self, tables: Tables, tokenize: Callable[[str], list[int]]) -> None:
        self.is_tokenizer_wrapper = True
        self.bos_token_id, self.special_token_ids = None, ()
        self.eos_token_id, self.tokens = tables.facts.eos_id, tables.tokens()
        self._tokenize = tokenize

    def __call__(self, text: str) -> list[int]:
        """The ids of a text that a grammar forces, as the checkpoint's tokenizer would write it."""
        return self._tokenize(text)
