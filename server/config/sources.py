"""Reads files that an operator names, the YAML file of settings among them, and finds INFERD_* variables that name no
setting.

For an unknown name it suggests the nearest known one. It knows no particular setting and checks no value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path

import yaml

from inferd.engine.api.errors import ConfigError
from inferd.engine.api.files import read_regular
from inferd.server.config.fields import ENV_PREFIX

_MAX_BYTES = 2**20


def read_yaml(path: Path, names: Collection[str]) -> dict[str, object]:
    """The file's values by setting name. Keys may be written with hyphens, as flags are.

    Raises `ConfigError` if the file cannot be read, is not a mapping, repeats a key, or has a key that is no setting.
    """
    try:
        text = read_regular(path, _MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the settings file {path}: {reason}") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}" if mark is not None else "its start"
        raise ConfigError(f"{path} is not valid YAML at {place}: {getattr(error, 'problem', error)}") from error
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path} must be a mapping of settings, such as `port: 8000`")
    _check_keys(path, node, names)
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _check_keys(path: Path, node: yaml.MappingNode, names: Collection[str]) -> None:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        name, line = str(key_node.value).replace("-", "_"), key_node.start_mark.line + 1
        if name not in names:
            raise ConfigError(f"{path} line {line}: there is no setting {key_node.value!r}{suggest(name, names)}")
        if name in seen:
            raise ConfigError(f"{path} line {line}: {name} is already set on line {seen[name]}; keep one of them")
        seen[name] = line


def suggest(name: str, names: Collection[str], prefix: str = "") -> str:
    """ "; did you mean x?" with `prefix` before x, or an empty text if no name is similar."""
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def unknown_variables(environ: Mapping[str, str], names: Collection[str]) -> list[str]:
    """One warning for each INFERD_* variable that is not a setting.

    These are no errors, because Kubernetes sets such variables by itself if a service is named inferd.
    """
    known = [name.upper() for name in names]
    unknown = {
        variable: own
        for variable in sorted(environ)
        if (own := variable.upper().removeprefix(ENV_PREFIX)) != variable.upper() and own not in known
    }
    return [
        f"{variable} is set, but inferd has no such setting{suggest(own, known, ENV_PREFIX)}"
        for variable, own in unknown.items()
    ]
