"""The whole engine between a request and its tokens, without HTTP: decodes, prompts, offline loads.

Time is the host's over consecutive steps, so it includes scheduling that does not overlap with the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch

from benchmarks.gpu import floors
from benchmarks.gpu.attention import KV_DTYPES
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import MODELS, Engine, greedy, new_ids, random_decoder, random_ids, run
from benchmarks.gpu.points import Case, Phase, Trial
from inferd.engine.core.loop import EngineCore
from inferd.engine.models.decoder import Decoder
from inferd.engine.worker.tuning import Tuning
from inferd.kernels.ops.linear import Choices

BATCHES = (1, 8, 32, 64, 256)
CONTEXT = 1024
_WARM_STEPS, _TIMED_STEPS = 16, 64


class Loaded:
    """One model in one precision, loaded when a case first needs it."""

    def __init__(
        self, bench: Bench, model: str, precision: str, *, kv: str = "bf16", is_deterministic: bool = False
    ) -> None:
        bench.require(precision, kv)
        self.bench, self.model, self.precision = bench, MODELS[bench.pick(model, "smoke")], precision
        self.shape, self.name, self.kv, self.is_deterministic = self.model.shape, model, kv, is_deterministic

    @cached_property
    def decoder(self) -> Decoder:
        """With the table of products that serving uses, completed for this model's shapes."""
        has_table = self.bench.device.type == "cuda" and not self.is_deterministic
        tuning = Tuning.of_user(torch.bfloat16) if has_table else None
        choices = Choices(self.is_deterministic, None if tuning is None else tuning.table)
        longest = self.bench.pick(40_960, 1024)
        decoder = random_decoder(self.model, self.bench.device, self.precision, longest, choices)
        if tuning is not None:
            tuning.complete()
        return decoder

    def engine(self, num_seqs: int, max_len: int) -> Engine:
        return Engine.around(
            self.decoder,
            num_seqs,
            max_len,
            is_deterministic=self.is_deterministic,
            kv_dtype=KV_DTYPES[self.kv],
        )

    def case(self, point: str, phases: Sequence[Phase], amount: float) -> Case:
        mode = "deterministic" * self.is_deterministic + f"KV in {self.kv}" * (self.kv != "bf16")
        labels = {"model": self.name, "precision": self.precision, "mode": mode, "point": point}
        goal = "" if mode else floors.goal(self.name, self.precision, point)
        return Case(table="engine", labels=labels, goal=goal, phases=phases, amount=amount)


def decode(
    bench: Bench,
    model: str,
    precision: str,
    batches: Sequence[int] = BATCHES,
    kv: str = "bf16",
    is_deterministic: bool = False,
) -> None:
    """Tokens a second while `batch` requests decode at a context of 1,024, without prompts between them."""
    loaded = Loaded(bench, model, precision, kv=kv, is_deterministic=is_deterministic)
    context, steps = bench.pick(CONTEXT, 40), bench.pick(_WARM_STEPS + _TIMED_STEPS, 8)
    batches = bench.pick(batches, (1, 3))
    made: list[Engine] = []
    for batch in batches:
        phases = floors.decode_phases(loaded.shape, precision, batch, context, kv)
        case = loaded.case(f"decode {batch} x {context}", phases=phases, amount=float(batch))

        def trial(batch: int = batch) -> Trial:
            if not made:
                made.append(loaded.engine(max(batches), context + 2 * steps))
            return _decode(made[0], batch, context - steps, steps, bench.pick(_TIMED_STEPS, 4))

        bench.measure(case, trial)


@contextmanager
def decoding(engine: Engine, batch: int, prompt_len: int, max_tokens: int) -> Iterator[EngineCore]:
    """A core in which `batch` requests have their first token and go on."""
    with engine.core() as core:
        for index in range(batch):
            ids = random_ids(prompt_len, engine.vocab_size, 1000 * batch + index)
            core.submit(greedy(str(index), ids, max_tokens), 0.0)
        started: set[str] = set()
        while len(started) < batch:
            started.update(name for name, ids in new_ids(core.step(0.0)) if ids)
        yield core
        core.abort([str(index) for index in range(batch)])
        while core.has_work:
            core.step(0.0)


def _decode(engine: Engine, batch: int, prompt_len: int, steps: int, timed_steps: int) -> Trial:
    if engine.num_seqs < batch:
        return Trial(note=f"the memory holds {engine.num_seqs} sequences")
    with decoding(engine, batch, prompt_len, 2 * steps) as core:
        for _ in range(steps - timed_steps):
            core.step(0.0)
        taken_s, num_tokens = [], 0
        last_s = time.perf_counter()
        for _ in range(timed_steps):
            num_tokens += sum(len(ids) for _, ids in new_ids(core.step(0.0)))
            now_s = time.perf_counter()
            taken_s.append(now_s - last_s)
            last_s = now_s
    error = abs(num_tokens / (batch * timed_steps) - 1)
    figures = {"slowest step ms": max(taken_s) * 1e3}
    return Trial(seconds=sum(taken_s) / timed_steps, error=error, tolerance=0.0, figures=figures)


def prefill(bench: Bench, model: str, precision: str, lengths: Sequence[int], is_deterministic: bool = False) -> None:
    """Tokens a second of prompts, each followed by one drawn token."""
    loaded = Loaded(bench, model, precision, is_deterministic=is_deterministic)
    for length in bench.pick(lengths, (64,)):
        prompts = max(3, bench.pick(32_768, 0) // length)
        phases = floors.prefill_phases(loaded.shape, precision, prompts, length)
        case = loaded.case(f"prefill {length}", phases=phases, amount=float(prompts * length))

        def trial(length: int = length, prompts: int = prompts) -> Trial:
            engine = loaded.engine(prompts, length + 2)
            prompt_ids = [random_ids(length, engine.vocab_size, 7 * length + index) for index in range(prompts + 1)]
            with engine.core() as core:
                run(core, [greedy("warm", prompt_ids[-1], 2)])
            with engine.core() as core:
                submits = [greedy(str(index), ids, 1) for index, ids in enumerate(prompt_ids[:-1])]
                started_s = time.perf_counter()
                run(core, submits)
                return Trial(seconds=time.perf_counter() - started_s)

        bench.measure(case, trial)


def offline(bench: Bench, model: str, precision: str) -> None:
    """All requests at once, 1,024 tokens in and 1,024 out: output tokens a second from the first token to the last."""
    loaded = Loaded(bench, model, precision)
    length, requests = bench.pick(1024, 24), bench.pick(512, 4)
    num_seqs = bench.pick(256, 2)
    phases = floors.load_phases(loaded.shape, precision, num_seqs, requests, length, length)
    case = loaded.case("offline", phases=phases, amount=float(requests * length))

    def trial() -> Trial:
        engine = loaded.engine(num_seqs, 2 * length)
        submits = [greedy(str(i), random_ids(length, engine.vocab_size, i), length) for i in range(requests)]
        with engine.core() as core:
            run(core, [greedy("warm", random_ids(length, engine.vocab_size, requests), 8)])
            started_s = time.perf_counter()
            answers = run(core, submits)
            seconds = time.perf_counter() - started_s
        error = abs(sum(map(len, answers.values())) / (requests * length) - 1)
        note = f"{engine.num_seqs} at a time" + (f", the floor counts {num_seqs}" * (engine.num_seqs != num_seqs))
        return Trial(seconds=seconds, error=error, tolerance=0.0, note=note)

    bench.measure(case, trial)
