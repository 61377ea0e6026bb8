"""Asks a process that has torch whether transformers' own modelling code can serve a model that is not native.

The server never imports torch. So it starts `engine/models/describe`, which sees config.json and the shapes of the
tensors, and no weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec

from inferd.engine.api.errors import ModelError
from inferd.engine.arch.modelled import Modelled

ModelImpl = Literal["auto", "native", "transformers"]
"""The code that computes a model: our own decoder, that of transformers, or the first of these that can."""

_PROGRAM = ("-P", "-m", "inferd.engine.models.describe")
_TIMEOUT_S = 120.0
"""It takes 5 s, most of them to import torch (2 cores, Zen 4, 2026-11-26)."""
_LAST_CHARACTERS = 400


class _Answer(msgspec.Struct, frozen=True):
    modelled: Modelled | None = None
    refusal: str = ""


def _is_listed(config: Mapping[str, Any]) -> bool:
    """Whether transformers' list of models pairs the config's `model_type` with its architecture. The list is read as
    text, because importing it imports torch."""
    match config.get("model_type"), config.get("architectures"):
        case str(kind), [str(architecture)]:
            found = find_spec("transformers")
            assert found is not None and found.origin is not None, "transformers is a dependency"
            models = (Path(found.origin).parent / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
            return f'("{kind}", "{architecture}")' in models
    return False


def ask_modelled(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None) -> Modelled | str:
    """The model, or why transformers' code cannot serve it. `shapes`: those of the checkpoint's tensors, if known.

    Raises `ModelError` if there is no answer.
    """
    if not _is_listed(config):
        return f"transformers {version('transformers')} lists no such causal language model for the config's model_type"
    # Names of a config may hold surrogates, which only this encoder writes.
    question = json.dumps({"config": config, "shapes": shapes}).encode()
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            [sys.executable, *_PROGRAM],
            input=question,
            capture_output=True,
            timeout=_TIMEOUT_S,
            env=offline,
            check=True,
        )
        answer = msgspec.json.decode(done.stdout, type=_Answer)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"transformers took more than {_TIMEOUT_S:g} s to describe the model: give another") from error
    except (subprocess.CalledProcessError, msgspec.DecodeError) as error:
        written = (getattr(error, "stderr", b"") or b"").decode(errors="replace")[-_LAST_CHARACTERS:]
        raise ModelError(f"the process that describes models ended without an answer: {written or error}") from error
    return answer.modelled or answer.refusal
