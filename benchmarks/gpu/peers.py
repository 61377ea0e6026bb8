"""The same load on the same checkpoint through inferd and through transformers' continuous batching, in one run.

Both get prompts as ids and draw greedily, without HTTP. A round of the same size warms each up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import floors
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import MODELS, Engine, Model, checkpoint, greedy, random_ids, run
from benchmarks.gpu.points import Case, Trial
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.arch.registry import describe
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import load


@dataclass(frozen=True, slots=True)
class Offline:
    """Requests that all arrive at once."""

    num_requests: int
    input_len: int
    output_len: int

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        first = seed * self.num_requests
        return [list(random_ids(self.input_len, vocab_size, first + index)) for index in range(self.num_requests)]


LOADS = (Offline(1, 1024, 128), Offline(32, 1024, 128), Offline(128, 1024, 128))
_TINY = (Offline(1, 20, 4), Offline(3, 20, 4))
_ROUND_TIMEOUT_S = 120.0

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, tokens of each) -> ids of each."""


def ours(bench: Bench, model: str) -> None:
    loads, chosen = bench.pick(LOADS, _TINY), MODELS[bench.pick(model, "smoke")]
    made: list[Engine] = []

    def trial(load: Offline) -> Trial:
        if not made:
            longest = max(load.input_len + load.output_len for load in loads)
            made.append(Engine.around(_decoder(bench, chosen, longest), max(a.num_requests for a in loads), longest))

        def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
            with made[0].core() as core:
                answers = run(core, [greedy(str(i), ids, count) for i, ids in enumerate(prompts)])
            return [list(answers[str(i)]) for i in range(len(prompts))]

        return _two_rounds(generate, chosen, load)

    _measure(bench, model, "inferd", loads, trial)


def _decoder(bench: Bench, model: Model, longest: int) -> Decoder:
    stored = Checkpoint.read(checkpoint(model, bench.device))
    decoder = Decoder(describe(stored.config), torch.bfloat16, bench.device, longest)
    load(decoder, stored.tensors)
    return decoder


def transformers_batching(bench: Bench, model: str) -> None:
    """transformers with its own choice of attention, graphs and memory, given the size of the load."""
    loads, chosen = bench.pick(LOADS, _TINY), MODELS[bench.pick(model, "smoke")]
    made: list[Any] = []

    def trial(load: Offline) -> Trial:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        if not made:
            path = checkpoint(chosen, bench.device)
            with torch.inference_mode(False):
                loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
                made.append(loaded.to(bench.device).eval())
        with torch.inference_mode(False):
            return _batched(made[0], chosen, load)

    _measure(bench, model, "transformers", loads, trial)


def _batched(model: Any, chosen: Model, load: Offline) -> Trial:
    from transformers import GenerationConfig  # noqa: PLC0415
    from transformers.generation.continuous_batching.utils import WorkloadHints  # noqa: PLC0415

    make_config: Callable[..., Any] = GenerationConfig
    config = make_config(
        max_new_tokens=load.output_len, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    hints = WorkloadHints(load.input_len, load.output_len, load.num_requests)
    with model.continuous_batching_context_manager(
        generation_config=config, workload_hints=hints, block=True, timeout=5, warmup=True
    ) as manager:

        def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
            names = manager.add_requests(inputs=prompts, max_new_tokens=count)
            answers: dict[str, list[int]] = {}
            until_s = time.monotonic() + _ROUND_TIMEOUT_S
            while len(answers) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    answers[result.request_id] = list(result.generated_tokens)
                elif not manager.is_running() or time.monotonic() > until_s:
                    raise RuntimeError(f"{len(answers)} of {len(names)} requests were answered")
            return [answers[name] for name in names]

        trial = _two_rounds(generate, chosen, load)
    note = f"attention: {model.config._attn_implementation}"
    return Trial(seconds=trial.seconds, error=trial.error, tolerance=0.0, note=note)


def _two_rounds(generate: Generate, model: Model, load: Offline) -> Trial:
    """Two rounds with different prompts, so that no prefix is cached."""
    generate(load.prompts(model.shape.vocab_size, 1), load.output_len)
    prompts = load.prompts(model.shape.vocab_size, 2)
    started_s = time.perf_counter()
    answers = generate(prompts, load.output_len)
    seconds = time.perf_counter() - started_s
    error = abs(sum(map(len, answers)) / (load.num_requests * load.output_len) - 1)
    return Trial(seconds=seconds, error=error, tolerance=0.0)


def _measure(bench: Bench, model: str, by: str, loads: Sequence[Offline], trial: Callable[[Offline], Trial]) -> None:
    shape = MODELS[bench.pick(model, "smoke")].shape
    for asked in loads:
        n, i, o = asked.num_requests, asked.input_len, asked.output_len
        labels = {"model": model, "load": f"{n} x {i} in, {o} out", "by": by}
        phases = floors.load_phases(shape, "bf16", n, n, i, o)
        case = Case(table="beside transformers", labels=labels, phases=phases, amount=float(n * o))
        bench.measure(case, partial(trial, asked))
