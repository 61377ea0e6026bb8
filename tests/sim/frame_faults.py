"""Applies the faults of `faults.FRAME_FAULTS` to one frame on its way. Knows pipes and bytes, no messages."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.sim.cells import SimulationError
from tests.sim.faults import Fault
from tests.sim.network import Pipe


def spoil_frame(pipe: Pipe, fault: Fault, old: Sequence[bytes], rng: Random, harms: list[str]) -> None:
    """Apply `fault` to the pipe. `old`: frames of the previous engine, in the same direction. Once applied, it is
    listed in `harms`, unless the frame is only late."""
    if fault.what == "delay":
        pipe.delays_s[fault.at] = rng.choice((0.05, 0.5))  # shorter than the time after which a frame counts as lost
        return
    if fault.what in ("lose", "mute"):
        if fault.what == "lose":
            pipe.losses.add(fault.at)
        else:
            pipe.mute_from = fault.at
        pipe.on_lost = lambda: harms.append("lost frame")
        return

    def spoil(frame: bytes) -> list[bytes]:
        frames = _spoiled(fault, frame, rng, old[fault.at] if fault.at < len(old) else frame)
        if frames != [frame]:
            harms.append(f"{fault.what} frame")
        return frames

    pipe.spoils[fault.at] = spoil


def _spoiled(fault: Fault, frame: bytes, rng: Random, old: bytes) -> list[bytes]:
    match fault.what:
        case "repeat":
            return [frame, frame]
        case "cut":
            return [frame[: rng.randrange(len(frame))]]
        case "flip":
            flipped = bytearray(frame)
            flipped[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            return [bytes(flipped)]
        case "stale":
            return [old]
    raise SimulationError(f"no fault of frames: {fault}")
