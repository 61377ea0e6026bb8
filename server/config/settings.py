"""The server's settings as one object: read from their sources, and checked against each other.

Flags win over the environment, the environment over the file, the file over defaults. `Settings.load` reads these
sources and remembers which one each value came from. `Settings(...)` reads none of them, which isolates a test.
This file knows no command line and starts nothing.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import PrivateAttr, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource

from inferd.engine.api.errors import ConfigError
from inferd.engine.api.wire.kv_events import with_rank
from inferd.server.config.declared import Declared
from inferd.server.config.fields import ENV_PREFIX, Setting, describe, format_bytes, format_duration
from inferd.server.config.names import NAME_RULE, is_name
from inferd.server.config.sources import read_yaml, unknown_variables

CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"

_MOST_SHOWN = 200
"""Characters of a value in a message."""
_LEAST_KV_HOST_BYTES = 64 * 2**20
"""Least host memory for KV: some pieces of any model."""
_SECRET = ("api_key", "admin_key")
"""Settings whose values are never shown."""


class Settings(Declared):
    """The server's settings, checked and frozen."""

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
        settings = cls._checked(values, origins)
        settings._origins = origins
        settings._warnings = tuple(unknown_variables(os.environ, (*names, "config")))
        return settings

    @classmethod
    def _checked(cls, values: Mapping[str, Any], origins: Mapping[str, str]) -> Self:
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(_problem(detail, origins) for detail in error.errors())) from error

    def of_model(self, own: Mapping[str, Any], place: str) -> Self:
        """The settings of one of several models, which has some of its `own`. Flags and variables win over those.

        `place`: their place, for messages. Raises `ConfigError`.
        """
        own = {name: value for name, value in own.items() if not self.origin(name).startswith(("flag ", "env "))}
        origins = dict.fromkeys(own, place)
        checked = self._checked(own, origins)
        copy = self.model_copy(update={"models": (), **{name: getattr(checked, name) for name in own}})
        copy._origins = {**self._origins, **origins}
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
        # `local_path` refuses the home of a user who has none.
        return (Path(os.path.expanduser(self.model)).resolve().name if is_path else self.model,)

    @property
    def loras(self) -> dict[str, Path]:
        """Name -> directory of each adapter that is served from the start."""
        entries = (entry.partition("=") for entry in self.lora)
        return {name: Path(path).expanduser() for name, _, path in entries}

    @property
    def trusts_this_machine(self) -> bool:
        """Whether only this machine can reach the server, and may call without a key."""
        return is_loopback(self.host) and not self._needs_key

    @property
    def _needs_key(self) -> bool:
        return bool(self.api_key or self.keys_file)

    @property
    def kv_endpoints(self) -> list[str]:
        """The endpoints of KV events and of their replays, of all replicas."""
        given = [endpoint for endpoint in (self.kv_events, self.kv_events_replay) if endpoint is not None]
        return [with_rank(endpoint, rank) for endpoint in given for rank in range(self.replicas)]

    def explain(self) -> list[tuple[str, str, str]]:
        """(name, value as text, origin) of every setting; keys are counted, never shown."""
        return [(name, _shown(getattr(self, name), info), self.origin(name)) for name, info in SETTINGS.items()]

    @model_validator(mode="after")
    def _agree(self) -> Self:
        contradiction = next(self._contradictions(), None)
        if contradiction is not None:
            raise ValueError(contradiction)
        return self

    def _contradictions(self) -> Iterator[str]:
        """Yields why some settings contradict others."""
        for name in self.served_names:  # also those of a directory, whose name may hold any bytes
            if not is_name(name):
                yield f"served_model_name must be {NAME_RULE}, but is {_clipped(ascii(name))}: give another one"
        if set(self.api_key) & set(self.admin_key):
            yield "the same key is given as --api-key and as --admin-key: clients must not have an admin key"
        for name in self.loras.keys() & set(self.served_names):
            yield f"--lora names an adapter {name!r}, but this is a name of the model: give it another one"
        if self.admin_port and self.admin_port == self.port:
            yield (
                f"port and admin_port are both {self.port}: they must differ, because admin routes need their own port"
            )
        yield from self._events_never_published()
        if 0 < self.kv_host < _LEAST_KV_HOST_BYTES:
            yield f"kv_host must be 0 (none) or at least 64MiB, but is {format_bytes(self.kv_host)}: give a larger one"
        if self.kv_dir == "":
            yield "kv_dir must be the path of a directory, but is empty: give one, or leave it out"
        for name in ("kv_dir", "kv_host"):
            flag = "--" + name.replace("_", "-")
            if getattr(self, name) and not self.prefix_caching:
                yield f"{name} needs the prefix cache: leave out --no-prefix-caching, or {flag}"
            if getattr(self, name) and self.tensor_parallel_size > 1:
                yield f"{name} keeps the KV cache of one process: leave out --tensor-parallel-size, or {flag}"
        if not (self._needs_key or self.allow_unauthenticated or is_loopback(self.host)):
            yield (
                f"other machines can reach host {self.host}, and no key is set: "
                "set --api-key (INFERD_API_KEY) or --keys-file, or listen on 127.0.0.1, or pass --allow-unauthenticated"
            )

    def _events_never_published(self) -> Iterator[str]:
        """Yields why no KV event could ever be published."""
        if self.kv_events is None:
            if self.kv_events_replay is not None:
                yield "kv_events_replay is set, but no KV events are published: set --kv-events too"
            if self.kv_events_tiers:
                yield "kv_events_tiers is set, but no KV events are published: set --kv-events too"
            return
        if self.kv_events_tiers and self.kv_dir is None:
            yield "kv_events_tiers is set, but there is no tier below: set --kv-dir too"
        if self.kv_events == self.kv_events_replay:
            yield f"kv_events and kv_events_replay are both {self.kv_events}: give two endpoints"
        for endpoint in self.kv_endpoints:
            if self.kv_endpoints.count(endpoint) > 1:
                yield (
                    f"kv_events and kv_events_replay share {endpoint}: each of {self.replicas} replicas adds its index "
                    "to both ports, so give ports that are further apart"
                )
        if not self.prefix_caching:
            yield "kv_events needs the prefix cache: leave out --no-prefix-caching, or --kv-events"
        if self._needs_key and not self.kv_events_private:
            yield (
                "every request has a key, and prefixes of requests with a key have no KV events: pass "
                "--kv-events-private to publish their token ids to all subscribers, or leave out --kv-events"
            )


def _without_models(values: dict[str, Any], source: Mapping[str, object]) -> dict[str, Any]:
    """`values` without the models of weaker sources, if `source` names any. Raises `ConfigError` if it names them
    twice."""
    named = {"model", "models"} & source.keys()
    if len(named) > 1:
        raise ConfigError("both model and models are given: name one model by model, or all of them by models")
    return {name: value for name, value in values.items() if not named or name not in ("model", "models")}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. A name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


SETTINGS: Mapping[str, Setting] = {name: describe(name, info) for name, info in Settings.model_fields.items()}
"""Description of every setting, in the order of the help."""


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
