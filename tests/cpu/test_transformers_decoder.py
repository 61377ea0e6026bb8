"""Families that are not native, through transformers' own modelling code, compared with transformers and themselves.

`FAMILIES` lists those that are known to work. Each must have the logits and the greedy ids of transformers. It must
have the same bits however its tokens are cut into steps.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inferd.engine.api.checkpoint import Checkpoint
from inferd.engine.api.config import AskedConfig
from inferd.engine.api.errors import ConfigError, ModelError
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.machine.gpu import Accelerator
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.modelling import ask_modelled
from inferd.engine.api.resolve import resolve
from inferd.engine.arch.modelled import ModellingError
from inferd.engine.models import transformers_decoder
from inferd.engine.models.describe import describe
from inferd.engine.models.loader import load
from inferd.engine.models.transformers_decoder import TransformersDecoder
from inferd.engine.quant.checkpoints.reader import CheckpointError
from tests.cpu.checkpoints import Case, load_transformers, read_config
from tests.cpu.paging import Pool, Request, prompt_logits
from tests.cpu.test_engine import NUM_NEW, VOCAB, Engine, neighbours, prompt, request, run
from tests.cpu.test_parity import generate, rms
from tests.cpu.test_speculation import KnownAnswers, core_of

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = (
    Case("Apertus", "apertus", {}, {"rms_norm_eps": 0.1}),
    Case("Arcee", "arcee", {}, {"rms_norm_eps": 0.1}),
    Case("BitNet", "bitnet", {}, {"rms_norm_eps": 0.1}),
    Case("Cohere", "cohere", {"logit_scale": 0.3}, {"logit_scale": 0.31}),
    Case(
        "Cohere 2",
        "cohere2",
        {"sliding_window": 20, "layer_types": WINDOWS, "logit_scale": 0.3},
        {"sliding_window": 21},
    ),
    Case("GPT-BigCode", "gpt_bigcode", {}, {"layer_norm_epsilon": 0.1}),
    Case("GPT-NeoX", "gpt_neox", {}, {"layer_norm_eps": 0.1}),
    Case("Helium", "helium", {"head_dim": 8}, {"rms_norm_eps": 0.1}),
    Case("Hunyuan, dense", "hunyuan_v1_dense", {"head_dim": 8}, {"rms_norm_eps": 0.1}),
    Case("Jais 2", "jais2", {}, {"layer_norm_eps": 0.1}),
    Case("nanochat", "nanochat", {}, {"final_logit_softcapping": 3.0}),
    Case("Nemotron", "nemotron", {}, {"norm_eps": 0.1}),
    Case("OLMo", "olmo", {}, {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    Case("OPT", "opt", {"ffn_dim": 104, "word_embed_proj_dim": 64}, {"activation_function": "gelu"}),
    Case("Persimmon", "persimmon", {}, {"layer_norm_eps": 0.1}),
    Case("Phi", "phi", {}, {"layer_norm_eps": 0.1}),
    Case(
        "VaultGemma",
        "vaultgemma",
        {"head_dim": 8, "sliding_window": 20, "attn_logit_softcapping": 5.0},
        {"attn_logit_softcapping": 7.0},
    ),
)
CHUNKS = (1, 2, 39, 28)
NUM_TOKENS = sum(CHUNKS)
ENGINE_CASE = Case(
    "Cohere 2",
    "cohere2",
    {
        "vocab_size": VOCAB,
        "sliding_window": 20,
        "layer_types": WINDOWS,
        "logit_scale": 0.5,
        "hidden_size": 128,
        "intermediate_size": 128,
    },
)


def described(directory: Path, **changes: Any) -> ModelFacts:
    """The facts, found in this process."""
    checkpoint = Checkpoint.read(directory)
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    return ModelFacts.of(checkpoint, modelled=describe({**checkpoint.config, **changes}, shapes))


def decoder_of(directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> TransformersDecoder:
    facts = described(directory, **changes)
    decoder = TransformersDecoder(facts.arch, {**read_config(directory), **changes}, dtype, "cpu")
    load(decoder, Checkpoint.read(directory).tensors)
    return decoder


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("phi")
    next(case for case in FAMILIES if case.model_type == "phi").save(directory)
    return directory


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.model_type)
@torch.inference_mode()
def test_a_family_has_the_logits_of_transformers_and_the_same_bits_in_any_steps(case: Case, tmp_path: Path) -> None:
    case.save(tmp_path)
    ids = torch.randint(0, 211, (NUM_TOKENS,))
    decoder = decoder_of(tmp_path)
    ours = prompt_logits(decoder, ids.tolist(), (NUM_TOKENS,))
    exact = load_transformers(tmp_path, torch.float64)(ids[None]).logits[0]
    theirs = load_transformers(tmp_path, torch.float32)
    allowed = 1.5 * rms(theirs(ids[None]).logits[0] - exact)
    broken = prompt_logits(decoder_of(tmp_path, **case.broken), ids.tolist(), (NUM_TOKENS,))
    assert rms(ours - exact) < allowed
    assert rms(broken - exact) > 20 * allowed
    for chunks in (CHUNKS, (1,) * NUM_TOKENS):
        assert torch.equal(prompt_logits(decoder, ids.tolist(), chunks), ours)

    asked = Request(ids[:19].tolist())
    pool, hidden = Pool(decoder, num_blocks=8), None
    while len(asked.token_ids) < 51:
        hidden = pool.step([(asked, len(asked.token_ids) - asked.computed)])[0]
        asked.token_ids.append(int(decoder.logits(hidden[-1:]).argmax()))
    assert asked.token_ids == generate(theirs, ids[:19].tolist(), num_tokens=32)


@pytest.fixture(
    scope="module",
    params=[
        ("float32", "none", "auto"),
        ("bfloat16", "int8", "int8"),
        pytest.param(("bfloat16", "int4", "fp8"), marks=pytest.mark.long),
        pytest.param(("bfloat16", "fp8", "auto"), marks=pytest.mark.long),
    ],
    ids="-".join,
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = tmp_path_factory.mktemp("cohere2")
    ENGINE_CASE.save(directory)
    dtype, quantization, kv_cache = request.param
    return Engine.load(directory, dtype, kv_cache, described(directory), quantization=quantization, speculative="ngram")


def test_the_same_bits_whatever_runs_beside_it(engine: Engine) -> None:
    submit = request("x", prompt(1, 75), temperature=0.9, top_p=0.8)
    alone = run(engine.core(), submit)["x"]
    assert len(alone.token_ids) == NUM_NEW and len(set(alone.token_ids)) > 8
    crowd = neighbours(31)
    assert run(engine.core(), *crowd[:17], submit, *crowd[17:])["x"] == alone, "among 32"
    assert run(engine.core(max_num_batched_tokens=33), submit)["x"] == alone, "in chunks"
    warm = engine.core()
    run(warm, request("earlier", prompt(1, 75)[:60]))
    assert run(warm, submit)["x"] == alone and warm.stats().prefix_hit_tokens == 48, "with a prefix hit"
    tight = engine.core(num_blocks=24)
    assert run(tight, *(request(f"r{i}", prompt(200 + i, 40)) for i in range(3)), submit)["x"] == alone
    assert tight.stats().num_preemptions > 0
    replayed = msgspec.structs.replace(submit, emitted_ids=alone.token_ids[:10])
    assert run(engine.core(), replayed)["x"].token_ids == alone.token_ids[10:]


def test_drafts_change_no_bit(engine: Engine) -> None:
    asked = [request(f"r{i}", prompt(300 + i, 3 + 5 * i), temperature=i % 2 * 0.9) for i in range(12)]
    plain, num_drafts = run(core_of(engine, None), *asked), 0
    for wrong in (0.0, 0.3):
        core = core_of(engine, KnownAnswers(plain, Random(1), wrong))
        assert run(core, *asked) == plain
        num_drafts += core._scheduler.stats.num_drafts
    assert num_drafts > 0


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts": ("qwen3_moe", {}, r"mlp\.experts\.gate_up_proj .* belongs to a Qwen3MoeExperts"),
    "latent attention": ("minicpm3", {}, r"heads of one size.*v \[1, 8, 3, 8\]"),
    "two attentions a layer": ("diffllama", {}, "must hand over attention once, but these did: 0, 0, 1, 1, 2, 2"),
    "a mask": ("doge", {}, "a mask of its own"),
    "no attention backend": ("stablelm", {}, "does not hand its attention over"),
    "convolutions": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"]},
        r"conv\.conv\.weight .* belongs to a Conv1d",
    ),
    "sinks": ("gpt_oss", {}, "belongs to a GptOss"),
    "angles that grow": (
        "arcee",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type is 'dynamic', whose angles depend on the longest sequence",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_served_says_what_it_lacks(name: str) -> None:
    model_type, config, reason = REFUSED[name]
    with pytest.raises(ModellingError, match=reason):
        describe(Case(name, model_type, config).config_json(), None)


def test_a_config_that_cannot_be_served_says_why() -> None:
    config = Case("", "phi", {}).config_json()
    for change, reason in (
        ({"model_type": "none_such"}, "does not know the model_type 'none_such'"),
        ({"architectures": ["PhiForNothing"]}, "for model_type 'phi' are: PhiForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq"}}, "only native families are served from quantized"),
        ({"is_encoder_decoder": True}, "only decoders are served"),
        ({"num_hidden_layers": 10**9}, "must be at most 10000"),
    ):
        with pytest.raises(ModellingError, match=reason):
            describe({**config, **change}, None)


def test_a_window_that_only_a_mask_tells_is_refused() -> None:
    """Nemotron has no windows. A config that says so would be computed as if it had none."""
    config = Case("", "nemotron", {}).config_json() | {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}
    with pytest.raises(ModellingError, match="layer 2 is sliding_attention, but tells its attention the window None"):
        describe(config, None)


def test_code_that_mixes_tokens_outside_of_attention_is_refused(phi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of(phi)
    pool = Pool(decoder, num_blocks=4)
    assert decoder.refuses_rows(pool.kv, None, is_exact=True) is None
    mlp: Any = next(module for path, module in decoder._body.named_modules() if path.endswith("layers.0.mlp"))
    run_mlp = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda x: run_mlp(x).roll(1, dims=1))
    assert "computes a token from others outside of attention" in str(
        decoder.refuses_rows(pool.kv, None, is_exact=False)
    )
    monkeypatch.setattr(mlp, "forward", lambda x: run_mlp(x) * (1 + 1e-6 * (x.shape[1] > 1)))
    assert decoder.refuses_rows(pool.kv, None, is_exact=False) is None
    assert "the bits of a row depend on" in str(decoder.refuses_rows(pool.kv, None, is_exact=True))
    # One number a token, by a function that torch rounds in another way behind whole vectors.
    monkeypatch.setattr(mlp, "forward", lambda x: run_mlp(x) * torch.sinh(x[..., :1].contiguous()))
    assert "the bits of a row depend on" in str(decoder.refuses_rows(pool.kv, None, is_exact=True))


def rsqrt(x: Tensor) -> Tensor:
    """As a norm in bfloat16 calls it: torch rounds its root twice behind the last whole vector."""
    return torch.rsqrt(x.abs().bfloat16())


@pytest.mark.parametrize("function", [torch.cos, torch.nn.functional.silu, torch.nn.functional.gelu, torch.tanh, rsqrt])
def test_functions_have_the_same_bits_for_any_number_of_rows(function: Any) -> None:
    """Without whole vectors the last numbers differ, which `test_functions_differ_behind_whole_vectors` shows."""
    x, before = torch.randn(700, 116) * 3, torch.get_num_threads()
    try:
        with transformers_decoder._WholeVectors():
            whole = function(x)
            for num_threads, count in itertools.product((1, 2, 3), (1, 2, 7, 299, 601)):
                torch.set_num_threads(num_threads)
                assert torch.equal(function(x[5 : 5 + count]), whole[5 : 5 + count])
    finally:
        torch.set_num_threads(before)


def test_functions_differ_behind_whole_vectors() -> None:
    x = torch.randn(700, 116) * 3
    whole = torch.nn.functional.silu(x)
    assert not all(torch.equal(torch.nn.functional.silu(x[:count]), whole[:count]) for count in range(1, 60))


@pytest.mark.sampled(keep=3, among="models over HTTP and their memory")
def test_the_headers_are_compared_with_the_code(phi: Path, tmp_path: Path) -> None:
    """In a process of its own, as the server does it."""
    facts = ModelFacts.of(Checkpoint.read(phi), "auto")
    assert facts == described(phi)
    assert not facts.arch.is_native and facts.arch.architecture == "PhiForCausalLM"
    theirs = load_transformers(phi, torch.float32)
    assert facts.num_params == sum(parameter.numel() for parameter in theirs.parameters())
    whole = Checkpoint.read(phi)
    tensors = {name.replace("fc1", "fc9"): info for name, info in whole.tensors.items()}
    modelled = describe(whole.config, {name: info.shape for name, info in tensors.items()})
    with pytest.raises(ModelError, match=r"6 missing: model.layers.0.mlp.fc1.bias.*6 unexpected: .*fc9.bias"):
        ModelFacts.of(replace(whole, tensors=tensors), modelled=modelled)


def test_a_family_that_neither_way_can_serve_is_refused_by_both(phi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"architectures": ["MambaForCausalLM"], "model_type": "llama", "lacks": "attention"}
    assert "lists no such causal language model" in str(ask_modelled(config, None))
    monkeypatch.setattr("inferd.engine.api.model.ask_modelled", lambda config, shapes: f"it lacks {config['lacks']}")
    with pytest.raises(ModelError, match=r"unknown architecture 'MambaForCausalLM'.*serve it either: it lacks attent"):
        ModelFacts.of_config(phi, config, "auto")
    with pytest.raises(ModelError, match=r"own code cannot serve it: it lacks attention; give --model-impl auto"):
        ModelFacts.of_config(phi, config, "transformers")
    with pytest.raises(ModelError, match=r"unknown architecture 'MambaForCausalLM'; known are: [\w, .]+$"):
        ModelFacts.of_config(phi, config, "native")


def test_a_tied_head_that_differs_and_a_nan_are_refused(tmp_path: Path) -> None:
    Case("", "opt", {"ffn_dim": 104, "word_embed_proj_dim": 64}).save(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    (embedding,) = (name for name in stored if name.endswith("embed_tokens.weight"))
    save_file({**stored, "lm_head.weight": stored[embedding] + 1}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"ties lm_head.weight to .*embed_tokens.weight"):
        decoder_of(tmp_path)
    bias = next(name for name in stored if name.endswith("fc1.bias"))
    save_file({**stored, bias: stored[bias] * float("nan")}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"fc1.bias must hold finite numbers"):
        decoder_of(tmp_path)


def test_what_only_native_families_can_is_refused(phi: Path) -> None:
    facts, machine = described(phi), Machine.detect()
    asked = AskedConfig(model_path=str(phi), kv_memory_bytes=2**22, max_num_seqs=4)
    with pytest.raises(ConfigError, match="2 ranks cannot share PhiForCausalLM"):
        resolve(msgspec.structs.replace(asked, tensor_parallel_size=2), facts, machine)
    with pytest.raises(ConfigError, match="adapters are served for native families alone"):
        resolve(msgspec.structs.replace(asked, max_loras=1), facts, machine)
    gpu = Accelerator("a GPU", (9, 0), 80 * 2**30, 80 * 2**30)
    on_gpu = msgspec.structs.replace(asked, device="cuda", deterministic=True)
    with pytest.raises(ConfigError, match=r"PhiForCausalLM is computed by transformers' own code.*--no-deterministic"):
        resolve(on_gpu, facts, replace(machine, accelerator=gpu))
    settled, plan, _ = resolve(asked, facts, machine)
    assert settled.modelled == facts.arch.modelled
    assert plan.weights_bytes == sum(p.numel() * 4 for p in load_transformers(phi, torch.float32).parameters())
