"""An engine of several processes gives every bit of an engine of one: ids and logprobs of requests of all kinds,
chunked, with a prefix hit and after preemption. Its ranks take the memory that was planned, and end with it."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file, save_file

from inferd.engine.api.errors import CapacityError, ModelError, StartError
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.memory.activations import EXCHANGE_BYTES, EXCHANGE_HEADER_BYTES, MAX_RANKS
from inferd.engine.api.process.processor_time import ProcessorTime
from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.sched.plan import Admission, Row, StepPlan, TableUpdate
from inferd.engine.worker import followers
from inferd.engine.worker.followers import PLANS, Followers, Link, StoppedError
from inferd.kernels.ops import gather
from inferd.kernels.ops.gather import exchange_bytes
from tests.cpu.ranks import alone_in_a_group
from tests.cpu.test_engine import Engine, neighbours, prompt, request, run, save

pytestmark = pytest.mark.usefixtures("_cpp")


@pytest.fixture
def _cpp(kernels: str) -> None:
    if kernels != "cpp":
        pytest.skip("ranks of a CPU exchange by a C++ kernel")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(
    scope="module",
    params=[
        ("bfloat16", 2, "memory"),
        ("bfloat16", 2, "group"),
        pytest.param(("float32", 4, "memory"), marks=pytest.mark.long),
        pytest.param(("float32", 4, "group"), marks=pytest.mark.long),
    ],
    ids=lambda param: "-".join(map(str, param)),
)
def engines(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """(one process, several)."""
    dtype, count, exchange = request.param
    with alone_in_a_group():
        shared = Engine.load(checkpoint, dtype, num_threads=count, tensor_parallel_size=count, exchange=exchange)
        yield Engine.load(checkpoint, dtype), shared
        shared.runner.close()


@pytest.mark.sampled(keep=2)
def test_every_request_has_the_bits_of_one_process(engines: tuple[Engine, Engine]) -> None:
    alone, shared = engines
    target = request("x", prompt(1, 75), temperature=0.9, top_p=0.8, presence_penalty=0.5, prompt_logprobs=2)
    crowd = [*neighbours(12), target, request("y", prompt(1, 75)), request("z", prompt(2, 40), temperature=1.0)]
    expected = run(alone.core(), *crowd)
    assert run(shared.core(), *crowd) == expected
    assert run(shared.core(max_num_batched_tokens=33), *crowd) == expected, "in chunks"
    assert run(shared.core(depth=0), target)["x"] == expected["x"], "alone, without overlap"

    warm = shared.core()
    run(warm, request("earlier", (*prompt(1, 75)[:60], 1, 2, 3)))
    assert run(warm, request("y", prompt(1, 75)))["y"] == expected["y"], "with a prefix hit"
    assert warm.stats().prefix_hit_tokens == 48

    tight = shared.core(num_blocks=10)
    rivals = [request(f"r{i}", prompt(200 + i, 40)) for i in range(3)]
    assert run(tight, *rivals, request("y", prompt(1, 75)))["y"] == expected["y"], "after preemption"
    assert tight.stats().num_preemptions > 0


def test_decode_steps_are_recorded_on_ranks_that_share_memory(engines: tuple[Engine, Engine]) -> None:
    _, shared = engines
    run(shared.core(), request("x", prompt(3, 5)))
    is_recorded = shared.config.exchange == "memory"
    assert (1 in shared.runner._graphs.recorded_rows) == is_recorded
    assert (shared.runner._graphs.refusal is None) == is_recorded


def test_a_rank_that_cannot_load_fails_the_engine_with_its_message(tmp_path: Path) -> None:
    """The last row of the head is rank 1's alone."""
    save(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][-1] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    before = psutil.Process().children()
    with pytest.raises(ModelError, match=r"rank 1: .*lm_head.weight must hold finite numbers"):
        Engine.load(tmp_path, "float32", num_threads=2, tensor_parallel_size=2)
    assert psutil.Process().children() == before, "nothing is left"


@pytest.mark.skipif(sys.platform != "linux", reason="no other system limits another process")
def test_a_rank_out_of_memory_fails_the_engine_with_its_message(checkpoint: Path) -> None:
    """The rank may map less memory than its part of the KV cache. The cache's pages are never touched."""
    kv_bytes = Machine.detect().memory_total_bytes // 2
    ranks: list[int] = []
    begin = Followers._start

    def limited(followers: Followers, index: int, *, is_urgent: bool) -> None:
        begin(followers, index, is_urgent=is_urgent)
        ranks.append(followers._all[-1].process.pid)
        resource.prlimit(ranks[-1], resource.RLIMIT_AS, (kv_bytes // 2, kv_bytes // 2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Followers, "_start", limited)
        patch.setattr(Machine, "detect", lambda: Machine(2, 2**40, 2**40))
        with pytest.raises(CapacityError, match=r"^rank 1: the KV cache of .* could not be allocated .* --kv-memory"):
            Engine.load(checkpoint, "float32", num_threads=2, tensor_parallel_size=2, kv_memory_bytes=kv_bytes)
    assert not any(map(psutil.pid_exists, ranks)), "nothing is left"


@pytest.mark.parametrize("exchange", ["memory", "group"])
def test_a_rank_that_dies_early_fails_the_engine(checkpoint: Path, exchange: str) -> None:
    """The others do not wait for it in their process group."""
    begin = Followers._start

    def killed(followers: Followers, index: int, *, is_urgent: bool) -> None:
        begin(followers, index, is_urgent=is_urgent)
        followers._all[-1].process.kill()

    with pytest.MonkeyPatch.context() as patch, alone_in_a_group():
        patch.setattr(Followers, "_start", killed)
        with pytest.raises(StartError, match="rank 1 was killed by SIGKILL while it loaded its part"):
            Engine.load(checkpoint, "float32", num_threads=2, tensor_parallel_size=2, exchange=exchange)


def test_a_plan_is_the_same_on_the_other_side_of_a_link() -> None:
    params = SamplingParams(max_tokens=5, seed=2**53 - 1, logit_bias=((1, 0.1),), bad_words=((1, 2), (3,)))
    admission = Admission(3, "x", tuple(range(100_000)), 7, params)
    plan = StepPlan(9, (admission,), (TableUpdate(3, 1, 0, (4, 5)),), (Row(3, 0, 7, False), Row(1, 5, 1, True)))
    ours, theirs = socket.socketpair()
    with theirs:
        sender = threading.Thread(target=Link(ours).send, args=(plan,))
        sender.start()
        body = Link(theirs).receive()
        sender.join()
        ours.close()
        assert body is not None and PLANS.decode(body) == plan
        assert Link(theirs).receive() is None


def test_a_link_tells_a_stop_from_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "_TICK_S", 0.01)
    monkeypatch.setattr(followers, "_MAX_STOPPED_S", 0.05)
    ours, theirs = socket.socketpair()
    link = Link(ours)
    with subprocess.Popen(("sleep", "60")) as process:
        sender = ProcessorTime(process.pid)
        try:
            with theirs:
                Link(theirs).send_encoded(b"")
                assert link.receive(sender) == b"", "its libraries are imported"
                process.send_signal(signal.SIGSTOP)
                with pytest.raises(StoppedError, match=r"was stopped for 0\.05 s"):
                    link.receive(sender)
            assert link.receive(sender) is None
        finally:
            process.kill()
    ours.close()


def test_the_exchange_is_as_large_as_planned() -> None:
    assert exchange_bytes(3) == EXCHANGE_HEADER_BYTES + 3 * EXCHANGE_BYTES
    assert gather.MAX_RANKS == MAX_RANKS
