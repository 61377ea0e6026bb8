"""Suspects: each runs alone up to its position, in turn with all others, and no request starves."""

from __future__ import annotations

from inferd.engine.cache.table import KVCache
from tests.unit.test_scheduler import Engine, make
from tests.unit.test_table import admit, open_table

PROMPT = (1, 2, 3, 4, 5)


def names(engine: Engine) -> list[str]:
    return [name for name, *_ in engine.step()]


def test_others_go_first_then_turn_by_turn() -> None:
    engine = make(shares_prefixes=False)
    engine.add("s", PROMPT, max_tokens=9, alone_until=6)
    engine.add("t", PROMPT, max_tokens=9, alone_until=1)
    engine.add("a", PROMPT, max_tokens=9)
    assert names(engine) == ["a"]
    assert [names(engine), names(engine)] == [["s"], ["s"]], "five positions with the prompt, and one more"
    assert sorted(names(engine)) == ["a", "s"], "a step of the others, with whom was cleared"
    assert names(engine) == ["t"]
    assert sorted(names(engine)) == ["a", "s", "t"]


def test_what_was_launched_ends_before_a_trial_begins() -> None:
    engine = make(shares_prefixes=False)
    engine.add("a", PROMPT, max_tokens=9)
    engine.add("s", PROMPT, max_tokens=9, alone_until=6)
    assert [name for name, *_ in engine.plan()] == ["a"]
    assert engine.plan() == [], "the suspect's turn, and a row of another is on the device"
    engine.apply()
    assert [name for name, *_ in engine.plan()] == ["s"]
    assert [name for name, *_ in engine.plan()] == ["s"], "its own next row may overlap"
    assert engine.plan() == [], "as far as it was told"
    engine.apply()
    assert engine.plan() == [], "its last row is not applied"
    engine.apply()
    assert sorted(name for name, *_ in engine.plan()) == ["a", "s"]


def test_a_suspect_that_ends_gives_the_turn_back() -> None:
    engine = make(shares_prefixes=False)
    suspect = engine.add("s", PROMPT, max_tokens=9, alone_until=99)
    engine.add("t", PROMPT, max_tokens=9, alone_until=6)
    engine.add("a", PROMPT, max_tokens=9)
    assert [names(engine), names(engine)] == [["a"], ["s"]]
    engine.scheduler.finish(suspect)
    assert [names(engine), names(engine)] == [["a"], ["t"]]


def test_a_suspect_that_ends_is_alone_until_its_last_row_is_applied() -> None:
    """That row may kill the engine: with a second row, nothing would show which one did."""
    engine = make(shares_prefixes=False)
    suspect = engine.add("s", PROMPT, max_tokens=9, alone_until=99)
    engine.add("a", PROMPT, max_tokens=9)
    assert names(engine) == ["a"]
    assert [name for name, *_ in engine.plan()] == ["s"]
    engine.scheduler.finish(suspect)
    engine.scheduler.check()
    assert engine.plan() == [], "the suspect's row is on the device"
    engine.apply()
    assert names(engine) == ["a"]


def test_a_suspect_that_waits_is_aborted() -> None:
    engine = make()
    suspect = engine.add("s", PROMPT, alone_until=6)
    assert engine.scheduler.num_waiting == 1
    engine.scheduler.finish(suspect)
    engine.scheduler.check()
    assert not engine.scheduler.has_work


def test_nobody_takes_the_memory_that_a_suspect_waits_for() -> None:
    """Four blocks: the running request leaves too few, and later requests may not start before the suspect."""
    engine = make(num_blocks=4, shares_prefixes=False)
    engine.add("a", PROMPT, max_tokens=4)
    assert names(engine) == ["a"]
    engine.add("s", (*PROMPT, *PROMPT), max_tokens=2, alone_until=10)
    for number in range(5):
        engine.add(f"later {number}", (1,), max_tokens=4)
    order: list[str] = []
    while "s" not in order:
        order += names(engine)
    assert set(order) == {"a", "s"}


def test_a_suspect_does_not_count_on_blocks_of_its_prefix_that_another_holds() -> None:
    """A window moves past matched blocks, which do not return to the pool while another request holds them."""
    ids = tuple(range(100, 120))
    cache = KVCache(16, 2, (4,), step_tokens=2)
    holder, suspect = open_table(cache, ids), open_table(cache, ids)
    admit(holder, len(ids))
    holder.commit(4)
    match = suspect.match()
    assert match.num_tokens == 4 and match.num_unheld == 0
    assert suspect.num_free_needed(match, len(ids)) == 1, "a window and a step touch 3 blocks, of which 2 are matched"
    assert suspect.num_free_to_end(match, len(ids)) == 3
