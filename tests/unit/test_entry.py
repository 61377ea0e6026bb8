"""The running set: sorted by rank, and the last one gives way."""

from __future__ import annotations

from random import Random

from inferd.engine.api.wire.params import SamplingParams
from inferd.engine.cache.table import KVCache
from inferd.engine.request import Request
from inferd.engine.sched.entry import Entry, RunningSet

_CACHE = KVCache(1, 1)


def make(rank: int) -> Entry:
    request = Request.create(str(rank), (1,), SamplingParams(max_tokens=1, seed=0), max_model_len=9)
    return Entry(request, _CACHE.open(request), (float(rank), 0.0, rank))


def test_any_order_of_arrival_and_leaving_stays_sorted() -> None:
    rng, running, model = Random(0), RunningSet(), list[Entry]()
    for rank in rng.sample(range(200), 200):
        entry = make(rank)
        running.add(entry)
        model.append(entry)
        if rng.random() < 0.4:
            gone = model.pop(rng.randrange(len(model)))
            running.remove(gone)
        assert list(running) == sorted(model, key=lambda entry: entry.order_key)
        assert len(running) == len(model)


def test_the_victim_is_the_last_and_never_who_asks() -> None:
    running = RunningSet()
    entries = [make(rank) for rank in (2, 0, 1)]
    for entry in entries:
        running.add(entry)
    last, first, middle = entries
    assert (running.victim(first), running.victim(middle), running.victim(last)) == (last, last, None)
