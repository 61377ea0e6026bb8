"""The benchmark of speculation: its loads give guesses no unfair help, and a differing answer ends it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from benchmarks import speculation
from benchmarks.speculation import Pair, Run, bodies_of, compare, plot
from benchmarks.speculation_prompts import requests
from inferd.server.commands.bench.report import Drafts

ASKED = Namespace(rounds=2, tokens=50, temperature=0)


def run(answers: tuple[str, ...] = ("a", "b"), seconds: float = 2.0, num_steps: int = 100, drafted: int = 0) -> Run:
    return Run(answers, 200, seconds, num_steps, Drafts(drafted, drafted // 2))


@pytest.mark.parametrize("num_clients", [1, 8, 32])
def test_no_prompt_comes_twice_under_one_salt(num_clients: int) -> None:
    for name, load in (*requests().items(), *requests("tiny").items()):
        bodies = bodies_of(load, ASKED, num_clients, name)
        assert len(bodies) >= 2 * num_clients, "clients without work"
        assert len({(str(body["messages"]), body["cache_salt"]) for body in bodies}) == len(bodies)
        assert all((body["temperature"], body["max_tokens"]) == (0, 50) for body in bodies)


def test_the_figures_of_a_pair() -> None:
    """100 tokens a second without, 400 with, in 25 of 100 steps, and half of the drafts were accepted."""
    pair = Pair("chats", 8, (run(), run()), (run(seconds=0.5, num_steps=25, drafted=60),) * 2)
    assert pair.cells() == ["chats", "8", 100.0, 400.0, 4.0, "75%", "50%"]
    assert Pair("chats", 8, (run(),), (run(),)).cells()[-1] == "no drafts"
    assert plot([pair, Pair("chats", 16, pair.off, pair.on)], [8, 16]).count("chats, ") == 2


@pytest.mark.parametrize("is_equal", [True, False])
def test_an_answer_that_speculation_changed_ends_it(monkeypatch: pytest.MonkeyPatch, is_equal: bool) -> None:
    asked: list[tuple[str, str]] = []

    async def measure(url: str, bodies: Any, num_clients: int) -> Run:
        asked.append((url, bodies[0]["cache_salt"]))
        return run(tuple(f"{url if not is_equal and len(asked) > 2 else ''}{i}" for i in range(len(bodies))))

    monkeypatch.setattr(speculation, "measure", measure)
    load = requests()["chats"]
    if not is_equal:
        with pytest.raises(SystemExit, match="speculation changed an answer to"):
            compare("chats", load, 1, ("off", "on"), ASKED)
        return
    pair = compare("chats", load, 1, ("off", "on"), ASKED)
    assert [url for url, _ in asked] == ["off", "on", "on", "off"], "by turns"
    assert len({salt for _, salt in asked}) == 2, "a round found answers of another"
    assert len(pair.off) == len(pair.on) == 2
