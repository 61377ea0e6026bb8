"""The cost of grammars for each token: streams of JSON under a schema, compared with free streams.

    python -P benchmarks/structured.py [--dir DIR] [--shape tiny,0.6b] [--streams 32] [--tokens 64] [--rounds 3]

It runs the real core, scheduler, worker and grammars in one process, without HTTP. The streams are alike except for
their grammar (an array of records of strings, numbers, enums and optional fields), and are measured in turns. `drawn
alike` writes freely, but draws on the same path as rows under a grammar. Its difference from `free` is the cost of that
path; its difference from `schema` is the cost of making and applying masks.

`tiny` is the embedded model. Other shapes have random weights (`--dir` keeps them) and a vocabulary of their size, made
of the most frequent pieces of this repository's text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import tables
from benchmarks.checkpoints import SHAPES, TOKENIZER_DIR, ensure
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import AskedConfig, EngineConfig
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.resolve import resolve
from inferd.engine.api.wire.messages import Submit
from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.core.loop import EngineCore
from inferd.engine.grammar.compiler import normal_form
from inferd.engine.grammar.thread import GrammarThread
from inferd.engine.sched.limits import SchedulerConfig
from inferd.engine.sched.scheduler import Scheduler
from inferd.engine.worker.executor import ThreadExecutor, WorkerThread
from inferd.engine.worker.load import load_worker
from inferd.kernels.cpu import library, native
from inferd.server.structured.language import json_value
from inferd.server.text.detokenizer import TokenBytes

ROOT = Path(__file__).resolve().parents[1]
_TEXT_BYTES = 400_000
_LONGEST_PIECE = 10
_PROMPT_TOKENS = 16
CASES = ("free", "drawn alike", "schema")

RECORDS: dict[str, Any] = {
    "type": "array",
    "minItems": 1_000,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0},
            "name": {"type": "string", "minLength": 1, "maxLength": 40},
            "kind": {"enum": ["person", "place", "thing", "idea"]},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
            "note": {"type": ["string", "null"]},
        },
        "required": ["id", "name", "kind"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Engine:
    """One loaded model."""

    config: EngineConfig
    worker: Any
    thread: WorkerThread
    grammars: GrammarThread
    vocab_size: int

    @classmethod
    def load(cls, path: Path, num_streams: int, num_tokens: int) -> Engine:
        tokens = num_streams * (_PROMPT_TOKENS + num_tokens + 32)
        facts = ModelFacts.of(Checkpoint.read(path))
        asked = AskedConfig(
            model_path=str(path), max_num_seqs=num_streams, kv_memory_bytes=max(64 * 2**20, tokens * 2**18),
            max_model_len=1_024, prefix_caching=False,
        )  # fmt: skip
        config, _, _ = resolve(asked, facts, Machine.detect())
        thread = WorkerThread()
        worker, _ = thread.submit(load_worker, config, time.monotonic(), lambda phase: None).result()
        return cls(config, worker, thread, GrammarThread(path, facts.arch.vocab_size), facts.arch.vocab_size)

    def steps(self, case: str, num_streams: int, num_tokens: int, seed: int) -> list[float]:
        """Milliseconds of each step in which every stream draws a token."""
        core = self._core(num_streams)
        for stream in range(num_streams):
            core.submit(self._submit(case, stream, num_tokens, seed), 0.0)
        while core.is_awaiting and not core.has_work:
            time.sleep(0.001)
        took_ms: list[float] = []
        last_s = time.perf_counter()
        while core.has_work:
            output = core.step(0.0)
            now = time.perf_counter()
            if output is not None and output.step_num_rows == output.step_num_tokens == num_streams:
                took_ms.append((now - last_s) * 1e3)
            last_s = now
        return took_ms[2:-2]

    def _core(self, num_streams: int) -> EngineCore:
        config = self.config
        assert config.num_blocks and config.block_size and config.max_model_len
        limits = SchedulerConfig(
            max_num_seqs=num_streams, max_num_batched_tokens=1_024, max_model_len=config.max_model_len
        )
        cache = KVCache(config.num_blocks, config.block_size, self.worker.cache_windows, step_tokens=1_024)
        return EngineCore(
            Scheduler(limits, cache),
            ThreadExecutor(self.worker, self.thread),
            vocab_size=self.vocab_size,
            grammars=self.grammars,
        )

    def _submit(self, case: str, stream: int, num_tokens: int, seed: int) -> Submit:
        prompt = tuple(300 + (7 * stream + i) % 500 for i in range(_PROMPT_TOKENS))
        params = SamplingParams(
            max_tokens=num_tokens,
            seed=1_000 * seed + stream,
            grammar=normal_form(json_value(RECORDS).text()).text if case == "schema" else "",
            # A bias of 0 keeps a row off the shortest path without changing tokens.
            logit_bias=((0, 0.0),) if case == "drawn alike" else (),
        )
        return Submit(request_id=f"{case} {stream}", prompt_ids=prompt, params=params)

    def close(self) -> None:
        self.grammars.close()
        self.thread.close()


def with_vocabulary(path: Path, vocab_size: int) -> None:
    """Give a checkpoint a tokenizer of its embedding's size."""
    tokenizer = json.loads((TOKENIZER_DIR / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    table = TokenBytes(Tokenizer.from_file(str(TOKENIZER_DIR / "tokenizer.json")))
    char_of = {table.of(number)[0]: char for char, number in tokenizer["model"]["vocab"].items() if len(char) == 1}
    for piece in _pieces(vocab_size):
        if len(vocabulary) == vocab_size:
            break
        vocabulary.setdefault("".join(char_of[byte] for byte in piece), len(vocabulary))
    tokenizer["model"] |= {"vocab": vocabulary, "merges": []}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))


def _pieces(num_pieces: int) -> Iterator[bytes]:
    """Every byte, then the most frequent pieces of a text, then numbers."""
    yield from (bytes((byte,)) for byte in range(256))
    files = sorted([*ROOT.glob("engine/**/*.py"), *ROOT.glob("examples/tiny/text/*.md"), *ROOT.glob("server/**/*.py")])
    text = b"".join(file.read_bytes() for file in files)[:_TEXT_BYTES]
    counts: Counter[bytes] = Counter()
    for length in range(2, _LONGEST_PIECE + 1):
        counts.update(text[i : i + length] for i in range(len(text) - length))
    yield from (piece for piece, _ in counts.most_common(num_pieces) if _is_text(piece))
    yield from (b" %d" % number for number in range(num_pieces))


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def measure(name: str, path: Path, asked: argparse.Namespace) -> list[list[tables.Cell]]:
    """One row for each case: median and 95th percentile of a step, and the median relative to that of `free`."""
    engine = Engine.load(path, asked.streams, asked.tokens)
    took: dict[str, list[float]] = {case: [] for case in CASES}
    try:
        for case in CASES:
            engine.steps(case, asked.streams, 12, seed=0)
        for seed in range(1, asked.rounds + 1):
            for case in CASES if seed % 2 else CASES[::-1]:
                took[case] += engine.steps(case, asked.streams, asked.tokens, seed)
    finally:
        engine.close()
    free = statistics.median(took["free"])
    rows: list[list[tables.Cell]] = []
    for case, steps_ms in took.items():
        median = statistics.median(steps_ms)
        p95 = statistics.quantiles(steps_ms, n=20)[-1]
        rows.append([f"{name}, {case}", float(len(steps_ms)), median, p95, f"{median / free:.3f}"])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args(arguments)
    native.prepare(library.default_cache_dir())
    rows: list[list[tables.Cell]] = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = asked.dir or Path(temporary)
        for name in asked.shape.split(","):
            path = TOKENIZER_DIR if name == "tiny" else ensure(directory, name)
            if name != "tiny":
                with_vocabulary(path, SHAPES[name].vocab_size)
            rows += measure(name, path, asked)
    print(tables.markdown(["case", "steps", "median ms", "p95 ms", "of free"], rows))


if __name__ == "__main__":
    main()
