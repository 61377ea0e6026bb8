"""One request as ids and counters: tokens that exist, positions that are launched, positions that are computed.

Scheduling has no phases, only counters that catch up: `0 <= cached <= computed <= scheduled <= total`. `check()`
asserts all of that, and `launch` and `apply` the part that they can break. Knows no blocks, no slots, no queue and no
clock. Does not know why a generation ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from inferd.engine.api.wire.params import NO_SCHEDULING, SamplingParams, SchedulingParams


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One generation in the engine. Compared by identity: an id may be used again after its request ended.

    All counters count positions of one sequence, prompt and output together.
    """

    request_id: str
    params: SamplingParams
    scheduling: SchedulingParams
    ids: list[int]
    """Ids known on the host: prompt and applied output."""
    num_prompt: int
    max_total: int
    """Most tokens of the sequence: the prompt and `max_tokens`, bounded by the model's length."""

    cached: int = 0
    """Positions that the last admission took from the prefix cache."""
    computed: int = 0
    """Positions whose KV was written by applied steps, or was cached."""
    scheduled: int = 0
    """Value of `computed` once every launched step is applied."""
    total: int = field(init=False)
    """Tokens that exist, including those that launched steps are about to sample."""
    in_flight: int = 0
    """Launched rows whose results have not been applied."""
    num_drafts: int = 0
    """Drafts of the launched row. While there are any, no other row is in flight."""
    salt: str = field(init=False)
    """Requests share cached blocks only if this is the same: their `cache_salt`, and the content of their adapter."""
    num_needed: int = field(init=False)
    """Positions whose KV is ever needed. The last token that may be sampled is never computed."""

    num_cached_tokens: int | None = None
    """Prompt tokens that the first admission took from the prefix cache; None before."""
    num_known_tokens: int = 0
    """Prompt tokens whose KV was cached then. Those behind the hit had no recurrent state behind them."""
    loaded: range = range(0)
    """Positions whose KV was loaded for it from below the pool, before its first admission."""
    num_loaded_tokens: int = 0
    """Prompt tokens of these that the first admission took."""
    scheduled_s: float | None = None
    """Time of the first admission; None before."""

    def __post_init__(self) -> None:
        self.total = len(self.ids)
        adapter, self.salt = self.params.adapter, self.scheduling.cache_salt
        if adapter is not None:
            self.salt = f"\0{adapter.digest}\0{self.salt}"  # `parts_of_salt` takes it apart
        self.num_needed = self.num_prompt if self.params.max_tokens == 0 else self.max_total - 1

    @classmethod
    def create(
        cls,
        request_id: str,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        scheduling: SchedulingParams = NO_SCHEDULING,
        *,
        max_model_len: int,
        emitted_ids: tuple[int, ...] = (),
    ) -> Request:
        """A new request. In a replay, `emitted_ids` were generated before; they count as output, not as prompt."""
        return cls(
            request_id=request_id,
            params=params,
            scheduling=scheduling,
            ids=[*prompt_ids, *emitted_ids],
            num_prompt=len(prompt_ids),
            max_total=min(len(prompt_ids) + params.max_tokens, max_model_len),
        )

    @property
    def num_output(self) -> int:
        """Output tokens known on the host, replayed ones included."""
        return len(self.ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Positions that may be scheduled now; 0 if none is left within the length. Also 0 while drafts are verified:
        their number that holds says how many are left."""
        if self.num_drafts:
            return 0
        total, needed = self.total, self.num_needed
        return (total if total < needed else needed) - self.scheduled

    @property
    def most_drafts(self) -> int:
        """Drafts that the row just launched may carry. None, unless it is the only one in flight, draws, and begins
        with the last known id."""
        num_known = len(self.ids)
        if self.in_flight != 1 or self.scheduled != num_known or self.total != num_known + 1:
            return 0
        return self.num_needed - num_known

    @property
    def is_complete(self) -> bool:
        """Whether its length ends it: nothing more may be computed or sampled."""
        return self.computed >= self.num_needed or len(self.ids) > self.num_needed

    @property
    def takes_prefix_hits(self) -> bool:
        """Prompt logprobs and means need the hidden states of every prompt position, which a hit would skip."""
        return not self.params.needs_every_position

    def admit(self, num_cached: int, now: float, num_known: int = 0) -> None:
        """Start, or resume, behind `num_cached` positions found in the prefix cache, which knows `num_known`."""
        assert self.scheduled == self.in_flight == 0, "admitted twice"
        self.cached = self.computed = self.scheduled = num_cached
        if self.num_cached_tokens is None:
            self.num_cached_tokens, self.scheduled_s = min(num_cached, self.num_prompt), now
            self.num_known_tokens = max(self.num_cached_tokens, min(num_known, self.num_prompt))
            self.num_loaded_tokens = len(range(self.loaded.start, min(self.loaded.stop, self.num_cached_tokens)))
        self.check()

    def launch(self, num_tokens: int) -> bool:
        """Count `num_tokens` positions as launched. Returns whether the row reaches the end and samples a token."""
        self.scheduled = scheduled = self.scheduled + num_tokens
        self.in_flight += 1
        total = self.total
        # This and `apply` assert only the part of `check` that they can break. All of it takes an eighth of a step of
        # 256 decodes.
        assert scheduled <= total and scheduled <= self.num_needed, self
        if scheduled < total or total >= self.max_total:
            return False
        self.total = total + 1
        return True

    def launch_drafts(self, num_drafts: int) -> None:
        """Count drafts behind the row just launched."""
        assert 0 < num_drafts <= self.most_drafts and not self.num_drafts, self
        self.num_drafts = num_drafts
        self.scheduled += num_drafts
        self.total += num_drafts

    def apply(self, start: int, num_tokens: int, token_ids: tuple[int, ...]) -> None:
        """Count a launched row as computed and append what it sampled. Of a row with drafts, one position counts for
        each id: those of rejected drafts are computed again."""
        assert start == self.computed, f"row at {start} applied, {self.computed} computed"
        if self.num_drafts:
            num_tokens = len(token_ids)
            assert 1 <= num_tokens <= self.num_drafts + 1, self
            self.num_drafts = 0
            self.scheduled = self.computed + num_tokens
            self.total = len(self.ids) + num_tokens
        self.computed = computed = self.computed + num_tokens
        self.ids.extend(token_ids)
        assert computed <= self.scheduled and computed <= len(self.ids) <= self.total, self

    def rewind(self) -> None:
        """Reset the counters after a preemption, with nothing in flight. The ids stay."""
        assert self.in_flight == 0, "rewound with rows in flight"
        assert self.total == len(self.ids), "rewound with ids that the host has not seen"
        self.cached = self.computed = self.scheduled = 0
        self.check()

    def check(self) -> None:
        """Assert the order of the counters, and that the host knows no more ids than exist."""
        cached, computed, scheduled, total = self.cached, self.computed, self.scheduled, self.total
        assert 0 <= cached <= computed <= scheduled <= total <= self.max_total, self
        assert scheduled <= self.num_needed, self
        assert computed <= len(self.ids) <= total, self


def parts_of_salt(salt: str) -> tuple[str, str]:
    """(digest of the adapter, `cache_salt`) of a request's salt; each is empty if the request has none."""
    if not salt.startswith("\0"):
        return "", salt
    digest, _, cache_salt = salt[1:].partition("\0")
    return digest, cache_salt
