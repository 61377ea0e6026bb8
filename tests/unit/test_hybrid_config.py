"""Settings of models with recurrent layers: states and checkpoints come out of the memory, and some settings are
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.engine.api.config import AskedConfig
from inferd.engine.api.errors import ConfigError
from inferd.engine.api.memory.activations import Workload, working_lines
from inferd.engine.api.memory.planner import block_bytes
from inferd.engine.api.memory.precision import Precision
from inferd.engine.api.memory.states import checkpoint_interval, most_slots, num_checkpoints, state_bytes
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.resolve import resolve
from inferd.engine.arch.recurrent import GatedDelta
from inferd.engine.arch.registry import describe
from tests.arch.test_families import PUBLISHED
from tests.unit.test_config import GIB, facts, gpu_machine, machine
from tests.unit.test_step_cost import QWEN35_08B

ARCH, BF16 = describe(QWEN35_08B), Precision("bfloat16")
HYBRID = ModelFacts(Path("model"), ARCH, "bfloat16", False)
ASKED = AskedConfig(model_path="model", dtype="bfloat16", speculative="auto")
STATE = 18 * (16 * 128 * 128 * 4 + 3 * 6144 * 2)
BLOCK = 32 * 6 * 2 * 2 * 256 * 2


def test_a_state_has_matrices_and_inputs() -> None:
    assert state_bytes(ARCH, BF16).value == STATE
    assert state_bytes(facts().arch, BF16).value == 0
    assert block_bytes(ARCH, BF16, 32) == BLOCK
    lfm2 = state_bytes(describe(PUBLISHED["LFM2-1.2B"][0]), BF16)
    assert lfm2.text == "10 layers x 2 inputs x 2,048 x 2 B"
    granite = state_bytes(describe(PUBLISHED["granite-4.0-h-tiny"][0]), BF16)
    assert granite.value == 36 * (48 * 128 * 64 * 4 + 3 * 3328 * 2)


def test_checkpoints_take_half_of_the_memory_for_prefixes() -> None:
    config, plan, decisions = resolve(ASKED, HYBRID, machine(64))
    assert config.num_blocks and config.max_num_seqs == 128
    checkpoints, kv = config.num_checkpoints * STATE, config.num_blocks * BLOCK
    assert checkpoints == pytest.approx(kv, rel=0.02)
    assert checkpoints + kv <= 4 * GIB < checkpoints + kv + STATE + BLOCK
    parts = {part.name: part.num_bytes for part in plan.working}
    assert (parts["states"], parts["checkpoints"]) == (128 * STATE, checkpoints)
    assert config.checkpoint_interval % 32 == 0
    assert config.checkpoint_interval == pytest.approx(config.num_blocks * 32 / config.num_checkpoints, abs=32)
    told = {decision.field: decision.why for decision in decisions}
    assert "many at a time" in told["speculative"] and config.speculative == "suffix"
    assert parts["inputs of drafts"] == 128 * 18 * (6144 + 2048 + 2 * 16) * 2


def test_one_sequence_goes_before_checkpoints() -> None:
    asked = msgspec.structs.replace(ASKED, max_model_len=32 * 100, kv_memory_bytes=101 * BLOCK)
    config, _, decisions = resolve(asked, HYBRID, machine(64))
    assert (config.num_blocks, config.num_checkpoints, config.prefix_caching) == (101, 0, False)
    assert "no recurrent state fits" in next(d.why for d in decisions if d.field == "prefix_caching")
    roomy = msgspec.structs.replace(asked, kv_memory_bytes=100 * BLOCK + 2 * STATE)
    assert resolve(roomy, HYBRID, machine(64))[0].num_checkpoints == 1


def test_large_states_leave_fewer_slots() -> None:
    assert most_slots(ARCH, BF16, 10 * STATE * 7) == 7
    assert most_slots(ARCH, BF16, 1) == 1
    assert most_slots(facts().arch, BF16, 1) is None
    assert resolve(ASKED, HYBRID, machine(8))[0].max_num_seqs == 8 * GIB // 10 // STATE


@pytest.mark.parametrize(
    ("counts", "interval"), [((10, 100), 10 * 32), ((10, 101), 11 * 32), ((100, 100), 8 * 32), ((0, 5), 8 * 32)]
)
def test_the_interval_is_at_least_a_step(counts: tuple[int, int], interval: int) -> None:
    assert checkpoint_interval(*counts, block_size=32, step_tokens=256) == interval


def test_checkpoints_are_at_most_one_a_block() -> None:
    small: dict[str, Any] = {"linear_key_head_dim": 2, "linear_value_head_dim": 2, "linear_num_key_heads": 1,
                             "linear_num_value_heads": 1}  # fmt: skip
    arch = describe(QWEN35_08B | small)
    assert num_checkpoints(arch, BF16, 1000, 10, BLOCK) == 1000
    assert num_checkpoints(ARCH, BF16, 1000, 1001, BLOCK) == 0
    assert num_checkpoints(facts().arch, BF16, 1000, 10, BLOCK) == 0


def test_what_it_cannot_do_is_refused_by_name() -> None:
    for changes, words in (({"tensor_parallel_size": 2}, "recurrent layers are computed by one process"),):
        with pytest.raises(ConfigError, match=words):
            resolve(msgspec.structs.replace(ASKED, **changes), HYBRID, machine(64))


def test_a_gpu_holds_the_states() -> None:
    """The plan counts them among the GPU's memory, with what a recorded step needs in a recurrent layer."""
    config = resolve(ASKED, HYBRID, gpu_machine())[0]
    assert config.device == "cuda" and config.max_num_seqs and config.num_checkpoints
    assert config.speculative == "none"
    with pytest.raises(ConfigError, match="on a GPU recurrent layers verify no guesses"):
        resolve(msgspec.structs.replace(ASKED, speculative="ngram"), HYBRID, gpu_machine())
    work = Workload(num_seqs=8, step_tokens=256, max_model_len=4096, block_size=32, device="cuda", num_checkpoints=5)
    parts = {part.name: part.num_bytes for part in working_lines(ARCH, BF16, work)}
    assert parts["states"] == 8 * STATE and parts["checkpoints"] == 5 * STATE
    delta = ARCH.recurrent
    assert isinstance(delta, GatedDelta)
    width = sum(delta.in_sizes) + delta.conv_size + delta.out_size
    assert parts["recorded steps"] > 256 * width * 2
