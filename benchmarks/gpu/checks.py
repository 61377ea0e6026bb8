"""Checks of whole parts on the device: every kernel's tests, and what the engine promises of its tokens."""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, distance
from benchmarks.gpu.linears import shapes
from benchmarks.gpu.models import BLOCK_SIZE, MODELS, Engine, greedy, open_device, random_decoder, random_ids, run
from benchmarks.gpu.points import Case, Trial
from benchmarks.gpu.tree import ROOT
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.arch.registry import describe
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import StoredTensor, load
from inferd.engine.worker.graphs import StepGraphs
from inferd.engine.worker.kv import KVPool
from inferd.kernels.linear import Choices, linear
from inferd.kernels.paged_attention import AttentionBatch

ROWS = (1, 2, 3, 8, 17, 64, 256, 512)
"""Numbers of rows at which a row's bits are compared."""
EQUAL = 0.0
_DETERMINISTIC = ("deterministic", "is_deterministic", "is_invariant")
"""What functions call the wish that a row's bits depend on nothing but the row."""


# -- tests -------------------------------------------------------------------------------------------------------------


class _Tally:
    """Counts tests as pytest reports them."""

    def __init__(self) -> None:
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.first_failure = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed and not self.first_failure:
            self.first_failure = f"{report.nodeid}: {report.longreprtext.strip().splitlines()[-1]}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.counts["failed"] += 1
            self.first_failure = self.first_failure or str(report.longrepr).strip().splitlines()[-1]


def kernel_tests(bench: Bench, file: str, is_long: bool = False) -> None:
    """tests/kernels/<file>: what is of Triton in it, on the device; without a GPU the interpreter runs it."""
    path = ROOT / "tests" / "kernels" / file

    def trial() -> Trial:
        if not path.exists():
            return Trial(error=math.inf, tolerance=EQUAL, note=f"there is no {file}")
        tally = _Tally()
        options = ["--device", "cuda" if bench.device.type == "cuda" else "interpreter"]
        # Without the project's options: a machine may lack the plugins that they are of.
        bare = ["-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider", "-q", "--rootdir", str(ROOT)]
        with torch.inference_mode(False):
            code = pytest.main([*bare, *options, *(["--long"] * is_long), str(path)], plugins=[tally])
        counts = tally.counts
        if code == pytest.ExitCode.NO_TESTS_COLLECTED:
            return Trial(note="no test of it runs here")
        failed = float(counts["failed"]) or float(code != 0)
        note = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        return Trial(error=failed, tolerance=EQUAL, note=f"{note}{': ' * bool(failed)}{tally.first_failure}")

    bench.measure(Case(table="kernel tests", labels={"tests": file}), trial)


# -- the engine --------------------------------------------------------------------------------------------------------


_SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
_NEW = 24


@contextmanager
def _checkpoint(family: str) -> Iterator[Path]:
    """A random one whose logits are far from ties: weights three times their usual size."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    torch.manual_seed(7)
    with torch.inference_mode(False), tempfile.TemporaryDirectory() as folder:
        model: Any = (
            LlamaForCausalLM(LlamaConfig(**_SMALL))
            if family == "llama"
            else Qwen3ForCausalLM(Qwen3Config(**_SMALL, head_dim=64, use_sliding_window=False))
        )
        for parameter in model.parameters():
            parameter.data.mul_(3)
        model.save_pretrained(folder)
        yield Path(folder)


def _load(path: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    checkpoint = Checkpoint.read(path)
    decoder = Decoder(describe(checkpoint.config), dtype, device)
    load(decoder, {t.name: StoredTensor(t.file, t.dtype, t.shape) for t in checkpoint.tensors.values()})
    return decoder


def greedy_ids(bench: Bench, family: str) -> None:
    """Ids of 16 requests at once and of one alone equal transformers' own, in float32, where no tie is near; and in
    bf16 the logits are as near to float64's as transformers' are."""
    labels = {"check": "greedy ids are transformers' (fp32)", "model": family}
    bench.measure(Case(table="engine checks", labels=labels), lambda: _greedy(bench, family))
    labels = {"check": "logits as near to fp64 as transformers' (bf16)", "model": family}
    bench.measure(Case(table="engine checks", labels=labels), lambda: _nearness(bench, family))


def _reference(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.to(device).eval()


def _greedy(bench: Bench, family: str) -> Trial:
    prompts = [random_ids(3 + 9 * index, _SMALL["vocab_size"], index) for index in range(bench.pick(16, 4))]
    with _checkpoint(family) as path:
        model = _reference(path, torch.float32, bench.device)
        expected = []
        for ids in prompts:
            given = torch.tensor([ids], device=bench.device)
            mask = torch.ones_like(given)
            out = model.generate(given, attention_mask=mask, max_new_tokens=_NEW, do_sample=False, pad_token_id=0)
            expected.append(tuple(out[0, len(ids) :].tolist()))
        engine = Engine.around(_load(path, torch.float32, bench.device), len(prompts), 256)
        submits = [greedy(str(index), ids, _NEW) for index, ids in enumerate(prompts)]
        with engine.core() as core:
            together = run(core, submits)
        with engine.core() as core:
            alone = run(core, submits[-1:])
    wrong = sum(together[str(index)] != ids for index, ids in enumerate(expected))
    wrong += alone[str(len(prompts) - 1)] != expected[-1]
    kinds = len({token for ids in expected for token in ids})
    return Trial(error=float(wrong), tolerance=EQUAL, note=f"{len(expected)} requests, {kinds} different tokens")


def _nearness(bench: Bench, family: str) -> Trial:
    """The ratio of the two distances."""
    ids = random_ids(200, _SMALL["vocab_size"], 5)
    with _checkpoint(family) as path:
        given = torch.tensor([ids], device=bench.device)
        theirs = _reference(path, torch.bfloat16, bench.device)(given).logits[0]
        exact = _reference(path, torch.float64, bench.device)(given).logits[0]
        decoder = _load(path, torch.bfloat16, bench.device)
        paged = _Paged(decoder, 1, len(ids))
        hidden = decoder.forward(given[0], paged.batches([(0, len(ids))]), paged.kv)
        ours = decoder.logits(hidden)
    ratio = distance(ours, exact) / distance(theirs, exact)
    return Trial(error=ratio, tolerance=1.5, note=f"transformers is {distance(theirs, exact):.1e} off")


def overlap(bench: Bench) -> None:
    """Planning a step while the one before runs changes no token and no logprob, of any kind of request."""
    labels = {"check": "overlapped steps give the tokens of serial ones", "model": "qwen3"}

    def trial() -> Trial:
        with _checkpoint("qwen3") as path:
            engine = Engine.around(_load(path, torch.bfloat16, bench.device), 32, 256)
            kinds: Sequence[dict[str, Any]] = (
                {},
                {"temperature": 1.0, "seed": 5},
                {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
                {"temperature": 1.3, "top_k": 20},
            )
            submits = [
                greedy(str(i), random_ids(1 + 7 * i % 90, _SMALL["vocab_size"], i), _NEW, **kinds[i % 4])
                for i in range(bench.pick(32, 6))
            ]
            found = []
            for depth in (1, 0):
                with engine.core(depth=depth) as core:
                    found.append(run(core, submits))
        wrong = sum(found[0][name] != found[1][name] for name in found[0])
        return Trial(error=float(wrong), tolerance=EQUAL, note=f"{len(submits)} requests")

    bench.measure(Case(table="engine checks", labels=labels), trial)


class _Paged:
    """A pool of random numbers for `num_rows` sequences of up to `length`: neighbours' KV is whatever lies there."""

    def __init__(self, decoder: Decoder, num_rows: int, length: int) -> None:
        arch, device = decoder.arch, decoder.device
        width = -(-length // BLOCK_SIZE)
        shape = (arch.num_layers, num_rows * width + 1, 2, arch.num_kv_heads, BLOCK_SIZE, arch.head_dim)
        self.kv = torch.randn(shape, device=device).to(decoder.dtype)
        blocks = torch.arange(num_rows * width, device=device)
        self.tables, self._groups = blocks.reshape(num_rows, width).to(torch.int32), len(arch.cache_groups)
        self.padding_block = num_rows * width

    def batches(self, rows: Sequence[tuple[int, int]], order: Sequence[int] | None = None) -> list[AttentionBatch]:
        """Of rows (start, tokens); `order`: whose tables they have."""
        tables = self.tables[list(order) if order is not None else list(range(len(rows)))]
        return [AttentionBatch.build(rows, tables, BLOCK_SIZE, tables.device) for _ in range(self._groups)]


def graphs(bench: Bench) -> None:
    """A replayed step gives the bits of the calls it was captured from."""
    model = bench.pick("0.6b", "smoke")
    buckets, padded, context = bench.pick((1, 2, 4, 8, 16, 64), (1, 2)), bench.pick(13, 3), bench.pick(500, 40)
    kept: list[tuple[Decoder, _Paged, StepGraphs]] = []
    for rows in (*buckets, padded):
        labels = {"check": f"a graph of {rows} rows gives the bits of its calls", "model": model}

        def trial(rows: int = rows) -> Trial:
            if not kept:
                decoder = random_decoder(MODELS[model], bench.device, "bf16", 1024)
                paged = _Paged(decoder, max(*buckets, padded), context)
                pool = KVPool(paged.kv, padding_block=paged.padding_block)
                kept.append((decoder, paged, StepGraphs(decoder, pool, open_device(bench.device))))
            decoder, paged, step_graphs = kept[0]
            spans = [(context - 1 - 3 * row % 17, 1) for row in range(rows)]
            worst = 0
            for _ in range(3):
                ids = torch.randint(0, decoder.arch.vocab_size, (rows,), device=bench.device)
                eager = decoder.forward(ids, paged.batches(spans), paged.kv).clone()
                replayed = step_graphs.forward(ids, paged.batches(spans))
                worst += int((replayed != eager).any(1).sum())
            if step_graphs.refusal is not None:
                return Trial(note=f"not recorded: {step_graphs.refusal}")
            if rows == padded:
                note = f"{worst} rows of {3 * rows} differ: the step is padded to another number of rows"
                return Trial(note=note if worst else "equal, though padded")
            return Trial(error=float(worst), tolerance=EQUAL, note="rows that differ, of 3 steps")

        bench.measure(Case(table="engine checks", labels=labels), trial)


# -- batch invariance --------------------------------------------------------------------------------------------------


def _option(function: Callable[..., Any]) -> dict[str, bool] | None:
    """How a function is asked for determinism; None where it takes no such wish."""
    names = inspect.signature(function).parameters
    found = next((name for name in _DETERMINISTIC if name in names), None)
    return None if found is None else {found: True}


def invariant_linears(bench: Bench, precision: str) -> None:
    """A row's bits in every linear shape, at each number of rows, among random neighbours; promised where asked for."""
    for model in ("8b", "0.6b"):
        chosen = MODELS[bench.pick(model, "smoke")]
        for (name, (in_size, out_size)), is_asked in (
            (shape, is_asked) for shape in shapes(chosen).items() for is_asked in (False, True)
        ):
            mode = "deterministic" if is_asked else "as it comes"
            labels = {"what": f"{model} {name} {in_size}x{out_size}", "precision": precision, "mode": mode}
            case = Case(table="batch invariance", labels=labels)
            bench.measure(case, lambda i=in_size, o=out_size, a=is_asked: _linear_rows(bench, i, o, a, precision))


def _linear_rows(bench: Bench, in_size: int, out_size: int, is_asked: bool, precision: str) -> Trial:
    try:
        bind, option = _binder(precision)
    except ModuleNotFoundError:
        return Trial(note=f"{precision}: not offered")
    if is_asked and option is None:
        return Trial(note="not offered")
    weight = torch.randn(out_size, in_size, dtype=torch.bfloat16, device=bench.device).mul_(in_size**-0.5)
    apply = bind(weight, option if is_asked and option else {})

    def compute(x: Tensor) -> Tensor:
        return apply(x)

    target = torch.randn(1, in_size, dtype=torch.bfloat16, device=bench.device)
    return _compare_rows(bench, compute, target, is_asked)


def _binder(precision: str) -> tuple[Callable[[Tensor, dict[str, bool]], Callable[[Tensor], Tensor]], Any]:
    if precision == "bf16":
        return lambda weight, option: linear(weight, None, Choices(**option)), _option(Choices)
    from inferd.kernels.linear_fp8 import linear_fp8, quantize_weight  # noqa: PLC0415

    def bind(weight: Tensor, option: dict[str, bool]) -> Callable[[Tensor], Tensor]:
        return linear_fp8(*quantize_weight(weight), None, torch.bfloat16, **option)

    return bind, _option(linear_fp8)


def _compare_rows(bench: Bench, compute: Callable[[Tensor], Tensor], target: Tensor, is_asked: bool) -> Trial:
    """How the target's bits at each number of rows compare with those alone."""
    alone = compute(target)[0]
    differing = []
    for rows in bench.pick(ROWS, ROWS[:5]):
        for _ in range(2):
            place = int(torch.randint(0, rows, ()))
            x = torch.randn(rows, *target.shape[1:], dtype=torch.float32, device=bench.device).to(target.dtype)
            x[place] = target[0]
            if not torch.equal(compute(x)[place], alone):
                differing.append(rows)
                break
    return _invariance(differing, is_asked)


def _invariance(differing: Sequence[int], is_asked: bool) -> Trial:
    note = f"other bits at {', '.join(map(str, differing))} rows" if differing else "the same bits at every number"
    if is_asked:
        return Trial(error=float(len(differing)), tolerance=EQUAL, note=note)
    return Trial(note=f"{note}; not promised")


def invariant_decoder(bench: Bench) -> None:
    """The logits of one decode, whole model, among others' decodes."""
    model = bench.pick("0.6b", "smoke")
    for is_asked in (False, True):
        mode = "deterministic" if is_asked else "as it comes"
        labels = {"what": f"decoder {model}", "precision": "bf16", "mode": mode}
        bench.measure(Case(table="batch invariance", labels=labels), lambda a=is_asked: _decoder_rows(bench, model, a))


def _decoder_rows(bench: Bench, model: str, is_asked: bool) -> Trial:
    option = _option(Decoder.__init__) if is_asked else {}
    if option is None:
        return Trial(note="not offered")
    rows, context = bench.pick(ROWS, ROWS[:5]), bench.pick(300, 40)
    decoder = random_decoder(MODELS[model], bench.device, "bf16", 1024, **option)
    paged = _Paged(decoder, max(rows), context)
    target_id, spans = 17, [(context - 1, 1)]

    def logits(order: Sequence[int], ids: Tensor) -> Tensor:
        hidden = decoder.forward(ids, paged.batches(spans * len(order), order), paged.kv)
        return decoder.logits(hidden)

    alone = logits([0], torch.tensor([target_id], device=bench.device))[0]
    differing = []
    for count in rows:
        place = int(torch.randint(0, count, ()))
        order = [*range(1, place + 1), 0, *range(place + 1, count)]
        ids = torch.randint(0, decoder.arch.vocab_size, (count,), device=bench.device)
        ids[place] = target_id
        if not torch.equal(logits(order, ids)[place], alone):
            differing.append(count)
    return _invariance(differing, is_asked)
