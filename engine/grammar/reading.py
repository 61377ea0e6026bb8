"""Reads a checkpoint's tokenizer into the tables that grammars are compiled with.

From tokenizer.json, plus the tokens that only tokenizer_config.json adds, or from a GGUF file. The server's processes
share the tables (`engine.api.process.written_once`). The `tokenizers` library holds the interpreter's lock for seconds,
so they are read by a process of its own, which runs
`python -P -m inferd.engine.grammar.reading CHECKPOINT ROWS SHARED`. Its input has the files that the server holds open.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tokenizers import Tokenizer

from inferd.engine.api.checkpoint import Documents
from inferd.engine.api.kept_content import kept_content
from inferd.engine.api.pinned_files import PinnedFile, is_file, of_bytes, read_pinned, source_of, to_bytes
from inferd.engine.api.process.written_once import content_of
from inferd.engine.grammar.bpe import Bpe
from inferd.engine.grammar.merging import MergingTokenizer
from inferd.engine.grammar.ports import GrammarError
from inferd.engine.grammar.spelling import bytes_of_tokens, state_of
from inferd.engine.grammar.tables import Tables, VocabularyFacts, block_of

_END_NAMES = frozenset(("</s>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>"))
"""Tokens that end an answer by their names, as llguidance knows them."""
_PR_SET_PDEATHSIG = 1

_SAMPLES = (
    "A text of some words, and 12345 numbers.\n\n\tTabs;  two blanks.\r\n", " a blank first", "ends with blanks   ",
    '{"name": "', '", "age": -1.5e+10, "tags": [', "]}\n", '{\n    "key": null,\n\t"other": true\n}', "\\u00e9\\n\\\\",
    *(blank * count for blank in " \n\t" for count in (1, 2, 3, 7, 16, 31, 64, 200)),
    "h\u00e9llo w\u00f6rld \u65e5\u672c\u8a9e \U0001f600\u200d\U0001f680 e\u0301 \ufb01 \u00a0 \u3000",
    "\u0000\u007f\u0378\U0010fffd",
    "def f(x):\n        return x[0] != 'it''s'  # I'LL they've", "a" * 300, "ab" * 100, "",
)  # fmt: skip
"""Texts for which `MergingTokenizer` is compared with the library's tokenizer."""
_NUM_RANDOM_SAMPLES = 500

_MAKERS = (Bpe.__module__, MergingTokenizer.__module__, bytes_of_tokens.__module__, Tables.__module__, __name__)
"""The modules that make the tables."""
_COMMAND = (sys.executable, "-P", "-m", "inferd.engine.grammar.reading")


def read_apart(path: Path, vocab_size: int, shared: str, files: Sequence[PinnedFile]) -> None:
    """Have another process read the tables into the server's file. Nothing is written if it fails: the caller reads
    them then, and says what is wrong. The parameters are those of `load_vocabulary`."""
    command, nowhere = (*_COMMAND, str(path), str(vocab_size), shared), subprocess.DEVNULL
    with contextlib.suppress(OSError):
        subprocess.run(command, input=to_bytes(files), stdout=nowhere, stderr=nowhere, check=False)


def tables_of(path: Path, vocab_size: int, shared: str = "") -> Tables:
    """The tables of the checkpoint at `path`: its folder, or its GGUF file. `vocab_size`: number of embedding rows.
    `shared`: path of the server's `WrittenOnce`. Raises an exception for a tokenizer that cannot be read."""
    tables = Tables.of(content_of(shared, lambda: _read(path, vocab_size)))
    if tables is None or tables.facts.num_rows != vocab_size:
        tables = Tables.of(memoryview(_read(path, vocab_size)))
    assert tables is not None
    return tables


def _read(path: Path, vocab_size: int) -> bytes:
    try:
        return _block(path, vocab_size)
    finally:
        give_memory_back()


def _block(path: Path, vocab_size: int) -> bytes:
    """The tables in one block, which are kept from start to start (`kept_content`)."""
    read = Documents(path)
    text = _text_of(path, read)
    config, eos_ids = read("tokenizer_config.json") or {}, _eos_ids(read)
    about = json.dumps((vocab_size, eos_ids, config.get("added_tokens_decoder"))).encode()
    return kept_content((b"tables", text, about), _MAKERS, lambda: _made(text, config, eos_ids, vocab_size))


def _made(text: bytes, config: Mapping[str, Any], eos_ids: Sequence[int], vocab_size: int) -> bytes:
    bpe = Bpe.of(text)
    if bpe is not None:
        text = bpe.text
        give_memory_back()  # the file's text, and its merges as objects
    tokenizer = _without_spaces(_tokenizer(text))
    added = _added_tokens(tokenizer, config)
    tokens = list(bytes_of_tokens(tokenizer, added, vocab_size))
    named = [token_id for token_id, (content, _) in sorted(added.items()) if content in _END_NAMES]
    facts = VocabularyFacts(num_rows=vocab_size, eos_id=named[-1] if named else 0, eos_ids=tuple(eos_ids))
    if bpe is not None and (symbols := bpe.symbols(tokenizer)):
        facts_of_bpe = replace(
            facts, symbols=symbols, takes_words=bpe.model.ignore_merges, joins_with_space=bpe.joins_with_space
        )
        block = block_of(facts_of_bpe, tokens, bpe.pairs, bpe.results, bpe.words())
        if _agree(block, tokenizer, tokens):
            return block
    return block_of(facts, tokens)


def tokenizer_of(path: Path) -> Tokenizer:
    """The library's tokenizer of a checkpoint, without the space that it would put before a text. Texts here go on
    after others."""
    return _without_spaces(_tokenizer(_text_of(path, Documents(path))))


def _text_of(path: Path, read: Documents) -> bytes:
    """tokenizer.json."""
    made = read.made_tokenizer()
    if made is not None:
        return made
    file = path / "tokenizer.json"
    if not is_file(file):
        raise GrammarError(f"{path.name} has no tokenizer.json, which constrained output is built from")
    return source_of(file).read_bytes()


def _tokenizer(text: bytes) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_spaces(tokenizer: Tokenizer) -> Tokenizer:
    normalizer, splitter = state_of(tokenizer.normalizer), state_of(tokenizer.pre_tokenizer)
    plain = _without_space(normalizer), _without_space(splitter)
    if plain != (normalizer, splitter):
        parts = _tokenizer_with(*plain)
        tokenizer.normalizer, tokenizer.pre_tokenizer = parts.normalizer, parts.pre_tokenizer
    return tokenizer


def _without_space(state: Any) -> Any:
    """A normalizer or pre-tokenizer that adds no space; None if nothing is left."""
    if not isinstance(state, dict):
        return state
    kind = state.get("type")
    if kind == "Prepend":
        return None
    if kind == "Metaspace":
        return {**state, "prepend_scheme": "never"}
    for name in ("normalizers", "pretokenizers"):
        if name in state:
            parts = [part for part in map(_without_space, state[name]) if part is not None]
            return {**state, name: parts} if parts else None
    return state


def _tokenizer_with(normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    """A tokenizer of no tokens, which has these parts."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    return Tokenizer.from_str(json.dumps({"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": model}))


def _agree(block: bytes, tokenizer: Tokenizer, tokens: Sequence[bytes]) -> bool:
    """Whether the tables give the ids that the library's tokenizer gives, for many texts."""
    tables = Tables.of(memoryview(block))
    assert tables is not None
    ours, draw = MergingTokenizer(tables), random.Random(1)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    drawn = [b"".join(draw.choices(tokens, k=1 + n % 9)).decode(errors="ignore") for n in range(_NUM_RANDOM_SAMPLES)]

    def theirs(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    texts = (*_SAMPLES, "".join(added), "a".join(added), " b ".join(added), *drawn)
    return all(_result(ours, text) == _result(theirs, text) for text in texts)


def _result(tokenize: Callable[[str], list[int]], text: str) -> list[int] | None:
    try:
        return tokenize(text)
    except Exception:  # the library's error for a character without a token
        return None


def _added_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Id -> (text, whether it is special) of the tokens that tokenizer.json or tokenizer_config.json adds."""
    added = {
        int(token_id): (token["content"], bool(token.get("special")))
        for token_id, token in (config.get("added_tokens_decoder") or {}).items()
    }
    known = tokenizer.get_added_tokens_decoder().items()
    return added | {token_id: (token.content, token.special) for token_id, token in known}


def _eos_ids(read: Documents) -> list[int]:
    """The ids that end an answer according to the checkpoint; none leave it to the tokenizer's own names."""
    ids: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        given = (read(name) or {}).get("eos_token_id")
        for token_id in given if isinstance(given, list) else [given]:
            if type(token_id) is int:
                ids[token_id] = None
    return list(ids)


def give_memory_back() -> None:
    """Return to the system what parsing has left behind, if the allocator can (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def main() -> int:
    """Read the tables of a checkpoint into the server's file, unless another process does."""
    # The process that waits for this may end, and the next one starts it again.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        read_pinned(of_bytes(sys.stdin.buffer.read()))
        tables_of(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    except Exception:  # of the library, too: the engine reads the files itself, and says what is wrong with them
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
