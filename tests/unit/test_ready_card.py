"""Output of a start: the plan in one line, the READY card, and a warning for a wrong plan."""

from __future__ import annotations

import json
import logging
import re
import shlex
import shutil
import socket
from dataclasses import replace
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from inferd.engine.api.adapter import AdapterFiles
from inferd.engine.api.checkpoint import EMBEDDED_PATH
from inferd.engine.api.classifier_folder import NO_JUDGE, ClassifierFolder
from inferd.engine.api.config import DraftConfig
from inferd.engine.api.cost.roofline import Peaks
from inferd.engine.api.machine.cpu import Machine
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.wire.messages import Ready
from inferd.engine.arch.matrix import Component
from inferd.engine.arch.modelled import Modelled, ModelledTensor
from inferd.engine.arch.registry import describe_modelled
from inferd.server.commands.plan import build
from inferd.server.commands.plan_report import to_json
from inferd.server.commands.plan_table import show
from inferd.server.config.settings import Settings
from inferd.server.lifecycle.models import read_models
from inferd.server.lifecycle.ready_card import StartupReport, describe_start, deviation, ready_card, without_paths
from inferd.server.schema.completions import CompletionRequest

MIB = 2**20
READY = Ready(
    num_blocks=8, block_size=16, max_model_len=64, vocab_size=32, weights_bytes=1000 * MIB, kv_bytes=MIB,
    planned_weights_bytes=1000 * MIB, planned_kv_bytes=MIB, device="cpu", dtype="bfloat16",
    peaks=Peaks(1e10, 1e12),
)  # fmt: skip


@pytest.fixture(scope="module")
def report() -> StartupReport:
    return read_models(Settings(kv_memory=64 * MIB, quantization="int8"))[0]


def test_the_plan_is_said_before_anything_is_loaded(report: StartupReport) -> None:
    text = describe_start(report)
    assert text.startswith("LlamaForCausalLM, 3.5 M parameters, int8 weights, float32 on cpu; memory plan: ")
    assert "KV cache 64.0 MiB" in text
    assert re.search(r"memory plan: weights [\d.]+ MiB, .*, working memory [\d.]+ MiB$", text)


def test_memory_of_the_host_for_kv_is_in_the_plan_on_a_gpu_and_told_to_be_unused_on_a_cpu(
    report: StartupReport, caplog: pytest.LogCaptureFixture
) -> None:
    on_gpu = replace(report, memory=replace(report.memory, host_bytes=3 * MIB))
    assert describe_start(on_gpu).endswith(", KV in the host's memory 3.0 MiB")
    read_models(Settings(kv_memory=64 * MIB, quantization="int8", device="cpu", kv_host=128 * MIB))
    (told,) = [record for record in caplog.records if "kv-host" in record.message]
    assert told.levelname == "WARNING" and "not used: on a CPU the KV cache lies in the host's memory" in told.message


def test_what_clients_read_of_a_failure_shows_no_directories(report: StartupReport) -> None:
    files = AdapterFiles(Path("/m/lora"), "", ())
    draft = DraftConfig(model_path="/d", name="./small", quantization="none", weights_dtype="float32")
    config = msgspec.structs.replace(report.config, model_path="/m", draft=draft)
    failed = replace(report, config=config, adapters={"sql": files})
    told = without_paths(failed, "--lora sql: /m/lora/a.safetensors: NaN in /m/b.safetensors, /d/c.safetensors")
    assert told == "--lora sql: sql/a.safetensors: NaN in tiny/b.safetensors, small/c.safetensors"


@pytest.mark.parametrize(
    ("quantization", "activations", "kv_cache_dtype", "words"),
    [
        ("none", "own", "bfloat16", ", bfloat16, context"),
        ("int4", "own", "bfloat16", ", int4 weights, bfloat16, context"),
        ("int4", "own", "fp8", ", int4 weights, bfloat16, fp8 KV, context"),
        ("none", "own", "int8", ", bfloat16, int8 KV, context"),
        ("int8", "declared", "bfloat16", "int8 weights, bfloat16, activations in 8 bits as the checkpoint declares, "),
    ],
)
def test_the_card_says_what_numbers_are_stored_in(
    report: StartupReport, quantization: str, activations: str, kv_cache_dtype: str, words: str
) -> None:
    config = msgspec.structs.replace(
        report.config, dtype="bfloat16", quantization=quantization, activations=activations,
        kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        card = ready_card([(replace(report, config=config), READY)], listener, 1.0)
    assert words in card
    assert "context 64 tokens, KV cache 128 tokens, deterministic)" in card


def test_the_card_says_whether_results_are_deterministic(report: StartupReport) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        card = ready_card([(report, msgspec.structs.replace(READY, deterministic=False))], listener, 1.0)
    assert "KV cache 128 tokens, not deterministic)" in card


def test_the_card_says_what_guesses_tokens(report: StartupReport) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        card = ready_card([(report, msgspec.structs.replace(READY, speculative="suffix"))], listener, 1.0)
        assert "KV cache 128 tokens, deterministic, speculative: suffix)" in card
        assert "speculative" not in ready_card([(report, READY)], listener, 1.0)


def seeing(folder: Path) -> Path:
    """The embedded model as the text part of a model that also sees, in `folder`."""
    shutil.copytree(EMBEDDED_PATH, folder, ignore=shutil.ignore_patterns("__pycache__"))
    config = json.loads((folder / "config.json").read_text())
    wrapper = {"architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl", "text_config": config}
    (folder / "config.json").write_text(json.dumps(wrapper))
    stored = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(stored[:8], "little")
    named = json.loads(stored[8:start])
    header = {f"language_model.{name}": value for name, value in named.items() if name != "__metadata__"}
    size = len(stored) - start
    header["vision_tower.patches"] = {"dtype": "BF16", "shape": [2**20], "data_offsets": [size, size + 2**21]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + stored[start:] + bytes(2**21))
    return folder


def test_the_parts_that_are_not_served_are_said(tmp_path: Path) -> None:
    """At start, on the card and in the plan."""
    model = str(seeing(tmp_path / "seeing"))
    words = "the text part of InternVLForConditionalGeneration alone; not loaded: vision_tower (2.0 MiB)"
    report = read_models(Settings(model=model, kv_memory=64 * MIB))[0]
    assert f" on cpu; {words}; memory plan: weights" in describe_start(report)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        assert f"\n  {words}\n" in ready_card([(report, READY)], listener, 1.0)
    plan = build(Settings(model=model), Machine.detect())
    told = to_json(plan)
    assert (told["wrapper"], told["left_out_bytes"]) == ("InternVLForConditionalGeneration", {"vision_tower": 2 * MIB})
    assert told["files"]["bytes"] == 2 * plan.facts.num_params
    console = Console(file=StringIO(), width=120, highlight=False)
    show(plan, console)
    assert f"It is {words}." in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_card_says_that_a_family_is_not_native(report: StartupReport) -> None:
    modelled = Modelled(
        architecture="PhiForCausalLM", vocab_size=32, hidden_size=16, widest=64, num_heads=2, num_kv_heads=2,
        head_dim=8, max_positions=64, attention_scale=0.3, attention_softcap=None, windows=(None,),
        tie_embeddings=False, dtype="float32",
        tensors=(ModelledTensor("model.embed_tokens.weight", (32, 16), Component.EMBEDDING, "embed"),),
    )  # fmt: skip
    facts = ModelFacts(Path("model"), describe_modelled(modelled), "float32", is_embedded=False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        card = ready_card([(replace(report, facts=facts), READY)], listener, 1.0)
    assert ", int8 weights, float32, compatible (transformers), not native, context 64 tokens, " in card


def test_the_card_names_the_adapters(report: StartupReport) -> None:
    files = AdapterFiles(Path("adapters"), "digest", ())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        card = ready_card([(replace(report, adapters={"sql": files, "french": files}), READY)], listener, 1.0)
        assert "\n  LoRA adapters: sql, french\n" in card
        assert "LoRA" not in ready_card([(report, READY)], listener, 1.0)


@pytest.mark.parametrize(
    ("settings", "is_asked"),
    [(Settings(), False), (Settings(api_key=("k",)), True), (Settings(keys_file="keys.yaml"), True)],
)
def test_the_line_to_paste_has_a_key_where_one_is_asked_for(
    report: StartupReport, settings: Settings, is_asked: bool
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        card = ready_card([(replace(report, settings=settings), READY)], listener, 1.0)
    assert ("-H 'Authorization: Bearer YOUR_KEY' -H" in card) == is_asked


def test_the_line_to_paste_is_one_that_the_model_can_answer(report: StartupReport) -> None:
    """A chat needs a chat template."""
    plain = replace(report, model=replace(report.model, template=None))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        told = ready_card([(plain, READY)], listener, 1.0).splitlines()[-1]
        assert "/v1/chat/completions" in ready_card([(report, READY)], listener, 1.0)
    words = shlex.split(told)
    asked = CompletionRequest.model_validate_json(words[-1])
    assert words[1].endswith("/v1/completions")
    assert (asked.model, asked.prompt) == ("tiny", ("Once upon a time",))


@pytest.mark.parametrize("has_page", [True, False])
def test_the_card_names_the_page_unless_it_is_off(report: StartupReport, has_page: bool) -> None:
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        card = ready_card([(replace(report, settings=Settings(playground=has_page)), READY)], listener, 1.0)
        line = f"\n  chat in a browser: http://127.0.0.1:{listener.getsockname()[1]}/\n"
    assert (line in card, "browser" in card) == (has_page, has_page)


def test_a_wish_that_a_processor_overrides_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        asked = Settings(kv_memory=64 * MIB, device="cpu", deterministic=False, activations="declared")
        settled = read_models(asked)[0]
    assert settled.config.deterministic is True
    said = [record.getMessage() for record in caplog.records]
    assert "deterministic: False -> True (on a CPU results are always deterministic)" in said
    why = "the checkpoint declares no activations of 8 bits with one scale a token"
    assert f"activations: declared -> own ({why})" in said


@pytest.mark.parametrize(("taken", "is_wrong"), [(1000, False), (1060, False), (1070, True), (940, False), (930, True)])
def test_a_wrong_plan_is_said(taken: int, is_wrong: bool) -> None:
    """The plan is wrong by more than 5% and by more than the 16 MiB that a matrix library may keep."""
    told = deviation(msgspec.structs.replace(READY, weights_bytes=taken * MIB))
    assert (told is not None) == is_wrong
    assert told is None or "1000.0 MiB were planned" in told


@pytest.mark.parametrize(
    ("num_labels", "judges", "path", "said"),
    [
        (0, NO_JUDGE, "/v1/embeddings", ", pooling last, 384 components,"),
        (1, NO_JUDGE, "/v1/rerank", ", reranker,"),
        (3, NO_JUDGE, "/v1/classify", ", 3 labels,"),
        (2, ClassifierFolder({0: "yes", 1: "no"}, compares_labels=True), "/v1/rerank", ", reranker,"),
    ],
)
def test_the_card_of_an_encoder_says_what_it_answers(
    report: StartupReport, num_labels: int, judges: ClassifierFolder, path: str, said: str
) -> None:
    architectures = ("BertForSequenceClassification",) if num_labels else ("BertModel",)
    model = replace(report.model, generates=False, judges=judges, architectures=architectures)
    config = msgspec.structs.replace(report.config, is_encoder=True)
    ready = msgspec.structs.replace(READY, num_labels=num_labels, generates=False, hidden_size=384)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        card = ready_card([(replace(report, model=model, config=config), ready)], listener, 1.0)
    assert path in card.splitlines()[-1] and said in card
    assert "chat in a browser" not in card
    assert (f"  search in a browser: {url}/\n" in card) == (path == "/v1/embeddings")


def test_the_card_of_several_models_has_a_command_for_each_kind(report: StartupReport) -> None:
    def named(name: str, num_labels: int, *, generates: bool) -> tuple[StartupReport, Ready]:
        ready = msgspec.structs.replace(READY, num_labels=num_labels, generates=generates, hidden_size=384)
        config = msgspec.structs.replace(report.config, is_encoder=not generates)
        embeds = replace(report.model.embeds, pooling="mean", num_components=256)
        model = replace(report.model, generates=generates, **({} if generates else {"embeds": embeds}))
        settings = Settings(served_model_name=(name,), api_key=("k",) if generates else ())
        return replace(report, model=model, config=config, settings=settings), ready

    models = [
        named("talker", 0, generates=True), named("embedder", 0, generates=False),
        named("other", 0, generates=False), named("ranker", 1, generates=False),
    ]  # fmt: skip
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        card = ready_card([*models, (report, "no file")], listener, 1.0)
    commands = [shlex.split(line) for line in card.splitlines() if line.startswith("  curl ")]
    asked = [(words[1].partition("/v1")[2], json.loads(words[-1])["model"]) for words in commands]
    assert asked == [("/chat/completions", "talker"), ("/embeddings", "embedder"), ("/rerank", "ranker")]
    assert "READY in 1.0 s: 4 of 5 models" in card and "tokens, pooling mean, 256 components, deterministic" in card
    assert "tokens, reranker, deterministic" in card and "  chat and search in a browser: http" in card
