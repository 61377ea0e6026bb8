"""Faults of streams, captures and copies, each planted into the worker of a recorded GPU, are found and named.

`test_recorded_cuda` shows that the same worker is clean without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from inferd.engine.sample.sampler import Sampler
from inferd.engine.worker import cuda
from inferd.engine.worker.cuda import CudaDevice, Staging
from inferd.engine.worker.runner import Runner
from inferd.engine.worker.slots import Slots
from inferd.kernels.cpu.tape import NotRecordableError
from tests.cpu.recorded_gpu.device import RecordedGpu, recorded_gpu
from tests.cpu.recorded_gpu.graphs import Graph
from tests.cpu.recorded_gpu.order import FaultError
from tests.cpu.recorded_gpu.streams import Stream
from tests.cpu.test_cuda_capture import failing
from tests.cpu.test_recorded_cuda import results
from tests.cpu.test_recorded_steps import PLAIN, WINDOWED, Engine, decoding

DEVICE = torch.device("cuda", 0)

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def _needs(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels != "cpp":
        pytest.skip("plain PyTorch is not recorded")
    monkeypatch.setattr(CudaDevice, "row_buckets", (2, 7))
    monkeypatch.setattr(CudaDevice, "token_buckets", (9, 24))


@pytest.fixture
def gpu() -> Iterator[RecordedGpu]:
    """A GPU that this thread uses. Its faults are the test's."""
    gpu = RecordedGpu()
    with pytest.MonkeyPatch.context() as patch:
        gpu.install(patch)
        with gpu.watching():
            yield gpu


# -- in the worker -----------------------------------------------------------------------------------------------------


def no_wait(is_of_capture: bool) -> Plant:
    """A stream does not wait for the other one: that of captures, or the default one."""
    wait_stream = Stream.wait_stream

    def waited(stream: Stream, other: Stream) -> None:
        if (stream.number != 0) != is_of_capture:
            wait_stream(stream, other)

    return lambda patch: patch.setattr(Stream, "wait_stream", waited)


def in_a_step(does: Callable[[Tensor], object]) -> Plant:
    """The draw of recorded steps also does something else."""
    draw = Sampler.draw

    def drawn(sampler: Sampler, logits: Tensor, *rest: Any) -> Any:
        does(logits)
        return draw(sampler, logits, *rest)

    return lambda patch: patch.setattr(Sampler, "draw", drawn)


def copies(init: Callable[[Any, Sequence[Tensor]], None], wait: Callable[[Any], Sequence[Tensor]]) -> Plant:
    """The copies of results to the host."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(cuda._PinnedCopy, "__init__", init)
        patch.setattr(cuda._PinnedCopy, "wait", wait)

    return plant


_init, _wait = cuda._PinnedCopy.__init__, cuda._PinnedCopy.wait


def _event_first(copy: Any, tensors: Sequence[Tensor]) -> None:
    copy._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copy._arrived.record()
    copy._copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for goal, tensor in zip(copy._copies, tensors, strict=True):
        goal.copy_(tensor, non_blocking=True)


def _without_pinned_memory(copy: Any, tensors: Sequence[Tensor]) -> None:
    copy._copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    for goal, tensor in zip(copy._copies, tensors, strict=True):
        goal.copy_(tensor, non_blocking=True)


def _on_the_device(copy: Any, tensors: Sequence[Tensor]) -> None:
    copy._copies = tensors


def _of_the_step_before() -> Plant:
    events: list[Any] = [None]

    def wait(copy: Any) -> Sequence[Tensor]:
        events.append(copy._arrived)
        if events[-2] is not None:
            events[-2].synchronize()
        return copy._copies  # type: ignore[no-any-return]

    return copies(_init, wait)


def write(make: Callable[[Sequence[int], Tensor], Tensor]) -> Plant:
    """The copy of a step's rows to the device."""

    def written(_: CudaDevice, goal: Tensor, values: Sequence[int]) -> None:
        goal.copy_(make(values, goal), non_blocking=True)

    return lambda patch: patch.setattr(CudaDevice, "write", written)


def one_buffer() -> Plant:
    """All rows are written from one pinned buffer."""
    made: list[Tensor] = []

    def filled(values: Sequence[int], goal: Tensor) -> Tensor:
        if not made:
            made.append(torch.empty(256, dtype=goal.dtype, pin_memory=True))
        part = made[0][: len(values)]
        return part.copy_(torch.tensor(values, dtype=goal.dtype))

    return write(filled)


def after_recording(does: Callable[[Runner], object]) -> Plant:
    record_steps = Runner.record_steps

    def recorded(runner: Runner, *given: Any) -> str | None:
        text = record_steps(runner, *given)
        does(runner)
        return text

    return lambda patch: patch.setattr(Runner, "record_steps", recorded)


def _fresh_output(patch: pytest.MonkeyPatch) -> None:
    replay = cuda._CudaGraph.replay

    def replayed(graph: Any) -> None:
        replay(graph)
        graph.output = graph.output.clone()

    patch.setattr(cuda._CudaGraph, "replay", replayed)


def _on_another_stream(patch: pytest.MonkeyPatch) -> None:
    replay = cuda._CudaGraph.replay

    def replayed(graph: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            replay(graph)

    patch.setattr(cuda._CudaGraph, "replay", replayed)


def _replace_ids(runner: Runner) -> None:
    runner.model.slots.token_ids = runner.model.slots.token_ids.clone()


def _replace_rows(runner: Runner) -> None:
    runner._graphs._rows = runner._graphs._rows.clone()


def _clear_workspaces(runner: Runner) -> None:
    assert isinstance(runner.model.device, CudaDevice)
    runner.model.device._has_recorded = False
    runner.model.device.give_back_freed()


def _tables_on_the_host(patch: pytest.MonkeyPatch) -> None:
    init = Slots.__init__

    def made(slots: Slots, *given: Any) -> None:
        init(slots, *given)
        slots.block_tables = slots.block_tables.cpu()

    patch.setattr(Slots, "__init__", made)


IN_THE_WORKER: dict[str, tuple[Plant, str]] = {
    "a capture does not wait for the copy of its inputs": (
        no_wait(True), "on stream 1 reads .* which a copy to the device .* on the default stream writes: no event",
    ),
    "a value is read in a capture": (in_a_step(lambda x: x.max().item()), "asks for values within a capture"),
    "a list is read in a capture": (in_a_step(lambda x: x.tolist()), "the host reads .* within a capture"),
    "a branch in a capture": (in_a_step(lambda x: bool(x.isnan().any())), "asks for values within a capture"),
    "rows are chosen by a mask in a capture": (in_a_step(lambda x: x[x > 0]), "index asks for values within a capture"),
    "tensors go to the host in a capture": (in_a_step(lambda x: x.cpu()), "memory of the host that is not pinned"),
    "the device is waited for in a capture": (
        in_a_step(lambda _: torch.cuda.synchronize()), "the host waits for the device within a capture",
    ),
    "a stream is waited for in a capture": (
        in_a_step(lambda _: torch.cuda.current_stream().synchronize()), "the host waits for a stream within a capture",
    ),
    "an event is waited for in a capture": (
        in_a_step(lambda _: torch.cuda.Event().synchronize()),  # type: ignore[no-untyped-call]
        "the host waits for an event within a capture",
    ),
    "numbers of the host in a capture": (
        in_a_step(lambda x: torch.tensor([1, 2], device=x.device)), "that is not pinned within a capture",
    ),
    "pinned memory in a capture": (
        in_a_step(lambda x: torch.tensor([1, 2]).pin_memory().to(x.device, non_blocking=True)),
        "pinned memory is allocated within a capture",
    ),
    "memory is given back in a capture": (
        in_a_step(lambda _: torch.cuda.empty_cache()), "memory is given back to the driver within a capture",
    ),
    "an index of the host in a capture": (
        in_a_step(lambda x: x[torch.tensor([0])]), "an index of the host is copied to the device within a capture",
    ),
    "results are read before they have arrived": (
        copies(_init, lambda copy: copy._copies), "the host reads .* which a copy to the host .* writes",
    ),
    "the event is recorded before the copies": (copies(_event_first, _wait), "host reads .* not waited for an event"),
    "the event of the step before": (_of_the_step_before(), "the host reads .* not waited for an event behind it"),
    "results go to memory that is not pinned": (
        copies(_without_pinned_memory, lambda copy: copy._copies), "a copy of pageable memory .* so a launch waits",
    ),
    "results are read on the device": (
        copies(_on_the_device, lambda copy: copy._copies), "the host reads .* so a launch waits for the device",
    ),
    "one pinned buffer for all steps": (one_buffer(), "the host writes int64 .* which a copy to the device .* reads"),
    "rows come from memory that is not pinned": (
        write(lambda values, goal: torch.tensor(values, dtype=goal.dtype)), "a copy of pageable memory .* launch waits",
    ),
    "rows have another dtype on the host": (
        write(lambda values, goal: torch.tensor(values, dtype=torch.int32, pin_memory=True)),
        "a copy of pageable memory .* so a launch waits",
    ),
    "the ids of the slots are replaced": (after_recording(_replace_ids), r"uses int64 \[6, 65\] of .*slots.py.* freed"),
    "the rows of recorded steps are replaced": (after_recording(_replace_rows), "uses int64 .*graphs.py.* freed"),
    "workspaces are freed": (after_recording(_clear_workspaces), "workspaces of cuBLAS are freed, but the graph"),
    "block tables lie on the host": (_tables_on_the_host, "index_select of tensors on the device and on the host"),
    "a replay gives fresh memory": (_fresh_output, r"a replayed step allocates memory of the device: int64 \[\d\] of"),
    "each replay has a stream of its own": (
        _on_another_stream, "on stream 2 writes the memory that graphs share, which a replay .* default stream"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_THE_WORKER)
def test_a_fault_of_the_worker_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first one that is found."""
    plant, message = IN_THE_WORKER[name]
    plant(monkeypatch)
    with pytest.raises(FaultError, match=message), recorded_gpu() as gpu:
        serve(gpu)


def serve(gpu: RecordedGpu) -> None:
    """Record all steps. Then a prompt of three requests, and their next tokens."""
    engine = Engine(WINDOWED, CudaDevice())
    engine.runner.record_steps(lambda *_: None)
    gpu.check()
    with gpu.serving():
        plan = decoding(engine, PLAIN[:3])
    with gpu.serving(may_allocate=False):
        results(engine.runner, [plan(step) for step in range(1, 5)])


def test_without_a_planted_fault_there_is_none() -> None:
    with recorded_gpu() as gpu:
        serve(gpu)


# -- in the device -----------------------------------------------------------------------------------------------------


def adding(number: Tensor) -> Callable[[], Tensor]:
    """A step that reads `number`, in memory of its own."""
    return lambda: number + 1


def number() -> Tensor:
    return torch.zeros(4, dtype=torch.int64, device=DEVICE)


def found(gpu: RecordedGpu, does: Callable[[], object]) -> str:
    """The first fault of what `does`."""
    with suppress(FaultError, NotRecordableError):
        does()
    assert gpu.faults, "no fault was found"
    return gpu.faults[0]


def test_runs_that_were_cut_short_may_still_write(gpu: RecordedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step has to wait for the stream of the capture, also if the capture never began."""
    device, rows = CudaDevice(), number()

    def fails() -> Tensor:
        rows.add_(1)
        raise torch.OutOfMemoryError("planted")

    with pytest.raises(NotRecordableError):
        device.record(fails)
    device.write(rows, [1, 2, 3, 4])
    assert not gpu.faults
    no_wait(False)(monkeypatch)
    with pytest.raises(NotRecordableError):
        device.record(fails)
    assert re.search(
        "a copy to the device .* on the default stream writes int64 .* which add_ .* on stream 1 writes",
        found(gpu, lambda: device.write(rows, [1, 2, 3, 4])),
    )


def test_a_capture_that_fails_leaves_another_stream_current(gpu: RecordedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    device = CudaDevice()
    text = found(gpu, lambda: device.record(failing(gpu, RuntimeError("planted"), 3)))
    assert "the current stream is still that of a capture which failed" in text


def test_two_graphs_of_one_pool_at_once(gpu: RecordedGpu) -> None:
    """They have no tensor in common."""
    device = CudaDevice()
    inputs = number(), number()
    graphs = [device.record(adding(one)) for one in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in graphs]  # type: ignore[no-untyped-call]

    def both() -> None:
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()

    assert "on stream 3 writes the memory that graphs share, which a replay" in found(gpu, both)


def test_an_output_that_another_graph_overwrites(gpu: RecordedGpu) -> None:
    """The graph that was captured first may have used that memory for a while. A later one has other memory."""
    device = CudaDevice()
    inputs = number(), number()
    first, second = (device.record(adding(one)) for one in inputs)
    second.replay()
    assert device.copy_to_host([first.output, second.output]).wait()[0].tolist() == [1] * 4
    first.replay()
    text = found(gpu, lambda: device.copy_to_host([second.output]))
    assert re.search("reads int64 .*, but a replay of the graph .* may have overwritten it: it shares memory", text)


def test_an_output_without_a_replay(gpu: RecordedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "replay", lambda _: None)
    device = CudaDevice()
    recording = device.record(adding(number()))
    assert "was not replayed: a capture computes nothing" in found(gpu, lambda: device.copy_to_host([recording.output]))


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_another_thread_waits_during_a_capture(gpu: RecordedGpu, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the core's thread waits for the step before. Only the mode that the worker asks for allows that."""
    begin = Graph.capture_begin
    monkeypatch.setattr(Graph, "capture_begin", lambda graph, pool, **_: begin(graph, pool, capture_error_mode=mode))
    device, source = CudaDevice(), number()
    copy = device.copy_to_host([source])

    def run() -> Tensor:
        if gpu.capture is not None:
            with ThreadPoolExecutor(1) as other, suppress(FaultError):
                other.submit(copy.wait).result()
        return source + 1

    with suppress(NotRecordableError):
        device.record(run)
    what = 'the host waits for an event in another thread than that of a capture, whose mode is "global"'
    assert [what in fault for fault in gpu.faults[:1]] == ([True] if mode == "global" else [])


class EventFirst(Staging):
    def copy(self, goal: Tensor, values: Tensor) -> None:
        buffer, is_read = next(self._turns)
        is_read.synchronize()
        is_read.record()
        part = buffer.view(goal.dtype)[: len(goal)]
        part.copy_(values)
        self._send(goal, part)


class NoWaiting(EventFirst):
    def copy(self, goal: Tensor, values: Tensor) -> None:
        buffer, _ = next(self._turns)
        part = buffer.view(goal.dtype)[: len(goal)]
        part.copy_(values)
        self._send(goal, part)


@pytest.mark.parametrize(("staging", "is_sound"), [(Staging, True), (EventFirst, False), (NoWaiting, False)])
def test_a_buffer_that_a_copy_still_reads(gpu: RecordedGpu, staging: type[Staging], is_sound: bool) -> None:
    copies, goal = staging.on_current_device(), number()

    def three() -> None:
        for _ in range(3):
            copies.copy(goal, torch.arange(4))

    if is_sound:
        three()
        assert not gpu.faults
    else:
        text = found(gpu, three)
        assert re.search("the host writes uint8 .* which a copy to the device .* reads: the host has not waited", text)


def test_work_of_a_capture_on_another_stream(gpu: RecordedGpu) -> None:
    """It must be captured too, and end before the capture does."""
    device, source, other = CudaDevice(), number(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run(*, forks: bool, joins: bool) -> Tensor:
        main = torch.cuda.current_stream()
        if forks:
            other.wait_stream(main)
        with torch.cuda.stream(other):
            result = source + 1
        if joins:
            main.wait_stream(other)
        return result

    recording = device.record(partial(run, forks=True, joins=True))
    assert device.copy_to_host([recording.output]).wait()[0].tolist() == [1] * 4
    assert not gpu.faults
    text = found(gpu, lambda: device.record(partial(run, forks=True, joins=False)))
    assert re.search("the capture at .* ends before add .* on another stream", text)
    gpu.faults.clear()
    torch.cuda.synchronize()
    text = found(gpu, lambda: gpu_captured(lambda: run(forks=False, joins=True)))
    assert "does not come from the memory of the graph: its stream is not captured" in text
    gpu.faults.clear()
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    assert "a captured stream waits for work that is not captured" in found(gpu, lambda: gpu_captured(event.wait))


def gpu_captured(run: Callable[[], object]) -> None:
    """A capture without warm-up runs."""
    with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run()


def test_memory_that_another_stream_still_uses(gpu: RecordedGpu) -> None:
    """It was freed, and torch gives it to the stream that it was allocated on."""
    device, source, other = CudaDevice(), number(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        source.add_(1)
    del source, device
    text = found(gpu, number)
    assert re.search("was freed, and its memory is used again on the default stream, but add_ .* on stream 2", text)


def test_a_value_that_is_read_while_it_is_written(gpu: RecordedGpu) -> None:
    source, other = number(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(other):
        assert re.search("reads int64 .* which zeros .* on the default stream writes", found(gpu, lambda: source + 1))
