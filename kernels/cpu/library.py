"""The library of the C++ kernels of all ops: compiled once for this processor's instruction set, and cached.

Every `kernels/ops/<op>/cpu.cpp` goes into one shared library with a plain C interface. It uses neither torch's headers
nor its ABI, so a build takes seconds. The file is named by a hash of sources and flags, and appears in the cache
atomically; if several processes start together, one builds. The library is built for an instruction set level and not
for one machine, so a cache may be shared and an image built elsewhere.

Knows no kernel by name, and no tensors: `native` calls the kernels.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall",
    "-Wno-psabi",
)  # fmt: skip
"""No -ffast-math, and no fused operation that the source does not spell out: sums keep their order, so a row's bits
depend on that row alone, and NaN stays NaN. -O2 would halve the compile time, but sampling and top-k would take 1.2 to
1.7 times as long (top-p alone 0.8; AVX-512, 2 cores of an Intel Xeon, 2026-11-22)."""
_LINK_FLAGS = ("-shared", "-pthread")

_X86_BASE = ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm")
_AVX512 = (*_X86_BASE, "avx512f", "avx512bw", "avx512cd", "avx512vl", "avx512dq", "avx512_vnni")
_AVX512_FLAGS = ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512")
_AMX = ("amx_tile", "amx_bf16", "amx_int8")
_LEVELS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "amx",
        (*_AVX512, "avx512_bf16", *_AMX),
        (*_AVX512_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    ("avx512_bf16", (*_AVX512, "avx512_bf16"), (*_AVX512_FLAGS, "-mavx512bf16")),
    ("avx512_vnni", _AVX512, _AVX512_FLAGS),
    ("avx2", _X86_BASE, ("-march=x86-64-v3",)),
)
"""(level, flags that /proc/cpuinfo must show, compiler flags), best first."""
PORTABLE = "portable"
_X86 = ("x86_64", "AMD64")
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA = 158, 0x1023, 18
"""Linux for x86-64: the system call, its function, and the part of a thread's state that AMX keeps its tiles in."""

BUNDLED_DIR = Path(__file__).parent / "built"
"""The directory of an image's libraries, which `python -m inferd.kernels.cpu.library` fills. The image itself has no
compiler."""

_COMPILERS = ("g++", "c++")
_TIMEOUT_S = 600
_COMPILERS_AT_ONCE = 4
"""Most compilers at a time. Attention alone is two fifths of the work; the two largest sources take 0.8 and 0.6 GB
(AVX2, GCC 12, 2026-11-22)."""
_DIGEST_BYTES = 16
_SCRATCH = "build-"


class NativeError(RuntimeError):
    """Why the kernels cannot be built or loaded on this machine."""


def cache_home() -> Path:
    """The directory for compiled and measured data, by the XDG base directory specification. For a user without a home
    directory it lies among the temporary files."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"inferd-{os.geteuid()}"


def default_cache_dir() -> Path:
    """The daemon's directory of compiled kernels."""
    return cache_home() / "inferd" / "kernels"


def load(
    cache_dir: Path,
    level: str,
    before_compiling: Callable[[], None] | None,
    rejected: list[str],
    *,
    may_build: bool = True,
) -> tuple[ctypes.CDLL, Path, float]:
    """Take the image's library, else the cached one, else build one if `may_build`. A library that does not load is
    built again.

    Returns (library, its path, seconds of compiling). `before_compiling` is called before a compilation. Appends to
    `rejected` why a library is not used. Raises `NativeError`.
    """
    found = _load_built(cache_dir, level, rejected)
    if found is not None:
        return *found, 0.0
    if not may_build:
        raise NativeError("none are built yet")
    if before_compiling is not None and has_compiler():
        before_compiling()
    path, compile_s = build(cache_dir, level)
    try:
        return _open(path), path, compile_s
    except OSError as error:
        raise NativeError(f"{path} does not load: {error}") from error


def _load_built(cache_dir: Path, level: str, rejected: list[str]) -> tuple[ctypes.CDLL, Path] | None:
    """The image's library, else the cached one, and its path; None if neither is there or loads. Appends to `rejected`
    why a library is not used. Raises `NativeError`."""
    name = f"{_name(level)}.so"
    for path in (BUNDLED_DIR / name, cache_dir / name):
        try:
            _refuse_others(path)
            if path.exists():
                return _open(path), path
            if path.parent == BUNDLED_DIR and BUNDLED_DIR.exists():
                rejected.append(f"{BUNDLED_DIR} has no library for {level} from these sources")
        except OSError as error:
            rejected.append(f"{path} does not load: {error.strerror or error}")
    return None


def _open(path: Path) -> ctypes.CDLL:
    """Load a library. Raises `OSError` if it is unreadable, damaged or does not load."""
    if not _is_whole(path):
        raise OSError("it is damaged")
    return ctypes.CDLL(str(path))


def _refuse_others(path: Path) -> None:
    """Raise `NativeError` if others may write to the cache, or exchange it: loading a library runs its code."""
    folder = path.parent
    if folder == BUNDLED_DIR or not folder.exists():
        return
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NativeError(f"{folder} belongs to another user, or others may write to it: make it yours (chmod 700)")
    for above in folder.parents:
        is_shared = above.parent.stat().st_mode & 0o002  # such as /tmp
        if is_shared and above.lstat().st_uid not in (0, os.geteuid()):
            raise NativeError(f"{above} belongs to another user: remove it, or set XDG_CACHE_HOME")


def _is_whole(path: Path) -> bool:
    """Whether the digest at the end of the file is right. It is not if the writing process was killed or the disk was
    full."""
    content = path.read_bytes()
    return content[-_DIGEST_BYTES:] == _digest(content[:-_DIGEST_BYTES])


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def runnable_levels() -> tuple[str, ...]:
    """The levels that this process can run here, best first; the last runs everywhere.

    Linux gives tiles only to a process that has asked for them. This function asks, for all threads.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    flags = set(line.partition(":")[2].split())
    if flags.issuperset(_AMX) and not _may_use_tiles():
        flags -= set(_AMX)
    return (*(level for level, needed, _ in _LEVELS if flags.issuperset(needed)), PORTABLE)


def _may_use_tiles() -> bool:
    """Whether the system lets this process use AMX's tiles. It refuses if it is older than Linux 5.16, or if a thread's
    stack for signals is too small for them."""
    try:
        return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA) == 0)
    except (OSError, AttributeError):
        return False


def build(cache_dir: Path, level: str) -> tuple[Path, float]:
    """Compile for `level` and return (library, seconds). Raises `NativeError`."""
    flags, path = [*_FLAGS, *_level_flags(level)], cache_dir / f"{_name(level)}.so"
    compiler = _compiler()
    if compiler is None:
        raise NativeError(f"there is no C++ compiler ({', '.join(_COMPILERS)}) to build the kernels with")
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_others(path)
        found, started_s = _stamp(path), time.monotonic()
        with (cache_dir / "lock").open("w") as lock:
            with suppress(OSError):  # a file system without locks: then several processes may build
                fcntl.flock(lock, fcntl.LOCK_EX)
            if _stamp(path) == found or not _is_whole(path):
                _compile_all([compiler, *flags], path)
        return path, time.monotonic() - started_s
    except OSError as error:
        raise NativeError(f"the C++ kernels cannot be written to {cache_dir}: {error}") from error


def _stamp(path: Path) -> int | None:
    """A number that differs after every build; None if there is no library."""
    return path.stat().st_mtime_ns if path.exists() else None


def _compile_all(compiler: list[str], path: Path) -> None:
    """Compile each source by itself, several at a time and the largest first. The linked library appears only when
    complete."""
    _remove_leftovers(path.parent)
    sources = sorted(_sources(".cpp"), key=lambda source: source.stat().st_size, reverse=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_SCRATCH) as scratch:
        objects = [f"{scratch}/{index}.o" for index in range(len(sources))]
        commands = [
            [*compiler, f"-I{_ROOT}", "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(min(_COMPILERS_AT_ONCE, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda command: _compile(command, scratch), commands))
        library = Path(scratch) / path.name
        _compile([compiler[0], *_LINK_FLAGS, *objects, "-o", str(library)], scratch)
        _seal(library)
        os.replace(library, path)


def _seal(path: Path) -> None:
    """Append a digest of the content, which the loader ignores, and write all of it to disk."""
    with path.open("r+b") as file:
        digest = _digest(file.read())
        file.write(digest)
        file.flush()
        os.fsync(file.fileno())


def _remove_leftovers(cache_dir: Path) -> None:
    """Remove the scratch directories of killed builds."""
    for scratch in cache_dir.glob(f"{_SCRATCH}*"):
        if time.time() - scratch.stat().st_mtime > 2 * _TIMEOUT_S:
            shutil.rmtree(scratch, ignore_errors=True)


def has_compiler() -> bool:
    """Whether kernels can be built here."""
    return _compiler() is not None


def _compiler() -> str | None:
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def _compile(command: list[str], scratch: str) -> None:
    """Run a compiler. Its temporary files lie in `scratch`, so those of a killed one are removed some time."""
    environment = {**os.environ, "TMPDIR": scratch}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment)
    except subprocess.TimeoutExpired as error:
        raise NativeError(f"compiling the C++ kernels took more than {_TIMEOUT_S} s") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
        said = "; ".join(errors[:3])
        raise NativeError(f"the C++ kernels, which need GCC 11, do not compile with {command[0]}: {said}")


def _name(level: str) -> str:
    parts = (platform.machine(), *_FLAGS, *_LINK_FLAGS, *_level_flags(level))
    digest = hashlib.blake2b(" ".join(parts).encode(), digest_size=12)
    for path in (*_sources(".h"), *_sources(".cpp")):
        digest.update(f"\0{path.relative_to(_ROOT)}\0".encode() + path.read_bytes())
    return f"kernels-{level}-{digest.hexdigest()}"


def _sources(suffix: str) -> list[Path]:
    return sorted(_ROOT.rglob(f"*{suffix}"))


def _level_flags(level: str) -> tuple[str, ...]:
    known = {name: flags for name, _, flags in _LEVELS} | {PORTABLE: ()}
    if level not in known:
        raise NativeError(f"unknown instruction set level {level!r}; known are: {', '.join(known)}")
    if level != PORTABLE and platform.machine() not in _X86:
        raise NativeError(f"level {level} is for x86-64, and this is {platform.machine()}")
    return known[level]


def _shipped_levels() -> tuple[str, ...]:
    """Instruction set levels that a machine of this architecture may have."""
    return tuple(level for level, _, _ in _LEVELS) if platform.machine() in _X86 else (PORTABLE,)


def _build_all() -> None:
    """Build every level into `BUNDLED_DIR`, readable by every user of the image, whatever the umask."""
    for level in _shipped_levels():
        path, compile_s = build(BUNDLED_DIR, level)
        path.chmod(0o644)
        print(f"{path.name}: {compile_s:.1f} s")
    (BUNDLED_DIR / "lock").unlink()
    BUNDLED_DIR.chmod(0o755)


def _check_all() -> None:
    """Raise `OSError` if this user cannot load a library of `_build_all`."""
    for level in _shipped_levels():
        path = BUNDLED_DIR / f"{_name(level)}.so"
        is_runnable = level in runnable_levels()
        if is_runnable:
            _open(path)
        elif not _is_whole(path):
            raise OSError(f"{path} is damaged")
        print(f"{path.name}: {'loads' if is_runnable else 'is intact; this processor cannot run it'}")


def _build_for_this_machine() -> None:
    """Build what the first server here would build, unless it is there. Without a compiler this does nothing."""
    if has_compiler():
        path, compile_s = load(default_cache_dir(), runnable_levels()[0], None, [])[1:]
        print(f"{path.name}: {compile_s:.1f} s")


def _main() -> None:
    parser = argparse.ArgumentParser(description="Build the C++ kernels of an image, for every instruction set.")
    parser.add_argument("--check", action="store_true", help="only load what was built, as this user")
    parser.add_argument("--here", action="store_true", help="build for this processor, into the cache of servers")
    chosen = parser.parse_args()
    if chosen.here:
        _build_for_this_machine()
    else:
        _check_all() if chosen.check else _build_all()


if __name__ == "__main__":
    _main()
