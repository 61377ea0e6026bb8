"""Rope in config.json: both spellings, each scaling with its defaults, the positions that it adds, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest

from inferd.engine.arch.description import Arch, ArchError
from inferd.engine.arch.registry import describe
from inferd.engine.arch.rotary import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 32768,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONG: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2] * 8}


def arch_of(**changes: Any) -> Arch:
    return describe(CONFIG | changes)


def rope_of(**changes: Any) -> Rope:
    rope = arch_of(**changes).ropes[0]
    assert rope is not None
    return rope


def phi3(**changes: Any) -> Arch:
    return arch_of(**{"architectures": ["Phi3ForCausalLM"], **changes})


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "default"}])
def test_the_older_spelling_means_the_same(scaling: dict[str, Any]) -> None:
    newer = arch_of(rope_parameters=scaling | {"rope_theta": 500000.0})
    assert arch_of(rope_theta=500000.0, rope_scaling=scaling) == newer
    oldest = {"type": scaling["rope_type"], **{name: value for name, value in scaling.items() if name != "rope_type"}}
    assert arch_of(rope_theta=500000.0, rope_scaling=oldest) == newer


def test_without_any_field_it_is_the_original_one() -> None:
    assert rope_of() == Rope(10000.0, 16)


def test_each_scaling() -> None:
    assert rope_of(rope_scaling={"type": "linear", "factor": 2}).scaling == LinearScaling(2.0)
    assert rope_of(rope_scaling={"type": "dynamic", "factor": 2.0}).scaling == DynamicScaling(2.0, 32768)
    assert rope_of(rope_scaling=LLAMA3).scaling == Llama3Scaling(8.0, 1.0, 4.0, 32768)
    original = {"original_max_position_embeddings": 4096}
    assert rope_of(rope_scaling=LLAMA3 | original).scaling == Llama3Scaling(8.0, 1.0, 4.0, 4096)
    assert rope_of(rope_scaling=YARN | original).scaling == YarnScaling(4.0, 4096, 32.0, 1.0, True)
    long_rope = rope_of(rope_scaling=LONG | original)
    assert long_rope.scaling == LongRopeScaling(4096, (1.0,) * 8, (2.0,) * 8)


def test_attention_factors() -> None:
    assert rope_of(rope_scaling=LLAMA3).attention_factor == 1.0
    assert rope_of(rope_scaling=YARN).attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert rope_of(rope_scaling=YARN | {"attention_factor": 0.5}).attention_factor == 0.5
    both = YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}
    expected = (0.07 * math.log(4) + 1) / (0.03 * math.log(4) + 1)
    assert rope_of(rope_scaling=both).attention_factor == pytest.approx(expected)
    assert rope_of(rope_scaling=LONG).attention_factor == 1.0
    stretched = rope_of(rope_scaling=LONG, original_max_position_embeddings=4096)
    assert stretched.attention_factor == pytest.approx(math.sqrt(1 + math.log(8) / math.log(4096)))


def test_the_original_length_beside_the_section_counts() -> None:
    scaling = rope_of(
        rope_scaling=LONG | {"original_max_position_embeddings": 1}, original_max_position_embeddings=2048
    )
    assert isinstance(scaling.scaling, LongRopeScaling)
    assert scaling.scaling.original_max_positions == 2048


@pytest.mark.parametrize(
    ("scaling", "max_positions"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 32768),
        (LLAMA3, 32768),
        (LONG | {"original_max_position_embeddings": 4096}, 32768),
        (YARN | {"original_max_position_embeddings": 4096}, 32768),
        (YARN | {"original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "dynamic", "factor": 2.0}, 65536),
    ],
)
def test_how_far_a_scaling_stretches_the_model(scaling: dict[str, Any], max_positions: int) -> None:
    """Configs with YaRN and dynamic scaling state the length without it; the others state the final length."""
    assert arch_of(rope_scaling=scaling).max_positions == max_positions


def test_phi3_rotates_a_part_and_calls_longrope_by_its_first_names() -> None:
    halves = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    arch = phi3(rope_scaling={"type": "su", **halves}, partial_rotary_factor=0.75)
    assert arch.ropes[0] == phi3(rope_parameters={**LONG, **halves, "partial_rotary_factor": 0.75}).ropes[0]
    assert arch.ropes[0] is not None
    assert arch.ropes[0].rotary_dim == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_parameters": {}, "rope_scaling": YARN}, "rope_scaling must not stand beside rope_parameters"),
        ({"rope_theta": 1}, r"rope_theta must be above 1, but it is 1\.0"),
        (
            {"rope_parameters": {"rope_type": "mrope"}},
            "rope_type must be one of default, linear, dynamic, yarn, longrope, llama3, but it is 'mrope'",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters: config.json lacks factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, "factor must be a finite number above 0"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "config.json lacks factor"),
        ({"rope_scaling": YARN | {"beta_fast": 1}}, r"beta_fast must be above beta_slow \(1.0\), but it is 1"),
        (
            {"rope_theta": 10**400},
            "rope_theta must be a finite number above 0, at most 1.8e308, but it is a number of more than 77 digits",
        ),
        ({"rope_scaling": YARN | {"factor": 1e306}}, "factor must make at most 1099511627776 positions of 32768, but"),
        ({"rope_scaling": {"type": "dynamic", "factor": 1e306}}, "factor must make at most 1099511627776 positions"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate must be true or false"),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
            r"high_freq_factor must be above low_freq_factor \(1.0\)",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "config.json lacks short_factor"),
        ({"rope_scaling": LONG | {"short_factor": [1.0] * 7}}, r"short_factor must be a list of 8 numbers"),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * 7 + [0]}}, "long_factor: 7 must be a finite number above 0"),
        ({"original_max_position_embeddings": 1, "rope_scaling": YARN}, "a whole number of at least 2, but it is 1"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters: parameters that differ by layer type are not"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 in this family, but it is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1 in this family"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchError, match=message):
        arch_of(**changes)


@pytest.mark.parametrize("factor", [0.1, 0.45, 1.5, 1.7e308])
def test_a_part_that_cannot_be_rotated(factor: float) -> None:
    with pytest.raises(ArchError, match="must rotate an even number of elements, at least 4, of head_dim 16"):
        phi3(partial_rotary_factor=factor)
