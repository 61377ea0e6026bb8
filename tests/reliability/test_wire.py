"""R21: damaged, lost, repeated or truncated frames cost a restart but no token, even if it is the last frame.

Frames do not depend on the model: it is free, or the real one with `--long`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.conftest import Daemon
from tests.reliability.asking import Asker
from tests.reliability.conftest import WITHOUT_CACHE, faulty, restarts
from tests.reliability.workloads import streams

STEP_MS = 2.0
SAID = {
    "flip": "its checksum is wrong",
    "lose": "but frame 60 was expected",
    "repeat": "but frame 61 was expected",
    "cut": "is not an envelope",
    "mute": "has sent frame 60, which never came",
}
"""Fault of a frame -> text of the log. If all later frames are lost too, only the heartbeat's count shows it."""


@pytest.mark.sampled(keep=4, among="recoveries")
def test_r21_a_bad_frame_is_a_pause(start: Callable[..., Daemon], is_long: bool) -> None:
    faults = [f"{kind}@frame=60@epoch={epoch}" for epoch, kind in enumerate(SAID)]
    daemon = start(WITHOUT_CACHE, program=faulty(*faults, step_ms=None if is_long else STEP_MS))
    asks, asker = streams(4, 300), Asker(daemon.url)
    disturbed = asker.ask(asks)
    assert restarts(daemon) == len(SAID)
    assert [answer.said for answer in disturbed] == [answer.said for answer in asker.ask(asks)]
    assert all(SAID[kind] in daemon.output for kind in SAID), daemon.output
