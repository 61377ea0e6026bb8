"""Conversations as token ids: sequences of one length, packed whole after whole, with the ids that are to be learned.

Owns which token is a target: what the model itself has to say, up to the end mark. Knows nothing about the model.
"""

import random
from collections.abc import Iterator

import torch
from tokenizers import Tokenizer

from inferd.engine.tiny.conversation import TEXT_END, Conversation, render
from inferd.engine.tiny.mixture import Mixture
from inferd.engine.tiny.tokenizer import id_of

DOCUMENT_SHARE = 0.03
# Sequence lengths and their shares: short ones hold one or two conversations from their first token on, as they are
# served; long ones teach the model to pass over what lies far back.
LENGTHS, LENGTH_SHARES = (128, 512, 1024, 2048), (75, 18, 5, 2)


class Batches:
    """Endless batches of `num_tokens` tokens: (input ids [B, T], target ids [B, T] with -100 where none is learned).

    The first `num_early` batches are mostly tasks.
    """

    def __init__(self, mixture: Mixture, tokenizer: Tokenizer, num_tokens: int, seed: int, num_early: int = 0) -> None:
        self._mixture, self._tokenizer, self._num_tokens = mixture, tokenizer, num_tokens
        self._num_early_left = num_early
        self._rng = random.Random(seed)
        self._text_end = id_of(tokenizer, TEXT_END)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            self._num_early_left -= 1
            length = self._rng.choices(LENGTHS, LENGTH_SHARES)[0]
            rows = [self._sequence(length + 1) for _ in range(self._num_tokens // length)]
            ids = torch.tensor([row_ids for row_ids, _ in rows])
            targets = torch.tensor([row_targets for _, row_targets in rows])
            yield ids[:, :-1].contiguous(), targets[:, 1:].contiguous()

    def _sequence(self, length: int) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        targets: list[int] = []
        while len(ids) < length:
            more_ids, more_targets = self._document() if self._rng.random() < DOCUMENT_SHARE else self._conversation()
            ids += more_ids
            targets += more_targets
        return ids[:length], targets[:length]

    def _document(self) -> tuple[list[int], list[int]]:
        ids = [*self._encode(self._mixture.draw_document()), self._text_end]
        return ids, [-100, *ids[1:]]

    def _conversation(self) -> tuple[list[int], list[int]]:
        is_early = self._num_early_left >= 0
        conversation = self._mixture.draw_early() if is_early else self._mixture.draw()
        return encode_conversation(conversation, self._tokenizer)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def encode_conversation(conversation: Conversation, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the chat template gives, then a text end; a target is -100 but in the assistant's own words."""
    ids: list[int] = []
    targets: list[int] = []
    for header, body in render(conversation):
        message = tokenizer.encode(f"{header}{body}\n", add_special_tokens=False).ids
        num_header = len(tokenizer.encode(header, add_special_tokens=False).ids)
        is_own = header.endswith("assistant\n")
        ids += message
        targets += [-100] * num_header + message[num_header:-1] + [-100] if is_own else [-100] * len(message)
    return [*ids, id_of(tokenizer, TEXT_END)], [*targets, -100]
