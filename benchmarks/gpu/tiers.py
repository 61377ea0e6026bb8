"""The tier in host memory on the device: its copies give the same bytes, how fast they are, what pinning costs, and an
engine that loads evicted prefixes gives the tokens of one that computes them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.checks import EQUAL
from benchmarks.gpu.models import BLOCK_SIZE, MODELS, Engine, greedy, random_decoder, random_ids, run
from benchmarks.gpu.points import Case, Trial
from inferd.engine.cache.below import PIECE_BLOCKS
from inferd.engine.cache.table import KVCache
from inferd.engine.process.host_store import HostStore
from inferd.engine.process.kv_host import HostTier
from inferd.engine.worker.device_memory import DeviceMemory

_CHUNK_BYTES = 64 * 2**20
_NUM_PROMPTS, _NUM_NEW = 4, 8
_WAIT_S = 60.0


def tiers(bench: Bench) -> None:
    """Copies of a piece of 8 billion weights' KV in bf16, a chunk that is pinned, and the whole engine."""
    for direction in ("to the host", "to the device"):
        labels = {"copy": direction}
        bench.measure(Case(table="KV tiers", labels=labels), partial(_copies, bench, direction == "to the host"))
    bench.measure(Case(table="KV tiers", labels={"copy": "64 MiB pinned"}), lambda: _pinned(bench))
    labels = {"check": "loaded prefixes give the tokens of computed ones", "model": bench.pick("0.6b", "smoke")}
    bench.measure(Case(table="engine checks", labels=labels), lambda: _engine(bench))


def _copies(bench: Bench, is_fetch: bool) -> Trial:
    """The bytes that differ from those of torch's own copy, and the bandwidth."""
    planes, num_blocks = bench.pick(32, 2), 2 * PIECE_BLOCKS
    shape = (planes, num_blocks, 2, 8, BLOCK_SIZE, 128)
    pool = torch.randint(-128, 127, shape, dtype=torch.int8, device=bench.device)
    memory = DeviceMemory(bench.device)
    memory.hold(pool, 0, num_blocks, (planes,))
    rows = [(2 * block, 0) for block in range(PIECE_BLOCKS)]
    goals = [(2 * block + 1, 0) for block in range(PIECE_BLOCKS)]
    buffers = memory.buffers(rows)
    _synchronize(bench)
    memory.fetch(rows, buffers)
    wrong = sum(
        bytes(parts[0]) != pool[:, place].cpu().numpy().tobytes()
        for (place, _), parts in zip(rows, buffers, strict=True)
    )
    copy = partial(memory.fetch, rows, buffers) if is_fetch else partial(memory.store, goals, buffers)
    seconds = _median_s(copy)
    if not is_fetch:
        wrong += int((pool[:, 1::2] != pool[:, ::2]).sum())
    num_bytes = pool[:, ::2].nbytes
    return Trial(seconds=seconds, error=float(wrong), tolerance=EQUAL, figures={"bytes/s": num_bytes / seconds})


def _median_s(call: Callable[[], object]) -> float:
    taken_s = []
    for _ in range(9):
        started_s = time.perf_counter()
        call()
        taken_s.append(time.perf_counter() - started_s)
    return statistics.median(taken_s)


def _pinned(bench: Bench) -> Trial:
    """The first allocation of its size: torch keeps and reuses freed ones."""
    memory, started_s = DeviceMemory(bench.device), time.perf_counter()
    chunk = memory.allocate(_CHUNK_BYTES)
    return Trial(seconds=time.perf_counter() - started_s, note=f"{len(chunk)} bytes")


def _engine(bench: Bench) -> Trial:
    """Tokens that differ. Each prompt comes again after others have evicted it."""
    num_tokens = bench.pick(1500, 300)
    decoder = random_decoder(MODELS[bench.pick("0.6b", "smoke")], bench.device, "bf16", 2048)
    # It has room for one prompt.
    engine = Engine.around(decoder, 1, num_tokens + _NUM_NEW, is_deterministic=True)
    prompts = [random_ids(num_tokens, engine.vocab_size, seed) for seed in range(_NUM_PROMPTS)]
    submits = [greedy(str(number), ids, _NUM_NEW) for number, ids in enumerate(prompts)]
    made: list[HostTier] = []

    def make(cache: KVCache) -> HostTier:
        memory = engine.runner.copied(cache.pool.num_blocks, 0)
        store = HostStore(bench.pick(2**31, 2**28), memory.block_bytes, memory.allocate)
        made.append(HostTier(store, memory, cache.num_erased, len(cache.windows)))
        return made[0]

    with engine.core() as core:
        expected = [run(core, [submit]) for submit in submits]
    with engine.core(tier=make) as core:
        assert core._loads is not None
        core._loads._seconds_to_compute = lambda _: _WAIT_S  # a load always pays
        found = []
        for _ in range(2):
            found = [_run_and_wait(core_run, made[0]) for core_run in (partial(run, core, [one]) for one in submits)]
        num_loaded = core.stats().tier_loaded_tokens
    if not num_loaded:
        return Trial.missing("nothing was loaded")
    wrong = sum(one != other for one, other in zip(expected, found, strict=True))
    return Trial(error=float(wrong), tolerance=EQUAL, note=f"{num_loaded} tokens loaded")


def _run_and_wait(core_run: Callable[[], dict[str, tuple[int, ...]]], tier: HostTier) -> dict[str, tuple[int, ...]]:
    """Run a request, and wait until its KV is copied."""
    answers, until_s = core_run(), time.monotonic() + _WAIT_S
    while tier.num_waiting and time.monotonic() < until_s:
        time.sleep(0.001)
    return answers


def _synchronize(bench: Bench) -> None:
    if bench.is_on_gpu:
        torch.cuda.synchronize()
