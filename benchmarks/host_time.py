"""Times the host's part of a step with prompts on a GPU, on a machine without one: Triton's launches end at Triton.
Also counts the launches of a decode step of few rows.

    python -P benchmarks/host_time.py [--model 0.6b] [--decodes 31] [--prompt 256] [--seconds 5] [--profile 30]
    python -P benchmarks/host_time.py --model 8b --launches

The timed model has invariant products, so that nearly all its operations are Triton kernels.
Triton looks at the arguments of each launch as it does for a GPU of compute capability 9.0, finds a compiled kernel
that does nothing, and returns. Missing is what the driver does: about 2 us a launch. The few operations of torch
compute on small tensors of the CPU. A recorded step costs its copy and its replay, which does nothing either.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks import tables
from benchmarks.gpu.models import MODELS
from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.arch.registry import describe
from inferd.engine.models.decoder import Decoder
from inferd.engine.quant.recipe import recipes
from inferd.engine.sample.sampler import Sampler
from inferd.engine.sched.plan import Admission, Row, StepPlan, TableUpdate
from inferd.engine.worker.device import CpuDevice, Recording
from inferd.engine.worker.kv import KVPool
from inferd.engine.worker.loaded import LoadedModel
from inferd.engine.worker.runner import Runner
from inferd.engine.worker.slots import Slots
from inferd.kernels import gpu, registry
from inferd.kernels.device import DeviceProperties
from inferd.kernels.ops.linear import LINEAR, Choices

_BLOCK, _MAX_LEN, _CONTEXT = 32, 2048, 1000
_DEVICE = DeviceProperties.of(90, 132)
"""An H200."""


class _NoDriver:
    """A GPU without a queue."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", _DEVICE.sm, 32)


class _Compiled:
    """A kernel that counts its launches and computes nothing."""

    function, packed_metadata = 0, ()

    def __init__(self, name: str, launches: Counter[str]) -> None:
        self._name, self._launches = name, launches

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, *_: object) -> None:
        self._launches[self._name] += 1


class FreeDevice(CpuDevice):
    """The CPU in the place of a GPU: it records whole steps, and a replay does nothing."""

    records_all = True

    def __init__(self, token_buckets: Sequence[int], num_rows: int = 64) -> None:
        super().__init__(1)
        self.token_buckets, self.row_buckets = token_buckets, (num_rows,)

    def record(self, run: Callable[[], Tensor]) -> Recording:
        return _Nothing(run())


class _Nothing:
    def __init__(self, output: Tensor) -> None:
        self.output = output

    def replay(self) -> None:
        pass


def launch_nothing() -> Counter[str]:
    """Let every op run Triton kernels, and Triton launch nothing. Returns the number of launches by kernel."""
    launches: Counter[str] = Counter()

    def compile_nothing(self: Any, key: str, _: object, device: int, __: object, options: Any, *___: object) -> Any:
        name = self.fn.__name__.lstrip("_") + " early" * options.launch_pdl
        compiled = self.device_caches[device][0][key] = _Compiled(name, launches)
        return compiled

    triton.runtime.driver.set_active(_NoDriver())
    JITFunction._do_compile = compile_nothing
    gpu.interpret(True)
    for op in registry.ops().values():
        op.force("triton" if "triton" in op.implementation_names else None)
    LINEAR.force("triton_invariant")
    vars(gpu)["properties_of"] = lambda *_: _DEVICE
    # Drawn ids are memory that no kernel wrote, so none can be looked up.
    vars(torch.nn.functional)["embedding"] = _first_rows
    return launches


def _first_rows(ids: Tensor, table: Tensor) -> Tensor:
    return table[: len(ids)]


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations that are kernels on a GPU: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        self.count += not is_view and not func.name().startswith("aten::empty")
        return func(*args, **(kwargs or {}))


def launches_of_decode(launches: Counter[str], model: str, num_rows: int) -> tuple[dict[str, int], int]:
    """(launches that each layer adds to a recorded decode step, by kernel; torch's operations that it adds). A step of
    few rows has no product of torch's."""
    LINEAR.force("triton_few_rows")
    found: list[tuple[Counter[str], int]] = []
    for num_layers in (1, 2):
        changed = {"num_hidden_layers": num_layers, "vocab_size": 1024}
        runner = runner_on(FreeDevice((), num_rows), MODELS[model].config() | changed, num_rows, is_invariant=False)
        admit, _ = plans(num_rows, 1, num_slots=num_rows)
        launches.clear()
        with gpu.early_starts(), _Operations() as operations:
            runner.execute(admit)
        found.append((Counter(launches), operations.count))
    (one, ops_of_one), (two, ops_of_two) = found
    return {name: count - one[name] for name, count in two.items() if count > one[name]}, ops_of_two - ops_of_one


def _launches_table(launches: Counter[str], model: str) -> str:
    found = {num_rows: launches_of_decode(launches, model, num_rows) for num_rows in (2, 64)}
    names = list(dict.fromkeys(name for layer, _ in found.values() for name in layer))
    cells: list[list[tables.Cell]] = [[name, *(layer.get(name, 0) for layer, _ in found.values())] for name in names]
    cells.append(["products of torch", *(operations for _, operations in found.values())])
    cells.append(["all", *(sum(layer.values()) + operations for layer, operations in found.values())])
    return tables.markdown(["launches of a decode's layer", *(f"{num_rows} rows" for num_rows in found)], cells)


def runner_on(device: CpuDevice, config: Mapping[str, Any], num_slots: int, *, is_invariant: bool = True) -> Runner:
    """A runner of the model, whose weights may be anything."""
    arch = describe(config)
    decoder = Decoder(arch, torch.bfloat16, "cpu", _MAX_LEN, None, recipes(Choices(is_invariant=is_invariant))["none"])
    for parameter in decoder.parameters.values():
        parameter.write(0, torch.empty(parameter.shape, dtype=parameter.dtype))
    kv = KVPool.allocate(arch, num_slots * _MAX_LEN // _BLOCK, _BLOCK, torch.bfloat16, device)
    slots = Slots(num_slots, _MAX_LEN, _BLOCK, device, len(arch.cache_groups))
    sampler = Sampler(num_slots, arch.vocab_size, "cpu")
    return Runner(LoadedModel(decoder, kv, slots, sampler, device, is_invariant))


def plans(num_decodes: int, num_prompt: int, num_slots: int) -> tuple[StepPlan, StepPlan]:
    """(a step that admits every request, and decodes; a step of decodes and of one chunk of a prompt)."""
    params = SamplingParams(max_tokens=100, seed=0, temperature=0.7, top_p=0.95)
    slots, width = range(num_slots), _MAX_LEN // _BLOCK
    admissions = tuple(Admission(slot, str(slot), (1,) * _CONTEXT, _CONTEXT, params) for slot in slots)
    updates = tuple(TableUpdate(slot, 0, 0, tuple(range(slot * width, (slot + 1) * width))) for slot in slots)
    decodes = tuple(Row(slot, _CONTEXT, 1, True) for slot in range(num_decodes))
    chunk = Row(num_decodes, _CONTEXT - num_prompt, num_prompt, True)
    return StepPlan(0, admissions, updates, decodes), StepPlan(1, (), (), (*decodes, chunk))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6b", choices=MODELS)
    parser.add_argument("--decodes", type=int, default=31)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--profile", type=int, default=0, metavar="LINES")
    parser.add_argument("--launches", action="store_true", help="count the launches of a decode step alone")
    asked = parser.parse_args()
    assert 0 < asked.prompt <= _CONTEXT
    launches = launch_nothing()
    if asked.launches:
        print(_launches_table(launches, asked.model))
        return
    admit, mixed = plans(asked.decodes, asked.prompt, asked.decodes + 1)
    rows: list[list[tables.Cell]] = []
    for name, token_buckets in (("call by call", ()), ("recorded layers", (asked.decodes + asked.prompt,))):
        runner = runner_on(FreeDevice(token_buckets), MODELS[asked.model].config(), asked.decodes + 1)
        for plan in (admit, mixed, mixed):
            runner.execute(plan)
        launches.clear()
        runner.execute(mixed)
        num_launches, taken_s, until_s = sum(launches.values()), [], time.perf_counter() + asked.seconds
        while time.perf_counter() < until_s:
            started_s = time.perf_counter()
            runner.execute(mixed)
            taken_s.append(time.perf_counter() - started_s)
        rows.append([name, num_launches, statistics.median(taken_s) * 1e3, min(taken_s) * 1e3])
        if asked.profile:
            with cProfile.Profile() as profile:
                for _ in range(20):
                    runner.execute(mixed)
            pstats.Stats(profile).sort_stats("tottime").print_stats(asked.profile)
    print(
        f"torch {torch.__version__}, Triton {triton.__version__}: {asked.decodes} decodes, {asked.prompt} of a prompt"
    )
    print(tables.markdown(["layers", "launches", "host ms, median", "best"], rows))


if __name__ == "__main__":
    main()
