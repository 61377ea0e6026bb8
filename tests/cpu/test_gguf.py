"""GGUF files: blocks are dequantized as the reference does, and a converted checkpoint is the same model, in each
family.

`gguf_blocks.safetensors` holds random blocks of each type, and their values by the package `gguf` 0.19 (quants.py).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.quality.gguf_blocks import (
    PACKS,
    Pack,
    Stored,
    as_bf16,
    as_f16,
    as_f32,
    as_q2_k,
    as_q3_k,
    as_q4_0,
    as_q4_1,
    as_q4_k,
    as_q6_k,
    as_q8_0,
)
from benchmarks.quality.gguf_files import convert, convert_in_parts, write
from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.errors import ModelError
from inferd.engine.api.memory.planner import format_bytes, stored_quantization, weight_lines
from inferd.engine.api.memory.precision import Precision, stored_as
from inferd.engine.api.model import ModelFacts
from inferd.engine.arch import matrix
from inferd.engine.arch.description import Arch
from inferd.engine.arch.gguf.formats import LAYOUTS, GgufBlocks
from inferd.engine.arch.gguf.header import parse_header
from inferd.engine.arch.gguf.orders import Pairs, TiledHeads
from inferd.engine.arch.gguf.tensors import Conversion, PlacedTensor
from inferd.engine.arch.gguf.types import PLAIN, TYPES, TensorType
from inferd.engine.arch.registry import describe, weights
from inferd.engine.arch.weights import QuantizedSource
from inferd.engine.models.decoder import Decoder
from inferd.engine.models.loader import load, recipe_of
from inferd.engine.quant.checkpoints import gguf
from inferd.engine.quant.checkpoints.gguf_blocks import dequantize, unpack
from inferd.engine.quant.checkpoints.reader import CheckpointError
from inferd.engine.quant.stored_schemes import StoredIntegers
from inferd.kernels.cpu import native
from inferd.kernels.ops.quantized import NARROWED, Matrix, rows_of
from tests.cpu.checkpoints import Case, read_config
from tests.cpu.gguf_cases import CASES, HYBRIDS, with_value_heads
from tests.cpu.paging import prompt_logits
from tests.cpu.quantized_checkpoints import table_of_the_docs

VECTORS = load_file(Path(__file__).parent / "gguf_blocks.safetensors")
BLOCKED = [kind for kind in TYPES.values() if kind.name not in PLAIN]


@pytest.mark.parametrize("kind", BLOCKED, ids=lambda kind: kind.name)
def test_values_are_those_of_the_reference(kind: Any) -> None:
    blocks, expected = VECTORS[f"{kind.name}.blocks"], VECTORS[f"{kind.name}.values"]
    assert blocks.shape[1] == kind.block_bytes and expected.shape[1] == kind.block_size
    assert torch.equal(dequantize(blocks, kind.name), expected)
    wrong = blocks.clone()
    wrong[:, -3] ^= 1
    assert not torch.equal(dequantize(wrong, kind.name), expected)


@pytest.mark.parametrize("kind", BLOCKED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("offset", [0, 2, 6])
def test_blocks_may_lie_anywhere(kind: Any, offset: int) -> None:
    """The last piece of a matrix may be a single block."""
    blocks, expected = VECTORS[f"{kind.name}.blocks"], VECTORS[f"{kind.name}.values"]
    for count in (0, 1, 2):
        around = torch.zeros(offset + (count + 1) * kind.block_bytes, dtype=torch.uint8)
        own = around[offset:].view(count + 1, kind.block_bytes)
        own[:count] = blocks[:count]
        assert torch.equal(dequantize(own[:count], kind.name), expected[:count])


SAME_ROPE_OTHERWISE = ("llama 3", "phi 3, long factors")
"""Files that state the rope by a factor for each frequency, in 32 bits."""


@pytest.mark.parametrize("case", [*CASES, *HYBRIDS], ids=lambda case: case.name)
def test_a_converted_checkpoint_is_the_same_model(case: Case, tmp_path: Path) -> None:
    case.save(tmp_path, torch.bfloat16)
    checkpoint = Checkpoint.read(convert(tmp_path, tmp_path / "model.gguf"))
    arch, original = ModelFacts.of(checkpoint).arch, describe(read_config(tmp_path))
    ids = torch.randint(0, 211, (40,)).tolist()
    ours, expected = (logits(path, ids) for path in (checkpoint.path, tmp_path))
    has_same_ropes = case.name not in SAME_ROPE_OTHERWISE
    assert plain(arch, has_same_ropes) == plain(original, has_same_ropes)
    if has_same_ropes and case not in HYBRIDS:
        assert torch.equal(ours, expected)
    else:
        assert torch.allclose(ours, expected, rtol=1e-3, atol=1e-3)
    wrong = logits(checkpoint.path, [ids[1], *ids[1:]])
    assert not torch.allclose(wrong, expected, rtol=1e-2, atol=1e-2)


def plain(arch: Arch, with_ropes: bool = True) -> Arch:
    """The description without what a conversion may change: the dtype, and how matrices are cut. Files of Granite with
    Mamba-2 do not state the number of positions."""
    positions = 0 if arch.architecture == "GraniteMoeHybridForCausalLM" else arch.max_positions
    ropes = arch.ropes if with_ropes else (None,) * arch.num_layers
    return dataclasses.replace(arch, dtype="float32", ropes=ropes, splits_matrices=False, max_positions=positions)


def decoder_of(path: Path) -> Decoder:
    checkpoint = Checkpoint.read(path)
    decoder = Decoder(describe(checkpoint.config), torch.float32, "cpu")
    load(decoder, checkpoint.tensors_of(decoder.arch))
    return decoder


def logits(path: Path, ids: list[int]) -> Tensor:
    return prompt_logits(decoder_of(path), ids, (len(ids),))


@pytest.mark.parametrize("pack", [as_f32, as_f16, as_bf16, as_q8_0, as_q4_0, as_q4_1], ids=lambda pack: pack.__name__)
def test_a_quantized_file_is_the_model_of_its_dequantized_weights(pack: Pack, tmp_path: Path) -> None:
    """The oracle is the same file in F32, with the values that the blocks of the other one hold."""
    case = Case("llama", "llama", {"tie_word_embeddings": True, "intermediate_size": 128})
    case.save(tmp_path)
    file = convert(tmp_path, tmp_path / "quantized.gguf", lambda _: pack)
    info = Checkpoint.read(file).tensors["model.layers.0.mlp.down_proj.weight"]
    assert info.dtype == pack.__name__.removeprefix("as_").upper()

    def unpacked(values: Tensor) -> Any:
        shape, code, content = pack(values)
        kind = TYPES[code]
        blocks = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, kind.block_bytes)
        return as_f32(dequantize(blocks, kind.name).view(shape))

    whole = convert(tmp_path, tmp_path / "whole.gguf", lambda _: unpacked)
    ids = torch.randint(0, 211, (20,)).tolist()
    assert torch.equal(logits(file, ids), logits(whole, ids))


def test_parts_of_a_split_file_are_one_model(tmp_path: Path) -> None:
    Case("llama", "llama", {"tie_word_embeddings": True}).save(tmp_path)
    whole = convert(tmp_path, tmp_path / "whole.gguf")
    parts = convert_in_parts(tmp_path, "model", 3)
    ids = torch.randint(0, 211, (20,)).tolist()
    assert torch.equal(logits(parts[0], ids), logits(whole, ids))
    with pytest.raises(
        ModelError,
        match=r"model-00002-of-00003.gguf is part 2 of 3 .*: give its first part, /.*/model-00001-of-00003.gguf$",
    ):
        Checkpoint.read(parts[1])
    with pytest.raises(ModelError, match=r"by its metadata it is part 2 of 3; by its name it is part 1 of 1"):
        Checkpoint.read(parts[1].rename(tmp_path / "other.gguf"))
    with pytest.raises(
        ModelError, match=r"part 1 of 3 .* and 1 of the others are missing: model-00002-of-00003.gguf; put all"
    ):
        Checkpoint.read(parts[0])
    with pytest.raises(ModelError, match=r"give its first part, .*; missing beside it: model-00002-of-00003.gguf"):
        Checkpoint.read(parts[2])
    with pytest.raises(ModelError, match=r"by its name it is part 4 of 3, but parts are numbered from 1"):
        Checkpoint.read(tmp_path / "model-00004-of-00003.gguf")


def test_a_file_of_the_vision_part_beside_is_told(tmp_path: Path) -> None:
    """It belongs to the model if it projects to its hidden size."""
    Case("llama", "llama", {"tie_word_embeddings": True}).save(tmp_path)
    file = convert(tmp_path, tmp_path / "model.gguf")
    vision = {"general.architecture": "clip", "clip.vision.projection_dim": 32}
    other = write(tmp_path / "mmproj-F16.gguf", vision, {"v.patch_embd.weight": as_f16(torch.zeros(8, 8))})
    assert ModelFacts.of(Checkpoint.read(file)).scope == ""
    vision["clip.vision.projection_dim"] = 64
    write(other, vision, {"v.patch_embd.weight": as_f16(torch.zeros(8, 512))})
    facts = ModelFacts.of(Checkpoint.read(file))
    size = format_bytes(other.stat().st_size)
    assert facts.scope == f"the text part of LlamaForCausalLM alone; not loaded: mmproj-F16.gguf ({size})"
    with pytest.raises(ModelError, match="holds the parts of a model that see or hear; give the file of its text part"):
        Checkpoint.read(other)
    other.write_bytes(b"damaged")
    assert ModelFacts.of(Checkpoint.read(file)).scope == ""


# -- matrices that keep their blocks -----------------------------------------------------------------------------------

CODES = {kind.name: code for code, kind in TYPES.items()}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def random_blocks(kind: str, typical: float = 0.05) -> Pack:
    """Packs a matrix of this shape as random blocks, whose values are about `typical` large."""
    blocks, values = VECTORS[f"{kind}.blocks"], VECTORS[f"{kind}.values"]
    large = values.square().mean(1).sqrt()
    chosen = blocks[(large / typical).log().abs().argsort()[:2]]

    def pack(values: Tensor) -> Stored:
        picks = torch.randint(0, len(chosen), (values.numel() // blocks_of(kind).block_size,))
        return Stored(tuple(values.shape), CODES[kind], chosen[picks].numpy().tobytes())

    return pack


def blocks_of(kind: str) -> TensorType:
    return TYPES[CODES[kind]]


ORDERS = {
    "plain": Conversion(),
    "pairs": Conversion(Pairs(2)),
    "value heads in tiles": Conversion(TiledHeads(3, 2, 1_000, first=2_400)),
    "columns of value heads in tiles": Conversion(columns=TiledHeads(4, 2, 64)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_kernel_gets_the_numbers_of_the_blocks(kind: str, order: str, tmp_path: Path) -> None:
    conversion, width = ORDERS[order], 512
    if conversion.columns is not None and LAYOUTS[kind].block_size is not None:
        conversion, width = Conversion(columns=TiledHeads(2, 2, 256)), 1024  # whole blocks
    stored = random_blocks(kind)(torch.empty(2_100 * 4 if conversion.rows else 70, width))
    file = write(tmp_path / "x.gguf", {}, {"w": stored})
    tensor = parse_header(file.read_bytes(), file.stat().st_size).tensors[0]
    placed = PlacedTensor(tensor, file, conversion)
    expected = torch.cat([values for _, values in gguf.parts(placed)])
    shape = stored.shape[0], stored.shape[1]
    of = matrix.LinearWeight.whole("o", matrix.Component.ATTENTION, shape)
    source = QuantizedSource("m", GgufBlocks(kind, conversion.rows, conversion.columns), shape, of)
    rows: dict[str, list[Tensor]] = {}
    for name, row, values in gguf.READER.read(source, {"weight": gguf.mapped(placed)}):
        assert row == sum(len(part) for part in rows.get(name, ()))
        rows.setdefault(name, []).append(values)
    whole = {name: torch.cat(parts) for name, parts in rows.items()}
    layout = LAYOUTS[kind]
    assert ("minimums" in whole) == (layout.offsets == "minimums")
    dtypes = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
    assert whole["scales" if layout.block_size is None else "block_scales"].dtype == dtypes[layout.scale_dtype]
    packed = Matrix(
        bias=None, table=layout.table, narrowed_to=layout.bits if layout.bits in NARROWED else None, **whole
    )
    assert packed.group_size == layout.group_size and packed.bits == layout.bits
    assert torch.equal(rows_of(packed, torch.arange(len(expected))), expected)
    found = packed.dequantized()
    if layout.offsets == "none":
        assert torch.equal(found.float(), expected)
    else:
        # The reference rounds the product before it adds the minimum.
        assert torch.allclose(found, expected.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_layer_holds_the_bytes_of_its_plan(kind: str) -> None:
    """They are at most a tenth more than those of the file."""
    if native.missing():
        pytest.skip(f"only C++ kernels pack weights: {native.missing()}")
    layout, (out_size, in_size) = LAYOUTS[kind], (32, 512)
    data = torch.frombuffer(bytearray(random_blocks(kind)(torch.empty(out_size, in_size)).data), dtype=torch.uint8)
    groups = unpack(data.view(-1, blocks_of(kind).block_bytes), kind)
    tensors = {name: values.reshape(out_size, -1) for name, values in groups._asdict().items() if values is not None}
    layer = StoredIntegers(torch.float32, layout, ()).bind(bias=None, **tensors)
    assert isinstance(layer, native.Product)
    table_bytes = 0 if layout.table == "centred" else 16
    held = sum(tensor.nbytes for tensor in layer.kept if tensor is not None) - table_bytes
    assert held == stored_as(layout).num_bytes(out_size, in_size).value
    assert held <= 1.1 * len(data)


@pytest.mark.parametrize(
    "pack", [as_q2_k, as_q3_k, as_q4_0, as_q4_1, as_q4_k, as_q6_k, as_q8_0], ids=lambda pack: pack.__name__
)
def test_a_model_from_blocks_is_near_that_of_dequantized_weights(pack: Pack, tmp_path: Path) -> None:
    """v is stored in another type than q and k, as in files of Q4_K_M; the head keeps the embedding's blocks. Only the
    activations are rounded, to 8 bits."""
    Case("llama", "llama", {**WIDE, "tie_word_embeddings": True}).save(tmp_path)
    other: Pack = as_q8_0 if pack is as_q6_k else as_q6_k

    def packs(name: str) -> Pack:
        return as_q8_0 if name == "token_embd.weight" else other if "attn_v" in name else pack

    file = convert(tmp_path, tmp_path / "model.gguf", packs)
    checkpoint = Checkpoint.read(file, keeps_blocks=True)
    facts = ModelFacts.of(checkpoint)
    assert facts.num_params == ModelFacts.of(Checkpoint.read(file)).num_params
    assert stored_quantization(facts.arch) == ("int8" if pack in (as_q6_k, as_q8_0) else "int4")
    types = {found.__name__.removeprefix("as_").upper() for found in (pack, other, as_q8_0)}
    assert facts.blocks == f"{', '.join(sorted(types))} kept"
    assert ModelFacts.of(Checkpoint.read(file)).blocks == f"{', '.join(sorted(types))} dequantized"
    ids = torch.randint(0, 211, (40,)).tolist()
    exact = logits(file, ids)

    def error(arch: Arch) -> float:
        decoder = Decoder(arch, torch.float32, "cpu", recipe=recipe_of(arch, "none", torch.float32))
        load(decoder, checkpoint.tensors_of(arch))
        return rms(prompt_logits(decoder, ids, (len(ids),)) - exact) / rms(exact)

    assert error(facts.arch) < 0.1
    stored: Any = facts.arch.stored
    as_they_lie = [(module, form and dataclasses.replace(form, rows=None)) for module, form in stored.exceptions]
    wrong = dataclasses.replace(stored, exceptions=tuple(as_they_lie))
    assert error(dataclasses.replace(facts.arch, stored=wrong)) > 0.3


@pytest.mark.parametrize("pack", [as_q2_k, as_q3_k, as_q4_k, as_q6_k, as_q8_0], ids=lambda pack: pack.__name__)
@pytest.mark.parametrize("is_tied", [True, False])
def test_rows_of_an_embedding_in_blocks_are_those_of_its_values(is_tied: bool, pack: Pack, tmp_path: Path) -> None:
    """A tied head and its embedding are one matrix; its rows are dropped when the embedding is read once more."""
    Case("llama", "llama", {**WIDE, "tie_word_embeddings": is_tied}).save(tmp_path)
    file = convert(tmp_path, tmp_path / "model.gguf", lambda name: pack if name == "token_embd.weight" else as_q8_0)
    checkpoint = Checkpoint.read(file, keeps_blocks=True)
    arch = ModelFacts.of(checkpoint).arch
    assert arch.stored is not None and arch.stored.shares_head == is_tied
    lines = {line.name for line in weight_lines(arch, Precision("float32"))}
    assert (matrix.Component.EMBEDDING in lines) != is_tied
    decoder = Decoder(arch, torch.float32, "cpu", recipe=recipe_of(arch, "none", torch.float32))
    load(decoder, checkpoint.tensors_of(arch))
    ids = torch.randint(0, 211, (40,))
    expected = decoder_of(file).embedded(ids)
    assert torch.equal(decoder.embedded(ids), expected)
    assert not torch.equal(decoder.embedded(ids.roll(1)), expected)


def test_experts_keep_their_blocks(tmp_path: Path) -> None:
    """A stack of matrices is read expert by expert. Its blocks give the logits of its dequantized weights, nearly."""
    config = {**WIDE, "intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}
    Case("olmoe", "olmoe", config).save(tmp_path)
    file = convert(tmp_path, tmp_path / "model.gguf", lambda name: as_q6_k if "down" in name else as_q4_k)
    checkpoint, ids = Checkpoint.read(file, keeps_blocks=True), list(range(40))
    arch = ModelFacts.of(checkpoint).arch
    decoder = Decoder(arch, torch.float32, "cpu", recipe=recipe_of(arch, "none", torch.float32))
    load(decoder, checkpoint.tensors_of(arch))
    parameters = weights(arch).parameters()
    assert parameters["layers.1.mlp.experts.3.gate_up.weight"].layout == LAYOUTS["Q4_K"]
    assert parameters["layers.1.mlp.experts.3.down.weight"].layout == LAYOUTS["Q6_K"]
    exact, wrong = logits(file, ids), logits(file, [*ids[1:], 0])
    assert rms(prompt_logits(decoder, ids, (len(ids),)) - exact) < 0.1 * rms(exact) < 0.3 * rms(wrong - exact)


@pytest.mark.parametrize("head_size", [32, 16])
def test_value_heads_in_tiles_keep_their_blocks(head_size: int, tmp_path: Path) -> None:
    """The columns of an output projection are moved by whole groups of 32. If heads are smaller, it is dequantized."""
    case = with_value_heads(next(case for case in HYBRIDS if case.name == "qwen 3.5"), head_size)
    dataclasses.replace(case, config={**case.config, "intermediate_size": 128}).save(tmp_path)
    file = convert(tmp_path, tmp_path / "model.gguf", lambda _: as_q8_0)
    checkpoint, ids = Checkpoint.read(file, keeps_blocks=True), list(range(40))
    arch = ModelFacts.of(checkpoint).arch
    out = weights(arch).parameters()["layers.0.recurrent.out.weight"]
    assert out.layout == (LAYOUTS["Q8_0"] if head_size == 32 else None)
    decoder = Decoder(arch, torch.float32, "cpu", recipe=recipe_of(arch, "none", torch.float32))
    load(decoder, checkpoint.tensors_of(arch))
    exact, wrong = logits(file, ids), logits(file, [*ids[1:], 0])
    assert rms(prompt_logits(decoder, ids, (len(ids),)) - exact) < 0.1 * rms(exact) < 0.3 * rms(wrong - exact)


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def test_a_file_without_blocks_stays_as_it_is(tmp_path: Path) -> None:
    Case("llama", "llama", {"tie_word_embeddings": True}).save(tmp_path)
    file = convert(tmp_path, tmp_path / "model.gguf", lambda _: as_f16)
    assert ModelFacts.of(Checkpoint.read(file, keeps_blocks=True)) == ModelFacts.of(Checkpoint.read(file))
    with pytest.raises(ModelError, match="is a GGUF file, which only native families read: give --model-impl auto"):
        ModelFacts.of(Checkpoint.read(file), "transformers")


def test_a_scale_that_is_no_number_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    Case("llama", "llama", {**WIDE, "tie_word_embeddings": True}).save(tmp_path)

    def pack(values: Tensor) -> Stored:
        stored = as_q4_1(values)
        return stored._replace(data=b"\x00\x7c" + stored.data[2:])

    file = convert(tmp_path, tmp_path / "model.gguf", lambda name: pack if name == "blk.1.ffn_up.weight" else as_q4_1)
    checkpoint = Checkpoint.read(file, keeps_blocks=True)
    arch = ModelFacts.of(checkpoint).arch
    decoder = Decoder(arch, torch.float32, "cpu", recipe=recipe_of(arch, "none", torch.float32))
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight must have finite scales, but 1 of"):
        load(decoder, checkpoint.tensors_of(arch))


@pytest.mark.parametrize("kind", BLOCKED, ids=lambda kind: kind.name)
def test_a_packed_matrix_is_near_the_given_one(kind: TensorType) -> None:
    """The packs of `benchmarks.quality`: their error is that of the bits of a weight, and of a few for scales."""
    torch.manual_seed(0)
    given = torch.randn(16, 512) / 20
    given[:, 256:320] = 0
    stored = PACKS[kind.name](given)
    assert TYPES[stored.type] == kind
    blocks = torch.frombuffer(bytearray(stored.data), dtype=torch.uint8).view(-1, kind.block_bytes)
    found = dequantize(blocks, kind.name).view(stored.shape)
    assert rms(found - given) / rms(given) < 4 * 2.0 ** -(8 * kind.block_bytes // kind.block_size)
    assert rms(found[:, 256:320]) < 1e-4


def test_the_table_in_the_docs_has_every_type() -> None:
    """Bytes in memory are those of rows of 4,096 inputs. Numbers that are not quantized keep their bytes."""
    stated = table_of_the_docs("type")
    assert list(stated) == list(PACKS) and set(PACKS) == {kind.name for kind in TYPES.values()}
    for kind in TYPES.values():
        row, stored = stated[kind.name], kind.block_bytes / kind.block_size
        layout = LAYOUTS.get(kind.name)
        held = stored if layout is None else stored_as(layout).num_bytes(1, 4096).value / 4096
        assert abs(float(row["bytes in the file"]) - stored) <= 0.0005, kind.name
        assert abs(float(row["bytes in memory"]) - held) <= 0.0005, kind.name
        assert float(row["KL"]) >= 0, kind.name
