"""The dashboard shows every metric, in the right unit, and the rules name only metrics that exist."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from inferd.server.observability.metrics import Metrics
from tests.deploy.test_deploy import DEPLOY, parse

FROM_PROMETHEUS = {"up"}
NOT_SHOWN = {
    "process_virtual_memory_bytes": "address space costs nothing",
    "process_start_time_seconds": "an alert reads it",
    "inferd_sleep_state": "changes when somebody asks for it, who knows it then",
    "inferd_kv_host_bytes": "is zero without --kv-host, which only servers on GPUs have",
    "inferd_kv_host_read_bytes_total": "is zero without --kv-host, which only servers on GPUs have",
    "inferd_answer_repairs_total": "says how well a model keeps to its format, not how the server does",
}
"""Metrics that no panel shows -> why."""
NO_MAXIMUM = {"What steps are bound by", "MFU and MBU", "Processor time", "Time that the KV directory saves"}
"""Panels of shares that may exceed 1."""


def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana/dashboards/inferd.json").read_text())


def shown_panels() -> list[Any]:
    """All panels but the titles of rows."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def unit_of(expression: str) -> str:
    """Grafana's unit of an expression, from the names of its metrics and what is done with them."""
    whole = re.sub(r"on \(\) group_left \(\) ", "", expression.removesuffix(" >= 0"))
    if " / (" in whole:
        left, right = (_quantity(part) for part in whole.split(" / ("))
        number, per = left.removesuffix("/s"), right.removesuffix("/s")
        if number == per:
            # Both are parts of the same whole, or else a quantity was divided by one of its own kind.
            return "suffix: x" if "step_floor_seconds" in whole else "percentunit"
        return UNITS[number] if per in ("count", "rows") else f"{number}/{per}"
    return UNITS.get(_quantity(whole), "?")


def _quantity(expression: str) -> str:
    """The quantity of a single series, such as "tok/s"."""
    name = re.findall(r"(?:inferd|process)_\w+", expression)[0]
    base = re.sub(r"_(?:total|bucket|sum)$", "", name)
    kinds = {
        r"_count$": "count",
        r"_flops_per_second|step_flops": "flop",
        r"_bytes": "byte",
        r"_rows$": "rows",
        r"_seconds": "s",
        r"_tokens(?:_|$)": "tok",
        r"_requests(?:_|$)": "req",
        r"expert_peak_ratio": "times",
        r"_ratio$": "ratio",
    }
    kind = next((kind for pattern, kind in kinds.items() if re.search(pattern, base)), "number")
    is_rate = "rate(" in expression and "histogram_quantile" not in expression
    return f"{kind}/s" if is_rate or base.endswith("_per_second") else kind


UNITS = {
    "s": "s", "s/s": "percentunit", "tok": "short", "tok/s": "suffix: tok/s", "req": "short", "req/s": "reqps",
    "number": "short", "number/s": "ops", "ratio": "percentunit", "times": "suffix: x", "byte": "bytes",
    "byte/s": "binBps", "flop/s": "flops",
}  # fmt: skip


def expressions() -> Iterator[str]:
    board = dashboard()
    yield from (target["expr"] for panel in shown_panels() for target in panel["targets"])
    yield from (annotation["expr"] for annotation in board["annotations"]["list"])
    yield from (variable["definition"] for variable in board["templating"]["list"] if "definition" in variable)
    yield from (rule["expr"] for group in parse("prometheus/rules.yml")["groups"] for rule in group["rules"])


def metric_names(expression: str) -> set[str]:
    """Names in the places of a PromQL series: before a selector or a range, or as a whole operand."""
    selectors = r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\""
    labels = r"\b(?:by|without|on|group_left)\s*\([^)]*\)"
    bare = re.sub(labels, " ", re.sub(selectors, " ", expression))
    words = re.findall(r"[a-zA-Z_:][\w:]*(?!\s*\(|\w)", bare)
    return {word for word in words if word not in {"and", "or", "unless", "model_name", "e", "job", "instance"}}


def test_every_metric_shown_or_alerted_on_exists() -> None:
    known = Metrics("m").names() | FROM_PROMETHEUS
    rules = [rule for group in parse("prometheus/rules.yml")["groups"] for rule in group["rules"]]
    known |= {rule["record"] for rule in rules if "record" in rule}
    assert {name for expression in expressions() for name in metric_names(expression)} <= known


def test_every_metric_is_shown_or_listed() -> None:
    targets = [target["expr"] for panel in shown_panels() for target in panel["targets"]]
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for expression in targets for name in metric_names(expression)}
    exported = {re.sub(r"_(bucket|sum|count)$", "", name) for name in Metrics("m").names()}
    assert exported - shown == set(NOT_SHOWN)


@pytest.mark.parametrize("panel", shown_panels(), ids=lambda panel: str(panel["title"]))
def test_a_panel_has_the_unit_of_its_expressions_and_says_so_if_it_has_no_data(panel: Any) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["noValue"] and panel["description"]
    for target in panel["targets"]:
        unit = unit_of(target["expr"])
        assert defaults["unit"] == ("none" if "mappings" in defaults else unit), target["expr"]
        assert 'job=~"$job", instance=~"$instance"' in target["expr"]
        if "histogram_quantile" in target["expr"]:
            assert target["expr"].endswith(" >= 0"), "without requests a quantile is NaN"
        for divisor in re.findall(r" / (.*)", target["expr"]):
            assert divisor.endswith(" > 0)"), "without requests a ratio is NaN"
    if defaults["unit"] == "percentunit":
        assert (defaults.get("max") == 1) != (panel["title"] in NO_MAXIMUM)


def test_a_wrong_unit_would_be_found() -> None:
    assert unit_of("sum(rate(inferd_step_seconds_total[5m]))") == "percentunit", "seconds a second"
    assert unit_of("sum(rate(inferd_generation_tokens_total[5m]))") == "suffix: tok/s"
    assert (
        unit_of("sum(rate(inferd_generation_tokens_total[5m])) / (sum(rate(inferd_engine_steps_total[5m])) > 0)")
        not in UNITS.values()
    )


def test_a_wrong_name_would_be_found() -> None:
    expression = 'sum by (le) (rate(inferd_time_to_first_tokens_bucket{model_name=~"$model"}[$__rate_interval])) / up'
    assert metric_names(expression) == {"inferd_time_to_first_tokens_bucket", "up"}


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_expressions_treat_metrics_as_what_they_are(expression: str) -> None:
    assert all(expression.count(left) == expression.count(right) for left, right in ("()", "[]", "{}"))
    counted = set(re.findall(r"(?:rate|increase)\((\w+)", expression))
    assert all(name.endswith(("_total", "_bucket", "_sum", "_count")) for name in counted)
    never_raw = {name for name in metric_names(expression) if name.endswith(("_total", "_bucket"))}
    assert never_raw <= counted
    if "histogram_quantile" in expression:
        assert re.search(r"by \([^)]*\ble\b[^)]*\)", expression)


def test_the_dashboard_shows_what_was_promised() -> None:
    shown = " ".join(expressions())
    for name in ("time_to_first_token", "time_per_output_token", "inter_token_latency"):
        for quantile in ("0.5", "0.95", "0.99"):
            assert re.search(rf"histogram_quantile\({quantile}, [^)]*\) \(rate\(inferd_{name}_seconds_bucket", shown)
    for name in ("generation_tokens_total", "requests_running", "requests_waiting", "kv_cache_usage_ratio",
                 "prefix_cache_hit_tokens_total", "step_duration_seconds_bucket", "requests_finished_total",
                 "http_requests_total"):  # fmt: skip
        assert f"inferd_{name}" in shown


def test_panels_do_not_overlap_and_have_their_own_ids() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x, y in itertools.product(range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"]))
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
