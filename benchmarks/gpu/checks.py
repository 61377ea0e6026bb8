"""Checks of whole parts on the device: every kernel's tests, and the engine's promises about tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.bench import Bench, distance
from benchmarks.gpu.models import BLOCK_SIZE, MODELS, Engine, greedy, open_device, random_decoder, random_ids, run
from benchmarks.gpu.pages import Pages
from benchmarks.gpu.points import KERNEL_TESTS, Case, Trial
from benchmarks.gpu.tree import ROOT
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.arch.registry import describe
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import load
from inferd.engine.sample.sampler import Sampler
from inferd.engine.worker.graphs import StepGraphs
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.slots import Slots
from inferd.engine.worker.states import StatePool
from inferd.kernels.ops.states import StateRows

if TYPE_CHECKING:
    import pytest

EQUAL = 0.0
_OF_FP8 = ("test_linear_fp8.py", "test_paged_attention_fp8_triton.py", "test_quantize_fp8.py")
"""Files of which each test needs 8-bit floats."""


# -- tests -------------------------------------------------------------------------------------------------------------


class _Reporter:
    """Emits a point for each test as soon as it ends, so that a file which is stopped keeps what it has shown."""

    def __init__(self, bench: Bench, file: str) -> None:
        self._bench, self._file = bench, file
        self.num_failed = self.num_passed = 0

    def emit(self, test: str, trial: Trial) -> None:
        self._bench.emit(Case(table=KERNEL_TESTS, labels={"tests": self._file, "test": test}), trial)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid.partition("::")[2]
        if report.failed:
            self.fail(test, f"{report.when}: {_last_line(report.longreprtext)}")
        elif report.skipped:
            self.emit(test, Trial(note=f"skipped: {_skip_reason(report)}"))
        elif report.when == "call":
            self.num_passed += 1
            self.emit(test, Trial(error=0.0, tolerance=EQUAL))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.fail("collection", _last_line(str(report.longrepr)))

    def fail(self, test: str, why: str) -> None:
        self.emit(test, Trial.missing(why))
        self.num_failed += 1


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def _skip_reason(report: pytest.TestReport) -> str:
    where = report.longrepr
    return str(where[2]).removeprefix("Skipped: ") if isinstance(where, tuple) else _last_line(report.longreprtext)


def kernel_tests(bench: Bench, file: str, is_long: bool = False) -> None:
    """Run the Triton tests of tests/kernels/<file> on the device; without a GPU in the interpreter. A file of which no
    test ran is wrong."""
    if file in _OF_FP8:
        bench.require("fp8")
    import pytest  # noqa: PLC0415  # imported late, so that without it only these rows fail

    path = ROOT / "tests" / "kernels" / file
    reporter = _Reporter(bench, file)
    if not path.exists():
        reporter.emit("", Trial.missing(f"there is no {file}"))
        return
    options = ["--device", "cuda" if bench.device.type == "cuda" else "interpreter"]
    # Without the project's options, because a machine may lack the plugins that these need.
    bare = ["-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider", "-q", "--rootdir", str(ROOT)]
    with torch.inference_mode(False):
        code = pytest.main([*bare, *options, *(["--long"] * is_long), str(path)], plugins=[reporter])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        reporter.emit("", Trial.missing("it has no test that runs here"))
    elif code != pytest.ExitCode.OK and not reporter.num_failed:
        reporter.emit("", Trial.missing(f"pytest ended with {code!r}"))
    elif not reporter.num_passed and not reporter.num_failed:
        reporter.emit("", Trial.missing("all of its tests were skipped"))


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
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 64, "use_sliding_window": False},
    "qwen3_5_text": {
        "head_dim": 64,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_state": 32,
        "num_local_experts": 0,
        "shared_intermediate_size": 512,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
}
"""The rest of each family's config."""
_NEW = 24


@contextmanager
def _checkpoint(family: str) -> Iterator[Path]:
    """A random checkpoint whose logits are far from ties: its weights are three times their usual size. States forget
    little."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(7)
    with torch.inference_mode(False), tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model(family, **_SMALL, **_FAMILIES[family])
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.data.uniform_(-3, -1)
            else:
                parameter.data.mul_(3)
        model.save_pretrained(folder)
        yield Path(folder)


def load_decoder(path: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    checkpoint = Checkpoint.read(path)
    decoder = Decoder(describe(checkpoint.config), dtype, device)
    load(decoder, checkpoint.tensors)
    return decoder


def greedy_ids(bench: Bench, family: str) -> None:
    """In float32, far from ties, the ids of 16 requests at once and of one alone equal transformers' ids. In bf16 the
    logits are as near to float64's as those of transformers."""
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
        engine = Engine.around(
            load_decoder(path, torch.float32, bench.device), len(prompts), 256, kv_dtype=torch.float32
        )
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
    """The ratio of our distance to float64's logits and transformers' distance."""
    ids = random_ids(200, _SMALL["vocab_size"], 5)
    with _checkpoint(family) as path:
        given = torch.tensor([ids], device=bench.device)
        theirs = _reference(path, torch.bfloat16, bench.device)(given).logits[0]
        exact = _reference(path, torch.float64, bench.device)(given).logits[0]
        decoder = load_decoder(path, torch.bfloat16, bench.device)
        pages = Pages.make(decoder, 1, len(ids))
        batches = pages.batches([(0, len(ids))])
        pool = StatePool.allocate(decoder.arch, 1, 0, decoder.dtype, open_device(bench.device))
        rows = StateRows(batches[0].query_start, batches[0].positions, torch.zeros_like(given[0, :1]))
        hidden = decoder.forward(given[0], batches, pages.kv, states=None if pool is None else pool.of(rows))
        ours = decoder.logits(hidden)
    ratio = distance(ours, exact) / distance(theirs, exact)
    return Trial(error=ratio, tolerance=1.5, note=f"transformers is {distance(theirs, exact):.1e} off")


def overlap(bench: Bench) -> None:
    """Planning a step while another runs changes no token and no logprob of any kind of request."""
    labels = {"check": "overlapped steps give the tokens of serial ones", "model": "qwen3"}

    def trial() -> Trial:
        with _checkpoint("qwen3") as path:
            engine = Engine.around(load_decoder(path, torch.bfloat16, bench.device), 32, 256)
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


class _Steps:
    """A decoder over random KV, its recorded steps, and a request in each slot: greedy and sampled ones in turn."""

    def __init__(self, decoder: Decoder, num_slots: int, context: int) -> None:
        device, arch = open_device(decoder.device), decoder.arch
        self.decoder, self._pages = decoder, Pages.make(decoder, num_slots, context)
        self._slots = Slots(num_slots, context, BLOCK_SIZE, device, len(arch.cache_groups))
        self._slots.block_tables.copy_(self._pages.tables)
        self._slots.token_ids.copy_(torch.randint(0, arch.vocab_size, self._slots.token_ids.shape))
        self._sampler = Sampler(num_slots, arch.vocab_size, decoder.device)
        for slot in range(num_slots):
            params = SamplingParams(max_tokens=1, seed=slot, temperature=float(slot % 2))
            self._sampler.fill(slot, params, [0], num_prompt=1)
        pool = KVPool(self._pages.kv, padding_block=self._pages.padding_block)
        self.recorded = StepGraphs(LoadedModel(decoder, pool, self._slots, self._sampler, device))

    def num_differing(self, positions: Sequence[int]) -> int | None:
        """Rows whose logits or drawn id differ between a recorded step and its single calls; None if no step is
        recorded. Row r is slot r."""
        decoded = self.recorded.decode(list(enumerate(positions)))
        if decoded is None:
            return None
        slots, at = torch.arange(len(positions)), torch.tensor(positions)
        slots, at = slots.to(self.decoder.device), at.to(self.decoder.device)
        ids = self._slots.gather_ids(slots, at)
        batches = self._pages.batches([(position, 1) for position in positions])
        logits = self.decoder.logits(self.decoder.forward(ids, batches, self._pages.kv))
        is_other = (logits != decoded.logits).any(1)
        if decoded.outcomes is not None:
            is_other |= self._sampler.draw(logits, slots, at + 1)[1] != decoded.outcomes
        return int(is_other.sum())


def graphs(bench: Bench) -> None:
    """A recorded step has the bits of its single calls: the same logits and drawn ids."""
    model = bench.pick("0.6b", "smoke")
    buckets, padded, context = bench.pick((1, 2, 4, 8, 16, 64), (1, 2)), bench.pick(13, 3), bench.pick(500, 40)
    made: list[_Steps] = []

    def trial(rows: int) -> Trial:
        if not made:
            decoder = random_decoder(MODELS[model], bench.device, "bf16", 1024)
            made.append(_Steps(decoder, max(*buckets, padded), context))
        found = [made[0].num_differing([context - 2 - step - 3 * row % 17 for row in range(rows)]) for step in range(3)]
        counts = [count for count in found if count is not None]
        if len(counts) < len(found):
            why = f"not recorded: {made[0].recorded.refusal}"
            return Trial.missing(why) if bench.is_on_gpu else Trial(note=why)
        if rows == padded:
            return Trial(note=f"{sum(counts)} rows of {3 * rows} differ: the step is padded to more rows")
        return Trial(error=float(sum(counts)), tolerance=EQUAL, note="rows that differ, of 3 steps")

    for rows in (*buckets, padded):
        labels = {"check": f"a graph of {rows} rows gives the bits of its calls", "model": model}
        bench.measure(Case(table="engine checks", labels=labels), partial(trial, rows))
