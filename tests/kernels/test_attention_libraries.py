"""Paged attention by libraries: what each gets from us, and which steps it refuses.

The libraries themselves need a GPU. `attention_libraries` stands in for them: it computes attention in fp64 from the
arguments alone, and that must equal our own reference.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from inferd.kernels import gpu
from inferd.kernels.device import DeviceProperties
from inferd.kernels.ops.paged_attention import (
    LIBRARIES,
    PAGED_ATTENTION,
    AttentionBatch,
    Key,
    _has_nvcc,
    reference,
)
from inferd.kernels.registry import Deferred, KernelError
from tests.cpu.capturing import waits
from tests.kernels.attention_libraries import MODULES, Alignment, Kept, Spoil
from tests.kernels.test_paged_attention import ROWS, TOLERANCE, Sequences, sinks_of

DTYPE = torch.bfloat16
FLASH_3, FLASHINFER, CUDNN, FLASH_4 = LIBRARIES
ALL_STEPS = (FLASH_3, CUDNN, FLASH_4)
"""Libraries that take recorded steps of any rows."""
# FlashAttention-4 reads these when it is imported.
os.environ |= {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
PACKAGE = "inferd.kernels.ops.paged_attention"
DECODES = tuple((start, 1) for start in (0, 5, 255, 256, 700))
SCALE = 0.2
ANYTHING = 2**31 - 1
"""A number that is no block id."""
HOPPER = Key("cuda", DTYPE, DTYPE, 128, 4, 32, False, False, is_recorded=True, is_invariant=False, is_decode=True)


@dataclass
class Library:
    """An implementation over a stand-in for its library."""

    name: str
    run: Callable[..., Tensor]
    kept: Kept

    def attend(
        self,
        q: Tensor,
        sequences: Sequences,
        batch: AttentionBatch,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The library's result, from nothing but its arguments."""
        result = self.run(q, sequences.kv, batch, SCALE, window, softcap, None, sinks)
        assert result.shape == q.shape and result.dtype == q.dtype
        return MODULES[self.name][2](self.kept.calls[-1])


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    kept = Kept()
    names, make, _ = MODULES[request.param]
    stand_in = make(kept)
    for name in names:
        parents = name.split(".")
        for end in range(1, len(parents)):
            monkeypatch.setitem(sys.modules, ".".join(parents[:end]), types.ModuleType(parents[end - 1]))
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    forget(request.param)
    found = next(one for one in PAGED_ATTENTION._implementations if one.name == request.param)
    assert isinstance(found.run, Deferred)
    yield Library(request.param, found.run.load(), kept)
    forget(request.param)


def forget(name: str) -> None:
    """Import the implementation anew the next time: it keeps the library that it found."""
    sys.modules.pop(f"{PACKAGE}.{name}", None)


def recorded(batch: AttentionBatch, num_idle: int, size: int) -> AttentionBatch:
    """The batch as a recorded step of `size` tokens has it: with rows that have no tokens, tokens that have no row,
    bounds instead of lengths, and anything in the tables behind a row's last block."""
    num_rows = len(batch.query_lens) + num_idle
    used = -(-batch.seq_lens[:, None] // batch.block_size)
    tables = batch.block_tables.masked_fill(torch.arange(batch.block_tables.shape[1]) >= used, ANYTHING)
    return replace(
        batch,
        query_start=torch.cat([batch.query_start, batch.query_start[-1:].expand(num_idle)]),
        seq_lens=torch.nn.functional.pad(batch.seq_lens, (0, num_idle)),
        block_tables=torch.cat([tables, tables[:1].expand(num_idle, -1)]),
        positions=torch.nn.functional.pad(batch.positions, (0, size - batch.num_tokens)),
        query_lens=(size,) + (1,) * (num_rows - 1),
        host_seq_lens=None,
        is_deterministic=False,
        knows_query_lens=False,
    )


def queries(num_tokens: int, heads: int, head_dim: int) -> Tensor:
    return torch.randn(num_tokens, heads, head_dim).to(DTYPE)


SHAPES = [
    (8, 2, 64, 16, None, None),
    (4, 2, 128, 32, None, None),
    (3, 1, 96, 32, 40, None),
    (4, 4, 256, 128, 300, None),
    (6, 1, 16, 16, 1, None),
]
CAPPED = [(3, 3, 40, 64, None, 5.0), (2, 1, 16, 128, 259, 3.0)]
"""(heads, KV heads, head size, block size, window, cap)."""


@pytest.mark.parametrize(
    ("library", "heads", "kv_heads", "head_dim", "block_size", "window", "softcap"),
    [(name, *shape) for name in ALL_STEPS for shape in (SHAPES if name == CUDNN else [*SHAPES, *CAPPED])],
    indirect=["library"],
)
def test_a_library_gets_what_the_reference_reads(
    library: Library,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """Prompts, chunks and decodes in one step, which is recorded, with idle rows and padding tokens."""
    sequences = Sequences(ROWS, kv_heads, head_dim, block_size, DTYPE)
    plain = sequences.batch(range(len(ROWS)))
    q = queries(plain.num_tokens + 5, heads, head_dim)
    batch = recorded(plain, 3, len(q))
    result = library.attend(q, sequences, batch, window, softcap)[: plain.num_tokens]
    expected = reference.paged_attention(q[: plain.num_tokens], sequences.kv, plain, SCALE, window, softcap, None)
    assert (result - expected).abs().max() < TOLERANCE[DTYPE]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("library", LIBRARIES, indirect=True)
def test_decodes_alone(library: Library, window: int | None) -> None:
    """cuDNN has another layout for them, and FlashAttention-3 cuts their keys."""
    sequences = Sequences(DECODES, 2, 64, 32, DTYPE)
    plain = sequences.batch(range(len(DECODES)))
    q = queries(len(DECODES), 8, 64)
    result = library.attend(q, sequences, replace(plain, host_seq_lens=None), window, None)
    expected = reference.paged_attention(q, sequences.kv, plain, SCALE, window, None, None)
    assert (result - expected).abs().max() < TOLERANCE[DTYPE]
    given = library.kept.calls[0]
    assert given.get("offsets") is None and given.get("num_splits", 1) == (32 if library.name == FLASH_3 else 1)


def test_only_rows_of_one_query_each_are_a_decode() -> None:
    sequences = Sequences([(5, 1), (40, 1), (3, 2)], 1, 16, 16, DTYPE)
    decode = sequences.batch([0, 1])
    assert decode.is_decode and not sequences.batch([0, 2]).is_decode
    assert not recorded(decode, 1, 1).is_decode, "only the device knows its rows"


def test_a_page_table_names_a_rows_own_blocks_alone() -> None:
    """A library may load whole tiles of keys. Behind a row's end it must find neither memory that no pool has, nor
    another request's NaN."""
    sequences = Sequences(ROWS, 1, 16, 16, DTYPE)
    batch = recorded(sequences.batch(range(len(ROWS))), 2, 700)
    assert int(batch.block_tables.max()) == ANYTHING
    for row, (start, count) in enumerate(ROWS):
        own = sequences.tables[row, : -(-(start + count) // 16)].tolist()
        found = batch.page_table[row].tolist()
        assert found[: len(own)] == own and set(found[len(own) :]) <= {own[-1]}
    assert batch.page_table.dtype == torch.int32 and int(batch.page_table.max()) < len(sequences.kv)


def as_stored(pages: Tensor) -> Tensor:
    """Pages [blocks, block_size, G, D] whose strides were not transposed."""
    *_, heads, size = pages.shape
    return pages.as_strided(pages.shape, (pages.stride(0), heads * size, size, 1))


def narrowed(bounds: tuple[int, int]) -> tuple[int, int]:
    return bounds[0] + 1, bounds[1]


def cudnn_wrong(name: str, change: Callable[[Any], Any]) -> Spoil:
    """A change of a tensor that cuDNN gets at its execution."""
    return {"memory": lambda memory: {**memory, name: change(memory[name])}}


def transposed_in_graph(described: dict[str, Any]) -> dict[str, Any]:
    k = described["k"]
    _, heads, _, size = k.dim
    return {**described, "k": replace(k, stride=(k.stride[0], size, heads * size, 1))}


WRONG: list[tuple[str, str, Spoil]] = [
    (FLASH_3, "keys as stored", {"k_cache": as_stored}),
    (FLASH_3, "values as stored", {"v_cache": as_stored}),
    (FLASH_3, "a key too few", {"cache_seqlens": lambda lens: lens - 1}),
    (FLASH_3, "no causal mask", {"causal": lambda _: False, "window_size": lambda bounds: (bounds[0], -1)}),
    (FLASH_3, "a window too wide", {"window_size": narrowed}),
    (FLASH_3, "another row's pages", {"page_table": lambda table: table.roll(1, 0)}),
    (FLASH_3, "no cap", {"softcap": lambda _: 0.0}),
    (FLASH_4, "keys as stored", {"k": as_stored}),
    (FLASH_4, "a key too few", {"seqused_k": lambda lens: lens - 1}),
    (FLASH_4, "no causal mask", {"causal": lambda _: False, "window_size": lambda bounds: (bounds[0], None)}),
    (FLASH_4, "a window too wide", {"window_size": narrowed}),
    (FLASH_4, "no cap", {"softcap": lambda _: 0.0}),
    (CUDNN, "keys as stored", {"described": transposed_in_graph}),
    (CUDNN, "a key too few", cudnn_wrong("seq_len_kv", lambda lens: lens - 1)),
    (CUDNN, "a causal mask from the first key", {"diagonal_alignment": lambda _: Alignment.TOP_LEFT}),
    (CUDNN, "a window too wide", {"diagonal_band_left_bound": lambda bound: bound + 1}),
    (CUDNN, "values for keys", cudnn_wrong("k", lambda k: k.as_strided(k.shape, k.stride(), k[0].numel()))),
    (CUDNN, "another row's pages", cudnn_wrong("paged_attention_v_table", lambda table: table.roll(1, 0))),
    (CUDNN, "offsets of tokens", {"offsets": lambda offsets: offsets // 64}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("library", "spoil"),
    [pytest.param(name, spoil, id=f"{name}: {what}") for name, what, spoil in WRONG],
    indirect=["library"],
)
def test_a_wrong_argument_is_seen(library: Library, spoil: Spoil) -> None:
    rows = ((300, 1), (20, 13), (0, 30), (90, 2))
    sequences = Sequences(rows, 2, 64, 16, DTYPE)
    plain = sequences.batch(range(len(rows)))
    q = queries(plain.num_tokens, 4, 64)
    softcap = None if library.name == CUDNN else 1.0
    batch = recorded(plain, 0, len(q))
    expected = reference.paged_attention(q, sequences.kv, plain, SCALE, 9, softcap, None)
    assert (library.attend(q, sequences, batch, 9, softcap) - expected).abs().max() < TOLERANCE[DTYPE]
    library.kept.spoil = spoil
    error = (library.attend(q, sequences, batch, 9, softcap) - expected).abs().max()
    assert not error < 5 * TOLERANCE[DTYPE]


@pytest.mark.parametrize("library", ALL_STEPS, indirect=True)
def test_nothing_is_copied_or_read_back(library: Library) -> None:
    """K and V are views of the pool. A step waits for no device, and its layers share what the first one makes."""
    sequences = Sequences(ROWS, 2, 64, 16, DTYPE)
    plain = sequences.batch(range(len(ROWS)))
    q, batch = queries(plain.num_tokens, 4, 64), recorded(plain, 1, plain.num_tokens)
    counts = []
    for _ in range(3):
        with Launches() as launches:
            library.run(q, sequences.kv, batch, SCALE, None, None, None)
        counts.append(len(launches.names))
    assert counts[1] == counts[2] < counts[0]
    for given in library.kept.calls:
        given = given.get("memory", given)
        k, v = given.get("k_cache", given["k"]), given.get("v_cache", given["v"])
        assert k.data_ptr() == sequences.kv.data_ptr() and v.data_ptr() == sequences.kv[:, 1].data_ptr()
    if library.name == CUDNN:
        assert importlib.import_module(f"{PACKAGE}.cudnn")._plan.cache_info().misses == 1


class Launches(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of torch's operations. Fails if one would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not waits(func, args, kwargs or {}), f"{func} waits for the device"
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [FLASH_3, FLASHINFER, FLASH_4])
def test_the_signature_is_the_librarys(name: str) -> None:
    """If the library is installed, its signature must be that of the stand-in."""
    names, stand_in, _ = MODULES[name]
    if not all(gpu.is_installed(module) for module in names):
        pytest.skip(f"{' or '.join(names)} is not installed")
    modules = [importlib.import_module(module) for module in names]
    for attribute, function in vars(stand_in(Kept())).items():
        if inspect.isfunction(function):
            real = inspect.signature(next(getattr(one, attribute) for one in modules if hasattr(one, attribute)))
            ours = inspect.signature(function)
            assert [(one.name, one.default) for one in real.parameters.values()] == [
                (one.name, one.default) for one in ours.parameters.values()
            ]


# -- FlashInfer --------------------------------------------------------------------------------------------------------


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer has other kernels there."""
    monkeypatch.setattr(gpu, "properties_of", lambda *_: DeviceProperties.of(100, 148))


INFER_DECODES = [
    (8, 2, 64, 16, None, False),
    (8, 8, 128, 32, 40, False),
    (7, 1, 128, 64, 300, True),
    (16, 2, 256, 16, 1, True),
]
"""(heads, KV heads, head size, block size, window, whether it has sinks)."""


def infer_decodes(library: Library, shape: tuple[int, int, int, int, int | None, bool], *, is_recorded: bool) -> float:
    """Largest error of steps of rows with one query each. The host knows the lengths of one that is not recorded."""
    heads, kv_heads, head_dim, block_size, window, has_sinks = shape
    sequences = Sequences(DECODES, kv_heads, head_dim, block_size, DTYPE)
    plain = sequences.batch(range(len(DECODES)))
    q, sinks = queries(len(DECODES), heads, head_dim), sinks_of(heads) if has_sinks else None
    batch = replace(plain, host_seq_lens=None) if is_recorded else plain
    expected = reference.paged_attention(q, sequences.kv, plain, SCALE, window, None, None, sinks)
    return float((library.attend(q, sequences, batch, window, None, sinks) - expected).abs().max())


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("shape", [*INFER_DECODES, (16, 1, 96, 128, 40, True), (3, 3, 16, 128, None, False)], ids=str)
@pytest.mark.parametrize("library", [FLASHINFER], indirect=True)
def test_xqa_computes_decodes(library: Library, shape: Any, is_recorded: bool) -> None:
    assert infer_decodes(library, shape, is_recorded=is_recorded) < TOLERANCE[DTYPE]
    given = library.kept.calls[-1]
    assert given["backend"] == "xqa" and given["enable_pdl"] is False


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("shape", INFER_DECODES, ids=str)
@pytest.mark.parametrize("library", [FLASHINFER], indirect=True)
def test_trtllm_gen_computes_decodes(library: Library, shape: Any, is_recorded: bool) -> None:
    assert infer_decodes(library, shape, is_recorded=is_recorded) < TOLERANCE[DTYPE]
    given = library.kept.calls[-1]
    width = given["block_tables"].shape[1]
    assert given["backend"] == "trtllm-gen" and given["max_seq_len"] == (width * shape[3] if is_recorded else 701)


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("shape", INFER_DECODES, ids=str)
@pytest.mark.parametrize("library", [FLASHINFER], indirect=True)
def test_trtllm_gen_computes_prompts(library: Library, shape: Any) -> None:
    """Prompts, chunks and decodes in one step that is not recorded."""
    heads, kv_heads, head_dim, block_size, window, has_sinks = shape
    sequences = Sequences(ROWS, kv_heads, head_dim, block_size, DTYPE)
    batch = sequences.batch(range(len(ROWS)))
    q, sinks = queries(batch.num_tokens, heads, head_dim), sinks_of(heads) if has_sinks else None
    expected = reference.paged_attention(q, sequences.kv, batch, SCALE, window, None, None, sinks)
    result = library.attend(q, sequences, batch, window, None, sinks)
    assert (result - expected).abs().max() < TOLERANCE[DTYPE]


INFER_WRONG: dict[str, Spoil] = {
    "keys as stored": {"kv_cache": lambda kv: tuple(as_stored(one.transpose(1, 2)).transpose(1, 2) for one in kv)},
    "keys and values exchanged": {"kv_cache": lambda kv: (kv[1], kv[0])},
    "a wrong scale": {"bmm1_scale": lambda scale: scale * 1.1},
    "no scale": {"bmm1_scale": lambda _: 1.0},
    "a window too wide": {"window_left": lambda left: left + 1},
    "a window too narrow": {"window_left": lambda left: left - 1},
    "a key too few": {"seq_lens": lambda lens: lens - 1},
    "another row's pages": {"block_tables": lambda table: table.roll(1, 0)},
    "no sinks": {"sinks": lambda _: None},
}
"""Changes of arguments that both of FlashInfer's functions have."""


@pytest.mark.parametrize("spoil", [pytest.param(spoil, id=what) for what, spoil in INFER_WRONG.items()])
@pytest.mark.parametrize("rows", [((300, 1), (90, 1), (20, 1)), ((300, 1), (20, 13), (0, 30))], ids=["decodes", "all"])
@pytest.mark.parametrize("library", [FLASHINFER], indirect=True)
def test_flashinfer_with_a_wrong_argument_is_seen(
    library: Library, rows: Sequence[tuple[int, int]], spoil: Spoil, request: pytest.FixtureRequest
) -> None:
    if rows[1][1] > 1:
        request.getfixturevalue("blackwell")
    sequences = Sequences(rows, 2, 64, 16, DTYPE)
    sequences.kv.nan_to_num_()
    batch = sequences.batch(range(len(rows)))
    q, sinks = queries(batch.num_tokens, 4, 64), torch.zeros(4)
    expected = reference.paged_attention(q, sequences.kv, batch, SCALE, 9, None, None, sinks)
    assert (library.attend(q, sequences, batch, 9, None, sinks) - expected).abs().max() < TOLERANCE[DTYPE]
    library.kept.spoil = spoil
    try:
        error = (library.attend(q, sequences, batch, 9, None, sinks) - expected).abs().max()
    except AssertionError:
        return  # the stand-in has seen it
    assert not error < 2 * TOLERANCE[DTYPE]


@pytest.mark.parametrize("library", [FLASHINFER], indirect=True)
@pytest.mark.parametrize("sm", [90, 100])
def test_flashinfer_shares_its_memory(library: Library, sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V are views of the pool. All calls have one workspace, which the first makes."""
    monkeypatch.setattr(gpu, "properties_of", lambda *_: DeviceProperties.of(sm, 132))
    sequences = Sequences(DECODES, 2, 64, 16, DTYPE)
    q = queries(len(DECODES), 4, 64)
    batch = replace(sequences.batch(range(len(DECODES))), host_seq_lens=None)
    names = []
    for _ in range(3):
        with Launches() as launches:
            library.run(q, sequences.kv, batch, SCALE, None, None, None)
        names.append(launches.names)
    assert "aten::zeros" in names[0] and "aten::zeros" not in names[1] and names[1] == names[2]
    for given in library.kept.calls:
        k, v = given["kv_cache"]
        assert k.data_ptr() == sequences.kv.data_ptr() and v.data_ptr() == sequences.kv[:, 1].data_ptr()
        assert given["workspace_buffer"].data_ptr() == library.kept.calls[0]["workspace_buffer"].data_ptr()


@pytest.mark.parametrize("library", [FLASHINFER], indirect=True)
def test_flashinfer_starts_early_where_our_kernels_do(library: Library) -> None:
    with gpu.early_starts():
        infer_decodes(library, INFER_DECODES[0], is_recorded=True)
    assert library.kept.calls[-1]["enable_pdl"] is True


@pytest.mark.parametrize("library", [FLASHINFER], indirect=True)
def test_a_kernel_that_flashinfer_cannot_load_is_named(library: Library) -> None:
    """A later failure of the same kind of call is none of a missing kernel."""

    def fail(_: Any) -> None:
        raise RuntimeError("Ninja build failed")

    library.kept.spoil = {"query": fail}
    with pytest.raises(KernelError, match="no kernel that runs here: Ninja build failed; give --no-attention-libs"):
        infer_decodes(library, INFER_DECODES[0], is_recorded=True)
    library.kept.spoil = {}
    infer_decodes(library, INFER_DECODES[0], is_recorded=True)
    library.kept.spoil = {"query": fail}
    with pytest.raises(RuntimeError, match=r"^Ninja build failed$"):
        infer_decodes(library, INFER_DECODES[0], is_recorded=True)


# -- checks by the libraries themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("max_queries", [1, 24])
def test_cudnn_accepts_the_graph(monkeypatch: pytest.MonkeyPatch, max_queries: int, window: int | None) -> None:
    """The front end checks a graph without a GPU."""
    pytest.importorskip("cudnn")
    kernel = importlib.import_module(f"{PACKAGE}.cudnn")
    monkeypatch.setattr(kernel, "_handle", lambda: None)
    shape = kernel._Shape(DTYPE, 4, max_queries, 8, (64, 2, 2, 32, 128), 16, SCALE, window)
    kernel._graph(shape).validate()


@pytest.mark.parametrize(("max_queries", "window", "softcap"), [(1, None, None), (24, 40, None), (24, None, 5.0)])
def test_flash_attention_4_compiles(max_queries: int, window: int | None, softcap: float | None) -> None:
    """It checks its arguments and compiles for compute capability 9.0 without a GPU, on tensors without data. One of
    them must be a GPU's."""
    pytest.importorskip("flash_attn.cute.interface")
    kernel = importlib.import_module(f"{PACKAGE}.{FLASH_4}")
    sequences = Sequences([(90, max_queries)] * 3, 2, 64, 16, DTYPE)
    batch, q = sequences.batch([0, 1, 2]), queries(3 * max_queries, 8, 64)
    with FakeTensorMode() as mode:
        seq_lens = torch.empty(3, dtype=torch.int32, device="cuda")
        tables = torch.empty(batch.block_tables.shape, dtype=torch.int32, device="cuda")
        query_start = mode.from_tensor(batch.query_start)
        batch = replace(batch, query_start=query_start, seq_lens=seq_lens, block_tables=tables)
        q, kv = mode.from_tensor(q), mode.from_tensor(sequences.kv)
        assert kernel.paged_attention(q, kv, batch, SCALE, window, softcap, None).shape == q.shape


# -- which steps a library takes ---------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """All libraries are installed on a Hopper GPU; loading one gives its name."""
    modules = {
        "flash_attn_interface", "flashinfer", "flashinfer_jit_cache", "flashinfer_cubin", "cudnn", "flash_attn.cute",
        "triton",
    }  # fmt: skip
    monkeypatch.setattr(gpu, "is_installed", modules.__contains__)
    monkeypatch.setattr("inferd.kernels.ops.paged_attention._has_nvcc", lambda: False)
    monkeypatch.setattr(gpu, "properties_of", lambda *_: DeviceProperties.of(90, 132))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_300)
    monkeypatch.setattr(Deferred, "load", lambda deferred: deferred.name)
    PAGED_ATTENTION.force(None)
    yield modules
    PAGED_ATTENTION.force(None)


def test_the_first_installed_library_is_chosen(installed: set[str]) -> None:
    modules = ("flash_attn_interface", "flashinfer", "cudnn", "flash_attn.cute")
    for module, name in zip(modules, LIBRARIES, strict=True):
        assert PAGED_ATTENTION.choice(HOPPER).chosen == name
        installed.remove(module)
        PAGED_ATTENTION.force(None)
    choice = PAGED_ATTENTION.choice(HOPPER)
    assert choice.chosen == "triton"
    assert dict(choice.refused)[FLASH_4] == "flash_attn.cute is not installed"


def test_all_can_be_switched_off(installed: set[str]) -> None:
    PAGED_ATTENTION.exclude(LIBRARIES)
    choice = PAGED_ATTENTION.choice(HOPPER)
    assert choice.chosen == "triton" and [choice.refused[place][1] for place in (1, 2, 3, 4)] == ["is switched off"] * 4
    PAGED_ATTENTION.exclude(())
    assert PAGED_ATTENTION.choice(HOPPER).chosen == FLASH_3


def test_a_deterministic_step_takes_none(installed: set[str]) -> None:
    key = HOPPER._replace(is_invariant=True)
    assert PAGED_ATTENTION.choice(key).chosen == "triton"
    for name in LIBRARIES:
        PAGED_ATTENTION.force(name)
        with pytest.raises(KernelError, match=f"{name}: cuts a sequence's keys by what else the step has"):
            PAGED_ATTENTION.choice(key)
        assert PAGED_ATTENTION.choice(HOPPER).varies is not None


@pytest.mark.parametrize(
    ("changed", "reason", "refusing"),
    [
        ({"device_type": "cpu"}, "runs on GPUs only", LIBRARIES),
        (
            {"dtype": torch.float32, "kv_dtype": torch.float32},
            "multiplies 16-bit numbers, not torch.float32",
            LIBRARIES,
        ),
        ({"kv_dtype": torch.int8}, "takes K and V in the dtype of the queries, not torch.int8 for torch.bf", LIBRARIES),
        ({"head_dim": 264}, "takes head sizes that are multiples of 8, up to 256, not 264", LIBRARIES),
        ({"head_dim": 100}, "takes head sizes that are multiples of 8, up to 256, not 100", LIBRARIES),
        ({"has_softcap": True}, "does not cap scores", (FLASHINFER, CUDNN)),
        ({"has_sinks": True}, "is called without sinks", ALL_STEPS),
        ({"is_recorded": False}, "makes a plan for each shape of a step", (CUDNN,)),
        ({"is_decode": False}, "computes only steps of rows with one query each on", (FLASHINFER,)),
        ({"block_size": 8}, "takes blocks of 16, 32, 64 or 128 tokens, not 8", (FLASHINFER,)),
        ({"head_dim": 104}, "takes head sizes that are multiples of 16, and at most 16", (FLASHINFER,)),
        ({"heads_per_kv_head": 17}, "takes head sizes that are multiples of 16, and at most 16", (FLASHINFER,)),
        ({"head_dim": 96}, "needs nvcc: flashinfer-jit-cache has kernels for heads of 64,", (FLASHINFER,)),
        ({"heads_per_kv_head": 7}, "needs nvcc: flashinfer-jit-cache has kernels for heads of", (FLASHINFER,)),
    ],
)
def test_a_library_says_why_not(
    installed: set[str], changed: dict[str, Any], reason: str, refusing: tuple[str, ...]
) -> None:
    key = HOPPER._replace(**changed)
    for one in PAGED_ATTENTION._implementations:
        if one.name in LIBRARIES:
            found = one.predicate(key)
            assert (found is not None and found.startswith(reason[:60])) == (one.name in refusing), (one.name, found)


@pytest.mark.parametrize(
    ("sm", "head_dim", "version", "refusing"),
    [
        (80, 128, 91_300, dict.fromkeys(LIBRARIES, "needs compute capability")),
        (100, 128, 91_300, {FLASH_3: "needs compute capability 9.x; this GPU has 10.0"}),
        (
            100,
            192,
            91_300,
            {
                FLASH_3: "needs",
                FLASHINFER: "takes heads of 64, 128 or 256 on compute capability 10.x, not 192",
                CUDNN: "takes head sizes up to 128",
                FLASH_4: "takes head sizes up",
            },
        ),
        (100, 256, 91_300, {FLASH_3: "needs", CUDNN: "takes head sizes up to 128"}),
        (120, 128, 91_300, dict.fromkeys(ALL_STEPS, "needs compute capability")),
        (121, 128, 91_300, dict.fromkeys(ALL_STEPS, "needs compute capability")),
        (90, 128, 91_001, {CUDNN: "needs cuDNN 9.10.2 or later; torch has 9.10.1"}),
        (90, 128, None, {CUDNN: "needs cuDNN 9.10.2 or later; torch has 0.0.0"}),
    ],
)
def test_it_depends_on_the_gpu(
    installed: set[str],
    monkeypatch: pytest.MonkeyPatch,
    sm: int,
    head_dim: int,
    version: int | None,
    refusing: dict[str, str],
) -> None:
    monkeypatch.setattr(gpu, "properties_of", lambda *_: DeviceProperties.of(sm, 132))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    for one in PAGED_ATTENTION._implementations:
        if one.name in LIBRARIES:
            found = one.predicate(HOPPER._replace(head_dim=head_dim))
            assert found is None if one.name not in refusing else str(found).startswith(refusing[one.name])


def test_flashinfer_takes_what_it_can_load(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc builds what is not built yet. Without flashinfer-cubin, trtllm-gen would download its kernels."""
    [refuses] = [one.predicate for one in PAGED_ATTENTION._implementations if one.name == FLASHINFER]
    installed.remove("flashinfer_jit_cache")
    assert refuses(HOPPER) == "needs nvcc, or the package flashinfer-jit-cache"
    monkeypatch.setattr("inferd.kernels.ops.paged_attention._has_nvcc", lambda: True)
    assert refuses(HOPPER) is None and refuses(HOPPER._replace(head_dim=96, heads_per_kv_head=7)) is None
    monkeypatch.setattr(gpu, "properties_of", lambda *_: DeviceProperties.of(100, 148))
    assert refuses(HOPPER) is None and refuses(HOPPER._replace(is_recorded=False, is_decode=False)) is None
    assert "computes no recorded steps with prompts" in str(refuses(HOPPER._replace(is_decode=False)))
    assert refuses(HOPPER._replace(block_size=128)) == "takes blocks of 16, 32 or 64 tokens, not 128"
    installed.remove("flashinfer_cubin")
    assert "needs the package flashinfer-cubin" in str(refuses(HOPPER))


@pytest.mark.parametrize("has_home", [False, True])
def test_nvcc_is_found_as_flashinfer_finds_it(has_home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(nvcc.parent))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path)) if has_home else monkeypatch.delenv("CUDA_HOME", raising=False)
    found = _has_nvcc.__wrapped__
    assert found() == (not has_home and Path("/usr/local/cuda/bin/nvcc").exists())
    nvcc.touch(mode=0o755)
    assert found()


@pytest.mark.parametrize("library", [CUDNN], indirect=True)
def test_a_shape_without_a_plan_is_named(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = importlib.import_module(f"{PACKAGE}.cudnn")

    def refuse(*_: Any) -> None:
        raise kernel.cudnn.cudnnGraphNotSupportedError("head too odd")

    monkeypatch.setattr("tests.kernels.attention_libraries.Graph.build", refuse)
    with pytest.raises(KernelError, match="no plan for 4 rows with up to 1 queries: head too odd; give --no-att"):
        kernel._plan(kernel._Shape(DTYPE, 4, 1, 8, (64, 2, 2, 32, 128), 16, SCALE, None))


@pytest.mark.parametrize("library", [FLASH_3], indirect=True)
def test_partial_results_stay_within_their_memory(library: Library) -> None:
    kernel = importlib.import_module(f"{PACKAGE}.{library.name}")
    sequences = Sequences(DECODES, 1, 16, 16, DTYPE)
    for rows, heads in ((1, 8), (256, 64), (4096, 128)):
        batch = replace(sequences.batch([0]), query_lens=(1,) * rows)
        splits = kernel.num_splits(torch.empty(rows, heads, 128, device="meta"), batch, heads)
        assert splits == 1 or splits * rows * heads * 129 * 4 <= kernel.SLOT_BYTES
    chunk = replace(sequences.batch([0]), query_lens=(65,))
    assert kernel.num_splits(torch.empty(65, 8, 128, device="meta"), chunk, 8) == 1
