"""Declares every setting of the server once: its type, default, rule and help.

Each is a flag, an INFERD_* variable and a key of the YAML file. `settings` reads these sources, and checks what one
setting says of another.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from inferd.engine.api.adapter import MAX_ADAPTERS, MAX_RANK
from inferd.engine.api.memory.precision import KVPrecision
from inferd.engine.api.modelling import ModelImpl
from inferd.server.config.fields import (
    ENV_PREFIX,
    Auto,
    BlockSize,
    Duration,
    Entries,
    Names,
    NoneAllowed,
    Number,
    Secrets,
    Size,
    setting,
)
from inferd.server.config.names import NAME_RULE, is_name
from inferd.server.schema.latency import MAX_TARGET_S, MIN_TARGET_S

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,]+")
_ENDPOINT = re.compile(r"tcp://\S+:\d{1,5}|ipc://\S+")
_HOST_NAME = re.compile(r"[^/?#@\s,:]+|[0-9a-f:.]*:[0-9a-f:.]*:[0-9a-f:.]*")


def _not_empty(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty")
    return value


def _no_service_link(value: object) -> object:
    if isinstance(value, str) and value.startswith("tcp://"):
        raise ValueError(
            "must be a number; Kubernetes sets this variable for a service of the same name: "
            "rename the service, or set enableServiceLinks: false"
        )
    return value


def _path_prefix(value: str) -> str:
    if value and (not value.startswith("/") or value.endswith("/")):
        raise ValueError("must begin with / and must not end with /, such as /llm")
    return value


def _different(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) < len(value):
        raise ValueError("must be different names")
    return value


def _adapters(value: tuple[str, ...]) -> tuple[str, ...]:
    entries = [entry.partition("=") for entry in value]
    names = [name for name, _, _ in entries]
    if not all(name and path for name, _, path in entries):
        raise ValueError("must be a name and a directory, such as sql=adapters/sql")
    if not all(map(is_name, names)):
        raise ValueError(f"must have {NAME_RULE}")
    if len(set(names)) < len(names):
        raise ValueError("must be adapters of different names")
    return value


def _endpoint(value: str | None) -> str | None:
    if value is not None and not _ENDPOINT.fullmatch(value):
        raise ValueError("must be an endpoint of ZeroMQ, such as tcp://*:5557 or ipc:///run/inferd/kv")
    return value


def _web_origins(value: tuple[str, ...]) -> tuple[str, ...]:
    value = tuple(origin.lower() for origin in value)
    if not all(origin in ("*", "null") or _ORIGIN.fullmatch(origin) for origin in value):
        raise ValueError(
            "must be origins as browsers send them: scheme, host and port alone, such as https://app.example "
            "or http://localhost:3000; or *"
        )
    return value


def _host_names(value: tuple[str, ...]) -> tuple[str, ...]:
    value = tuple(name.lower() for name in value)
    if not all(name == "*" or _HOST_NAME.fullmatch(name) for name in value):
        raise ValueError("must be host names without scheme and port, such as llm.example; or *")
    return value


def _keys(value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    for text in (key.get_secret_value() for key in value):
        if not text:
            raise ValueError("a key is empty; leave the setting out if clients need no key")
        if not text.isascii() or not text.isprintable() or " " in text:
            raise ValueError("a key must consist of printable ASCII characters without spaces")
    return value


NotEmpty = Annotated[str, AfterValidator(_not_empty)]
Endpoint = Annotated[str | None, AfterValidator(_endpoint)]
Keys = Annotated[Secrets, AfterValidator(_keys)]

_model, _server, _engine, _latency, _limits, _logs, _events = (
    partial(setting, panel=panel)
    for panel in ("Model", "Server", "Engine", "Latency", "Limits", "Logs and metrics", "KV events")
)
"""Each makes a setting of one panel of the help."""


class Declared(BaseSettings):
    """The fields of `Settings`. None stands for "auto": the start decides by model and machine."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, enable_decoding=False, extra="forbid", frozen=True
    )

    model: NotEmpty = _model(
        "tiny",
        "Hub id, directory or GGUF file of the model; tiny (ships with inferd) or smollm2 (fetched once, 98 MB).",
    )
    models: Entries = _model(
        (),
        "Model to serve beside others, as model or name=model; repeat for each. In the YAML file, an entry may be a "
        "mapping with settings of its own.",
    )
    revision: str | None = _model(None, "Branch, tag or commit of a Hub model.")
    served_model_name: Annotated[Names, AfterValidator(_different)] = _model(
        (), "Model name that clients send; repeat for aliases."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _model(
        "auto", "Precision of weights and activations; auto takes the checkpoint's."
    )
    quantization: Literal["auto", "none", "fp8", "int8", "int4"] = _model(
        "auto",
        "Format that linear layers store their weights in. auto keeps the checkpoint's; none dequantizes a GGUF file.",
    )
    activations: Literal["auto", "declared"] = _model(
        "auto",
        "How a processor quantizes the activations of a checkpoint in W8A8: finely (auto), or faster and less exactly, "
        "as the checkpoint declares.",
    )
    model_impl: ModelImpl = _model(
        "auto", "Code that computes the model: inferd's own (native), or transformers'. auto takes inferd's if it can."
    )
    kv_cache_dtype: KVPrecision = _model("auto", "Format of the KV cache; auto takes the dtype of the activations.")
    max_model_len: Annotated[int | None, Auto, Number] = _model(
        None, "Maximum number of tokens of prompt and answer together.", ge=2
    )
    tool_format: Literal[
        "auto", "none", "deepseek_v3", "deepseek_v31", "functools", "gemma4", "glm45", "glm47", "granite", "harmony",
        "hermes", "json", "kimi_k2", "lfm2", "llama3_json", "mistral", "mistral_args", "olmo3", "phi4", "pythonic",
        "qwen3_coder", "seed_oss",
    ] = _model("auto", "Format in which the model writes tool calls; auto detects it.")  # fmt: skip
    reasoning_format: Literal["auto", "none", "gemma4", "granite", "harmony", "mistral", "seed_oss", "think"] = _model(
        "auto", "Format in which the model writes its reasoning; auto detects it."
    )
    trust_special_tokens: bool = _model(
        False,
        "Read special tokens that callers write in messages and tools as special tokens; otherwise they are text.",
    )

    host: NotEmpty = _server("127.0.0.1", "Address to listen on.")
    port: Annotated[int, Number, BeforeValidator(_no_service_link)] = _server(
        8000, "Port to listen on; 0 takes a free one.", ge=0, le=65535
    )
    root_path: Annotated[str, AfterValidator(_path_prefix)] = _server(
        "", "Path prefix that a reverse proxy removes, such as /llm."
    )
    api_key: Keys = _server((), "API key that clients must send; repeat for more keys.")
    admin_key: Keys = _server((), "Key for the admin routes, such as /config; repeat for more keys.")
    keys_file: str | None = _server(
        None, "YAML or JSON file of keys, tenants and quotas. Changes apply without a restart."
    )
    admin_host: NotEmpty = _server("127.0.0.1", "Address that the admin port listens on.")
    admin_port: Annotated[int | None, NoneAllowed, Number] = _server(
        None, "Serve admin routes on this port only, instead of on --port.", ge=0, le=65535
    )
    allow_unauthenticated: bool = _server(
        False, "Serve other machines although no key is set: anybody who reaches the port may call."
    )
    otlp_traces_endpoint: str | None = _server(
        None, "URL of an OpenTelemetry collector, such as http://127.0.0.1:4318/v1/traces. It gets a span a request."
    )
    allowed_origins: Annotated[Names, AfterValidator(_web_origins)] = _server(
        (),
        "Origin of web pages that may call from a browser, such as https://app.example, or * for any; repeat for more.",
    )
    allowed_hosts: Annotated[Names, AfterValidator(_host_names)] = _server(
        (),
        "Host name that requests may use when no key is set, besides this machine's own, or * for any; "
        "repeat for more.",
    )
    playground: bool = _server(True, "Serve a page at / to chat with the model and to watch the engine.")
    unknown_fields: Literal["refuse", "warn"] = _server(
        "refuse", "Answer to a request with an unknown field. warn serves it with a warning header, refuse answers 400."
    )

    device: Literal["auto", "cpu", "cuda"] = _engine("auto", "Device that the model runs on.")
    deterministic: Annotated[bool | None, Auto] = _engine(
        None, "Give a request the same tokens whatever other requests run beside it. A CPU always does."
    )
    attention_libs: bool = _engine(
        True, "Let an installed library, such as FlashAttention, compute attention on a GPU. Never if deterministic."
    )
    num_threads: Annotated[int | None, Auto, Number] = _engine(
        None, "Number of compute threads; auto takes one per available core.", ge=1, le=1024
    )
    tensor_parallel_size: Annotated[int, Number] = _engine(
        1, "Number of processes that share the model, each with a part of its weights and KV cache.", ge=1, le=128
    )
    replicas: Annotated[int, Number] = _engine(
        1,
        "Number of engines, each with the whole model and with its own GPUs or its part of the cores. If one dies, the "
        "others take its requests over at once.",
        ge=1,
        le=64,
    )
    kv_memory: Annotated[Size | None, Auto] = _engine(None, "Memory for the KV cache, of each replica.", ge=1024**2)
    block_size: Annotated[BlockSize | None, Auto] = _engine(None, "Number of tokens in a KV block.")
    prefix_caching: bool = _engine(True, "Reuse the KV cache of prompts that begin alike.")
    kv_dir: str | None = _engine(
        None,
        "Directory that keeps the KV cache of prompts and answers for later starts. Other servers may share it.",
    )
    kv_host: Size = _engine(
        0, "Host memory that keeps what a GPU's KV cache has no more room for, of each replica. 0: none.", ge=0
    )
    kv_disk: Size = _engine(10 * 1024**3, "Most bytes of all files in the directory of kv_dir.", ge=64 * 1024**2)
    weight_cache: bool = _engine(
        True, "On a CPU, keep packed weights in the user's cache: later starts map them, and engines share them."
    )
    max_num_seqs: Annotated[int | None, Auto, Number] = _engine(
        None, "Maximum number of sequences in one step.", ge=1, le=65536
    )
    max_num_batched_tokens: Annotated[int | None, Auto, Number] = _engine(
        None, "Maximum number of tokens in one step.", ge=1
    )
    speculative: str = _engine(
        "none",
        "Guess tokens from what a request repeats of itself (ngram), and of recent answers too (suffix), or let a "
        "draft model or draft head make them too: its directory, GGUF file or Hub id, or mtp for the model's own MTP "
        "layer. Steps verify them: they change no token. auto is suffix on a CPU, and none on a GPU.",
    )
    lora: Annotated[Names, AfterValidator(_adapters)] = _engine(
        (), "LoRA adapter to serve under a name of its own, as name=directory; repeat for more."
    )
    max_loras: Annotated[int | None, Auto, Number] = _engine(
        None,
        "Number of LoRA adapters that there is memory for; auto is 8 if --lora is given, otherwise 0.",
        ge=0,
        le=MAX_ADAPTERS,
    )
    max_lora_rank: Annotated[int | None, Auto, Number] = _engine(
        None, "Largest rank of a LoRA adapter; auto is 16, or the largest of those given.", ge=1, le=MAX_RANK
    )
    idle_unload: Annotated[Duration | None, NoneAllowed] = _engine(
        None,
        "Time without a request after which a model's engine is stopped and its memory freed. The next request loads "
        "it again.",
        ge=1,
        le=604_800,
    )
    standby: bool = _engine(False, "Keep a second engine process ready, which replaces the first if that dies.")

    ttft_target: Annotated[Duration | None, NoneAllowed] = _latency(
        None,
        "Target for the time to first token. A request that cannot meet it gets a 429.",
        ge=MIN_TARGET_S,
        le=MAX_TARGET_S,
    )
    tpot_target: Annotated[Duration | None, NoneAllowed] = _latency(
        None,
        "Target for the mean time per output token after the first. Prompts are computed in smaller chunks to keep it.",
        ge=MIN_TARGET_S,
        le=MAX_TARGET_S,
    )
    e2e_target: Annotated[Duration | None, NoneAllowed] = _latency(
        None,
        "Target for the time to the last token. Metrics count it; the scheduler ignores it.",
        ge=MIN_TARGET_S,
        le=86_400,
    )

    max_connections: Annotated[int, Number] = _limits(
        8192, "Maximum number of open connections; one more gets a 503.", ge=1, le=1_000_000
    )
    max_waiting: Annotated[int, Number] = _limits(
        2048, "Maximum number of requests that wait for the engine; one more gets a 503.", ge=1, le=10**6
    )
    max_wait: Duration = _limits(
        600.0,
        "Maximum time that all waiting prompts may take to compute; a prompt beyond it gets a 503.",
        ge=MIN_TARGET_S,
        le=MAX_TARGET_S,
    )
    max_body_bytes: Size = _limits(16 * 1024**2, "Maximum size of a request body.", ge=1024)
    stored_responses: Size = _limits(
        256 * 1024**2, "Memory for the answers that /v1/responses stores; 0 stores none.", ge=0
    )
    stored_responses_ttl_s: Annotated[float, Number] = _limits(
        86_400.0, "Maximum time that /v1/responses stores an answer.", ge=1, le=31_536_000
    )
    shutdown_timeout_s: Annotated[float, Number] = _limits(
        30.0, "Time that running requests have to finish after SIGTERM.", ge=0, le=3600
    )
    shutdown_delay_s: Annotated[float | None, Auto, Number] = _limits(
        None,
        "Part of that time in which new requests are still accepted while /ready answers 503. "
        "auto is 5, or 0 on a loopback host.",
        ge=0,
        le=3600,
    )

    log_level: Literal["debug", "info", "warning", "error"] = _logs("info", "Least severe level that is logged.")
    log_format: Literal["text", "json"] = _logs("text", "Format of log lines: text for people, json for machines.")
    access_log: bool = _logs(True, "Log one line per request.")
    metrics_compat: Literal["none", "vllm"] = _logs("none", "Export the main metrics under vLLM's names too.")

    kv_events: Endpoint = _events(
        None,
        "ZeroMQ endpoint to publish KV events at, in vLLM's format, such as tcp://*:5557. Replicas add their index to "
        "the port.",
    )
    kv_events_replay: Endpoint = _events(None, "ZeroMQ endpoint that sends past KV events again, such as tcp://*:5558.")
    kv_events_topic: str = _events("", "Topic of the KV events.")
    kv_events_buffer: Size = _events(64 * 1024**2, "Memory of each replica for KV events to send again.", ge=64 * 1024)
    kv_events_private: bool = _events(
        False,
        "Publish prefixes of requests with a key or a cache_salt too, with their token ids. Otherwise they have no "
        "KV events.",
    )
    kv_events_tiers: bool = _events(
        False, "Publish which blocks kv_dir has too, with medium DISK. The gateway must tell media apart."
    )
