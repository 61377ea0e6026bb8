"""The arithmetic of the benchmarks: floors computed by hand, peers' figures scaled to another machine, tables,
stacks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import machine, peers, tables
from benchmarks.checkpoints import SHAPES
from benchmarks.machine import Machine, Rate
from benchmarks.roofline import Cost, Load, Rates, decode_step_s, load_s, prefill_s, tokens_per_s
from benchmarks.scenario_results import Measurement, Results, Start, as_json, cost_of, render
from benchmarks.scenarios import SCENARIOS, parse
from benchmarks.stacks import read_stacks, shares

RATES = Rates(read_bytes=100.0, flops=1000.0)
COST = Cost(body_params=8, head_params=2, weight_bytes=2.0, kv_bytes=1.0)


@pytest.mark.parametrize(
    ("num_rows", "context", "floor_s"),
    [
        (1, 10, 0.30),  # 20 bytes of weights and 10 of KV
        (1, 0, 0.20),
        (4, 10, 0.60),
        (32, 0, 0.64),  # 2 * 10 * 32 operations, above the 0.2 s of the bytes
    ],
)
def test_a_decode_step_by_hand(num_rows: int, context: int, floor_s: float) -> None:
    assert decode_step_s(RATES, COST, num_rows, context) == pytest.approx(floor_s)


@pytest.mark.parametrize(
    ("num_tokens", "num_sampled", "floor_s"),
    [(50, 1, 0.804), (1, 1, 0.2)],  # 2 * (8 * 50 + 2) operations; one token reads the weights like fifty
)
def test_a_prefill_by_hand(num_tokens: int, num_sampled: int, floor_s: float) -> None:
    assert prefill_s(RATES, COST, num_tokens, num_sampled) == pytest.approx(floor_s)


def test_a_load_by_hand() -> None:
    """Waves of 2 and 1 requests of 10 + 3 tokens. 6 of the 10 are shared, and computed once."""
    load = Load(num_clients=2, num_requests=3, input_len=10, output_len=3, shared_prefix=6)
    first = 2 * (8 * 14 + 2 * 2) / 1000 + 2 * (20 + 2 * 11.5) / 100
    second = 20 / 100 + 2 * (20 + 11.5) / 100
    assert load_s(RATES, COST, load) == pytest.approx(first + second)
    assert tokens_per_s(RATES, COST, load) == pytest.approx(9 / 1.922)
    assert load_s(RATES, COST, replace(load, shared_prefix=0)) > first + second


def test_the_shapes_have_the_sizes_they_are_named_after() -> None:
    """Computed by hand: 1B is 16 layers of 4 projections (2048 x 2048, twice 2048 x 512, and back) and 3 of 2048 x
    8192."""
    assert SHAPES["1b"].num_body_params == 16 * (2048 * (2048 + 512 + 512 + 2048) + 3 * 2048 * 8192)
    assert SHAPES["1b"].num_head_params == 65_536_000
    assert SHAPES["1b"].kv_elements == 2 * 16 * 8 * 64
    assert SHAPES["0.6b"].num_body_params == 28 * (1024 * (2048 + 1024 + 1024 + 2048) + 3 * 1024 * 3072)
    assert cost_of(SHAPES["0.6b"], "int4") == Cost(440_401_920, 155_582_464, 0.5, 2.0 * 57_344)


def fast(read: float, flops: float, int8: float | None) -> Machine:
    return Machine(2, "here", "2", Rate(read, read), Rate(flops, flops), int8 and Rate(int8, int8))


def test_the_rate_of_a_precision() -> None:
    here = fast(10e9, 100e9, 300e9)
    assert peers.rates_of(here, "bf16") == Rates(10e9, 100e9)
    assert peers.rates_of(here, "int4") == Rates(10e9, 300e9)
    assert peers.rates_of(fast(10e9, 100e9, None), "int8") == Rates(10e9, 100e9)


def test_peers_are_scaled_by_what_bounds_the_scenario() -> None:
    cost = cost_of(SHAPES["1b"], "bf16")
    reads_faster = fast(68e9, 410e9, 850e9)
    for name, load in SCENARIOS.items():
        assert peers.scale(peers.REFERENCE, "bf16", name, cost, load) == pytest.approx(1.0)
        both = fast(68e9, 820e9, 1700e9)
        assert peers.scale(both, "bf16", name, cost, load) == pytest.approx(2.0)
    assert peers.scale(reads_faster, "bf16", "i", cost, SCENARIOS["i"]) == 2.0
    # Products alone bound 32 rows; both products and reads bound 4 rows behind a shared prefix.
    assert peers.scale(reads_faster, "bf16", "iii", cost, SCENARIOS["iii"]) == 1.0
    assert 1.3 < peers.scale(reads_faster, "bf16", "iv", cost, SCENARIOS["iv"]) < 1.6


def test_no_peer_was_faster_than_the_floor() -> None:
    for (model, precision), known in peers.PEERS.items():
        cost, rates = cost_of(SHAPES[model], precision), peers.rates_of(peers.REFERENCE, precision)
        for peer in known:
            for name, (low, high) in zip(peers.SCENARIO_NAMES, peer.spans, strict=True):
                assert low <= high < tokens_per_s(rates, cost, SCENARIOS[name]), (model, precision, peer.name, name)


def test_the_best_of_two_measurements() -> None:
    best = machine.best_of([fast(10, 200, None), fast(20, 100, 300)])
    assert (best.read_bytes.best, best.bf16_flops.best, best.int8_ops) == (20, 200, Rate(300, 300))
    assert best.read_bytes.median == 15


def test_a_table_is_aligned_and_leaves_out_what_was_not_measured() -> None:
    assert tables.markdown(["name", "x"], [["a", 1234.6], ["longer", None], ["b", 0.126], ["c", 99.96]]) == (
        "| name   |     x |\n"
        "| ------ | ----: |\n"
        "| a      | 1,235 |\n"
        "| longer |       |\n"
        "| b      |  0.13 |\n"
        "| c      | 100.0 |"
    )


def measured(scenario: str, rate: float, **changes: Any) -> Measurement:
    fields: dict[str, Any] = {
        "model": "1b",
        "precision": "int8",
        "scenario": scenario,
        "system": "inferd",
        "repetition": 0,
        "output_tokens_per_s": rate,
        "ttft_p50_s": 0.25,
        "tpot_p50_s": 0.05,
        "num_cached_tokens": 0,
        "num_failed": 0,
        "failures": "",
        "warnings": [],
    }
    return Measurement(**{**fields, **changes})


def test_results_stand_beside_floors_and_peers() -> None:
    scenarios = {name: SCENARIOS[name] for name in ("i", "iii")}
    runs = [measured("i", 20.0), measured("i", 22.0, repetition=1), measured("iii", 60.0)]
    other = measured("iii", 50.0, system="other", num_failed=2)
    results = Results((peers.REFERENCE,) * 2, [Start("1b", "int8", 2.5, 3 << 30)], [*runs, other], "command", scenarios)
    text = render(results)
    floor = tokens_per_s(Rates(34e9, 850e9), cost_of(SHAPES["1b"], "int8"), SCENARIOS["i"])
    lines = {line.partition("|")[2].partition("|")[0].strip(): line for line in text.splitlines() if "|" in line}
    cells = [cell.strip() for cell in lines["i: 1 x 128+128"].split("|")[1:-1]]
    shown = [f"{floor:.1f}", f"{21 / floor:.0%}"]
    assert cells == ["i: 1 x 128+128", "inferd", "21.0", "20.0-22.0", "250", "50.0", *shown, ""]
    assert [cell.strip() for cell in lines["other"].split("|")[1:-1]] == ["other", "", "50.0"]
    assert "18.0 (18.0)" in lines["OpenVINO int8, scaled"] and "46.8 (46.8)" in lines["OpenVINO int8, scaled"]
    assert "READY in 2.5 s, peak RSS 3.00 GiB" in text and peers.MEASURED in text
    assert as_json(results)["floors"]["1b int8 i"]["output_tokens_per_s"] == pytest.approx(floor)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "7b"], f"there is no '7b'; there are {', '.join(SHAPES)}"),
        (["--precision", "bf16,int3"], "there is no 'int3'"),
        (["--repeat", "0"], "--repeat must be at least 1, but got 0"),
        (["--peer", "http://x", "--precision", "bf16,int8"], "--peer serves one model in one precision"),
    ],
)
def test_what_the_scenarios_refuse(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--dir", "x", *arguments])
    assert reason in capsys.readouterr().err


def test_a_peer_has_a_url_and_a_name() -> None:
    asked = parse(["--dir", "x", "--peer", "http://h:1/v1=them", "--peer", "http://h:2"])
    assert asked.peer == [("http://h:1/v1", "them"), ("http://h:2", "h:2")]


def test_shares_of_sampled_stacks(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("6\ta:main;b:loop;c:write\n2\ta:main;b:loop\n9\ta:main;d:start\n")
    assert shares(read_stacks(tmp_path / "s"), within="b:loop") == [("c:write", 0.75, 0.75), ("b:loop", 0.25, 1.0)]
    assert shares(read_stacks(tmp_path / "absent"), within="b:loop") == []
