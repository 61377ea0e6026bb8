"""The texts of a start: the memory plan in one line, a warning if the plan was wrong, and the READY card.

`serve` decides when to print them.
"""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from inferd.engine.api.adapter import NUM_FILES, AdapterFiles
from inferd.engine.api.config import EngineConfig
from inferd.engine.api.encoder_model import EncoderFacts
from inferd.engine.api.held_files import HeldCheckpoint
from inferd.engine.api.memory.planner import MemoryPlan, format_bytes
from inferd.engine.api.memory.precision import KV_FORMATS
from inferd.engine.api.model import ModelFacts
from inferd.engine.api.process.logs import counted
from inferd.engine.api.wire.messages import Ready
from inferd.server.config.settings import Settings
from inferd.server.schema.answers.operation import Task
from inferd.server.text.model import ServedModel

_PLAN_TOLERANCE = 0.05
_PLAN_CONSTANT_BYTES = 16 * 2**20
"""Memory that the matrix library keeps for itself with any model."""


@dataclass(frozen=True, slots=True)
class StartupReport:
    """Everything that is known before the engine starts."""

    settings: Settings
    facts: ModelFacts | EncoderFacts
    model: ServedModel
    config: EngineConfig
    memory: MemoryPlan
    adapters: Mapping[str, AdapterFiles] = field(default_factory=dict)
    """Those served from the start, by name."""
    held: tuple[HeldCheckpoint, ...] = ()
    """The files of the model and its draft model, open as long as this report lives."""

    @property
    def num_held_files(self) -> int:
        """Most files that the server holds open for this model, its vocabulary and its adapters."""
        return 1 + sum(map(len, self.held)) + NUM_FILES * self.config.max_loras


def describe_start(report: StartupReport) -> str:
    """The model and its memory plan, in one line."""
    facts, config, memory = report.facts, report.config, report.memory
    scope = f"; {facts.scope}" if facts.scope else ""
    return (
        f"{facts.arch.architecture}, {facts.num_params / 1e6:.1f} M parameters, "
        f"{_precision(config, facts.blocks)} on {config.device}"
        f"{_ranks(config)}{scope}; memory plan{_of_each(config)}: "
        f"weights {format_bytes(memory.weights_bytes)}, KV cache {format_bytes(memory.kv_bytes)}, "
        f"working memory {format_bytes(memory.working_bytes)}{_on_host(memory)}"
    )


def deviation(ready: Ready) -> str | None:
    """A warning if the weights took more or less memory than planned. None if an allocator explains the difference."""
    planned, measured = ready.planned_weights_bytes, ready.weights_bytes
    if abs(measured - planned) <= _PLAN_TOLERANCE * planned + _PLAN_CONSTANT_BYTES:
        return None
    return (
        f"the weights took {format_bytes(measured)}, but {format_bytes(planned)} were planned: "
        "the memory plan of this model is wrong, please report it"
    )


def without_paths(report: StartupReport, text: str) -> str:
    """`text` with names in place of directories, because no answer shows a path of this machine."""
    names = {str(files.path): name for name, files in report.adapters.items()}
    names[report.config.model_path] = report.settings.served_names[0]
    names |= {file.path: Path(file.path).name for file in report.config.all_files}
    if report.config.draft is not None:
        names[report.config.draft.model_path] = Path(report.config.draft.name).name
    for path in sorted(names, key=len, reverse=True):  # one may be inside another
        text = text.replace(path, names[path])
    return text


def _code(facts: ModelFacts | EncoderFacts) -> str:
    return "" if facts.arch.is_native else ", compatible (transformers), not native"


def _ranks(config: EngineConfig) -> str:
    replicas = f", {config.num_replicas} replicas" if config.num_replicas > 1 else ""
    ranks = (
        f"{' of' if replicas else ','} {config.tensor_parallel_size} ranks" if config.tensor_parallel_size > 1 else ""
    )
    return replicas + ranks


def _of_each(config: EngineConfig) -> str:
    return " of each rank" if config.tensor_parallel_size > 1 else " of each replica" if config.num_replicas > 1 else ""


def _on_host(memory: MemoryPlan) -> str:
    return f", KV in the host's memory {format_bytes(memory.host_bytes)}" if memory.host_bytes else ""


def _precision(config: EngineConfig, blocks: str) -> str:
    """`blocks`: types in a GGUF file, and whether they are kept, or ""."""
    weights = "" if config.quantization == "none" else f"{config.quantization} weights, "
    activations = "" if config.activations == "own" else ", activations in 8 bits as the checkpoint declares"
    kv_cache = f", {config.kv_cache_dtype} KV" if config.kv_cache_dtype in KV_FORMATS else ""
    return weights + config.dtype + activations + kv_cache + (f" ({blocks})" if blocks else "")


def ready_card(outcomes: Sequence[tuple[StartupReport, Ready | str]], listener: socket.socket, total_s: float) -> str:
    """The first things that a person needs: the address, the models, the page, and a command to paste for each kind
    of model.

    `outcomes`: each model, with its engine's measurements or the reason for which it has none.
    """
    served = [(report, ready) for report, ready in outcomes if not isinstance(ready, str)]
    report, ready = served[0]
    settings = report.settings
    url = f"http://{_reachable_host(listener)}:{listener.getsockname()[1]}"
    inferd = f"inferd {version('inferd')}"
    if len(outcomes) == 1:
        name = settings.served_names[0]
        head = f"READY in {total_s:.1f} s: {name} at {url}/v1 ({inferd}, {_served(report, ready)})\n{_more(report)}"
    else:
        of_all = "" if len(served) == len(outcomes) else f" of {len(outcomes)}"
        head = f"READY in {total_s:.1f} s: {len(served)}{of_all} models at {url}/v1 ({inferd})\n"
        head += "".join(_outcome(report, ready) for report, ready in outcomes)
    tasks = {shown.model.task for shown, _ in outcomes} if settings.playground else set()
    does = " and ".join(verb for task, verb in _ON_THE_PAGE.items() if task in tasks)
    page = f"  {does} in a browser: {url}/\n" if does else ""
    return f"\n{head}{page}{_commands(url, served)}"


_ON_THE_PAGE: Mapping[Task, str] = {"generate": "chat", "embed": "search"}
"""Task of a model -> what the page does with it."""


def _commands(url: str, served: Sequence[tuple[StartupReport, Ready]]) -> str:
    """For each route that a model is made for, a command that asks the first such model."""
    commands: dict[str, str] = {}
    for report, ready in served:
        path, asked = _first_request(report.model, ready.num_labels)
        settings = report.settings
        key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key or settings.keys_file else ""
        body = shlex.quote(json.dumps({"model": settings.served_names[0], **asked}))
        commands.setdefault(path, f"  curl {url}{path}{key} -H 'Content-Type: application/json' -d {body}")
    return "\n".join(commands.values())


def _first_request(model: ServedModel, num_labels: int) -> tuple[str, dict[str, object]]:
    """(path, body without the model's name) of a request that this model can answer. `num_labels`: those of its
    classifier; 0 if it has none."""
    if model.judges.gives_scores(num_labels):
        return "/v1/rerank", {"query": "What is a fox?", "documents": ["A fox is an animal.", "A box is a thing."]}
    if num_labels:
        return "/v1/classify", {"input": "The quick brown fox"}
    if model.is_made_to_embed:
        return "/v1/embeddings", {"input": "The quick brown fox"}
    if model.template is None:
        return "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "What are you?"}]}


def _outcome(report: StartupReport, ready: Ready | str) -> str:
    """One of several models, in lines."""
    name = report.settings.served_names[0]
    if isinstance(ready, str):
        return f"  {name}: not served: {ready}\n"
    return f"  {name}: {_served(report, ready)}\n{_more(report, '    ')}"


def _served(report: StartupReport, ready: Ready) -> str:
    """How a model is served, in one line."""
    if report.config.is_encoder:
        return (
            f"{_precision(report.config, report.facts.blocks)}{_ranks(report.config)}, encoder, texts of up to "
            f"{ready.max_model_len} tokens{_pooled(report.model, ready)}, deterministic"
        )
    # A block belongs to one cache group, and a sequence needs blocks in each.
    kv_tokens = report.config.num_replicas * ready.num_blocks // ready.num_groups * ready.block_size
    return (
        f"{_precision(report.config, report.facts.blocks)}"
        f"{_ranks(report.config)}{_code(report.facts)}, "
        f"context {ready.max_model_len} tokens{_pooled(report.model, ready)}, KV cache {kv_tokens} tokens, "
        f"{f'{ready.num_checkpoints} recurrent states, ' if ready.num_checkpoints else ''}"
        f"{'deterministic' if ready.deterministic else 'not deterministic'}"
        f"{'' if ready.speculative == 'none' else f', speculative: {ready.speculative}'}"
    )


def _pooled(model: ServedModel, ready: Ready) -> str:
    """Whether it is a reranker, how many labels another classifier has, or what vectors a model that is made to embed
    gives; empty for any other model."""
    if model.judges.gives_scores(ready.num_labels):
        return ", reranker"
    if ready.num_labels:
        return f", {counted(ready.num_labels, 'label')}"
    if not model.is_made_to_embed:
        return ""
    num_components = min(model.embeds.num_components or ready.hidden_size, ready.hidden_size)
    return f", pooling {model.embeds.pooling}, {num_components} components"


def _more(report: StartupReport, indent: str = "  ") -> str:
    """The scope, the adapters and the formats of a model, in lines."""
    scope = f"{indent}{report.facts.scope}\n" if report.facts.scope else ""
    adapters = f"{indent}LoRA adapters: {', '.join(report.adapters)}\n" if report.adapters else ""
    words = f"{indent}{report.model.format.words}\n" if report.model.generates else ""
    return f"{scope}{adapters}{words}"


def _reachable_host(listener: socket.socket) -> str:
    """The listening address as a client on this machine would write it."""
    host: str = listener.getsockname()[0]
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
