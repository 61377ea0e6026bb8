"""A caller, a valid request, and the submits that it becomes. Only the intake makes a valid request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from inferd.engine.api.wire.messages import Submit
from inferd.engine.api.wire.params import SamplingParams, SchedulingParams
from inferd.server.auth.quotas import UNLIMITED, Account
from inferd.server.generate.deadline import Deadline
from inferd.server.generate.sampling import choice_seed
from inferd.server.schema.caller_tool import CallerTool
from inferd.server.schema.embeddings import EmbeddingRequest
from inferd.server.schema.generation import GenerationFields
from inferd.server.schema.latency import NO_TARGETS, Targets
from inferd.server.schema.notices import Notice
from inferd.server.schema.repetition import RepetitionRule
from inferd.server.text.stops import StopTables
from inferd.server.tools.parser_config import ParserConfig


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
        self, wire: GenerationFields | EmbeddingRequest, cache_salt: str | None = None, defaults: Targets = NO_TARGETS
    ) -> SchedulingParams:
        """How a request of this caller shares the engine with others. `defaults`: targets of a caller that has none."""
        targets = self.targets.over(defaults)
        return SchedulingParams(
            arrival_s=self.arrival_s,
            priority=wire.priority or 0,
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
