"""The models of one server: which they are, and the settings of each.

A setting of the whole server applies to every model. An entry of the YAML file may have its own value of some settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferd.engine.api.errors import ConfigError
from inferd.server.config.settings import SETTINGS, Settings
from inferd.server.config.sources import suggest

_OWN_PANELS = ("Model", "Engine", "Latency", "KV events")
OWN = {name for name, about in SETTINGS.items() if about.panel in _OWN_PANELS and name != "models"}
"""Settings that each model can have its own value of."""


def settings_of_models(settings: Settings) -> tuple[Settings, ...]:
    """The settings of each model, those of the whole server included. Raises `ConfigError`."""
    if not settings.models:
        return (settings,)
    if settings.served_model_name:
        raise ConfigError(
            f"served_model_name names one model, but {len(settings.models)} are served: give each a name by name=model"
        )
    each = tuple(settings.of_model(_own(entry), f"models, entry {i}") for i, entry in enumerate(settings.models, 1))
    _check_names(each)
    endpoints = [endpoint for own in each for endpoint in own.kv_endpoints]
    for endpoint in endpoints:
        if endpoints.count(endpoint) > 1:
            raise ConfigError(f"models: two of them have KV events at {endpoint}; give each model its own endpoints")
    return each


def split_name(entry: str) -> tuple[str | None, str]:
    """The name in `name=model`, and the model. A path may hold "=" too, but a name holds no "/"."""
    name, is_named, model = entry.partition("=")
    return (name, model) if is_named and "/" not in name else (None, entry)


def _own(entry: str | Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an entry. Raises `ConfigError`."""
    if isinstance(entry, str):
        name, model = split_name(entry)
        return {"model": model} if name is None else {"model": model, "served_model_name": (name,)}
    own = {str(key).replace("-", "_"): value for key, value in entry.items()}
    for name in own.keys() - OWN:
        if name in SETTINGS:
            raise ConfigError(f"models: {name} is a setting of the whole server: write it beside models, not in it")
        raise ConfigError(f"models: there is no setting {name!r}{suggest(name, OWN)}")
    if "model" not in own:
        raise ConfigError(f"models: an entry must name its model, such as `model: tiny`, but got {entry!r}")
    return own


def _check_names(each: tuple[Settings, ...]) -> None:
    """Raises `ConfigError` if two models, or adapters, have one name."""
    seen: set[str] = set()
    for settings in each:
        for name in (*settings.served_names, *settings.loras):
            if name in seen:
                raise ConfigError(
                    f"models: two models or adapters have the name {name!r}; name them differently by name=model"
                )
            seen.add(name)
