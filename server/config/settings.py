"""Every setting of the server, once: flag = INFERD_* variable = key of the YAML file, and where each value came from.

Precedence is flag, then environment, then file, then default. `Settings(...)` itself reads nothing, so a test that
builds one is alone with its values; `Settings.load` reads the three sources. Knows no command line and starts nothing.
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

from inferd.engine.api.errors import ConfigError
from inferd.server.config.fields import (
    ENV_PREFIX,
    Auto,
    BlockSize,
    Duration,
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
from inferd.server.config.sources import read_yaml, unknown_variables
from inferd.server.schema.targets import MAX_TARGET_S, MIN_TARGET_S

CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"

_MODEL, _SERVER, _ENGINE, _LIMITS, _LOGS = "Model", "Server", "Engine", "Limits", "Logs and metrics"
_LATENCY = "Latency"


class Settings(BaseSettings):
    """The server's settings, checked and frozen. None stands for "auto": decided at start, from model and machine."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, enable_decoding=False, extra="forbid", frozen=True
    )

    model: str = setting("tiny", "Hub id, local directory, or tiny: the model that comes with inferd.", panel=_MODEL)
    revision: str | None = setting(None, "Branch, tag or commit of a hub model.", panel=_MODEL)
    served_model_name: Names = setting((), "Name clients ask for; repeat for aliases.", panel=_MODEL)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "Precision; auto is the checkpoint's.", panel=_MODEL
    )
    quantization: Literal["none", "fp8", "int8", "int4"] = setting(
        "none", "What the weights of linear layers are stored in.", panel=_MODEL
    )
    kv_cache_dtype: Literal["auto", "fp8"] = setting(
        "auto", "What the KV cache is stored in; auto is the dtype.", panel=_MODEL
    )
    max_model_len: Annotated[int | None, Auto, Number] = setting(
        None, "Most tokens of prompt and answer together.", panel=_MODEL, ge=2
    )
    tool_format: Literal[
        "auto",
        "none",
        "deepseek_v3",
        "deepseek_v31",
        "gemma4",
        "granite",
        "harmony",
        "hermes",
        "json",
        "llama3_json",
        "mistral",
        "mistral_args",
        "phi4",
        "qwen3_coder",
    ] = setting("auto", "How the model writes tool calls; auto reads it off the checkpoint.", panel=_MODEL)
    reasoning_format: Literal["auto", "none", "gemma4", "harmony", "mistral", "think"] = setting(
        "auto", "How the model writes reasoning; auto reads it off the checkpoint.", panel=_MODEL
    )

    host: str = setting("127.0.0.1", "Address to listen on.", panel=_SERVER)
    port: Annotated[int, Number] = setting(
        8000, "Port to listen on; 0 takes a free one.", panel=_SERVER, ge=0, le=65535
    )
    root_path: str = setting("", "Path prefix that a proxy in front strips.", panel=_SERVER)
    api_key: Secrets = setting((), "Key that clients must send; repeat for more.", panel=_SERVER)
    admin_key: Secrets = setting((), "Key for the routes that manage the server; repeat for more.", panel=_SERVER)
    keys_file: str | None = setting(
        None, "YAML or JSON file of keys, tenants and quotas, read again when it changes.", panel=_SERVER
    )
    admin_host: str = setting("127.0.0.1", "Address of the admin port.", panel=_SERVER)
    admin_port: Annotated[int | None, NoneAllowed, Number] = setting(
        None, "Serve admin routes on this port alone, not on --port.", panel=_SERVER, ge=0, le=65535
    )
    allow_unauthenticated: bool = setting(False, "Serve other machines without any key.", panel=_SERVER)
    allowed_origins: Names = setting(
        (), "Origin of web pages that may call, such as https://app.example, or *; repeat for more.", panel=_SERVER
    )
    allowed_hosts: Names = setting(
        (),
        "Host name that a server without keys answers to, besides this machine's, or *; repeat for more.",
        panel=_SERVER,
    )
    unknown_fields: Literal["refuse", "warn"] = setting(
        "refuse", "What an unknown request field gets: a 400, or a warning header.", panel=_SERVER
    )

    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where the model runs.", panel=_ENGINE)
    deterministic: Annotated[bool | None, Auto] = setting(
        None, "The same tokens whatever else is served. On a CPU always.", panel=_ENGINE
    )
    num_threads: Annotated[int | None, Auto, Number] = setting(
        None, "Compute threads; auto is the cores there are.", panel=_ENGINE, ge=1, le=1024
    )
    kv_memory: Annotated[Size | None, Auto] = setting(None, "Memory for the KV cache.", panel=_ENGINE, ge=1024**2)
    block_size: Annotated[BlockSize | None, Auto] = setting(None, "Tokens in a KV block.", panel=_ENGINE)
    prefix_caching: bool = setting(True, "Reuse the KV of prompts that begin alike.", panel=_ENGINE)
    max_num_seqs: Annotated[int | None, Auto, Number] = setting(
        None, "Most requests in one step.", panel=_ENGINE, ge=1, le=65536
    )
    max_num_batched_tokens: Annotated[int | None, Auto, Number] = setting(
        None, "Most tokens in one step.", panel=_ENGINE, ge=1
    )
    standby: bool = setting(
        False, "Keep a second engine process ready to take the place of one that dies.", panel=_ENGINE
    )

    ttft_target: Annotated[Duration | None, NoneAllowed] = setting(
        None,
        "From arrival to the first token; who cannot make it gets a 429.",
        panel=_LATENCY,
        ge=MIN_TARGET_S,
        le=MAX_TARGET_S,
    )
    tpot_target: Annotated[Duration | None, NoneAllowed] = setting(
        None,
        "A token after the first, in the mean; prompts are cut to keep it.",
        panel=_LATENCY,
        ge=MIN_TARGET_S,
        le=MAX_TARGET_S,
    )
    e2e_target: Annotated[Duration | None, NoneAllowed] = setting(
        None, "From arrival to the last token; counted, not scheduled by.", panel=_LATENCY, ge=MIN_TARGET_S, le=86_400
    )

    max_connections: Annotated[int, Number] = setting(
        8192, "Most connections at a time; one more gets a 503.", panel=_LIMITS, ge=1, le=1_000_000
    )
    max_waiting: Annotated[int, Number] = setting(
        2048, "Most requests that wait for the engine; one more gets a 503.", panel=_LIMITS, ge=1, le=1_000_000
    )
    max_wait: Duration = setting(
        600.0,
        "Most prompts that wait, by how long they take to compute.",
        panel=_LIMITS,
        ge=MIN_TARGET_S,
        le=MAX_TARGET_S,
    )
    max_body_bytes: Size = setting(16 * 1024**2, "Largest request body.", panel=_LIMITS, ge=1024)
    stored_responses: Size = setting(
        256 * 1024**2, "Memory for the answers that /v1/responses keeps; 0 keeps none.", panel=_LIMITS, ge=0
    )
    stored_responses_ttl_s: Annotated[float, Number] = setting(
        86_400.0, "How long such an answer is kept at most.", panel=_LIMITS, ge=1, le=31_536_000
    )
    shutdown_timeout_s: Annotated[float, Number] = setting(
        30.0, "How long running requests may finish on SIGTERM.", panel=_LIMITS, ge=0, le=3600
    )
    shutdown_delay_s: Annotated[float | None, Auto, Number] = setting(
        None,
        "How long of that new ones are taken, while /ready says 503; auto: 5, and 0 on a loopback host.",
        panel=_LIMITS,
        ge=0,
        le=3600,
    )

    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least severe line shown.", panel=_LOGS)
    log_format: Literal["text", "json"] = setting("text", "Lines for people or for machines.", panel=_LOGS)
    access_log: bool = setting(True, "One line per request.", panel=_LOGS)
    metrics_compat: Literal["none", "vllm"] = setting("none", "Also export the metric names of vLLM.", panel=_LOGS)

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
        """Only what the constructor is given: `load` merges the sources, to know which one each value is from."""
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
        values: dict[str, Any] = {name: value for source, _ in sources for name, value in source.items()}
        origins = {name: origin(SETTINGS[name]) for source, origin in sources for name in source}
        try:
            settings = cls(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(_problem(detail, origins) for detail in error.errors())) from error
        settings._origins = origins
        settings._warnings = tuple(unknown_variables(os.environ, (*names, "config")))
        return settings

    def origin(self, name: str) -> str:
        """Where a value came from: "flag --port", "env INFERD_PORT", "file inferd.yaml", "code" or "default"."""
        return self._origins.get(name, "code" if name in self.model_fields_set else "default")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was odd about the sources without being wrong; for the log at start."""
        return self._warnings

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names clients may ask for; answers carry the first. A local path shows only its last part."""
        if self.served_model_name:
            return self.served_model_name
        is_path = self.model.startswith(("/", "./", "../", "~"))
        return (Path(self.model).expanduser().resolve().name if is_path else self.model,)

    @property
    def trusts_this_machine(self) -> bool:
        """Whether anybody on this machine may call without a key, and nobody else can."""
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
            raise ValueError("must begin with / and not end with it, such as /llm")
        return value

    @field_validator("served_model_name")
    @classmethod
    def _names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value) or len(set(value)) < len(value):
            raise ValueError("must be names that differ, none of them empty")
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
                raise ValueError("a key is empty; leave the setting out where none is to be asked for")
            if not text.isascii() or not text.isprintable() or " " in text:
                raise ValueError("a key has other characters than printable ASCII without spaces")
        return value

    @model_validator(mode="after")
    def _names_are_text(self) -> Self:
        """Every answer carries one. A path may hold any bytes."""
        if any(name.encode("utf-8", "replace").decode() != name for name in self.served_names):
            raise ValueError(f"served_model_name must be UTF-8, but is {self.served_names!a}")
        return self

    @model_validator(mode="after")
    def _admins_are_no_callers(self) -> Self:
        if set(self.api_key) & set(self.admin_key):
            raise ValueError("a key is both an --api-key and an --admin-key: clients must not share the admin's")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.admin_port and self.admin_port == self.port:
            raise ValueError(
                f"port and admin_port are both {self.port}: they must differ, because they tell who is served what"
            )
        return self

    @model_validator(mode="after")
    def _others_need_a_key(self) -> Self:
        if not (self.api_key or self.keys_file or self.allow_unauthenticated or is_loopback(self.host)):
            raise ValueError(
                f"host {self.host} is open to other machines and there is no key: "
                "set --api-key or --keys-file, or say --allow-unauthenticated, or listen on 127.0.0.1"
            )
        return self


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,]+")
_HOST_NAME = re.compile(r"[^/?#@\s,:]+|[0-9a-f:.]*:[0-9a-f:.]*:[0-9a-f:.]*")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. A name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


SETTINGS: Mapping[str, Setting] = {name: describe(name, info) for name, info in Settings.model_fields.items()}
"""Every setting as a person meets it, in the order of the help."""

_SECRET = ("api_key", "admin_key")
"""Never shown."""


def _problem(detail: ErrorDetails, origins: Mapping[str, str]) -> str:
    """One refused value as a sentence: setting, rule, value, origin."""
    if not detail["loc"]:
        return str(detail["ctx"]["error"])
    name = str(detail["loc"][0])
    about, origin = SETTINGS[name], origins.get(name, "code")
    if name in _SECRET:
        why = detail["ctx"]["error"] if detail["type"] == "value_error" else f"must be {about.rule}"
        return f"{name}: {why} ({origin})"
    given = repr(detail["input"])
    if detail["type"] == "value_error":
        return f"{name}: {detail['ctx']['error']}, but got {given} ({origin})"
    return f"{name} must be {about.rule}, but got {given} ({origin})"


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
    return ", ".join(value) if isinstance(value, tuple) else str(value)
