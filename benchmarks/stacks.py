"""Shows which functions take a process's processor time. Samples its main thread's stack every 2 ms, without an
installed tool.

A signal handler takes the samples. Time inside a C call is seen when the call returns to Python, and counts for the
line of the call or the one after it.
"""

from __future__ import annotations

import atexit
import signal
from collections import Counter
from pathlib import Path
from types import FrameType

_PERIOD_S = 0.002
_SAMPLES_A_WRITE = 50
_MAX_DEPTH = 60


def sample_into(path: Path) -> None:
    """Count stacks from now on, and keep `path` up to date, because the process may end without notice. A line is a
    stack, `count<TAB>outermost;...;innermost`, with frames `file:function`."""
    stacks: Counter[str] = Counter()
    num_samples = 0

    def on_sample(_: int, frame: FrameType | None) -> None:
        nonlocal num_samples
        names: list[str] = []
        while frame is not None and len(names) < _MAX_DEPTH:
            names.append(f"{Path(frame.f_code.co_filename).stem}:{frame.f_code.co_name}")
            frame = frame.f_back
        stacks[";".join(reversed(names))] += 1
        num_samples += 1
        if num_samples % _SAMPLES_A_WRITE == 0:
            path.write_text("".join(f"{count}\t{stack}\n" for stack, count in stacks.most_common()))

    signal.signal(signal.SIGPROF, on_sample)
    # The interpreter restores signals before it ends, and this one's default action is to kill.
    atexit.register(signal.setitimer, signal.ITIMER_PROF, 0.0)
    signal.setitimer(signal.ITIMER_PROF, _PERIOD_S, _PERIOD_S)


def read_stacks(path: Path) -> Counter[tuple[str, ...]]:
    """Samples of `sample_into` by stack, outermost frame first; empty if there is no file."""
    stacks: Counter[tuple[str, ...]] = Counter()
    if path.exists():
        for line in path.read_text().splitlines():
            count, _, frames = line.partition("\t")
            stacks[tuple(frames.split(";"))] += int(count)
    return stacks


def shares(stacks: Counter[tuple[str, ...]], *, within: str) -> list[tuple[str, float, float]]:
    """(frame, its own share, its share with all that it called), by own share. Covers the samples whose stack holds the
    frame `within`."""
    inside = {stack: count for stack, count in stacks.items() if within in stack}
    total = sum(inside.values()) or 1
    own: Counter[str] = Counter()
    inclusive: Counter[str] = Counter()
    for stack, count in inside.items():
        own[stack[-1]] += count
        for frame in set(stack):
            inclusive[frame] += count
    return [(frame, count / total, inclusive[frame] / total) for frame, count in own.most_common()]
