"""Latency targets and goodput, which is the throughput of the requests that met all targets.

A failed request meets no target. An answer with a single token has no TPOT and meets any target for it. (Zhong et al.
2024, arXiv:2401.09670.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from inferd.engine.api.errors import ConfigError
from inferd.server.commands.bench.answer import Outcome

SPELLING = "latencies with units, such as ttft:500ms,tpot:50ms,e2e:10s"
_NAMES = ("ttft", "tpot", "e2e")
_BOUND = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", re.ASCII)
_UNIT_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Maximum latencies in seconds. None means any."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def is_met_by(self, outcome: Outcome) -> bool:
        """Whether the request succeeded and met every target."""
        if outcome.error is not None:
            return False
        taken = ((outcome.ttft_s, self.ttft_s), (outcome.tpot_s, self.tpot_s), (outcome.e2e_s, self.e2e_s))
        return all(bound is None or value is None or value <= bound for value, bound in taken)

    def __str__(self) -> str:
        bounds = zip(_NAMES, (self.ttft_s, self.tpot_s, self.e2e_s), strict=True)
        return ",".join(f"{name}:{bound * 1e3:g}ms" for name, bound in bounds if bound is not None)


@dataclass(frozen=True, slots=True)
class Goodput:
    """The requests that met the targets, over the whole duration of the run."""

    num_met: int
    share_met: float
    """Share of all requests sent, failed ones included."""
    requests_per_s: float
    output_tokens_per_s: float


def goodput(objective: Objective, outcomes: Sequence[Outcome], duration_s: float) -> Goodput:
    """The goodput of a run."""
    met = [outcome for outcome in outcomes if objective.is_met_by(outcome)]
    return Goodput(
        num_met=len(met),
        share_met=len(met) / len(outcomes) if outcomes else 0.0,
        requests_per_s=len(met) / duration_s,
        output_tokens_per_s=sum(outcome.num_output for outcome in met) / duration_s,
    )


def parse_objective(text: str) -> Objective:
    """Read "ttft:500ms,tpot:50ms". Raises `ConfigError` for an unknown latency, a missing unit or a bound of zero."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, _, bound = (piece.strip() for piece in part.partition(":"))
        match = _BOUND.fullmatch(bound)
        if name not in _NAMES or name in bounds or match is None or float(match[1]) == 0:
            reason = _reason(name, bound, bounds)
            raise ConfigError(f"goodput must be {SPELLING}, but got {text!r}: {reason}")
        bounds[name] = float(match[1]) * _UNIT_S[match[2]]
    return Objective(ttft_s=bounds.get("ttft"), tpot_s=bounds.get("tpot"), e2e_s=bounds.get("e2e"))


def _reason(name: str, bound: str, known: dict[str, float]) -> str:
    if name not in _NAMES:
        return f"there is no latency {name!r}; there are {', '.join(_NAMES)}"
    if name in known:
        return f"{name} is given twice"
    return f"{bound!r} is not a time above 0 with a unit of us, ms or s"
