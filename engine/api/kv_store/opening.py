"""Opens the directory of KV segments, and makes it if there is none. Its mark says that it is inferd's.

A directory that holds other files, or that others may write to, is refused, and so is a symbolic link. The directory
stays open, so it does not matter if its path later leads elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from inferd.engine.api.errors import StartError
from inferd.engine.api.kv_store.listing import FOLDER_FLAGS, MARK, is_part, part_of
from inferd.engine.api.kv_store.segment import FORMAT
from inferd.engine.arch.shown import shown

WAY_OUT = "give an empty directory or a new one"
_KIND = "inferd KV segments"
_MOST_MARK_BYTES = 4096
_PROBE_BYTES = 4096
"""A full disk may still take the name of an empty file."""


class _Mark(msgspec.Struct, frozen=True):
    """The content of the mark, as JSON."""

    kind: str
    format: int


def open_own(path: Path) -> int:
    """Descriptor of the directory, for a server. It is made if it is missing, with mode 0700. Raises `StartError`."""
    with told(path):
        if not os.path.lexists(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = _open_folder(path)
        try:
            about = os.fstat(root)
            if about.st_uid != os.geteuid():
                raise StartError(
                    f"the directory of KV segments must belong to user {os.geteuid()}, who runs inferd, but {path} "
                    f"belongs to user {about.st_uid}: {WAY_OUT}"
                )
            if about.st_mode & 0o022:
                raise StartError(
                    f"only its owner may be able to write to a directory of KV segments, but the mode of {path} is "
                    f"{stat.S_IMODE(about.st_mode):04o}: chmod 700 {path}"
                )
            _make_mark(root, path)
            _write_whole(root, part_of(MARK), bytes(_PROBE_BYTES), None)
        except BaseException:
            os.close(root)
            raise
        return root


def is_new(path: Path) -> bool:
    """Whether a server would make a directory there, or mark an empty one."""
    if not os.path.lexists(path):
        return True
    return stat.S_ISDIR(os.lstat(path).st_mode) and not any(not is_part(name) for name in os.listdir(path))


@contextmanager
def existing(path: Path) -> Iterator[int]:
    """Descriptor of a directory that some server made, also of another user. Raises `StartError`."""
    if not os.path.lexists(path):
        raise StartError(f"the directory of KV segments must exist, but {path} does not: give one that a server wrote")
    with told(path):
        root = _open_folder(path)
        try:
            if not _is_marked(root, path):
                raise StartError(
                    f"a directory of KV segments must have the file {MARK}, but {path} has none: give one that a "
                    "server wrote"
                )
            yield root
        finally:
            os.close(root)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Raises `StartError` for an `OSError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                told = f"the disk of {path} must have free space ({reason}): free some, or give a directory on another"
            case errno.EROFS | errno.EACCES | errno.EPERM:
                told = f"inferd must be able to read and write {path} ({reason}): give a directory that it may write to"
            case _:
                told = f"the directory of KV segments {path} cannot be used ({reason}): {WAY_OUT}"
        raise StartError(told) from error


def _open_folder(path: Path) -> int:
    """Raises `StartError` and `OSError`."""
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        raise StartError(
            f"the directory of KV segments must not be a symbolic link, but {path} is one: give the directory that it "
            f"leads to, {os.path.realpath(path)}"
        )
    if not stat.S_ISDIR(mode):
        raise StartError(f"the directory of KV segments must be a directory, but {path} is a file: {WAY_OUT}")
    return os.open(path, FOLDER_FLAGS)


def _make_mark(root: int, path: Path) -> None:
    """Mark an empty directory. Raises `StartError` if it is another's, and `OSError`."""
    while not _is_marked(root, path):
        names = [name for name in os.listdir(root) if not is_part(name)]
        if MARK in names:
            continue  # another server has made it since
        if names:
            raise StartError(
                f"the directory of KV segments must be empty or have the file {MARK}, but {path} has other files "
                f"({len(names)}, among them {min(names)}): {WAY_OUT}, such as {path / 'inferd-kv'}"
            )
        _write_whole(root, part_of(MARK), msgspec.json.encode(_Mark(_KIND, FORMAT)), MARK)


def _is_marked(root: int, path: Path) -> bool:
    """Whether the directory has a mark. Raises `StartError` if it is of another format, and `OSError`."""
    try:
        descriptor = os.open(MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=root)
    except FileNotFoundError:
        return False
    try:
        content = os.read(descriptor, _MOST_MARK_BYTES)
        mark = msgspec.json.decode(content, type=_Mark)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartError(f"{path / MARK} must be what inferd wrote, but it is damaged ({error}): {WAY_OUT}") from error
    finally:
        os.close(descriptor)
    if mark.kind != _KIND:
        raise StartError(f"{path / MARK} must be what inferd wrote, but it is of {shown(mark.kind)}: {WAY_OUT}")
    if mark.format != FORMAT:
        raise StartError(
            f"the directory of KV segments must have format {FORMAT}, but {path} has format {mark.format} of another "
            f"version of inferd: {WAY_OUT}"
        )
    return True


def _write_whole(root: int, part: str, content: bytes, name: str | None) -> None:
    """Write a file to the disk that appears whole under its name, if no other has it; None: only try. Raises
    `OSError`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(part, flags, 0o600, dir_fd=root)
    try:
        try:
            if os.write(descriptor, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if name is not None:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if name is not None:
            with suppress(FileExistsError):
                os.link(part, name, src_dir_fd=root, dst_dir_fd=root, follow_symlinks=False)
            os.fsync(root)
    finally:
        with suppress(FileNotFoundError):  # another server may remove a part that has a second name
            os.unlink(part, dir_fd=root)
