"""How much of a model's KV the directory of `--kv-dir` holds, for `inferd plan`. It makes no directory."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from inferd.engine.api.config import EngineConfig, precision_of
from inferd.engine.api.kv_store.listing import list_all
from inferd.engine.api.kv_store.opening import existing, is_new, told
from inferd.engine.api.memory.planner import format_bytes, token_bytes
from inferd.engine.api.memory.states import state_bytes
from inferd.engine.api.model import ModelFacts


class DirectoryPlan(TypedDict):
    """The directory of KV segments, as if this model alone used it."""

    path: str
    quota_bytes: int
    tokens: int
    """Number of tokens that the quota holds. Of a model with windows, some more."""
    token_bytes: int
    state_bytes: int
    """Bytes of a recurrent state; 0 for a model without."""
    state_interval: int
    """Number of tokens from one kept state to the next; 0 for such a model."""
    used_bytes: int
    """Bytes of the files that are in it now."""
    free_bytes: int | None
    """Free bytes of its file system. None if that does not say."""


def plan_directory(config: EngineConfig, facts: ModelFacts) -> DirectoryPlan | None:
    """Plan the directory of these settings; None without one. Raises `StartError` for what no server would take."""
    if not config.kv_dir:
        return None
    precision = precision_of(config)
    own = token_bytes(facts.arch, precision)  # a draft model's KV is no part of the segments
    state, interval = state_bytes(facts.arch, precision).value, config.checkpoint_interval
    of_states = state / interval if interval else 0.0
    path = Path(config.kv_dir)
    used, free = 0, None
    if not is_new(path):
        with told(path), existing(path) as root:
            used = list_all(root).num_bytes
    with suppress(OSError):
        free = shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free
    return {
        "path": config.kv_dir,
        "quota_bytes": config.kv_disk_bytes,
        "tokens": int(config.kv_disk_bytes / (own + of_states)),
        "token_bytes": own,
        "state_bytes": state if interval else 0,
        "state_interval": interval,
        "used_bytes": used,
        "free_bytes": free,
    }


def described(plan: DirectoryPlan) -> str:
    """The plan in sentences, with a warning if the quota is more than the file system can take."""
    states = ""
    if plan["state_interval"]:
        states = f" and a state of {format_bytes(plan['state_bytes'])} for each {plan['state_interval']:,}"
    free, quota = plan["free_bytes"], format_bytes(plan["quota_bytes"])
    text = (
        f"--kv-disk of {quota} holds {plan['tokens']:,} tokens of this model: {plan['token_bytes']:,} B a token"
        f"{states}.\n"
        f"{plan['path']} has {format_bytes(plan['used_bytes'])} of segments"
    )
    if free is None:
        return f"{text}."
    text += f", and its file system {format_bytes(free)} free."
    if plan["quota_bytes"] > plan["used_bytes"] + free:
        text += (
            f"\nWarning: --kv-disk is more than these {format_bytes(plan['used_bytes'] + free)} together. Segments "
            "that find no room are not written, and other programs find none either: give a smaller --kv-disk."
        )
    return text
