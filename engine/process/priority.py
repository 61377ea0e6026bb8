"""How large a share of busy cores a process gets beside others. Imports no library."""

from __future__ import annotations

import os
import time
from pathlib import Path

_MAX_TRIES, _TRY_S = 50, 0.1
"""The kernel takes one such change in 0.1 s, for all users together."""


def yield_to_others(nice: int) -> bool:
    """Run the threads that this one starts at the nice value `nice`, and this one too. Returns as `set_nice_of_session`
    does."""
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    return set_nice_of_session(nice)


def set_nice_of_session(nice: int) -> bool:
    """Set the nice value of this session. If the kernel groups by session (sched(7), autogroups), it comes before the
    thread's own.

    Returns whether the kernel took it, or does not group by session.
    """
    for _ in range(_MAX_TRIES):
        try:
            Path("/proc/self/autogroup").write_text(str(nice))
        except BlockingIOError:
            time.sleep(_TRY_S)
        except OSError:
            return True  # it does not group by session
        else:
            return True
    return False
