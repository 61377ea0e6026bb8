"""Streams and events of a recorded GPU, in place of those of `torch.cuda`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tests.cpu.recorded_gpu.graphs import Capture
from tests.cpu.recorded_gpu.order import Clock, Work

if TYPE_CHECKING:
    from tests.cpu.recorded_gpu.device import RecordedGpu


class Stream:
    """In place of `torch.cuda.Stream`."""

    def __init__(self, gpu: RecordedGpu, device: Any = None, priority: int = 0, *, number: int | None = None) -> None:
        self._gpu = gpu
        self.number = gpu.streams.add(f"stream {len(gpu.streams.names)}") if number is None else number

    def wait_event(self, event: Event) -> None:
        gpu, capture = self._gpu, self._gpu.my_capture
        if capture is not None:
            if event.capture is capture:
                capture.streams.add(self.number)
                capture.last.setdefault(self.number, Work(self.number, 0, ""))
            elif self.number in capture.streams:
                gpu.fault("a captured stream waits for work that is not captured")
        elif event.capture is not None and event.capture is gpu.capture:
            gpu.fault("a stream waits for an event of a capture that goes on")
        gpu.streams.wait(self.number, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._gpu)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._gpu.waits("the host waits for a stream", self._gpu.streams.clock(self.number))


class Event:
    """In place of `torch.cuda.Event`."""

    def __init__(self, gpu: RecordedGpu, enable_timing: bool = False, **_: Any) -> None:
        self._gpu, self.clock, self._time_s = gpu, Clock(), 0.0
        self.capture: Capture | None = None

    def record(self, stream: Stream | None = None) -> None:
        number, capture = self._gpu.current if stream is None else stream.number, self._gpu.my_capture
        self.clock, self._time_s = dict(self._gpu.streams.clock(number)), time.perf_counter()
        self.capture = capture if capture is not None and number in capture.streams else None

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Stream(self._gpu, number=self._gpu.current)).wait_event(self)

    def synchronize(self) -> None:
        """The one way in which the host may wait while it serves."""
        self._gpu.refuse_in_capture("the host waits for an event")
        self._gpu.streams.synchronize(self.clock)

    def query(self) -> bool:
        self._gpu.refuse_in_capture("the host asks for an event")
        return True

    def elapsed_time(self, end: Event) -> float:
        return max(end._time_s - self._time_s, 1e-6) * 1e3


class On:
    """In place of `torch.cuda.stream`."""

    def __init__(self, gpu: RecordedGpu, stream: Stream) -> None:
        self._gpu, self._stream, self._before = gpu, stream, (0, False)

    def __enter__(self) -> None:
        self._before = self._gpu.local.stream, self._gpu.local.is_left
        self._gpu.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        self._gpu.local.stream, self._gpu.local.is_left = self._before
