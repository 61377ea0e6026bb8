"""A caller, a valid request with its deadline, and the submits that it becomes. Only the intake makes a valid request.

Work that is not done by its deadline is cancelled, and its request gets an error. Times are of `time.monotonic`, so
that a change of the wall clock ends nothing early. The engine's `SamplingParams` come from fields of the body and
defaults, seeds included. Order of precedence: caller, checkpoint, OpenAI.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from inferd.engine.api.errors import RequestError
from inferd.engine.api.wire.messages import Submit
from inferd.engine.api.wire.params import MAX_SEED, SamplingParams, SchedulingParams
from inferd.server.auth.quotas import UNLIMITED, Account
from inferd.server.schema.caller_tool import CallerTool
from inferd.server.schema.generation import GenerationFields
from inferd.server.schema.latency import NO_TARGETS, Targets
from inferd.server.schema.notices import Notice
from inferd.server.schema.repetition import RepetitionRule
from inferd.server.text.model import ServedModel
from inferd.server.text.stops import StopTables
from inferd.server.tools.parser_config import ParserConfig


class Deadline(NamedTuple):
    """The time at which an answer must be complete."""

    at_s: float
    timeout_s: float
    """The request's timeout, which the error names."""

    @classmethod
    def after(cls, arrival_s: float, timeout_s: float | None) -> Deadline | None:
        """The deadline of a request; None if it has no timeout."""
        return None if timeout_s is None else cls(arrival_s + timeout_s, timeout_s)


async def within(deadline: Deadline | None, work: Awaitable[T]) -> T:
    """The result of `work`. At the deadline, cancels `work` and raises `RequestError`. None waits without end."""
    if deadline is None:
        return await work
    limit = asyncio.timeout(deadline.at_s - time.monotonic())
    try:
        async with limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        del limit
    # Raised without the TimeoutError and without `limit`, because both refer to the task that this error ends: the
    # error would keep itself alive.
    message = (
        f"The answer was not complete within the request's timeout of {deadline.timeout_s:g} s. Ask for fewer tokens, "
        "or set a longer timeout."
    )
    raise RequestError("deadline_exceeded", message)


def until(deadline: Deadline | None, events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yields `events`. Raises `RequestError` at the deadline. Always closes `events`."""
    return events if deadline is None else _until(deadline, events)


async def _until(deadline: Deadline, events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    try:
        while True:
            # The limit is never open across a yield, so that it does not cancel work of the reader.
            try:
                event = await within(deadline, anext(events))
            except StopAsyncIteration:
                return
            yield event
    finally:
        await events.aclose()


T = TypeVar("T")


def sampling_params(
    body: GenerationFields,
    model: ServedModel,
    seed: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    bad_words: tuple[tuple[int, ...], ...],
    grammar: str,
) -> SamplingParams:
    """The parameters of choice 0, not yet checked against the model's bounds. `seed` is the caller's."""
    defaults = model.defaults
    return SamplingParams(
        max_tokens=max_tokens,
        seed=engine_seed(seed),
        min_tokens=body.min_tokens or 0,
        temperature=_first(body.temperature, defaults.temperature),
        # -1 is another spelling of "off".
        top_k=max(0, _first(body.top_k, defaults.top_k)),
        top_p=_first(body.top_p, defaults.top_p),
        min_p=_first(body.min_p, defaults.min_p),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or (),
        allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids or ())),
        bad_words=bad_words,
        eos_token_ids=() if body.ignore_eos else model.eos_token_ids,
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids or ())),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def _first(given: T | None, default: T) -> T:
    return default if given is None else given


def engine_seed(seed: int) -> int:
    """The engine's seed for a caller's signed 64-bit one: the same from 0 to `MAX_SEED`, else 53 bits of its hash.

    The hash is the low 53 bits of BLAKE2b with an 8-byte digest over the seed as an 8-byte little-endian integer (two's
    complement), read little-endian.
    """
    if 0 <= seed <= MAX_SEED:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def choose_seed() -> int:
    """A seed for a request that names none. The answer carries it, so that it can be reproduced."""
    return secrets.randbelow(MAX_SEED + 1)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice: `seed` itself for choice 0, else the low 53 bits of a hash of (seed, choice).

    The hash is BLAKE2b with an 8-byte digest over the two numbers as 8-byte little-endian integers, read little-endian.
    """
    if choice == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + choice.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


class Prioritized(Protocol):
    """A request's fields, as far as they say when it is scheduled."""

    @property
    def priority(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that sends a request, and its settings that do not come from the body."""

    tenant: str
    """Prefix blocks are shared only within one tenant; empty if there are no keys."""
    arrival_s: float
    """`time.monotonic` when the request arrived."""
    deadline: Deadline | None = None
    """When the answer must be complete; None: no deadline."""
    targets: Targets = NO_TARGETS
    """The request's own latency targets."""
    weight: float = 1.0
    """Weight of its tenant's share of the machine when other tenants want it too."""
    account: Account = UNLIMITED
    """The account that its tokens are charged to."""

    def scheduling(
        self, body: Prioritized, cache_salt: str | None = None, defaults: Targets = NO_TARGETS
    ) -> SchedulingParams:
        """How a request of this caller shares the engine with others. `defaults`: targets of a caller that has none."""
        targets = self.targets.over(defaults)
        return SchedulingParams(
            arrival_s=self.arrival_s,
            priority=body.priority or 0,
            cache_salt=f"{self.tenant}/{cache_salt}" if cache_salt else self.tenant,
            tenant=self.tenant,
            weight=self.weight,
            ttft_target_s=targets.ttft_s,
            tpot_target_s=targets.tpot_s,
        )


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids that fit the context, and how many tokens may follow them."""

    token_ids: tuple[int, ...]
    max_tokens: int
    text: str | None = None
    """The text as the caller wrote it, if it was text; read back from the ids if an answer will show it."""
    offsets: tuple[int, ...] = ()
    """Number of characters before each id, if an answer will show them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Prompts and how to continue each of them `n` times. Choice `p * n + i` is the i-th continuation of prompt p."""

    response_id: str
    engine_id: str
    """Unique among all requests; the response's own id may be a caller's."""
    prompts: tuple[Prompt, ...]
    n: int
    params: SamplingParams
    """Parameters of choice 0; `max_tokens` and `seed` are set for each choice."""
    stop: StopTables
    include_stop: bool
    skip_special_tokens: bool
    echo: bool
    scheduling: SchedulingParams
    deadline: Deadline | None = None
    """When the answer must be complete; None: no deadline."""
    repetition: RepetitionRule | None = None
    account: Account = UNLIMITED
    """The account that its tokens are charged to."""
    content_stop_ids: frozenset[int] = frozenset()
    """The caller's stop tokens, if the server looks for them: the engine cannot tell whether a token is content."""
    parser_config: ParserConfig | None = None
    """How reasoning and calls are separated from the content; None: all of the text is content."""
    tools: Mapping[str, CallerTool] = field(default_factory=dict)
    """The tools that the model is shown, by their names."""
    grammar_param: str = ""
    """Name of the request's field that the engine's grammar comes from."""
    seed: int = 0
    """The caller's seed or the one chosen for it, which the answer carries. `params` has the engine's."""
    notices: tuple[Notice, ...] = ()
    """The parts of the request that the answer leaves out or does otherwise, for its header."""

    def in_words(self, reword: Callable[[str], str]) -> GenerateRequest:
        """The same request, with its notices in the words of another API."""
        notices = tuple(Notice(notice.name, reword(notice.text)) for notice in self.notices)
        return replace(self, notices=notices)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices continue it."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def reads_prompt(self) -> bool:
        """Whether the answer shows the prompt, as text or scored."""
        return self.echo or self.params.prompt_logprobs is not None

    def prompt_of(self, choice: int) -> Prompt:
        return self.prompts[choice // self.n]

    def submits(self) -> Iterator[tuple[Submit, ...]]:
        """The choices of each prompt, in order; the choices of one prompt differ only in id and seed."""
        for first in range(0, self.num_choices, self.n):
            yield tuple(self._choices(first, self.prompt_of(first)))

    def _choices(self, first: int, prompt: Prompt) -> Iterator[Submit]:
        params = msgspec.structs.replace(self.params, max_tokens=prompt.max_tokens)
        for choice in range(first, first + self.n):
            yield Submit(
                request_id=f"{self.engine_id}-{choice}",
                prompt_ids=prompt.token_ids,
                params=msgspec.structs.replace(params, seed=choice_seed(params.seed, choice - first)),
                scheduling=self.scheduling,
            )
