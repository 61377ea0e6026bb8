"""`inferd embed`: embeds the lines of a file, and continues a run that did not come to its end.

Several batches are in flight, and their rows are written in the order of the lines. Memory holds those batches alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from inferd.engine.api.errors import ConfigError
from inferd.engine.api.process.logs import counted
from inferd.server.commands.embed.client import Described, Embedder, EmbedError, check_answers, connect
from inferd.server.commands.embed.lines import Line, check_field, read_lines
from inferd.server.commands.embed.output import FINGERPRINT, TYPE_CODES, Output, Row, check_output, open_output
from inferd.server.commands.embed.own_server import own_server
from inferd.server.commands.embed.workers import Workers

_MAX_BATCH_CHARS = 2**20
"""Most characters of a batch, unless one line has more: a request may have a million tokens."""
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions:
    """The command line."""

    file: str
    """Path, or - for the standard input."""
    output: Path | None
    base_url: str | None
    model: str | None
    api_key: str | None
    field: str | None
    input_type: str | None = None
    prompt_name: str | None = None
    dimensions: int | None = None
    output_dtype: str = "float"
    truncate: bool = False
    batch: int = 128
    concurrency: int = 4
    patience_s: float = 600.0
    restart: bool = False

    @property
    def reads_json(self) -> bool:
        return self.field is not None or Path(self.file).suffix in (".jsonl", ".ndjson")

    @property
    def output_path(self) -> Path:
        """Raises `ConfigError` if it must be named."""
        if self.output is not None:
            return self.output
        if self.file == "-":
            raise ConfigError("--output must name a file, because the input has no name")
        return Path(f"{self.file}.embeddings.jsonl")


def run(options: EmbedOptions) -> int:
    """Returns 0, 1 if lines failed, or 130 after Ctrl-C. Raises `ConfigError` and `EmbedError`."""
    path = options.output_path
    check_output(path, restart=options.restart)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    problems = Console(stderr=True, highlight=False)
    try:
        output = _run(options, path, problems)
    except KeyboardInterrupt:
        problems.print("stopped; the same command goes on from here")
        return _INTERRUPTED
    except EmbedError:
        if path.with_name(path.name + ".part").exists():
            problems.print("what is done is kept; the same command goes on from here")
        raise
    problems.print(f"{_lines(output.num_lines)} in {path}", markup=False, soft_wrap=True)
    if output.num_failed:
        where = output.errors_path if output.kind == "npy" else path
        message = f"{_lines(output.num_failed)} failed: see 'error' in {where}. The first is {output.first_error}"
        problems.print(message, style="bold red", markup=False, soft_wrap=True)
    return 1 if output.num_failed else 0


def _run(options: EmbedOptions, path: Path, problems: Console) -> Output:
    """Returns the output, which is finished. The server of the run has ended then, and also if this raises."""
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(_opened(options.file))
        name = (options.field or "text") if options.reads_json else None
        lines = check_field(read_lines(stream, name), name)
        url, key = options.base_url, options.api_key
        if url is None:
            if options.model is None:
                raise ConfigError("--model must name a model to serve, or --base-url a server that runs")
            problems.print(f"starting a server with {options.model}", markup=False)
            url, key = stack.enter_context(own_server(options.model))
        http = stack.enter_context(connect(url, key))
        check_answers(http)
        fields = _fields_of(options)
        embedder = Embedder(http, fields, TYPE_CODES[options.output_dtype], options.patience_s)
        # Before the output is opened: settings that the server refuses leave no file.
        described = embedder.described()
        _describe(described, options, problems)
        fields = {**fields, "model": described.name}
        embedder = replace(embedder, fields=fields)
        output = stack.enter_context(
            open_output(
                path,
                _settings_of(options, fields, described),
                options.output_dtype,
                lines,
                restart=options.restart,
            )
        )
        if output.num_lines:
            problems.print(f"going on behind line {output.num_lines:,}")
        _embed(options, embedder, lines, output, stream)
    return output


def _describe(model: Described, options: EmbedOptions, problems: Console) -> None:
    are_bits = options.output_dtype in ("binary", "ubinary")
    size = f"{counted(model.width, 'byte')}, a bit for each component" if are_bits else f"{model.width} components"
    problems.print(f"{model.name} gives vectors of {size}", markup=False, soft_wrap=True)
    if model.warning:
        problems.print(f"warning: {model.warning}", style="yellow", markup=False, soft_wrap=True)


def _lines(count: int) -> str:
    return f"{count:,} line" + "s" * (count != 1)


@contextlib.contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        os.stat(file)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    with open(file, "rb") as stream:
        yield stream


def _fields_of(options: EmbedOptions) -> dict[str, object]:
    """Fields of every request. Without a model the server chooses one that is made to embed."""
    given = {
        "model": options.model if options.base_url is not None else None,
        "input_type": options.input_type,
        "prompt_name": options.prompt_name,
        "dimensions": options.dimensions,
        "output_dtype": options.output_dtype if options.output_dtype != "float" else None,
        "truncate_prompt_tokens": -1 if options.truncate else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _settings_of(options: EmbedOptions, fields: dict[str, object], described: Described) -> dict[str, object]:
    """Settings on which the vectors depend. A server of its own is known by the model's path. The fingerprint tells
    what the server does not: other weights under the same name, or another quantization."""
    model = options.model if options.base_url is None else fields["model"]
    known = {"model": model, "field": options.field, "reads_json": options.reads_json}
    return {**fields, **known, FINGERPRINT: described.fingerprint}


def _embed(options: EmbedOptions, embedder: Embedder, lines: Iterator[Line], output: Output, stream: BinaryIO) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    size = None if options.file == "-" else os.fstat(stream.fileno()).st_size
    running: deque[Future[list[Row]]] = deque()
    workers = Workers(embedder.rows, options.concurrency)
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
            task = progress.add_task("", total=size)

            def write(num_most: int) -> None:
                """Write the oldest batches until at most so many are left."""
                while len(running) > num_most:
                    rows = running.popleft().result()
                    output.add(rows)
                    about = f"{output.num_lines:,} lines" + (
                        f", {output.num_failed:,} failed" * bool(output.num_failed)
                    )
                    progress.update(task, advance=sum(len(row.line.raw) for row in rows), description=about)

            progress.update(task, completed=stream.tell() if size is not None else 0)
            for batch in _batches(lines, options.batch):
                running.append(workers.submit(batch))
                write(options.concurrency)
            write(0)
        output.finish()
    finally:
        embedder.stop()
        workers.close()


def _batches(lines: Iterator[Line], size: int) -> Iterator[list[Line]]:
    """Consecutive lines, at most `size` and `_MAX_BATCH_CHARS`."""
    batch: list[Line] = []
    num_chars = 0
    for line in lines:
        if batch and (len(batch) == size or num_chars + len(line.text) > _MAX_BATCH_CHARS):
            yield batch
            batch, num_chars = [], 0
        batch.append(line)
        num_chars += len(line.text)
    if batch:
        yield batch
