"""The first minutes on a GPU that nobody has tried: what everything else stands on, the simplest first.

A point is one question. If it cannot be answered, its point has the traceback, and the next question is asked.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, CannotRunError, distance
from benchmarks.gpu.points import Case, Trial
from benchmarks.gpu.tree import ROOT
from inferd.kernels import gpu
from inferd.kernels.cpu import native
from inferd.kernels.ops.linear import Choices

IMPORTS = {
    "torch": "torch", "triton": "triton", "transformers": "transformers", "tokenizers": "tokenizers",
    "safetensors": "safetensors", "msgspec": "msgspec", "numpy": "numpy", "zmq": "pyzmq", "llguidance": "llguidance",
}  # fmt: skip
"""Distributions by the modules that an engine imports."""
OURS = ("inferd.engine.process.main", "inferd.engine.worker.cuda", "inferd.kernels.compile.aot")
FP8_ROWS = (1, 9, 10, 11, 12, 17)
"""One row has a kernel of its own; numbers of rows between multiples of 4 and of 8 are what libraries pad."""
_SIZE, _GROUPS, _BLOCKS = 128, 5, 3
"""Inputs of a group, groups of inputs, and blocks of outputs: numbers that are no multiples of 4."""
_E4M3_MAX = 448.0
_ROUNDED = 2.0**-8
"""Largest error by norm of results that are rounded to bfloat16."""
_MODEL = "0.6b"
_OVER_PLAN = 0.03
"""Share by which the memory may exceed the plan."""


def imports(bench: Bench) -> None:
    """Each package that an engine needs, with its version, and the modules of an engine."""
    for module, distribution in IMPORTS.items():
        bench.measure(_question("imports", module), partial(_imported, module, distribution))
    for module in OURS:
        bench.measure(_question("imports", module), partial(_imported, module))


def _question(what: str, detail: str) -> Case:
    return Case(table="first contact", labels={"what": what, "of": detail})


def _imported(module: str, distribution: str = "") -> Trial:
    importlib.import_module(module)
    return Trial(error=0.0, tolerance=0.0, note=version(distribution) if distribution else "")


def captures(bench: Bench) -> None:
    """A decode step in a CUDA graph has the bits of its calls each time it is replayed: without kernels that start
    early and with them, with the attention of each kind. Replays follow each other without a pause, so that one could
    overtake another."""
    if not bench.is_on_gpu and not native.prepare(ROOT / "build" / "cache" / "inferd" / "kernels").path:
        raise CannotRunError("needs a GPU or the C++ kernels: plain PyTorch asks for lengths on the host")
    for is_deterministic, is_early in product((False, True), repeat=2):
        words = "deterministic" if is_deterministic else "usual", "early starts" if is_early else "no early starts"
        run = partial(_replayed, bench, is_early=is_early, is_deterministic=is_deterministic)
        bench.measure(_question("a captured step, replayed", ", ".join(words)), run)


def _replayed(bench: Bench, *, is_early: bool, is_deterministic: bool) -> Trial:
    if is_early and bench.is_on_gpu and not gpu.properties_of(bench.device).starts_early:
        return Trial(note="kernels start early on compute capability 9.0 and higher")
    rows, replays = bench.pick(8, 2), bench.pick(200, 3)
    step = _step(bench, rows, is_deterministic=is_deterministic)
    expected = step()
    num_wrong = torch.zeros((), dtype=torch.int64, device=bench.device)
    if not bench.is_on_gpu:
        for _ in range(replays):
            num_wrong += (step() != expected).any()
        return Trial(error=float(num_wrong), tolerance=0.0, note=f"{replays} calls; no graph without a GPU")
    within: AbstractContextManager[None] = gpu.early_starts() if is_early else nullcontext()
    graph = torch.cuda.CUDAGraph()
    with within:
        step()  # compiles what a launch with early starts needs
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = step()
    for _ in range(replays):
        out.zero_()
        graph.replay()
        num_wrong += (out != expected).any()
    return Trial(error=float(num_wrong), tolerance=0.0, note=f"{replays} replays of {rows} rows")


def _step(bench: Bench, rows: int, *, is_deterministic: bool) -> Callable[[], Tensor]:
    """A function that computes the logits of a decode step, with all that an engine's recorded step does before the
    draw. Its inputs are the same in each call."""
    from benchmarks.gpu.models import BLOCK_SIZE, MODELS, open_device, random_decoder  # noqa: PLC0415
    from benchmarks.gpu.pages import Pages  # noqa: PLC0415
    from inferd.engine.worker.slots import Batch, Slots  # noqa: PLC0415

    choices, context = Choices(is_deterministic), bench.pick(500, 40)
    decoder = random_decoder(MODELS[bench.pick(_MODEL, "smoke")], bench.device, "bf16", 1024, choices)
    pages, device, arch = Pages.make(decoder, rows, context), open_device(bench.device), decoder.arch
    slots = Slots(rows, context, BLOCK_SIZE, device, len(arch.cache_groups))
    slots.block_tables.copy_(pages.tables)
    slots.token_ids.copy_(torch.randint(0, arch.vocab_size, slots.token_ids.shape))
    row = torch.arange(rows, device=bench.device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=bench.device)

    def step() -> Tensor:
        given = (row, context - 1 - row, starts)
        batch = Batch.of_decodes(slots, given, pages.padding_block, is_deterministic=is_deterministic)
        return decoder.logits(decoder.forward(batch.token_ids, batch.attention, pages.kv))

    return step


def fp8(bench: Bench) -> None:
    """Products of 8-bit floats with each kind of scales. Activations are such that 8 bits hold them."""
    bench.require("fp8")
    for kind in ("rows", "groups", "blocks"):
        for rows in FP8_ROWS:
            labels = {"scales": kind, "rows": str(rows)}
            bench.measure(Case(table="products in fp8", labels=labels), partial(_product, bench, kind, rows))


def _product(bench: Bench, kind: str, rows: int) -> Trial:
    from inferd.kernels.ops.linear_fp8 import LINEAR_FP8, Key, linear_fp8  # noqa: PLC0415

    in_size, out_size = _SIZE * _GROUPS, _SIZE * _BLOCKS
    q = (torch.randn(out_size, in_size, device=bench.device) * 50).to(torch.float8_e4m3fn)
    shape = {"rows": (out_size,), "groups": (out_size, _GROUPS), "blocks": (_BLOCKS, _GROUPS)}[kind]
    scales = torch.rand(shape, device=bench.device) / 50 + 0.01
    x = (torch.randn(rows, in_size, device=bench.device) * 50).to(torch.float8_e4m3fn).float()
    x[:, ::_SIZE] = _E4M3_MAX  # so the scale of each group is 1
    out = linear_fp8(q, scales, None, torch.bfloat16)(x.to(torch.bfloat16))
    error = distance(out, x.double() @ (q.double() * _spread(scales, out_size, in_size)).T)
    keys = {choice.key: choice.chosen for choice in LINEAR_FP8.choices() if isinstance(choice.key, Key)}
    chosen = ", ".join(sorted({name for key, name in keys.items() if key.has_groups == (kind != "rows")}))
    return Trial(error=error, tolerance=_ROUNDED, note=f"{out_size} x {in_size} by {chosen}")


def _spread(scales: Tensor, out_size: int, in_size: int) -> Tensor:
    """[out, in] float64: the scale of each weight."""
    wide = scales.double() if scales.dim() == 2 else scales.double()[:, None]
    rows = wide.repeat_interleave(out_size // wide.shape[0], 0)
    return rows.repeat_interleave(in_size // wide.shape[1], 1)


def memory(bench: Bench) -> None:
    """Compares the device's memory that torch holds with the plan: after loading, after tuning, when the engine is
    ready, and after 20 steps. Each point is there as soon as it is known."""
    bench.measure(_question("memory against the plan", "all steps"), partial(_start_and_step, bench))


def _note(bench: Bench, what: str, held: float, planned: float) -> None:
    """A point. A rehearsal on a CPU measures the process, in which libraries and the allocator take more than a tiny
    model, so it has no bound."""
    figures = {"MiB": held / 2**20, "planned MiB": planned / 2**20}
    error = max(held / planned - 1, 0.0) if bench.is_on_gpu else None
    bench.emit(_question("memory against the plan", what), Trial(error=error, tolerance=_OVER_PLAN, figures=figures))


def _start_and_step(bench: Bench) -> Trial:
    """Few sequences and a small KV cache, so that these hide nothing."""
    from benchmarks.gpu.models import BLOCK_SIZE, MODELS, Engine, checkpoint, greedy, open_device, random_ids, run  # noqa: PLC0415  # noqa: PLC0415
    from inferd.engine.api.checkpoint import Checkpoint  # noqa: PLC0415
    from inferd.engine.api.config import AskedConfig, plan_of  # noqa: PLC0415
    from inferd.engine.api.machine.cpu import Machine  # noqa: PLC0415
    from inferd.engine.api.model import ModelFacts  # noqa: PLC0415
    from inferd.engine.api.resolve import resolve  # noqa: PLC0415
    from inferd.engine.api.wire.messages import Phase  # noqa: PLC0415
    from inferd.engine.worker.load import load_worker  # noqa: PLC0415

    path, longest = checkpoint(MODELS[bench.pick(_MODEL, "smoke")], bench.device), bench.pick(1024, 128)
    bench.give_back()  # what the checkpoint was made of
    facts = ModelFacts.of(Checkpoint.read(path))
    kv_bytes = bench.pick(2 << 30, 64 << 20)
    asked = AskedConfig(
        model_path=str(path),
        device=bench.device.type,  # type: ignore[arg-type]
        max_model_len=longest,
        max_num_seqs=16,
        kv_memory_bytes=kv_bytes,
    )
    config, _, _ = resolve(asked, facts, Machine.detect())
    assert config.block_size == BLOCK_SIZE
    plan, device = plan_of(config, facts.arch), open_device(bench.device)
    bytes_before = device.memory_in_use()
    rotary = sum(line.num_bytes for line in plan.working if line.name == "rotary")

    def report(phase: Phase) -> None:
        # torch reserves memory in segments, which are larger than small matrices.
        if phase.name == "weights" and bench.is_on_gpu:
            _note(bench, "weights, allocated", torch.cuda.memory_allocated(bench.device), plan.weights_bytes + rotary)
        if phase.name == "tuning":
            # Products are measured before the KV cache exists, in memory that the cache takes later.
            _note(bench, "tuning", device.memory_in_use() - bytes_before, plan.total_bytes - plan.kv_bytes)

    runner, _ = load_worker(config, time.monotonic(), report)
    rest = plan.total_bytes - plan.kv_bytes
    _note(bench, "ready, without KV", device.memory_in_use() - bytes_before - plan.kv_bytes, rest)
    engine = Engine(runner, config.max_num_seqs, config.max_model_len, config.num_blocks, facts.arch.vocab_size)
    with engine.core(step_tokens=config.max_num_batched_tokens) as core:
        run(core, [greedy(str(seed), random_ids(40, engine.vocab_size, seed), 20) for seed in range(8)])
    _note(bench, "20 steps, without KV", device.memory_in_use() - bytes_before - plan.kv_bytes, rest)
    return Trial(error=0.0, tolerance=0.0, note=f"KV cache {plan.kv_bytes / 2**20:.0f} MiB")


def text(bench: Bench) -> None:
    """The greedy text of a trained model, in float32, beside transformers' on the same device."""
    for prompt in ("Once upon a time", "The three colours of a traffic light are"):
        labels = {"check": "greedy text is transformers' (fp32)", "model": "tiny", "prompt": prompt}
        bench.measure(Case(table="engine checks", labels=labels), partial(_text, bench, prompt))


def _text(bench: Bench, prompt: str) -> Trial:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    from benchmarks.gpu.checks import load_decoder  # noqa: PLC0415
    from benchmarks.gpu.models import Engine, greedy, run  # noqa: PLC0415
    from inferd.engine.api.checkpoint import EMBEDDED_PATH as path  # noqa: PLC0415

    count = bench.pick(64, 24)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(prompt)["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    given = torch.tensor([ids], device=bench.device)
    model = model.to(bench.device).eval()
    out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False,
                         eos_token_id=None, pad_token_id=0)  # fmt: skip
    expected = tuple(out[0, len(ids) :].tolist())
    engine = Engine.around(load_decoder(path, torch.float32, bench.device), 1, 256, kv_dtype=torch.float32)
    with engine.core() as core:
        ours = run(core, [greedy("one", ids, count)])["one"]
    num_wrong = sum(a != b for a, b in zip(ours, expected, strict=True))
    return Trial(error=float(num_wrong), tolerance=0.0, note=repr(tokenizer.decode(ours))[:150])
