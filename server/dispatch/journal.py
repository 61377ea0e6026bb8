"""What one request is and what it has been given: all that a new engine needs to go on where the last one ended.

A token exists once it is written here. Knows no sockets, no streams and no text.
"""

from __future__ import annotations

from array import array

from msgspec import structs

from inferd.engine.api.process.flight_recorder import tag_of
from inferd.engine.api.wire.messages import Delta, Submit


class Journal:
    """One request's. Kept for as long as its stream: four bytes a token, beside what the stream itself holds."""

    __slots__ = (
        "_num_replayed",
        "emitted_ids",
        "num_cached",
        "num_deaths",
        "num_deaths_alone",
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
        """Prompt tokens found in the prefix cache, as the caller was told with the first token."""
        self.reached = 0
        """Of a suspect: positions up to which engines died that computed it. 0: it is none."""
        self.num_deaths = 0
        """Engines in a row that died while they computed it, and did not get it past there between."""
        self.num_deaths_alone = 0
        """Those of them that computed nothing else."""
        self._num_replayed = 0
        """Tokens that it had when it was last sent again."""

    @property
    def is_suspect(self) -> bool:
        """Whether nothing says yet that it got past where an engine died.

        Said by a token that this engine drew, one token late: that one has not been computed itself.
        """
        if not self.reached or len(self.emitted_ids) == self._num_replayed:
            return self.reached > 0
        return len(self.submit.prompt_ids) + len(self.emitted_ids) <= self.reached

    def record(self, delta: Delta) -> None:
        if delta.token_ids:
            if not self.emitted_ids:
                self.num_cached = delta.num_cached_tokens
            self.emitted_ids.extend(delta.token_ids)
        self.num_prompt_logprobs += len(delta.prompt_logprobs)

    def replay(self, *, alone: bool) -> Submit:
        """What a new engine is to be told: the same seed, positions and arrival, behind what was delivered.

        `alone`: it runs by itself until it is past where the last engine died.
        """
        self._num_replayed = len(self.emitted_ids)
        return structs.replace(
            self.submit,
            emitted_ids=tuple(self.emitted_ids),
            num_prompt_logprobs=self.num_prompt_logprobs,
            alone_until=self.reached if alone else 0,
            # It was taken once: the outage does not make it late.
            ttft_target_s=None,
        )
