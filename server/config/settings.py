"""Defines every setting of the server once. Each is a flag, an INFERD_* variable and a key of the YAML file.

Flags win over the environment, the environment over the file, the file over defaults. `Settings.load` reads these
sources and remembers which one each value came from. `Settings(...)` reads none of them, which isolates a test.
This file knows no command line and starts nothing.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import PrivateAttr, SecretStr, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from inferd.engine.api.adapter import MAX_ADAPTERS, MAX_RANK
from inferd.engine.api.errors import ConfigError
from inferd.engine.api.memory.precision import KVPrecision
from inferd.engine.api.modelling import ModelImpl
from inferd.engine.api.wire.kv_events import with_rank
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
    Setting,
    Size,
    describe,
    format_bytes,
    format_duration,
    setting,
)
from inferd.server.config.names import NAME_RULE, is_name
from inferd.server.config.sources import read_yaml, unknown_variables
from inferd.server.schema.latency import MAX_TARGET_S, MIN_TARGET_S

CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"

_MODEL, _SERVER, _ENGINE, _LIMITS, _LOGS = "Model", "Server", "Engine", "Limits", "Logs and metrics"
_LATENCY, _EVENTS = "Latency", "KV events"


class Settings(BaseSettings):
    """The server's settings, checked and frozen. None stands for "auto": the start decides by model and machine."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, enable_decoding=False, extra="forbid", frozen=True
    )

    model: str = setting(
        "tiny",
        "Hub id, directory or GGUF file of the model; tiny (ships with inferd) or smollm2 (fetched once, 98 MB).",
        panel=_MODEL,
    )
    models: Entries = setting(
        (),
        "Model to serve beside others, as model or name=model; repeat for each. In the YAML file, an entry may be a "
        "mapping with settings of its own.",
        panel=_MODEL,
    )
    revision: str | None = setting(None, "Branch, tag or commit of a Hub model.", panel=_MODEL)
    served_model_name: Names = setting((), "Model name that clients send; repeat for aliases.", panel=_MODEL)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "Precision of weights and activations; auto takes the checkpoint's.", panel=_MODEL
    )
    quantization: Literal["auto", "none", "fp8", "int8", "int4"] = setting(
        "auto",
        "Format that linear layers store their weights in. auto keeps the checkpoint's; none dequantizes a GGUF file.",
        panel=_MODEL,
    )
    model_impl: ModelImpl = setting(
        "auto",
        "Code that computes the model: inferd's own (native), or transformers'. auto takes inferd's if it can.",
        panel=_MODEL,
    )
    kv_cache_dtype: KVPrecision = setting(
        "auto", "Format of the KV cache; auto takes the dtype of the activations.", panel=_MODEL
    )
    max_model_len: Annotated[int | None, Auto, Number] = setting(
        None, "Maximum number of tokens of prompt and answer together.", panel=_MODEL, ge=2
    )
    tool_format: Literal[
        "auto",
        "none",
        "deepseek_v3",
        "deepseek_v31",
        "functools",
        "gemma4",
        "glm45",
        "glm47",
        "granite",
        "harmony",
        "hermes",
        "json",
        "kimi_k2",
        "lfm2",
        "llama3_json",
        "mistral",
        "mistral_args",
        "olmo3",
        "phi4",
        "pythonic",
        "qwen3_coder",
        "seed_oss",
    ] = setting("auto", "Format in which the model writes tool calls; auto detects it.", panel=_MODEL)
    reasoning_format: Literal["auto", "none", "gemma4", "granite", "harmony", "mistral", "seed_oss", "think"] = setting(
        "auto", "Format in which the model writes its reasoning; auto detects it.", panel=_MODEL
    )
    trust_special_tokens: bool = setting(
        False,
        "Read special tokens that callers write in messages and tools as special tokens; otherwise they are text.",
        panel=_MODEL,
    )

    host: str = setting("127.0.0.1", "Address to listen on.", panel=_SERVER)
    port: Annotated[int, Number] = setting(
        8000, "Port to listen on; 0 takes a free one.", panel=_SERVER, ge=0, le=65535
    )
    root_path: str = setting("", "Path prefix that a reverse proxy removes, such as /llm.", panel=_SERVER)
    api_key: Secrets = setting((), "API key that clients must send; repeat for more keys.", panel=_SERVER)
    admin_key: Secrets = setting((), "Key for the admin routes, such as /config; repeat for more keys.", panel=_SERVER)
    keys_file: str | None = setting(
        None, "YAML or JSON file of keys, tenants and quotas. Changes apply without a restart.", panel=_SERVER
    )
    admin_host: str = setting("127.0.0.1", "Address that the admin port listens on.", panel=_SERVER)
    admin_port: Annotated[int | None, NoneAllowed, Number] = setting(
        None, "Serve admin routes on this port only, instead of on --port.", panel=_SERVER, ge=0, le=65535
    )
    allow_unauthenticated: bool = setting(
        False, "Serve other machines although no key is set: anybody who reaches the port may call.", panel=_SERVER
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "URL of an OpenTelemetry collector, such as http://127.0.0.1:4318/v1/traces. It gets a span a request.",
        panel=_SERVER,
    )
    allowed_origins: Names = setting(
        (),
        "Origin of web pages that may call from a browser, such as https://app.example, or * for any; repeat for more.",
        panel=_SERVER,
    )
    allowed_hosts: Names = setting(
        (),
        "Host name that requests may use when no key is set, besides this machine's own, or * for any; "
        "repeat for more.",
        panel=_SERVER,
    )
    playground: bool = setting(True, "Serve a page at / to chat with the model and to watch the engine.", panel=_SERVER)
    unknown_fields: Literal["refuse", "warn"] = setting(
        "refuse",
        "Answer to a request with an unknown field. warn serves it with a warning header, refuse answers 400.",
        panel=_SERVER,
    )

    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Device that the model runs on.", panel=_ENGINE)
    deterministic: Annotated[bool | None, Auto] = setting(
        None,
        "Give a request the same tokens whatever other requests run beside it. A CPU always does.",
        panel=_ENGINE,
    )
    attention_libs: bool = setting(
        True,
        "Let FlashAttention or cuDNN compute attention on a GPU, if installed. Never if deterministic.",
        panel=_ENGINE,
    )
    num_threads: Annotated[int | None, Auto, Number] = setting(
        None, "Number of compute threads; auto takes one per available core.", panel=_ENGINE, ge=1, le=1024
    )
    tensor_parallel_size: Annotated[int, Number] = setting(
        1,
        "Number of processes that share the model, each with a part of its weights and KV cache.",
        panel=_ENGINE,
        ge=1,
        le=128,
    )
    replicas: Annotated[int, Number] = setting(
        1,
        "Number of engines, each with the whole model and with its own GPUs or its part of the cores. If one dies, the "
        "others take its requests over at once.",
        panel=_ENGINE,
        ge=1,
        le=64,
    )
    kv_memory: Annotated[Size | None, Auto] = setting(
        None, "Memory for the KV cache, of each replica.", panel=_ENGINE, ge=1024**2
    )
    block_size: Annotated[BlockSize | None, Auto] = setting(None, "Number of tokens in a KV block.", panel=_ENGINE)
    prefix_caching: bool = setting(True, "Reuse the KV cache of prompts that begin alike.", panel=_ENGINE)
    weight_cache: bool = setting(
        True,
        "On a CPU, keep packed weights in the user's cache: later starts map them, and engines share them.",
        panel=_ENGINE,
    )
    max_num_seqs: Annotated[int | None, Auto, Number] = setting(
        None, "Maximum number of sequences in one step.", panel=_ENGINE, ge=1, le=65536
    )
    max_num_batched_tokens: Annotated[int | None, Auto, Number] = setting(
        None, "Maximum number of tokens in one step.", panel=_ENGINE, ge=1
    )
    speculative: str = setting(
        "none",
        "Guess tokens from what a request repeats of itself (ngram), and of recent answers too (suffix), or let a "
        "draft model or draft head make them too: its directory, GGUF file or Hub id, or mtp for the model's own MTP "
        "layer. Steps verify them: they change no token. auto is suffix on a CPU, and none on a GPU.",
        panel=_ENGINE,
    )
    lora: Names = setting(
        (), "LoRA adapter to serve under a name of its own, as name=directory; repeat for more.", panel=_ENGINE
    )
    max_loras: Annotated[int | None, Auto, Number] = setting(
        None,
        "Number of LoRA adapters that there is memory for; auto is 8 if --lora is given, otherwise 0.",
        panel=_ENGINE,
        ge=0,
        le=MAX_ADAPTERS,
    )
    max_lora_rank: Annotated[int | None, Auto, Number] = setting(
        None,
        "Largest rank of a LoRA adapter; auto is 16, or the largest of those given.",
        panel=_ENGINE,
        ge=1,
        le=MAX_RANK,
    )
    idle_unload: Annotated[Duration | None, NoneAllowed] = setting(
        None,
        "Time without a request after which a model's engine is stopped and its memory freed. The next request loads "
        "it again.",
        panel=_ENGINE,
        ge=1,
        le=604_800,
    )
    standby: bool = setting(
        False, "Keep a second engine process ready, which replaces the first if that dies.", panel=_ENGINE
    )

    ttft_target: Annotated[Duration | None, NoneAllowed] = setting(
        None,
        "Target for the time to first token. A request that cannot meet it gets a 429.",
        panel=_LATENCY,
        ge=MIN_TARGET_S,
        le=MAX_TARGET_S,
    )
    tpot_target: Annotated[Duration | None, NoneAllowed] = setting(
        None,
        "Target for the mean time per output token after the first. Prompts are computed in smaller chunks to keep it.",
        panel=_LATENCY,
        ge=MIN_TARGET_S,
        le=MAX_TARGET_S,
    )
    e2e_target: Annotated[Duration | None, NoneAllowed] = setting(
        None,
        "Target for the time to the last token. Metrics count it; the scheduler ignores it.",
        panel=_LATENCY,
        ge=MIN_TARGET_S,
        le=86_400,
    )

    max_connections: Annotated[int, Number] = setting(
        8192, "Maximum number of open connections; one more gets a 503.", panel=_LIMITS, ge=1, le=1_000_000
    )
    max_waiting: Annotated[int, Number] = setting(
        2048, "Maximum number of requests that wait for the engine; one more gets a 503.", panel=_LIMITS, ge=1, le=10**6
    )
    max_wait: Duration = setting(
        600.0,
        "Maximum time that all waiting prompts may take to compute; a prompt beyond it gets a 503.",
        panel=_LIMITS,
        ge=MIN_TARGET_S,
        le=MAX_TARGET_S,
    )
    max_body_bytes: Size = setting(16 * 1024**2, "Maximum size of a request body.", panel=_LIMITS, ge=1024)
    stored_responses: Size = setting(
        256 * 1024**2, "Memory for the answers that /v1/responses stores; 0 stores none.", panel=_LIMITS, ge=0
    )
    stored_responses_ttl_s: Annotated[float, Number] = setting(
        86_400.0, "Maximum time that /v1/responses stores an answer.", panel=_LIMITS, ge=1, le=31_536_000
    )
    shutdown_timeout_s: Annotated[float, Number] = setting(
        30.0, "Time that running requests have to finish after SIGTERM.", panel=_LIMITS, ge=0, le=3600
    )
    shutdown_delay_s: Annotated[float | None, Auto, Number] = setting(
        None,
        "Part of that time in which new requests are still accepted while /ready answers 503. "
        "auto is 5, or 0 on a loopback host.",
        panel=_LIMITS,
        ge=0,
        le=3600,
    )

    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severe level that is logged.", panel=_LOGS
    )
    log_format: Literal["text", "json"] = setting(
        "text", "Format of log lines: text for people, json for machines.", panel=_LOGS
    )
    access_log: bool = setting(True, "Log one line per request.", panel=_LOGS)
    metrics_compat: Literal["none", "vllm"] = setting(
        "none", "Export the main metrics under vLLM's names too.", panel=_LOGS
    )

    kv_events: str | None = setting(
        None,
        "ZeroMQ endpoint to publish KV events at, in vLLM's format, such as tcp://*:5557. Replicas add their index to "
        "the port.",
        panel=_EVENTS,
    )
    kv_events_replay: str | None = setting(
        None, "ZeroMQ endpoint that sends past KV events again, such as tcp://*:5558.", panel=_EVENTS
    )
    kv_events_topic: str = setting("", "Topic of the KV events.", panel=_EVENTS)
    kv_events_buffer: Size = setting(
        64 * 1024**2, "Memory of each replica for KV events to send again.", panel=_EVENTS, ge=64 * 1024
    )
    kv_events_private: bool = setting(
        False,
        "Publish prefixes of requests with a key or a cache_salt too, with their token ids. Otherwise they have no "
        "KV events.",
        panel=_EVENTS,
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _warnings: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Reads the constructor's values only. `load` merges the sources, to know which one each value is from."""
        return (init_settings,)

    @classmethod
    def load(cls, flags: Mapping[str, object], config: Path | None = None) -> Self:
        """Merge flags (setting name -> value), environment and file. Raises `ConfigError` with every problem."""
        config = config or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
        names = tuple(cls.model_fields)
        sources: list[tuple[Mapping[str, object], Callable[[Setting], str]]] = [
            (read_yaml(config, names) if config else {}, lambda _: f"file {config}"),
            (EnvSettingsSource(cls)(), lambda about: f"env {about.env}"),
            (flags, lambda about: f"flag {about.flag}"),
        ]
        values: dict[str, Any] = {}
        for source, _ in sources:
            values = {**_without_models(values, source), **source}
        origins = {name: origin(SETTINGS[name]) for source, origin in sources for name in source if name in values}
        try:
            settings = cls(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(_problem(detail, origins) for detail in error.errors())) from error
        settings._origins = origins
        settings._warnings = tuple(unknown_variables(os.environ, (*names, "config")))
        return settings

    def of_model(self, own: Mapping[str, Any], place: str) -> Self:
        """The settings of one of several models, which has some of its `own`. Flags and variables win over those.

        `place`: their place, for messages. Raises `ConfigError`.
        """
        own = {name: value for name, value in own.items() if not self.origin(name).startswith(("flag ", "env "))}
        try:
            checked = type(self)(**own)
        except ValidationError as error:
            origins = dict.fromkeys(own, place)
            raise ConfigError("; ".join(_problem(detail, origins) for detail in error.errors())) from error
        copy = self.model_copy(update={"models": (), **{name: getattr(checked, name) for name in own}})
        copy._origins = {**self._origins, **dict.fromkeys(own, place)}
        return copy

    def origin(self, name: str) -> str:
        """Source of a value: "flag --port", "env INFERD_PORT", "file inferd.yaml", "code" or "default"."""
        return self._origins.get(name, "code" if name in self.model_fields_set else "default")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Oddities of the sources that are no errors. The start logs them."""
        return self._warnings

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that clients may ask for. Answers carry the first. A local path shows only its last part, and a GGUF
        file its name without the ending."""
        if self.served_model_name:
            return self.served_model_name
        if self.model.endswith(".gguf"):
            return (Path(self.model).stem,)
        is_path = self.model.startswith(("/", "./", "../", "~"))
        return (Path(self.model).expanduser().resolve().name if is_path else self.model,)

    @property
    def loras(self) -> dict[str, Path]:
        """Name -> directory of each adapter that is served from the start."""
        entries = (entry.partition("=") for entry in self.lora)
        return {name: Path(path).expanduser() for name, _, path in entries}

    @property
    def trusts_this_machine(self) -> bool:
        """Whether only this machine can reach the server, and may call without a key."""
        return is_loopback(self.host) and not (self.api_key or self.keys_file)

    def explain(self) -> list[tuple[str, str, str]]:
        """(name, value as text, origin) of every setting; keys are counted, never shown."""
        return [(name, _shown(getattr(self, name), info), self.origin(name)) for name, info in SETTINGS.items()]

    @field_validator("host", "admin_host", "model")
    @classmethod
    def _not_empty(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must not be empty")
        return value

    @field_validator("port", mode="before")
    @classmethod
    def _no_service_link(cls, value: object) -> object:
        if isinstance(value, str) and value.startswith("tcp://"):
            raise ValueError(
                "must be a number; Kubernetes sets this variable for a service of the same name: "
                "rename the service, or set enableServiceLinks: false"
            )
        return value

    @field_validator("root_path")
    @classmethod
    def _path_shape(cls, value: str) -> str:
        if value and (not value.startswith("/") or value.endswith("/")):
            raise ValueError("must begin with / and must not end with /, such as /llm")
        return value

    @field_validator("served_model_name")
    @classmethod
    def _names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("must be different names")
        return value

    @field_validator("lora")
    @classmethod
    def _lora_shape(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [entry.partition("=")[0] for entry in value]
        if not all(name and path for name, _, path in (entry.partition("=") for entry in value)):
            raise ValueError("must be a name and a directory, such as sql=adapters/sql")
        if not all(map(is_name, names)):
            raise ValueError(f"must have {NAME_RULE}")
        if len(set(names)) < len(names):
            raise ValueError("must be adapters of different names")
        return value

    @field_validator("kv_events", "kv_events_replay")
    @classmethod
    def _endpoint_shape(cls, value: str | None) -> str | None:
        if value is not None and not _ENDPOINT.fullmatch(value):
            raise ValueError("must be an endpoint of ZeroMQ, such as tcp://*:5557 or ipc:///run/inferd/kv")
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _origins_shape(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        value = tuple(origin.lower() for origin in value)
        for origin in value:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    "must be origins as browsers send them: scheme, host and port alone, such as https://app.example "
                    "or http://localhost:3000; or *"
                )
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _host_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        value = tuple(name.lower() for name in value)
        if not all(name == "*" or _HOST_NAME.fullmatch(name) for name in value):
            raise ValueError("must be host names without scheme and port, such as llm.example; or *")
        return value

    @field_validator("api_key", "admin_key")
    @classmethod
    def _keys(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in value:
            text = key.get_secret_value()
            if not text:
                raise ValueError("a key is empty; leave the setting out if clients need no key")
            if not text.isascii() or not text.isprintable() or " " in text:
                raise ValueError("a key must consist of printable ASCII characters without spaces")
        return value

    @model_validator(mode="after")
    def _names_are_short_and_visible(self) -> Self:
        """Refuses other names, also if they come from a directory, whose name may hold any bytes."""
        for name in self.served_names:
            if not is_name(name):
                raise ValueError(
                    f"served_model_name must be {NAME_RULE}, but is {_clipped(ascii(name))}: give another one"
                )
        return self

    @model_validator(mode="after")
    def _admins_are_no_callers(self) -> Self:
        if set(self.api_key) & set(self.admin_key):
            raise ValueError(
                "the same key is given as --api-key and as --admin-key: clients must not have an admin key"
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_names(self) -> Self:
        for name in self.loras.keys() & set(self.served_names):
            raise ValueError(f"--lora names an adapter {name!r}, but this is a name of the model: give it another one")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.admin_port and self.admin_port == self.port:
            raise ValueError(
                f"port and admin_port are both {self.port}: they must differ, because admin routes need their own port"
            )
        return self

    @property
    def kv_endpoints(self) -> list[str]:
        """The endpoints of KV events and of their replays, of all replicas."""
        given = [endpoint for endpoint in (self.kv_events, self.kv_events_replay) if endpoint is not None]
        return [with_rank(endpoint, rank) for endpoint in given for rank in range(self.replicas)]

    @model_validator(mode="after")
    def _kv_events_have_blocks(self) -> Self:
        """Refuses settings with which no event could ever be published."""
        if self.kv_events is None:
            if self.kv_events_replay is not None:
                raise ValueError("kv_events_replay is set, but no KV events are published: set --kv-events too")
            return self
        if self.kv_events == self.kv_events_replay:
            raise ValueError(f"kv_events and kv_events_replay are both {self.kv_events}: give two endpoints")
        for endpoint in self.kv_endpoints:
            if self.kv_endpoints.count(endpoint) > 1:
                raise ValueError(
                    f"kv_events and kv_events_replay share {endpoint}: each of {self.replicas} replicas adds its index "
                    "to both ports, so give ports that are further apart"
                )
        if not self.prefix_caching:
            raise ValueError("kv_events needs the prefix cache: leave out --no-prefix-caching, or --kv-events")
        if (self.api_key or self.keys_file) and not self.kv_events_private:
            raise ValueError(
                "every request has a key, and prefixes of requests with a key have no KV events: pass "
                "--kv-events-private to publish their token ids to all subscribers, or leave out --kv-events"
            )
        return self

    @model_validator(mode="after")
    def _others_need_a_key(self) -> Self:
        if not (self.api_key or self.keys_file or self.allow_unauthenticated or is_loopback(self.host)):
            raise ValueError(
                f"other machines can reach host {self.host}, and no key is set: "
                "set --api-key (INFERD_API_KEY) or --keys-file, or listen on 127.0.0.1, or pass --allow-unauthenticated"
            )
        return self


def _without_models(values: dict[str, Any], source: Mapping[str, object]) -> dict[str, Any]:
    """`values` without the models of weaker sources, if `source` names any. Raises `ConfigError` if it names them
    twice."""
    named = {"model", "models"} & source.keys()
    if len(named) > 1:
        raise ConfigError("both model and models are given: name one model by model, or all of them by models")
    return {name: value for name, value in values.items() if not named or name not in ("model", "models")}


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,]+")
_MOST_SHOWN = 200
"""Characters of a value in a message."""
_ENDPOINT = re.compile(r"tcp://\S+:\d{1,5}|ipc://\S+")
_HOST_NAME = re.compile(r"[^/?#@\s,:]+|[0-9a-f:.]*:[0-9a-f:.]*:[0-9a-f:.]*")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. A name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


SETTINGS: Mapping[str, Setting] = {name: describe(name, info) for name, info in Settings.model_fields.items()}
"""Description of every setting, in the order of the help."""

_SECRET = ("api_key", "admin_key")
"""Settings whose values are never shown."""


def _problem(detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    """One refused value as a sentence that names setting, rule, value and origin."""
    if not detail["loc"]:
        return str(detail["ctx"]["error"])
    name = str(detail["loc"][0])
    about, origin = SETTINGS[name], origins.get(name, "code")
    if name in _SECRET:
        why = detail["ctx"]["error"] if detail["type"] == "value_error" else f"must be {about.rule}"
        return f"{name}: {why} ({origin})"
    given = _clipped(repr(detail["input"]))
    if detail["type"] == "value_error":
        return f"{name}: {detail['ctx']['error']}, but got {given} ({origin})"
    return f"{name} must be {about.rule}, but got {given} ({origin})"


def _clipped(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _shown(value: object, about: Setting) -> str:
    if about.name in _SECRET:
        return f"{len(value)} set" if isinstance(value, tuple) and value else "none"
    if value is None:
        return about.default or "none"
    if about.metavar == "SIZE" and isinstance(value, int):
        return format_bytes(value)
    if about.metavar == "DURATION" and isinstance(value, float):
        return format_duration(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
