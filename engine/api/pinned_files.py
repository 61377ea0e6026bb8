"""Files that must stay as they were when the server opened them: what identifies each, and how an engine reads it.

The server holds each file open (`held_files`), and every engine reads it through the server's descriptor. So a file
that is replaced or removed under a running server changes nothing. A file that was written to is refused by its name.
This file knows no checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path

import msgspec

from inferd.engine.api.errors import ChangedError, StartError

PAGE_BYTES = 4096
_PIECE_BYTES = 2**20
_DIGEST_DIGITS = 32
"""SHA-256 reads 1.7 GB/s with the processor's instructions for it, BLAKE2b 0.9 (AMD EPYC, Zen 4, 2026-11-28)."""
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""A named pipe must not hold up the start."""

_GONE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ESRCH))
"""Errors that say that nothing has this path any more. Others may pass."""
_NOT_LENT = _GONE | {errno.EACCES, errno.EPERM}
"""Errors of a path of the server's descriptor that say that there is none, or that the system lends none."""


class PinnedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file, and what identifies its content."""

    path: str
    opened: str
    """Path of the server's open descriptor of it."""
    num_bytes: int
    mtime_ns: int
    inode: int
    ctime_ns: int
    """When the content, the owner or the mode changed last. No program can set this."""
    num_first_bytes: int
    """Number of bytes at the beginning that `digest` covers."""
    pages: tuple[int, ...] = ()
    """First bytes of the pages behind them that `digest` covers too."""
    digest: str
    """Hash of the length and of these bytes."""

    @property
    def is_covered(self) -> bool:
        """Whether the digest covers all of the file."""
        return self.num_first_bytes >= self.num_bytes


def digest_of(descriptor: int, num_bytes: int, num_first_bytes: int, pages: Sequence[int]) -> str:
    """The `digest` of an open file of so many bytes. Raises `OSError`."""
    made = hashlib.sha256(num_bytes.to_bytes(8, "little"))
    for at in range(0, num_first_bytes, _PIECE_BYTES):
        made.update(os.pread(descriptor, min(_PIECE_BYTES, num_first_bytes - at), at))
    for page in pages:
        made.update(os.pread(descriptor, PAGE_BYTES, page))
    return made.hexdigest()[:_DIGEST_DIGITS]


def to_bytes(files: Sequence[PinnedFile]) -> bytes:
    """The files for the input of another process: too much for arguments, which anybody sees."""
    return msgspec.msgpack.encode(tuple(files))


def of_bytes(data: bytes) -> tuple[PinnedFile, ...]:
    """The files that `to_bytes` wrote. Raises `msgspec.MsgspecError`."""
    return msgspec.msgpack.decode(data, type=tuple[PinnedFile, ...])


def documents_among(files: Iterable[PinnedFile]) -> tuple[PinnedFile, ...]:
    """Those that are no safetensors."""
    return tuple(file for file in files if not file.path.endswith(".safetensors"))


def digest_of_all(files: Iterable[PinnedFile]) -> str:
    """One digest of the names and contents of several files, wherever they lie."""
    made = hashlib.sha256()
    for name, digest in sorted((Path(file.path).name, file.digest) for file in files):
        made.update(f"{name}\0{digest}\0".encode())
    return made.hexdigest()[:_DIGEST_DIGITS]


# -- how this process reads them --------------------------------------------------------------------------------------

_sources: dict[Path, Path] = {}
"""Path -> path of this process's own descriptor, of files that are read in place of those that now have the path."""
_adapter_sources: ContextVar[Mapping[Path, Path] | None] = ContextVar("_adapter_sources", default=None)
"""The same for the files of an adapter. Another adapter may have had the same path."""


def source_of(path: Path) -> Path:
    """The path to open to read `path`."""
    return _known().get(path, path)


def is_file(path: Path) -> bool:
    """Whether `path` is a file. A folder with a pinned file has those that are pinned, and no other."""
    known = _known()
    return path in known or (not _is_pinned(path.parent, known) and path.is_file())


def exists(path: Path) -> bool:
    """Whether anything has this path, by the same rule."""
    known = _known()
    return path in known or (not _is_pinned(path.parent, known) and path.exists())


def files_in(folder: Path, suffix: str) -> list[Path]:
    """The files of `folder` with such an ending, by name: the pinned ones, if some of its files are pinned."""
    known = _known()
    if _is_pinned(folder, known):
        return sorted(path for path in known if path.parent == folder and path.suffix == suffix)
    return sorted(file for file in folder.glob(f"*{suffix}") if file.is_file())


def _known() -> Mapping[Path, Path]:
    own = _adapter_sources.get()
    return _sources if own is None else own


def _is_pinned(folder: Path, known: Mapping[Path, Path]) -> bool:
    return any(path.parent == folder for path in known)


def read_pinned(files: Sequence[PinnedFile]) -> None:
    """Have this process read these files, and hold them open. Raises `ChangedError` if one was written to, and
    `StartError` if one cannot be read now."""
    for file in files:
        descriptor = _open(file)
        _sources[Path(file.path)] = _own(file, descriptor)


def check_pinned(files: Sequence[PinnedFile]) -> None:
    """Raises `ChangedError` if one of the files that this process has read was written to since, and `StartError` if
    one cannot be read now. Looks at the content only of files that have another time."""
    for file in files:
        try:
            with _opened(source_of(Path(file.path))) as descriptor:
                is_same = _has_old_time(file, descriptor) or _is_unchanged(file, descriptor)
        except OSError as error:
            if error.errno not in _GONE:
                raise _unreadable(file, error) from error
            is_same = False
        if not is_same:
            raise _changed(file)


@contextlib.contextmanager
def adapter_pinned(files: Sequence[PinnedFile]) -> Iterator[None]:
    """Have this thread read these files alone. Raises `ChangedError` if one was written to, and `StartError` if one
    cannot be read now."""
    with contextlib.ExitStack() as descriptors:
        sources: dict[Path, Path] = {}
        for file in files:
            descriptor = _open(file)
            descriptors.callback(os.close, descriptor)
            sources[Path(file.path)] = _own(file, descriptor)
        token = _adapter_sources.set(sources if files else None)
        try:
            yield
        finally:
            _adapter_sources.reset(token)


def _own(file: PinnedFile, descriptor: int) -> Path:
    """The path of a descriptor of this process. A file without such a path is opened by its name."""
    return Path(f"/proc/self/fd/{descriptor}") if sys.platform == "linux" else Path(file.path)


def _open(file: PinnedFile) -> int:
    """A descriptor of the file: through the server's, or by its name if the system does not allow that. Raises
    `ChangedError` if both are other files now, or the file was written to. Raises `StartError` if that is unknown,
    because one of them could not be read."""
    failure: OSError | None = None
    for path, without in ((file.opened, _NOT_LENT), (file.path, _GONE)):
        try:
            with _opened(Path(path)) as descriptor:
                if _is_unchanged(file, descriptor):
                    return os.dup(descriptor)
        except OSError as error:
            if error.errno not in without:
                failure = failure or error
    if failure is not None:
        raise _unreadable(file, failure) from failure
    raise _changed(file)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Raises `OSError`."""
    descriptor = os.open(path, OPEN_FLAGS)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _has_old_time(file: PinnedFile, descriptor: int) -> bool:
    about = os.fstat(descriptor)
    return (about.st_size, about.st_mtime_ns) == (file.num_bytes, file.mtime_ns)


def _is_unchanged(file: PinnedFile, descriptor: int) -> bool:
    """Whether what the descriptor gives is what the server saw. Raises `OSError` if it gives nothing."""
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_size != file.num_bytes:
        return False
    if about.st_mtime_ns != file.mtime_ns and not file.is_covered:
        return False
    return digest_of(descriptor, file.num_bytes, file.num_first_bytes, file.pages) == file.digest


def _unreadable(file: PinnedFile, error: OSError) -> StartError:
    return StartError(
        f"{file.path} cannot be read now, so nobody knows whether it is what the server opened: "
        f"{error.strerror or error}; this may pass: try again"
    )


def _changed(file: PinnedFile) -> ChangedError:
    return ChangedError(
        f"{file.path} was written to after the server opened it, so another engine would not compute the same answers: "
        "restart the server to serve what the file holds now (to change a file, rename another over it)"
    )
