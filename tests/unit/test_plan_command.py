"""`inferd plan`: every way to name a model, what it reports about this machine, both outputs, and refusals by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console
from typer.testing import CliRunner

from inferd.engine.api.checkpoint import CONFIG_FILES, EMBEDDED_PATH
from inferd.engine.api.errors import ConfigError, ModelError, StartError
from inferd.engine.api.kv_store.directory import KVDirectory
from inferd.engine.api.machine.cards import CARDS, card
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.machine.gpu import Accelerator
from inferd.engine.api.memory.precision import KV_FORMATS
from inferd.engine.api.resolve import auto_step_tokens
from inferd.engine.api.served import DeviceKind, served_device
from inferd.engine.api.speculation import check_draft_length
from inferd.server.commands.app import app
from inferd.server.commands.plan import build, divide
from inferd.server.commands.plan_directory import DirectoryPlan, described
from inferd.server.commands.plan_report import PlanReport, to_json
from inferd.server.commands.plan_table import run, show
from inferd.server.config.models import Asked
from inferd.server.config.settings import Settings
from tests.arch.test_families import PUBLISHED

GIB = 2**30
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip

MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2, "num_local_experts": 8}


@pytest.fixture
def mistral(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL_7B))
    return str(tmp_path)


def machine(gib: float = 64, has_bf16_matmul: bool = True) -> Machine:
    return Machine(2, int(gib * GIB), int(gib * GIB), has_bf16_matmul)


def report(
    model: str,
    gib: float = 64,
    batch: int = 1,
    context: int | None = None,
    overhead: str = "10-20",
    **asked: Any,
) -> PlanReport:
    return build(Settings(model=model, **asked), machine(gib), batch, context, overhead)


def shown(said: PlanReport, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    show(said, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_the_plan_of_each_rank(mistral: str) -> None:
    alone, shared = report(mistral), report(mistral, tensor_parallel_size=2)
    assert to_json(shared)["tensor_parallel_size"] == 2
    assert 2 * shared.plan.kv_bytes == alone.plan.kv_bytes
    assert alone.plan.weights_bytes > shared.plan.weights_bytes > alone.plan.weights_bytes / 2
    text = shown(shared)
    assert "1 sequence of 32,768 tokens, on each of 2 ranks" in text
    assert "each of 2 ranks has 32.0 GiB available" in text
    # 16 ranks have one of the 8 heads of K and V each.
    assert 8 * report(mistral, tensor_parallel_size=16).plan.kv_bytes == alone.plan.kv_bytes
    with pytest.raises(ConfigError, match="12 does not divide its 32 attention heads; give --tensor-parallel-size"):
        report(mistral, tensor_parallel_size=12)


def test_the_plan_of_each_replica(mistral: str) -> None:
    alone, one_of_two = report(mistral), report(mistral, replicas=2)
    assert to_json(one_of_two)["replicas"] == 2
    assert one_of_two.plan.weights_bytes == alone.plan.weights_bytes
    assert "each of 2 replicas has 32.0 GiB available" in shown(one_of_two)
    with pytest.raises(ConfigError, match=r"replicas must be at most 2 here, .* there are 2, but got 17"):
        report(mistral, replicas=17)


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize(("batch", "num_rows"), [(1, 32), (8, 32), (40, 40)])
def test_guessed_tokens_have_logits(mistral: str, batch: int, num_rows: int) -> None:
    """A step of few requests draws up to 32 tokens if it verifies guesses."""
    plain, guessing = (report(mistral, batch=batch, context=64, speculative=kind) for kind in ("none", "suffix"))
    rows = {part.name: part.formula.text for part in guessing.plan.working}
    assert rows["logits"].startswith(f"{num_rows} rows x 32,000")
    assert (guessing.plan.working_bytes > plain.plan.working_bytes) == (num_rows > batch)
    assert [to_json(one)["speculates"] for one in (plain, guessing)] == [False, True]
    assert to_json(report(mistral, speculative="auto"))["speculates"], "auto is suffix on a processor"
    with pytest.raises(ConfigError, match=r"--speculative must be one of none, .*, or a draft model.* got 'always'"):
        report(mistral, speculative="always")


def draft_beside(folder: Path, **changes: Any) -> str:
    """A draft model with weights, in a folder of its own."""
    folder.mkdir()
    for path in EMBEDDED_PATH.iterdir():
        shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


def test_a_draft_model_is_part_of_the_plan(tmp_path: Path) -> None:
    draft = draft_beside(tmp_path / "draft")
    alone, drafted = (report("tiny", context=512, batch=3, speculative=asked) for asked in ("suffix", draft))
    assert drafted.plan.weights_bytes == 2 * alone.plan.weights_bytes, "it is a copy of the model"
    assert drafted.plan.kv_bytes == 2 * alone.plan.kv_bytes
    assert drafted.plan.working_bytes == alone.plan.working_bytes + 512 * 64 * 4, "a rotary table"
    for part in alone.plan.weights:
        assert {part.name: part.formula, f"draft {part.name}": part.formula}.items() <= {
            part.name: part.formula for part in drafted.plan.weights
        }.items()
    assert "draft attention" in shown(drafted) and to_json(drafted)["speculates"]
    quantized = report("tiny", context=512, quantization="int8", speculative=draft)
    sizes = {part.name: part.num_bytes for part in quantized.plan.weights}
    assert sizes["draft MLP"] == sizes["MLP"], "it is quantized as was asked for the model"


def test_a_draft_model_of_another_vocabulary_is_refused_by_name(mistral: str, tmp_path: Path) -> None:
    draft = draft_beside(tmp_path / "draft")
    with pytest.raises(ConfigError, match="vocabulary of the served model, 32000 tokens, but has 3072; give"):
        report(mistral, speculative=draft)
    tokens = json.loads((Path(draft) / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    first, second = sorted(vocabulary)[500:502]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (Path(draft) / "tokenizer.json").write_text(json.dumps(tokens))
    message = f"{first!r} is token {vocabulary[second]} of the served model and token {vocabulary[first]} of the draft"
    with pytest.raises(ConfigError, match=re.escape(message)):
        report("tiny", speculative=draft)


@pytest.mark.parametrize("token", [{"content": 7, "id": 1}, {"content": "x", "id": "1"}, {"content": "x", "id": None}])
def test_a_draft_model_whose_tokens_are_none_is_refused(token: dict[str, object], tmp_path: Path) -> None:
    draft = draft_beside(tmp_path / "draft")
    file = Path(draft) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "added_tokens": [token]}))
    with pytest.raises(ModelError, match="a token must be a text, and its id a whole number"):
        report("tiny", speculative=draft)


@pytest.mark.parametrize(
    ("asked", "changes", "message"),
    [
        ({"tensor_parallel_size": 2}, {}, "runs in one process, but tensor_parallel_size is 2; give --tensor"),
        ({}, {"max_position_embeddings": 100}, "at least max_model_len positions, 512, but has 100; give --max-model"),
        ({}, {"architectures": ["RwkvForCausalLM"]}, "RwkvForCausalLM"),
        (
            {},
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64},
            "no layer of the draft model sees more than 64 positions, .* is 512; give --max-model-len 64",
        ),
    ],
)
def test_a_draft_model_that_does_not_suit_is_refused(
    asked: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    draft = draft_beside(tmp_path / "draft", **changes)
    with pytest.raises((ConfigError, ModelError), match=message):
        report("tiny", context=512, speculative=draft, **asked)


def test_layers_of_a_draft_model_see_the_same_positions() -> None:
    arch = report("tiny").facts.arch
    check_draft_length(arch, arch, 512)
    with pytest.raises(ConfigError, match="all layers of the draft model must see the same positions, but some have"):
        check_draft_length(arch, replace(arch, windows=(None, 64, None, 64)), 512)


def test_a_served_model_must_see_all_positions(tmp_path: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    served, draft = draft_beside(tmp_path / "served", **changes), draft_beside(tmp_path / "draft")
    with pytest.raises(ConfigError, match="no layer of the served model sees more than 64 positions"):
        report(served, context=512, speculative=draft)
    assert report(served, context=64, speculative=draft).plan.weights_bytes


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\nfrom inferd.server.cli import main\n"
        "try: main()\nfinally: sys.stderr.write('torch' if 'torch' in sys.modules else '')"
    )
    line = [sys.executable, "-P", "-c", code, "plan", *arguments]
    return subprocess.run(
        line, capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"COLUMNS": "100"}
    )


@pytest.mark.sampled(keep=3, among="slow starts")
def test_the_published_example_from_config_json_alone(mistral: str) -> None:
    done = command(mistral, "--dtype", "float16", "--batch", "4", "--context", "4096", "--json")
    said = json.loads(done.stdout)
    assert (done.returncode == 4) == ("refusal" in said["serve"]) == (done.stderr[:8] == "inferd: ")
    assert done.returncode in (0, 4) and not done.stderr.endswith("torch")
    assert said["files"] is None
    assert said["kv_bytes"] == 2_147_483_648
    assert said["weights_bytes"] == 14_483_464_192
    assert said["overhead"]["low_bytes"] == round(1.1 * 16_630_947_840)
    assert said["overhead"]["high_bytes"] == round(1.2 * 16_630_947_840)
    table = command(mistral, "--dtype", "float16", "--batch", "4", "--context", "4096")
    # The machine's free memory may have changed meanwhile, and with it a refusal's figures.
    assert table.returncode == done.returncode
    assert re.sub(r"[\d.]+", "", table.stderr) == re.sub(r"[\d.]+", "", done.stderr)
    flowing = " ".join(table.stdout.split())
    assert "2,147,483,648 = 2 x 32 layers x 8 KV heads x head 128 x 4,096 tokens x 4 sequences x 2 B" in flowing
    assert re.search(r"weights +14\.48 +13\.49 ", table.stdout)
    assert re.search(r"KV cache +2\.15 +2\.00 ", table.stdout)


def test_every_precision_stands_beside_the_others(mistral: str) -> None:
    rows = {row["name"]: row for row in to_json(report(mistral, context=4096))["precisions"]}
    assert list(rows) == ["float32", "bfloat16", "float16", "fp8", "int8", "int4"]
    assert rows["float32"]["weights_bytes"] == 2 * rows["bfloat16"]["weights_bytes"] == 28_966_928_384
    assert rows["float16"]["weights_bytes"] == rows["bfloat16"]["weights_bytes"]
    assert [round(rows[name]["weights_bytes"] / 1e9, 2) for name in ("fp8", "int8", "int4")] == [7.72, 7.6, 4.76]
    assert rows["int4"]["kv_bytes"] == rows["bfloat16"]["kv_bytes"]
    assert [name for name, row in rows.items() if not row["is_served"]] == ["float16"]


def test_json_adds_up_and_its_keys_stay(mistral: str) -> None:
    said = to_json(report(mistral, quantization="int4", batch=3, context=100))
    assert list(said) == [
        "model", "architecture", "num_params", "num_active_params", "decode_reads", "dtype", "quantization",
        "kv_cache_dtype", "batch", "context", "block_size", "tensor_parallel_size", "replicas", "speculates", "files",
        "weights",
        "kv", "working", "loading",
        "weights_bytes", "kv_bytes", "working_bytes", "total_bytes", "overhead", "precisions", "machine", "wrapper",
        "left_out_bytes", "is_native",
    ]  # fmt: skip
    for parts, total in (("weights", "weights_bytes"), ("working", "working_bytes")):
        assert sum(part["bytes"] for part in said[parts]) == said[total]
    serving, loading = said["kv_bytes"] + said["working_bytes"], said["loading"]["bytes"] + said["working"][-1]["bytes"]
    assert said["total_bytes"] == said["weights_bytes"] + max(serving, loading)
    assert (said["batch"], said["context"], said["num_params"]) == (3, 100, 7_241_732_096)


def test_a_mixture_of_experts_says_what_a_token_needs(mistral: str) -> None:
    (Path(mistral) / "config.json").write_text(json.dumps(MISTRAL_7B | MIXTRAL))
    mixtral = report(mistral, batch=8, context=4096)
    said = to_json(mixtral)
    assert (said["num_params"], said["num_active_params"]) == (46_702_792_704, 12_879_925_248)
    expert = 2 * 32 * 3 * 4096 * 14336
    others = 2 * (46_702_792_704 - 32000 * 4096) - 8 * expert  # the embedding is not read
    assert [read["num_requests"] for read in said["decode_reads"]] == [1, 8]
    reads = [read["weights_bytes"] for read in said["decode_reads"]]
    assert reads == pytest.approx([others + 2 * expert, others + 8 * (1 - 0.75**8) * expert])
    experts = next(part for part in said["weights"] if part["name"] == "experts")
    assert experts["bytes"] == 8 * expert and experts["formula"].startswith("256 experts x ")
    assert (
        "32 layers with 8 experts, of which a token goes to 2: it uses 12,879,925,248 parameters. A decode step reads "
        "23.7 GiB for 1 request and 78.3 GiB for 8 requests of weights."
    ) in " ".join(shown(mixtral).split())


def test_a_shared_expert_counts_for_every_token(mistral: str) -> None:
    (Path(mistral) / "config.json").write_text(json.dumps(PUBLISHED["Qwen1.5-MoE-A2.7B"][0] | {"num_hidden_layers": 2}))
    qwen = report(mistral)
    parts = {part["name"]: part["bytes"] for part in to_json(qwen)["weights"]}
    assert parts["MLP"] == 2 * 2 * 3 * 2048 * 5632
    assert parts["routers"] == 2 * 2 * 61 * 2048
    assert "2 layers with 60 experts, of which a token goes to 4 and to a shared one: it uses" in " ".join(
        shown(qwen).split()
    )


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("kv_cache", KV_FORMATS)
def test_kv_in_8_bits(mistral: str, kv_cache: str) -> None:
    plain, short = (report(mistral, context=4096, kv_cache_dtype=kind) for kind in ("auto", kv_cache))
    assert short.plan.kv_bytes * 2 * 128 == plain.plan.kv_bytes * (128 + 4 * 2)
    assert [row.plan.kv_bytes for row in short.rows if row.plan] == [short.plan.kv_bytes] * 6
    assert to_json(short)["kv_cache_dtype"] == kv_cache
    assert f"bfloat16, {kv_cache} KV, 1 sequence of 4,096 tokens" in shown(short)
    told = report(mistral, gib=16, context=32768)
    assert "--kv-cache-dtype int8 with --max-model-len up to" in told.verdict
    assert f"of KV cache in {kv_cache}, " in report(mistral, gib=4, context=32768, kv_cache_dtype=kv_cache).verdict


def test_a_gpu_that_cannot_convert_to_8_bits_is_told_so(mistral: str) -> None:
    ampere = Accelerator("A100", (8, 0), 80 * GIB, 80 * GIB)
    said = build(Settings(model=mistral, kv_cache_dtype="fp8"), replace(machine(), accelerator=ampere))
    reason = "K and V in fp8 need compute capability 8.9 or higher, and A100 has 8.0"
    assert (said.fits, said.verdict) == (False, f"not possible: {reason}; give --kv-cache-dtype int8 or auto")
    assert {row.refusal for row in said.rows} == {reason}
    asked = Settings(model=mistral, kv_cache_dtype="int8")
    assert build(asked, replace(machine(), accelerator=ampere), context=4096).fits


def test_fp8_weights_are_refused_where_a_gpu_has_no_8_bit_floats(mistral: str) -> None:
    for name, refused in (("rtx3090", True), ("rtx4090", False)):
        elsewhere = replace(machine(), accelerator=card(name).accelerator)
        rows = {row.name: row.refusal for row in build(Settings(model=mistral, device="cuda"), elsewhere).rows}
        assert (rows.pop("fp8") is not None) == refused and not any(rows.values())
        asked = Settings(model=mistral, device="cuda", quantization="fp8")
        if refused:
            with pytest.raises(ConfigError, match=r"RTX 3090 has 8\.6; give --quantization int8 or int4, or --"):
                build(asked, elsewhere)
            tight = build(Settings(model=mistral, device="cuda"), elsewhere, batch=4, context=32768).verdict
            assert "int8" in tight and "fp8" not in tight


def test_a_checkpoint_in_fp8_is_not_advised_to_be_quantized_once_more(mistral: str) -> None:
    """`--quantization int8` would be refused too."""
    plain = report(mistral).facts.arch
    stored = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (Path(mistral) / "config.json").write_text(json.dumps(MISTRAL_7B | {"quantization_config": stored}))
    elsewhere = replace(machine(), accelerator=card("rtx3090").accelerator)
    with pytest.raises(ConfigError, match=r"has 8\.6; serve a checkpoint that is not in fp8, or give --device cpu$"):
        build(Settings(model=mistral, device="cuda"), elsewhere)
    stored_arch = build(Settings(model=mistral, device="cpu"), elsewhere).facts.arch
    for arch, hint in ((stored_arch, "a checkpoint that is not in fp8 runs on it"), (plain, "int8 and int4 run on it")):
        device, why = served_device("auto", "fp8", elsewhere, arch)
        assert device == "cpu" and why.endswith(f"has 8.6; {hint}")


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_known_without_one(name: str, mistral: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The first line says what it has, and a step's least time is by its bandwidth."""
    one = card(name.upper().replace("-", "_"))
    assert one.properties.is_known and 1 <= one.memory_bytes / one.read_bytes_per_s * 1e3 < 600
    asked = Settings(model=mistral, device="cuda", quantization="int4", max_model_len=2048)
    run(asked, 1, None, "10-20", one, as_json=False)
    lines = " ".join(capsys.readouterr().out.split())
    shared = f"{one.properties.shared_bytes >> 10} KiB of shared memory a program"
    assert lines.startswith(f"{one.name}: ") and shared in lines
    assert re.search(r"A decode step of 1 request takes at least [\d.]+ ms there", lines)
    run(asked, 1, None, "10-20", one, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (said["card"]["name"], said["card"]["properties"]["sm"]) == (one.name, one.properties.sm)


def test_memory_of_the_host_for_kv_is_told_on_a_gpu_alone(mistral: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Settings(model=mistral, device="cuda", max_model_len=2048, kv_host=20 * GIB)
    run(asked, 1, None, "10-20", card("h100"), as_json=False)
    told = "For KV it takes up to 20.0 GiB of the host's memory beside."
    assert told in " ".join(capsys.readouterr().out.split())
    run(asked, 1, None, "10-20", card("h100"), as_json=True)
    assert json.loads(capsys.readouterr().out)["serve"]["host_bytes"] == 20 * GIB
    run(Settings(model="tiny", device="cpu", kv_host=20 * GIB), 1, None, "10-20", as_json=False)
    assert "of the host's memory" not in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("num_ranks", "least_ms", "reader"), [(1, 4.6, "it"), (2, 2.3, "each rank")])
def test_ranks_share_the_bytes_of_a_step(
    num_ranks: int, least_ms: float, reader: str, mistral: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Settings(model=mistral, device="cuda", max_model_len=8192, tensor_parallel_size=num_ranks)
    run(asked, 1, 8192, "10-20", card("h100"), as_json=False)
    said = re.search(r"at least ([\d.]+) ms there: ([\w ]+) reads", " ".join(capsys.readouterr().out.split()))
    assert said is not None and (float(said[1]), said[2]) == (least_ms, reader)


def test_a_card_is_a_device_of_the_command() -> None:
    done = CliRunner().invoke(app, ["plan", "tiny", "--device", "l40s"])
    assert done.exit_code == 0 and done.output.startswith("L40S: 45.0 GiB, reads 864 GB/s, compute capability 8.9, ")
    refused = CliRunner().invoke(app, ["plan", "tiny", "--device", "rtx2080"])
    assert re.search("must be auto, cpu, cuda or one of rtx3060, rtx3090, .* but got 'rtx2080'", str(refused.exception))


def test_a_gpus_plan_names_what_only_a_gpu_holds(mistral: str) -> None:
    gpu = Accelerator("H200", (9, 0), 141 * GIB, 140 * GIB)
    said = build(Settings(model=mistral), replace(machine(), accelerator=gpu), context=4096)
    parts = {part.name: part for part in said.plan.working}
    assert parts["partial sums"].formula.text == "2 kinds of steps x 268,435,456 B"
    assert "recorded steps" in parts
    assert "(4,096 tokens x 1 sequence + 1 padding x 32 tokens)" in said.plan.kv.formula.text
    assert said.work.step_tokens == 4096


def test_the_plan_is_of_the_device_that_serve_would_take(mistral: str) -> None:
    gpu = replace(machine(), accelerator=Accelerator("H200", (9, 0), 141 * GIB, 140 * GIB))
    expected: dict[DeviceKind, Literal["cpu", "cuda"]] = {"auto": "cuda", "cuda": "cuda", "cpu": "cpu"}
    for asked, device in expected.items():
        said = build(Settings(model=mistral, device=asked), gpu, context=4096)
        assert (said.machine.device, said.work.step_tokens) == (device, auto_step_tokens(device))
    with pytest.raises(ConfigError, match="it is a test; give --device cpu, or auto"):
        build(Settings(model=mistral, device="cuda"), replace(machine(), no_accelerator="it is a test"))


def test_it_says_whether_results_are_deterministic_here(mistral: str) -> None:
    said = report(mistral)
    assert to_json(said)["machine"]["deterministic"] is True
    assert shown(said).splitlines()[-1] == "Deterministic: on a CPU results are always deterministic."


def test_a_machine_that_is_too_small_is_told_what_would_fit(mistral: str) -> None:
    """The machine then accepts the contexts of the table, and no longer ones."""
    said = report(mistral, gib=12, batch=2, context=32768)
    assert not said.fits
    assert said.verdict.startswith("does not fit: the model needs 2")
    assert "--quantization int4 (4.4 GiB of weights) with --max-model-len up to" in said.verdict
    rows = {row.precision.name: row for row in said.rows}
    assert rows["bfloat16"].max_context == 0
    longest = rows["int8"].max_context
    assert 0 < longest < 32768
    assert report(mistral, gib=12, batch=2, context=longest, quantization="int8").fits
    assert not report(mistral, gib=12, batch=2, context=longest + 32, quantization="int8").fits
    text = shown(said)
    assert "does not fit" in text
    assert f"too long: up to {longest:,} tokens each" in text


def test_a_dtype_that_this_machine_lacks_is_planned_as_asked_and_judged_as_served(mistral: str) -> None:
    said = report(mistral, gib=24, dtype="float16", context=128)
    assert (said.precision.dtype, said.served.dtype, said.fits) == ("float16", "float32", False)
    assert said.plan.weights_bytes == 14_483_464_192
    text = " ".join(shown(said).split())
    note = "This machine computes float16 in float32: there is no float16 matrix product on a CPU."
    assert 0 < text.find(note) < text.find("bytes = formula")


@pytest.mark.sampled(keep=1)
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_rows_and_verdict_go_by_the_dtype_that_is_served(mistral: str, dtype: str) -> None:
    """`--quantization` then gets the row that fits and its context, even if only KV of two bytes fits."""
    asked: dict[str, Any] = {"dtype": dtype, "gib": 12, "context": 32768}
    rows = {row["name"]: row for row in to_json(report(mistral, **asked))["precisions"]}
    for name in ("int8", "int4"):
        quantized = report(mistral, quantization=name, **asked)
        row, served = rows[name], to_json(quantized)["machine"]["dtype"]
        assert row["is_served"]
        assert row["dtype"] == served == ("bfloat16" if dtype == "bfloat16" else "float32")
        assert row["kv_bytes"] == rows[served]["kv_bytes"] > 0
        assert quantized.fits == (row["max_context"] == 32768)
        assert report(mistral, quantization=name, **asked | {"context": row["max_context"]}).fits
    assert (rows["int8"]["max_context"] < 32768) == (dtype != "bfloat16")


def test_a_checkpoint_is_read_by_its_headers() -> None:
    for model in ("tiny", str(EMBEDDED_PATH)):
        said = report(model)
        assert said.files is not None
        assert said.files.bytes_by_dtype == {"BF16": said.files.num_bytes}
        assert said.files.num_bytes == 2 * said.facts.num_params
        assert said.precision.dtype == "float32"
    assert said.files is not None
    assert f"The files hold {said.files.num_bytes:,} B in BF16." in shown(said)


def test_a_file_and_a_directory_say_the_same(mistral: str) -> None:
    alone, inside = (to_json(report(name)) for name in (f"{mistral}/config.json", mistral))
    assert alone | {"model": ""} == inside | {"model": ""}


def test_weights_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(EMBEDDED_PATH / name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    with pytest.raises(ModelError, match="weights contradict"):
        report(str(tmp_path))


def test_a_hub_model_is_planned_without_its_weights(mistral: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot(repo_id: str, **options: Any) -> str:
        asked.append({"repo_id": repo_id, **options})
        return mistral

    monkeypatch.setattr("inferd.engine.api.hub.snapshot_download", snapshot)
    assert report("some/model", revision="v1").facts.num_params == 7_241_732_096
    not_needed = ["consolidated*.safetensors"]
    assert asked == [
        {
            "repo_id": "some/model", "revision": "v1", "allow_patterns": list(CONFIG_FILES),
            "ignore_patterns": not_needed,
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"batch": 0}, "--batch must be from 1 to 65536 for this model, but got 0"),
        ({"context": 32769}, "--context and --max-model-len must be from 1 to 32768 for this model, but got 32769"),
        (
            {"overhead": "20-10"},
            "--overhead must be a percentage from 0 to 100, or a range such as 10-20, but got '20-10'",
        ),
        ({"overhead": "some"}, "but got 'some'"),
        ({"overhead": "101"}, "but got '101'"),
    ],
)
def test_options_are_refused_by_name(mistral: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as told:
        report(mistral, **asked)
    assert message in str(told.value)


def test_the_code_that_computes_the_model_is_chosen_as_by_serve(mistral: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferd.engine.api.model.ask_modelled", lambda config, shapes: "it was asked")
    for model in (mistral, str(Path(mistral) / "config.json")):
        assert report(model, model_impl="native").plan == report(model).plan
        with pytest.raises(ModelError, match="it was asked; give --model-impl auto"):
            report(model, model_impl="transformers")


@pytest.mark.parametrize(("text", "shares"), [("10-20", (0.1, 0.2)), ("12.5%", (0.125, 0.125)), ("0", (0.0, 0.0))])
def test_overhead(mistral: str, text: str, shares: tuple[float, float]) -> None:
    said = report(mistral, overhead=text)
    assert said.overhead == shares
    assert said.overhead_bytes == tuple(round(said.held_bytes * (1 + share)) for share in shares)
    assert len(re.findall(r"^\+ .* rule of thumb", shown(said, width=200), re.MULTILINE)) == len(set(shares))


def test_a_model_that_int4_cannot_store_is_refused_and_shown_as_such(mistral: str) -> None:
    (Path(mistral) / "config.json").write_text(json.dumps(MISTRAL_7B | {"intermediate_size": 14340}))
    with pytest.raises(ConfigError, match=r"cannot be stored in int4: layers\.0\.mlp\.down has 14340 inputs"):
        report(mistral, quantization="int4")
    assert "not possible: layers.0.mlp.down has 14340 inputs" in shown(report(mistral), width=200)


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("/no/such", 3, "no directory /no/such; give another, a hub id (organisation/name) or `tiny`"),
        ("tiny --batch 0", 2, "--batch must be"),
        ("unknown", 3, "nor a hub id"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(model: str, code: int, words: str) -> None:
    done = command(*model.split())
    assert (done.returncode, done.stdout) == (code, "")
    assert re.fullmatch(rf"inferd: .*{re.escape(words)}.*\n", done.stderr)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("~nosuchuser/x", "~nosuchuser/x begins with the home of a user who has no home; give the whole path"),
        ("x" * 5000 + "/y.gguf", r"cannot look at x+ \.\.\. x*/y\.gguf: File name too long"),
    ],
)
def test_a_name_that_no_file_can_have_is_refused(model: str, message: str) -> None:
    with pytest.raises(ModelError, match=f"^{message}$"):
        report(model)


def test_a_place_that_may_not_be_seen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ModelError, match=r"^cannot look at /closed/model: Permission denied$"):
        report("/closed/model")


def test_an_absurd_depth_is_refused_before_it_takes_memory(mistral: str) -> None:
    (Path(mistral) / "config.json").write_text(json.dumps(MISTRAL_7B | {"num_hidden_layers": 10**9}))
    with pytest.raises(ModelError, match="num_hidden_layers must be at most 10000, but it is 1000000000"):
        report(f"{mistral}/config.json")


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("model", ["tiny", None])
def test_it_fits_its_width(mistral: str, model: str | None, width: int) -> None:
    """Numbers stay whole and in their column, even if a formula must wrap."""
    text = shown(report(model or mistral, quantization="int4", gib=5), width)
    assert max(map(len, text.splitlines())) <= width
    sizes = [
        match.end(1) for match in re.finditer(r"^\S+(?: \S+)* +([\d,.]+) +[\d,.]+  [\d,]+ [=~] ", text, re.MULTILINE)
    ]
    starts = [text.rfind("\n", 0, end) for end in sizes]
    assert len(sizes) > 8
    assert len({end - start for end, start in zip(sizes, starts, strict=True)}) == 1


def test_memory_for_adapters_is_a_part_of_the_plan(mistral: str) -> None:
    said = report(mistral, max_loras=8, max_lora_rank=16)
    (part,) = [part for part in said.plan.working if part.name == "adapters"]
    # q, o and k, v: inputs and outputs of each; gate, up and down.
    numbers = (4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 14336) * 3
    assert part.num_bytes == 8 * 16 * 32 * numbers * 2
    assert "8 adapters x rank 16 x" in part.formula.text
    assert "adapters" in shown(said)
    with pytest.raises(ConfigError, match="adapters are served by one process, but tensor_parallel_size is 2"):
        report(mistral, max_loras=1, tensor_parallel_size=2)


def directory_plan(model: str, folder: Path, quota: str = "1GiB", **asked: Any) -> DirectoryPlan:
    settings = Settings(model=model, kv_dir=str(folder), kv_disk=quota, max_model_len=2048, **asked)
    found = Asked.of(settings, build(settings, machine(256)).facts)
    (served,) = divide([found], machine(256))[1]
    assert served["kv_directory"] is not None
    return served["kv_directory"]


@pytest.mark.parametrize(
    ("name", "layer_bytes", "num_layers"),
    [
        ("Mistral-7B-v0.1", 2 * 8 * 128 * 4, 32),
        ("gemma-3-1b-it", 2 * 1 * 256 * 4, 26),  # 22 of them have a window
        ("Qwen3.5-0.8B", 2 * 2 * 256 * 4, 6),  # the 18 others have states
    ],
)
def test_the_quota_of_the_kv_directory_in_tokens(name: str, layer_bytes: int, num_layers: int, tmp_path: Path) -> None:
    """Calculated by hand for K and V in float32: K and V, heads, size, bytes."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name][0]))
    plan = directory_plan(str(tmp_path), tmp_path / "kv", dtype="float32")
    own = layer_bytes * num_layers
    assert plan["token_bytes"] == own
    if plan["state_interval"]:
        assert plan["tokens"] == int(GIB / (own + plan["state_bytes"] / plan["state_interval"])) < GIB // own
        num_numbers = 18 * (16 * 128 * 128 + 3 * (2 * 16 * 128 + 16 * 128))  # of the matrices and the convolutions
        assert plan["state_bytes"] == 4 * num_numbers
    else:
        assert plan["tokens"] == GIB // own and plan["state_bytes"] == 0
    assert (name == "Qwen3.5-0.8B") == bool(plan["state_interval"])
    half = directory_plan(str(tmp_path), tmp_path / "kv", "512MiB", dtype="float32")
    assert half["tokens"] == plan["tokens"] // 2


def test_a_quota_that_is_larger_than_the_disk_is_told(
    mistral: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that are in the directory already are a part of the quota."""
    folder = tmp_path / "kv"
    KVDirectory(folder, GIB).close()
    part = folder / ("a" * 64) / ("b" * 32)
    part.mkdir(parents=True)
    with (part / f"{'c' * 64}.kv").open("wb") as file:
        file.truncate(3 * 2**20)
    usage = shutil.disk_usage(tmp_path)
    for free, is_warned in ((GIB - 4 * 2**20, True), (GIB - 3 * 2**20, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        plan = directory_plan(mistral, folder)
        assert (plan["used_bytes"], plan["free_bytes"]) == (3 * 2**20, free)
        assert ("Warning: --kv-disk is more than these" in described(plan)) == is_warned
    run(Settings(model="tiny", kv_dir=str(tmp_path / "other/kv"), kv_disk="2GiB"), 1, None, "10", as_json=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "holds 524,288 tokens of this model: 4,096 B a token." in text and "Warning: --kv-disk" in text
    assert not (tmp_path / "other").exists(), "a plan makes nothing"
    run(Settings(model="tiny"), 1, None, "10", as_json=True)
    assert json.loads(capsys.readouterr().out)["serve"]["kv_directory"] is None


@pytest.mark.parametrize("what", ["file", "foreign", "link"])
def test_a_kv_directory_that_no_server_would_take_is_refused(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    if what == "file":
        folder.write_text("x")
    else:
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "mine.txt").write_text("x")
        folder.symlink_to(tmp_path / "other") if what == "link" else (tmp_path / "other").rename(folder)
    with pytest.raises(StartError, match=str(folder)):
        run(Settings(model="tiny", kv_dir=str(folder)), 1, None, "10", as_json=False)
