"""One request and the tokens that were delivered for it: all that a new engine needs to continue it.

A token exists once it is written here. Knows no sockets, no streams and no text.
"""

from __future__ import annotations

from array import array

from msgspec import structs

from inferd.engine.api.process.flight_recorder import tag_of
from inferd.engine.api.wire.messages import Delta, Submit


class Journal:
    """The journal of one request. It lives as long as its stream and takes four bytes a token."""

    __slots__ = (
        "_num_replayed",
        "emitted_ids",
        "num_accepted",
        "num_cached",
        "num_deaths",
        "num_deaths_alone",
        "num_drafts",
        "num_known",
        "num_prompt_logprobs",
        "reached",
        "submit",
        "tag",
    )

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.tag = tag_of(submit.request_id)
        self.emitted_ids = array("i")
        self.num_prompt_logprobs = 0
        self.num_cached = 0
        """Prompt tokens found in the prefix cache, as reported to the caller with the first token."""
        self.num_known = 0
        """Prompt tokens whose KV was there then, with or without a recurrent state behind them."""
        self.num_drafts = self.num_accepted = 0
        """Guessed tokens that engines verified for it, and those that they accepted."""
        self.reached = 0
        """Number of positions up to which an engine had computed it when that engine died. 0: it is no suspect."""
        self.num_deaths = 0
        """Engines in a row that died while they computed it and before it got past `reached`."""
        self.num_deaths_alone = 0
        """Number of those engines that computed nothing else."""
        self._num_replayed = 0
        """Tokens that had been delivered when it was last sent again."""

    @property
    def is_suspect(self) -> bool:
        """Whether nothing shows yet that it got past the position at which an engine died.

        A token drawn by this engine shows it one token late, because that token has not been computed itself.
        """
        if not self.reached or len(self.emitted_ids) == self._num_replayed:
            return self.reached > 0
        return len(self.submit.prompt_ids) + len(self.emitted_ids) <= self.reached

    def record(self, delta: Delta) -> None:
        if delta.token_ids:
            if not self.emitted_ids:
                self.num_cached, self.num_known = delta.num_cached_tokens, delta.num_known_tokens
            self.emitted_ids.extend(delta.token_ids)
            if delta.num_drafts:
                self.num_drafts += delta.num_drafts
                self.num_accepted += len(delta.token_ids) - 1
        self.num_prompt_logprobs += len(delta.prompt_logprobs)

    def replay(self, *, alone: bool) -> Submit:
        """The submit for a new engine: the same seed, positions and arrival, behind the tokens already delivered.

        `alone`: it runs by itself until it is past the position at which the last engine died.
        """
        self._num_replayed = len(self.emitted_ids)
        # It was admitted once; the outage must not make it late.
        scheduling = structs.replace(
            self.submit.scheduling, ttft_target_s=None, alone_until=self.reached if alone else 0
        )
        return structs.replace(
            self.submit,
            scheduling=scheduling,
            emitted_ids=tuple(self.emitted_ids),
            num_prompt_logprobs=self.num_prompt_logprobs,
        )
