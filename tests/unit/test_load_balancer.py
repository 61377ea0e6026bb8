"""Which replica a request goes to: the one that has to compute least before its first token."""

from __future__ import annotations

import random
from collections import OrderedDict
from types import SimpleNamespace

import pytest

from inferd.engine.api.wire.messages import Delta, Submit
from inferd.engine.api.wire.params import Adapter, SamplingParams, SchedulingParams
from inferd.server.dispatch.replica import STREAM_TOKENS, LoadBalancer, Replica, Replicas
from inferd.server.dispatch.token_stream import TokenStream

BLOCK = 16


def replicas_of(count: int, num_blocks: int = 1000) -> Replicas:
    ready = SimpleNamespace(block_size=BLOCK, num_blocks=num_blocks)
    replicas = Replicas(count)
    for replica in replicas:
        replica.is_up, replica.ready = True, ready  # type: ignore[assignment]
    return replicas


def submit(name: str, ids: tuple[int, ...], salt: str = "", adapter: Adapter | None = None) -> Submit:
    params = SamplingParams(max_tokens=4, seed=1, adapter=adapter)
    return Submit(request_id=name, prompt_ids=ids, params=params, scheduling=SchedulingParams(cache_salt=salt))


def end(replica: Replica, name: str) -> None:
    replica.streams.pop(name, None)
    replica.waiting.pop(name, None)


def test_equal_requests_go_where_the_first_was_computed() -> None:
    replicas, ids = replicas_of(3), tuple(range(200))
    balancer = LoadBalancer(replicas)
    first = balancer.place(submit("a", ids))
    assert first is not None and first.waiting == {"a": 200}
    end(first, "a")
    assert balancer.place(submit("b", ids)) is first
    assert first.waiting == {"b": 200 - 200 // BLOCK * BLOCK}
    end(first, "b")
    balancer.forget(first)
    assert balancer.place(submit("c", ids)) is not first, "its cache is empty: another was chosen longer ago"


@pytest.mark.parametrize(
    "other",
    [{"ids": (1, *range(1, 200))}, {"salt": "theirs"}, {"adapter": Adapter(0, "digest")}],
    ids=["another first id", "another salt", "an adapter"],
)
def test_what_differs_in_the_cache_goes_elsewhere(other: dict[str, object]) -> None:
    replicas = replicas_of(2)
    balancer = LoadBalancer(replicas)
    first = balancer.place(submit("a", tuple(range(200))))
    assert first is not None
    end(first, "a")
    asked = {"ids": tuple(range(200)), **other}
    assert balancer.place(submit("b", **asked)) is not first  # type: ignore[arg-type]


def test_a_prefix_is_left_if_too_much_waits_before_it() -> None:
    """The bound is where what waits, with what each stream there counts for, equals the tokens in the cache."""
    replicas, ids = replicas_of(2), tuple(range(20 * BLOCK))
    balancer = LoadBalancer(replicas)
    first = balancer.place(submit("a", ids))
    assert first is not None
    end(first, "a")
    for waiting, is_kept in ((20 * BLOCK - STREAM_TOKENS - 1, True), (20 * BLOCK - STREAM_TOKENS + 1, False)):
        first.waiting, first.streams = {"x": waiting}, {"x": None}  # type: ignore[dict-item]
        found = balancer.place(submit("b", ids))
        assert found is not None and (found is first) is is_kept
        end(found, "b")
        balancer.forget(replicas[1 - first.index])


def test_the_next_turn_of_a_conversation_finds_its_answer() -> None:
    replicas, ids = replicas_of(2), tuple(range(4 * BLOCK))
    balancer = LoadBalancer(replicas)
    asked = submit("a", ids)
    first = balancer.place(asked)
    assert first is not None
    stream = TokenStream(asked, lambda request_id: None)
    stream.journal(Delta(request_id="a", token_ids=tuple(range(3 * BLOCK))))
    balancer.ended(first, stream)
    end(first, "a")
    assert balancer.place(submit("b", (*ids, *range(3 * BLOCK), 5))) is first
    assert first.waiting == {"b": 1}


def test_a_replica_without_an_engine_gets_nothing() -> None:
    replicas, ids = replicas_of(2), tuple(range(64))
    balancer = LoadBalancer(replicas)
    first = balancer.place(submit("a", ids))
    assert first is not None
    first.is_up = False
    assert balancer.place(submit("b", ids)) is replicas[1 - first.index]
    replicas[1 - first.index].is_up = False
    assert balancer.place(submit("c", ids)) is None


def test_what_is_remembered_is_bounded_and_the_longest_unused_goes_first() -> None:
    replicas = replicas_of(2, num_blocks=4)
    replicas[1].is_up = False
    balancer, first = LoadBalancer(replicas), replicas[0]
    for name, start in (("a", 0), ("b", 1000), ("c", 0), ("d", 2000)):
        balancer.place(submit(name, tuple(range(start, start + 2 * BLOCK))))
        end(first, name)
    for name, start, num_cached in (("e", 0, 2 * BLOCK), ("f", 1000, 0)):
        balancer.place(submit(name, tuple(range(start, start + 2 * BLOCK))))
        assert first.waiting == {name: 2 * BLOCK - num_cached}
        end(first, name)


class Cache:
    """A prefix cache of so many blocks, the longest unused evicted first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def hit(self, ids: tuple[int, ...]) -> int:
        """Cached tokens of a prompt, which is then cached whole."""
        chain = [ids[:end] for end in range(BLOCK, len(ids) + 1, BLOCK)]
        num_cached = next((i for i, key in enumerate(chain) if key not in self.blocks), len(chain))
        for key in reversed(chain):
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) > self.num_blocks:
            self.blocks.popitem(last=False)
        return num_cached * BLOCK


def test_conversations_hit_far_more_than_in_turn() -> None:
    """64 conversations of six turns over four replicas whose caches together hold them just so."""
    rng = random.Random(5)
    starts = [tuple(rng.randrange(1000) for _ in range(10 * BLOCK)) for _ in range(64)]

    def hit_rate(*, by_turns: bool) -> float:
        replicas = replicas_of(4, num_blocks=500)
        balancer, caches = LoadBalancer(replicas), [Cache(500) for _ in replicas]
        chats, num_hit, num_asked = list(starts), 0, 0
        for turn in range(6 * 64):
            chat = rng.randrange(64)
            asked = submit(str(turn), chats[chat])
            chosen = replicas[turn % 4] if by_turns else balancer.place(asked)
            assert chosen is not None
            num_hit += caches[chosen.index].hit(asked.prompt_ids)
            num_asked += len(asked.prompt_ids)
            chats[chat] += tuple(rng.randrange(1000) for _ in range(2 * BLOCK))
            end(chosen, asked.request_id)
        return num_hit / num_asked

    assert hit_rate(by_turns=False) > 1.5 * hit_rate(by_turns=True)
