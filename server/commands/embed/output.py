"""The output of `inferd embed`: JSON lines or .npy, which a later run can go on with.

Rows are appended to `OUT.part`. After each batch `OUT.part.json` says how many lines of the input are done, the hash of
those lines, and how many bytes of each file count. A file that is finished gets its own name. A run has a lock on
`OUT.part` until then.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from inferd.engine.api.errors import ConfigError
from inferd.server.commands.embed.lines import Line

TYPE_CODES = {"float": "f", "int8": "b", "uint8": "B", "binary": "b", "ubinary": "B"}
"""Type of the components -> that of an array."""
_DESCRIPTIONS = {"f": "<f4", "b": "|i1", "B": "|u1"}
_KINDS: Mapping[str, Literal["jsonl", "npy"]] = {".npy": "npy", ".jsonl": "jsonl", ".ndjson": "jsonl"}
"""Ending of the output's name -> its format."""
FINGERPRINT = "fingerprint"
"""Setting that says which vector the server gives for a short text."""
_HEADER_BYTES = 128
"""Size of the header of .npy: with the number of rows that is written last it is no longer."""


@dataclass(frozen=True, slots=True)
class Row:
    """The vector of a line, or the reason for which it has none."""

    line: Line
    vector: array[Any] | None = None
    error: str = ""


@dataclass(slots=True)
class Output:
    """The files of one run. `open_output` makes it."""

    path: Path
    settings: Mapping[str, Any]
    """Settings on which the vectors depend: a run goes on only with the same."""
    kind: Literal["jsonl", "npy"]
    output_dtype: str
    digest: Any = field(default_factory=hashlib.sha256)
    """Hash of the input's lines that are done."""
    num_lines: int = 0
    num_failed: int = 0
    first_error: str = ""
    """First line that failed, and why."""
    width: int = 0
    """Number of numbers in a row; 0 until there is a vector."""
    num_blank: int = 0
    """Rows of .npy that failed before the width was known."""
    rows: BinaryIO = field(init=False)
    """The part, from `lock` on."""
    errors: BinaryIO = field(init=False)
    """Lines that failed, of .npy, whose rows cannot say so."""

    @property
    def part(self) -> Path:
        return self.path.with_name(self.path.name + ".part")

    @property
    def errors_path(self) -> Path:
        return self.path.with_name(self.path.name + ".errors.jsonl")

    @property
    def state_path(self) -> Path:
        return self.path.with_name(self.path.name + ".part.json")

    def lock(self) -> None:
        """Open the part for this run alone. Raises `ConfigError` if another run has it."""
        while True:
            self.rows = os.fdopen(os.open(self.part, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            try:
                fcntl.flock(self.rows, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(self.rows.fileno()), self.part.stat()):
                    return
            except BlockingIOError as error:
                self.rows.close()
                raise ConfigError(
                    f"another run is writing {self.part}: wait for its end, or name another file by --output"
                ) from error
            except FileNotFoundError:
                pass
            # Another run finished between the two calls, and gave the file that was opened its name.
            self.rows.close()

    def open_new(self) -> None:
        """Begin, whatever an earlier run left."""
        self.rows.truncate(0)
        self.errors = self.errors_path.open("w+b")
        if self.kind == "npy":
            self.rows.write(self._header(0))
        self.save()

    def open_again(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises `ConfigError` if the files have less than that."""
        self.errors = self.errors_path.open("r+b")
        for stream, size in ((self.rows, state["num_bytes"]), (self.errors, state["num_error_bytes"])):
            if os.fstat(stream.fileno()).st_size < size:
                raise ConfigError(f"{self.part} is shorter than {self.state_path} says; use --restart")
            stream.truncate(size)
            stream.seek(size)
        self.num_failed, self.width, self.num_blank = state["num_failed"], state["width"], state["num_blank"]
        self.first_error = state["first_error"]

    def add(self, rows: Sequence[Row]) -> None:
        """Append the rows of one batch. Raises `ConfigError` if a vector has another size than those before."""
        for row in rows:
            self.digest.update(row.line.raw)
            self.num_lines += 1
            self.num_failed += row.vector is None
            if row.vector is None and not self.first_error:
                self.first_error = f"line {row.line.index + 1}: {row.error}"
            if row.vector is not None and len(row.vector) != (self.width or len(row.vector)):
                raise ConfigError(f"line {row.line.index + 1} has {len(row.vector)} numbers, others {self.width}")
            if self.kind == "jsonl":
                self.rows.write(_json_of(row))
            else:
                self._add_array(row)
        self.save()

    def _add_array(self, row: Row) -> None:
        if row.vector is None:
            self.errors.write(_json_of(row))
            self._add_blank(1)
            return
        if not self.width:
            self.width = len(row.vector)
            self._add_blank(self.num_blank)
            self.num_blank = 0
        self.rows.write(row.vector.tobytes())

    def _add_blank(self, count: int) -> None:
        """Rows of lines that failed: NaN, and 0 in whole numbers."""
        if not self.width:
            self.num_blank += count
            return
        code = TYPE_CODES[self.output_dtype]
        blank = array(code, [math.nan if code == "f" else 0] * self.width).tobytes()
        for _ in range(count):
            self.rows.write(blank)

    def save(self) -> None:
        """Make what was added count. It is on the disk before the state says so."""
        _sync(self.rows)
        _sync(self.errors)
        state = {
            "settings": self.settings,
            "num_lines": self.num_lines,
            "sha256": self.digest.hexdigest(),
            "num_bytes": self.rows.tell(),
            "num_error_bytes": self.errors.tell(),
            "num_failed": self.num_failed,
            "first_error": self.first_error,
            "width": self.width,
            "num_blank": self.num_blank,
        }
        new = self.state_path.with_suffix(".new")
        with new.open("wb") as stream:
            stream.write(json.dumps(state).encode())
            _sync(stream)
        new.replace(self.state_path)

    def finish(self) -> None:
        """Give the output its name."""
        if self.kind == "npy":
            self.rows.seek(0)
            self.rows.write(self._header(self.num_lines))
        _sync(self.rows)
        self.part.replace(self.path)
        if not self.errors_path.stat().st_size:
            self.errors_path.unlink()
        self.state_path.unlink()
        self.close()

    def close(self) -> None:
        """Close the files, which ends the lock."""
        if hasattr(self, "errors"):
            self.errors.close()
        self.rows.close()

    def _header(self, num_rows: int) -> bytes:
        """The header of version 1.0 of .npy (NumPy Enhancement Proposal 1)."""
        description = _DESCRIPTIONS[TYPE_CODES[self.output_dtype]]
        text = f"{{'descr': '{description}', 'fortran_order': False, 'shape': ({num_rows}, {self.width}), }}"
        magic = b"\x93NUMPY\x01\x00"
        size = _HEADER_BYTES - len(magic) - 2
        return magic + size.to_bytes(2, "little") + text.ljust(size - 1).encode() + b"\n"


@contextlib.contextmanager
def open_output(
    path: Path, settings: Mapping[str, Any], output_dtype: str, lines: Iterator[Line], *, restart: bool
) -> Iterator[Output]:
    """The output of a run. Takes those of `lines` that an earlier run with the same settings did. Raises `ConfigError`
    if the output is there already, if another run writes it, or if it belongs to another input or other settings."""
    check_output(path, restart=restart)
    output = Output(path, settings, _KINDS[path.suffix], output_dtype)
    try:
        output.lock()
    except OSError as error:
        raise ConfigError(f"cannot write {output.part}: {error.strerror}") from error
    with contextlib.closing(output):
        _check_is_new(path, restart=restart)  # once more: another run may have finished
        state = None if restart else _state_of(output)
        try:
            if state is None:
                output.open_new()
            else:
                _skip(output, state, lines)
                output.open_again(state)
        except OSError as error:
            raise ConfigError(f"cannot write {output.part}: {error.strerror}") from error
        yield output


def check_output(path: Path, *, restart: bool) -> None:
    """Raises `ConfigError` if the output's name has no known ending, or if the output cannot be written there."""
    if path.suffix not in _KINDS:
        raise ConfigError(f"--output must end in .npy, or for JSON lines in .jsonl or .ndjson, but got {path.name!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"--output: there is no directory {path.parent}")
    _check_is_new(path, restart=restart)


def _check_is_new(path: Path, *, restart: bool) -> None:
    if path.exists() and not restart:
        raise ConfigError(f"{path} is there already: remove it, name another by --output, or use --restart")


def _sync(stream: BinaryIO) -> None:
    """Put on the disk what was written."""
    stream.flush()
    os.fsync(stream.fileno())


def _state_of(output: Output) -> Mapping[str, Any] | None:
    """The state of an earlier run; None if there was none, or if it has done no line. Raises `ConfigError` if its
    settings were others."""
    try:
        state: dict[str, Any] = json.loads(output.state_path.read_text())
        settings = state["settings"]
        if not state["num_lines"]:
            return None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"cannot read {output.state_path} ({error}); use --restart to begin anew") from error
    different = sorted(name for name in output.settings if settings.get(name) != output.settings[name])
    if different == [FINGERPRINT]:
        raise ConfigError(
            f"{output.part} was written with other vectors: the server now gives another for the same short text, so "
            "its model's weights, quantization, dtype or pooling, or its machine, have changed; serve the model as "
            "before, or use --restart to begin anew"
        )
    if different:
        was = ", ".join(f"{name} was {settings.get(name)!r}" for name in different if name != FINGERPRINT)
        raise ConfigError(f"{output.part} was written with other settings ({was}); use --restart to begin anew")
    return state


def _skip(output: Output, state: Mapping[str, Any], lines: Iterator[Line]) -> None:
    """Read the lines that are done. Raises `ConfigError` if they are not those of the earlier run."""
    while output.num_lines < state["num_lines"]:
        line = next(lines, None)
        if line is None:
            break
        output.digest.update(line.raw)
        output.num_lines += 1
    if output.num_lines < state["num_lines"] or output.digest.hexdigest() != state["sha256"]:
        raise ConfigError(
            f"the first {state['num_lines']:,} lines of the input are not those that {output.part} was made of; "
            "use --restart to begin anew"
        )


def _json_of(row: Row) -> bytes:
    """A line of JSON about a line of the input."""
    known: dict[str, object] = {"index": row.line.index}
    if row.line.id is not None:
        known["id"] = row.line.id
    known |= {"error": row.error} if row.vector is None else {"embedding": row.vector.tolist()}
    return json.dumps(known, separators=(",", ":")).encode() + b"\n"
