"""R21: frames that are damaged, lost, repeated or cut short cost a restart and no token, also the last of all.

No frame asks what the engine computes: it has a free model, and the real one with `--long`.
"""

from __future__ import annotations

from collections.abc import Callable

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
"""Of a frame that is lost with all behind it, no later number tells."""


def test_r21_a_bad_frame_is_a_pause(start: Callable[..., Daemon], is_long: bool) -> None:
    faults = [f"{kind}@frame=60@epoch={epoch}" for epoch, kind in enumerate(SAID)]
    daemon = start(WITHOUT_CACHE, program=faulty(*faults, step_ms=None if is_long else STEP_MS))
    asks, asker = streams(4, 300), Asker(daemon.url)
    disturbed = asker.ask(asks)
    assert restarts(daemon) == len(SAID)
    assert [answer.said for answer in disturbed] == [answer.said for answer in asker.ask(asks)]
    assert all(SAID[kind] in daemon.output for kind in SAID), daemon.output
