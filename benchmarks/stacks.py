"""Where a process spends its processor time: its main thread's stack, every 2 ms of it, without a tool to install.

A signal handler samples, so time inside one C call is seen when that call returns to Python: it is charged to the line
that made the call, or to the one after it.
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
    """Count stacks from now on, and keep `path` up to date, as the process may end without notice: a line a stack,
    `count<TAB>outermost;...;innermost`, each frame `file:function`."""
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
    # The interpreter gives signals back before it ends, and this one's default is to kill.
    atexit.register(signal.setitimer, signal.ITIMER_PROF, 0.0)
    signal.setitimer(signal.ITIMER_PROF, _PERIOD_S, _PERIOD_S)


def read_stacks(path: Path) -> Counter[tuple[str, ...]]:
    """What `sample_into` wrote: samples by stack, outermost frame first; empty where nothing was written."""
    stacks: Counter[tuple[str, ...]] = Counter()
    if path.exists():
        for line in path.read_text().splitlines():
            count, _, frames = line.partition("\t")
            stacks[tuple(frames.split(";"))] += int(count)
    return stacks


def shares(stacks: Counter[tuple[str, ...]], *, within: str) -> list[tuple[str, float, float]]:
    """(frame, its own share, its share with all it called) of the samples whose stack holds the frame `within`, by
    own share."""
    inside = {stack: count for stack, count in stacks.items() if within in stack}
    total = sum(inside.values()) or 1
    own: Counter[str] = Counter()
    inclusive: Counter[str] = Counter()
    for stack, count in inside.items():
        own[stack[-1]] += count
        for frame in set(stack):
            inclusive[frame] += count
    return [(frame, count / total, inclusive[frame] / total) for frame, count in own.most_common()]
