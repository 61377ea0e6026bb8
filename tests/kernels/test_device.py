"""The choice of a form that fits a device: by the arithmetic of its shared memory, which the compiler confirms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from inferd.engine.api.machine.cards import card
from inferd.kernels import gpu
from inferd.kernels.compile import aot, compiled, faults, sass
from inferd.kernels.device import (
    LEAST_SHARED_BYTES,
    LEAST_STAGES,
    SHARED_BYTES,
    Candidate,
    DeviceProperties,
    DoesNotFitError,
    SharedNeed,
    chosen_forms,
    fit,
)
from tests.conftest import ROOT

pytest.importorskip("triton")

from inferd.kernels.gpu import few_rows, integers
from inferd.kernels.ops.linear import triton as linear
from inferd.kernels.ops.lora import triton as lora
from inferd.kernels.ops.lora.weights import LoraWeights
from inferd.kernels.ops.paged_attention import passes

TABLE = ROOT / "benchmarks" / "results" / "compiled.json"
ADA, HOPPER, BLACKWELL = (DeviceProperties.of(sm, 100) for sm in (89, 90, 100))
UNKNOWN = DeviceProperties.of(103, 148, 227 << 10)


def devices() -> Iterator[DeviceProperties]:
    return (DeviceProperties.of(sm, 82) for sm in SHARED_BYTES)


def candidate(name: str, num_stages: int, step_bytes: int) -> Candidate[str]:
    return Candidate(name, name, num_stages, SharedNeed(step_bytes, 1024))


def test_fewer_stages_come_before_smaller_tiles() -> None:
    small = DeviceProperties.of(86, 82)
    large, narrow = candidate("large", 4, 40 << 10), candidate("narrow", 4, 8 << 10)
    assert fit(HOPPER, [large, narrow]) == ("large", 4)
    assert fit(small, [large, narrow]) == ("large", 3)
    assert fit(small, [large._replace(need=SharedNeed(99 << 10, 1024)), narrow]) == ("narrow", 4)
    assert "large with 3 of 4 stages" in chosen_forms() and "narrow" not in chosen_forms()
    with pytest.raises(DoesNotFitError, match=r"no form fits 101,376 bytes .* 2 stages: large needs 105,472"):
        fit(small, [candidate("large", 4, 102 << 10)])


def test_groups_of_warps_keep_one_more_step() -> None:
    need = SharedNeed(10, 3, group_bytes=10)
    assert [need.of(4, device) for device in (ADA, HOPPER, BLACKWELL, UNKNOWN)] == [33, 43, 43, 43]


def test_a_device_that_no_table_knows_gets_the_safest_forms() -> None:
    assert (UNKNOWN.is_known, UNKNOWN.shared_bytes, UNKNOWN.starts_early) == (False, LEAST_SHARED_BYTES, False)
    assert passes.refuses_parts(UNKNOWN, 2, is_deterministic=False) == "was not compiled for compute capability 10.3"
    assert DeviceProperties.of(87, 16, 64 << 10).shared_bytes == 64 << 10, "less than any known device"


def test_what_a_device_has() -> None:
    has = {device.sm: (device.has_warp_groups, device.has_tensor_memory, device.converts_e4m3) for device in devices()}
    plain = (False, False, True)
    assert has == {80: (False,) * 3, 86: (False,) * 3, 89: plain, 90: (True, False, True), 100: (False, True, True),
                   120: plain, 121: plain}  # fmt: skip
    assert str(DeviceProperties.of(86, 82)) == (
        "compute capability 8.6, 82 multiprocessors, 99 KiB of shared memory a program, mma.sync, no 8-bit floats"
    )


def test_every_form_fits_every_device_that_may_take_it() -> None:
    """As computed, and as the committed table says that it was compiled."""
    rows = {(row.op, row.config, row.sm): row.shared_bytes for row in compiled.read_table(TABLE).rows}
    num_fewer = dict.fromkeys(SHARED_BYTES, 0)
    for form in aot.all_shipped():
        for device in devices():
            if form.min_sm <= device.sm <= form.max_sm:
                took = rows[form.op, form.config, device.sm]
                assert took <= device.shared_bytes, (form.op, form.config, device)
                if form.shared is not None:
                    stages = form.stages_on(device.sm)
                    assert stages >= LEAST_STAGES and form.shared.of(stages, device) <= device.shared_bytes
                    assert 0 <= form.shared.of(stages, device) - took <= faults.MOST_UNUSED_BYTES
                    num_fewer[device.sm] += stages < form.num_stages
    assert num_fewer == {80: 0, 86: 12, 89: 12, 90: 0, 100: 0, 120: 27, 121: 27}


class Launches:
    """A kernel that keeps the arguments of its launches and computes nothing."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, _: object) -> Callable[..., None]:
        return lambda *_, **options: self.options.append(options)


def launch_few_rows() -> None:
    for num_rows, gate, out_size in ((1, "silu", 1024), (1, "silu", 65_536), (1, None, 65_536), (16, "silu", 1024)):
        weight = torch.empty(out_size * (1 if gate is None else 2), 256, dtype=torch.bfloat16)
        few_rows.few_rows(torch.empty(num_rows, 256, dtype=torch.bfloat16), weight, gate=gate)


def launch_invariant() -> None:
    product = linear.Invariant(torch.empty(64, 256, dtype=torch.bfloat16), None, None, torch.bfloat16)
    for num_rows in (1, 64, 128):
        product(torch.empty(num_rows, 256, dtype=torch.bfloat16))


def launch_lora() -> None:
    for rank in (16, 32, 64):
        weights = LoraWeights.empty(1, rank, 256, (64,), torch.bfloat16, "cpu")
        y, x = torch.empty(1, 64, dtype=torch.bfloat16), torch.empty(1, 256, dtype=torch.bfloat16)
        lora.add_lora(y, x, weights, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("sm", SHARED_BYTES)
@pytest.mark.parametrize(
    ("module", "name", "launch", "count"),
    [
        (few_rows, "_few_rows", launch_few_rows, 4),
        (linear, "_invariant", launch_invariant, 3),
        (lora, "_shrink", launch_lora, 3),
    ],
)
def test_launches_are_of_forms_that_were_compiled(
    module: ModuleType, name: str, launch: Callable[[], None], count: int, sm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has a form with the constants, stages, warps and registers of each launch."""
    rows = {(row.op, row.config) for row in compiled.read_table(TABLE).rows if row.sm == sm}
    kernel, launches = getattr(module, name), Launches()
    forms = [
        form
        for form in aot.all_shipped()
        if form.kernel is kernel and (form.op, form.config) in rows
        if form.signature["x"] == form.signature.get("out", "*bf16") == "*bf16"
    ]
    monkeypatch.setattr(gpu, "properties_of", lambda *_: DeviceProperties.of(sm, 82))
    monkeypatch.setattr(module, name, launches)
    if name == "_shrink":
        monkeypatch.setattr(module, "_expand", Launches())
    launch()
    assert len(launches.options) == count
    for options in launches.options:
        alike = [form for form in forms if form.constants.items() <= options.items()]
        assert alike, options
        for form in alike:
            of_form = {"num_warps": form.num_warps, "num_stages": form.stages_on(sm), **form.options}
            assert of_form == {key: options[key] for key in of_form}


# Chosen before kernels knew their device: (rows, outputs, whether there is a gate, bytes of a weight) and
# (columns, inputs, warps).
TILES: dict[tuple[int, int, bool, int], tuple[int, int, int]] = {
    (1, 8192, False, 2): (16, 256, 4), (1, 16_384, True, 2): (16, 256, 4), (1, 16_416, False, 2): (32, 256, 4),
    (1, 16_640, True, 2): (32, 256, 4), (1, 18_432, True, 2): (32, 256, 4), (16, 1024, False, 2): (32, 256, 4),
    (1, 8192, False, 1): (32, 512, 8), (1, 8320, False, 1): (32, 256, 4), (1, 16_384, True, 1): (16, 256, 4),
    (1, 16_640, True, 1): (32, 256, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", ["a100-40gb", "a100", "h100", "h200", "b200"])
def test_devices_with_a_large_memory_keep_the_tiles_that_they_had(name: str) -> None:
    """Whatever the number of their multiprocessors, for example 108, 114 in an H100 PCIe, 132 or 148."""
    for device in (card(name).properties, dataclasses.replace(card(name).properties, num_multiprocessors=114)):
        for (num_rows, out_size, has_gate, weight_bytes), expected in TILES.items():
            tile, stages = few_rows.form_of(num_rows, out_size, weight_bytes, 0, device, has_gate=has_gate)
            assert (tile.num_columns, tile.num_inputs, tile.num_warps, stages) == (*expected, 4)
        for num_rows, out_size, is_invariant, columns in (
            (1, 8192, False, 32), (16, 8256, False, 64), (1, 6976, False, 32), (1, 1024, True, 64),
            (17, 1024, False, 64),
        ):  # fmt: skip
            assert integers._tile(num_rows, out_size, is_invariant, device)[1] == columns


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_bytes", [1, 2])
def test_programs_of_attention_fit_a_multiprocessor_together(head_dim: int, kv_bytes: int) -> None:
    """Only devices with little memory have fewer than the form says."""
    for device in devices():
        shape = passes.Shape(8, 4, head_dim, kv_bytes, None, device)
        part_forms = [passes.part_form(head_dim, block_m, kv_bytes) for block_m in passes.BLOCKS[: 2 * kv_bytes]]
        for form in [passes.form(head_dim, kv_bytes, block_m) for block_m in passes.BLOCKS[:3]] + part_forms:
            chosen = passes.fitted((form,), head_dim, kv_bytes, device)
            need = passes.shared_need(chosen, head_dim, kv_bytes).of(chosen.num_stages, device)
            count = passes._num_programs(shape, chosen) * 8
            each = min(form.programs_per_sm, (device.shared_bytes + 1024) // (need + 1024))
            assert each >= 1 and count == device.num_multiprocessors * each // 8 * 8
            assert device.shared_bytes == LEAST_SHARED_BYTES or each == form.programs_per_sm


def test_a_device_that_no_table_knows_is_not_asked_for_its_multiprocessors_memory() -> None:
    form = passes.form(128, 2, 16)
    assert form.programs_per_sm == 2
    for device, each in ((UNKNOWN, 2), (DeviceProperties.of(86, 148), 1), (DeviceProperties.of(100, 148), 2)):
        assert passes._num_programs(passes.Shape(4, 4, 128, 2, None, device), form) == 148 * each // 4


def test_layers_have_wide_tiles_if_they_fill_the_device() -> None:
    """A layer of 14,336 outputs does on the 82 multiprocessors of an RTX 3090, and not on the 132 of an H100."""
    columns = [
        few_rows.form_of(1, 14_336, 2, 0, DeviceProperties.of(sm, count), has_gate=True)[0].num_columns
        for sm, count in ((86, 82), (90, 132))
    ]
    assert columns == [32, 16]


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_wrong_need_is_a_fault(factor: float) -> None:
    form = next(form for form in aot.all_shipped() if form.op == "gate_up" and form.shared is not None)
    assert form.shared is not None
    wrong = SharedNeed(int(form.shared.step_bytes * factor), form.shared.kept_bytes)
    found = faults.judge(
        dataclasses.replace(form, shared=wrong, is_warp_matrix=False, is_streaming=False),
        80,
        sass.Binary("sm_80", 40, 0, b""),
        form.shared.of(form.num_stages, DeviceProperties.of(80, 1)) - 1024,
        sass.Code({}, ()),
        "",
        (),
    )
    assert len(found.faults) == 1 and found.faults[0].endswith("were computed")


def test_the_current_gpu_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        major, minor, multi_processor_count, shared_memory_per_block_optin = 8, 6, 82, 101_376

    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device) or Found)
    gpu.properties_of.cache_clear()
    for _ in range(2):
        assert gpu.properties_of(torch.device("cuda", 0)) == DeviceProperties.of(86, 82)
    assert len(asked) == 1 and gpu.properties_of(torch.device("cpu")) == gpu.INTERPRETED
    gpu.properties_of.cache_clear()
