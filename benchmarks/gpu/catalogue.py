"""Every row by part, in running order: the most decisive rows come first. Checks that "first" has are not repeated
in "checks". Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import Row
from benchmarks.gpu.tree import ROOT

PARTS = ("first", "headline", "profile", "peers", "checks", "kernels", "engine")
USUAL = PARTS[:5]
"""The parts that `make gpu` runs by default: those that decide most."""
_NUMERIC_PARTS = 4
KERNELS, TESTS = ROOT / "kernels" / "ops", ROOT / "tests" / "kernels"


def rows(part: str) -> Iterator[Row]:
    """The rows of one of `PARTS`."""
    yield Row(part, "machine", "machine:describe_device", timeout_s=60)
    named = {"first": _first, "headline": _headline, "profile": _profile, "peers": _peers}
    yield from (named | {"checks": _checks, "kernels": _kernels, "engine": _engine})[part]()


def kernel_folders() -> list[str]:
    """Kernel folders with a Triton implementation."""
    found = {path.parent.name for name in ("triton.py", "cuda.py") for path in KERNELS.glob(f"*/{name}")}
    first = ("paged_attention", "linear", "linear_fp8")
    return sorted(found, key=lambda name: (first.index(name) if name in first else len(first), name))


def kernel_tests() -> list[str]:
    """Test files that cover a Triton kernel, in whole or in part, and the one that each kernel should have, unless it
    says that it runs no Triton kernel."""
    folders = kernel_folders()
    found = [f"test_{folder}.py" for folder in folders]
    for path in sorted(TESTS.glob("test_*.py")):
        is_alone = path.stem.endswith("_triton") or "def interpreted" in path.read_text()
        if path.name not in found and is_alone:
            found.append(path.name)
    return [name for name in found if not _is_without_triton(TESTS / name)]


def _is_without_triton(path: Path) -> bool:
    return path.exists() and "\nHAS_TRITON = False\n" in path.read_text()


def _first() -> Iterator[Row]:
    """Does each thing work at all that the other parts stand on?

    A kernel that reads wrong memory ends its process, so the checks of kernels have several."""

    def row(name: str, target: str, timeout_s: float = 120, **arguments: Any) -> Row:
        return Row("first", name, target, arguments, timeout_s)

    yield row("imports", "first:imports", 60)
    for part in range(_NUMERIC_PARTS):
        yield row(f"numeric {part + 1}", "numeric:numerics", part=part, num_parts=_NUMERIC_PARTS)
    yield row("captures", "first:captures")
    yield row("graphs", "checks:graphs")
    yield row("fp8", "first:fp8", 60)
    yield row("memory", "first:memory", 180)
    yield row("text", "first:text", 60)
    yield row("greedy llama", "checks:greedy_ids", family="llama")


def _headline() -> Iterator[Row]:
    """In 8 minutes: how near is it to the goals?"""

    def row(name: str, target: str, timeout_s: float = 120, **arguments: Any) -> Row:
        return Row("headline", name, target, arguments, timeout_s)

    yield row("rates", "machine:rates", 60)
    yield replace(row("precompile", "machine:precompile", 180), is_preparation=True)
    few = (1, 32, 256)
    yield row("decode 8b bf16", "engine:decode", 180, model="8b", precision="bf16", batches=few)
    yield row("prefill 8b bf16", "engine:prefill", model="8b", precision="bf16", lengths=(2048, 32_768))
    yield row("decode 0.6b bf16", "engine:decode", model="0.6b", precision="bf16", batches=few)
    yield row("attention of one", "attention:decode", contexts=(1024, 32_768), batches=(1,), groups=(4,))
    yield row("attention of 256", "attention:decode", contexts=(1024,), batches=(256,), groups=(4,))
    yield row("linears of one row", "linears:products", model="8b", precision="bf16", rows=(1,))
    yield row("empty kernels", "machine:empty_kernels", 60)


def _profile() -> Iterator[Row]:
    """The kernels of a step, their launches, and the gaps between them."""

    def row(name: str, target: str, timeout_s: float = 120, **arguments: Any) -> Row:
        return Row("profile", name, target, arguments, timeout_s)

    yield row("decode 8b", "profile:decode", 150, model="8b", batches=(1, 256))
    yield row("prefill 8b", "profile:prefill", model="8b", length=2048)
    yield replace(row("counters", "profile:counters", 180), folders=("kernels",))


def _checks() -> Iterator[Row]:
    def check(name: str, target: str, timeout_s: float = 180, **arguments: Any) -> Row:
        return Row("checks", name, target, arguments, timeout_s, is_timed=False)

    for file in kernel_tests():
        yield check(f"tests {file.removeprefix('test_').removesuffix('.py')}", "checks:kernel_tests", 300, file=file)
    for family in ("qwen3", "qwen3_5_text", "granitemoehybrid", "lfm2"):
        yield check(f"greedy {family}", "checks:greedy_ids", family=family)
    yield check("overlap", "checks:overlap")
    yield check("launches", "waiting:launches")
    yield check("KV tiers", "tiers:tiers")
    for precision in ("bf16", "fp8", "int4"):
        yield check(f"invariance decoder {precision}", "invariance:decoder", precision=precision)
        yield check(f"invariance {precision}", "invariance:linears", precision=precision)


def _kernels() -> Iterator[Row]:
    def row(name: str, target: str, timeout_s: float = 120, **arguments: Any) -> Row:
        return Row("kernels", name, target, arguments, timeout_s)

    yield row("rates", "machine:rates", 60)
    yield row("decode attention to 4k", "attention:decode", contexts=(512, 1024, 4096))
    for precision in ("bf16", "fp8", "int4", "int8"):
        for model in ("8b", "0.6b"):
            yield row(
                f"gemv {model} {precision}", "linears:products", model=model, precision=precision, rows=(1, 2, 4, 8)
            )
    for model in ("8b", "0.6b"):
        yield row(f"fused {model}", "fused:layers", 160, model=model, rows=(1, 2, 4, 8))
    yield row("decode attention to 64k", "attention:decode", contexts=(16_384, 65_536))
    for kv in ("fp8", "int8"):
        yield row(f"decode attention, KV in {kv}", "attention:decode", contexts=(1024, 16_384), kv=kv)
    yield row("attention by library", "attention:libraries", 180)
    yield row("mixed attention", "attention:mixed_lengths")
    yield row("prefill attention", "attention:prefill", lengths=(2048, 8192, 32_768))
    for precision in ("bf16", "fp8", "int4", "int8"):
        for model in ("8b", "0.6b"):
            many = (16, 32, 64, 128, 256, 512)
            yield row(f"gemm {model} {precision}", "linears:products", 150, model=model, precision=precision, rows=many)
    yield row("small kernels", "small:small")
    yield row("top-k and top-p", "sampling:cuts")


def _engine() -> Iterator[Row]:
    def row(name: str, target: str, timeout_s: float = 150, **arguments: Any) -> Row:
        folders = ("engine", "kernels", "server") if target.startswith("serving") else ()
        return Row("engine", name, target, arguments, timeout_s, folders=folders)

    yield row("rates", "machine:rates", 60)
    yield row("decode 8b bf16", "engine:decode", model="8b", precision="bf16")
    yield row("decode 0.6b bf16", "engine:decode", model="0.6b", precision="bf16")
    yield row("prefill 8b bf16", "engine:prefill", model="8b", precision="bf16", lengths=(2048, 32_768))
    yield row("decode 8b fp8", "engine:decode", model="8b", precision="fp8")
    yield row("prefill 8b fp8", "engine:prefill", model="8b", precision="fp8", lengths=(2048, 32_768))
    yield row("offline 8b bf16", "engine:offline", 240, model="8b", precision="bf16")
    yield row("start 8b", "serving:start", 200, model="8b")
    yield row("http 8b", "serving:http", 240, model="8b")
    yield row("offline 8b fp8", "engine:offline", 240, model="8b", precision="fp8")
    yield row("fp8 accuracy embedded", "accuracy:embedded")
    yield row("fp8 accuracy 0.6b", "accuracy:random_weights", model="0.6b")
    yield row("start 0.6b", "serving:start", model="0.6b")
    yield row("http 0.6b", "serving:http", 180, model="0.6b")
    yield row("decode 0.6b fp8", "engine:decode", model="0.6b", precision="fp8")
    for precision in ("int4", "int8"):
        yield row(f"decode 8b {precision}", "engine:decode", model="8b", precision=precision, batches=(1, 8, 32, 256))
    few = (1, 8, 32, 256)
    for kv in ("fp8", "int8"):
        yield row(f"decode 8b bf16, KV in {kv}", "engine:decode", model="8b", precision="bf16", batches=few, kv=kv)
    for precision in ("bf16", "fp8"):
        yield row(
            f"decode 8b {precision} deterministic",
            "engine:decode",
            model="8b",
            precision=precision,
            batches=few,
            is_deterministic=True,
        )
    yield row(
        "prefill 8b bf16 deterministic",
        "engine:prefill",
        model="8b",
        precision="bf16",
        lengths=(2048,),
        is_deterministic=True,
    )


def _peers() -> Iterator[Row]:
    yield Row("peers", "rates", "machine:rates", timeout_s=60)
    for model in ("8b", "0.6b"):
        yield Row("peers", f"inferd {model}", "peers:ours", {"model": model}, 200)
        yield Row("peers", f"transformers {model}", "peers:transformers_batching", {"model": model}, 240)
